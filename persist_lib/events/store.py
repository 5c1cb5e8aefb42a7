"""Where a log is: a specifier, and what is opened there."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import NamedTuple

from persist_lib.arguments import did_you_mean, not_pickled, parse_integer, shown
from persist_lib.errors import HIDDEN, InvalidUsage, Missing, NotFound, redacted
from persist_lib.events.api import EVENTS, MOST_ID, Event, Held, Kind, Opening, RecordStore, Scans, Store, Verifies
from persist_lib.events.log import SNAPSHOTS, Log, Whole, check_limit
from persist_lib.events.record import check_follows
from persist_lib.events.stores.shared import take_option
from persist_lib.events.writer import LogWriter, open_writer
from persist_lib.location.objects.target import CLOUDS
from persist_lib.location.scheme import with_extra
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import Resource

DEFAULT = "disk"
PIECE = re.compile(r"((?:[^:\\]|\\[:\\]|\\)*)(:|\Z)")
ESCAPE = re.compile(r"\\([:\\])")


class Specifier(NamedTuple):
    """A kind of store, and its options. Shown without passwords."""

    kind: str
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """As it is written, passwords included."""
        return ":".join([self.kind, *map(_escaped, self.options)])

    def __str__(self) -> str:
        # together, as colons that were not escaped have cut a URL into several options.
        plain = ":".join([self.kind, *self.options])
        return self.text() if redacted(plain) == plain else redacted(plain)

    def __repr__(self) -> str:
        return f"Specifier({str(self)!r})"


def parse_specifier(text: object) -> Specifier:
    """Take a specifier apart. Raises InvalidUsage, which quotes no options, as they may hold a password."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidUsage(f"a store of events is kind[:options], as in 'disk:./ledger': got {_kind_of(text)}")
    if not text.isprintable():
        raise InvalidUsage(f"a store of events has unprintable characters: {_kind_of(text)}")
    kind, *options = _split(text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]*", kind):
        raise InvalidUsage(f"a store of events begins with its kind, as in 'disk:./ledger': got {_kind_of(text)}")
    return Specifier(kind, tuple(options))


def _split(text: str) -> list[str]:
    pieces = []
    for found in PIECE.finditer(text):
        pieces.append(ESCAPE.sub(r"\1", found[1]))
        if not found[2]:  # else the empty text behind the last one matches, too
            break
    return pieces


def _escaped(option: str) -> str:
    return option.replace("\\", "\\\\").replace(":", "\\:")


def _kind_of(text: object) -> str:
    """A specifier as messages quote it when its options cannot be taken apart."""
    if not isinstance(text, str):
        return shown(text)
    kind, colon, _ = text.partition(":")
    return shown(kind if "@" not in kind else HIDDEN) + (f" and options ({HIDDEN})" if colon else "")


ENTRY_POINTS = "persist.events"
STORES = "persist_lib.events.stores"


class _BuiltIn(NamedTuple):
    """A kind of this library: its module, which is loaded when it is used, the extra it needs, and its options."""

    module: str
    extra: str | None
    options: str


BUILT_IN: Mapping[str, _BuiltIn] = {
    "disk": _BuiltIn("disk", None, "a directory (./events)"),
    "sqlt": _BuiltIn("sqlt", None, "a file (./events.sqlite)"),
    "lmdb": _BuiltIn("lmdb", "lmdb", "a directory (./events.lmdb), map=BYTES of address space"),
    "rock": _BuiltIn("rock", "rocksdb", "a directory (./events.rock)"),
    "pg": _BuiltIn("pg", "postgres", r"a URL of PostgreSQL with \: for each colon, and a name (events)"),
    **{
        scheme: _BuiltIn("objects", cloud.extra, rf"a URL of {cloud.name} with \: for each colon")
        for scheme, cloud in CLOUDS.items()
    },
    "persist": _BuiltIn("persist", None, r"a location's URL with \: for each colon, a shard (events), consensus=URL"),
}


def known_kinds() -> dict[str, str]:
    """Each kind that can be named, and what its options are."""
    own = {name: built_in.options for name, built_in in BUILT_IN.items()}
    return {point.name: f"of {point.value}" for point in entry_points(group=ENTRY_POINTS)} | own


