"""Publications: other engines read what the shard reads, and nothing that they name is deleted, whatever happens."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.table import StaticTable

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core.formats import CREATED, PART_SUMS
from persist_lib.ids import is_published
from persist_lib.maintain.publish.folder import Folder
from persist_lib.maintain.publish.steps import FORMATS, _table
from persist_lib.testing import Rival, check_world
from tests.fuzz.target import mutated
from tests.shards import TINY
from tests.unit.maintain.surveys import deaths
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64"}, unique=True)
CONFIG = TINY.model_copy(update={"lease_ms": 60_000, "inline_bytes": 0})
Rows = list[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("as_", FORMATS)


def row(id_: int, word: str) -> dict[str, Any]:
    return {"id": id_, "word": word, "n": id_}


def life(client: persist.Client, steps: int = 4) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.append_now([row(id_, f"w{id_}") for id_ in range(60)])
        for step in range(steps):
            write.upsert([row(id_, f"{step}") for id_ in range(step, 80, 7)])


def own(client: persist.Client, as_of: int | None = None) -> Rows:
    with client.open_reader("s") as read, read.snapshot(as_of) as snapshot:
        return plain(snapshot.to_arrow())


def plain(table: pa.Table) -> Rows:
    names = [name for name in ("id", "word", "n", "more") if name in table.column_names]
    return sorted(tuple(one.values()) for one in table.select(names).to_pylist())


def iceberg(published: Any, snapshot: int | None = None) -> dict[str, Rows]:
    table = StaticTable.from_metadata(published.place)
    found = pl.scan_iceberg(published.version, snapshot_id=snapshot, reader_override="pyiceberg").collect()
    return {"pyiceberg": plain(table.scan(snapshot_id=snapshot).to_arrow()), "polars": plain(found.to_arrow())}


def delta(published: Any, version: int | None = None) -> dict[str, Rows]:
    found = DeltaTable(published.place, version=version).to_pyarrow_table()
    return {"deltalake": plain(found), "polars": plain(pl.read_delta(published.place, version=version).to_arrow())}


def by_others(published: Any, version: Any = None) -> dict[str, Rows]:
    """What each engine reads, of a version that it calls so."""
    return (iceberg if published.format == "iceberg" else delta)(published, version)


def versions(published: Any) -> dict[int, int]:
    """What the engine calls the versions, by the times that they stand for."""
    if published.format == "delta":
        return {int(one["persist.as_of"]): one["version"] for one in DeltaTable(published.place).history()}
    found = StaticTable.from_metadata(published.place).metadata.snapshots
    return {int(str(one.summary["persist.as_of"])): one.snapshot_id for one in found if one.summary}


def named(client: persist.Client, as_: str) -> set[str]:
    """The keys in Blob that the metadata names, as far as its pointer leads."""
    with closing(_table(Folder(client.machine("s")), as_)) as table:  # type: ignore[arg-type]
        return table.named()


def check_there(client: persist.Client, as_: str) -> None:
    """All that is named is there, and pinned where it is the shard's."""
    keys = named(client, as_)
    assert all(client.blob.get(key) for key in keys), "a published file is gone"
    pin = client.inspect("s").state.pins.get(as_)
    assert not keys or pin is not None
    assert {key.rpartition("/")[2] for key in keys if "_copies/" not in key} <= {
        key.rpartition("/")[2] for key in (pin.keys if pin else ())
    }


def dies_at_each_request(numbers: Iterable[int], as_: str, *, happens: bool, life: Callable[..., Any]) -> int:
    """A publisher dies at each of these requests, and the next one takes over. Answers which was the last.

    `life` makes a published table and changes it, and answers the time before that, and what all others check.
    """
    last = 0
    for last, other, lived in deaths(numbers, CONFIG, life, lambda dying: dying.publish("s", as_), happens=happens):
        as_of, check_there, maintain = lived
        check_there(other, as_)
        maintain(other)
        maintain(other)
        check_there(other, as_)
        assert other.publish("s", as_).as_of > as_of, f"after a death at request {last}"
        check_there(other, as_)
        other.withdraw("s", as_)
        maintain(other)
        assert not [one for one in other.blob.list("-published/") if "_parts/" not in one.key]
        for shard in other.table("s").describe().shards:
            check_world(other, shard)
    return last


