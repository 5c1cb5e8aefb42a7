"""The tables of a catalog, for callers: `client.controller().tables()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, Unpack, get_args

import pyarrow.compute as pc

from persist_lib.arguments import not_pickled, parse_flag, parse_seconds, shown
from persist_lib.catalog.answers import integer_times
from persist_lib.catalog.collection_arguments import Retention
from persist_lib.catalog.command_log import Acting
from persist_lib.catalog.controller import New, create_table
from persist_lib.catalog.deleted_keys import KeepDeletes, no_carrier, parse_keeping, parse_kept
from persist_lib.catalog.describe import Description, Tended
from persist_lib.catalog.effects import settle
from persist_lib.catalog.records import Mode, TableMode, parse_collection_name
from persist_lib.convert.filling import Filling
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import TOP
from persist_lib.ids import parse_token
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation import held
from persist_lib.relation.changes import Changes, MemoryUpdates
from persist_lib.relation.listen import Updates
from persist_lib.relation.reader import parse_window
from persist_lib.relation.registration import Named, bounds_of, since_of
from persist_lib.relation.row_selection import Asked, ReadArguments, RowSelection
from persist_lib.relation.statements import Change, Delete, Done, Insert, Statement, Update, Upsert
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Resource
from persist_lib.schema.evolution import fresh, named_as
from persist_lib.schema.schema import Schema, check_schema, comes_before, with_times
from persist_lib.timeline.table_listen import TableListen
from persist_lib.timeline.timeline import AsOf, Line
from persist_lib.timeline.timelines import Timelines, line_of
from persist_lib.timeline.transaction import Transaction, run
from persist_lib.timeline.view import TableSnapshot
from persist_lib.timeline.wal_apply import Applied, Lag, apply, fetch_lag
from persist_lib.timeline.wal_timeline import WalLine
from persist_lib.timeline.wal_truncation import tidy
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    from collections.abc import Callable

    from persist_lib.catalog.controller import Controller

DEFAULT = "default"
T = TypeVar("T")


class Tables(Acting, Resource):
    """Tables: rows that people change, with times minted for them. Safe to use from several threads.

        tables = client.controller().tables()
        tables.create("accounts", Schema({"id": "int64 not null"}, {"cents": "int64"}, unique=True), mode="wal")
        tables.upsert("accounts", [{"id": 1, "cents": 100}])
        with tables.transaction() as t:
            rows = t.read("accounts", keys=[1]).to_pylist()
            t.update("accounts", {"cents": rows[0]["cents"] - 10}, keys=[1])

    A table is on a timeline, whose tables share their times: a read sees what was acknowledged before it began, in
    whatever table of the timeline. The timeline's mode is that of its first table. In "yolo" mode each statement is one
    append to its table. In "wal" mode there are transactions over several tables, and the rows are written twice: to
    the timeline's WAL, and by `apply` to the tables.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller, self.client = controller, controller.client
        self._timelines = Timelines(controller.catalog)

    def create(
        self, name: str, schema: Schema, *, shards: int = 1, timeline: str = DEFAULT, mode: TableMode | None = None,
        retention: Retention = None, keep_deletes: KeepDeletes = None, command: str | None = None,
        timeout: float | None = None,
    ) -> Description:  # fmt: skip
        """Create a table of `shards` shards on a timeline, which is created with its first table, in this `mode`.

        `mode` is "yolo" (the default) or "wal"; for a timeline that is there, it is the timeline's if it is not given.
        The schema's times are milliseconds ("ms"), also if it does not say so. `retention` and `command` are those of
        `controller.create`. With `keep_deletes`, a column and a span as in `("seq", "7 days")`, the table remembers
        deleted keys from the beginning on: see `Table.set_keep_deletes`. Raises NameTaken when there is a collection or
        table of that name, and InvalidUsage.
        """
        parse_collection_name(name)
        if check_schema(schema).times not in {None, "ms"}:
            raise InvalidUsage(f"a table's times are in milliseconds: pass times='ms', and not {schema.times!r}")
        schema = fresh(with_times(schema, "ms"))
        if mode is not None and mode not in get_args(TableMode):
            raise InvalidUsage(f"mode must be one of {get_args(TableMode)}: got {shown(mode)}", mode=mode)
        self._writable("create")
        if keep_deletes is not None:
            parse_keeping(name, schema, *parse_kept(keep_deletes))  # before a timeline is made
            if {one.name: one.mode for one in self._timelines.records()}.get(timeline, mode) != "wal":
                raise no_carrier(name, "a timeline without a WAL")
        self._settle_drop(name, self._deadline(timeout))
        made = self._timelines.make(parse_collection_name(timeline), mode, self._deadline(timeout))
        append_mode: Mode = "append" if made.mode == "wal" else "compare_and_append"
        new = New(name, schema, shards, append_mode, retention, timeline=made.id, keep_deletes=keep_deletes)
        return create_table(self.controller, new, command, timeout)

    def list(self) -> list[str]:
        """The names of all tables, sorted."""
        return self.controller.catalog.fetch().names("table")

    def drop(
        self, name: str, *, dry_run: bool = False, command: str | None = None, timeout: float | None = None
    ) -> Tended:
        """Drop a table, as `controller.drop` does. After this no transaction that changes it is committed.

        What is in the WAL for it and not applied yet is gone with it.
        """
        return self.controller.drop(name, dry_run=parse_flag(dry_run, "dry_run"), command=command, timeout=timeout)

    def rename(self, name: str, to: str, *, command: str | None = None, timeout: float | None = None) -> Description:
        """Give a table another name. Transactions that have begun continue."""
        return self.controller.rename(name, to, command=command, timeout=timeout)

    def insert(self, name: str, rows: object, *, dry_run: bool = False, timeout: float | None = None) -> Done:
        """Add rows: Arrow tables, frames, dicts, or instances of the schema's models.

        With `dry_run` nothing is written, and the answer says what would be. Raises ConstraintViolated, and then
        nothing was written; TimedOut (the same); NotFound; and Indeterminate if it is not known whether it was written:
        ask `outcome` with the token of the error.
        """
        filling = Filling(self.client.runtime)
        return self._execute(name, lambda schema: Insert(name, schema, rows, filling), timeout, dry_run=dry_run)

    def upsert(self, name: str, rows: object, *, dry_run: bool = False, timeout: float | None = None) -> Done:
        """Make each of `rows` the one row of its key, against the rows just before it. Raises as `insert` does.

        What a caller read before is not looked at again: `update`, or a transaction, does not go over what others did.
        """
        filling = Filling(self.client.runtime)
        return self._execute(name, lambda schema: Upsert(name, schema, rows, filling), timeout, dry_run=dry_run)

    def delete(
        self, name: str, keys: object = None, *, filter: pc.Expression | None = None, dry_run: bool = False,
        timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Take rows away: those of these keys, or those that a filter keeps. Raises as `insert` does."""
        return self._execute(name, lambda schema: Delete(name, schema, keys, filter), timeout, dry_run=dry_run)

    def update(
        self, name: str, change: Change, keys: object = None, *, filter: pc.Expression | None = None,
        dry_run: bool = False, timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Change value columns of the rows of these keys, of those that a filter keeps, or of all.

            tables.update("accounts", {"cents": pc.field("cents") * 2}, filter=pc.field("cents") < 0)

        `change` is a mapping of columns to values, expressions or functions of an Arrow table; or one such function,
        which returns a table of as many rows, in their order, with the same keys. It may be called several times.
        Raises as `insert` does.
        """
        return self._execute(name, lambda schema: Update(name, schema, change, keys, filter), timeout, dry_run=dry_run)

    def transaction(
        self, timeline: str = DEFAULT, *, dry_run: bool = False, timeout: float | None = None
    ) -> Transaction:
        """Begin a transaction on a timeline in WAL mode. `timeout` is in seconds, for each of its calls.

        With `dry_run` its commit writes nothing; its statements count what they would change.

        Raises InvalidUsage for a timeline in YOLO mode, and NotFound.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("transaction")
        line = self._timelines.line(timeline)
        if not isinstance(line, WalLine):
            raise InvalidUsage(
                f"timeline {timeline!r} is in YOLO mode, in which each statement is committed by itself. Create the "
                "tables on a timeline in WAL mode to change several at once",
                timeline=timeline,
            )
        return Transaction(line, self._deadline(timeout).timeout_s, dry_run=dry_run)

    def read_time(self, timeline: str = DEFAULT, *, timeout: float | None = None) -> int:
        """The time at which all that was acknowledged is seen. Reads of several tables as of it are consistent.

        Raises InvalidUsage if nothing was written on the timeline yet, and NotFound.
        """
        deadline = self._deadline(timeout)
        time = self._timelines.line(timeline).read_time(deadline)
        if time < 0:
            raise InvalidUsage(f"nothing was written on timeline {timeline!r} yet, so there is no time to read at")
        return time

    def read(
        self, name: str, as_of: TimeLike | None = None, *, newest: bool = False, timeout: float | None = None,
        schema: Schema | None = None, **asked: Unpack[ReadArguments],
    ) -> TableSnapshot:  # fmt: skip
        """The rows of a table as of a time: by default, all that was acknowledged before this call.

        Which rows and columns is said as for `ReadHandle.snapshot`, by `columns`, `key`, `key_from`, `key_to`, `keys`,
        `filter` and `diff`.

        A time is complete when no write can come there any more. A client that may write completes one that the store's
        clock has passed, by an empty append. For a later time, and in a client that may only read, this raises
        NotComplete; after `timeout` seconds, if that is given. With `newest` it reads the newest complete contents
        then. The answer's `as_of` says of which time they are; -1: of none, as nothing was written yet. A client that
        may only read gets those for the default, too, where the table is behind its timeline.

        With a `schema`, one that the table has or had before columns were added, it is read in these columns.

        Raises SinceViolation for a time before which history was given up, and NotFound.
        """
        newest = parse_flag(newest, "newest")
        deadline = self._deadline(timeout)
        rows = Asked(**asked)

        def want(had: Schema, knows: Callable[[Schema], Schema]) -> RowSelection:
            mine = had.whole if schema is None else knows(schema)
            if mine == had.whole or not comes_before(mine, had.whole):
                return rows.of(had)
            return rows.of(mine.shown).within(named_as(had.whole, mine))

        time = None if as_of is None else self._times().as_of(as_of)
        when = AsOf(time, newest, timeout is not None)
        return self._timelines.with_table(name, lambda line: line.snapshot(name, when, want, deadline))

    def listen(
        self, name: str, as_of: TimeLike | None, *, until: object = TOP, timeout: float | None = None,
        schema: Schema | None = None,
    ) -> TableListen:  # fmt: skip
        """An iterator of what happens to a table after `as_of`. The snapshot as of then and all updates add up.

        None and -1 mean from the beginning on. It ends at the frontier `until`. It raises TimedOut when nothing comes
        for `timeout` seconds (None: it waits for ever). `schema` is as in `read`; a listener keeps the columns that it
        began in.
        """
        times = self._times()
        time, end = times.start(as_of), times.frontier(until, "until")
        timeout = None if timeout is None else parse_seconds(timeout)

        def act(line: Line) -> TableListen:
            own = line_of(self.controller.catalog, line.record, "listen")
            return TableListen(own, name, time, end, timeout, schema)

        return self._timelines.with_table(name, act)

    def changes(
        self, name: str, from_: TimeLike | None, to: TimeLike | None = None, *, timeout: float | None = None,
        schema: Schema | None = None,
    ) -> Changes:  # fmt: skip
        """All that happened to a table after the time `from_`, up to and with `to`: by default, the newest time.

        The updates, with `_time` and `_diff`, are in memory. None for `from_` means from the beginning on. The rows as
        of `from_` and these add up to the rows as of `to`. Raises as `read` does, SinceViolation when `from_` is before
        since (None: when any history was given up), and InvalidUsage where `to` is before `from_`. `schema` is as in
        `read`.
        """
        first, last = parse_window(self._times(), from_, to)
        start = -1 if first is None else first
        with self.read(name, last, keys=[], timeout=timeout) as snapshot:  # waits, and advances a table that lags
            end = max(start, snapshot.as_of)
        listening = self.listen(name, first, until=end + 1, timeout=timeout, schema=schema)
        with Spending() as spent, listening as listener:
            found = [integer_times(event.table) for event in listener if isinstance(event, Updates)]
            had = listener.schema
        return Changes(held.Named("table", name), had, first, end, [MemoryUpdates(had, found)], spent)

    def apply(self, timeline: str = DEFAULT, *, timeout: float | None = None) -> Applied:
        """Copy what transactions wrote from the WAL to their tables. Any number of processes may do so, at any time.

        Tables without anything new are not touched. Does nothing on a timeline in YOLO mode.
        """
        self._writable("apply")
        line = self._timelines.line(timeline)
        if not isinstance(line, WalLine):
            return Applied((), 0, 0)
        deadline = self._deadline(timeout)
        return line.again(lambda: apply(line, deadline), deadline)

    def tidy(self, timeline: str = DEFAULT, *, timeout: float | None = None) -> int:
        """Give up what the WAL has and the tables have too, so that it stays small. Answers how many rows."""
        self._writable("tidy")
        line, deadline = self._timelines.line(timeline), self._deadline(timeout)
        return tidy(line.catalog, line.record, deadline, line.writer) if isinstance(line, WalLine) else 0

    def timelines(self) -> dict[str, TableMode]:
        """The timelines of this catalog by name, and the mode of each."""
        return {record.name: record.mode for record in self._timelines.records()}

    def timeline_of(self, name: str) -> tuple[str, TableMode]:
        """The timeline of a table, and its mode. Raises NotFound, and InvalidUsage for a collection."""
        record = self._timelines.of_table(parse_collection_name(name))
        return record.name, record.mode

    def lag(self, timeline: str = DEFAULT) -> Lag:
        """How far the tables of a timeline are behind its WAL, and what the WAL holds. Changes nothing.

        On a timeline in YOLO mode nothing is behind. Raises InvalidUsage where there is no such timeline.
        """
        line = self._timelines.line(timeline)
        return fetch_lag(line.catalog, line.record) if isinstance(line, WalLine) else Lag(line.name)

    def outcome(self, token: bytes, *, timeline: str = DEFAULT, table: str | None = None) -> int | None:
        """What became of a commit whose outcome was unknown: its time, or None if it is not there and never will be.

        `token` is that of the Indeterminate, or of the transaction. On a timeline in YOLO mode, say which `table`, and
        of an append that was made before the table joined the timeline.
        """
        self._writable("outcome")
        line = self._timelines.line(timeline)
        if table is not None and (since := since_of(parse_token(token))) is not None:
            return line.placed(table, token, since)
        name = Named(*bounds_of(token))
        is_there = line.outcome(name, table, self._deadline(None))
        return (name.upper.time or 1) - 1 if is_there else None

    def close(self) -> None:
        """Close what it has open; the client stays open. Idempotent."""
        self._timelines.close()

    __reduce__ = not_pickled("Tables", "Open them in the other process")

    def _execute(
        self, name: str, make: Callable[[Schema], Statement], timeout: float | None = None, *, dry_run: bool = False,
        schema: Schema | None = None,
    ) -> Done:  # fmt: skip
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("a change")
        deadline = self._deadline(timeout)

        def act(line: Line) -> Done:
            made: list[Statement] = []  # once: what it is made of may be an iterator

            def call() -> Done:
                line.look()
                view = line.view(name)
                if not made:
                    made.append(make(view.known(schema or view.whole)))
                return run(line, view, made[0], deadline, dry_run=dry_run)

            return line.again(call, deadline)

        return self._timelines.with_table(name, act)

    def _settle_drop(self, name: str, deadline: Deadline) -> None:
        """Finish a drop of the table of this name that another process has left, so that the name is free."""
        contents = self.controller.catalog.fetch()
        if (known := contents.named(name)) is not None:
            for command in contents.pending(known.id):
                if command.what == "drop":
                    settle(self.controller.catalog, command, deadline)

    def _times(self) -> Times:
        """Relative times count from the store's clock, as it mints the times of tables."""
        return Times("ms", self.client.consensus.now)


def execute(
    tables: Tables, name: str, make: Callable[[Schema], Statement], timeout: float | None = None, *,
    dry_run: bool = False, schema: Schema | None = None,
) -> Done:  # fmt: skip
    """Carry out the statement that `make` makes for a table's schema, or for an older one that it had.

    In an older one, rows that have something in newer columns are not changed: SchemaMismatch.
    """
    return tables._execute(name, make, timeout, dry_run=dry_run, schema=schema)
