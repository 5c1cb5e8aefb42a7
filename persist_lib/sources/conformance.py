"""Whether a source reader keeps its promises. Who writes one calls `check_reader` in a test of their own.

    def test_my_reader(tmp_path):
        check_reader(lambda: MyReader(tmp_path), {"orders": [b"a", b"b"], "lines": []})

A violation is an AssertionError that says which promise was broken, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise

import pyarrow as pa

from persist_lib.errors import Diverged, Gone, PersistError
from persist_lib.kernel.columns import plain_table
from persist_lib.sources.protocol import ADDRESS, START, Mark, SourceReader

Open = Callable[[], SourceReader]
FEW = 64
"""Addresses of a partition from which a read begins, at most; and marks up to which it is."""
STEP = 1 << 20
TABLE_BYTES = 64 << 20
"""The largest table that a reader may yield."""


def check_reader(open_reader: Open, expected: Mapping[str, Sequence[object]], *, is_empty_known: bool = False) -> None:
    """Check order, restarts at every address, watermarks, that two readers are alike, and what is empty.

    `expected` has the values of all messages by partition. A partition without messages may be unknown to the reader,
    unless `is_empty_known`.
    """
    first, second = open_reader(), open_reader()
    try:
        marks = check_watermarks(first, expected, is_empty_known=is_empty_known)
        for partition, values in expected.items():
            if partition in marks:
                check_partition(first, second, partition, marks[partition], values)
        for reader in (first, second):
            reader.tell(marks)
            reader.tell(marks)
    finally:
        for reader in (first, second, first):
            reader.close()


def check_watermarks(
    reader: SourceReader, expected: Mapping[str, Sequence[object]], *, is_empty_known: bool
) -> dict[str, Mark]:
    """Check that marks reach the end, however small the steps, and that they then say nothing new."""
    found: dict[str, Mark] = {}
    for most_bytes in (1, STEP):
        bound: dict[str, Mark] = {}
        while new := dict(reader.high_watermarks(bound, most_bytes)):
            for partition, mark in new.items():
                before = bound.get(partition)
                _holds(
                    before is None or mark.address > before.address,
                    f"{partition}: the mark went from {before} to {mark}; answer only what goes beyond",
                )
            bound |= new
        for partition, mark in bound.items():
            known = found.setdefault(partition, mark)
            _holds(known == mark, f"{partition}: by steps it ends at {known}, at once at {mark}")
    wanted = {partition for partition, values in expected.items() if len(values) or is_empty_known}
    _holds(set(found) - set(expected) == set(), f"unexpected partitions {sorted(set(found) - set(expected))}")
    _holds(wanted <= set(found), f"missing partitions {sorted(wanted - set(found))}")
    return found


def check_partition(
    reader: SourceReader, other: SourceReader, partition: str, end: Mark, values: Sequence[object]
) -> None:
    """Check what is read of a partition, from its start and from everywhere in it."""
    whole = read_all(reader, partition, START, end)
    _holds(whole.column("value").to_pylist() == list(values), f"{partition}: other messages than expected, or order")
    _holds(whole.equals(read_all(other, partition, START, end)), f"{partition}: two readers differ")
    addresses = whole.column("address").to_pylist()
    for one, next_ in pairwise(addresses):
        _holds(one <= next_, f"{partition}: the address goes back from {one} to {next_}")
    _holds(not addresses or addresses[-1] < end.address, f"{partition}: an address is not below the mark {end}")
    distinct = sorted(set(addresses))
    for address in distinct[:: max(1, len(distinct) // FEW)]:
        rest = read_all(other, partition, Mark(address), end)
        wanted = whole.slice(addresses.index(address))
        _holds(
            _are_same(rest, wanted), f"{partition}: started at {address}, it gives other messages than from the start"
        )
        before = read_all(reader, partition, START, Mark(address))
        _holds(_are_same(before, whole.slice(0, addresses.index(address))), f"{partition}: up to {address} it differs")
    nothing = read_all(reader, partition, end, end)
    _holds(nothing.num_rows == 0, f"{partition}: there are messages in an empty range")


def check_gone(reader: SourceReader, partition: str, start: Mark, end: Mark) -> None:
    """Check that messages that were taken away are reported as gone, and not left out."""
    _check_refused(reader, partition, start, end, (Gone,), "gone")


def check_diverged(reader: SourceReader, partition: str, start: Mark, end: Mark) -> None:
    """Check that messages that were changed are not given as if they were the same."""
    _check_refused(reader, partition, start, end, (Diverged, Gone), "changed")


def _check_refused(
    reader: SourceReader, partition: str, start: Mark, end: Mark, errors: tuple[type[PersistError], ...], what: str
) -> None:  # fmt: skip
    try:
        found = read_all(reader, partition, start, end)
    except errors as error:
        _holds(error.fields.get("partition") == partition, f"{type(error).__name__} names no partition")
    else:
        raise AssertionError(f"{partition}: {what}, but {found.num_rows} messages were given without an error")


def check_many(open_reader: Open, partition: str, count: int) -> int:
    """Check that `count` messages come in tables of bounded size. Answers the largest one's bytes."""
    most = seen = 0
    with closing(open_reader()) as reader:
        bound: dict[str, Mark] = {}
        while new := dict(reader.high_watermarks(bound, 64 << 20)):
            bound |= new
        for table in reader.read(partition, START, bound[partition]):
            most, seen = max(most, table.nbytes), seen + table.num_rows
    _holds(seen == count, f"{partition}: {seen} messages of {count}")
    _holds(most <= TABLE_BYTES, f"{partition}: a table has {most} bytes; give smaller ones")
    return most


def read_all(reader: SourceReader, partition: str, start: Mark, end: Mark) -> pa.Table:
    """All messages of a range as one table."""
    tables = list(reader.read(partition, start, end))
    for table in tables:
        _holds(table.schema.field("address").type == ADDRESS.type, f"{partition}: an address is uint64")
        _holds(table.column("address").null_count == 0, f"{partition}: an address is null")
    if not tables:
        return pa.table({"address": pa.array([], ADDRESS.type), "value": pa.array([], pa.binary())})
    return plain_table(pa.concat_tables(tables)).combine_chunks()


def _are_same(one: pa.Table, other: pa.Table) -> bool:
    return one.num_rows == other.num_rows and (one.num_rows == 0 or one.equals(other))


def _holds(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