@BOTH
def test_other_engines_read_what_the_shard_reads_at_each_published_time(folder: persist.Client, as_: str) -> None:
    seen: dict[int, Rows] = {}
    for step in range(3):
        life(folder, steps=1) if step == 0 else folder.table("s").upsert([row(step, "later"), row(500 + step, "new")])
        published = folder.publish("s", as_)
        seen[published.as_of] = own(folder)
        folder.maintain("s")
        assert published.rows == len(seen[published.as_of])
    assert by_others(published) == dict.fromkeys(by_others(published), seen[published.as_of])
    for time, version in versions(published).items():
        assert by_others(published, version) == dict.fromkeys(by_others(published, version), seen[time]), time
    check_there(folder, as_)


@BOTH
def test_columns_that_are_added_between_are_null_in_what_is_older(folder: persist.Client, as_: str) -> None:
    life(folder)
    before = folder.publish("s", as_)
    was = own(folder)
    folder.table("s").evolve(
        persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64", "more": "int64"}, unique=True)
    )
    after = folder.publish("s", as_)
    assert after.as_of == before.as_of
    folder.table("s").upsert([{**row(3, "wide"), "more": 7}])
    after = folder.publish("s", as_)
    found = by_others(after)
    assert found == dict.fromkeys(found, own(folder))
    old = by_others(after, versions(after)[before.as_of])
    assert [one[:3] for one in old["polars"]] == was


@BOTH
def test_a_table_that_did_not_change_is_published_by_metadata_alone(
    world: World, client: persist.Client, as_: str
) -> None:
    with client.open_writer("s", SCHEMA) as write:
        for step in range(3):
            write.append_now([row(100 * step + id_, "only added") for id_ in range(50)])
    first = client.publish("s", as_)
    assert (first.copied, first.rewritten > 0) == (0, as_ == "delta"), "Iceberg names files wherever they are"
    again = client.publish("s", as_)
    assert (again.is_new, again.metadata, again.shared, again.rewritten) == (False, 0, first.files, 0)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 3, 9)
    world.requests.clear()
    later = client.publish("s", as_)
    assert (later.as_of, later.is_new, later.shared, later.copied, later.rewritten) == (8, True, first.files, 0, 0)
    assert 0 < later.metadata < 20_000
    assert not [one for one in world.requests if one.kind == "set" and one.key.endswith(".parquet")]


