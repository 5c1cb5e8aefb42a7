"""Changes between two times: what a listener hears between them, and what leads from one snapshot to the other."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.errors import SinceViolation
from persist_lib.times import Unit

COLUMNS = {"v": "int64", "w": "string"}
OLDER = {unit: persist.Schema({"id": "int64"}, COLUMNS, times=unit) for unit in ("ms", "us", None)}
NEWER = {unit: persist.Schema({"id": "int64"}, {**COLUMNS, "x": "int64"}, times=unit) for unit in ("ms", "us", None)}
ROW = st.tuples(
    st.integers(0, 3), st.sampled_from([None, 1, 2]), st.sampled_from([None, "a"]), st.sampled_from([None, 5]),
    st.integers(0, 2), st.sampled_from([1, 1, 2, -1]),
)  # fmt: skip
APPENDS = st.lists(st.lists(ROW, max_size=12), min_size=1, max_size=4)
STEP = 3
POLICY = persist.Policy(weight=1e9, advance=0.01)


def updates(table: pa.Table, *, is_summed: bool = True) -> Counter[str]:
    """Each data and time with its diff, in which a row that is there twice would show, unless it may be."""
    rows, found = table.to_pylist(), Counter[str]()
    for row in rows:
        found[repr({k: v for k, v in row.items() if k != "_diff"})] += row["_diff"]
    assert len(found) == len(rows) or not is_summed, "each data and time once"
    return Counter({row: diff for row, diff in found.items() if diff})


def totals(table: pa.Table) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in table.to_pylist():
        found[repr({k: v for k, v in row.items() if k not in ("_diff", "_time")})] += row["_diff"]
    return {row: diff for row, diff in found.items() if diff}


def added(*counts: dict[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for count in counts:
        found.update(count)
    return {row: diff for row, diff in found.items() if diff}


def heard(read: persist.ReadHandle, from_: int, to: int) -> pa.Table:
    events = read.listen(from_, until=to + 1)
    tables = [event.table for event in events if isinstance(event, persist.Updates)]
    return pa.concat_tables([read.schema.changes.empty_table(), *tables])


@settings(max_examples=60)
@given(
    older=APPENDS, newer=st.none() | APPENDS, unit=st.sampled_from(["ms", "us", None]), reads_older=st.booleans(),
    inline=st.sampled_from([0, 1 << 14]), advance=st.none() | st.integers(0, 24), read_only=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_changes_are_what_a_listener_hears_and_lead_from_one_snapshot_to_the_next(
    older: list[list[Any]], newer: list[list[Any]] | None, unit: Unit | None, reads_older: bool, inline: int,
    advance: int | None, read_only: bool, data: st.DataObject,
) -> None:  # fmt: skip
    config = persist.Config(inline_bytes=inline, part_bytes=64 << 10)
    with persist.open("memory:", config=config, runtime=persist.Runtime(background=False)) as client:
        write = client.open_writer("s", OLDER[unit])
        sent = {0: older, 1: newer or []}
        upper = 0
        for stage, appends in sent.items():
            if stage and newer is not None:
                client.evolve_schema("s", NEWER[unit])
                write = client.open_writer("s", NEWER[unit])
            for rows in appends:
                write.compare_and_append(
                    [
                        {"id": i, "v": v, "w": w, **({"x": x} if stage else {}), "_time": upper + after, "_diff": diff}
                        for i, v, w, x, after, diff in rows
                    ],
                    upper, upper + STEP,
                )  # fmt: skip
                upper += STEP
        since = None if advance is None else min(advance, upper - 1)
        schema = OLDER[unit] if newer is None or reads_older else NEWER[unit]
        with client.open_reader("s") as holder:
            if since is not None:
                holder.downgrade_since(since)
            client.compact("s", policy=POLICY)
            looking = persist.open(client.location, config=config, read_only=read_only, runtime=client.runtime)
            older_than_newest = newer is not None and reads_older
            check(looking.open_reader("s", schema), since, upper, data, reads_older=older_than_newest)


def check(read: persist.ReadHandle, since: int | None, upper: int, data: st.DataObject, *, reads_older: bool) -> None:
    points = sorted(data.draw(st.lists(st.integers(since or 0, upper - 1), min_size=1, max_size=3)))
    for first, last in [*pairwise(points), (points[0], points[0]), (points[0], upper - 1)]:
        found = read.changes(first, last)
        table = found.to_arrow()
        assert table.schema.equals(read.schema.changes)
        # In older columns, a listener gives what differs in newer ones alone row by row.
        assert updates(table) == updates(heard(read, first, last), is_summed=not reads_older)
        before, after = read.snapshot(first, diff=True).to_arrow(), read.snapshot(last, diff=True).to_arrow()
        assert added(totals(before), totals(table)) == totals(after)
        assert pa.concat_tables([table.slice(0, 0), *found.batches()]).equals(table)
    if not since:
        assert totals(read.changes(None).to_arrow()) == totals(read.snapshot(diff=True).to_arrow())
        return
    for early in (since - 1, None):
        try:
            read.changes(early)
        except SinceViolation:
            continue
        raise AssertionError("history that was given up was read")
