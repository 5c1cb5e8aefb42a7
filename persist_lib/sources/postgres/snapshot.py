"""The first snapshot of a table: all of its rows at one place of the log, as a choice that all instances agree on.

It is made of a temporary slot, whose place in the log and whose view of the table are of the same moment. It cannot
be made a second time. So it is committed whole before anything is made of it, and then read back; one that was cut
off leaves nothing. The source's own slot is older, so that no change after any snapshot is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.errors import Determinate, Gone
from persist_lib.kernel.packing import packed, unpacked
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.postgres.columns import Column, Header
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.server import COLUMNS, Table, parse_lsn, slot_of
from persist_lib.sources.postgres.stream import Wire, message_table

CHUNK_BYTES = 4 * MIB
_SCHEMA = pa.schema([("line", pa.binary())])


class Beginning(msgspec.Struct, frozen=True):
    """Where the log continues behind the snapshot, of what server and table it is, and what columns its lines have."""

    lsn: int
    check: str
    header: Header


class Snapshot(NamedTuple):
    """A snapshot that was chosen. Its lines are the rest of the choice."""

    beginning: Beginning
    rest: Iterator[bytes]

    def lines(self) -> Iterator[pa.Array]:
        """The rows as lines of CSV, in arrays of bounded size."""
        for data in self.rest:
            yield unpacked(data).column("line").combine_chunks()


def find(choices: Choices) -> Snapshot | None:
    """The snapshot that was chosen, if one was."""
    chosen = choices.find()
    if chosen is None:
        return None
    return Snapshot(msgspec.json.decode(next(chosen), type=Beginning), chosen)


def copied(declared: Postgres, id_: str, table: Table) -> Iterator[bytes]:
    """Copy the table: yields the parts of a choice."""
    with closing(Wire(declared)) as wire:
        check = check_of(wire, table)
        wire.ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        slot = f"{slot_of(id_)}_{wire.process}"
        ((_, lsn, _, _),) = wire.ask(f"CREATE_REPLICATION_SLOT \"{slot}\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'use')")
        _check_unbroken(wire, table)
        columns = tuple(Column(*row[:4]) for row in wire.ask(COLUMNS.format(oid=table.oid)))
        if not columns:
            raise Gone(
                f"the table {declared.table} was dropped before it was copied. Nothing was written",
                partition=declared.table, address=0,
            )  # fmt: skip
        yield msgspec.json.encode(Beginning(parse_lsn(lsn), check, Header(columns, copied=True)))
        names = ", ".join(f'"{column.name.replace(chr(34), chr(34) * 2)}"' for column in columns)
        lines: list[bytes] = []
        size = 0
        for line in wire.copy(f"COPY {table.sql} ({names}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)"):
            lines.append(line)
            size += len(line)
            if size >= CHUNK_BYTES:
                yield _packed(lines)
                lines, size = [], 0
        if lines:
            yield _packed(lines)
        wire.ask("COMMIT")


def _check_unbroken(wire: Wire, table: Table) -> None:
    """Refuse to copy a table that was emptied or rewritten since the snapshot began; it cannot be from now on.

    SUBTLE: these do not obey snapshots: a reader of the table afterwards sees none of the rows that it had before.
    The catalog obeys them. So there the table's file is the one that it was, and the function tells the one that it is.
    """
    wire.ask(f"LOCK TABLE ONLY {table.sql} IN ACCESS SHARE MODE")
    same = wire.ask(
        f"SELECT c.relfilenode = pg_relation_filenode(c.oid) FROM pg_class c WHERE c.oid = {table.oid}"  # noqa: S608
    )
    if same != [(True,)]:
        raise Determinate(f"{table.sql} was emptied or rewritten just as its snapshot began. It is copied again")


def check_of(wire: Wire, table: Table) -> str:
    """The text by which the server and the table are known again: system, timeline, and the table's id."""
    ((system, timeline, _, _),) = wire.ask("IDENTIFY_SYSTEM")
    return f"{system} {timeline} {table.oid}"


def copied_messages(chosen: Snapshot) -> Iterator[pa.Table]:
    """The rows of a snapshot, all at the address just before the log continues."""
    address, header = chosen.beginning.lsn - 1, chosen.beginning.header.text()
    for lines in chosen.lines():
        yield message_table(np.full(len(lines), address, np.uint64), lines, np.zeros(len(lines), np.int32), [header])


def _packed(lines: list[bytes]) -> bytes:
    return packed(pa.table({"line": pa.array(lines, pa.binary())}, schema=_SCHEMA), "zstd")
