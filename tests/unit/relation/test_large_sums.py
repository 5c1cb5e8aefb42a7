"""Sums of diffs in batches of several parts: partial sums are no totals, and totals that do not fit are told."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import DiffOverflow
from persist_lib.relation.projection import by_key
from persist_lib.testing import check_world, contents_of

SCHEMA = persist.Schema(key={"id": "int64"}, value={"word": "string"})
SMALL_PARTS = persist.Config(part_bytes=64 << 10, inline_bytes=0)
MOST = 2**63 - 1
MANY = 4000
"""Rows that are more than one part."""


@pytest.fixture
def client() -> Iterator[persist.Client]:
    with persist.open("memory:", config=SMALL_PARTS) as client:
        yield client


def filling(start: int) -> list[dict[str, object]]:
    """Other updates: as many as fill a part and more."""
    return [{"id": start + n, "word": "w" * 10, "_time": 0, "_diff": 1} for n in range(MANY)]


def poison(*diffs: int) -> list[dict[str, object]]:
    return [{"id": -1, "word": "x", "_time": 0, "_diff": diff} for diff in diffs]


def table(*rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist([row for some in rows for row in some], schema=SCHEMA.updates)


@pytest.mark.parametrize("call", ["compare_and_append", "append"])
def test_what_overflows_in_one_part_and_is_taken_back_in_another_is_no_overflow(
    client: persist.Client, call: str
) -> None:
    write = client.open_writer("s", SCHEMA)
    updates = table(poison(MOST, MOST, 5), filling(0), poison(-MOST, -MOST), filling(MANY))
    done = getattr(write, call)(updates, 0, 1)
    with client.open_reader("s") as read:
        assert len(read.machine.state.trace[-1].parts) > 1
        found = contents_of(read.snapshot(0, diff=True).to_arrow())
        assert found[-1, "x"] == 5
        assert len(found) == 2 * MANY + 1
        split = [dict(contents_of(split.to_arrow(client.blob))) for split in read.snapshot(0, diff=True).splits(3)]
        assert sum(part.get((-1, "x"), 0) for part in split) == 5
    assert done.count > 2 * MANY
    client.compact("s")
    check_world(client, "s")
    with client.open_reader("s") as read:
        assert contents_of(read.snapshot(0, diff=True).to_arrow())[-1, "x"] == 5


@pytest.mark.parametrize("diffs", [(MOST, MOST), (-(2**63), -1), (2**62, 2**62), (MOST, 1)])
def test_a_total_that_does_not_fit_is_told_though_each_part_of_it_does(
    client: persist.Client, diffs: tuple[int, int]
) -> None:
    write = client.open_writer("s", SCHEMA)
    with pytest.raises(DiffOverflow, match="'id': -1") as caught:
        write.compare_and_append(table(poison(diffs[0]), filling(0), poison(diffs[1])), 0, 1)
    assert caught.value.fields["total"] == sum(diffs)
    assert (write.fetch_upper(), list(client.blob.list("s/"))) == (persist.at(0), [])


def test_an_overflow_in_one_part_that_nothing_takes_back_is_told(client: persist.Client) -> None:
    write = client.open_writer("s", SCHEMA)
    others = filling(0)
    undone = [{**row, "_diff": -1} for row in others]
    with pytest.raises(DiffOverflow, match="'id': -1"):
        write.compare_and_append(iter([table(poison(MOST, MOST)), table(others, undone)]), 0, 1)
    assert not list(client.blob.list("s/"))


def test_usual_updates_are_not_read_back(client: persist.Client) -> None:
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append(table(filling(0), poison(2**40, -(2**41)), filling(MANY), poison(-3)), 0, 1)
    assert not {"get", "get_range"} & client.metrics().operations.keys()


def test_in_an_older_schema_too_only_totals_overflow() -> None:
    older = persist.Schema(key={"id": "int64"})
    tables = [pa.table({"id": [1, 2], "_diff": [1, MOST]}), pa.table({"id": [2], "_diff": [MOST]})]
    back = pa.table({"id": [2, 3], "_diff": [-MOST, 1]})

    def totals(*given: pa.Table) -> pa.Table:
        there = (table.cast(older.contents) for table in given)
        return pa.concat_tables(by_key(there, older, older.contents, older.key))

    found = totals(*tables, back)
    assert found.to_pydict() == {"id": [1, 2, 3], "_diff": [1, MOST, 1]}
    with pytest.raises(DiffOverflow, match="'id': 2"):
        totals(*tables)
    with pytest.raises(DiffOverflow, match="'id': 2"):
        totals(*tables, back.slice(1))