def load_kind(name: str) -> Kind:
    """The kind of this name. Raises InvalidUsage: for an unknown one, or one whose extra is not installed."""
    if (built_in := BUILT_IN.get(name)) is not None:
        what, extra = f"the event store {name}", built_in.extra or ""
        found = with_extra(f"{STORES}.{built_in.module}", what, extra)
        if name in CLOUDS:
            with_extra(CLOUDS[name].kind[0], what, extra)
        kind: Kind = found.KINDS[name] if name in CLOUDS else found.KIND
        return kind
    added = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in added:
        kinds = ", ".join(_listed(kind) for kind in sorted({*BUILT_IN, *added}))
        raise InvalidUsage(
            f"there is no kind of event store called {name!r}. {did_you_mean(name, [*BUILT_IN, *added])}There are: "
            f"{kinds}. Others are added by packages with an entry point in the group {ENTRY_POINTS!r}",
            kind=name,
        )
    found = added[name].load()
    if not isinstance(found, Kind):
        raise InvalidUsage(f"the entry point of {name} is no persist_lib.events.Kind: got {shown(found)}", kind=name)
    return found


def _listed(name: str) -> str:
    extra = BUILT_IN[name].extra if name in BUILT_IN else None
    return name if extra is None else f"{name} (pip install 'persist-lib[{extra}]')"


class LogStore(Resource):
    """See `api.Store`. Each writer and each reader opens a driver of its own."""

    def __init__(self, specifier: Specifier, kind: Kind, runtime: Runtime) -> None:
        self.specifier = specifier
        self._kind, self._runtime = kind, runtime
        self._options, limits = take_option(specifier.options, "limit")
        if limits and (len(limits) > 1 or not limits[0].isdecimal() or len(limits[0]) > 12):
            raise InvalidUsage(f"limit= is given once, as a number of bytes, as in limit=65536: got {shown(limits)}")
        self._limit = check_limit(int(limits[0]) if limits else None)
        self._records: RecordStore | None = None

    def writer(self, *, owner: str = "") -> LogWriter:
        return open_writer(self.open_driver(create=True), str(self.specifier), self._runtime, owner)

    def reader(self) -> LogReader:
        records = self.open_driver(create=False)
        try:
            return LogReader(records, str(self.specifier))
        except BaseException:
            records.close()
            raise

    @property
    def records(self) -> RecordStore:
        if self._records is None:
            self._records = self.open_driver(create=False)
        return self._records

    def open_driver(self, *, create: bool) -> RecordStore:
        """The driver, which the caller closes."""
        records = self._kind.open(self._options, Opening(create, self._runtime))
        if self._limit is not None:
            records.limit = self._limit if records.limit is None else min(self._limit, records.limit)
        return records

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def __repr__(self) -> str:
        return f"<events in {self.specifier}>"


def open_store(specifier: str | Specifier = DEFAULT, *, runtime: Runtime | None = None) -> LogStore:
    r"""Name a store of events, without I/O: `kind[:options]`, as in `disk:./ledger` (`\:` is a colon in an option).

    The option `limit=N` bounds the bytes of a record: longer payloads are kept in fragments. Raises InvalidUsage for an
    unknown kind, with those that there are, and for one whose extra is not installed.
    """
    parsed = specifier if isinstance(specifier, Specifier) else parse_specifier(specifier)
    return LogStore(parsed, load_kind(parsed.kind), runtime or Runtime())


def name_of(store: Store) -> str:
    """The specifier of a store, without a password; of one without a specifier its type."""
    specifier = getattr(store, "specifier", None)
    return type(store).__name__ if specifier is None else str(specifier)


def log_of(store: Store) -> bytes:
    """The id of the log in a store, which no other log has. Raises NotFound where there is none.

    The driver is closed again. While a process has a connection to a SQLite database that only reads (that of a
    shard in `file:`), its other connections to it may not write either.
    """
    try:
        return store.records.log
    finally:
        store.close()


def find_log(store: Store) -> bytes | None:
    """The same; None where there is none."""
    try:
        return log_of(store)
    except NotFound:
        return None


class Chosen(NamedTuple):
    """The arguments `store` and `source` of a loop. They open nothing yet."""

    store: Store
    source: Store | None


def choose(given_input: str | None = None, given_output: str | None = None) -> Chosen:
    """Take a program's options `-i` and `-o`, which are specifiers of stores. Each defaults to `disk` (./events).

    If both name the same store, the log is there. Otherwise it is moved from the input to the output first; an input
    that was not given counts only if there is a log. So with `-o` alone, a log in ./events is taken along, and the same
    command continues in the output from then on. Raises InvalidUsage for what names no store.
    """
    source, target = (parse_specifier(DEFAULT if given is None else given) for given in (given_input, given_output))
    store = open_store(target)
    if source == target:
        return Chosen(store, None)
    origin = open_store(source)
    if given_input is None and find_log(origin) is None:
        return Chosen(store, None)
    return Chosen(store, origin)


