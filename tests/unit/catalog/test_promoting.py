"""Promoting a shard in place: what stays, who continues, what is refused, and what a process that dies leaves."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.convert.by_key import without_times
from persist_lib.core.formats import MEMBERS, SCHEMAS_SAY_MORE
from persist_lib.errors import InvalidUsage, MemberOf, NameTaken, NotFound, OfLayer, SinceViolation
from persist_lib.frontier import at
from persist_lib.relation.registration import format_since
from persist_lib.testing import contents_of, updates_of
from tests import servers
from tests.circles import by_day, has_met
from tests.served import ServedWorld
from tests.worlds import SCHEMA, WIDER, DiesAt, Killed, World, row

LATER = persist.Config(format=MEMBERS)


STORES = pytest.mark.parametrize("store", ["memory", "S3 and PostgreSQL"])


def world_in(store: str, number: int) -> World:
    """A world of its own in memory, or in a bucket and a schema of real servers."""
    if store == "memory":
        return World(seed=number)
    servers.use_test_credentials()
    return World(servers.s3_url(), number, servers.postgres_at(persist_schema=f"t{os.urandom(6).hex()}"))


def places_of(store: str, every: int) -> Sequence[int]:
    """The requests at which a process dies; on servers some by day, as each takes a second."""
    return by_day(range(1, 1_000), every if store == "memory" else 17)


def died_in(make: Callable[[World], object], store: str, every: int, **how: Any) -> Iterator[tuple[int, World]]:
    """The worlds in which a promotion of `t` died, at each of its requests in turn, and that request's number."""
    is_over = False
    for number in places_of(store, every):
        fresh = world_in(store, number)
        make(fresh)
        plan = DiesAt(number)
        table = fresh.client(LATER, plan=plan).table("t")
        plan.is_armed = True
        try:
            table.promote(**how)
            is_over = True
        except Killed:
            plan.is_armed = False
            yield number, fresh
        plan.is_armed = False
        fresh.close()
        if is_over:
            break
    assert is_over
    assert number > 10


def lone(world: World, times: int = 3) -> persist.Client:
    """A shard `t` with a row at each time, a hold, a producer and a retention."""
    client = world.client(LATER)
    write = client.open_writer("t", SCHEMA)
    for time in range(times):
        write.compare_and_append([row(time, time=time)], time, time + 1, producer=("loader", time))
    client.set_hold("t", "audit", 0, opaque=b"mine")
    client.set_retention("t", 1)
    return client


def ids(table: Any, as_of: int | None = None) -> list[int]:
    return sorted(one["id"] for one in table.read(as_of).to_pylist())


def renditions_of(client: persist.Client, name: str = "t") -> Any:
    return client.inspect(f"{client.controller().describe(name).id}.renditions").state


