"""Publications of collections: one table of all shards, across handovers, deaths and rivals."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog.publications import shards_of
from persist_lib.maintain.publish.folder import Folder
from persist_lib.maintain.publish.steps import _table
from persist_lib.testing import check_world
from persist_lib.verify import check
from tests.unit.maintain.test_publish import (
    BOTH,
    CONFIG,
    SCHEMA,
    Rows,
    by_others,
    dies_at_each_request,
    plain,
    row,
    versions,
)
from tests.worlds import World

SHARDS = pytest.mark.parametrize("shards", [1, 3])


def made(client: persist.Client, shards: int = 3) -> Any:
    """A collection of 60 rows, some of which were changed."""
    client.controller().create("s", SCHEMA, shards=shards, mode="compare_and_append")
    table = client.table("s")
    table.append([row(id_, f"w{id_}") for id_ in range(60)])
    table.upsert([row(id_, "again") for id_ in range(0, 80, 7)])
    return table


def own(client: persist.Client, as_of: int | None = None) -> Rows:
    return plain(client.table("s").read(as_of).to_arrow())


def found(client: persist.Client, as_: str) -> Any:
    """The shards of the publication now."""
    controller = client.controller()
    contents, record = controller._find("s")
    active = controller.describe("s").active.number
    rendition = next(one for one in contents.renditions_of(record.id) if one.number == active)
    return shards_of(controller.client, contents, record, rendition, as_)


def check_there(client: persist.Client, as_: str) -> None:
    """All that a snapshot names is there, and pinned in the shard whose it is."""
    shards = found(client, as_)
    with closing(_table(Folder(shards.machines[0], shards.folder, "s"), as_)) as table:  # type: ignore[arg-type]
        keys = table.named()
    assert all(client.blob.get(key) for key in keys), "a published file is gone"
    pinned = {key.rpartition("/")[2] for pin in shards.pins(as_) for key in pin.keys}
    assert {key.rpartition("/")[2] for key in keys if "_copies/" not in key} <= pinned


@BOTH
@SHARDS
def test_other_engines_read_what_the_collection_reads_at_each_published_time(
    folder: persist.Client, as_: str, shards: int
) -> None:
    table, seen = made(folder, shards), dict[int, Rows]()
    for step in range(3):
        table.upsert([row(step, "later"), row(500 + step, "new")])
        table.delete([{"id": 30 + step}])
        published = folder.publish("s", as_)
        seen[published.as_of] = own(folder)
        table.maintain()
        assert published.rows == len(seen[published.as_of])
    assert by_others(published) == dict.fromkeys(by_others(published), seen[published.as_of])
    for time, version in versions(published).items():
        assert by_others(published, version) == dict.fromkeys(by_others(published, version), seen[time]), time
    assert f"-published/{folder.controller().describe('s').id}" in published.place
    check_there(folder, as_)
    with pytest.raises(persist.SinceViolation, match="cannot be published as of"):
        table.publish(as_, at=10_000)


@BOTH
def test_a_collection_that_did_not_change_is_published_by_metadata_and_a_changed_shard_alone_is_written(
    client: persist.Client, as_: str
) -> None:
    table = made(client)
    first = table.publish(as_)
    assert (first.files, first.copied, first.rewritten > 0) == (3, 0, True)
    again = table.publish(as_)
    assert (again.is_new, again.metadata, again.shared, again.rewritten) == (False, 0, 3, 0)
    with client.controller().open_writer("s") as write:
        write.advance_upper(first.as_of + 3)
    later = table.publish(as_)
    assert (later.as_of, later.is_new, later.shared, later.rewritten, later.copied) == (first.as_of + 2, True, 3, 0, 0)
    table.upsert([row(7, "one key, in one shard")])
    planned = table.publish(as_, dry_run=True)
    changed = table.publish(as_)
    assert (changed.files, changed.shared, changed.copied) == (3, 2, 0)
    assert (planned.files, planned.shared) == (changed.files, changed.shared) or planned.rewritten
    assert 0 < changed.rewritten < first.rewritten
    check_there(client, as_)


@BOTH
def test_nothing_of_a_collection_that_is_published_is_deleted_until_it_is_withdrawn(
    client: persist.Client, as_: str
) -> None:
    table = made(client)
    table.publish(as_, keep=2)
    for step in range(3):
        table.upsert([row(id_, f"again {step}") for id_ in range(80)])
        table.maintain()
    table.set_retention(0)
    table.maintain()
    check_there(client, as_)
    assert not check(client, full=True).broken, "nothing is of no shard"
    with pytest.raises(persist.StillRead, match=f"published as {as_}"):
        table.drop()
    with pytest.raises(persist.StillRead, match=f"published as {as_}"):
        table.drop(dry_run=True)
    receipt = table.erase([{"id": 7}])
    assert any(f"pin {as_}" in str(one) for one in receipt.left)
    assert table.withdraw(as_, dry_run=True).keys
    table.withdraw(as_)
    with pytest.raises(persist.NotFound):
        client.withdraw("s", as_)
    table.maintain()
    table.maintain()
    live = set[str]()
    for shard in table.describe().shards:
        state = client.inspect(shard).state
        assert not state.pins
        live |= {key.rpartition("/")[2] for batch in state.stored for key in batch.keys}
        check_world(client, shard)
    assert {entry.key.rpartition("/")[2] for entry in client.blob.list("-published/")} <= live
    table.drop()


@BOTH
def test_a_handover_is_published_and_earlier_shards_go_once_no_snapshot_names_them(
    folder: persist.Client, as_: str
) -> None:
    table, seen = made(folder), dict[int, Rows]()
    before = table.publish(as_, keep=3, follows=True)
    seen[before.as_of] = own(folder)
    folder.controller().reshard("s", 2)
    moved = table.publish(as_)
    assert (moved.as_of > before.as_of, moved.shared) == (True, 0)
    seen[moved.as_of] = own(folder)
    table.upsert([row(1, "after")])
    table.set_retention(0)
    folder.controller().tend()
    check_there(folder, as_)
    after = table.publish(as_)
    assert (after.place, after.as_of > moved.as_of, after.is_new) == (before.place, True, False), "tending did"
    seen[after.as_of] = own(folder)
    for time, rows in seen.items():
        assert by_others(after, versions(after)[time]) == dict.fromkeys(by_others(after), rows), time
    folder.controller().tend()
    waiting = [step for step in folder.controller().tend().waiting if "pin" in step.reason]
    assert len(waiting) == 3, "the shards of the rendition before"
    for step in range(2):
        table.upsert([row(2, f"more {step}")])
        last = table.publish(as_)
    for _ in range(2):
        folder.controller().tend()
    assert [one.number for one in folder.controller().describe("s").renditions] == [2]
    assert by_others(last) == dict.fromkeys(by_others(last), own(folder))
    check_there(folder, as_)
    table.maintain()
    table.maintain()
    check_there(folder, as_)


def test_a_rendition_with_other_columns_is_not_published_beside_the_one_before(client: persist.Client) -> None:
    table = made(client)
    table.publish()
    other = persist.Schema({"id": "int64 not null"}, {"word": "int64", "n": "int64"}, unique=True)
    controller = client.controller()
    new = controller.make_rendition("s", shards=2, schema=other, copy=True)

    def numbered(rows: Any) -> Any:
        at = rows.schema.get_field_index("word")
        return rows.set_column(at, "word", rows.column("id"))

    controller.copy_rendition("s", new.number, transform=numbered)
    controller.hand_over("s", new.number, advance=True, transform=numbered)
    with pytest.raises(persist.Unpublishable, match="withdraw the publication"):
        client.publish("s")
    client.withdraw("s")
    assert client.publish("s").rows == len(client.table("s").read().to_arrow())


@BOTH
def test_what_follows_a_collection_is_published_by_its_upkeep(client: persist.Client, as_: str) -> None:
    table = made(client)
    first = table.publish(as_, follows=True)
    assert not [step for step in client.controller().tend().steps if step.action == "publish"]
    table.upsert([row(1, "later")])
    (planned,) = (one for one in client.controller().tend("s", dry_run=True).steps if one.action == "publish")
    assert as_ in planned.subject
    client.pause("s", owner="test", only=["publication"], reason="a look at it")
    (waits,) = (one for one in client.controller().tend("s").steps if one.subject.startswith(as_))
    assert (waits.action, "a look at it" in waits.reason) == ("wait", True)
    client.resume("s")
    table.maintain()
    assert client.publish("s", as_).is_new is False
    table.publish(as_, follows=False)
    table.upsert([row(1, "and later")])
    table.maintain()
    shards = found(client, as_)
    assert {pin.as_of for pin in shards.pins(as_)} == {first.as_of + 1}


@BOTH
@pytest.mark.parametrize("happens", [True, False])
def test_a_death_at_any_request_leaves_what_was_published_and_the_next_one_takes_over(as_: str, happens: bool) -> None:
    def lived(client: persist.Client) -> Any:
        table = made(client, 2)
        before = table.publish(as_, keep=2)
        table.upsert([row(1, "changed"), row(2, "as well"), row(3, "too")])
        return before.as_of, check_there, lambda other: other.table("s").maintain()

    assert dies_at_each_request(range(1, 200, 3), as_, happens=happens, life=lived) > 20


@BOTH
def test_a_publisher_that_finds_nothing_new_takes_no_objects_of_one_that_is_about_to_move_the_pointer(
    world: World, monkeypatch: pytest.MonkeyPatch, as_: str
) -> None:
    table = made(world.client(CONFIG), 2)
    slow, fast = world.client(CONFIG), world.client(CONFIG)
    first = fast.publish("s", as_)
    shards = found(fast, as_)
    with closing(_table(Folder(shards.machines[0], shards.folder, "s"), as_)) as one:  # type: ignore[arg-type]
        kind = type(one)
    points, overtaken = kind.point, list[bool]()

    def point(self: Any) -> bool:
        if not overtaken:
            overtaken.append(True)
            fast.publish("s", as_, at=first.as_of)
        return bool(points(self))

    table.upsert([row(1, "changed")])
    monkeypatch.setattr(kind, "point", point)
    with pytest.raises(persist.Fenced):
        slow.publish("s", as_)
    for _ in range(2):
        fast.table("s").maintain()
    check_there(fast, as_)


@BOTH
def test_a_shard_that_was_promoted_stays_published_where_it_was(folder: persist.Client, as_: str) -> None:
    table = folder.table("s", SCHEMA)
    table.append([row(id_, f"w{id_}") for id_ in range(60)])
    table.upsert([row(1, "changed")])
    before = table.publish(as_, keep=1, follows=True)
    folder.upgrade("s")
    table.promote()
    table.upsert([row(2, "changed")])
    table.maintain()
    after = table.publish(as_)
    assert (after.place, after.is_new, after.as_of > before.as_of) == (before.place, False, True)
    assert by_others(after) == dict.fromkeys(by_others(after), own(folder))
    table.promote(shards=3)
    table.upsert([row(3, "changed")])
    again = table.publish(as_)
    assert again.place == before.place
    assert bool(again.copied) == (as_ == "delta"), "Delta's files have to stand below its folder"
    assert by_others(again) == dict.fromkeys(by_others(again), own(folder))
    table.maintain()
    check_there(folder, as_)
    table.withdraw(as_)


@BOTH
@pytest.mark.parametrize("mode", ["wal", "yolo"])
def test_a_table_of_a_timeline_is_published_with_what_its_wal_has(folder: persist.Client, as_: str, mode: str) -> None:
    with folder.controller().tables() as tables:
        tables.create("s", SCHEMA, timeline="t", mode=mode, shards=2)  # type: ignore[arg-type]
    table = folder.table("s")
    table.append([row(id_, f"w{id_}") for id_ in range(60)])
    first = table.publish(as_)
    assert by_others(first) == dict.fromkeys(by_others(first), own(folder))
    table.upsert([row(1, "changed")])
    second = table.publish(as_)
    assert second.as_of > first.as_of
    assert by_others(second) == dict.fromkeys(by_others(second), own(folder))
    table.maintain()
    check_there(folder, as_)
