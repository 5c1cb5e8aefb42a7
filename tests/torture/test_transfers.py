"""Bank transfers over ten tables by eight processes that are killed: no cent is lost or doubled, at any time.

PERSIST_TRANSFER_KILLS says how many are killed; `make transfers` has more of them, and handovers beside.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.timeline import Tables
from tests import servers
from tests.torture.isolation import Key, Recorded, Value, anomalies
from tests.torture.processes import Processes, failures
from tests.torture.transfers import ACCOUNTS, START_CENTS, TABLES, TIMELINE, create, finish_copies, name_of

KILLS = int(os.environ.get("PERSIST_TRANSFER_KILLS", "12"))
ROOT = Path(__file__).resolve().parents[2]
ROLES = {**{f"t{i}": "transfer" for i in range(6)}, "app": "apply", "rex": "read"}
ENOUGH = 20
PATIENCE_S = 90.0


@pytest.mark.timeout(600)
def test_no_cent_is_lost_or_doubled_whoever_is_killed(tmp_path: Path, rng: random.Random) -> None:
    bank(f"file:{tmp_path}/data", tmp_path, KILLS, ROLES, rng)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_nor_is_it_while_tables_are_handed_over(tmp_path: Path, rng: random.Random) -> None:
    bank(f"file:{tmp_path}/data", tmp_path, KILLS, {**ROLES, "t5": "hand_over"}, rng)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_nor_is_it_on_postgresql(tmp_path: Path, rng: random.Random) -> None:
    schema = f"t{os.urandom(8).hex()}"
    url = f"file:{tmp_path}/data {servers.postgres_at(persist_schema=schema)}"
    bank(url, tmp_path, KILLS, {**ROLES, "t5": "hand_over"}, rng)


def bank(url: str, directory: Path, kills: int, roles: dict[str, str], rng: random.Random) -> None:
    with persist.open(*url.split(" ")) as client:
        start = create(client.controller().tables())
    processes = Processes(url, directory, rng, roles=roles, program="tests.torture.transfers")
    try:
        for name in roles:
            processes.start(name)
        for _ in range(kills):
            time.sleep(rng.choice([0.1, 0.4, 0.8]) * rng.random())
            name = rng.choice(list(roles))
            assert failures(directory) == ""
            processes.kill(name)
            processes.start(name)
        until = time.monotonic() + PATIENCE_S
        while acknowledged(directory) < ENOUGH and time.monotonic() < until:
            time.sleep(0.2)
            assert failures(directory) == ""
    finally:
        processes.close()
    assert failures(directory) == ""
    judge(url, directory, start)


def acknowledged(directory: Path) -> int:
    return sum(path.read_text().count("ack ") for path in directory.glob("log-*"))


def recorded(directory: Path, there: dict[str, int]) -> dict[str, Recorded]:
    """The transactions in the logs. What became of those without an answer is told by the ledger."""
    found: dict[str, Recorded] = {}
    for path in directory.glob("log-*"):
        for line in path.read_text().splitlines():
            word, rest = line.split(" ", 1)
            if word == "try":
                one = json.loads(rest)
                sides: list[dict[Key, Value]] = [
                    {(table, key): (cents, by) for table, key, cents, by in one[side]} for side in ("reads", "writes")
                ]
                found[one["id"]] = Recorded(
                    one["id"], path.name, one["as_of"], sides[0], sides[1], "unknown", there.get(one["id"]),
                    one["began"], 1 << 62,
                )  # fmt: skip
            elif word == "ack":
                id_, moment, ended = rest.split()
                found[id_] = found[id_]._replace(outcome="committed", time=int(moment), ended=int(ended))
            else:
                id_, ended = rest.split()
                found[id_] = found[id_]._replace(outcome="refused", ended=int(ended))
    return found


def judge(url: str, directory: Path, start: int) -> None:
    with persist.open(*url.split(" ")) as client:
        finish_copies(client.controller())
        tables = client.controller().tables()
        newest = tables.read_time(TIMELINE)
        there = ledger_of(tables, start, newest)
        tried = recorded(directory, there)
        check_ledger(tried, there)
        initial: dict[Key, Value] = {(name_of(i), k): (START_CENTS, "") for i in range(TABLES) for k in range(ACCOUNTS)}
        assert anomalies(tried.values(), initial) == []
        check_totals(tables, start, newest)
        tables.apply(TIMELINE)
        check_totals(tables, start, newest)
        while tables.tidy(TIMELINE):
            pass
        with client.open_reader(f"{next(iter(client.controller().catalog.fetch().timelines))}.wal") as wal:
            assert wal.snapshot(diff=True).to_arrow().num_rows == 0, "something is left in the WAL"
    outcomes = Counter(one.outcome for one in tried.values())
    print(f"{dict(outcomes)}; {len(there)} in the ledger, times {start} to {newest}")
    assert outcomes["committed"] >= ENOUGH, "too little happened"


def ledger_of(tables: Tables, start: int, newest: int) -> dict[str, int]:
    """When each transfer came into the ledger: heard from the beginning."""
    there: dict[str, int] = {}
    with tables.listen("ledger", start) as listener:
        while (listener.frontier.time or 0) <= newest:
            for event in listener.poll():
                if isinstance(event, persist.Updates):
                    times = pc.cast(event.table.column("_time"), "int64").to_pylist()
                    for row, moment in zip(event.table.to_pylist(), times, strict=True):
                        assert row["_diff"] == 1, f"{row} was there twice, or taken away"
                        assert row["transfer"] not in there, f"{row} came twice"
                        there[row["transfer"]] = moment
    return there


def check_ledger(tried: dict[str, Recorded], there: dict[str, int]) -> None:
    assert there.keys() <= tried.keys(), "nobody made these"
    for one in tried.values():
        if one.outcome == "committed":
            assert there.get(one.id) == one.time, f"{one.id} was acknowledged at {one.time}: {there.get(one.id)}"
        if one.outcome == "refused":
            assert one.id not in there, f"{one.id} was refused and is there"


def check_totals(tables: Tables, start: int, newest: int) -> None:
    """The total as of every time: what all updates at one time add up to is nothing."""
    moved: Counter[int] = Counter()
    for index in range(TABLES):
        rows = tables.read(name_of(index), as_of=start, diff=True).to_pylist()
        assert sum(row["cents"] for row in rows) == ACCOUNTS * START_CENTS
        with tables.listen(name_of(index), start) as listener:
            while (listener.frontier.time or 0) <= newest:
                for event in listener.poll():
                    if isinstance(event, persist.Updates):
                        times = pc.cast(event.table.column("_time"), "int64").to_pylist()
                        for row, moment in zip(event.table.to_pylist(), times, strict=True):
                            moved[moment] += row["cents"] * row["_diff"]
    assert set(moved.values()) <= {0}, f"the total changes at {[t for t, cents in moved.items() if cents]}"
    assert len(moved) >= ENOUGH
    for as_of in random.Random(newest).sample(sorted(moved), 5):
        total = sum(
            row["cents"] * row["_diff"]
            for i in range(TABLES)
            for row in tables.read(name_of(i), as_of=as_of, diff=True).to_pylist()
        )
        assert total == TABLES * ACCOUNTS * START_CENTS