def test_files_of_rows_that_are_only_added_are_shared_by_the_next_publication(client: persist.Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        for step in range(3):
            write.append_now([row(100 * step + id_, "only added") for id_ in range(50)])
            published = client.publish("s")
            assert (published.files, published.shared, published.rewritten) == (step + 1, step, 0)


@BOTH
def test_what_is_rewritten_to_be_published_moves_only_for_readers_that_look_below_a_folder(
    client: persist.Client, as_: str
) -> None:
    life(client)
    newest = client.table("s").describe().upper.time
    assert newest is not None
    with client.open_reader("s") as read:
        read.downgrade_since(newest - 1)  # so that there is nothing to write ahead of since
    assert client.publish("s", as_).rewritten
    keys = client.inspect("s").state.pins[as_].keys
    assert {is_published(key) for key in keys} == {as_ == "delta"}


@BOTH
def test_nothing_that_is_published_is_deleted_until_it_is_withdrawn(client: persist.Client, as_: str) -> None:
    life(client)
    client.publish("s", as_)
    kept = named(client, as_)
    for step in range(3):
        client.table("s").upsert([row(id_, f"again {step}") for id_ in range(80)])
        client.maintain("s")
    client.set_retention("s", 0)
    client.maintain("s")
    collected = client.collect("s")
    assert all(client.blob.get(key) for key in kept)
    assert any(one.why.startswith(f"pin {as_}") for one in collected.held)
    (keeper,) = (one for one in client.keepers("s") if one.kind == "pin")
    assert (keeper.name, keeper.garbage_size > 0) == (as_, True)
    with pytest.raises(persist.StillRead, match=f"pin {as_}"):
        client.finish("s")
    with pytest.raises(persist.StillRead, match=f"pin {as_}"):
        client.table("s").drop()
    client.audit_orphans("s")
    check_there(client, as_)
    assert client.withdraw("s", as_, dry_run=True).keys
    client.withdraw("s", as_)
    client.maintain("s")
    client.maintain("s")
    state = client.inspect("s").state
    left = {entry.key for entry in client.blob.list("-published/")}
    assert {key.rpartition("/")[2] for key in left} <= {k.rpartition("/")[2] for b in state.stored for k in b.keys}
    with pytest.raises(persist.NotFound):
        client.withdraw("s", as_)
    check_world(client, "s")


@BOTH
@pytest.mark.parametrize("happens", [True, False])
def test_a_death_at_any_request_leaves_what_was_published_and_the_next_one_takes_over(as_: str, happens: bool) -> None:
    def lived(client: persist.Client) -> Any:
        life(client)
        before = client.publish("s", as_, keep=2)
        client.table("s").upsert([row(1, "changed")])

        def check(other: persist.Client, as_: str) -> None:
            check_there(other, as_)
            with closing(_table(Folder(other.machine("s")), as_)) as table:  # type: ignore[arg-type]
                newest = table.newest()
            assert newest is not None
            assert newest.as_of in (before.as_of, before.as_of + 1)

        return before.as_of, check, lambda other: other.maintain("s")

    assert dies_at_each_request(range(1, 40), as_, happens=happens, life=lived) > 5


@BOTH
def test_a_publisher_that_was_overtaken_moves_nothing(world: World, as_: str) -> None:
    life(world.client(CONFIG))
    rival = Rival(world.inner.consensus)
    slow, fast = world.client(CONFIG, rival=rival), world.client(CONFIG)
    fast.publish("s", as_)
    fast.table("s").upsert([row(1, "changed")])

    def overtake() -> None:
        fast.publish("s", as_)
        fast.table("s").upsert([row(1, "once more")])

    for _ in range(12):  # before each of its commits
        rival.before_next(overtake)
    with pytest.raises(persist.Fenced):
        slow.publish("s", as_)
    check_there(fast, as_)
    newest = fast.publish("s", as_)
    assert newest.as_of == fast.inspect("s").state.upper.time - 1  # type: ignore[operator]


@BOTH
def test_a_publisher_that_was_overtaken_at_the_end_unpins_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, as_: str
) -> None:
    life(world.client(CONFIG))
    slow, fast = world.client(CONFIG), world.client(CONFIG)
    with closing(_table(Folder(fast.machine("s")), as_)) as one:  # type: ignore[arg-type]
        kind = type(one)
    names, overtaken = kind.named, list[bool]()

    def named(table: Any) -> set[str]:
        found = names(table)
        if not overtaken:  # the pointer has moved, and the pin not yet
            overtaken.append(True)
            fast.table("s").upsert([row(1, "later")])
            fast.publish("s", as_)
        return found

    monkeypatch.setattr(kind, "named", named)
    with pytest.raises(persist.Fenced):
        slow.publish("s", as_)
    check_there(fast, as_)


