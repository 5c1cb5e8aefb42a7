"""Processes that upsert, delete and append at once, and are killed: no update is lost, and each key has one row.

The history tells. An acknowledged upsert is in the updates at the time that it answered, once; and as of every time no
key has more than one row. A call that decided on an old version would retract a row twice, or leave one behind.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.testing import check_world
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA

KEYS, CALLS, PROCESSES = 6, 20, 3


def run(blob: str, consensus: str, who: int, calls: int, config: persist.Config) -> None:
    """Upsert some keys and delete others, again and again. Each word is written once, and told with its time."""
    rng = random.Random(who)
    with persist.open(blob, consensus, config=config) as client, client.open_writer("s", SCHEMA) as write:
        print("ready", flush=True)
        for number in range(calls):
            word, keys = f"{who}:{number}", rng.sample(range(KEYS), rng.randrange(1, KEYS))
            if rng.random() < 0.2:
                write.delete(keys[:2])
                continue
            done = write.upsert([{"id": key, "word": word} for key in keys])
            print(f"{word}@{done.time}x{len(keys)}", flush=True)
            write.append_now([{"id": 1000 + who, "word": "count"}])
            print("count", flush=True)


def start(place: tuple[str, str], who: int, calls: int) -> subprocess.Popen[str]:
    config = ["persist.Config()", "persist.Config(inline_bytes=0)"][who % 2]
    program = (
        f"import persist_lib as persist; from {__name__} import run; "
        f"run({place[0]!r}, {place[1]!r}, {who}, {calls}, {config})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    return (url, url) if request.param == "sqlite" else (f"file:{tmp_path}/blobs", url)


def history(client: persist.Client) -> list[tuple[int, str, int, int]]:
    """All updates: id, word, time, diff, by time."""
    found = check_world(client, "s").state
    upper = found.upper.time or 0
    with client.open_reader("s") as read:
        tables = [{**row, "_time": 0} for row in read.snapshot(0, diff=True).to_pylist()]
        for event in read.listen(0, until=upper):
            if isinstance(event, persist.Updates):
                tables += event.table.to_pylist()
    return sorted((row["id"], row["word"], row["_time"], row["_diff"]) for row in tables)


def check(client: persist.Client, told: list[str]) -> None:
    """Every acknowledged call is in the history once, and at every time each key has at most one row."""
    updates = history(client)
    by_word = Counter((word, when) for id_, word, when, diff in updates if diff > 0 and id_ < 1000)
    for line in map(str.strip, told):
        if "@" in line:
            word, _, rest = line.partition("@")
            at, _, keys = rest.partition("x")
            assert by_word[word, int(at)] == int(keys), f"{line} is not in the history as it was told"
    assert max(Counter(each for each, _ in by_word).values(), default=1) == 1, "a call was carried out twice"
    now: Counter[tuple[int, str]] = Counter()
    for moment in sorted({update[2] for update in updates}):
        for id_, value, when, diff in updates:
            if when == moment:
                now[id_, value] += diff
        live = [row for row, n in now.items() if n and row[0] < 1000]
        assert all(now[row] == 1 for row in live), f"at {moment}: {now}"
        assert len({id_ for id_, _ in live}) == len(live), f"at {moment}: {live}"
    assert sum(n for (id_, _), n in now.items() if id_ >= 1000) >= told.count("count")


@pytest.mark.slow
def test_processes_that_write_by_key_at_once_lose_nothing(place: tuple[str, str]) -> None:
    with persist.open(*place) as client:
        _, kept = client.open_shard("s", SCHEMA)  # holds the history
        running = [start(place, who, CALLS) for who in range(PROCESSES)]
        while any(process.poll() is None for process in running):
            client.maintain("s")
            time.sleep(0.05)
        told = [line for process in running for line in process.communicate()[0].split()]
        assert [process.returncode for process in running] == [0] * PROCESSES
        check(client, told)
        counts = Counter(told)["count"]
        with client.open_reader("s") as read:
            found = read.snapshot(keys=[1000 + who for who in range(PROCESSES)], diff=True).to_pylist()
        assert sum(row["_diff"] for row in found) == counts
        kept.close()


@pytest.mark.slow
def test_killed_processes_leave_whole_calls_or_none(place: tuple[str, str]) -> None:
    rng = random.Random(int(os.environ.get("PERSIST_TEST_SEED", "1")))
    told: list[str] = []
    with persist.open(*place) as client:
        _, kept = client.open_shard("s", SCHEMA)
        for who in range(3):
            process = start(place, who, 100_000)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            told += iter(process.stdout.readline, "count\n")  # until it has done something
            told.append("count")
            time.sleep(rng.uniform(0.0, 0.7))
            process.send_signal(signal.SIGKILL)
            told += process.communicate()[0].split("\n")[:-1]
        assert told
        check(client, told)
        kept.close()


def test_threads_of_one_client_and_of_several_lose_nothing(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    errors: list[PersistError] = []
    told: list[str] = []
    with persist.open(url) as client, persist.open(url) as other:
        shared, kept = client.open_shard("s", SCHEMA)
        writers = [shared, shared, client.open_writer("s", SCHEMA), other.open_writer("s", SCHEMA)]

        def work(who: int) -> None:
            rng = random.Random(who)
            for number in range(8):
                keys = rng.sample(range(KEYS), 3)
                try:
                    done = writers[who].upsert([{"id": key, "word": f"{who}:{number}"} for key in keys])
                    told.append(f"{who}:{number}@{done.time}x3")
                    writers[who].append_now([{"id": 1000 + who, "word": "count"}])
                    told.append("count")
                except PersistError as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(len(writers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(told) == 64
        check(client, told)
        kept.close()
