"""A shard whose newest rows cannot be read gets a way back, which first says what it would drop.

A shard's log moves to a newer format while it is used, and only when that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core.formats import CREATED, NEWEST
from persist_lib.errors import Corrupt, HistoryRegressed, Missing, NewerFormat, NotFound
from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.log import ROW_MAGIC, row_format
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.maintain.repair import plan_mends
from persist_lib.testing import check_world, contents_of
from tests.commands import invoke
from tests.conformance.stores import CONSENSUSES
from tests.framing import chained, framed
from tests.worlds import SCHEMA, World, row

KINDS = ["memory", "sqlite", *(pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", "s3"))]
SHARD = "orders"


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    is_server = request.param in {"postgresql", "s3"}
    made = World(f"file:{tmp_path}/blobs", consensus=url) if is_server else World(url)
    yield made
    made.close()


def rows_of(world: World) -> list[Row]:
    return world.inner.consensus.scan(SHARD, SeqNo(0), 1000)


def filled(world: World, appends: int = 3, config: persist.Config | None = None) -> persist.Client:
    client = world.client(config)
    write = client.open_writer(SHARD, SCHEMA)
    for time in range(appends):
        write.compare_and_append([row(time, time=time)], time, time + 1)
    return client


def poison(world: World, change: Callable[[list[Any]], None], data: bytes | None = None) -> None:
    """Follow the newest row by one that has the right checksum and chain, and that no decoder reads."""
    newest = rows_of(world)[-1]
    fields = msgspec.msgpack.decode(newest.data[HEADER_BYTES:]) if newest.data.startswith(ROW_MAGIC) else [0] * 5
    fields[0], fields[4] = newest.seqno + 1, newest.data[5:HEADER_BYTES]
    change(fields)
    made = framed(ROW_MAGIC, NEWEST, msgspec.msgpack.encode(fields)) if data is None else data
    assert world.inner.consensus.compare_and_set(SHARD, newest.newest, made)


def text_token(fields: list[Any]) -> None:
    fields[1] = "batch-1"


def same_again(_fields: list[Any]) -> None:
    """A row that decodes, and does not apply."""


POISONS: dict[str, tuple[Callable[[list[Any]], None], bytes | None]] = {
    "a token that is a text": (text_token, None),
    "a row that does not apply": (same_again, None),
    "a row that is no row": (same_again, b"what is this"),
    "no bytes at all": (same_again, b""),
}


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("after", [0, 2])
def test_the_rows_from_the_first_unreadable_one_on_are_taken_back(world: World, kind: str, after: int) -> None:
    filled(world)
    good = rows_of(world)
    for _ in range(1 + after):
        poison(world, *POISONS[kind])
    broken = rows_of(world)
    client = world.client()
    with pytest.raises(persist.Damage):
        client.inspect(SHARD)
    plan = client.repair(SHARD, dry_run=True)
    assert (plan.kept, [one.seqno for one in plan.dropped]) == (good[-1].seqno, [r.seqno for r in broken[len(good) :]])
    assert rows_of(world) == broken, "a dry run changes nothing"
    assert client.repair(SHARD) == plan
    assert rows_of(world) == good
    assert client.inspect(SHARD).seqno == good[-1].seqno
    check_world(world.client(), SHARD)
    again = client.repair(SHARD)
    assert again.dropped == ()
    write = client.open_writer(SHARD, SCHEMA)
    write.compare_and_append([row(9, time=3)], 3, 4)
    with client.open_reader(SHARD, SCHEMA) as read:
        assert sum(contents_of(read.snapshot(3, diff=True).to_arrow()).values()) == 4


def test_who_has_seen_what_was_taken_back_is_refused_and_changes_nothing(world: World) -> None:
    client = filled(world)
    seen = client.inspect(SHARD).seqno
    assert world.inner.consensus.rewind(SHARD, SeqNo(seen - 1), rows_of(world)[-1].newest) == 1
    left = rows_of(world)
    with pytest.raises(HistoryRegressed):
        client.open_writer(SHARD, SCHEMA).compare_and_append([row(9, time=3)], 3, 4)
    assert rows_of(world) == left
    fresh = world.client().open_writer(SHARD, SCHEMA)
    fresh.compare_and_append([row(9, time=2)], 2, 3)


def test_a_shard_whose_very_first_row_is_unreadable_is_made_again(world: World) -> None:
    body = msgspec.msgpack.encode([1, b"t", "Create", 0, bytes(16), None, {"schemas": [{"id": "int64"}]}])
    assert world.inner.consensus.compare_and_set(SHARD, None, framed(ROW_MAGIC, 1, body))
    client = world.client()
    with pytest.raises(Corrupt):
        client.open_shard(SHARD, SCHEMA)
    plan = client.repair(SHARD)
    assert (plan.kept, [(one.seqno, one.command) for one in plan.dropped]) == (0, [(1, "Create")])
    assert client.shards() == []
    write, _ = client.open_shard(SHARD, SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    check_world(client, SHARD)


def test_a_truncated_log_is_repaired_from_the_copy_that_it_begins_with(world: World) -> None:
    client = filled(world, 4)
    for distance in (3, 4):
        client.set_retention(SHARD, distance)
        client.roll_up(SHARD, force=True)
    assert client.collect(SHARD).rows
    good = rows_of(world)
    assert good[0].seqno > 1
    poison(world, text_token)
    assert world.client().repair(SHARD).kept == good[-1].seqno
    check_world(world.client(), SHARD)


def test_what_cannot_be_repaired_is_left_as_it_is(world: World) -> None:
    client = filled(world, 4)
    for distance in (3, 4):
        client.set_retention(SHARD, distance)
        client.roll_up(SHARD, force=True)
    assert client.collect(SHARD).rows
    poison(world, text_token)
    broken = rows_of(world)
    for entry in [*world.inner.blob.list(f"{SHARD}/rollup/")]:
        world.inner.blob.delete(entry.key)
    with pytest.raises(Missing, match="no readable copy"):
        world.client().repair(SHARD)
    assert rows_of(world) == broken


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_what_was_collected_since_the_last_good_version_is_not_brought_back(world: World) -> None:
    client = filled(world, 4, persist.Config(inline_bytes=0))
    poison(world, text_token)
    for entry in [*world.inner.blob.list(f"{SHARD}/")][:2]:
        world.inner.blob.delete(entry.key)
    broken = rows_of(world)
    plan = world.client().repair(SHARD, dry_run=True)
    assert len(plan.missing) == 2
    with pytest.raises(Missing, match="2 objects that were deleted"):
        world.client().repair(SHARD)
    assert rows_of(world) == broken
    client.close()


def test_what_a_newer_release_wrote_is_no_damage(world: World) -> None:
    filled(world)
    newest = rows_of(world)[-1]
    newer = framed(ROW_MAGIC, NEWEST + 1, b"whatever")
    assert world.inner.consensus.compare_and_set(SHARD, newest.newest, newer)
    broken = rows_of(world)
    for dry_run in (True, False):
        with pytest.raises(NewerFormat):
            world.client().repair(SHARD, dry_run=dry_run)
    assert rows_of(world) == broken


def test_a_sound_shard_is_left_alone_and_an_unknown_one_is_not_found(world: World) -> None:
    client = filled(world)
    before = rows_of(world)
    assert client.repair(SHARD).dropped == ()
    assert rows_of(world) == before
    with pytest.raises(NotFound):
        client.repair("nobody")


def test_the_command_says_what_it_would_drop_and_asks(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/location"
    world = World(url)
    filled(world).close()
    poison(world, text_token)
    broken = rows_of(world)
    dry = invoke("--location", url, "shard", "repair", SHARD, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "does not decode" in dry.output
    assert "Retire" in dry.output
    told = invoke("--location", url, "--json", "shard", "repair", SHARD)
    assert told.exit_code == 2, "a machine has to say --yes"
    wrong = invoke("--location", url, "shard", "repair", SHARD, typed="something else\n")
    assert wrong.exit_code == 2
    assert rows_of(world) == broken
    done = invoke("--location", url, "--json", "shard", "repair", SHARD, "--yes")
    assert done.exit_code == 0, done.output
    assert [one["command"] for one in json.loads(done.stdout)["dropped"]] == ["Retire"]
    assert len(rows_of(world)) == len(broken) - 1
    again = invoke("--location", url, "shard", "repair", SHARD, "--yes")
    assert "nothing to repair" in again.output
    world.close()


OLD = persist.Config(format=1, rollup_every=4)


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


def rolled_up(world: World) -> persist.Client:
    """A shard with a whole log and two rollups."""
    client = filled(world)
    client.roll_up(SHARD, force=True)
    append(client.open_writer(SHARD, SCHEMA), 2)
    client.roll_up(SHARD, force=True)
    return client


def copies_of(world: World) -> dict[str, bytes]:
    return {entry.key: world.inner.blob.get(entry.key) or b"" for entry in world.inner.blob.list(f"{SHARD}/rollup/")}


@pytest.mark.parametrize("how", ["gone", "flipped", "both gone"])
def test_rollups_that_the_log_leads_to_are_written_again_to_the_letter(world: World, how: str) -> None:
    client = rolled_up(world)
    before, rows = copies_of(world), rows_of(world)
    spoiled = list(before) if how == "both gone" else [max(before)]
    for key in spoiled:
        world.inner.blob.delete(key)
        if how == "flipped":
            world.inner.blob.set(key, before[key][:-1] + bytes([before[key][-1] ^ 1]))
    with pytest.raises(persist.Damage):
        world.client().inspect(SHARD)
    left = copies_of(world)
    plan = world.client().repair(SHARD, dry_run=True)
    assert copies_of(world) == left, "a dry run changes nothing"
    assert sorted(one.key for one in plan.mended) == sorted(spoiled)
    assert "the log leads to" in plan.mended[0].proof
    assert plan.dropped == ()
    assert world.client().repair(SHARD) == plan
    assert (copies_of(world), rows_of(world)) == (before, rows)
    check_world(world.client(), SHARD)
    assert world.client().repair(SHARD).mended == ()
    client.close()


def test_a_rollup_and_a_row_are_both_repaired(world: World) -> None:
    rolled_up(world).close()
    before, good = copies_of(world), rows_of(world)
    poison(world, text_token)
    world.inner.blob.delete(max(before))
    plan = world.client().repair(SHARD, dry_run=True)
    assert (len(plan.mended), len(plan.dropped), plan.missing) == (1, 1, ())
    assert world.client().repair(SHARD) == plan
    assert (copies_of(world), rows_of(world)) == (before, good)
    check_world(world.client(), SHARD)


def test_a_rollup_that_only_a_guess_could_bring_back_is_left(world: World) -> None:
    """The log begins with it."""
    client = rolled_up(world)
    client.collect(SHARD)
    rows, before = rows_of(world), copies_of(world)
    assert rows[0].seqno > 1
    world.inner.blob.delete(max(before))
    with pytest.raises(Missing):
        world.client().repair(SHARD)
    assert (rows_of(world), len(copies_of(world))) == (rows, len(before) - 1)


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_a_rollup_is_not_written_again_from_a_log_that_leads_to_other_bytes(world: World) -> None:
    """The log says another thing of its first row than it did when the rollup was made, and is linked to the end."""
    rolled_up(world).close()

    def later(fields: list[Any]) -> None:
        fields[3] += 1

    world.inner.consensus._logs[SHARD] = chained(rows_of(world), 0, later)  # type: ignore[attr-defined]
    world.inner.blob.delete(max(copies_of(world)))
    assert plan_mends(world.client().machine(SHARD)) == []
    with pytest.raises(Missing):
        world.client().repair(SHARD)


def test_the_command_mends_after_it_said_what_and_was_told_to(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/location"
    world = World(url)
    rolled_up(world).close()
    before = copies_of(world)
    world.inner.blob.delete(max(before))
    dry = invoke("--location", url, "shard", "repair", SHARD, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "would be written again: it is not there; the log leads to" in " ".join(dry.output.split())
    assert invoke("--location", url, "--json", "shard", "repair", SHARD).exit_code == 2, "a machine has to say --yes"
    done = invoke("--location", url, "shard", "repair", SHARD, "--yes")
    assert done.exit_code == 0, done.output
    assert "1 object written again" in done.output
    assert copies_of(world) == before
    world.close()
