"""`persist streams`: what there is, who writes it, breaking a lock, and a wipe, with their dry runs."""

from __future__ import annotations

import re

import pytest

import persist_lib as persist
from persist_lib import streams
from tests.integration.test_cli import Shell
from tests.streaming import SCHEMA, update


@pytest.fixture
def held(sh: Shell) -> Shell:
    """Two streams, whose writer is gone without having released the lock."""
    client = persist.open(f"file:{sh.root}")
    runtime = streams.open(client, owner="ingest on host 7")
    for name in ("readings", "alarms"):
        write, _ = runtime.create_or_load(name, SCHEMA)
        write.write([update(1, 5), update(2, 9)]).result()
        write.seal(6).result()
    client.leases.close()
    client.location.close()
    return sh


def test_streams_are_listed_and_shown_and_their_sealed_shard_is_a_shard(held: Shell) -> None:
    assert re.search(r"readings +readings +readings.unsealed +\[0\] +\[6\]", held("streams", "show"))
    assert [one["name"] for one in held.json("streams", "show")["streams"]] == ["alarms", "readings"]
    assert re.search("unsealed +1 update in readings.unsealed", held("streams", "show", "readings"))
    assert held.json("streams", "show", "readings")["unsealed_updates"] == 1
    assert [row["id"] for row in held.json("read", "readings")["rows"]] == [1]
    assert "there is no stream 'reading'" in held.fails(1, "streams", "show", "reading")


def test_a_lock_is_shown_and_broken(held: Shell) -> None:
    assert re.search("epoch 1: ingest on host 7 holds the lock; its lease ends in", held("streams", "show"))
    assert "at epoch 1, not at 3" in held.fails(1, "streams", "unlock", "--epoch", 3)
    assert "would break it: epoch 1" in held("streams", "unlock", "--dry-run")
    assert held.json("streams", "show")["lock"]["held"] is True
    assert "broken, at epoch 2 now" in held("streams", "unlock", "--epoch", 1)
    assert "the lock is free" in held("streams", "show")
    assert "nothing to break" in held("streams", "unlock")
    streams.open(f"file:{held.root}").stop()


def test_a_wipe_needs_the_lock_and_a_yes(held: Shell) -> None:
    said = held("streams", "wipe", "--dry-run")
    assert "would drop alarms, readings (epoch 1: ingest on host 7 holds the lock" in said
    assert "have a writer already" in held.fails(1, "streams", "wipe", "--yes")
    held("streams", "unlock")
    assert len(held.json("streams", "show")["streams"]) == 2
    assert held("streams", "wipe", "--yes") == "dropped alarms, readings\n"
    assert held("streams", "show") == "0 streams\nepoch 3: the lock is free\n"
    assert held.json("streams", "wipe", "--yes") == {"dropped": [], "left": [], "dry_run": False}


def test_where_there_are_no_streams_each_command_says_so(sh: Shell) -> None:
    sh("create", "orders", "--key", "id:int64")
    assert sh("streams", "show") == "0 streams\n"
    for words in (("unlock",), ("wipe", "--yes"), ("wipe", "--dry-run")):
        assert "there are no streams" in sh.fails(1, "streams", *words)
