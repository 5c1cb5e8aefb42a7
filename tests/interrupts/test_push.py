"""Ctrl-C anywhere in a call that waits for pushed rows: the next one waits as ever, and closing leaves no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.ids import SeqNo
from persist_lib.location.rpc.consensus import RpcConsensus
from persist_lib.location.rpc.servers import Servers
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from tests.interrupts.points import Interrupter, only_on_cpython_3_11
from tests.interrupts.scenes import elsewhere, eventually
from tests.worlds import SCHEMA, row

pytestmark = [only_on_cpython_3_11, pytest.mark.slow]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[persist.WriteHandle, int]]:
    with persist.open(f"file:{tmp_path}/x") as store, store.open_writer("s", SCHEMA) as write:
        server = ShardServer(store, "127.0.0.1:0")
        yield write, server.start()
        server.stop(0.1)


def interrupted(write: persist.WriteHandle, port: int, at: int | None) -> int:
    """A wait that is interrupted there, from the first of a shard to one that is told; and what holds after it."""
    consensus = RpcConsensus(Servers([f"127.0.0.1:{port}"], Runtime()))
    interrupter: Any = Interrupter(at)
    try:
        with interrupter:
            for _ in range(3):
                consensus.wait("s", SeqNo(0), 0.01)
                consensus.pushed("s", SeqNo(0))
    except KeyboardInterrupt:
        assert interrupter.has_struck

    def is_told() -> bool:
        consensus.wait("s", SeqNo(0), 0)
        newest = consensus.scan("s", SeqNo(0), 10_000)[-1].seqno
        return consensus.pushed("s", newest) == ()

    eventually(lambda: elsewhere(is_told), f"not told (place {at}, {interrupter.where})")
    newest, told = consensus.scan("s", SeqNo(0), 10_000)[-1].seqno, []
    waits = threading.Thread(target=lambda: told.append(consensus.wait("s", newest, 600)))
    waits.start()
    upper = write.fetch_upper().time or 0
    write.compare_and_append([row(upper, time=upper)], upper, upper + 1)
    waits.join(10)
    assert told == [True], f"place {at}, {interrupter.where}"
    consensus.close()
    assert not [one for one in threading.enumerate() if one.name == "persist-push"]
    return int(interrupter.count)


def test_an_interrupt_anywhere_in_a_wait_leaves_all_usable(served: tuple[persist.WriteHandle, int]) -> None:
    write, port = served
    write.compare_and_append([row(0)], 0, 1)
    count = interrupted(write, port, None)
    assert count > 10
    for at in range(0, count, 1 + count // 40):
        interrupted(write, port, at)
