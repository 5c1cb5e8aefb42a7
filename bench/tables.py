"""What a transaction over ten tables costs: beside ten appends to ten shards, and beside one append to one.

All of them write the same rows to one SQLite location, by turns, with a writer that is open and nobody beside. The
transaction is blind (inserts), so that it reads nothing but the WAL's upper. Requests are exact; times are of one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count
from tempfile import TemporaryDirectory

import persist_lib as persist
from bench.figures import Figure, timed
from persist_lib.core.cost import Cost

TABLES = 10
ROWS = 10
SCHEMA = persist.Schema({"id": "int64 not null"}, {"cents": "int64", "note": "string"}, times="ms")


def tables(quick: bool) -> list[Figure]:  # noqa: C901 - one setting, several acts in it
    """A WAL transaction over ten tables, ten appends, one append; and applying such transactions."""
    rounds = 3 if quick else 100
    with TemporaryDirectory(prefix="persist-bench-") as folder, persist.open(f"file:{folder}/data") as client:
        tables = client.controller().tables()
        for index in range(TABLES):
            tables.create(f"t{index}", SCHEMA, mode="wal")
        writers = [client.open_writer(f"s{index}", SCHEMA) for index in range(TABLES)]
        ids = count()

        def rows() -> list[dict[str, object]]:
            return [{"id": next(ids), "cents": 5, "note": "x" * 20} for _ in range(ROWS)]

        def transaction() -> None:
            with tables.transaction() as t:
                for index in range(TABLES):
                    t.insert(f"t{index}", rows())

        def ten() -> None:
            for write in writers:
                write.append_now(rows())

        def one() -> None:
            writers[0].append_now(rows())

        def read() -> None:
            with tables.transaction() as t:
                for index in range(TABLES):
                    t.read(f"t{index}", columns=["cents"]).to_arrow()

        for act in (transaction, ten, one, read):
            act()
        costs = [_cost(act) for act in (transaction, ten, one)]
        spent: list[list[float]] = [[], [], []]
        for _ in range(rounds):
            for times, act in zip(spent, (transaction, ten, one), strict=True):
                times.append(timed(act))
        mine, theirs, single = (statistics.median(times) for times in spent)
        read_cost = _cost(read)
        tables.apply()  # its writers are registered once
        for _ in range(rounds):
            transaction()
        apply_cost = _cost(tables.apply)
        note = f"{costs[0].bytes_written:,} bytes written beside {costs[1].bytes_written:,}; medians of {rounds}"
        return [
            Figure("transaction-requests-beside-10-appends", costs[0].requests, costs[1].requests, "requests",
                   "ten appends", at_most=0.2, note=note),
            Figure("transaction-requests-beside-1-append", costs[0].requests, costs[2].requests, "requests",
                   "one append", at_most=2.0),
            Figure("transaction-beside-10-appends", mine, theirs, "s", "ten appends", at_most=1.0, note=note),
            Figure("transaction-beside-1-append", mine, single, "s", "one append"),
            Figure("read-of-10-tables-requests", read_cost.requests, TABLES, "requests", "one a table", at_most=1.0,
                   note="without anything new since the last one"),
            Figure("apply-requests-a-table", apply_cost.requests / TABLES, 1, "requests", "one append",
                   note=f"{rounds} transactions at once; {apply_cost.bytes_written:,} bytes, written a second time"),
        ]  # fmt: skip


def _cost(act: Callable[[], object]) -> Cost:
    with persist.Spending() as spent:
        act()
    return spent.cost
