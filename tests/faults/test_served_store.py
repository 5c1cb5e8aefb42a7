"""Every request of a shard server to its PostgreSQL broken in every way: its clients lose, double and hang nothing.

PERSIST_FAULTS=all breaks each request; else some, which PERSIST_SEED chooses.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from tests import servers
from tests.faults.proxy import Fault, Proxy
from tests.faults.workload import Workload

pytestmark = pytest.mark.slow
HAS_TIME = os.environ.get("PERSIST_FAULTS") == "all"
SOME = 1
BLACK_HOLES = (Fault.BLACK_HOLE, Fault.BLACK_HOLE_REPLY)
"""Each takes the whole timeout of the server, so that of these, every eighth is enough."""
SERVER_S, CLIENT_S = 1.5, 5.0
"""The server gives up a request long before its client does, and finds out what became of it."""
CONFIG = persist.Config(format=4, rollup_every=8, inline_bytes=300)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Proxy(servers.postgres_port()) as made:
        yield made


def run(proxy: Proxy, folder: Path, index: int, fault: Fault | None) -> tuple[int, int, Workload]:
    """The workload, while request number `index` of the server breaks. How many there were, and how many broke."""
    name = os.urandom(8).hex()
    blobs, schema = f"file:{folder}/{name}", f"t{name}"
    at = {"config": CONFIG.model_copy(update={"timeout_s": SERVER_S}), "runtime": Runtime(background=False)}
    with persist.open(blobs, servers.postgres_at(persist_schema=schema)) as witness:
        store = persist.open(blobs, servers.postgres_at(proxy.port, persist_schema=schema), **at)  # type: ignore[arg-type]
        server = ShardServer(store, "127.0.0.1:0")
        patient = CONFIG.model_copy(update={"timeout_s": CLIENT_S})
        address = f"persist://127.0.0.1:{server.start()}"
        try:
            with persist.open(blobs, address, config=patient, runtime=Runtime(background=False)) as client:
                workload = Workload(client)
                proxy.at(index, fault)
                workload.run()
                requests, struck = proxy.requests, proxy.struck
                proxy.at(0, None)
                workload.check(witness)
        finally:
            proxy.at(0, None)
            proxy.cut()
            server.stop(0)
            store.close()
    return requests, struck, workload


@pytest.fixture(scope="module")
def requests(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many requests the workload is for the server, when nothing breaks."""
    found, _, workload = run(proxy, tmp_path_factory.mktemp("whole"), 0, None)
    assert not workload.told
    return found


@pytest.mark.timeout(3600 if HAS_TIME else 120)
@pytest.mark.parametrize("fault", [*Fault])
def test_a_request_of_a_server_broken_anywhere_loses_doubles_and_hangs_nothing(
    proxy: Proxy, requests: int, tmp_path: Path, fault: Fault
) -> None:
    chosen = random.Random(f"{os.environ.get('PERSIST_SEED')} {fault}").sample(range(1, requests), SOME)
    told: list[Any] = []
    broken = 0
    for index in range(1, requests, 8 if fault in BLACK_HOLES else 1) if HAS_TIME else chosen:
        _, struck, workload = run(proxy, tmp_path, index, fault)
        told += [(index, *one) for one in workload.told]
        broken += struck
    assert broken, "the server makes about the same requests each time"
    print(f"{fault.name}, {broken} of {requests} requests: {told}")
