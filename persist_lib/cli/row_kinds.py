"""What has rows, a shard, a collection or a table: how each is read and written, with the same verbs.

`Kind` is what differs. `command_over` makes the command of a kind from a function that takes the kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import Collection, Shard, Table, parse_names
from persist_lib.errors import InvalidUsage, NotFound

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.schema.schema import Schema
    from persist_lib.timeline import Tables
    from persist_lib.times import Unit

AT_ONCE_S = 0.001
"""The shortest timeout that is allowed, in seconds: it looks once."""
OWNER = "persist collection"
"""What a collection's readers are called while a command reads."""


class New(NamedTuple):
    """A shard that is created if there is none, with the columns of a file."""

    file: Path | None
    key: str
    times: Unit | None = None
    unique: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """What has rows: the noun in JSON and in help, its argument, how its commands begin, and how it is read.

    `reader(session, name)` opens an object with `schema`, `snapshot`, `changes` and `listen`, as a shard's reader has;
    `writer(session, name, dry_run=…)` one with `schema`, `upsert` and `delete`, as its writer has.
    """

    noun: str
    argument: Any
    begin: str
    reader: Callable[[Session, str], AbstractContextManager[Any]]
    writer: Callable[..., AbstractContextManager[Any]]
    read: str = "snapshot"


def command_over(kind: Kind, run: Callable[..., None], *without: str) -> Callable[..., None]:
    """The command `run(session, kind, name, …)` for one kind, less the options that the kind does not have.

    In its help, $kind is the kind's noun, $persist how its commands begin, and $read the name of the one that reads.
    """

    def of_kind(session: Session, **given: Any) -> None:
        run(session, kind, **given)

    session, _, *own = inspect.signature(run, eval_str=True).parameters.values()
    own = [each.replace(annotation=kind.argument) if each.name == "name" else each for each in own]
    of_kind.__signature__ = inspect.Signature([session, *own])  # type: ignore[attr-defined]
    of_kind.__name__ = run.__name__
    of_kind.without = without  # type: ignore[attr-defined]
    of_kind.__doc__ = Template(run.__doc__ or "").substitute(kind=kind.noun, persist=kind.begin, read=kind.read)
    return of_kind


@contextmanager
def _shard_reader(session: Session, name: str) -> Iterator[Any]:
    with session.open() as client, client.open_reader(name) as reader:
        yield reader


def schema_for(client: Client, shard: str, new: New | None = None) -> Schema:
    """The shard's newest schema, or the schema of the file if the shard is to be created."""
    try:
        return client.inspect(shard).state.schemas[-1]
    except NotFound:
        if new is None:
            raise
        if new.file is None:
            raise InvalidUsage("to create a shard, give a file: its columns are the schema") from None
        from persist_lib.cli.input_files import infer_schema

        return infer_schema(new.file, parse_names(new.key) or [], new.times, unique=new.unique)


@contextmanager
def _shard_writer(session: Session, name: str, *, dry_run: bool = False, new: New | None = None) -> Iterator[Any]:  # noqa: ARG001
    with (
        session.open(read_only=False, create=new is not None) as client,
        client.open_writer(name, schema_for(client, name, new)) as writer,
    ):
        yield writer


class _CollectionReader:
    """A collection's reader, whose changes begin by default where its history does."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.snapshot, self.listen = reader.snapshot, reader.listen

    @property
    def schema(self) -> Schema:
        return self._reader.schema

    def changes(self, first: Any, last: Any, *, timeout: float) -> Any:
        since = self._reader.since.time or 0
        start = (since if self._reader.fetch_upper().has_passed(since) else None) if first is None else first
        if last is not None:
            self._reader.adopt_at(last)
        return self._reader.changes(start, last, timeout=timeout)


@contextmanager
def _collection_reader(session: Session, name: str) -> Iterator[Any]:
    with session.controller() as controller, controller.open_reader(name, owner=OWNER) as reader:
        yield _CollectionReader(reader)


@contextmanager
def _collection_writer(session: Session, name: str, *, dry_run: bool = False) -> Iterator[Any]:  # noqa: ARG001
    with session.controller(read_only=False) as controller, controller.open_writer(name) as writer:
        yield writer


class TableRows:
    """A table as a reader and a writer: with what its timeline's WAL has and its own shards do not have yet."""

    def __init__(self, tables: Tables, name: str) -> None:
        self.tables, self.name = tables, name
        self.insert, self.update = partial(tables.insert, name), partial(tables.update, name)
        self.upsert, self.delete = partial(tables.upsert, name), partial(tables.delete, name)
        self.timeline, _ = tables.timeline_of(name)  # raises for a collection
        self.schema = tables.controller.describe(name).schema

    def snapshot(self, at: Any, *, timeout: float, **wanted: Any) -> Any:
        """The contents as of a time."""
        return self.tables.read(self.name, at, timeout=timeout if timeout > AT_ONCE_S else None, **wanted)

    @contextmanager
    def changes(self, first: Any, last: Any, *, timeout: float) -> Iterator[Any]:
        """What happened in between. It may take as long as any call: others may be about to copy what it needs."""
        start = (self.tables.controller.describe(self.name).since.time or 0) if first is None else first
        longest = max(timeout, self.tables.client.config.timeout_s)
        with self.tables.changes(self.name, start, last, timeout=longest) as changes:
            yield changes

    def listen(self, start: Any, *, until: Any, timeout: float | None) -> Any:
        """What happens after a time, up to a frontier."""
        return self.tables.listen(self.name, start, until=until, timeout=timeout)


@contextmanager
def table_rows(session: Session, name: str, *, dry_run: bool = True) -> Iterator[TableRows]:
    """A table, to be read, or to be written if it is no dry run."""
    with session.tables(read_only=dry_run) as tables:
        yield TableRows(tables, name)


SHARD = Kind("shard", Shard, "persist", _shard_reader, _shard_writer)
COLLECTION = Kind("collection", Collection, "persist collection", _collection_reader, _collection_writer)
TABLE = Kind("table", Table, "persist table", table_rows, table_rows, "read")
