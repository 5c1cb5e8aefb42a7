"""Every call of a client to its shard servers broken in every way: nothing lost, nothing doubled, nothing hung.

PERSIST_FAULTS=all breaks each call of the workload; else some, which PERSIST_SEED chooses.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter

import pytest

import persist_lib as persist
from persist_lib.location.rpc import servers as rpc
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from tests.faults.calls import CallProxy, Fault, Plan
from tests.faults.workload import Workload

HAS_TIME = os.environ.get("PERSIST_FAULTS") == "all"
SOME = 2
"""How many calls of the workload are broken by each fault, where there is no time for all."""
TIMEOUT_S = {Fault.LATE: 0.5, Fault.ANSWER_LATE: 0.5}
"""How long a client waits for a call that comes late. Of the others it knows when their connection is closed."""
PATIENT_S = 30.0


class Site:
    """A location in memory, servers for it, and what breaks between them and their clients."""

    def __init__(self, servers: int) -> None:
        name = os.urandom(8).hex()
        self.store = persist.open(f"memory:{name}", config=persist.Config(format=4, timeout_s=PATIENT_S))
        self.servers = [ShardServer(self.store, "127.0.0.1:0") for _ in range(servers)]
        self.plan = Plan()
        self.proxies = [CallProxy(server.start(), self.plan) for server in self.servers]

    def client(self, timeout_s: float) -> persist.Client:
        address = "persist://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies)
        config = persist.Config(format=4, timeout_s=timeout_s, rollup_every=8, inline_bytes=300)
        return persist.open(self.store.location.url, address, config=config, runtime=Runtime(background=False))

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        for server in self.servers:
            server.stop(0)
        self.store.close()


def run(servers: int, index: int, fault: Fault | None) -> tuple[Plan, Workload]:
    """The workload, whose call number `index` breaks."""
    site = Site(servers)
    try:
        with site.client(TIMEOUT_S.get(fault or Fault.LOST, PATIENT_S)) as client:
            workload = Workload(client)
            site.plan.at(index, fault)
            workload.run()
            workload.check(site.store)
        return site.plan, workload
    finally:
        site.close()


@functools.cache
def calls_of(servers: int) -> int:
    """How many calls the workload is, when nothing breaks."""
    return run(servers, 0, None)[0].calls


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits hardly longer for an answer than its call may take."""
    monkeypatch.setattr(rpc, "GRACE_S", 0.1)


@pytest.mark.timeout(3600 if HAS_TIME else 120)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("fault", [*Fault])
@pytest.mark.usefixtures("impatient")
def test_a_call_broken_anywhere_loses_doubles_and_hangs_nothing(fault: Fault, servers: int) -> None:
    every = range(1, calls_of(servers) + 1)
    chosen = random.Random(f"{os.environ.get('PERSIST_SEED')} {fault} {servers}").sample(every, SOME)
    told: Counter[tuple[str, str]] = Counter()
    struck = 0
    for index in every if HAS_TIME else chosen:
        plan, workload = run(servers, index, fault)
        struck += plan.struck
        told.update(workload.told)
    assert struck, "the workload makes about the same calls each time"
    print(f"{fault.name}, {servers} servers, {struck} of {len(every)} calls: {dict(told)}")
