"""What a table needs of what carries it; and of a shard or a collection what it has open: a writer and a reader."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from persist_lib.catalog.describe import Description
from persist_lib.convert.filling import Filling
from persist_lib.errors import InvalidUsage, LeaseExpired, NotComplete, SinceViolation
from persist_lib.frontier import Antichain, at
from persist_lib.maintain.duties import Maintained
from persist_lib.maintain.publish.steps import Format, Published, Withdrawn
from persist_lib.relation.conversions import Doors
from persist_lib.relation.held import kept_of
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.statements import Done, Insert, Statement
from persist_lib.relation.verbs import execute
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import Downgraded
from persist_lib.shard.machine import as_one_call

if TYPE_CHECKING:
    from persist_lib.catalog.collection_arguments import Retention
    from persist_lib.catalog.deleted_keys import Span
    from persist_lib.client import Client
    from persist_lib.relation.changes import Changes
    from persist_lib.relation.listen import Listener
    from persist_lib.times import TimeLike

Make = Callable[[Schema], Statement]
"""Makes a statement for the columns that the table has."""


class KeptDeletes(msgspec.Struct, frozen=True):
    """How a table keeps deleted keys: the column by which changes are ordered, and for how long, in milliseconds.

    `table` is the name of the table that has them, `shards` those that have its rows.
    """

    column: str
    span_ms: int
    table: str
    shards: tuple[str, ...]


class TableDescription(msgspec.Struct, frozen=True):
    """What a table is, and how far it has come. Times from `since` on and before `upper` can be read.

    `retention` is how many times of history are kept behind upper by a policy; None where there is none. `holds` are by
    name, with the time from which on each keeps history. `shards` are those that have its rows now. `collection` is
    what the catalog says of it, its renditions among others; None where one shard carries it. `keep_deletes` is how it
    keeps deleted keys; None: not at all.
    """

    name: str
    carrier: str
    schema: Schema
    since: Antichain
    upper: Antichain
    retention: int | None
    holds: dict[str, Antichain]
    shards: tuple[str, ...]
    collection: Description | None = None
    keep_deletes: KeptDeletes | None = None


class Wal(NamedTuple):
    """What a WAL has of a table: the shard that it is, the table's id there, and up to which time it was applied."""

    shard: str
    table: str
    until: int


