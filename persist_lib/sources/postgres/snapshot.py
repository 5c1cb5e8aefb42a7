"""The first snapshot of tables: all of their rows at one place of the log, as a choice that all instances agree on.

It is made of a temporary slot, whose place in the log and whose view of the tables are of the same moment. It cannot
be made a second time. So it is committed whole before anything is made of it, and then read back; one that was cut
off leaves nothing. The source's own slot is older, so that no change after any snapshot is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.errors import Determinate, Gone
from persist_lib.kernel.columns import array_of, packed, unpacked
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.postgres.columns import Column, Header
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.server import COLUMNS, Table, list_of, parse_lsn, slot_of
from persist_lib.sources.postgres.stream import Wire, message_table

CHUNK_BYTES = 4 * MIB
_SCHEMA = pa.schema([("line", pa.binary()), ("table", pa.int32())])


class Beginning(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the log continues behind the snapshot, of what server and tables it is, and what columns their lines have.

    `header` is that of the first table, and `others` are those of the tables after it, as they are declared.
    """

    lsn: int
    check: str
    header: Header
    others: tuple[Header, ...] = ()


class Snapshot(NamedTuple):
    """A snapshot that was chosen. Its lines are the rest of the choice with this number."""

    beginning: Beginning
    rest: Iterator[bytes]
    number: int = 0

    def lines(self) -> Iterator[tuple[int, pa.Array]]:
        """The rows as lines of CSV, in arrays of bounded size, each of one table, whose number is beside."""
        for data in self.rest:
            found = unpacked(data)
            table = found.column("table")[0].as_py() if "table" in found.column_names else 0  # of an earlier release
            yield table, found.column("line").combine_chunks()


def find(choices: Choices) -> Snapshot | None:
    """The snapshot that was chosen, if one was."""
    chosen = choices.find()
    if chosen is None:
        return None
    return Snapshot(msgspec.json.decode(next(chosen.parts), type=Beginning), chosen.parts, chosen.number)


def copied(declared: Postgres, id_: str, tables: Mapping[str, Table]) -> Iterator[bytes]:
    """Copy the tables: yields the parts of a choice."""
    with closing(Wire(declared)) as wire:
        check = check_of(wire, tables)
        wire.ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        slot = f"{slot_of(id_)}_{wire.process}"
        ((_, lsn, _, _),) = wire.ask(f"CREATE_REPLICATION_SLOT \"{slot}\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'use')")
        _check_unbroken(wire, tables)
        headers = tuple(Header(_columns(wire, declared, *named), copied=True) for named in tables.items())
        yield msgspec.json.encode(Beginning(parse_lsn(lsn), check, headers[0], headers[1:]))
        for number, (table, header) in enumerate(zip(tables.values(), headers, strict=True)):
            yield from _copied(wire, number, table, header)
        wire.ask("COMMIT")


def _columns(wire: Wire, declared: Postgres, name: str, table: Table) -> tuple[Column, ...]:
    columns = tuple(Column(*row[:4]) for row in wire.ask(COLUMNS.format(oid=table.oid)))
    if not columns:
        raise Gone(
            f"the table {name} was dropped before it was copied. Nothing was written",
            partition=declared.partition, address=0,
        )  # fmt: skip
    return columns


def _copied(wire: Wire, number: int, table: Table, header: Header) -> Iterator[bytes]:
    names = ", ".join(f'"{column.name.replace(chr(34), chr(34) * 2)}"' for column in header.columns)
    lines: list[bytes] = []
    size = 0
    for line in wire.copy(f"COPY {table.sql} ({names}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)"):
        lines.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield _packed(number, lines)
            lines, size = [], 0
    if lines:
        yield _packed(number, lines)


def _check_unbroken(wire: Wire, tables: Mapping[str, Table]) -> None:
    """Refuse to copy tables that were emptied or rewritten since the snapshot began; they cannot be from now on.

    SUBTLE: these do not obey snapshots: a reader of the table afterwards sees none of the rows that it had before.
    The catalog obeys them. So there a table's file is the one that it was, and the function tells the one that it is.
    """
    wire.ask(f"LOCK TABLE {list_of(tables)} IN ACCESS SHARE MODE")
    for table in tables.values():
        same = wire.ask(
            f"SELECT c.relfilenode = pg_relation_filenode(c.oid) FROM pg_class c WHERE c.oid = {table.oid}"  # noqa: S608
        )
        if same != [(True,)]:
            raise Determinate(f"{table.sql} was emptied or rewritten just as its snapshot began. It is copied again")


def check_of(wire: Wire, tables: Mapping[str, Table]) -> str:
    """The text by which the server and the tables are known again: system, timeline, and the tables' ids."""
    ((system, timeline, _, _),) = wire.ask("IDENTIFY_SYSTEM")
    return " ".join([system, str(timeline), *(str(table.oid) for table in tables.values())])


def copied_messages(chosen: Snapshot, names: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of a snapshot of tables with these names, all at the address just before the log continues."""
    address, headers = chosen.beginning.lsn - 1, (chosen.beginning.header, *chosen.beginning.others)
    for number, lines in chosen.lines():
        count = len(lines)
        every = array_of(np.zeros(count, np.int32))
        header, table = (
            pa.DictionaryArray.from_arrays(every, [one]) for one in (headers[number].text(), names[number])
        )
        yield message_table(np.full(count, address, np.uint64), lines, header, table)


def _packed(number: int, lines: list[bytes]) -> bytes:
    columns = {"line": pa.array(lines, pa.binary()), "table": array_of(np.full(len(lines), number, np.int32))}
    return packed(pa.table(columns, schema=_SCHEMA), "zstd")
