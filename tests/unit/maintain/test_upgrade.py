"""A shard's log moves to a newer format while it is used, and only when that is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core.formats import CREATED, NEWEST
from persist_lib.format.log import row_format
from persist_lib.ids import SeqNo
from persist_lib.testing import check_world, contents_of
from tests.commands import invoke
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, World, row

KINDS = ["memory", "sqlite", *(pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", "s3"))]
OLD = persist.Config(format=1, rollup_every=4)


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    is_server = request.param in {"postgresql", "s3"}
    made = World(f"file:{tmp_path}/blobs", consensus=url) if is_server else World(url)
    yield made
    made.close()


def formats(world: World, shard: str) -> list[int]:
    return [row_format(found.data) for found in world.inner.consensus.scan(shard, SeqNo(0), 1000)]


def append(write: persist.WriteHandle, times: int) -> None:
    for _ in range(times):
        at = write.fetch_upper().time or 0
        write.compare_and_append([row(at, time=at)], at, at + 1)


def test_a_shard_is_created_in_the_format_that_settings_say(world: World) -> None:
    world.client(OLD).open_writer("old", SCHEMA)
    world.client().open_writer("new", SCHEMA)
    assert (formats(world, "old"), formats(world, "new")) == ([1], [CREATED])
    with pytest.raises(persist.InvalidUsage, match=f"format {NEWEST + 1}"):
        world.client(persist.Config(format=NEWEST + 1)).open_writer("newer", SCHEMA)
    assert sorted(world.client().shards()) == ["new", "old"]


def test_clients_go_on_through_an_upgrade_and_a_chain_holds_both_formats(world: World) -> None:
    one, two = world.client(OLD), world.client(OLD)
    first, second = one.open_writer("s", SCHEMA), two.open_writer("s", SCHEMA)
    append(first, 3)
    append(second, 3)
    known = one.machine("s").version
    assert two.upgrade("s", dry_run=True) == two.upgrade("s", dry_run=True)
    assert set(formats(world, "s")) == {1}
    done = two.upgrade("s")
    assert (done.before, done.after) == (1, NEWEST)
    assert (again := one.upgrade("s")).before == again.after == NEWEST
    assert one.machine("s").version.seqno > known.seqno
    append(first, 9)
    append(second, 9)
    found = formats(world, "s")
    assert found == sorted(found)
    assert set(found) == {1, NEWEST}
    upgraded = found.index(NEWEST)
    one.roll_up("s", force=True)
    third = world.client()
    append(third.open_writer("s", SCHEMA), 2)
    assert len(third.inspect("s").state.outcomes) == 20 + 1, "from the upgrade on"
    check_world(third, "s")
    third.maintain("s")
    read = third.open_reader("s")
    assert sum(contents_of(read.snapshot(25, diff=True).to_arrow()).values()) == 26
    assert upgraded > 1


def test_without_an_upgrade_everything_stays_in_the_old_format(world: World) -> None:
    client = world.client(OLD)
    append(client.open_writer("s", SCHEMA), 10)
    newer = world.client()
    append(newer.open_writer("s", SCHEMA), 10)
    newer.maintain("s")
    newer.roll_up("s", force=True)
    assert set(formats(world, "s")) == {1}
    assert newer.inspect("s").state.outcomes == ()
    for entry in world.inner.blob.list("s/rollup/"):
        data = world.inner.blob.get(entry.key)
        assert data is not None
        assert row_format(data) == 1


def test_there_is_no_way_back_and_a_finished_shard_stays_as_it_is(world: World) -> None:
    client = world.client(OLD)
    client.open_writer("s", SCHEMA).close()
    client.open_writer("done", SCHEMA).close()
    client.upgrade("s")
    with pytest.raises(persist.InvalidUsage, match="never goes back to 1"):
        client.upgrade("s", 1)
    with pytest.raises(persist.InvalidUsage, match="never goes back to 1"):
        client.upgrade("s", 1, dry_run=True)
    for wrong in (0, NEWEST + 1, "2", None, True):
        with pytest.raises(persist.InvalidUsage):
            client.upgrade("s", wrong)  # type: ignore[arg-type]
    client.finish("done")
    before = formats(world, "done")
    assert (done := client.upgrade("done")).before == done.after == 1
    assert formats(world, "done") == before
    with pytest.raises(persist.NotFound):
        client.upgrade("nobody")


def test_the_command_upgrades_all_after_a_dry_run(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/location"
    with persist.open(url, config=OLD) as client:
        for shard in "ab":
            client.open_writer(shard, SCHEMA)
    dry = invoke("--location", url, "shard", "upgrade", "--all", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert dry.output.count(f"would move from format 1 to {NEWEST}") == 2
    done = invoke("--location", url, "--json", "shard", "upgrade", "--all")
    found = json.loads(done.stdout)["shards"]
    assert [(one["shard"], one["before"], one["after"]) for one in found] == [("a", 1, NEWEST), ("b", 1, NEWEST)]
    again = invoke("--location", url, "shard", "upgrade", "a")
    assert f"stays in format {NEWEST}" in again.output
    assert invoke("--location", url, "shard", "upgrade", "a", "--to", "1").exit_code == 2
    log = invoke("--location", url, "shard", "log", "a")
    assert f"format 1 → {NEWEST}" in log.output
