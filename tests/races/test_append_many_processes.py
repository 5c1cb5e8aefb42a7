"""Processes that append to overlapping sets of shards at once, and are killed: nobody ever sees half of a call."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib import Append
from persist_lib.errors import PersistError, UpperMismatch
from persist_lib.testing import check_world, contents_of
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, row

PAIRS = [("a", "b"), ("b", "c"), ("c", "a")]
SHARDS = "abc"
CALLS = 25


def run(blob: str, consensus: str, who: int, calls: int) -> None:
    """Append to a pair of shards at once, again and again; the word names the writer, the pair and the call."""
    rng = random.Random(who)
    with persist.open(blob, consensus) as client:
        writes = {shard: client.open_writer(shard, SCHEMA) for shard in SHARDS}
        print("ready", flush=True)
        for number in range(calls):
            pair = rng.choice(PAIRS)
            word = f"{who}:{'.'.join(pair)}:{number}"
            while True:
                uppers = [writes[shard].upper.time or 0 for shard in pair]
                appends = [
                    Append(writes[shard], [row(1, word, at)], at, at + 1)
                    for shard, at in zip(pair, uppers, strict=True)
                ]
                try:
                    client.compare_and_append_many(appends)
                except UpperMismatch:
                    continue
                print(word, flush=True)
                break


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    return (url, url) if request.param == "sqlite" else (f"file:{tmp_path}/blobs", url)


def start(place: tuple[str, str], who: int, calls: int) -> subprocess.Popen[str]:
    program = f"from {__name__} import run; run({place[0]!r}, {place[1]!r}, {who}, {calls})"
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def words(client: persist.Client, shard: str) -> list[str]:
    with client.open_reader(shard, SCHEMA) as read:
        upper = read.upper.time or 0
        return (
            [word for _, word in contents_of(read.snapshot(upper - 1, diff=True).to_arrow()).elements()]
            if upper
            else []
        )


def look(client: persist.Client, order: str) -> dict[str, set[str]]:
    """What is in each shard, read one after the other."""
    found = {}
    for shard in order:
        client.machine(shard).fetch()
        found[shard] = set(words(client, shard))
    return found


def torn(found: dict[str, set[str]], order: str) -> list[str]:
    """Calls that are in a shard that was read earlier, and not in one that was read later."""
    return [
        f"{word} is in {first} and not in {second}"
        for first, second in itertools.combinations(order, 2)
        for word in found[first]
        if second in word.split(":")[1].split(".") and word not in found[second]
    ]


@pytest.fixture
def client(place: tuple[str, str]) -> Iterator[persist.Client]:
    with persist.open(*place) as opened:
        for shard in SHARDS:
            opened.open_writer(shard, SCHEMA)
        yield opened


@pytest.mark.slow
def test_processes_race_with_overlapping_shards_and_readers_see_each_call_in_all_of_them(
    place: tuple[str, str], client: persist.Client
) -> None:
    running = [start(place, who, CALLS) for who in range(3)]
    rng, looks = random.Random(0), 0
    reading = persist.open(*place, read_only=True)
    while any(process.poll() is None for process in running):
        order = "".join(rng.sample(SHARDS, 3))
        assert torn(look(reading, order), order) == []
        looks += 1
    reading.close()
    told = {word for process in running for word in process.communicate()[0].split() if ":" in word}
    assert [process.returncode for process in running] == [0] * 3, "they all got through"
    assert looks > 3
    found = look(client, SHARDS)
    assert len(told) == 3 * CALLS
    for word in told:
        assert {shard for shard in SHARDS if word in found[shard]} == set(word.split(":")[1].split("."))
    for shard in SHARDS:
        assert len(words(client, shard)) == len(found[shard])
        check_world(client, shard)


@pytest.mark.slow
def test_a_killed_process_leaves_each_of_its_calls_in_all_shards_or_in_none(
    place: tuple[str, str], client: persist.Client
) -> None:
    rng, told = random.Random(int(os.environ.get("PERSIST_TEST_SEED", "1"))), set()
    for who in range(3):
        process = start(place, who, 100_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(rng.randrange(1, 10)):
            told.add(process.stdout.readline().strip())
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        told |= {line.strip() for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n")}
    found = look(client, SHARDS)
    every = set().union(*found.values())
    assert told <= every, "what was acknowledged is there"
    for word in every:
        assert {shard for shard in SHARDS if word in found[shard]} == set(word.split(":")[1].split("."))
    for shard in SHARDS:
        check_world(client, shard)
    try:
        writes = [client.open_writer(shard, SCHEMA) for shard in SHARDS]
        uppers = [write.fetch_upper().time or 0 for write in writes]
        appends = [Append(w, [row(1, "z:a.b.c:0", at)], at, at + 1) for w, at in zip(writes, uppers, strict=True)]
        client.compare_and_append_many(appends)
    except PersistError as error:
        pytest.fail(f"who is killed blocks others: {error}")
