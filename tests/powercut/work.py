"""What is done until the power is cut, and what has to be so afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import persist_lib as persist
from persist_lib.core.plan.compaction import Policy
from persist_lib.errors import NotFound
from persist_lib.location import open_location
from persist_lib.testing import ManualClock, check_swept, check_world, contents_of
from tests.powercut.disk import Said
from tests.powercut.recording import Recorder
from tests.worlds import SCHEMA, row

SHARD = "s"
FOREVER_S = 10 * 365 * 86400.0
ALL_IN_ONE = Policy(weight=1e9)
TRIED, ACKED, OPENED = "tried", "acked", "opened"
Contents = Counter[tuple[object, ...]]


class Append(NamedTuple):
    """One append: at the time of its number, these rows."""

    number: int
    rows: tuple[tuple[int, str], ...]


def plan(rng: random.Random, appends: int) -> list[Append]:
    """Small, large and empty ones."""
    sizes = [rng.choice([0, 1, 1, 5, 40]) for _ in range(appends)]
    return [
        Append(number, tuple((number * 100 + i, rng.choice(["a", "b" * 300])) for i in range(size)))
        for number, size in enumerate(sizes)
    ]


def client_at(folder: Path, clock: ManualClock, rng: random.Random, *, create: bool = True) -> persist.Client:
    """A client whose randomness and clock are the test's."""
    location = open_location(f"file:{folder}", create=create, clock=clock)
    config = persist.Config(
        inline_bytes=rng.choice([0, 600, 16 * 1024]), part_bytes=64 * 1024, task_bytes=64 * 1024,
        rollup_every=rng.choice([8, 20]), lease_ms=60_000,
    )  # fmt: skip
    return persist.open(location, config=config, runtime=clock.runtime(rng.getrandbits(32)))


def work(folder: Path, recorder: Recorder, todo: Sequence[Append], rng: random.Random) -> None:
    """Carry out all appends by several clients, one after the other, with all kinds of upkeep in between."""
    clock, left = ManualClock(), list(todo)
    duties: list[Callable[[persist.Client], object]] = [
        lambda client: client.maintain(SHARD),
        lambda client: client.compact(SHARD, policy=ALL_IN_ONE),
        lambda client: client.roll_up(SHARD, force=True),
        lambda client: client.collect(SHARD),
        lambda client: client.audit_orphans(SHARD),
        lambda client: client.survey(),
        lambda client: client.scrub(SHARD, new_only=True),
        lambda client: client.verify(SHARD),
    ]
    while left:
        with client_at(folder, clock, rng) as client:
            write = client.open_writer(SHARD, SCHEMA)
            recorder.say(OPENED)
            for _ in range(min(len(left), rng.randrange(1, 12))):
                append = left.pop(0)
                recorder.say(TRIED, append.number)
                rows = [row(id_, word, append.number) for id_, word in append.rows]
                write.compare_and_append(rows, append.number, append.number + 1)
                recorder.say(ACKED, append.number)
                if rng.random() < 0.3:
                    rng.choice(duties)(client)
            if rng.random() < 0.3:
                clock.advance(rng.choice([1.0, 100.0]))


def judge(folder: Path, todo: Sequence[Append], said: Sequence[Said], rng: random.Random) -> None:
    """What was acknowledged is there once, nothing is there that nobody wrote, and everything continues."""
    words = Counter(one.word for one in said)
    clock = ManualClock()
    clock.advance(FOREVER_S)
    with client_at(folder, clock, rng, create=not words[OPENED]) as client:
        try:
            world = check_world(client, SHARD)
        except NotFound:
            assert not words[OPENED], "the shard is gone"
            client.open_writer(SHARD, SCHEMA)
            world = check_world(client, SHARD)
        upper = world.state.upper.time or 0
        assert words[ACKED] <= upper <= words[TRIED], f"upper is {upper} after {dict(words)}"
        there = expected(todo, upper)
        assert read(client, upper) == there
        go_on(client, upper)
        there[-1, "afterwards"] = 1
        remember(client)
        assert read(client, upper + 1) == there
        settle(client, clock)
        check_swept(client, SHARD)
        assert read(client, upper + 1) == there


def expected(todo: Sequence[Append], upper: int) -> Contents:
    """The contents when the first `upper` appends are there."""
    return Counter({(id_, word): 1 for append in todo[:upper] for id_, word in append.rows})


def read(client: persist.Client, upper: int) -> Contents:
    """The contents as of the newest time."""
    if upper == 0:
        return Counter()
    with client.open_reader(SHARD) as reader:
        found: Contents = contents_of(reader.snapshot(upper - 1, diff=True).to_arrow())
    return found


def go_on(client: persist.Client, upper: int) -> None:
    """A writer appends where the upper is."""
    with client.open_writer(SHARD, SCHEMA) as write:
        write.compare_and_append([row(-1, "afterwards", upper)], upper, upper + 1)


def remember(client: persist.Client) -> None:
    """What surveys, scrubs and verifications remembered is there or is not, and no call fails of what is left of it."""
    assert not client.survey().unread
    for new_only in (True, False):
        scrubbed = client.scrub(SHARD, new_only=new_only)
        assert not scrubbed.damaged, scrubbed.says
    for full in (False, True):
        damage = [found for found in client.verify(SHARD, full=full).findings if found.is_damage]
        assert not damage, f"{damage}"


def settle(client: persist.Client, clock: ManualClock) -> None:
    """Maintain until nothing changes."""
    clock.advance(3600)
    for _ in range(8):
        seqno = client.inspect(SHARD).seqno
        client.maintain(SHARD)
        if client.inspect(SHARD).seqno == seqno:
            return
    raise AssertionError("maintenance does not come to rest")
