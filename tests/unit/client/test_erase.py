"""Erasing keys: no byte of them is left anywhere, what is in the way is named, and a call that died is repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage, SinceViolation
from persist_lib.format.parts import encode_part
from persist_lib.ids import SeqNo
from persist_lib.testing import Fate
from tests import servers
from tests.circles import by_day
from tests.commands import invoke
from tests.served import ServedWorld
from tests.unit.relation.carriers import SHARD, THREE, WAL, Carrier, over_all
from tests.worlds import DiesAt, Killed, World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"mail": "string"}, times="ms")
SECRET = "7f3c9d2e8b1a4056planted"
"""What must not be found anywhere. It does not compress, so that it stands in the bytes of parts as it is."""
PARTS = persist.Config(inline_bytes=0)
AHEAD = persist.Config(inline_bytes=0, part_bytes=1 << 16)
"""So small that contents are kept ahead."""


def people(ids: Sequence[int], word: str) -> list[dict[str, Any]]:
    return [{"id": id_, "mail": f"{SECRET if id_ == 17 else word}{id_}@{word}"} for id_ in ids]


def life(world: World, carrier: Carrier, config: persist.Config | None = None) -> persist.Table:
    """A table with history in compacted and in fresh batches, inline or in objects, and garbage beside."""
    client = world.client(config)
    carrier.make(client, SCHEMA)
    table = client.table("c")
    for turn in range(4):
        world.clock.sleep(1)
        table.append(people(range(turn * 10, turn * 10 + 10), f"w{turn}"))
    table.upsert(people([17, 18], "later"))
    client.maintain()
    world.clock.sleep(1)
    table.upsert(people([17, 35], "last"))
    return table


def places_with(world: World, secret: str = SECRET) -> list[str]:
    """All objects and rows of logs in which the bytes stand."""
    blob, consensus = world.inner.blob, world.inner.consensus
    found = [entry.key for entry in blob.list("") if secret.encode() in (blob.get(entry.key) or b"")]
    for key in consensus.list_keys():
        rows = consensus.scan(key, SeqNo(0), 100_000)
        found += [f"{key} v{row.seqno}" for row in rows if secret.encode() in row.data]
    return found


def rows_of(table: persist.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(one.values()) for one in table.read().to_pylist())


@over_all
@pytest.mark.parametrize("config", [None, PARTS, AHEAD], ids=["inline", "objects", "ahead"])
def test_no_byte_of_them_is_left_and_all_else_stays(
    world: World, carrier: Carrier, config: persist.Config | None
) -> None:
    table = life(world, carrier, config)
    others = [row for row in rows_of(table) if row[0] not in {17, 18}]
    assert places_with(world), "it was there"
    planned = table.erase([17, 18], dry_run=True)
    done = table.erase([17, 18])
    assert (planned.deleted, done.deleted, done.keys, done.left, done.in_the_way) == (2, 2, 2, (), ())
    assert planned.left, "what has them"
    assert places_with(world) == []
    assert rows_of(table) == others
    assert done.since_before < done.since == table.describe().since
    with pytest.raises(SinceViolation):
        table.read(0)
    deleted = {place.name for shard in done.shards for place in shard.gone}
    said = {place.name for shard in planned.shards for place, _ in shard.left if place.kind in {"batch", "replaced"}}
    assert said - {""} <= deleted, "the receipt has what the plan had"
    table.append(people([100], "more"))
    assert rows_of(table)[-1][0] == 100, "it is written as ever"


@over_all
def test_again_it_writes_nothing(world: World, carrier: Carrier) -> None:
    table = life(world, carrier)
    table.erase([17])
    world.requests.clear()
    done = table.erase([17])
    assert (done.deleted, done.left) == (0, ())
    assert world.count("set", "delete") == 0
    assert sum(one.objects + one.log_rows for one in done.shards) > 0, "it was looked through"


@over_all
def test_a_dry_run_changes_nothing_and_needs_no_rights(world: World, carrier: Carrier) -> None:
    table = life(world, carrier)
    before = rows_of(table)
    world.clients[0].close()
    seqnos = world.inner.consensus.heads()
    found = world.client(read_only=True).table("c").erase([17], dry_run=True)
    assert (found.deleted, found.dry_run) == (1, True)
    assert found.left
    assert world.inner.consensus.heads() == seqnos
    assert rows_of(world.client().table("c")) == before


@over_all
def test_a_hold_of_users_is_in_the_way_and_stays(world: World, carrier: Carrier) -> None:
    table = life(world, carrier)
    since = table.describe().since
    table.set_hold("audit", since.time)
    done = table.erase([17])
    assert done.deleted == 1
    assert done.in_the_way == ("hold audit",)
    for shard in done.shards:
        assert {place.name for place in shard.gone}.isdisjoint(place.name for place, _ in shard.left)
    assert any("is kept by" in one for one in done.left)
    assert places_with(world)
    assert table.describe().holds == {"audit": since}
    table.read(since.time)
    table.release_hold("audit")
    assert table.erase([17]).left == ()
    assert places_with(world) == []


@over_all
def test_a_reader_elsewhere_is_in_the_way_until_it_ends(world: World, carrier: Carrier) -> None:
    table = life(world, carrier)
    other = world.client()
    with other.table("c").listen(table.describe().since.time):
        done = table.erase([17])
        assert any(one.startswith("reader r") for one in done.in_the_way)
        assert places_with(world)
    other.close()
    assert table.erase([17]).left == ()
    assert places_with(world) == []


@over_all
def test_keys_that_are_written_again_are_erased_again(world: World, carrier: Carrier) -> None:
    table = life(world, carrier)
    table.erase([17])
    world.clock.sleep(1)
    table.upsert(people([17], "again"))
    assert places_with(world)
    assert table.erase([17]).deleted == 1
    assert places_with(world) == []


@over_all
def test_who_dies_at_any_request_leaves_what_the_next_call_finishes(world: World, carrier: Carrier) -> None:
    ends = False
    for number in by_day(range(1, 1_000), 47):
        mine = World(seed=number)
        plan = DiesAt(number)
        table = life(mine, carrier, PARTS)
        others = [row for row in rows_of(table) if row[0] != 17]
        dying = mine.client(PARTS, plan=plan).table("c")
        plan.is_armed = True
        try:
            dying.erase([17])
        except Killed:
            pass
        else:
            ends = True
        plan.is_armed = False
        mine.clock.sleep(4_000)  # leases of the dead end
        last = mine.client(PARTS)
        last.maintain()
        done = last.table("c").erase([17])
        assert done.left == (), number
        assert places_with(mine) == [], number
        assert rows_of(last.table("c")) == others, number
        mine.close()
        if ends:
            break
    assert ends, "the last one did not die"


@pytest.mark.parametrize("carrier", [SHARD, THREE, WAL], ids=lambda one: one.name)
def test_through_a_shard_server(carrier: Carrier) -> None:
    served = ServedWorld()
    try:
        table = life(served, carrier)
        assert places_with(served)
        assert table.erase([17]).left == ()
        assert places_with(served) == []
    finally:
        served.close()


def test_an_object_that_was_never_linked_is_found_and_deleted(world: World) -> None:
    client = world.client(PARTS)
    table = client.table("c", SCHEMA)
    table.append(people(range(3), "w"))
    batch = pa.table({"id": [17], "mail": [SECRET], "_time": [1], "_diff": [1]}, schema=SCHEMA.updates)
    key = "c/w0123456789abcdef/0123456789abcdef.parquet"
    world.inner.blob.set(key, encode_part(SCHEMA, 0, batch).data)
    found = table.erase([17], dry_run=True)
    assert [place.kind for shard in found.shards for place, _ in shard.left] == ["unlinked"]
    done = table.erase([17])
    assert [place.name for shard in done.shards for place in shard.gone] == [key]
    assert places_with(world) == []


def test_what_cannot_be_read_is_said_and_not_passed_over(world: World) -> None:
    table = world.client(PARTS).table("c", SCHEMA)
    table.append(people(range(20), "w"))
    world.inner.blob.set("c/strange.parquet", b"PAR1 no part of ours")
    done = table.erase([17])
    (left,) = done.left
    assert left.startswith("shard c, unreadable c/strange.parquet: it cannot be read")
    assert places_with(world) == []


def test_what_is_asked_for_is_checked_before_anything_changes(world: World) -> None:
    client = world.client()
    table = client.table("c", SCHEMA)
    table.append(people(range(20), "w"))
    seqno = client.inspect("c").seqno
    for wrong in ("17", {"id": 17}, [{"mail": "x"}], [None], [1.5]):
        with pytest.raises(persist.PersistError):
            table.erase(wrong)
    with pytest.raises(InvalidUsage, match="dry_run"):
        table.erase([17], dry_run="yes")  # type: ignore[arg-type]
    assert table.erase([]).left == ()
    assert table.erase(iter([])).keys == 0
    with pytest.raises(InvalidUsage, match="read_only"):
        world.client(read_only=True).table("c").erase([17])
    assert client.inspect("c").seqno == seqno


def test_a_table_that_keeps_deleted_keys_refuses(world: World) -> None:
    client = world.client()
    columns = persist.Schema({"id": "int64 not null"}, {"seq": "int64 not null"}, times="ms")
    client.controller().tables().create("c", columns, mode="wal", keep_deletes=("seq", "7 days"))
    table = client.table("c")
    table.apply([{"id": 17, "seq": 1}])
    with pytest.raises(InvalidUsage, match="set_keep_deletes"):
        table.erase([17])
    assert table.count() == 1
    table.set_keep_deletes(None)
    assert table.erase([17]).left == ()


def test_others_append_meanwhile_and_nothing_of_theirs_is_lost(world: World) -> None:
    """Rivals append before each commit of the erasure, and compact in between."""
    table = world.client(PARTS).table("c", SCHEMA)
    for turn in range(4):
        world.clock.sleep(1)
        table.append(people(range(turn * 10, turn * 10 + 10), f"w{turn}"))
    other = world.client(PARTS)
    beside = other.table("c")
    appended = iter(range(1_000, 1_200))
    plan = _Beside(lambda: (beside.append(people([next(appended)], "rival")), other.compact("c")))
    mine = world.client(PARTS, plan=plan).table("c")
    plan.is_armed = True
    done = mine.erase([17])
    plan.is_armed = False
    kept = [row[0] for row in rows_of(table)]
    assert kept == [*range(17), *range(18, 40), *range(1_000, 1_000 + plan.acted)]
    assert plan.acted > 2
    world.clock.sleep(1)
    other.close()
    if done.left:
        assert mine.erase([17]).left == ()
    assert places_with(world) == []


class _Beside:
    """A plan under which something else happens before some commits."""

    def __init__(self, act: Any) -> None:
        self.act, self.is_armed, self.acted = act, False, 0

    def decide(self, operation: Any) -> Fate:
        if self.is_armed and operation.kind == "compare_and_set" and self.acted < 8:
            self.is_armed = False
            self.act()
            self.acted += 1
            self.is_armed = True
        return Fate()


def test_on_files_no_file_has_them(tmp_path: Path) -> None:
    """Neither SQLite's database nor its log has rows that were deleted."""
    with persist.open(f"file:{tmp_path}") as client:
        table = client.table("c", SCHEMA)
        for turn in range(3):
            table.upsert(people(range(turn, 20), f"w{turn}"))
        assert _files_with(tmp_path)
        assert table.erase([17]).left == ()
        assert _files_with(tmp_path) == []
        assert table.count() == 19