class LogReader(Resource):
    """See `api.Reader`."""

    def __init__(self, records: RecordStore, where: str) -> None:
        self._records, self._where, self._log = records, where, Log(records, where)
        self._is_closed = False
        self.last = records.last()
        self._log.check_evidence(self.last)

    __reduce__ = not_pickled("a reader of events", "Open the store there.")

    def refresh(self) -> int:
        self._check()
        self.last = self._records.last()
        return self.last

    @contextmanager
    def read(self, id: int) -> Iterator[memoryview]:  # noqa: A002
        id_ = parse_integer(id, "id", 1, MOST_ID)
        self._check()
        if id_ > self.last and id_ > self.refresh():
            raise NotFound(f"there is no event {id_} in {self._where}: the last one is {self.last}", id=id_)
        whole = self._log.fetch(EVENTS, id_)
        if whole is None:
            raise self._missing(id_)
        try:
            yield whole.payload
        finally:
            whole.release()

    def replay(self, from_id: int = 1, through: int | None = None) -> Iterator[Event]:
        first = parse_integer(from_id, "from_id", 1, MOST_ID)
        self._check()
        last = self.last if through is None else parse_integer(through, "through", 0, MOST_ID)
        if last > self.last and last > self.refresh():
            raise NotFound(f"there is no event {last} in {self._where}: the last one is {self.last}", id=last)
        return self._replay(first, last)

    def _replay(self, first: int, last: int) -> Iterator[Event]:
        if first > last:
            return
        digest, epoch = self._log.digest_of(first - 1), 0
        for id_, whole in enumerate(self._wholes(first, last), first):
            try:
                check_follows(whole.label, digest, epoch, f"event {id_} of {self._where}")
                digest, epoch = whole.label.digest, whole.label.epoch
                yield Event(id_, whole.payload)
            finally:
                whole.release()

    def _wholes(self, first: int, last: int) -> Iterator[Whole]:
        if not isinstance(self._records, Scans):
            for id_ in range(first, last + 1):
                if (whole := self._log.fetch(EVENTS, id_)) is None:
                    raise self._missing(id_)
                yield whole
            return
        found = _Ahead(self._records.scan(first, last))
        try:
            for id_ in range(first, last + 1):
                held = found.first_of(id_)
                if held is None:
                    raise self._missing(id_)
                yield self._log.put_together(held, found.rest_of(id_))
        finally:
            found.close()

    def newest_snapshot(self, at_most: int | None = None) -> tuple[int, bytes] | None:
        self._check()
        most = self.last if at_most is None else parse_integer(at_most, "at_most", 0, MOST_ID)
        return self._log.newest_snapshot(min(most, self.last))

    def read_mark(self, name: str) -> bytes | None:
        self._check()
        return self._log.read_mark(name)

    def verify(self) -> None:
        """Check what reading the events does not touch: snapshots, and what the driver alone can tell."""
        self._check()
        if isinstance(self._records, Verifies):
            self._records.verify()
        for id_ in self._records.ids(SNAPSHOTS):
            self._log.label_of(SNAPSHOTS, id_)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._records.close()

    def _check(self) -> None:
        if self._is_closed:
            raise InvalidUsage(f"the reader of {self._where} was closed; open another one")

    def _missing(self, id_: int) -> Missing:
        return Missing(
            f"event {id_} of {self._where} is missing, and there are events behind it: the last one is {self.last}. "
            "Nothing was changed; restore it from a copy",
            key=f"{id_}:0",
        )

    def __repr__(self) -> str:
        return f"<reader of {self._where}, last {self.last}>"


class _Ahead:
    """Records of a scan, with a look at the next one."""

    def __init__(self, scan: Iterator[Held]) -> None:
        self._scan = scan
        self._next: Held | None = None

    def close(self) -> None:
        """End the scan, if it is one that can be ended."""
        if self._next is not None:
            self._next.release()
        if isinstance(self._scan, Generator):
            self._scan.close()

    def _peek(self) -> Held | None:
        if self._next is None:
            self._next = next(self._scan, None)
        return self._next

    def _take(self) -> Held | None:
        held, self._next = self._next, None
        return held

    def first_of(self, id_: int) -> Held | None:
        """Fragment 0 of an event, behind what is left of those before it."""
        while (held := self._peek()) is not None and held.key.id < id_:
            held.release()
            self._take()
        return self._take() if held is not None and held.key == (EVENTS, id_, 0) else None

    def rest_of(self, id_: int) -> Iterator[Held]:
        """The other fragments of the event that are there."""
        while (held := self._peek()) is not None and held.key.id == id_:
            self._take()
            yield held
