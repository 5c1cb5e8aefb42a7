"""Outside data as collections: `persist source` declares it, and shows how it is; `persist ingest` runs instances."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from persist_lib.cli.json_values import jsonable
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.schema_commands import build_schema, schema_value
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Collection, Collections, KeyColumns, SomeCollection, ValueColumns, Yes
from persist_lib.core import units
from persist_lib.errors import Damage, Determinate, Indeterminate, InvalidUsage, PersistError

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.sources import Progress, SourceDescription, Sources
    from persist_lib.sources.records import Declaration


def show(
    session: Session,
    name: SomeCollection = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the file that declares it, for `create -f`.")] = False,
) -> None:
    """Show one source: what is declared, how far it has come, and how its instances are; without a name, list all.

    \b
    persist source show
    persist source show orders
    persist source show orders --json | jq .durable
    persist source show orders --toml > orders.toml
    """
    if name is None:
        if toml:
            raise InvalidUsage("--toml prints the file of one source: name it")
        _list(session)
        return
    with session.sources(read_only=True) as sources:
        found = sources.show(name)
    if toml:
        from persist_lib.sources.declaration_file import written

        session.out.out(written(found), end="", highlight=False)
        return
    lines = labelled(
        ("state", f"{found.state}{': ' if found.why else ''}{found.why}"),
        ("from", msgspec.json.encode(found.reader).decode()),
        ("decoding", msgspec.json.encode(found.decoding).decode()),
        ("meaning", msgspec.json.encode(found.meaning).decode()),
        *([("schema", str(found.schema))] if not found.tables else []),
        *((table, str(schema)) for table, schema in found.tables.items()),
        ("collections", ", ".join(found.collections.values())),
        ("up to", f"{up_to(found)}, {units.duration(found.behind_ms)} behind"),
        ("errors", f"{found.errors:,}"),
    )
    figures = ("bound to", "durable to", "messages left", "bytes left", "seconds behind")
    partitions = plain_table("partition", *figures, right=figures)
    for partition, mark in sorted(found.bound.items()):
        durable = found.durable.get(partition)
        left = found.left.get(partition, {})
        known = ("" if left.get(what) is None else f"{left[what]:,}" for what in ("messages", "bytes", "seconds"))
        partitions.add_row(partition, str(mark.address), str(durable.address if durable else 0), *known)
    labels = ["instance", "state", "messages", "errors", "why"]
    if any(one.get("held_back_bytes") is not None for one in found.instances):
        labels.insert(4, "held back")
    instances = plain_table(*labels, right=["messages", "errors", "held back"])
    for one in found.instances:
        row = {**one, "held back": units.size(int(str(one.get("held_back_bytes") or 0)))}
        instances.add_row(*(str(row[label]) for label in labels))
    session.answer(value_of(found), lines, partitions, instances)


def _list(session: Session) -> None:
    """List the sources of the location, one line each."""
    with session.sources(read_only=True) as sources:
        found = [sources.show(name) for name in sources.list()]
    table = plain_table("source", "state", "up to", "instances", "errors", right=["errors"])
    for one in found:
        table.add_row(one.name, one.state, up_to(one), _instances(one) or "-", f"{one.errors:,}")
    session.answer({"sources": [value_of(one) for one in found]}, table, units.of(len(found), "source"))


def pause(
    session: Session,
    name: Collection,
    why: Annotated[str, typer.Option(metavar="TEXT", help="What `persist source show` says of it.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Let it continue.")] = False,
) -> None:
    """Let all instances of a source stand still, wherever they run, after the step that they are at; or continue.

    \b
    persist source pause orders --why 'the disk is full'
    persist source pause orders --resume
    """
    if resume and why:
        raise InvalidUsage("--why is said of a source that is paused: leave it out with --resume")
    with session.sources() as sources:
        if resume:
            sources.resume(name)
        else:
            sources.pause(name, why=why)
    state, says = ("running", "continues") if resume else ("paused", "is paused")
    session.answer({"source": name, "state": state}, f"{name} {says}")


def add_table(
    session: Session,
    name: Collection,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table, as in public.orders.")],
    key: KeyColumns = None,
    value: ValueColumns = None,
) -> None:
    """Let a source of several tables of PostgreSQL read one more, while it runs.

    The next instance that looks copies it; the other outputs wait as long as that takes. From then on the table's
    output shows the database as of the same moment as all others; it cannot be read as of times before. The same call
    again changes nothing. --key and --value are for other columns than the table's.

    \b
    persist source add-table bank public.loans
    """
    if (key is None) != (value is None):
        raise InvalidUsage("--key and --value are the columns of the table's output: give both, or neither")
    with session.sources() as sources:
        schema = None if key is None or value is None else build_schema(key, value)
        found = sources.add_table(name, table, schema)
    columns = found.tables[table]
    session.answer(
        value_of(found), f"{name} takes {table}: {columns}", f"the next instance copies it: persist ingest {name}"
    )


def reset(session: Session, name: Collection, yes: Yes = False) -> None:
    """Begin a source again with what is there now. Its collections are dropped, and made again, empty.

    This cannot be undone. It is for a source that can never continue: files that are gone, or were changed.

    \b
    persist source reset orders
    """
    with session.sources() as sources:
        sources.find(name)
        session.confirm(name, "resetting", "source", yes=yes)
        found = sources.reset(name)
    session.answer(value_of(found), f"{name} begins again: persist ingest {name}")


def drop(session: Session, name: Collection, yes: Yes = False) -> None:
    """Drop a source with all of its collections. Instances of it end.

    Of PostgreSQL the slot goes too, and the publication that the source made; what cannot be reached is said. This
    cannot be undone.

    \b
    persist source drop orders
    """
    with session.sources() as sources:
        session.confirm(name, "dropping", "source", yes=yes)
        left = sources.drop(name)
    session.answer({"source": name, "left": list(left)}, f"{name} is dropped", *left)


def up_to(found: SourceDescription) -> str:
    """How far a source has come, for people."""
    return found.schema.show(found.time)


def _instances(found: SourceDescription) -> str:
    states = [str(one["state"]) for one in found.instances]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def declared_value(found: Declaration) -> dict[str, Any]:
    """What is declared, as JSON."""
    declared = {what: msgspec.to_builtins(getattr(found, what)) for what in ("reader", "decoding", "meaning")}
    if found.tables:
        return {**declared, "tables": {table: schema_value(schema) for table, schema in found.tables.items()}}
    return {**declared, "schema": schema_value(found.schema)}


def columns_of(found: Declaration) -> str:
    """The columns of a source's output, or of its outputs."""
    return "; ".join(f"{table} {schema}" for table, schema in found.tables.items()) or str(found.schema)