class Carrier(ABC):
    """What a table needs of what carries it. `kind` is `shard`, `collection`, or `timeline NAME`."""

    kind: str
    schema: Schema
    client: Client
    name: str

    def filling(self, *, is_dry: bool = False) -> Filling:  # noqa: ARG002 - of those that take numbers
        """What fills columns in one call. In a dry run it takes no numbers."""
        return Filling(self.client.runtime)

    def append(self, rows: object, *, token: bytes | None, timeout: float | None, dry_run: bool) -> Done:
        """Add rows. An append does not say what becomes of keys, so it counts none."""
        made = partial(Insert, self.name, rows=rows, filling=self.filling(is_dry=dry_run))
        done = self.execute(made, token=token, timeout=timeout, dry_run=dry_run)
        return msgspec.structs.replace(done, inserted=0)

    @abstractmethod
    def execute(self, make: Make, *, token: bytes | None, timeout: float | None, dry_run: bool = False) -> Done: ...
    @abstractmethod
    def read(self, as_of: TimeLike | None, asked: Asked, *, newest: bool, timeout: float | None) -> Any: ...
    @abstractmethod
    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes: ...
    @abstractmethod
    def listen(self, as_of: TimeLike | None, *, until: object, replace: bool, timeout: float | None) -> Listener: ...
    @abstractmethod
    def restore(self, to: TimeLike, *, dry_run: bool, timeout: float | None) -> Done: ...
    @abstractmethod
    def describe(self) -> TableDescription: ...
    @abstractmethod
    def evolve(self, schema: Schema, *, dry_run: bool) -> tuple[str, ...]: ...
    @abstractmethod
    def set_retention(self, distance: Retention, *, dry_run: bool) -> Downgraded: ...
    @abstractmethod
    def set_keep_deletes(self, column: str | None, span: Span, *, dry_run: bool) -> None: ...
    @abstractmethod
    def kept_by(self) -> str:
        """The shard that keeps the table's history."""

    @abstractmethod
    def shards_everywhere(self) -> list[str]:
        """All shards that may have any of its rows, now or earlier."""

    @abstractmethod
    def give_up(self, until: int, timeout: float | None) -> None:
        """Move the hold of the table's own retention to this time, or to the newest one that is before it."""

    @abstractmethod
    def settle(self, timeout: float | None, *, dry_run: bool) -> Wal | None:
        """Bring all that was written to the shards of the table. Answers the WAL in which it was before, if any."""

    @abstractmethod
    def hold_of(self, hold: object) -> tuple[str, str]:
        """The shard that keeps the table's history, and the checked name of a hold of its users."""

    @abstractmethod
    def promote(self, shards: int | None, timeline: str | None, *, dry_run: bool, **how: Any) -> str:
        """Raise what carries it. Answers the id of the collection that carries it then; empty where it is this one."""

    @abstractmethod
    def publish(
        self, format_: Format, at: TimeLike | None, *, keep: int | None, follows: bool | None, dry_run: bool
    ) -> Published: ...
    @abstractmethod
    def withdraw(self, format_: Format, *, dry_run: bool) -> Withdrawn: ...
    @abstractmethod
    def rename(self, to: str) -> None: ...
    @abstractmethod
    def drop(self, *, dry_run: bool) -> tuple[str, ...]: ...
    @abstractmethod
    def maintain(self, *, dry_run: bool) -> dict[str, Maintained]: ...
    @abstractmethod
    def writer(self) -> Any:
        """A writer of its own, with which callers bring the times."""

    @abstractmethod
    def _let_all_go(self) -> None:
        """Let go of what this client keeps of the table, and no answer needs, before history goes."""

    @abstractmethod
    def close(self) -> None: ...


T = TypeVar("T")
Weak = dict[int, weakref.ref[Any]]
"""Objects while they are there. A WeakSet may not be gone through while another thread adds to it."""
OPEN: Weak = {}
"""All that have handles, or had: what gives history up lets go of what others of the same client do not need."""