def test_rows_that_are_there_several_times_are_copied_and_it_is_said(folder: persist.Client) -> None:
    with folder.open_writer("s", persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64"})) as write:
        write.append_now([row(id_ // 2, "twice") for id_ in range(40)])
        write.append_now([row(id_, "once") for id_ in range(30)])
    published = folder.publish("s")
    assert (published.rows, published.copied > 0, published.rewritten) == (70, True, 0)
    assert by_others(published) == dict.fromkeys(by_others(published), own(folder))
    assert len(own(folder)) == 70
    folder.table("s").append([row(99, "more")])
    later = folder.publish("s")
    assert (later.rows, later.copied, later.shared) == (71, 0, 2)
    again = folder.publish("s", "delta")
    assert by_others(again) == dict.fromkeys(by_others(again), own(folder))
    folder.withdraw("s", "delta")
    check_there(folder, "iceberg")
    assert by_others(later)["polars"] == own(folder)


def test_rows_that_are_there_fewer_than_zero_times_cannot_be_published(client: persist.Client) -> None:
    with client.open_writer("s", persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64"})) as write:
        write.append_now([row(1, "a")])
        write.compare_and_append([{**row(2, "never there"), "_time": 1, "_diff": -1}], 1, 2)
    with pytest.raises(persist.Unpublishable, match="fewer than zero"):
        client.publish("s")


def test_what_the_state_carries_itself_and_times_of_the_past_are_copied(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}", config=TINY) as client:
        life(client)
        past = own(client, 1)
        published = client.publish("s", at=1)
        assert (published.as_of, published.copied > 0) == (1, True)
        assert by_others(published) == dict.fromkeys(by_others(published), past)
        with pytest.raises(persist.SinceViolation):
            client.publish("s", at=99)


def test_columns_that_a_format_cannot_say_are_named(client: persist.Client) -> None:
    types = {"a": "uint64", "b": "duration[us]", "c": "timestamp[ns]", "d": "time64[us]", "e": "int8"}
    with client.open_writer("s", persist.Schema({"id": "int64 not null"}, types)) as write:
        write.append_now([])
    for as_, columns in (("iceberg", ("a", "b", "c")), ("delta", ("a", "b", "c", "d"))):
        with pytest.raises(persist.Unpublishable) as refused:
            client.publish("s", as_)
        assert refused.value.columns == columns
        assert client.inspect("s").state.format == CREATED, "nothing was done"
    with pytest.raises(persist.InvalidUsage, match="as_ must be one of"):
        client.publish("s", "hudi")


EVERY = {
    "i8": "int8", "i16": "int16", "i32": "int32", "u8": "uint8", "u16": "uint16", "u32": "uint32", "f32": "float32",
    "f64": "float64", "flag": "bool", "text": "string", "raw": "binary", "day": "date32", "t": "timestamp[us]",
    "tz": "timestamp[us, UTC]", "money": "decimal128(18, 2)", "uuid": "fixed_size_binary[16]",
    "tags": "list<string>", "address": "struct<city: string, zip: int32>", "labels": "map<string, int64>",
    "doc": "json", "id4": "uuid",
}  # fmt: skip


@BOTH
def test_values_of_every_type_are_read_as_they_are(folder: persist.Client, as_: str) -> None:
    values: dict[str, Any] = {
        "i8": -3, "i16": -300, "i32": 7, "u8": 200, "u16": 60_000, "u32": 4_000_000_000, "f32": 0.5, "f64": 1e300,
        "flag": True, "text": "größe", "raw": b"\x00\xff", "day": dt.date(2026, 1, 2), "t": dt.datetime(2026, 1, 2, 3),  # noqa: DTZ001
        "tz": dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), "money": None, "uuid": bytes(range(16)),
        "tags": ["a", None], "address": {"city": "Bonn", "zip": 1}, "labels": [("x", 1)],
        "doc": {"b": [1, None], "a": "ö"}, "id4": UUID(int=5),
    }  # fmt: skip
    with folder.open_writer("s", persist.Schema({"id": "int64 not null"}, EVERY)) as write:
        write.append_now([{"id": 1, **values}, {"id": 2, **dict.fromkeys(EVERY)}])
    published = folder.publish("s", as_)
    with folder.open_reader("s") as read, read.snapshot() as snapshot:
        mine = snapshot.to_arrow()
    if as_ == "iceberg":
        found = StaticTable.from_metadata(published.place).scan().to_arrow()
    else:
        found = DeltaTable(published.place).to_pyarrow_table()
    assert found.select(mine.column_names).sort_by("id").to_pylist() == mine.sort_by("id").to_pylist()


def test_a_vacuum_of_another_engine_reaches_nothing(folder: persist.Client) -> None:
    life(folder)
    published = folder.publish("s", "delta")
    folder.publish("s", "iceberg")
    folder.table("s").upsert([row(1, "changed")])
    folder.publish("s", "delta", keep=1)
    folder.table("s").upsert([row(1, "changed again")])
    folder.publish("s", "iceberg")  # what it wrote for that, Delta's log knows nothing of
    folder.maintain("s")
    every = {"retention_hours": 0, "enforce_retention_duration": False, "dry_run": False}
    table = DeltaTable(published.place)
    assert table.vacuum(full=True, **every) == []  # type: ignore[arg-type]
    assert table.vacuum(**every) == []  # type: ignore[arg-type]
    assert not folder.scrub("s").damaged
    check_there(folder, "iceberg")


@BOTH
def test_files_that_are_deleted_behind_its_back_are_an_error_for_readers_and_the_next_publication(
    folder: persist.Client, as_: str
) -> None:
    life(folder)
    published = folder.publish("s", as_)
    (key,) = named(folder, as_)
    folder.blob.delete(key)
    with pytest.raises(Exception, match=r"(?i)no such file|not found"):
        by_others(published)
    with folder.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 5, 9)
    with pytest.raises(persist.Missing) as missing:
        folder.publish("s", as_)
    assert missing.value.key == key


@BOTH
def test_metadata_that_another_program_damaged_is_an_error_and_can_be_withdrawn(
    folder: persist.Client, as_: str
) -> None:
    life(folder)
    place = Path(folder.publish("s", as_).place.removeprefix("file://"))
    pattern = "_delta_log/*.json" if as_ == "delta" else "metadata/*.metadata.json"
    path = max(place.glob(pattern))
    whole = path.read_bytes()
    chance = Random(os.environ.get("PERSIST_SEED", "fixed"))
    for data in [
        b"",
        b"{",
        b"[" * 3000,
        whole.replace(b"persist.as_of", b"persist.is_of"),
        *mutated([whole], 40, chance),
    ]:
        path.chmod(0o644)
        path.write_bytes(data)
        with suppress(persist.PersistError):
            folder.publish("s", as_, dry_run=True)
    path.write_bytes(b"{")
    with pytest.raises(persist.Corrupt, match="withdraw it"):
        folder.publish("s", as_)
    folder.withdraw("s", as_)
    assert folder.publish("s", as_).is_new


@BOTH
def test_a_published_table_is_read_while_everything_else_happens(folder: persist.Client, as_: str) -> None:
    """What a reader has planned stays readable through compaction, collection and further publications."""
    life(folder)
    published, was = folder.publish("s", as_, keep=3), own(folder)
    if as_ == "iceberg":
        planned: Any = StaticTable.from_metadata(published.place).scan()
        list(planned.plan_files())
        read = planned.to_arrow
    else:
        read = DeltaTable(published.place).to_pyarrow_table
    for step in range(2):
        folder.table("s").upsert([row(id_, f"then {step}") for id_ in range(90)])
        folder.maintain("s")
        folder.publish("s", as_)
        folder.maintain("s")
        assert plain(read()) == was
    folder.table("s").upsert([row(1, "last")])
    folder.publish("s", as_)
    folder.maintain("s")
    with pytest.raises(Exception, match=r"(?i)no such file|not found"):
        read()


@BOTH
def test_what_follows_is_published_again_by_each_upkeep(world: World, client: persist.Client, as_: str) -> None:
    life(client)
    client.publish("s", as_, follows=True)
    (idle,) = client.maintain("s").done["publication"].published or (None,)
    assert idle is None
    client.table("s").upsert([row(1, "changed")])
    dry = client.maintain("s", dry_run=True)
    assert [step.what.partition(" as of")[0] for step in dry.plan.steps if step.duty == "publication"] == [  # type: ignore[union-attr]
        f"publish as {as_}"
    ]
    assert list(client.survey().due("publication")) == ["s"]
    (done,) = client.maintain("s").done["publication"].published
    assert done.as_of == 5
    assert not client.maintain("s").done["publication"].published
    client.publish("s", as_, follows=False)
    client.table("s").upsert([row(1, "once more")])
    client.pause("s", owner="ann", reason="a test", only=["publication"])
    assert "publication" in client.maintain("s").paused
    client.resume("s")
    assert not client.maintain("s").done["publication"].published
    check_there(client, as_)


@BOTH
def test_after_a_move_of_the_location_the_next_publication_is_read_where_it_is(tmp_path: Path, as_: str) -> None:
    with persist.open(f"file:{tmp_path / 'before'}", config=CONFIG) as client:
        life(client)
        client.publish("s", as_, follows=True)
    (tmp_path / "before").rename(tmp_path / "after")
    with persist.open(f"file:{tmp_path / 'after'}", config=CONFIG) as client:
        client.table("s").upsert([row(1, "moved")])
        (published,) = client.maintain("s").done["publication"].published
        assert by_others(published) == dict.fromkeys(by_others(published), own(client))
        client.maintain("s")
        check_there(client, as_)
        client.withdraw("s", as_)


def test_an_erasure_says_which_publication_still_has_the_rows(client: persist.Client) -> None:
    life(client)
    client.publish("s", keep=1)
    receipt = client.table("s").erase([{"id": 7}])
    assert receipt.left
    assert all("pin iceberg" in str(one) for one in receipt.left)
    client.publish("s", keep=1)
    assert not client.table("s").erase([{"id": 7}]).left


def test_copies_are_looked_through_by_an_erasure(client: persist.Client) -> None:
    with client.open_writer("s", persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64"})) as write:
        write.append_now([row(id_ // 2, "twice") for id_ in range(40)])
    client.publish("s", keep=1)
    assert any("_copies/" in str(one) for one in client.table("s").erase([{"id": 7}]).left)
    client.withdraw("s")
    assert not client.table("s").erase([{"id": 7}]).left


def test_a_shard_moves_up_when_it_is_first_published_unless_settings_forbid_it(world: World) -> None:
    client = world.client(CONFIG.model_copy(update={"format": 6}))
    life(client)
    with pytest.raises(persist.InvalidUsage, match="format 7 can"):
        client.publish("s")
    other = world.client(CONFIG)
    assert other.publish("s", dry_run=True).files
    assert other.inspect("s").state.format == 6
    other.publish("s")
    assert other.inspect("s").state.format == PART_SUMS


def test_only_a_publisher_with_the_right_to_maintain_pins(client: persist.Client) -> None:
    life(client)
    client.publish("s")
    pin = client.inspect("s").state.pins["iceberg"]
    answer = client.machine("s").try_commit(lambda _state, _now: c.Unpin("iceberg", b"other"))
    assert type(answer).__name__ == "WrongOpaque"
    assert client.inspect("s").state.pins["iceberg"] == pin


INNER = "struct<a: int32, b: list<struct<c: string>>, d: map<string, struct<e: float32>>>"
WIDER = (
    "struct<a: int64, b: list<struct<c: string, f: int32>>, d: map<string, struct<e: float64, g: date32>>, "
    "h: list<int8>>"
)
EVOLVING = persist.Schema(
    {"id": "int64 not null"}, {"word": "string", "n": "int32", "seen": "date32", "in": INNER}, unique=True
)


def evolved(client: persist.Client) -> Iterator[tuple[dict[int, str], Any]]:
    """Each step of an evolution: what the columns are called that have which id, and what was published then."""
    table = client.table("s", EVOLVING)

    def publish(**called: str) -> tuple[dict[int, str], Any]:
        return called, client.publish("s", "iceberg")  # type: ignore[return-value]

    day, inner = dt.date(2026, 11, 28), {"a": 1, "b": [{"c": "x"}, None], "d": {"k": {"e": 0.5}}}
    table.append([{"id": id_, "word": f"w{id_}", "n": id_, "seen": day, "in": inner} for id_ in range(60)])
    yield publish()
    table.evolve(table.describe().schema.rename({"word": "text"}).widen({"n": "int64", "in": WIDER}))
    yield publish()
    inner = {"a": 2**40, "b": [{"c": "y", "f": 1}], "d": {"k": {"e": 0.1, "g": day}}, "h": [1, None]}
    table.append([{"id": 100 + id_, "text": f"t{id_}", "n": 2**40 + id_, "seen": day, "in": inner} for id_ in range(9)])
    yield publish()
    table.evolve(table.describe().schema.drop("seen"))
    table.append([{"id": 200, "text": "no day", "n": 1}])
    yield publish()
    table.evolve(table.describe().schema.add({"seen": "string"}))  # the name again, for another column
    table.append([{"id": 300, "text": "again", "n": 2, "seen": "today"}])
    yield publish()
    table.evolve(table.describe().schema.add({"more": "int64"}, {"more": 7}))
    yield publish()
    table.evolve(table.describe().schema.rename({"text": "n", "n": "text"}))  # two change their names
    table.upsert([{"id": 5, "n": "five", "text": 5, "seen": "now"}])
    yield publish()
    table.evolve(table.describe().schema.reorder("more").reorder("in", after="seen"))
    table.upsert([{"id": 6, "n": "six"}])
    yield publish()


def by_name(table: pa.Table) -> Rows:
    return sorted((tuple(sorted(one.items(), key=lambda cell: cell[0])) for one in table.to_pylist()), key=repr)


def test_an_evolved_table_is_published_for_iceberg_and_each_snapshot_reads_as_then(folder: persist.Client) -> None:
    seen: dict[int, Rows] = {}
    shared = []
    for _, published in evolved(folder):
        with folder.open_reader("s") as read, read.snapshot(None) as snapshot:
            expected = by_name(snapshot.to_arrow())
        table = StaticTable.from_metadata(published.place)
        assert by_name(table.scan().to_arrow()) == expected
        assert [one.name for one in table.schema().fields] == folder.table("s").schema.names
        assert by_name(pl.scan_iceberg(published.version, reader_override="pyiceberg").collect().to_arrow()) == expected
        now = table.metadata.current_snapshot_id
        assert now is not None
        seen[now] = expected
        for snapshot_id, rows in seen.items():
            assert by_name(table.scan(snapshot_id=snapshot_id).to_arrow()) == rows
        shared.append(published.shared)
        check_there(folder, "iceberg")
    assert len(seen) == 8
    assert shared[1] == shared[2] == 1, "what was renamed and widened is read where it is"
    folder.maintain("s")
    check_world(folder, "s")


def test_an_evolved_table_is_not_published_as_delta_nor_does_one_evolve_that_is(client: persist.Client) -> None:
    *_, _ = evolved(client)
    with pytest.raises(persist.Unpublishable, match="publish it as iceberg"):
        client.publish("s", "delta")
    plain = client.table("plain", EVOLVING)
    plain.append([{"id": 1, "word": "w", "n": 1, "seen": None}])
    client.publish("plain", "delta")
    with pytest.raises(persist.SchemaMismatch, match="published as delta"):
        plain.evolve(EVOLVING.rename({"word": "text"}))
    client.withdraw("plain", "delta")
    plain.evolve(EVOLVING.rename({"word": "text"}))


def test_copies_are_made_anew_where_columns_changed_and_an_erasure_finds_their_keys(folder: persist.Client) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string"})
    table = folder.table("s", schema)
    table.append([{"id": 1, "word": "twice"}, {"id": 1, "word": "twice"}, {"id": 2, "word": "once"}])
    first = folder.publish("s", "iceberg")
    assert first.copied
    table.evolve(table.describe().schema.rename({"id": "number", "word": "text"}))
    again = folder.publish("s", "iceberg")
    rows = StaticTable.from_metadata(again.place).scan().to_arrow().to_pylist()
    assert sorted(one["number"] for one in rows) == [1, 1, 2]
    assert {one["text"] for one in rows} == {"twice", "once"}
    table.delete([{"number": 1}])
    (erased,) = table.erase([{"number": 1}], dry_run=True).shards
    assert "copy" in {place.kind for place, _ in erased.left} | {place.kind for place in erased.gone}
