"""The processes of the bank: they move money between tables in transactions, apply, tidy, read and hand tables over.

python -m tests.torture.transfers URL DIRECTORY

Reads lines `role name seed`, forks a process for each, and answers its pid. A process runs until it is killed. Each
transaction is a line in the process's log before it is sent, and one after. What is found wrong goes to `failures`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.compute as pc

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.errors import Determinate, Indeterminate, NotSent, Refused, TimedOut
from persist_lib.timeline import Tables
from persist_lib.timeline.transaction import Transaction
from tests.torture.roles import Log, serve

TABLES = 10
ACCOUNTS = 4
START_CENTS = 1000
TIMELINE = "bank"
SCHEMA = persist.Schema({"id": "int64 not null"}, {"cents": "int64 not null", "by": "string not null"}, unique=True)
LEDGER = persist.Schema({"transfer": "string not null"}, {"cents": "int64 not null"}, unique=True)
NOT_DONE = (Refused, Determinate, NotSent, TimedOut)


def config(rng: random.Random) -> persist.Config:
    return persist.Config(inline_bytes=rng.choice([0, 2000, 16 * 1024]), timeout_s=30, poll_s=0.005)


def name_of(index: int) -> str:
    return f"accounts{index}"


def create(tables: Tables) -> int:
    """All tables, with their money; answers the time from which on it is there."""
    for index in range(TABLES):
        tables.create(name_of(index), SCHEMA, shards=1 + index % 2, timeline=TIMELINE, mode="wal")
    tables.create("ledger", LEDGER, timeline=TIMELINE)
    with tables.transaction(TIMELINE) as t:
        for index in range(TABLES):
            t.insert(name_of(index), [{"id": i, "cents": START_CENTS, "by": ""} for i in range(ACCOUNTS)])
    return t.time or 0


def transfer(url: str, directory: Path, name: str, seed: int) -> None:
    """Move money, some of it between three accounts, with retries after conflicts; each try is a transaction."""
    rng = random.Random(f"{name} {seed}")
    log = Log(directory / f"log-{name}-{seed}")
    with persist.open(*url.split(" "), config=config(rng)) as client:
        tables = client.controller().tables()
        number = 0
        while True:
            number += 1
            with suppress(TimedOut):  # a table waits for its copy, whose process was killed
                move(tables, log, f"{name}.{seed}.{number}", rng)
            time.sleep(rng.choice([0, 0, 0.02]) * rng.random())


def move(tables: Tables, log: Log, id_: str, rng: random.Random) -> None:
    keys = rng.sample([(name_of(i), k) for i in range(TABLES) for k in range(ACCOUNTS)], rng.choice([2, 2, 3]))
    began = time.monotonic_ns()
    t = tables.transaction(TIMELINE)
    reads = {}
    for table, key in keys:
        (row,) = t.read(table, keys=[key]).to_pylist()
        reads[table, key] = row["cents"], row["by"]
    amount = rng.randint(1, 50)
    writes = {key: (cents + amount, id_) for key, (cents, _) in reads.items()}
    first = keys[0]
    writes[first] = reads[first][0] - amount * (len(keys) - 1), id_
    for (table, key), (cents, by) in writes.items():
        if rng.random() < 0.5:
            t.upsert(table, [{"id": key, "cents": cents, "by": by}])
        else:
            t.update(table, {"cents": cents, "by": by}, filter=pc.field("id") == key)
    t.insert("ledger", [{"transfer": id_, "cents": amount}])
    record = {
        "id": id_, "as_of": t.as_of, "began": began,
        "reads": [[*key, *value] for key, value in reads.items()],
        "writes": [[*key, *value] for key, value in writes.items()],
    }  # fmt: skip
    log.say("try", json.dumps(record))
    try:
        done = t.commit()
    except Indeterminate:
        return
    except NOT_DONE:
        log.say("no", id_, time.monotonic_ns())
    else:
        log.say("ack", id_, done.time, time.monotonic_ns())


def apply(url: str, directory: Path, name: str, seed: int) -> None:
    """Copy to the tables, and give up what is copied."""
    rng = random.Random(f"{name} {seed}")
    with persist.open(*url.split(" "), config=config(rng)) as client:
        tables = client.controller().tables()
        while True:
            tables.apply(TIMELINE)
            if rng.random() < 0.3:
                tables.tidy(TIMELINE)
            time.sleep(0.05 * rng.random())


def read(url: str, directory: Path, name: str, seed: int) -> None:
    """The total is the same at each time, and a time is read again as it was."""
    rng = random.Random(f"{name} {seed}")
    known: dict[int, list[list[dict[str, object]]]] = {}
    newest = 0
    with persist.open(*url.split(" "), config=config(rng)) as client:
        tables = client.controller().tables()
        while True:
            as_of = tables.read_time(TIMELINE)
            assert as_of >= newest, "time went back"
            newest = as_of
            for moment in {as_of, rng.choice([as_of, *known])}:
                rows = [
                    sorted(tables.read(name_of(i), as_of=moment, diff=True).to_pylist(), key=lambda row: row["id"])
                    for i in range(TABLES)
                ]
                total = sum(row["cents"] * row["_diff"] for table in rows for row in table)
                assert total == TABLES * ACCOUNTS * START_CENTS, f"as of {moment} there are {total} cents"
                assert known.setdefault(moment, rows) == rows, f"as of {moment} it was something else before"
            if len(known) > 20:
                known.pop(rng.choice(list(known)))


def hand_over(url: str, directory: Path, name: str, seed: int) -> None:
    """Copy a table's rendition to another number of shards, and hand over to it."""
    rng = random.Random(f"{name} {seed}")
    with persist.open(*url.split(" "), config=config(rng)) as client:
        controller = client.controller()
        tables = controller.tables()
        finish_copies(controller)
        while True:
            table = name_of(rng.randrange(TABLES))
            found = controller.describe(table).renditions
            copies = [r.number for r in found if r.copies is not None and r.number >= found[-1].number]
            is_open = bool(copies) and found[-1].start is None
            try:
                number = copies[-1] if is_open else controller.make_rendition(
                    table, shards=rng.choice([1, 2, 3]), copy=True
                ).number  # fmt: skip
                controller.copy_rendition(table, number)
                controller.hand_over(table, number)
                tables.apply(TIMELINE)
                controller.copy_rendition(table, number, to_end=True)
            except Refused:
                continue
            time.sleep(0.3 * rng.random())


def finish_copies(controller: Controller) -> None:
    """Copy the rest of what was handed over to by a process that did not live to do it."""
    controller.tables().apply(TIMELINE)
    for index in range(TABLES):
        active = controller.describe(name_of(index)).active
        if active.copies is not None:
            controller.copy_rendition(name_of(index), active.number, to_end=True)


def warm_up() -> None:
    """Have everything imported."""
    with persist.open("memory:") as client:
        tables = client.controller().tables()
        create(tables)
        assert isinstance(tables.transaction(TIMELINE), Transaction)
        tables.apply(TIMELINE)


if __name__ == "__main__":
    warm_up()
    roles = {"transfer": transfer, "apply": apply, "read": read, "hand_over": hand_over}
    serve(roles, sys.argv[1], Path(sys.argv[2]))
