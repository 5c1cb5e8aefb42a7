"""Shard servers as processes: killed, paused and started again under load, two of them on one shard.

Nothing that was acknowledged is lost, nothing is there twice, and everybody gets on once a server is back.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

import persist_lib as persist
from tests.faults.shard_servers import CONFIG, SHARD, Site, Told, check_order
from tests.worlds import SCHEMA

KILLS = int(os.environ.get("PERSIST_SERVER_KILLS", "2"))
WRITERS = 5


def test_servers_are_killed_and_paused_under_load_and_nothing_is_lost_or_doubled(site: Site) -> None:
    drawn = random.Random(os.environ.get("PERSIST_SEED", "7"))
    threads = [site.start(site.write, n) for n in range(WRITERS)]
    threads += [site.start(role) for role in (site.listen, site.look, site.hold, site.tend)]
    threads += [site.start(site.pair, n) for n in range(2)]
    for _ in range(KILLS):
        time.sleep(drawn.uniform(0.2, 0.8))
        victim = drawn.choice(site.servers)
        if drawn.random() < 0.3:
            victim.pause(drawn.uniform(0.1, 1.5))
        else:
            victim.kill(drawn.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            victim.start()
    before, paired = len(site.acked), len(site.paired)
    patience = persist.Runtime().deadline(60)
    while not patience.has_passed() and (len(site.acked) <= before or len(site.paired) <= paired):
        time.sleep(0.05)
    site.ends.set()
    for thread in threads:
        thread.join(60)
    assert not [thread.name for thread in threads if thread.is_alive()], "hung"
    print(site.check())
    assert len(site.acked) > before, "everybody gets on"
    assert len(site.paired) > paired
    assert site.moves
    assert site.heard


def test_a_server_ends_by_itself_on_sigterm_and_answers_what_waits(site: Site) -> None:
    with persist.open(site.url, f"persist://127.0.0.1:{site.servers[0].port}", config=CONFIG) as client:
        write = client.open_writer(SHARD, SCHEMA)
        write.compare_and_append([{"id": 1, "word": "x"}], 0, 1)
        process = site.servers[0].process
        site.servers[0].kill(signal.SIGTERM)
        assert process is not None
        assert process.returncode == 0
        site.servers[0].start()
        write.compare_and_append([{"id": 2, "word": "x", "_time": 1}], 1, 2)
    site.acked = [1, 2]
    site.check()


@pytest.mark.parametrize(
    ("appends", "reads"),
    [
        ([Told(0, 1, 2), Told(2, 3, 1)], []),
        ([Told(0, 1, 2), Told(0, 1, 2)], []),
        ([Told(0, 1, 2)], [Told(2, 3, 1)]),
    ],
    ids=["an older one is later", "two have one time", "a read is older than an answer"],
)
def test_histories_that_no_single_copy_gives_are_found(appends: list[Told], reads: list[Told]) -> None:
    check_order([Told(0, 9, 3)], [Told(0, 1, 0), Told(0, 1, 3)])
    with pytest.raises(AssertionError):
        check_order(appends, reads)
