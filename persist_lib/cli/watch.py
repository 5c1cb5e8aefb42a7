"""A live view of shards, at one request a look and one more for each shard that has moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.session import Session
from persist_lib.cli.table_layout import Fitted
from persist_lib.core import units
from persist_lib.errors import Damage, InvalidUsage, NotFound, PersistError
from persist_lib.ids import SeqNo, parse_shard_id
from persist_lib.times import PER_SECOND, Times

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from rich.live import Live

    from persist_lib.client import Client
    from persist_lib.core.state import State, Version

THREADS = 8
LOG_ROWS = 1024
"""The most rows of a shard's log that are read to tell how much was appended between two looks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A shard at a look. `appended` is how many updates came since the look before; None: the log does not tell."""

    shard: str
    version: Version | None = None
    appended: int | None = 0
    debt: int = 0
    moved: bool = True
    problem: str = ""

    def value(self, seconds: float) -> dict[str, Any]:
        """The same for machines. `seconds` is how long ago the look before was."""
        if self.version is None:
            return {"shard": self.shard, "problem": self.problem}
        state = self.version.state
        rate = None if self.appended is None or not seconds else self.appended / seconds
        return {
            "shard": self.shard, "seqno": self.version.seqno, "moved": self.moved, "since": jsonable(state.since),
            "upper": jsonable(state.upper), "lag": lag(state), "updates": state.count, "appended": self.appended,
            "appended_per_s": rate, "batches": len(state.trace), "debt": self.debt, "readers": len(state.readers),
            "holds": len(state.holds), "finished": state.is_finished(), **clock(state.times),
        }  # fmt: skip


class Watcher:
    """Looks at shards again and again: those that are named, or all. Their newest seqnos come in one request."""

    def __init__(self, client: Client, names: Sequence[str] = ()) -> None:
        self._client = client
        self._names = [str(parse_shard_id(name)) for name in dict.fromkeys(names)]
        self._seen: dict[str, Seen] = {}
        self._heads: dict[str, SeqNo] = {}

    def look(self) -> list[Seen]:
        """Look at the shards, in the order of their names. Raises NotFound for a name that no shard has."""
        heads = self._client.consensus.heads(self._names or None)
        for name in self._names:
            if name not in heads:
                raise NotFound(f"there is no shard {name!r} in {self._client.url}", shard=name)
        names = self._names or sorted(heads)
        moved = [name for name in names if heads[name] != self._heads.get(name)]
        found = {seen.shard: seen for seen in self._read_all(moved)}
        looked = {name: one.version.seqno for name, one in found.items() if one.version is not None}
        self._heads = {name: looked.get(name, heads[name]) for name in names}  # what was read may be newer than a head
        self._seen = {
            name: found.get(name) or replace(self._seen[name], appended=0, moved=False) for name in names
        }  # fmt: skip
        return [self._seen[name] for name in names]

    def _read_all(self, names: Sequence[str]) -> list[Seen]:
        if len(names) < 2:
            return [self._read(name) for name in names]
        with self._client.runtime.pool(min(THREADS, len(names)), "persist-watch") as pool:
            return list(pool.map(self._read, names))

    def _read(self, name: str) -> Seen:
        from persist_lib.core.plan.compaction import plan_compaction

        client, before = self._client, self._seen.get(name)
        try:
            version = client.inspect(name)
            came: int | None = 0
            if before is not None and before.version is not None:
                came = appended(client, name, before.version, version)
        except PersistError as error:
            return Seen(name, problem=f"{type(error).__name__}: {error.message}")
        return Seen(name, version, came, plan_compaction(version.state, client.policy(name=name)).debt)


def appended(client: Client, shard: str, before: Version, after: Version) -> int | None:
    """How many updates were appended between two versions; None if the rows that say so are gone, or too many."""
    from persist_lib.format.log import decode_row
    from persist_lib.shard.log import row_name

    new = [batch for batch in after.state.trace if batch.hi > before.state.next_id]
    if all(batch.lo >= before.state.next_id and batch.hi == batch.lo + 1 for batch in new):
        return sum(batch.count for batch in new)  # none of them was merged yet
    number = after.seqno - before.seqno
    rows = client.consensus.scan(shard, SeqNo(before.seqno + 1), min(number, LOG_ROWS))
    if len(rows) < number or rows[0].seqno != before.seqno + 1:
        return None
    found = [decode_row(row.data, row_name(parse_shard_id(shard), row.seqno)) for row in rows]
    edits = [diff.trace for row in found for diff in row.diffs]
    return sum(batch.count for edit in edits if edit and not edit.removed for batch in edit.added)


def lag(state: State) -> int | None:
    """How many times since is behind upper; None if one of them is empty."""
    since, upper = state.since.time, state.upper.time
    return None if since is None or upper is None else upper - since


class Watching(NamedTuple):
    """How shards are watched."""

    watch: Annotated[bool, typer.Option("--watch", help="Look again and again.")] = False
    every: Annotated[
        float | None,
        typer.Option(min=0.05, max=86_400, metavar="SECONDS", help="With --watch: look this often. Default: 2."),
    ] = None
    looks: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="COUNT", help="With --watch: end after so many looks, not at Ctrl-C."),
    ] = None

    def checked(self) -> bool:
        """Whether shards are watched. Raises InvalidUsage for options that go with --watch alone."""
        if not self.watch and (self.every or self.looks):
            raise InvalidUsage("--every and --count go with --watch")
        if self.every is not None and not self.every > 0:  # NaN passes the check of the option
            raise InvalidUsage(f"--every is a number of seconds: got {self.every}", every=self.every)
        return self.watch


