"""Servers, clients, PostgreSQL and S3 on hosts of their own, and a network that parts them.

Nothing acknowledged is lost, nothing is there twice, and clients continue as soon as the page on failover says.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest

from tests.circles import is_day
from tests.faults.shard_servers import CONFIG, SHARD
from tests.hosts.deployment import SERVERS, Deployment, Phase
from tests.hosts.network import unless_possible

ROUNDS = int(os.environ.get("PERSIST_PARTITIONS", "1"))
"""How often each partition is made."""
FAILS_OVER_S = CONFIG.timeout_s - 3 if is_day() else CONFIG.timeout_s + 5
"""A server has 2 s to answer, and half of the time of a call where all others were silent of late, as slow ones are.

No client may wait for all of the time of a call. At night, where partitions follow each other for minutes, it may be.
"""


LONG_S = 4.0
"""What a client waited for is printed where it waited so long for an append: a server's 2 s, and as much again."""


class Partition(NamedTuple):
    """Hosts that do not hear others, and the clients that must continue all the same."""

    ones: str
    others: str
    continuing: str = "one two"
    one_way: bool = False


PARTITIONS = {
    "a client and its server": Partition("one", "b"),
    "a server and PostgreSQL": Partition("b", "db"),
    "the servers and S3": Partition("a b", "s3"),
    "a server and all others": Partition("b", "*"),
    "what a server answers": Partition("b", "one two", one_way=True),
    "what a client asks": Partition("one", "b", one_way=True),
    "what PostgreSQL answers to a server": Partition("db", "b", one_way=True),
    "a client and all servers, but not the store": Partition("one", "a b"),
    "the clients and all servers": Partition("one two", "a b", continuing="one"),
    "the clients and S3": Partition("one two", "s3", continuing=""),
    "PostgreSQL and all others": Partition("db", "*", continuing=""),
    "everything": Partition("*", "*", continuing=""),
}
DAY = ("a client and its server", "a server and PostgreSQL", "the servers and S3")
DAY_S, NIGHT_S = (2.0, 2.0), (1.0, 12.0)
APART = (
    "a client and its server", "a server and PostgreSQL", "a server and all others", "what a server answers",
    "a client and all servers, but not the store",
)  # fmt: skip
"""Partitions within which clocks step back."""
CLOCK_STEP_S = 4
"""By how much the clock of PostgreSQL steps: far less than a lease, which is 20 s."""


@pytest.fixture
def deployment(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """The hosts. With the parameter "clocked", each has a clock of its own."""
    if (why := unless_possible()) is not None:
        pytest.skip(why)
    made = Deployment(tmp_path, seed=drawn().getrandbits(32), clocked=getattr(request, "param", "") == "clocked")
    yield made
    made.close()


def drawn() -> random.Random:
    return random.Random(os.environ.get("PERSIST_SEED", "7"))


def part(deployment: Deployment, kind: str, seconds: float) -> None:
    """Make a partition for a while, until the clients that must continue have, and heal it."""
    ones, others, continuing, one_way = PARTITIONS[kind]
    with deployment.broken(kind, continuing):
        deployment.network.cut(ones, others, one_way=one_way)
        time.sleep(seconds)


def restart_behind(deployment: Deployment, seconds: float) -> None:
    """A server's host is cut off, and its process ends and begins again: connections of clients are half open."""
    server = deployment.servers["b"]
    with deployment.broken("a server that ended unheard", "one two"):
        deployment.network.cut("b", "one two")
        server.kill(signal.SIGKILL)
        server.start()
        time.sleep(seconds)


def pause(deployment: Deployment, seconds: float) -> None:
    """A server's process stands still, and its host answers."""
    process = deployment.servers["b"].process
    assert process is not None
    with deployment.broken("a server that is paused", "one two"):
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def unplug(deployment: Deployment, seconds: float) -> None:
    """A server's link is down: what it sends fails at once, and what is sent to it is lost."""
    with deployment.broken("a server's link that is down", "one two"):
        deployment.network["b"].down()
        time.sleep(seconds)
        deployment.continues("one", "two")
        deployment.network["b"].up()


def delay(deployment: Deployment, seconds: float) -> None:
    """Every packet takes 20 to 60 ms, so they overtake each other, and one in fifty is lost."""
    network = deployment.network
    with deployment.broken("a slow network that loses packets", "one two"):
        network.delay_s, network.jitter_s, network.loss = 0.02, 0.04, 0.02
        time.sleep(seconds)


OTHERS = (restart_behind, pause, unplug, delay)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_is_lost_or_doubled_by_partitions_and_clients_continue(deployment: Deployment) -> None:
    assert SERVERS[crc32(SHARD.encode()) % len(SERVERS)] == "b", "the server that clients ask first is another one"
    rng, (least, most) = drawn(), DAY_S if is_day() else NIGHT_S
    for _ in range(ROUNDS):
        kinds: list[Any] = [*DAY, restart_behind] if is_day() else [*PARTITIONS, *OTHERS]
        rng.shuffle(kinds)
        for kind in kinds:
            seconds = rng.uniform(least, most)
            if isinstance(kind, str):
                part(deployment, kind, seconds)
            else:
                kind(deployment, seconds)
    judge(deployment)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("deployment", ["clocked"], indirect=True)
def test_nor_where_clocks_are_minutes_apart_and_step_back_while_hosts_are_parted(deployment: Deployment) -> None:
    """No lease ends for that, as only the database's clock counts, which steps by less than a lease here."""
    rng = drawn()
    for kind in rng.sample([*APART], len(APART)) * ROUNDS:
        ahead = {"a": rng.uniform(300, 900), "b": -rng.uniform(300, 900), "one": rng.uniform(120, 240)}
        deployment.set_clocks(**ahead, db=rng.choice([0, CLOCK_STEP_S]))
        ones, others, continuing, one_way = PARTITIONS[kind]
        with deployment.broken(kind, continuing):
            deployment.network.cut(ones, others, one_way=one_way)
            time.sleep(rng.uniform(*DAY_S))
            deployment.set_clocks(**{name: seconds - rng.uniform(300, 600) for name, seconds in ahead.items()}, db=0)
            time.sleep(rng.uniform(*NIGHT_S))
        assert abs(deployment.clock_of("a") - deployment.clock_of("b")) > 60, "clocks that are not apart"
    judge(deployment)


def judge(deployment: Deployment) -> None:
    """Check what all were told, and that clients continued in time."""
    print(deployment.check())
    for phase in deployment.phases:
        print(*shown(deployment, phase), sep=", ")
        for name, (longest, _) in deployment.pauses(phase).items():
            if longest > LONG_S:
                print(*deployment.waited_for(name, phase), sep="\n", end="\n\n")
    for phase in deployment.phases:
        for name, (longest, _) in deployment.pauses(phase).items():
            if name in must_continue(phase.kind):
                assert longest < FAILS_OVER_S, f"{name} had to wait {longest:.1f} s: {phase.kind}"
    assert deployment.network.dropped > 10


def must_continue(kind: str) -> str:
    return PARTITIONS[kind].continuing if kind in PARTITIONS else "one two"


def shown(deployment: Deployment, phase: Phase) -> Iterator[str]:
    yield f"{phase.kind}: {phase.healed - phase.began:.1f} s"
    for name, (longest, after) in deployment.pauses(phase).items():
        yield f"{name} waited {longest:.2f} s, until {after:.2f} s after it"
    yield f"last came {phase.slowest}, {phase.continued - phase.healed:.2f} s after it"