def value_of(found: SourceDescription) -> dict[str, Any]:
    """A source as JSON."""
    marks = {
        what: {partition: mark.address for partition, mark in sorted(getattr(found, what).items())}
        for what in ("bound", "durable")
    }
    return {
        "source": found.name, "state": found.state, **declared_value(found),
        "collections": dict(found.collections), "time": found.time,
        "behind_ms": found.behind_ms, "errors": found.errors, "why": found.why, "left": jsonable(found.left), **marks,
        "instances": [jsonable({k: v for k, v in one.items() if k != "_diff"}) for one in found.instances],
    }  # fmt: skip


ENDED = 4
"""The exit code where an instance ended, and would end again: to start it again does not help."""
LOOK_S = 0.2


class _Instance:
    """One source that is ingested here, and what came of it."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self.name = session, name
        self.messages = self.errors = 0
        self.error: PersistError | OSError | None = None
        self._failures = 0
        self._since_s = time.monotonic()

    def told(self, what: Progress | PersistError) -> None:
        """A step is done, or something failed that may pass."""
        if isinstance(what, PersistError):
            self._failures += 1
            self._session.note(f"{self.name}: {what}; trying again")
            return
        if self._failures:
            self._session.note(f"{self.name}: it continues, after {units.of(self._failures, 'failure')}")
            self._failures = 0
        self.messages, self.errors = self.messages + what.messages, self.errors + what.errors
        before_s, self._since_s = self._since_s, time.monotonic()
        if what.messages:
            rate = what.messages / max(0.001, self._since_s - before_s)
            lag = f", {sum(what.lag.values()):,} left" if what.lag else ""
            behind = f", {what.behind_ms / 1000:,.1f} s behind"
            counts = f"{units.of(what.messages, 'message')}, {units.of(what.errors, 'error')}"
            self._session.note(f"{self.name}: {counts}, {rate:,.0f}/s{lag}{behind}")

    def run(self, sources: Sources, stop: Callable[[], bool], every: float, *, once: bool) -> None:
        """Run until `stop` says so, or it has nothing to do, or fails for good."""
        try:
            sources.run(self.name, stop=stop, told=self.told, interval_s=every, until_idle=once)
        except (PersistError, OSError) as error:
            self.error = error

    @property
    def counted(self) -> str:
        """What came of it so far."""
        return f"{self.name}: {units.of(self.messages, 'message')}, {units.of(self.errors, 'error')}"

    @property
    def exit_code(self) -> int:
        """0 where it ended as it was told to, 1 where another attempt may help, 3 for damage, and 4 for all else."""
        if self.error is None:
            return 0
        if isinstance(self.error, Damage):
            return 3
        return 1 if isinstance(self.error, (Determinate, Indeterminate, OSError)) else ENDED


def ingest(
    session: Session,
    names: Collections,
    every: Annotated[
        float, typer.Option("--every", min=0.01, metavar="SECONDS", help="How often to look for what is new.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="End when nothing new is there.")] = False,
) -> None:
    """Run an instance of each source until Ctrl-C or a SIGTERM, or with --once until all that is there is durable.

    Any number may run, anywhere; all of them make the same collections. One that is killed loses nothing. What may pass
    is waited for. Where one ends by itself the others continue, and the exit code at the end is: 1 where to start it
    again may help, 4 where it does not (messages are gone or have changed, too many are bad, it was dropped).

    \b
    persist ingest orders
    persist ingest orders bills --once
    """
    if len(set(names)) < len(names):
        raise InvalidUsage(f"each source once: got {' '.join(names)}")
    stopped: list[int] = []
    with session.sources() as sources:
        for name in names:
            sources.find(name)  # raises NotFound, before anything begins
        instances = [_Instance(session, name) for name in names]
        with _signals(stopped):
            session.note(f"{', '.join(names)}: at work; Ctrl-C or a SIGTERM ends it after the step that it is at")
            _run(sources, instances, lambda: bool(stopped), every, once=once)
        found = {}
        for one in instances:
            if one.error is None or one.exit_code == ENDED:
                found[one.name] = _found(sources, one)
    said, value = [], []
    for one in instances:
        text, shown = found.get(one.name, (one.counted, {"source": one.name}))
        said.append(text)
        value.append({"messages": one.messages, "errors": one.errors, **shown})
    if all(one.error is None for one in instances):
        session.answer(value[0] if len(value) == 1 else {"sources": value}, *said)
        return
    for one in instances:
        if one.error is not None:
            error = one.error
            session.complain(session.at_a_shell(error) if isinstance(error, PersistError) else error, f"{one.name}: ")
    raise typer.Exit(max(one.exit_code for one in instances))


def _run(
    sources: Sources, instances: Sequence[_Instance], is_stopped: Callable[[], bool], every: float, *, once: bool
) -> None:  # fmt: skip
    """Run one instance here, or each of several in a thread. SUBTLE: signals come to this thread only."""
    if len(instances) == 1:
        instances[0].run(sources, is_stopped, every, once=once)
        return

    def run(one: _Instance) -> None:
        own = sources.controller.sources()
        try:
            one.run(own, is_stopped, every, once=once)
        finally:
            own.close()

    threads = [threading.Thread(target=run, args=[one], name=f"ingest {one.name}", daemon=True) for one in instances]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(LOOK_S)


@contextmanager
def _signals(stopped: list[int]) -> Iterator[None]:
    """Note the first SIGINT or SIGTERM; the second one does not wait for the step."""

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _found(sources: Sources, one: _Instance) -> tuple[str, dict[str, Any]]:
    """What came of an instance and how far its source is, in words and as JSON."""
    try:
        found = sources.show(one.name)
    except PersistError:
        return one.counted, {"source": one.name}
    if one.messages == 0 and found.state == "paused":
        return f"{one.name} is paused: persist source pause {one.name} --resume", value_of(found)
    return f"{one.counted}, durable up to {up_to(found)}", value_of(found)
