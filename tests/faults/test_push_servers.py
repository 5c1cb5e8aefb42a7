"""Servers that are killed, paused and started again while listeners wait: nothing is lost or doubled, and all go on."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter

import persist_lib as persist
from persist_lib.testing import check_world
from tests.faults.shard_servers import CONFIG, SHARD, Site
from tests.unit.server.following import Listener, eventually, follows_at, is_told
from tests.worlds import SCHEMA

KILLS = int(os.environ.get("PERSIST_SERVER_KILLS", "2"))
LISTENERS = 3


def test_listeners_go_on_while_servers_are_killed_and_paused(site: Site) -> None:
    drawn = random.Random(os.environ.get("PERSIST_SEED", "7"))
    with site.store.open_writer(SHARD, SCHEMA) as write:
        write.compare_and_append([{"id": -1, "word": "x"}], 0, 1)
    writer: threading.Thread | None = None
    clients = [persist.open(site.url, site.served, config=CONFIG) for _ in range(LISTENERS)]
    listeners = [Listener(client, SHARD) for client in clients]
    try:
        for client in clients:
            eventually(lambda client=client: is_told(client, SHARD))  # type: ignore[misc]
        writer = site.start(site.write, 0)
        for _ in range(KILLS):
            before = len(site.acked)
            eventually(lambda before=before: len(site.acked) > before + 5)  # type: ignore[misc]
            at = follows_at(clients[0], SHARD)
            victim = next((one for one in site.servers if at.endswith(f":{one.port}")), site.servers[0])
            if drawn.random() < 0.3:
                victim.pause(drawn.uniform(0.1, 1.5))
            else:
                victim.kill(drawn.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                victim.start()
        site.ends.set()
        writer.join(60)
        for one in listeners:
            eventually(lambda one=one: set(site.acked) <= set(one.ids) or one.failure is not None, 60)  # type: ignore[misc]
            assert one.failure is None
            assert set(Counter(one.ids).values()) == {1}, "doubled"
            assert set(one.ids) <= {*site.acked, *site.doubted}
        for client in clients:  # and they are told again
            eventually(lambda client=client: is_told(client, SHARD))  # type: ignore[misc]
        check_world(site.store, SHARD)
    finally:
        site.ends.set()
        for client in clients:
            client.close()
        if writer is not None:
            writer.join(60)


def test_without_any_server_listeners_wait_and_go_on_when_one_is_back(site: Site) -> None:
    with persist.open(site.url, site.served, config=CONFIG) as client:
        with site.store.open_writer(SHARD, SCHEMA) as write:
            write.compare_and_append([{"id": 0, "word": "x"}], 0, 1)
            listener = Listener(client, SHARD, until=3)
            eventually(lambda: is_told(client, SHARD))
            for server in site.servers:
                server.kill()
            write.compare_and_append([{"id": 1, "word": "x", "_time": 1}], 1, 2)
            site.servers[1].start()
            write.compare_and_append([{"id": 2, "word": "x", "_time": 2}], 2, 3)
            listener.thread.join(60)
        assert (listener.ids, listener.failure) == ([1, 2], None)
        site.servers[0].start()