def test_all_that_it_was_is_the_collections_and_nothing_is_copied(world: World) -> None:
    client = lone(world)
    world.requests.clear()
    found = client.table("t").promote()
    assert world.count("set", "delete") == 0, "no object is written"
    assert (found.carrier, found.shards, found.since, found.upper) == ("collection", ("t",), at(0), at(3))
    assert found.holds == {"audit": at(0)}
    assert found.retention == 1
    state = renditions_of(client)
    assert state.holds["audit"].opaque == b"mine"
    assert state.producers["loader"].sequence == 2
    table = client.table("t")
    assert [ids(table, time) for time in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert client.tables() == ["t"]
    with table.writer() as write, pytest.raises(persist.AlreadyProduced):
        write.compare_and_append([row(9, time=3)], 3, 4, producer=("loader", 2))
    assert table.promote() == table.describe(), "the same again"


def test_tables_that_are_open_continue_and_handles_by_the_shards_name_are_told(world: World) -> None:
    client = lone(world)
    other = world.client(LATER)
    table, write, read = other.table("t"), other.open_writer("t", SCHEMA), other.open_reader("t")
    assert ids(table) == [0, 1, 2]
    listener, by_name = table.listen(0), read.listen(0)
    heard = [event for event in listener.poll() if isinstance(event, persist.Updates)]
    queued = write.append_async([row(3, time=3)], 3, 4)
    queued.result()
    client.table("t").promote()
    for refused in (
        lambda: write.append_now([row(8)]), lambda: read.snapshot(timeout=0), read.fetch_upper, by_name.poll,
        lambda: read.changes(0, 2), lambda: other.open_writer("t", SCHEMA), lambda: other.open_reader("t"),
        lambda: other.set_hold("t", "mine", 1), lambda: other.release_hold("t", "audit"),
        lambda: other.set_retention("t", None), lambda: other.restore("t", 1), lambda: other.finish("t"),
        lambda: other.forget_producer("t", "loader", expected=2),
        lambda: write.append_async([row(8, time=4)], 4, 5).result(),
        lambda: world.client(LATER, read_only=True).open_reader("t"),
    ):  # fmt: skip
        with pytest.raises(MemberOf, match=r"was promoted.*client.table\('t'\)"):
            refused()
    table.append([row(4)])
    assert ids(table) == [0, 1, 2, 3, 4]
    assert ids(world.client(LATER, read_only=True).table("t")) == [0, 1, 2, 3, 4]
    heard += [event for event in listener.poll() if isinstance(event, persist.Updates)]
    assert Counter(data[0] for one in heard for data, _, _ in updates_of(one.table)) == Counter([1, 2, 3, 4])
    assert table.carrier == "collection"
    assert table.changes(0).to_arrow().num_rows == 4
    table.rename("u")
    assert client.tables() == ["u"]


def test_who_is_refused_by_the_shards_name_learns_what_the_table_is_called_now(world: World) -> None:
    client = lone(world)
    other = world.client(LATER)
    write = other.open_writer("t", SCHEMA)
    table = client.table("t")
    table.promote()
    table.rename("u")
    with pytest.raises(MemberOf, match=r"the table 'u', .*client.table\('u'\)$") as caught:
        write.append_now([row(8)])
    assert caught.value.fields["table"] == "u"
    client.controller().create("t", SCHEMA, mode="compare_and_append")
    client.table("t").append([row(70)])
    with pytest.raises(MemberOf, match=r"client.table\('u'\)$"):
        write.append_now([row(8)])


def test_every_verb_of_an_open_table_continues() -> None:
    """Each is the first to learn of it."""
    verbs: dict[str, Any] = {
        "append": lambda t: t.append([row(7)]), "upsert": lambda t: t.upsert([row(7)]),
        "delete": lambda t: t.delete([0]), "update": lambda t: t.update({"word": "new"}, [0]),
        "apply": lambda t: t.apply([row(7)], [0]), "dry": lambda t: t.append([row(7)], dry_run=True),
        "restore": lambda t: t.restore(1), "read": lambda t: t.read().to_pylist(), "count": lambda t: t.count(),
        "changes": lambda t: t.changes(0).to_arrow(), "listen": lambda t: t.listen(0).poll(),
        "history": lambda t: t.history(), "describe": lambda t: t.describe(),
        "evolve": lambda t: t.evolve(WIDER),
        "set_retention": lambda t: t.set_retention(2), "set_hold": lambda t: t.set_hold("h", 1),
        "downgrade_hold": lambda t: t.downgrade_hold("audit", 1), "release_hold": lambda t: t.release_hold("audit"),
        "rename": lambda t: t.rename("u"), "drop": lambda t: (t.release_hold("audit"), t.drop()),
        "maintain": lambda t: t.maintain(), "writer": lambda t: t.writer().close(), "promote": lambda t: t.promote(),
    }  # fmt: skip
    done = []
    for name, verb in verbs.items():
        fresh = World(seed=7)
        client = lone(fresh)
        table = fresh.client(LATER).table("t")
        table.read().to_pylist()
        client.table("t").promote()
        verb(table)
        assert table.carrier == "collection", name
        assert client.tables() == ([] if name == "drop" else ["u"] if name == "rename" else ["t"])
        done.append(name)
        fresh.close()
    assert len(done) == len(verbs)


@STORES
def test_whoever_dies_at_whichever_request_loses_nothing(store: str) -> None:
    """Before the deciding one the shard is what it was, and another promotes it; after it, it is the collection."""
    left: Counter[str] = Counter()
    for number, fresh in died_in(lone, store, 6):
        other = fresh.client(LATER)
        with fresh.client(LATER).table("t") as found:
            left[found.carrier] += 1
            found.append([row(3)])
            assert ids(found) == [0, 1, 2, 3], number
            assert ids(found, 1) == [0, 1], number
        other.maintain()
        assert other.table("t").promote().carrier == "collection"
        assert ids(other.table("t")) == [0, 1, 2, 3], number
        assert [ids(other.table("t"), time) for time in (0, 1)] == [[0], [0, 1]]
        assert other.table("t").describe().holds == {"audit": at(0)}
        assert other.table("t").describe().retention == 1
        assert not other.controller().describe("t").pending
        assert len(other.controller().list()) == 1
    assert has_met(left, {"shard", "collection"})


def test_what_cannot_be_promoted_is_refused_and_stays_as_it_is(world: World) -> None:
    client = lone(world)
    old = world.client(persist.Config(format=SCHEMAS_SAY_MORE))
    old.open_writer("old", SCHEMA).append_now([row(1)])
    closed = client.open_writer("closed", SCHEMA)
    closed.append_now([row(1)])
    closed.finish()
    client.open_writer("gone", SCHEMA).append_now([row(1)])
    client.finish("gone")
    controller = client.controller()
    controller.create("made", SCHEMA)
    (data,) = controller.describe("made").active.shards
    client.upgrade(data)
    for name, kind, said in (
        ("old", InvalidUsage, "format 3.*persist shard upgrade"), ("closed", InvalidUsage, "closed for writing"),
        ("gone", NotFound, "dropped"), ("nothing", NotFound, "no shard"), (data, OfLayer, "belongs to"),
        ("_catalog", (OfLayer, InvalidUsage), "catalog|format"),
    ):  # fmt: skip
        before = world.bytes(name)
        for dry_run in (True, False):
            with pytest.raises(kind, match=said):
                controller.promote(name, dry_run=dry_run)
        assert world.bytes(name) == before
    with pytest.raises(InvalidUsage, match="may write"):
        world.client(LATER, read_only=True).controller().promote("t")
    with pytest.raises(InvalidUsage, match="only the usual catalog"):
        client.controller(catalog="other").promote("t")
    assert controller.promote("t", dry_run=True) is None
    assert world.client(LATER, read_only=True).table("t").promote(dry_run=True).carrier == "shard"
    assert client.table("t").promote(dry_run=True).carrier == "shard"
    assert client.controller().list() == ["made"]
    with pytest.raises(NotFound):
        controller.promote("made")
    tables = controller.tables()
    tables.create("booked", SCHEMA, timeline="bank")
    with pytest.raises(InvalidUsage, match="on a timeline"):
        client.table("booked").promote(shards=2)
    assert client.table("booked").promote(timeline="bank").carrier == "timeline 'bank'", "it is there already"


def die_after_the_intent(world: World, **how: Any) -> None:
    """A process that promotes `t` dies as soon as the catalog says so, and nothing else was done."""
    plan = DiesAt(1)
    dying = world.client(LATER, plan=plan)
    for number in range(1, 40):
        plan.number, plan.seen, plan.is_armed = number, 0, True
        with pytest.raises(Killed):
            dying.controller().promote("t", **how)
        plan.is_armed = False
        if world.client(LATER).controller().catalog.fetch().collections:
            break


def test_one_that_is_refused_for_ever_leaves_the_shard_alone(world: World) -> None:
    """It ended between the intent and the deciding transaction. Who takes the rest away must not take the shard."""
    client = lone(world)
    die_after_the_intent(world)
    with client.open_writer("t", SCHEMA) as write:
        write.finish()
    controller = client.controller()
    with pytest.raises(InvalidUsage, match="closed"):
        controller.promote("t")
    for _ in range(2):
        client.controller().tend()
    assert client.controller().list() == []
    assert client.inspect("t").state.member == ""
    assert not client.inspect("t").state.is_finished()
    with client.open_reader("t") as read:
        assert len(read.snapshot().to_pylist()) == 3
    assert not controller.catalog.fetch().collections, "nothing is left of it"


def test_what_changed_between_the_intent_and_the_decision_is_as_it_was_then(world: World) -> None:
    client = lone(world)
    die_after_the_intent(world)
    client.evolve_schema("t", WIDER)
    client.set_retention("t", 7)
    client.release_hold("t", "audit")
    client.set_hold("t", "late", 1)
    found = client.table("t").promote()
    assert (found.retention, found.schema, found.holds) == (7, WIDER, {"late": at(1)})
    assert client.controller().catalog.fetch().renditions_of(client.controller().describe("t").id)[0].columns == WIDER


def test_an_append_whose_answer_was_lost_is_there_once(world: World) -> None:
    client = lone(world)
    table = client.table("t")
    done = table.append([row(5)])
    table.promote()
    again = table.append([row(5)], token=done.token)
    assert again.token == done.token
    assert ids(table).count(5) == 1
    late = world.client(LATER).table("t").append([row(5)], token=done.token)
    assert late.token == done.token
    assert ids(table).count(5) == 1


@pytest.mark.parametrize("first", ["shard", "collection"])
def test_an_append_whose_answer_was_lost_before_a_table_joined_is_there_once(world: World, first: str) -> None:
    client = lone_by_a_clock(world) if first == "shard" else collected(world)
    table, write = client.table("t"), client.table("t")
    done = table.append([row_of(5)])
    table.promote(timeline="bank")
    for again in (table, write, world.client(LATER).table("t")):
        assert again.append([row_of(5)], token=done.token).token == done.token
    table.append([row_of(6)])
    client.maintain()
    assert table.upsert([row_of(5)], token=done.token).token == done.token
    assert ids(table) == [0, 1, 5, 6]
    later = table.append([row_of(7)])
    assert table.append([row_of(7)], token=later.token).time == later.time
    client.maintain()
    assert table.append([row_of(7)], token=later.token).time == later.time
    assert ids(table) == [0, 1, 5, 6, 7]


@pytest.mark.parametrize("timeline", [None, "bank"])
def test_an_append_that_a_server_placed_is_judged_in_the_shard_that_minted_its_token(
    world: World, timeline: str | None
) -> None:
    client = lone_by_a_clock(world)
    with client.open_writer("t", CLOCK) as write:
        lost = format_since(client.runtime, write.machine.fetch().seqno)
        (rows,) = without_times(CLOCK, [row_of(5)])
        there = write._append_placed(rows.select([*CLOCK.names, "_diff"]), client.runtime.deadline(9), None, None, None)
    table = client.table("t")
    table.promote(timeline=timeline)
    for again in (table, world.client(LATER).table("t")):
        assert again.append([row_of(5)], token=there.token).token == there.token
    assert ids(table) == [0, 1, 5]
    done = table.append([row_of(6)], token=lost)
    assert done.token != lost, "no shard by itself takes the first attempt any more, so another one was made"
    assert table.append([row_of(6)], token=done.token).token == done.token
    assert ids(table) == [0, 1, 5, 6]


def test_history_is_kept_for_readers_by_name_until_the_last_is_gone(world: World) -> None:
    client = lone(world)
    client.release_hold("t", "audit")
    reader = world.client(LATER).open_reader("t")
    with client.table("t") as table:
        table.promote()
        for _ in range(5):
            table.append([row(9)])
    client.controller().tend("t")
    assert table.describe().since == at(0), "a reader by name may have to continue from there"
    assert table.describe().holds == {}
    assert "named" in renditions_of(client).holds
    reader.close()
    table.close()
    for _ in range(2):
        client.controller().tend("t")
    assert "named" not in renditions_of(client).holds
    assert table.describe().since == at(6)
    with pytest.raises(SinceViolation):
        table.read(0)


@pytest.mark.parametrize("timeline", [None, "bank"])
def test_a_program_with_the_older_columns_stays_in_them(world: World, timeline: str | None) -> None:
    client, later = world.client(LATER), world.client(LATER)
    old = client.table("t", SCHEMA)
    listener = old.listen(max(0, old.append([row(1)]).time or 0))
    other = later.table("t")
    value = {column.name: column.type for column in other.schema.value}
    other.evolve(persist.Schema(other.schema.key, {**value, "more": "int64"}, times="ms"))
    other = world.client(LATER).table("t")
    other.append([{**row(70), "more": 5}])
    before = old.read().to_arrow().column_names
    other.promote(timeline=timeline, make_timeline=timeline is not None)
    old.append([row(71)])
    other.append([{**row(72), "more": 6}])
    assert old.schema.names == before == old.read().to_arrow().column_names
    heard = [event.table for event in listener.poll() if isinstance(event, persist.Updates)]
    assert all("more" not in table.column_names for table in heard)
    assert {70, 71, 72} <= {data["id"] for table in heard for data in table.to_pylist()}
    assert {one["id"]: one["more"] for one in other.read().to_pylist()}.items() >= {70: 5, 71: None, 72: 6}.items()


def test_its_name_can_be_given_away_and_dropping_it_takes_the_shard(world: World) -> None:
    client = lone(world)
    table = client.table("t")
    table.promote()
    table.rename("u")
    assert client.tables() == ["u"]
    plain = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")
    with pytest.raises(NotFound, match="'u' now"):
        client.table("t", plain)
    client.controller().create("t", plain, mode="compare_and_append")
    second = client.table("t", plain)
    second.append([row(70)])
    assert client.tables() == ["t", "u"]
    assert ids(second) == [70]
    assert ids(table) == [0, 1, 2]
    with pytest.raises(NameTaken):
        second.rename("u")
    table.release_hold("audit")
    assert table.drop() == ()
    table.close()
    client.heartbeat()
    client.controller().tend()
    assert client.inspect("t").state.is_finished()
    assert client.tables() == ["t"]
    assert ids(client.table("t")) == [70]


def test_more_shards_are_a_copy_that_continues_where_it_was_cut_short(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lone(world, 20)
    table = client.table("t")
    controller = type(client.controller())

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(controller, "hand_over", dies)
        with pytest.raises(Killed):
            table.promote(shards=3)
    assert client.controller().describe("t").active.number == 1
    table.append([row(30)])
    assert len(table.promote(shards=3).shards) == 3
    assert [one.number for one in client.controller().describe("t").renditions] == [1, 2], "the copy is made once"
    assert ids(table) == [*range(20), 30]
    assert ids(table, 4) == [0, 1, 2, 3, 4]
    assert len(table.promote(shards=3).shards) == 3


def test_a_collection_beside_a_shard_of_its_name_is_said(world: World) -> None:
    """As programs of earlier releases could make them."""
    client = lone(world)
    controller = client.controller()
    controller.create("c", SCHEMA)
    rows = controller.catalog.fetch().rows
    assert all(json.loads(row.body).get("v", 1) == 1 for row in rows.values())
    table = client.table("t")
    table.promote()
    versions = {json.loads(row.body).get("v", 1) for key, row in controller.catalog.fetch().rows.items()}
    assert versions == {1, 2}, "a program that knows no places must not take them for other shards"
    with client.controller().open_reader("t") as read:
        assert contents_of(read.snapshot(2, diff=True).to_arrow()).total() == 3


CLOCK = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")


def lone_by_a_clock(world: World) -> persist.Client:
    """A shard `t` whose times are a clock, and a table `other` on the timeline `bank`, which has come further."""
    client = world.client(LATER)
    table = client.table("t", CLOCK)
    for id_ in (0, 1):
        table.append([row_of(id_)])
        world.clock.advance(1)
    client.controller().tables().create("other", CLOCK, timeline="bank", mode="wal")
    world.clock.advance(5)
    client.table("other").append([row_of(0)])
    return client


def row_of(id_: int, word: str = "w") -> dict[str, Any]:
    return {"id": id_, "word": word}


def test_a_table_joins_a_timeline_in_place(world: World) -> None:
    client = lone_by_a_clock(world)
    other = world.client(LATER).table("t")
    world.clock.advance(3)  # beyond the timeline
    first = other.append([row_of(2)]).time
    assert first is not None
    other.set_hold("audit", 0)
    client.set_retention("t", "1 hour")
    listener = other.listen(first - 1)
    world.requests.clear()
    found = client.table("t").promote(timeline="bank")
    assert world.count("set") == 0, "no object is written"
    assert found.carrier == "timeline 'bank'"
    assert (found.holds, found.retention) == ({"audit": at(0)}, 3_600_000)
    assert ids(client.table("t")) == [0, 1, 2]
    assert ids(world.client(LATER, read_only=True).table("t")) == [0, 1, 2]
    with client.transaction("bank") as transaction:
        transaction.insert("t", [row_of(3)])
        transaction.insert("other", [row_of(3)])
    other.append([row_of(4)])
    assert other.carrier == "timeline 'bank'"
    assert ids(other) == [0, 1, 2, 3, 4]
    assert ids(client.table("other")) == [0, 3]
    assert ids(other, first) == [0, 1, 2]
    assert ids(other, first - 1) == [0, 1]
    client.maintain()
    assert ids(client.table("t")) == [0, 1, 2, 3, 4]
    assert ids(client.table("t"), first) == [0, 1, 2]
    heard = [event for event in listener.poll() if isinstance(event, persist.Updates)]
    assert Counter(data[0] for one in heard for data, _, _ in updates_of(one.table)) == Counter([2, 3, 4])
    assert client.table("t").promote(timeline="bank").carrier == "timeline 'bank'", "the same again"
    with pytest.raises(InvalidUsage, match="joins no timeline"):
        client.controller().promote("t", timeline="shop")


def test_a_transaction_that_read_before_a_table_joined_does_not_overwrite_what_was_written_by_name(
    world: World,
) -> None:
    client = lone_by_a_clock(world)
    transaction = world.client(LATER).transaction("bank")
    transaction.read("other").to_pylist()
    client.table("t").append([row_of(7, "by name")])
    client.table("t").promote(timeline="bank")
    transaction.upsert("t", [row_of(7, "over")])
    with pytest.raises(persist.WriteConflict):
        transaction.commit()
    assert (7, "by name") in [(one["id"], one["word"]) for one in client.table("t").read().to_pylist()]


def test_what_cannot_join_a_timeline_stays_as_it_is(world: World) -> None:
    client = lone(world)
    clocked = lone_by_a_clock_named(client, "clocked")
    client.controller().tables().create("quick", CLOCK, timeline="direct", mode="yolo")
    client.controller().tables().create("booked", CLOCK, timeline="bank", mode="wal")
    for name, timeline, said in (
        ("t", "bank", "plain integers"), ("clocked", "direct", "has no WAL"),
        ("ahead", "bank", "ahead of the store's clock"),
    ):  # fmt: skip
        if name == "ahead":
            write = client.open_writer("ahead", CLOCK)
            now = world.clock() // 1_000_000
            write.compare_and_append([{**row_of(1), "_time": now}], 0, now + 60_000)
        before = world.bytes(name)
        for dry_run in (True, False):
            with pytest.raises(InvalidUsage, match=said):
                client.table(name).promote(timeline=timeline, dry_run=dry_run)
        assert world.bytes(name) == before
    for make, dry_run in ((False, True), (False, False)):
        with pytest.raises(NotFound, match=r"no timeline 'bnak'.*Did you mean bank\?.*make_timeline=True"):
            clocked.promote(timeline="bnak", make_timeline=make, dry_run=dry_run)
    assert clocked.promote(timeline="fresh", make_timeline=True, dry_run=True).carrier == "shard"
    with pytest.raises(InvalidUsage, match="make_timeline goes with"):
        clocked.promote(make_timeline=True)
    assert {one.name for one in client.controller().catalog.fetch().timelines.values()} == {"direct", "bank"}
    with pytest.raises(InvalidUsage, match="shards or a timeline"):
        clocked.promote(shards=2, timeline="bank")
    assert clocked.promote(timeline="fresh", make_timeline=True).carrier == "timeline 'fresh'"


def test_of_one_that_is_refused_for_ever_no_more_than_an_empty_timeline_stays(world: World) -> None:
    """As others may be about to make a table there. The next call that names it finds it, without make_timeline."""
    client = world.client(LATER)
    client.table("t", CLOCK).append([row_of(1)])
    die_after_the_intent(world, timeline="fresh", make_timeline=True)
    with client.open_writer("t", CLOCK) as write:
        write.finish()
    with pytest.raises(InvalidUsage, match="closed"):
        client.controller().promote("t", timeline="fresh", make_timeline=True)
    client.maintain()
    assert not client.controller().catalog.fetch().collections
    assert client.inspect("t").state.member == ""
    client.table("u", CLOCK).append([row_of(1)])
    assert client.table("u").promote(timeline="fresh").carrier == "timeline 'fresh'"
    assert ids(client.table("u")) == [1]


def lone_by_a_clock_named(client: persist.Client, name: str) -> persist.Table:
    table = client.table(name, CLOCK)
    table.append([row_of(1)])
    return table


def collected(world: World, shards: int = 2, mode: Any = "compare_and_append") -> persist.Client:
    """A collection `t` with the rows 0 and 1, and a table `other` on the timeline `bank`, which has come further."""
    client = world.client(LATER)
    client.controller().create("t", CLOCK, shards=shards, mode=mode)
    for id_ in (0, 1):
        if mode == "append":
            now = world.clock() // 1_000_000
            with client.controller().open_writer("t") as write:
                write.append([{**row_of(id_), "_time": now}], write.fetch_upper(), now + 1)
        else:
            client.table("t").append([row_of(id_)])
        world.clock.advance(1)
    client.controller().tables().create("other", CLOCK, timeline="bank", mode="wal")
    world.clock.advance(5)
    client.table("other").append([row_of(0)])
    return client


@pytest.mark.parametrize(("shards", "mode"), [(2, "compare_and_append"), (1, "append"), (1, "compare_and_append")])
def test_a_collection_joins_a_timeline_in_place_and_those_who_wrote_it_before_are_refused(
    world: World, shards: int, mode: str
) -> None:
    client = collected(world, shards, mode)
    open_elsewhere = world.client(LATER).table("t")
    assert ids(open_elsewhere) == [0, 1]
    former = world.client(LATER).controller().open_writer("t")
    reader = world.client(LATER).controller().open_reader("t")
    here = client.controller().open_writer("t")
    world.clock.advance(3)
    first = (reader.fetch_upper().time or 0) - 1
    open_elsewhere.set_hold("audit", first)
    listener = open_elsewhere.listen(first)
    world.requests.clear()
    assert client.table("t").promote(timeline="bank", dry_run=True).carrier == "collection"
    found = client.table("t").promote(timeline="bank")
    assert world.count("set") == 0, "no object is written"
    assert found.carrier == "timeline 'bank'"
    assert found.holds == {"audit": at(first)}
    assert ids(client.table("t")) == [0, 1]
    for write in (former, here):
        late = [{**row_of(8), "_time": first + 91}]
        append = partial(write.append, late, first + 1, first + 99)
        with pytest.raises(MemberOf, match=r"client.table\('t'\)"):
            (append if mode == "append" else partial(write.append_now, [row_of(8)]))()
    with pytest.raises(MemberOf, match=r"client.table\('t'\)"):
        reader.snapshot(timeout=0)
    with client.transaction("bank") as transaction:
        transaction.insert("t", [row_of(3)])
        transaction.insert("other", [row_of(3)])
    open_elsewhere.append([row_of(4)])
    assert open_elsewhere.carrier == "timeline 'bank'"
    assert ids(open_elsewhere) == ids(world.client(LATER, read_only=True).table("t")) == [0, 1, 3, 4]
    assert ids(open_elsewhere, first) == [0, 1]
    client.maintain()
    assert ids(client.table("t")) == [0, 1, 3, 4]
    heard = [event for event in listener.poll() if isinstance(event, persist.Updates)]
    assert Counter(data[0] for one in heard for data, _, _ in updates_of(one.table)) == Counter([3, 4])
    assert client.table("t").promote(timeline="bank").carrier == "timeline 'bank'", "the same again"
    assert client.controller().promote("t", timeline="bank") is not None
    tables = client.controller()
    new = tables.make_rendition("t", shards=3, copy=True)
    tables.copy_rendition("t", new.number)
    tables.hand_over("t", new.number, advance=True)
    if mode != "append":
        with pytest.raises(MemberOf):
            former.append_now([row_of(9)])
    open_elsewhere.append([row_of(5)])
    client.maintain()
    assert ids(client.table("t")) == ids(open_elsewhere) == [0, 1, 3, 4, 5]
    assert client.table("t").describe().shards == tuple(new.shards)


def test_a_promoted_shard_joins_a_timeline_later(world: World) -> None:
    client = lone_by_a_clock(world)
    other = world.client(LATER).table("t")
    other.promote()
    other.append([row_of(2)])
    with world.client(LATER).controller().open_writer("t") as write:
        assert client.table("t").promote(timeline="bank").carrier == "timeline 'bank'"
        with pytest.raises(MemberOf):
            write.append_now([row_of(9)])
    other.append([row_of(3)])
    assert ids(other) == ids(client.table("t")) == [0, 1, 2, 3]
    assert other.carrier == "timeline 'bank'"


def test_a_timeline_that_is_made_for_a_table_is_never_there_without_it() -> None:
    """Before each request of the promotion another client looks at the catalog."""
    world = World()
    lone_by_a_clock(world)
    looker, looks = world.client(LATER), Counter[tuple[bool, bool]]()

    class Looks(DiesAt):
        def decide(self, operation: Any) -> Any:
            if self.is_armed:
                seen = looker.controller().catalog.fetch()
                fresh = {one.id for one in seen.timelines.values() if one.name == "fresh"}
                looks[bool(fresh), any(one.timeline in fresh for one in seen.collections.values())] += 1
            return super().decide(operation)

    plan = Looks(1_000)
    table = world.client(LATER, plan=plan).table("t")
    plan.is_armed = True
    table.promote(timeline="fresh", make_timeline=True)
    assert set(looks) == {(False, False), (True, True)}


@pytest.mark.parametrize("timeline", ["bank", "fresh"])
@pytest.mark.parametrize("make", [lone_by_a_clock, collected])
@STORES
def test_whoever_dies_while_a_table_joins_loses_nothing(make: Any, timeline: str, store: str) -> None:
    """A timeline that is made with it is there if, and only if, the table joins it, without a second call."""
    left: Counter[str] = Counter()
    how: dict[str, Any] = {"timeline": timeline, "make_timeline": timeline == "fresh"}
    for number, fresh in died_in(make, store, 8, **how):
        lines = {one.name for one in fresh.client(LATER).controller().catalog.fetch().timelines.values()}
        if timeline in lines:
            fresh.client(LATER).transaction(timeline).rollback()
        found = fresh.client(LATER).table("t")
        left[found.carrier] += 1
        found.append([row_of(3)])
        assert ids(found) == [0, 1, 3], number
        other = fresh.client(LATER)
        other.maintain()
        if timeline == "fresh":
            assert ("fresh" in lines) == (other.table("t").carrier == "timeline 'fresh'"), number
        assert other.table("t").promote(**how).carrier == f"timeline {timeline!r}"
        with other.transaction(timeline) as transaction:
            transaction.insert("t", [row_of(5)])
            if timeline == "bank":
                transaction.insert("other", [row_of(5)])
        assert ids(other.table("t")) == [0, 1, 3, 5], number
        assert not other.controller().describe("t").pending
    assert has_met(left, {"shard" if make is lone_by_a_clock else "collection", f"timeline {timeline!r}"})


@pytest.mark.parametrize("way", ["server", "store"])
def test_clients_of_a_shard_server_continue_whether_a_table_is_promoted_through_it_or_at_the_store(way: str) -> None:
    served = ServedWorld()
    client = served.client()
    table = client.table("t", CLOCK)
    table.append([row_of(1)])
    client.upgrade("t")
    direct = persist.open(served.inner, runtime=served.clock.runtime(99))
    (served.client() if way == "server" else direct).table("t").promote()
    table.append([row_of(2)])
    assert ids(table) == [1, 2]
    assert ids(served.client().table("t")) == [1, 2]
    assert table.carrier == "collection"
    served.close()
