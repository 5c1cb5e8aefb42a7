"""Writes of tables of timelines. Their times are minted by one statement, so tasks stage no parts: they answer rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.client import Client, timelines_of
from persist_lib.convert.by_key import without_times
from persist_lib.convert.filling import Filling
from persist_lib.errors import InvalidUsage
from persist_lib.relation.differences import DELETE
from persist_lib.relation.row_selection import summed
from persist_lib.relation.statements import Apply, Done, Insert, Restore
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.spark.options import Options
from persist_lib.table.carrier import Make
from persist_lib.timeline.tables import execute

MOST_BYTES = 64 << 20
"""Of all rows of one write: Spark's driver holds them, and they are one commit."""
MINTED = ("at", "lower", "upper", "query", "epoch", "shards")
"""Options of writes that a table of a timeline does not take."""


class StagedRows(msgspec.Struct, frozen=True):
    """What one task has, as a stream of Arrow; `rows` is empty where it has none."""

    rows: bytes


class RowsTicket(msgspec.Struct, frozen=True):
    """What a task needs, and the stage too: nothing is open between the planner and the commit."""

    table: str
    schema: Schema
    lease_ms: int = 0

    @property
    def ticket(self) -> RowsTicket:
        return self

    def write(self, tables: Iterable[pa.Table]) -> StagedRows:
        """Check rows as a stage does, and answer them. Raises InvalidUsage for too many."""
        sink, size, filling = pa.BufferOutputStream(), 0, Filling(Runtime())
        with pa.ipc.new_stream(sink, self.schema.contents) as stream:
            for table in without_times(self.schema, tables, filling=filling):
                size += table.nbytes
                _check_size(self.table, size)
                stream.write_table(table.drop_columns([TIME]))
        return StagedRows(sink.getvalue().to_pybytes() if size else b"")

    def close(self) -> None:
        """Nothing is open."""


class RowsWriter:
    """Writes what tasks answered, by the statements of the timeline's tables."""

    def __init__(self, client: Client, table: str, schema: Schema) -> None:
        self._tables, self._table, self._schema = timelines_of(client), table, schema

    def stage(self, *, lease_s: float, lower: object, new_upper: object) -> RowsTicket:  # noqa: ARG002 - as of a shard
        return RowsTicket(self._table, self._schema)

    def resume_stage(self, ticket: RowsTicket) -> RowsTicket:
        return ticket

    def can_append(self, ticket: RowsTicket) -> bool:
        """Nothing of a ticket ever ends."""
        return ticket.schema == self._schema

    def append_staged(self, staged: Sequence[StagedRows], *, at: object, producer: object) -> Done:  # noqa: ARG002
        rows = self._read(staged).drop_columns([DIFF])
        return self._execute(lambda schema: Insert(self._table, schema, rows, self._filling()))

    def upsert_staged(self, staged: Sequence[StagedRows], *, producer: object) -> Done:  # noqa: ARG002
        rows = self._read(staged)
        gone = pc.equal(rows.column(DIFF), DELETE)
        upserts = rows.filter(pc.invert(gone)).drop_columns([DIFF])
        kept = self._tables.controller.catalog.fetch().find(self._table).keep_deletes
        ordered = [kept.column] if kept is not None and kept.column in self._schema.names else []
        deletes = rows.filter(gone).select([*self._schema.key_names, *ordered])
        return self._execute(lambda schema: Apply(self._table, schema, upserts, deletes, filling=self._filling()))

    def overwrite_staged(self, staged: Sequence[StagedRows], *, producer: object) -> Done:  # noqa: ARG002
        rows = summed(self._schema, self._read(staged))
        return self._execute(lambda schema: Restore(self._table, schema, rows))

    def _filling(self) -> Filling:
        return Filling(self._tables.client.runtime)

    def _execute(self, make: Make) -> Done:
        return execute(self._tables, self._table, make, schema=self._schema)

    def _read(self, staged: Sequence[StagedRows]) -> pa.Table:
        _check_size(self._table, sum(len(one.rows) for one in staged))
        found = [pa.ipc.open_stream(one.rows).read_all() for one in staged if one.rows]
        return pa.concat_tables([self._schema.contents.empty_table(), *found])


def _check_size(table: str, size: int) -> None:
    if size > MOST_BYTES:
        raise InvalidUsage(
            f"table {table} is on a timeline, whose statements hold all of their rows in memory, and these are more "
            f"than {MOST_BYTES >> 20} MiB. Write them as several DataFrames, or to a table on a shard or a collection",
            table=table,
        )


def check_minted(options: Options, columns: Collection[str], *, is_stream: bool) -> None:
    """Refuse what a table of a timeline cannot do on Spark: it mints its times, and remembers no epochs."""
    if "base" in options:
        raise InvalidUsage(
            f"table {options.table} is on a timeline, and Spark offers MERGE INTO, UPDATE and DELETE by more than a "
            "filter only by way of all of its rows, which a statement of a timeline cannot compare. Nothing was "
            "written. Use INSERT INTO with the option upsert, or update, delete and apply of the table in Python",
            table=options.table,
        )  # fmt: skip
    given = [f"the option {name}" for name in MINTED if name in options]
    given += [f"a column {name}" for name in (TIME, DIFF) if name in columns]
    if is_stream or given:
        raise InvalidUsage(
            f"table {options.table} is on a timeline, which mints the times of its tables and remembers no epochs of "
            f"queries, so that it takes no {'streaming writes' if is_stream else given[0].split(' ', 1)[1]}. Nothing "
            'was written. Write batches with .mode("append") or .mode("overwrite"); a stream with foreachBatch and '
            'the option upsert ("true"), which may be done twice; or write to a table on a shard or a collection',
            table=options.table,
        )  # fmt: skip