def run(session: Session, client: Client, names: Sequence[str], watching: Watching) -> None:
    """Watch these shards, or all, until there were so many looks, or Ctrl-C."""
    with _screen(session) as draw:
        _watch(session, Watcher(client, names), watching.every or 2.0, watching.looks, draw)


def _watch(session: Session, watcher: Watcher, every: float, count: int | None, draw: Draw | None) -> None:
    looks, last = 0, 0.0
    while True:
        try:
            found = watcher.look()
        except (Damage, NotFound):
            raise
        except PersistError as error:
            if not looks:
                raise
            session.complain(error, "trying again: ")  # a store may be away for a while
            found = []
        now = time.monotonic()
        seconds, last = (now - last if looks else 0.0), now
        looks += 1
        if draw is not None:
            draw(found, seconds)
        elif session.as_json:
            session.answer({"seconds": round(seconds, 3), "shards": [seen.value(seconds) for seen in found]})
        else:
            session.show(*(line_of(seen, seconds) for seen in found if seen.moved))
        if looks == count:
            return
        time.sleep(every)


Draw = Callable[[Sequence[Seen], float], None]


@contextmanager
def _screen(session: Session) -> Iterator[Draw | None]:
    """What draws in a terminal; None elsewhere."""
    if session.as_json or not session.out.is_terminal:
        yield None
        return
    from rich.live import Live  # loaded only when there is a terminal

    with Live(console=session.out, auto_refresh=False) as live:
        yield _Screen(session.out, live).draw


class _Screen:
    """A table that is redrawn in place, and stays when it ends."""

    def __init__(self, out: Console, live: Live) -> None:
        self._out, self._live, self._looks = out, live, 0
        self._moved: dict[str, int] = {}

    def draw(self, found: Sequence[Seen], seconds: float) -> None:
        self._looks += 1
        if self._looks > 1:
            self._moved.update((seen.shard, self._looks) for seen in found if seen.moved)
        if found:
            self._live.update(self._fitting(found, seconds), refresh=True)

    def _fitting(self, found: Sequence[Seen], seconds: float) -> RenderableType:
        """All shards; or as many as the terminal has lines for, first those that moved last, and how many there are."""
        room = self._out.height - 1
        first = sorted(found, key=lambda seen: (seen.version is not None, -self._moved.get(seen.shard, 0)))
        number = min(len(found), max(room, 1))
        while True:
            names = {seen.shard for seen in first[:number]}
            table = table_of([seen for seen in found if seen.shard in names], seconds)
            is_cut = number < len(found)
            said = (
                f"{number:,} of {len(found):,} shards: those that moved last. Name shards to watch these"
                if is_cut
                else ""
            )
            lines = len(self._out.render_lines(table, pad=False)) + is_cut
            if lines <= room or number == 1:
                return Group(table, Text(said, "dim", no_wrap=True, overflow="ellipsis")) if is_cut else table
            number = max(1, min(number - 1, number * room // lines))


def table_of(found: Sequence[Seen], seconds: float) -> Fitted:
    """One line a shard."""
    columns = ("shard", "version", "since", "upper", "lag", "updates", "new/s", "batches", "debt", "held by")
    table = Fitted(columns, frozenset(columns[1:-1]))
    for seen in found:
        if seen.version is None:
            table.add_row(seen.shard, *[""] * 8, Text(f"cannot be read: {seen.problem}", "red"))
            continue
        cells = _cells(seen, seconds)
        table.add_row(seen.shard, *cells.values(), style="" if seen.moved else "dim")
    return table


def line_of(seen: Seen, seconds: float) -> str:
    """The same as a line, for an output that is no terminal."""
    if seen.version is None:
        return f"{seen.shard} cannot be read: {seen.problem}"
    return f"{seen.shard} " + "  ".join(f"{name} {cell}" for name, cell in _cells(seen, seconds).items())


def _length(behind: int, state: State) -> str:
    """How many times since is behind upper; of a clock how long, and `all` if nothing was given up."""
    if state.times is None:
        return units.number(behind)
    return units.duration(behind * 1_000 // PER_SECOND[state.times]) if state.since.time else "all"


def _cells(seen: Seen, seconds: float) -> dict[str, str]:
    assert seen.version is not None  # noqa: S101 - for the type checker
    state, rate = seen.version.state, seen.value(seconds)["appended_per_s"]
    behind, times = lag(state), Times(state.times, lambda: 0)
    held = ((len(state.readers), "reader"), (len(state.holds), "hold"))
    return {
        "version": f"v{seen.version.seqno}", "since": times.show(state.since), "upper": times.show(state.upper),
        "lag": "-" if behind is None else _length(behind, state), "updates": units.number(state.count),
        "new/s": "-" if rate is None else f"{rate:,.1f}", "batches": units.number(len(state.trace)),
        "debt": units.number(seen.debt) if seen.debt else "-",
        "held by": ", ".join(units.of(number, noun) for number, noun in held if number) or "nothing",
    }  # fmt: skip