def _files_with(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_on_s3_and_postgresql_no_object_and_no_row_has_them() -> None:
    servers.use_test_credentials()
    world = World(servers.s3_url(), 0, servers.postgres_at(persist_schema=f"t{os.urandom(6).hex()}"))
    try:
        table = life(world, THREE, PARTS)
        assert places_with(world)
        assert table.erase([17]).left == ()
        assert places_with(world) == []
    finally:
        world.close()


def test_at_a_shell(tmp_path: Path) -> None:
    url, keys, receipt = f"file:{tmp_path}/data", tmp_path / "keys.jsonl", tmp_path / "receipt.json"
    with persist.open(url) as client:
        client.table("c", SCHEMA).append(people(range(20), "w"))
    keys.write_text('{"id": 17}\n{"id": 99}\n')
    at = ("--location", url, "erase", "c", "--keys", str(keys))
    planned = invoke(*at, "--dry-run")
    assert planned.exit_code == 0
    assert "2 keys; the rows of 1 of them would be deleted" in planned.stdout
    refused = invoke(*at, typed="no\n")
    assert refused.exit_code == 2
    assert "nothing was changed" in refused.stderr
    invoke("--location", url, "hold", "set", "c", "audit", "--since", "0")
    waits = invoke(*at, "--yes")
    assert waits.exit_code == 1
    assert "in the way: hold audit" in waits.stdout
    invoke("--location", url, "hold", "release", "c", "audit")
    done = invoke(*at, "--receipt", str(receipt), typed="c\n")
    assert done.exit_code == 0
    assert "gone for ever" in done.stdout
    said = json.loads(receipt.read_text())
    assert (said["table"], said["keys"], said["left"]) == ("c", 2, [])
    assert _files_with(tmp_path / "data") == []