class OpenHandles(Carrier):
    """The rows of a shard or a collection, through a writer and a reader that are opened when first needed."""

    _handles: dict[str, Any]
    _answers: Weak
    _calls: list[None]
    _used_ms: int
    _newest: int

    @abstractmethod
    def _open(self, purpose: str) -> Any:
        """A new handle, to `read` or to `write`."""

    def _begin(self) -> None:
        """With each renewal of leases, let go of history that no answer needs."""
        self._handles = {}
        self._answers, self._calls = {}, []
        self._used_ms = self._newest = 0
        leases, key, self_ = self.client.leases, object(), weakref.ref(self)

        def tick() -> None:
            if (carrier := self_()) is not None:
                carrier.let_go()
            else:  # here and not in a finalizer, which may come while this thread has the lock of the leases
                leases.every_tick(key, None)

        _remember(OPEN, self)
        leases.every_tick(key, tick)

    def let_go(self, *, now: bool = False) -> None:
        """Let go of the history before the newest time read, unless an answer is being read; later of the lease, too.

        With `now`, also of the lease at once. A listener has a lease of its own, and ends with this one.
        """
        reader = self._handles.get("read")
        live = [answer for answer in _alive(self._answers) if not getattr(answer, "is_released", False)]
        if reader is None or self._calls or any(isinstance(answer, Doors) for answer in live):
            return
        is_used = self.client.runtime.clock_ms() - self._used_ms < self.client.config.lease_ms
        if live or (is_used and not now):
            kept_of(reader).let_go(at(self._newest))
        elif self._handles.pop("read", None) is not None:
            reader.close()

    def append(self, rows: object, *, token: bytes | None, timeout: float | None, dry_run: bool) -> Done:
        if dry_run:
            return super().append(rows, token=token, timeout=timeout, dry_run=True)
        done = self._writing().append_now(rows, token=token, timeout=timeout)
        return Done(done.upper.time - 1 if done.token else None, done.count, done.token, done.cost)

    def execute(self, make: Make, *, token: bytes | None, timeout: float | None, dry_run: bool = False) -> Done:
        done = execute(self._writing(), make, token=token, timeout=timeout, dry_run=dry_run)
        return Done(**{field: getattr(done, field) for field in Done.__struct_fields__})

    def settle(self, timeout: float | None, *, dry_run: bool) -> None:  # noqa: ARG002 - all of it is there
        """Retire the writer, which may have uploaded rows that it did not append."""
        if not dry_run and (write := self._handles.pop("write", None)) is not None:
            write.close()

    def writer(self) -> Any:
        return self._open("write")

    def _writing(self) -> Any:
        """The writer, for changes whose time it finds itself."""
        write = self._handle("write")
        if getattr(write, "mode", "") == "append":
            raise InvalidUsage(
                f"table {self.name!r} is a collection that is written by appends of identical data, whose times are "
                "given: writer().append(rows, lower, upper), or at a shell add --lower and --upper to persist append. "
                "Nothing was written",
                table=self.name, carrier=self.kind,
            )  # fmt: skip
        return write

    def read(self, as_of: TimeLike | None, asked: Asked, *, newest: bool, timeout: float | None) -> Any:
        longest, wanted = 0.0 if as_of is not None and timeout is None else timeout, asked._asdict()
        try:
            return self._reading(lambda reader: reader.snapshot(as_of, timeout=longest, **wanted))
        except NotComplete:
            if not newest:
                raise
        return self._reading(lambda reader: reader.snapshot(timeout=timeout, **wanted))

    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes:
        return self._reading(lambda reader: reader.changes(from_, to, timeout=timeout))

    def listen(self, as_of: TimeLike | None, *, until: object, replace: bool, timeout: float | None) -> Listener:
        more = {"replace": True} if replace and self.kind != "shard" else {}  # a shard is never handed over
        return self._reading(lambda reader: reader.listen(as_of, until=until, timeout=timeout, **more))

    def close(self) -> None:
        while self._handles:
            with suppress(KeyError):  # another thread was first
                self._handles.popitem()[1].close()

    def _handle(self, purpose: str) -> Any:
        if (handle := self._handles.get(purpose)) is None:
            # This takes no lock, as a fork could happen while another thread holds it. Of two that open one at
            # once, both get the first one.
            opened = self._open(purpose)
            handle = self._handles.setdefault(purpose, opened)
            if handle is not opened:
                opened.close()
        return handle

    def _reading(self, call: Callable[[Any], T]) -> T:
        """Do something with the reader; once more with a new one if its lease has ended, or it has let go of that time.

        What it answers is read later, so until then it keeps what that needs.
        """
        self._calls.append(None)
        try:
            answer = as_one_call(partial(self._answer, call))
            self._newest = max(self._newest, getattr(answer, "as_of", 0), getattr(answer, "to", 0))
            _remember(self._answers, answer)
            return answer
        finally:
            self._calls.pop()

    def _answer(self, call: Callable[[Any], T]) -> T:
        self._used_ms, reader = self.client.runtime.clock_ms(), self._handle("read")
        try:
            return call(reader)
        except (LeaseExpired, SinceViolation) as error:
            if isinstance(error, SinceViolation) and reader.since <= self._since():
                raise
            if self._handles.get("read") is reader:
                self._handles.pop("read", None)
            if isinstance(error, LeaseExpired):
                reader.close()
            return call(self._handle("read"))

    def _let_all_go(self) -> None:
        for carrier in _alive(OPEN):
            if carrier.client.leases is self.client.leases and carrier.name == self.name:
                carrier.let_go(now=True)
        self.client.heartbeat()  # retires those of tables that were dropped unclosed

    @abstractmethod
    def _since(self) -> Antichain:
        """From which time on a new reader could read."""


def _remember(found: Weak, one: Any) -> None:
    key = id(one)
    found[key] = weakref.ref(one, lambda _: found.pop(key, None))


def _alive(found: Weak) -> list[Any]:
    return [one for ref in list(found.values()) if (one := ref()) is not None]
