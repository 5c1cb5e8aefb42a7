"""The bounds over all shards of a server: one client cannot fill it, and heartbeats are in none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Overloaded
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.commands import Proposed
from persist_lib.location.rpc.consensus import RpcConsensus
from persist_lib.location.rpc.credentials import Credentials
from persist_lib.location.rpc.servers import Servers
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.access import BYTES_MOST, BYTES_OF_A_CLIENT, Load
from persist_lib.shard.funnels import Heart
from tests.unit.server.sites import Site, site_of
from tests.worlds import SCHEMA


def test_one_client_gets_a_part_and_all_together_the_whole() -> None:
    load = Load(10, 4, 1000, 500)
    load.take("a", 4, 100)
    with pytest.raises(Overloaded):
        load.take("a", 1, 1)
    load.take("b", 3, 500)
    with pytest.raises(Overloaded):
        load.take("b", 1, 1)
    load.take("c", 3, 100)
    with pytest.raises(Overloaded):
        load.take("d", 1, 0)
    assert (load.commands, load.bytes, load.clients) == (10, 700, 3)
    load.give_back("a", 4, 100)
    load.take("d", 1, 400)
    with pytest.raises(Overloaded):
        load.take("e", 1, 1)
    for client, commands, size in (("b", 3, 500), ("c", 3, 100), ("d", 1, 400)):
        load.give_back(client, commands, size)
    assert (load.commands, load.bytes, load.clients) == (0, 0, 0)


def test_a_message_of_the_largest_size_fits() -> None:
    assert wire.MOST_BYTES <= BYTES_OF_A_CLIENT < BYTES_MOST
    Load().take("a", 1, wire.MOST_BYTES)


class Bounded(Site):
    """A server whose turns wait for `gate`, with small bounds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for n in range(12):
            self.store.open_writer(f"s{n}", SCHEMA).close()
        self.gate, self.pool, tokens = threading.Event(), ThreadPoolExecutor(32), folder / "tokens.toml"
        rights = 'rights = { "*" = ["append", "read"] }\nholds = ["h"]'
        tokens.write_text("\n".join(f'[clients.{name}]\ntoken = "{name * 20}"\n{rights}' for name in "abc"))
        consensus = self.serve(token_file=tokens)._funnels._make.args[1]
        append = consensus.compare_and_set
        consensus.compare_and_set = lambda *args: (self.gate.wait(60), append(*args))[1]
        self.server._calls.load = Load(8, 4)

    def by(self, name: str) -> RpcConsensus:
        token = self.folder / name
        token.write_text(name * 20)
        made = RpcConsensus(Servers([f"127.0.0.1:{self.server.port}"], Runtime(), Credentials(str(token))))
        self.made.append(made)
        return made

    def hold(self, rpc: RpcConsensus, shard: str) -> Any:
        command = c.SetHold("h", persist.frontier.MINIMUM, None, b"x")
        return self.pool.submit(
            rpc.commit_commands, [Proposed(shard, command, SeqNo(0))], b"t", 30, is_repeated=False, heart=Heart
        )

    def close(self) -> None:
        self.gate.set()
        self.pool.shutdown()
        super().close()


site = site_of(Bounded)


def _wait(site: Bounded, count: int) -> None:
    for _ in range(3000):
        if site.server._calls.load.commands == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(site.server._calls.load.commands)


def test_a_client_with_many_shards_does_not_fill_the_server(site: Bounded) -> None:
    one, two, three = map(site.by, "abc")
    first = [site.hold(one, f"s{n}") for n in range(4)]
    _wait(site, 4)
    with pytest.raises(Overloaded, match="of a are"):
        site.hold(one, "s9").result(30)
    second = [site.hold(two, f"s{n}") for n in range(4, 8)]
    _wait(site, 8)
    with pytest.raises(Overloaded, match="all clients"):
        site.hold(three, "s9").result(30)
    beat = [Proposed("s0", c.Heartbeat((), 1000), SeqNo(0))]
    answered = site.pool.submit(three.commit_commands, beat, b"b", 30, is_repeated=False, heart=Heart)
    _wait(site, 8)
    site.gate.set()
    assert all(request.result(30)[0].is_committed for request in [*first, *second])
    answered.result(30)
    _wait(site, 0)
    assert site.hold(three, "s9").result(30)[0].is_committed
