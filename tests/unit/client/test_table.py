"""The front door: one handle with the same verbs, answers and errors, whatever carries the table."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib import events, pending_area, streams
from persist_lib.catalog import CollectionReader, CollectionWriter
from persist_lib.catalog.answers import CollectionListen, CollectionSnapshot
from persist_lib.catalog.controller import Controller
from persist_lib.maintain import Worker
from persist_lib.relation.listen import Updates
from persist_lib.testing import Outcome
from persist_lib.timeline.table_listen import TableListen
from persist_lib.timeline.tables import Tables
from persist_lib.timeline.transaction import Transaction
from persist_lib.timeline.view import TableSnapshot
from tests.unit.relation.carriers import (
    KINDS,
    SCHEMA,
    SHARD,
    UNIQUE,
    WIDER,
    Carrier,
    Cut,
    Heard,
    over_all,
    rows,
    updates_in,
)
from tests.worlds import World, functions_of

SURFACE = Path(__file__).parents[2] / "golden" / "surface.txt"
PLAIN = persist.Schema({"id": "int64 not null"}, {"word": "string"})


def table_on(world: World, carrier: Carrier, schema: persist.Schema = SCHEMA) -> persist.Table:
    carrier.make(world.client(), schema)
    return world.client().table("c")


def when(done: Any) -> int:
    """The time of what was written."""
    assert done.time is not None
    return int(done.time)


def written(table: persist.Table, world: World) -> list[int]:
    """The times of five appends, ten seconds apart."""
    times = []
    for number in range(5):
        times.append(when(table.append(rows(number))))
        world.clock.advance(10)
    return times


def time_of(frontier: persist.Antichain) -> int:
    assert frontier.time is not None
    return frontier.time


def contents(table: persist.Table, as_of: Any = None) -> list[tuple[int, str]]:
    with table.read(as_of) as found:
        return sorted((row["id"], row["word"]) for row in found.to_pylist())


@over_all
def test_one_program_has_the_same_answers_on_each_carrier(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    assert table.schema == SCHEMA
    assert table.read().as_of < 1
    assert table.read().to_pylist() == []
    assert table.count() == 0

    first = table.append(rows(1, 2))
    assert (first.count, first.inserted) == (2, 0)
    assert first.time is not None
    assert table.append([]).time is None, "nothing to write"
    world.clock.advance(1)
    second = table.upsert(rows(2, 3, word="v"))
    assert (second.count, second.inserted, second.updated, second.unchanged) == (3, 1, 1, 0)
    again = table.upsert(rows(2, 3, word="v"))
    assert (again.time, again.count, again.unchanged, again.token) == (None, 0, 2, b"")
    dry = table.upsert(rows(9), dry_run=True)
    assert (dry.time, dry.inserted) == (None, 1)
    assert contents(table) == [(1, "w"), (2, "v"), (3, "v")]
    assert table.update({"word": "u"}, [2, 44], dry_run=True).updated == 1
    assert table.delete(filter=pc.field("id") > 1, dry_run=True).deleted == 2
    world.clock.advance(1)
    third = table.delete([1, 77])
    assert third.time is not None
    assert (third.count, third.deleted) == (1, 1)
    assert table.delete([{"id": 1}]).time is None
    assert table.delete([2], dry_run=True).deleted == 1

    assert contents(table) == [(2, "v"), (3, "v")]
    assert contents(table, first.time) == [(1, "w"), (2, "w")]
    assert contents(table, second.time) == [(1, "w"), (2, "v"), (3, "v")]
    assert table.count(first.time) == table.count() == 2
    assert table.read(columns=["word"], diff=True).to_pylist() == [{"word": "v", "_diff": 2}]
    assert table.read(keys=[3, 4]).to_pylist() == rows(3, word="v")
    assert table.read(key=(2,)).to_pylist() == rows(2, word="v")
    assert table.read(filter=pc.field("id") > 2, columns=["id"]).to_pylist() == [{"id": 3}]
    assert table.read("1 s ago").as_of == table.read(world.clock() // 1_000_000 - 1_000).as_of

    whole = Counter(updates_in(table.changes(None).to_arrow()))
    assert whole.total() == 6
    assert set(whole.values()) == {1}
    assert updates_in(table.changes(second.time).to_arrow()) == [((1, "w"), third.time, -1)]
    assert table.changes(second.time, second.time).to_pylist() == []
    heard = Heard(table.listen(first.time, until=third.time + 1), first.time)
    heard.take(heard.listener)
    assert {time for _, time in heard.updates} == {second.time, third.time}


@over_all
@pytest.mark.parametrize("start", ["the time of nothing", "none"])
def test_a_table_is_followed_from_before_anything_was_written(world: World, carrier: Carrier, start: str) -> None:
    """What an empty table says of its time is where to follow it from: nothing is missed, not at time 0 either."""
    table = table_on(world, carrier)
    as_of = table.read().as_of if start == "the time of nothing" else None
    other = world.client().table("c")
    with table.listen(as_of) as early, other.listen(as_of, timeout=0.5) as later:
        early.poll()
        times = [when(table.append(rows(1))), when(table.append(rows(2)))]
        for listener in (early, later):
            found = [updates for updates in listener.poll() if isinstance(updates, Updates)]
            assert sorted(row["id"] for updates in found for row in updates.table.to_pylist()) == [1, 2]
        assert early.poll() == []
    assert sorted(row["id"] for row in table.changes(as_of).to_pylist()) == [1, 2]
    assert len(table.changes(as_of, times[0]).to_pylist()) == 1
    assert table.history(as_of).num_rows == 2


@pytest.mark.parametrize("of", ["shard", "collection", "pending area", "stream"])
def test_what_is_at_the_first_time_is_not_missed(world: World, of: str) -> None:
    """Of integers, 0 is a time as any."""
    client, row = world.client(), {"id": 1, "word": "w"}
    if of == "shard":
        with client.open_writer("c", PLAIN) as write:
            write.compare_and_append([row], 0, 1)
            write.compare_and_append([{**row, "id": 2}], 1, 2)
    elif of == "collection":
        client.controller().create("c", PLAIN, shards=2, mode="compare_and_append")
        with client.controller().open_writer("c") as writer:
            writer.compare_and_append([row], 0, 1)
            writer.compare_and_append([{**row, "id": 2}], 1, 2)
    elif of == "pending area":
        pending_area.create(client, "c", PLAIN).close()
        with pending_area.Writer(client.url, "c", "edge", PLAIN, runtime=world.clock.runtime(9)) as put:
            put.put([{**row, "_time": 0}], 0, 1)
            put.put([{**row, "id": 2, "_time": 1}], 1, 2)
        pending_area.absorb(client, "c")
    else:
        written, _ = client.stream("c", PLAIN)
        written.write([{**row, "_time": 0}, {**row, "id": 2, "_time": 1}])
        written.seal(2).result()
    table = client.table("c")
    for start in (-1, None):
        assert [row["id"] for row in table.changes(start).to_pylist()] == [1, 2]
        with table.listen(start) as listener:
            found = [updates for updates in listener.poll() if isinstance(updates, Updates)]
        assert [row["id"] for updates in found for row in updates.table.to_pylist()] == [1, 2]
    if of == "pending area":
        with pending_area.acquire_read_handle(client, "c") as read, read.listen(None) as area:
            assert sum(one.table.num_rows for one in area.poll() if isinstance(one, Updates)) == 2
    if of == "stream":
        with client.stream("c").listen(-1, ahead="durable") as durable:
            assert sum(one.table.num_rows for one in durable.poll() if isinstance(one, Updates)) == 2


@over_all
def test_misuse_is_refused_with_the_same_error_and_nothing_is_changed(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    time = table.append(rows(1)).time or 0
    for wrong, error in [
        (lambda: table.append([{"id": "x", "word": "w"}]), persist.SchemaMismatch),
        (lambda: table.append([{"nothing": 1}]), persist.SchemaMismatch),
        (lambda: table.append(5), persist.InvalidUsage),
        (lambda: table.upsert([{"id": None, "word": "w"}]), persist.InvalidUsage),
        (lambda: table.upsert([*rows(1), *rows(1, word="v")]), persist.InvalidUsage),
        (lambda: table.upsert(rows(1, word="v"), dry_run=1), persist.InvalidUsage),  # type: ignore[arg-type]
        (lambda: table.append(rows(1), timeout=-1), persist.InvalidUsage),
        (lambda: table.append(rows(1), token="x"), persist.InvalidUsage),  # type: ignore[arg-type]
        (lambda: table.delete("x"), persist.InvalidUsage),
        (table.delete, persist.InvalidUsage),
        (lambda: table.delete([1], filter=pc.field("id") > 0), persist.InvalidUsage),
        (lambda: table.delete(filter="id > 0"), persist.InvalidUsage),
        (lambda: table.update({"id": 2}, [1]), persist.InvalidUsage),
        (lambda: table.update({"none": 2}), persist.InvalidUsage),
        (lambda: table.update({}), persist.InvalidUsage),
        (lambda: table.update(5), persist.InvalidUsage),  # type: ignore[arg-type]
        (lambda: table.update({"word": 5}), persist.InvalidUsage),
        (lambda: table.update({"word": pc.field("none")}), persist.InvalidUsage),
        (lambda: table.update(lambda old: old.slice(1)), persist.InvalidUsage),
        (lambda: table.read("yesterdayish"), persist.InvalidUsage),
        (lambda: table.read(columns=["none"]), persist.InvalidUsage),
        (lambda: table.read(newest=1), persist.InvalidUsage),  # type: ignore[arg-type]
        (lambda: table.changes(time, time - 1), persist.InvalidUsage),
        (lambda: table.listen("never"), persist.InvalidUsage),
    ]:
        with pytest.raises(error):
            wrong()
    assert contents(table) == [(1, "w")]
    assert table.changes(time).to_pylist() == []


COUNTER = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms")


@over_all
def test_rows_are_changed_and_taken_away_by_keys_by_a_filter_or_all_of_them(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, COUNTER)
    before = table.append([{"id": number % 5, "n": number} for number in range(10)])
    done = table.update({"n": pc.field("n") + 100}, [0, 3, 9])
    assert (done.count, done.updated, done.inserted) == (8, 2, 0)
    assert sorted(row["n"] for row in table.read(keys=[0, 3]).to_pylist()) == [100, 103, 105, 108]
    done = table.update({"n": lambda old: pc.negate(old["n"])}, filter=pc.field("n") >= 105)
    assert done.updated == 2
    assert done.time is not None
    assert sorted(row["n"] for row in table.read(done.time, filter=pc.field("n") < 0).to_pylist()) == [-108, -105]
    assert table.update({"n": 7}, filter=pc.field("n") > 1000).time is None
    gone = table.delete(filter=pc.field("n") < 5)
    assert (gone.deleted, table.count()) == (5, 5)
    assert table.update({"n": 1}).count == 10
    assert {row["n"] for row in table.read().to_pylist()} == {1}
    assert table.count(before.time) == 10
    assert table.delete(filter=pc.scalar(True)).count == 5
    assert table.count() == 0


@over_all
def test_an_update_is_of_the_rows_just_before_it_whoever_was_first(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), COUNTER)
    theirs, ours = world.client().table("c"), world.client(rival=world.rival).table("c")
    theirs.upsert([{"id": 1, "n": 0}, {"id": 2, "n": 0}])
    ours.update({"n": pc.field("n") + 1}, [1])
    for act in (
        lambda: theirs.update({"n": pc.field("n") + 10}, [1]),
        lambda: theirs.upsert([{"id": 1, "n": 50}]),
        lambda: theirs.append([{"id": 9, "n": 3}]),
        lambda: theirs.delete([1]),
    ):
        world.rival.before_next(act)
        ours.update({"n": pc.field("n") + 1}, filter=pc.field("id") != 2)
        assert not world.rival.waiting
    assert sorted((row["id"], row["n"]) for row in theirs.read().to_pylist()) == [(2, 0), (9, 5)]


SEQ = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "word": "string"}, times="ms")
NEWER = pc.field("seq") > persist.old("seq")


def seqs(*rows: tuple[int, int | None] | tuple[int, int | None, str]) -> list[dict[str, Any]]:
    return [{"id": row[0], "seq": row[1], "word": row[2] if len(row) > 2 else "w"} for row in rows]


def seen(table: persist.Table) -> list[tuple[int, int | None, str]]:
    return sorted((row["id"], row["seq"], row["word"]) for row in table.read().to_pylist())


@over_all
def test_changes_are_applied_as_one_commit_and_late_ones_do_not_overwrite(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, SEQ)
    done = table.apply(seqs((1, 5), (2, 5), (3, None)), [7])
    assert (done.inserted, done.unchanged, done.count) == (3, 1, 3)
    done = table.apply(seqs((1, 4, "late"), (2, 6, "new"), (4, 1, "first"), (3, 9, "null")), only_if=NEWER)
    assert (done.inserted, done.updated, done.unchanged, done.count) == (1, 1, 2, 3)
    assert seen(table) == [(1, 5, "w"), (2, 6, "new"), (3, None, "w"), (4, 1, "first")]
    assert table.apply(seqs((1, 1), (2, 2)), only_if=NEWER).time is None, "all are late"
    done = table.apply(seqs((1, 8), (1, 9, "last"), (1, 7), (5, None), (5, 0, "zero")), [2, 3], order_by="seq")
    assert (done.inserted, done.updated, done.deleted) == (1, 1, 2)
    assert seen(table) == [(1, 9, "last"), (4, 1, "first"), (5, 0, "zero")]
    assert len(table.changes((done.time or 0) - 1).to_pylist()) == done.count == 5
    assert table.apply(seqs((1, 99)), [4], dry_run=True).deleted == 1
    assert table.apply().time is None
    assert table.apply([], []).count == 0
    done = table.apply(seqs((1, 10)), [4], appends=[*seqs((6, 1)), *seqs((6, 1)), *seqs((7, 2))])
    assert (done.updated, done.deleted, done.count) == (1, 1, 5)
    assert seen(table) == [(1, 10, "w"), (5, 0, "zero"), (6, 1, "w"), (6, 1, "w"), (7, 2, "w")]
    assert table.apply(seqs((1, 9, "last"), (4, 1, "first")), [6, 7]).deleted == 2
    either = (pc.field("seq") > persist.old("seq")) | (pc.field("word") == "forced")
    assert table.apply(seqs((1, 0, "forced"), (4, 0)), only_if=either).updated == 1
    assert seen(table) == [(1, 0, "forced"), (4, 1, "first"), (5, 0, "zero")]


@over_all
def test_what_cannot_be_applied_for_certain_is_refused_whole(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, SEQ)
    table.append(seqs((1, 5), (2, 5), (2, 6)))
    before = seen(table)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((seqs((1, 6), (3, 1)), [1]), {}, "both among the rows"),
        ((seqs((1, 6)),), {"appends": seqs((1, 7))}, "both among the rows to upsert and the rows to append"),
        ((None, [2]), {"appends": seqs((2, 7))}, "both among the keys to delete and the rows to append"),
        ((None,), {"appends": [{"id": 1, "seq": "x", "word": "w"}]}, "seq"),
        ((seqs((1, 6, "a"), (1, 7, "b")),), {}, "different rows for"),
        ((seqs((3, 1), (1, 7, "a"), (1, 7, "b")),), {"order_by": "seq"}, "with the same 'seq'"),
        ((seqs((1, None, "a"), (1, None, "b")),), {"order_by": "seq"}, "with the same 'seq'"),
        ((seqs((1, 6)),), {"order_by": "id"}, "order_by is one of the value columns"),
        ((seqs((1, 6)),), {"order_by": 5}, "order_by is one of the value columns"),
        ((seqs((1, 6)), [2]), {"only_if": NEWER}, "keeps no row to compare with"),
        ((seqs((1, 6), (2, 9)),), {"only_if": NEWER}, "a key has several"),
        ((seqs((1, 6)),), {"only_if": "seq > 1"}, "Arrow expression"),
        ((seqs((1, 6)),), {"only_if": pc.field("seq")}, "not true or false"),
        ((seqs((1, 6)),), {"only_if": pc.field("none") > 1}, "only_if cannot be used"),
        ((seqs((1, 6)),), {"only_if": persist.old("none") > 1}, "only_if cannot be used"),
        (([{"id": 1, "seq": "x", "word": "w"}],), {}, "seq"),
        ((None, "x"), {}, "keys are"),
    ]
    for arguments, options, why in cases:
        with pytest.raises(persist.InvalidUsage, match=why):
            table.apply(*arguments, **options)
        assert seen(table) == before, why


def test_nan_is_no_place_in_an_order(world: World) -> None:
    table = world.client().table("t", persist.Schema({"id": "int64 not null"}, {"at": "float64"}))
    with pytest.raises(persist.InvalidUsage, match="neither before nor after"):
        table.apply([{"id": 1, "at": float("nan")}, {"id": 1, "at": 1.0}], order_by="at")
    assert table.count() == 0
    assert table.apply([{"id": 1, "at": None}, {"id": 1, "at": 1.0}], order_by="at").inserted == 1


@over_all
def test_the_condition_is_asked_again_after_a_lost_race(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), SEQ)
    theirs, ours = world.client().table("c"), world.client(rival=world.rival).table("c")
    theirs.append(seqs((1, 5), (2, 5)))
    ours.apply(seqs((2, 6)), only_if=NEWER)
    world.rival.before_next(lambda: theirs.apply(seqs((1, 9, "theirs")), only_if=NEWER))
    done = ours.apply(seqs((1, 7, "ours"), (2, 7, "ours")), only_if=NEWER)
    assert not world.rival.waiting
    assert (done.updated, done.unchanged) == (1, 1)
    assert seen(theirs) == [(1, 9, "theirs"), (2, 7, "ours")]


CHANGES = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 6), st.sampled_from("ab")), max_size=5)


@settings(max_examples=30)
@given(st.lists(st.tuples(CHANGES, st.lists(st.integers(0, 4), max_size=2), st.booleans()), max_size=5))
def test_any_changes_applied_are_those_of_a_dict(calls: list[tuple[list[Any], list[int], bool]]) -> None:
    """A dict by key: the last by seq of each call, null least; with a condition only what is newer."""
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        client.controller().create("c", SEQ, shards=2, mode="compare_and_append")
        for table in (client.table("s", SEQ), client.table("c")):
            model: dict[int, Any] = {}
            for rows, keys, is_newer in calls:
                expected = dict(model)
                latest: dict[int, Any] = {}
                for row in sorted(set(rows), key=lambda row: -1 if row[1] is None else row[1]):
                    latest[row[0]] = row
                is_tied = any(row[1] == latest[row[0]][1] and row != latest[row[0]] for row in rows)
                for key, row in latest.items():
                    old = expected.get(key)
                    if not is_newer or old is None or (None not in (row[1], old[1]) and row[1] > old[1]):
                        expected[key] = row
                for key in keys:
                    expected.pop(key, None)
                is_refused = is_tied or (is_newer and keys) or set(keys) & latest.keys()
                try:
                    table.apply(seqs(*rows), keys, only_if=NEWER if is_newer else None, order_by="seq")
                except persist.InvalidUsage:
                    assert is_refused
                else:
                    assert not is_refused
                    model = expected
                assert seen(table) == sorted(model.values(), key=lambda row: row[0])


@over_all
def test_a_time_that_may_still_change_is_refused_at_once_and_the_newest_is_read_if_asked(
    world: World, carrier: Carrier
) -> None:
    table = table_on(world, carrier)
    done = table.append(rows(1))
    assert done.time is not None
    world.clock.advance(5)
    now = world.clock() // 1_000_000
    asked = world.clock()
    with pytest.raises(persist.NotComplete):
        table.read(now + 60_000)
    assert world.clock() - asked < 1_000_000_000, "it does not wait"
    with table.read(now + 60_000, newest=True) as found:
        assert done.time <= found.as_of <= now + 60_000
        assert found.to_pylist() == rows(1)
    with table.read(now - 1_000) as found:
        assert found.to_pylist() == rows(1), "completed by an empty commit"
    looking = world.client(read_only=True).table("c")
    with pytest.raises(persist.NotComplete):
        looking.read(now + 60_000)
    assert contents(looking) == [(1, "w")]


@over_all
def test_a_constraint_holds(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, UNIQUE)
    table.append(rows(1))
    with pytest.raises(persist.ConstraintViolated):
        table.append(rows(1, word="v"))
    with pytest.raises(persist.ConstraintViolated):
        table.apply(rows(2), appends=rows(1, word="v"))
    with pytest.raises(persist.ConstraintViolated):
        table.apply(rows(2), appends=rows(3, 3))
    assert contents(table) == [(1, "w")]
    table.apply(rows(1, word="v"), appends=rows(3))
    assert contents(table) == [(1, "v"), (3, "w")]


@over_all
@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("verb", ["append", "upsert", "apply", "update", "delete"])
def test_a_change_in_doubt_is_done_once_by_its_token(world: World, carrier: Carrier, happens: bool, verb: str) -> None:
    def change(table: persist.Table, **token: Any) -> Any:
        if verb == "update":
            return table.update({"word": pc.binary_join_element_wise(pc.field("word"), "!", "")}, [0], **token)
        if verb == "delete":
            return table.delete([0], **token)
        return getattr(table, verb)(rows(1), **token)

    cut = Cut(Outcome.HAPPENED_UNKNOWN if happens else Outcome.LOST_UNKNOWN, *KINDS)
    others = table_on(world, carrier)
    ours = world.client(persist.Config(timeout_s=1), plan=cut).table("c")
    ours.append(rows(0))
    cut.is_armed = True
    with pytest.raises(persist.Indeterminate) as told:
        change(ours)
    cut.is_armed = False
    others.append(rows(2))
    done = change(ours if happens else world.client().table("c"), token=told.value.token)
    expected = {"update": [(0, "w!"), (2, "w")], "delete": [(2, "w")]}
    assert contents(others) == expected.get(verb, [(0, "w"), (1, "w"), (2, "w")])
    assert contents(others, done.time) != contents(others, done.time - 1)


@over_all
def test_a_reader_whose_lease_ended_is_opened_again(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.append(rows(1))
    assert contents(table) == [(1, "w")]
    world.clock.advance(3600)
    for shard in world.client().shards():
        world.client().expire(shard)
    assert contents(table) == [(1, "w")]
    table.append(rows(2))
    assert table.count() == 2
    table.close()
    table.close()
    assert table.count() == 2, "it is opened again"


@over_all
def test_a_table_is_written_and_read_by_several_threads(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda number: table.append(rows(number)), range(12)))
    assert len({one.time for one in done}) == 12
    assert [id_ for id_, _ in contents(table)] == [*range(12)]


# --- the terms -------------------------------------------------------------------------------------------------------


@over_all
def test_contents_are_made_what_they_were_and_history_stays(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    first = table.append([*rows(1, 2), *rows(2)]).time
    world.clock.advance(1)
    second = table.upsert([*rows(1, word="v"), *rows(3)]).time
    world.clock.advance(1)
    dry = table.restore(first, dry_run=True)
    assert (dry.time, dry.count) == (None, 3)
    assert contents(table) == [(1, "v"), (2, "w"), (2, "w"), (3, "w")]
    done = table.restore(first)
    assert done.time is not None
    assert done.count == 3
    assert contents(table) == contents(table, first) == [(1, "w"), (2, "w"), (2, "w")]
    assert contents(table, second) == [(1, "v"), (2, "w"), (2, "w"), (3, "w")]
    assert table.restore(first).time is None, "it is what it was"
    assert table.restore(second).count == 3
    assert contents(table) == [(1, "v"), (2, "w"), (2, "w"), (3, "w")]
    with pytest.raises(persist.NotComplete):
        table.restore(world.clock() // 1_000_000 + 60_000)
    with pytest.raises(persist.InvalidUsage):
        table.restore("yesterdayish")
    with pytest.raises(persist.InvalidUsage):
        table.restore(first, dry_run=1)  # type: ignore[arg-type]


@over_all
def test_what_others_write_while_it_is_restored_is_taken_back_too(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), SCHEMA)
    theirs, ours = world.client().table("c"), world.client(rival=world.rival).table("c")
    first = theirs.append(rows(1)).time
    ours.append(rows(2))
    world.rival.before_next(lambda: theirs.append(rows(3)))
    ours.restore(first)
    assert not world.rival.waiting
    seen = contents(theirs)
    assert seen in ([(1, "w")], [(1, "w"), (3, "w")]), "it was before, or after"
    rows_now = {row for row in seen if row[0] == 3}
    order = theirs.changes(first).to_pylist()
    taken = [row["_diff"] for row in order if row["id"] == 3]
    assert taken == ([1] if rows_now else [1, -1])


@over_all
def test_a_table_tells_what_it_is_and_when_it_was_written(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    assert table.history().num_rows == 0
    times = []
    for number in range(4):
        times.append(when(table.append([*rows(number), *rows(number, word="v")])))
        world.clock.advance(1)
    times.append(when(table.delete([0])))
    found = table.history()
    assert found.column("_time").cast(pa.int64()).to_pylist() == times[::-1]
    assert found.column("added").to_pylist() == [0, 2, 2, 2, 2]
    assert found.column("retracted").to_pylist() == [2, 0, 0, 0, 0]
    assert table.history(times[1], times[3], limit=1).column("_time").cast(pa.int64()).to_pylist() == [times[3]]
    for wrong in (0, -1, "x", 1.5):
        with pytest.raises(persist.InvalidUsage):
            table.history(limit=wrong)  # type: ignore[arg-type]
    said = table.describe()
    assert (said.name, said.carrier, said.schema) == ("c", table.carrier, SCHEMA)
    assert said.since.time == 0
    assert time_of(said.upper) > times[-1]
    assert (said.retention, said.holds) == (None, {})
    assert len(said.shards) == max(1, carrier.shards)


@over_all
def test_how_much_history_is_kept_counts_at_once(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    times = written(table, world)
    if carrier.mode == "wal":
        table.maintain()
    dry = table.set_retention("15 s", dry_run=True)
    assert table.describe().since.time == 0
    assert dry.before.time == 0
    moved = table.set_retention("15 s")
    assert times[2] < time_of(moved.after) <= times[4]
    assert dry.after == moved.after
    said = table.describe()
    assert (said.retention, said.since) == (15_000, moved.after)
    with pytest.raises(persist.SinceViolation):
        table.read(times[2])
    assert contents(table, times[4])[-1] == (4, "w")
    assert table.history().column("_time").cast(pa.int64()).to_pylist()[-1] > times[2]
    with pytest.raises(persist.InvalidUsage):
        table.set_retention("soon")
    with pytest.raises(persist.InvalidUsage):
        table.set_retention(-1)
    table.set_retention(None)
    assert table.describe().retention is None


@over_all
def test_a_hold_keeps_history_whatever_the_retention(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    times = written(table, world)
    table.set_hold("audit", times[1], opaque=b"x")
    assert contents(table, times[0]), "without a policy all is kept, also beside a hold"
    assert table.describe().holds == {"audit": persist.at(times[1])}
    moved = table.set_retention(0)
    assert time_of(moved.after) <= times[1]
    assert moved.kept_by
    assert contents(table, times[1]) == [(0, "w"), (1, "w")]
    with pytest.raises(persist.SinceViolation):
        table.set_hold("audit", times[0])
    dry = table.downgrade_hold("audit", times[2], dry_run=True)
    assert table.describe().holds == {"audit": persist.at(times[1])}
    assert table.downgrade_hold("audit", times[2]).before == dry.before
    assert table.describe().holds == {"audit": persist.at(times[2])}
    table.release_hold("audit")
    assert table.describe().holds == {}
    with pytest.raises(persist.HoldConflict):
        table.release_hold("audit")
    with pytest.raises(persist.InvalidUsage):
        table.set_hold("", times[4])


@over_all
def test_a_table_that_is_open_keeps_no_history_but_for_what_is_being_read(world: World, carrier: Carrier) -> None:
    table, client = table_on(world, carrier), world.clients[-1]
    other = world.client()
    other.table("c").set_retention("15 s")
    first = when(table.append(rows(0)))
    kept = table.read(first)
    for number in range(1, 5):
        world.clock.advance(10)
        newest = when(table.append(rows(number)))
        assert table.count() == number + 1
    for _ in range(2):  # what is to be let go of is let go of with the next renewal
        client.heartbeat()
        other.maintain()
    if carrier.mode is None or carrier.mode == "":
        assert contents(table, first) == [(0, "w")], "an answer that is being read keeps it"
    assert kept.to_pylist() == rows(0)
    kept.release()
    del kept
    for _ in range(3):
        for each in (client, other):
            each.table("c").read(keys=[]).release()
            table.read(keys=[]).release()
            each.heartbeat()
        other.maintain()
    assert newest - 15_000 <= time_of(other.table("c").describe().since) <= newest
    assert contents(table, newest - 10_000)[-1] == (3, "w"), "all that is kept can be read"
    with pytest.raises(persist.SinceViolation):
        table.read(first)


@over_all
def test_a_table_without_a_retention_keeps_all_history_whoever_reads_it(world: World, carrier: Carrier) -> None:
    """Reading, listening, pausing and coming back give nothing up: only a retention or the owner of a hold does."""
    table, client = table_on(world, carrier), world.clients[-1]
    other = world.client()
    first = when(table.append(rows(0)))
    clients = [client, other]
    for number in range(1, 4):
        for each in clients:
            each.table("c").read().release()
        with table.listen(first - 1) as events:
            assert events.poll()
            if carrier == SHARD:
                with client.open_reader("c") as reader, reader.listen(first) as alone:
                    alone.poll()
                    other.heartbeat()
            for each in clients:
                world.clock.advance(each.config.lease_ms / 1000 * (number % 2 * 0.6 + 0.3))
                table.read(keys=[]).release()
                each.heartbeat()
        newest = when(table.append(rows(number)))
        client.maintain()
    assert contents(other.table("c"), first) == [(0, "w")]
    other.table("c").set_retention(0)
    for _ in range(3):
        for each in clients:
            each.heartbeat()
        other.maintain()
    assert newest >= time_of(other.table("c").describe().since) > first, "readers let go of what a policy gives up"


def test_a_listener_of_a_table_keeps_no_history_but_its_own(world: World) -> None:
    table, client = table_on(world, SHARD), world.clients[-1]
    table.append(rows(0))
    events = table.listen(0)
    for number in range(1, 5):
        world.clock.advance(10)
        table.append(rows(number))
        table.read(keys=[]).release()
    assert len([event for event in events.poll() if isinstance(event, persist.Updates)]) > 0
    table.set_retention(0)
    for _ in range(2):
        client.heartbeat()
        client.maintain("c")
    assert time_of(client.inspect("c").state.since) > 1_700_000_030_000
    world.clock.advance(client.config.lease_ms / 1000 * 0.9)
    client.heartbeat()
    world.clock.advance(client.config.lease_ms / 1000 * 0.9)
    client.heartbeat()
    table.append(rows(9))
    assert any(isinstance(event, persist.Updates) for event in events.poll()), "it is open as long as its table is"
    events.close()


def test_a_table_that_is_idle_gives_its_lease_back(world: World) -> None:
    table, client = table_on(world, SHARD), world.clients[-1]
    table.append(rows(0))
    with table.read() as kept:
        world.clock.advance(client.config.lease_ms / 1000 * 0.9)
        client.heartbeat()
        world.clock.advance(client.config.lease_ms / 1000 * 0.9)
        client.heartbeat()
        assert client.inspect("c").state.readers, "while it is read"
        assert kept.to_pylist() == rows(0)
    client.heartbeat()
    assert not client.inspect("c").state.readers
    assert table.count() == 1


@over_all
def test_columns_are_added_whatever_the_carrier(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    first = table.append(rows(1)).time
    other = world.client().table("c")
    untimed = persist.Schema(WIDER.key, WIDER.value)
    assert table.evolve(untimed, dry_run=True) == ("more",)
    assert table.schema == other.describe().schema == SCHEMA
    assert table.evolve(untimed) == ("more",)
    assert table.schema == table.describe().schema == WIDER
    assert table.evolve(WIDER) == ()
    table.append([{"id": 2, "word": "w", "more": 5}])
    assert sorted(row["more"] or 0 for row in table.read().to_pylist()) == [0, 5]
    assert table.read(first).to_pylist() == [{"id": 1, "word": "w", "more": None}]
    assert contents(other) == [(1, "w"), (2, "w")]
    with pytest.raises(persist.SchemaMismatch):
        table.evolve(persist.Schema({"id": "int64 not null"}, {"else": "string"}))
    assert table.restore(first).count == 1
    assert table.read().to_pylist() == [{"id": 1, "word": "w", "more": None}]


@over_all
def test_a_program_with_the_older_columns_continues(world: World, carrier: Carrier) -> None:
    """It reads its own, and what it writes is null in the others. What it cannot retract it leaves alone."""
    new = table_on(world, carrier)
    before = new.append(rows(1)).time
    widest = persist.Schema(WIDER.key, [*WIDER.value, *persist.Schema({"x": "bool"}).key], times=WIDER.times)
    new.evolve(WIDER)
    new.upsert([{"id": 2, "word": "w", "more": 5}])
    new.evolve(widest)
    for step in range(2):
        untimed = persist.Schema(SCHEMA.key, SCHEMA.value)
        old, middle = world.client().table("c", SCHEMA), world.client().table("c", WIDER)
        assert old.schema == SCHEMA
        assert world.client().table("c", untimed).schema == SCHEMA
        assert contents(old) == [(1, "w"), (2, "w"), *[(n, "o") for n in (3, 4)][: 2 * step]]
        old.append([{"id": 3, "word": "o"}] if step == 0 else [])
        old.upsert([{"id": 4, "word": "o"}])
        assert old.upsert([{"id": 1, "word": "w"}]).unchanged == 1
        for change in (
            lambda old=old: old.upsert([{"id": 2, "word": "new"}]), lambda old=old: old.delete([2]),
            lambda old=old: old.update({"word": "new"}), lambda old=old: old.apply([{"id": 2, "word": "new"}]),
        ):  # fmt: skip
            with pytest.raises(persist.SchemaMismatch, match="something in"):
                change()
        assert old.append([{"id": 2, "word": "w"}], dry_run=True).count == 1, "what it adds retracts nothing"
        assert middle.update({"more": 6}, keys=[2]).updated == 1 - step
        assert {row["id"]: (row["more"], row["x"]) for row in new.read().to_pylist()} == {
            1: (None, None), 2: (6, None), 3: (None, None), 4: (None, None)
        }  # fmt: skip
        assert set(old.changes(before).to_arrow().column_names) == {"id", "word", "_time", "_diff"}
        with old.listen(before) as listening:
            heard = [event.table for event in listening.poll() if isinstance(event, persist.Updates)]
        assert {tuple(table.column_names) for table in heard} == {("id", "word", "_time", "_diff")}
        other_kind = persist.Schema({"id": "int64 not null"}, {"word": "int64"})
        for other in (other_kind, persist.Schema(SCHEMA.key, [], times=SCHEMA.times)):
            with pytest.raises(persist.SchemaMismatch):
                world.client().table("c", other)
        if carrier.name == "shard":
            break
        copied_and_handed_over(world)


@over_all
def test_rows_to_append_may_lack_columns_that_may_be_null_and_no_others(world: World, carrier: Carrier) -> None:
    """As those of a loader do that does not know a new column. A column that is misspelt is no such thing."""
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string not null", "more": "int64"}, times="ms")
    table = table_on(world, carrier, schema)
    table.append([{"id": 1, "word": "w"}, {"id": 2, "word": "v", "more": 5}])
    table.append(pa.table({"word": ["u"], "id": [3]}))
    table.append(iter([{"id": 4, "word": "t"}]))
    table.apply(appends=[{"id": 5, "word": "s"}])
    assert table.append([{"id": 6, "word": "s"}], dry_run=True).count == 1
    found = {row["id"]: row["more"] for row in table.read().to_pylist()}
    assert found == {1: None, 2: 5, 3: None, 4: None, 5: None}
    for wrong, said in (
        ([{"id": 7, "word": "w", "moer": 5}], "Did you mean more"), ([{"id": 7, "more": 5}], "'word' is missing"),
        ([{"word": "w"}], "'id' is missing"), (pa.table({"id": [7], "more": [5]}), "'word' is missing"),
        (pa.table({"id": [7], "word": ["w"], "moer": [5]}), "Did you mean more"),
    ):  # fmt: skip
        with pytest.raises(persist.SchemaMismatch, match=said):
            table.append(wrong)
    assert table.count() == 5


@over_all
def test_a_program_with_the_older_columns_may_not_append_a_key_twice(world: World, carrier: Carrier) -> None:
    """That is what is wrong with it, and not that the row has something in a column that it does not know."""
    table = table_on(world, carrier, UNIQUE)
    old = world.client().table("c")
    table.evolve(persist.Schema(WIDER.key, WIDER.value, unique=True))
    table.upsert([{"id": 2, "word": "w", "more": 5}])
    for dry_run in (True, False):
        with pytest.raises(persist.ConstraintViolated):
            old.append(rows(2), dry_run=dry_run)
    assert table.read().to_pylist() == [{"id": 2, "word": "w", "more": 5}]


def copied_and_handed_over(world: World) -> None:
    """The table has other shards."""
    controller = world.client().controller()
    made = controller.make_rendition("c", shards=2, copy=True)
    controller.copy_rendition("c", made.number)
    controller.hand_over("c", made.number)
    controller.tables().apply() if controller.describe("c").mode == "append" else None
    controller.copy_rendition("c", made.number, to_end=True)


@over_all
def test_a_dropped_name_is_free_again_also_for_other_columns(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.append(rows(1))
    assert table.count() == 1
    table.drop(dry_run=True)
    assert table.count() == 1
    table.drop()
    client = world.client()
    assert client.tables() == []
    with pytest.raises(persist.NotFound):
        client.table("c")
    other = persist.Schema({"key": "string not null"}, {"n": "int64"})
    again = client.table("c", other)
    assert again.read().to_pylist() == []
    again.upsert([{"key": "a", "n": 1}])
    assert client.tables() == ["c"]
    with world.client().table("c", other) as theirs:
        assert theirs.read().to_pylist() == [{"key": "a", "n": 1}]
    again.drop()
    third = client.table("c", PLAIN)
    third.append(rows(5))
    assert contents(world.client().table("c")) == [(5, "w")]


def test_a_shard_that_others_read_is_not_dropped(world: World) -> None:
    table = table_on(world, SHARD)
    table.append(rows(1))
    with world.client().open_reader("c"):
        for dry_run in (True, False):
            with pytest.raises(persist.StillRead):
                table.drop(dry_run=dry_run)
    assert contents(table) == [(1, "w")]
    table.drop()


@over_all
def test_what_a_hold_keeps_is_not_dropped(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.set_hold("audit", when(table.append(rows(1))))
    for dry_run in (True, False):
        with pytest.raises(persist.StillRead, match="audit") as told:
            table.drop(dry_run=dry_run)
        assert told.value.by == ("hold audit",)
    assert contents(table) == [(1, "w")]
    table.release_hold("audit")
    table.drop()
    assert world.client().tables() == []


@over_all
def test_a_name_changes_where_the_catalog_has_it(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.append(rows(1))
    if carrier == SHARD:
        with pytest.raises(persist.InvalidUsage, match="carried by one shard"):
            table.rename("d")
        assert table.name == "c"
        return
    world.client().table("taken", PLAIN)
    with pytest.raises(persist.NameTaken):
        table.rename("taken")
    with pytest.raises(persist.InvalidName):
        table.rename("")
    table.rename("d")
    assert table.name == "d"
    table.append(rows(2))
    assert contents(table) == contents(world.client().table("d")) == [(1, "w"), (2, "w")]
    assert world.client().tables() == ["d", "taken"]
    for schema in (PLAIN, None):
        with pytest.raises(persist.NotFound, match="'d' now") as told:
            world.client().table("c", schema)
        assert told.value.renamed == "d"
    assert world.client().tables() == ["d", "taken"], "a program with the former name makes no empty table"
    world.client().controller().create("c", PLAIN, mode="compare_and_append")
    assert world.client().table("c", PLAIN).count() == 0, "its former name is free, for who asks for a new table"
    table.rename("e")
    world.client().table("c").drop()
    with pytest.raises(persist.NotFound, match="'e' now"):
        world.client().table("d", PLAIN)
    table.drop()
    assert world.client().table("d", PLAIN).count() == 0


@over_all
def test_a_table_and_a_location_are_maintained(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    for number in range(5):
        table.append(rows(number))
    before = contents(table)
    dry = table.maintain(dry_run=True)
    assert table.maintain().keys() == dry.keys()
    done = world.client().maintain()
    assert set(table.describe().shards) <= done.keys() == set(world.client().shards())
    assert contents(table) == before
    assert not any(each.compacted.plan.requests for each in world.client().maintain(dry_run=True).values())


@over_all
def test_what_a_closed_client_had_open_says_so(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.append(rows(1))
    for client in world.clients:
        client.close()
    for call in (table.count, table.describe, table.history, table.maintain, table.drop, lambda: table.append(rows(2))):
        with pytest.raises(persist.InvalidUsage, match="was closed"):
            call()


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_table_is_made_where_there_is_none_and_opened_where_there_is_one(world: World) -> None:
    client = world.client()
    with pytest.raises(persist.NotFound, match="no table 'orders'"):
        client.table("orders")
    made = client.table("orders", PLAIN)
    assert made.schema.times == "ms"
    made.append(rows(1))
    for again in (client.table("orders"), client.table("orders", PLAIN), world.client().table("orders", SCHEMA)):
        assert contents(again) == [(1, "w")]
    with pytest.raises(persist.SchemaMismatch, match="has the schema"):
        client.table("orders", persist.Schema({"id": "int64 not null"}, {"more": "string"}))
    with pytest.raises(persist.NotFound):
        world.client(read_only=True).table("none")
    with pytest.raises(persist.InvalidUsage):
        world.client(read_only=True).table("none", PLAIN)
    assert repr(made).startswith("Table('orders', 2 columns, on a shard of ")


@over_all
def test_a_name_stands_for_one_table_whatever_carries_it(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier)
    table.append(rows(1))
    for again in (world.client().table("c", SCHEMA), world.client().table("c")):
        assert contents(again) == [(1, "w")]
    for other in (persist.Schema({"key": "string"}), persist.Schema({"id": "int64 not null"}, {"more": "string"})):
        with pytest.raises(persist.SchemaMismatch, match="has the schema"):
            world.client().table("c", other)
    assert world.client().tables() == ["c"]


def test_tables_are_listed_whatever_carries_them_and_nothing_else_is(world: World) -> None:
    client = world.client()
    controller = client.controller()
    client.table("lone", PLAIN)
    client.table("gone", PLAIN)
    client.finish("gone")
    controller.create("deep/collection", SCHEMA)
    controller.tables().create("bank", SCHEMA, mode="wal")
    assert client.tables() == ["bank", "deep/collection", "lone"]
    for name in client.tables():
        assert client.table(name).schema == SCHEMA
    with pytest.raises(persist.NotFound):
        client.table("gone")
    for kept in ("_catalog", "streams.list", "c0123456789abcdef.renditions"):
        with pytest.raises(persist.InvalidName):
            client.table(kept, PLAIN)
    for wrong in ("", " ", ".", "a//b", "x" * 300, "ä", None, 7):
        with pytest.raises(persist.InvalidName):
            client.table(wrong, PLAIN)  # type: ignore[arg-type]


def test_a_table_is_opened_in_a_fork_also_while_another_thread_opens_it(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}") as client:
        client.table("c", PLAIN).append(rows(1))
        table, opens, goes_on = client.table("c"), threading.Event(), threading.Event()

        def slow(purpose: str) -> persist.ReadHandle:
            assert purpose == "read"
            if threading.current_thread() is not threading.main_thread():
                opens.set()
                assert goes_on.wait(30)
            return client.open_reader("c")

        table._carrier._open = slow  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as pool:
            counted = pool.submit(table.count)
            assert opens.wait(30)
            if (child := os.fork()) == 0:
                signal.alarm(20)
                try:
                    os._exit(0 if table.count() == 1 else 1)
                finally:
                    os._exit(2)
            goes_on.set()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert counted.result() == 1


@over_all
def test_what_is_open_of_a_table_is_open_once(world: World, carrier: Carrier) -> None:
    """However often it is opened for a transaction or by its name, as long as it is."""
    table_on(world, carrier).append(rows(0))
    client = world.clients[-1]
    kept = []
    for number in range(1, 6):
        if carrier.mode == "wal":
            with client.transaction() as both:
                both.insert("c", rows(number))
        if carrier.mode:
            kept.append(client.table("c"))
            kept[-1].append(rows(-number))
    states = [client.inspect(name).state for name in client.shards()]
    live = [len(state.readers) + len(state.writers) for state in states]
    assert max(live) <= 3, live


@pytest.mark.parametrize("by", ["stream", "pending area"])
def test_what_a_stream_or_a_pending_area_feeds_is_read_as_any_table(tmp_path: Path, by: str) -> None:
    client = persist.open(f"file:{tmp_path}/data")
    if by == "stream":
        runtime = streams.open(client)
        write, _ = runtime.create_or_load("mine", PLAIN)
        write.write([{**row, "_time": 3} for row in rows(1)])
        write.seal(5).result()
        with pytest.raises(persist.OfLayer):
            client.table("mine.unsealed")
    else:
        pending_area.create(client, "mine", PLAIN)
        with pending_area.Writer(client.url, "mine", "edge", PLAIN) as put:
            put.put([{**row, "_time": 3} for row in rows(1)], 0, 5)
        pending_area.absorb(client, "mine")
    assert client.tables() == ["mine"]
    table = client.table("mine", PLAIN)
    assert contents(table) == contents(table, 3) == [(1, "w")]
    assert table.changes(None).to_arrow().num_rows == 1
    assert len(table.listen(2).poll()) == 2
    changes = [
        lambda: table.append(rows(2)), lambda: table.upsert(rows(2)), lambda: table.delete([1]),
        lambda: table.restore(1), lambda: table.apply(rows(2)),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(persist.OfLayer, match=by):
            change()
    assert contents(table) == [(1, "w")]
    with table.listen(2) as events:
        assert events.poll()
        client.heartbeat()
    assert client.inspect("mine").state.since == persist.at(0)
    if by == "stream":
        runtime.stop()
    client.close()


def test_an_event_log_is_read_as_any_table_and_its_notes_are_none(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    account = events.Program(lambda state, event: (state + len(event.payload), ()), int, lambda _: None)
    with events.Loop(f"persist:{url.replace(':', chr(92) + ':')}:log", account) as loop, persist.open(url) as client:
        for payload in (b"a", b"bc"):
            loop.submit(payload).result()
        table = client.table("log")
        assert client.tables() == ["log"]
        assert [row["payload"] for row in table.read(as_of=1).to_pylist()] == [b"a"]
        assert len(table.listen(1).poll()) == 2
        changes = [
            lambda: table.append(table.read()), lambda: table.delete([(1, 0)]), lambda: table.restore(1),
            lambda: client.table("log.notes"),
        ]  # fmt: skip
        for change in changes:
            with pytest.raises(persist.OfLayer, match="event log"):
                change()
        with pytest.raises(persist.StillRead):
            table.drop()
        assert loop.submit(b"d").result().event_id == 3


def test_transactions_change_the_tables_of_a_timeline(world: World) -> None:
    client = world.client()
    for name in ("a", "b"):
        client.controller().tables().create(name, SCHEMA, mode="wal")
    with client.transaction() as both:
        both.insert("a", rows(1))
        both.insert("b", rows(2))
    assert contents(client.table("a")) == [(1, "w")]
    with client.transaction() as more:
        more.insert("b", rows(3))
        assert more.apply("b", rows(3, word="v"), [2], appends=rows(4)).updated == 1
        more.rollback()
    assert contents(client.table("b")) == [(2, "w")]
    assert client.table("b").changes(None).to_arrow().column("_time").to_pylist() == [
        pa.scalar(both.time, pa.timestamp("ms", "UTC")).as_py()
    ]
    with pytest.raises(persist.InvalidUsage):
        client.transaction("none")


# --- the surface -----------------------------------------------------------------------------------------------------


ANSWERS = (
    Controller, CollectionReader, CollectionWriter, CollectionSnapshot, CollectionListen, Tables, TableSnapshot,
    TableListen, Transaction, Worker,
)  # fmt: skip
"""Classes that public calls answer, beside those that have a public name."""


def members() -> Iterator[tuple[type, str]]:
    """What can be asked of every class that is public, or that a public call answers."""
    for of in (*(getattr(persist, name) for name in sorted(persist.__all__)), *ANSWERS):
        if isinstance(of, type) and not issubclass(of, (BaseException, pydantic.BaseModel)):
            for name in sorted(name for name in dir(of) if not name.startswith("_")):
                owner = next(base for base in of.__mro__ if name in vars(base))
                if owner.__module__.startswith("persist_lib"):
                    yield of, name


def surface() -> str:
    """The public names, and what can be asked of each class, with signatures."""
    lines = [f"persist.{name}" for name in sorted(persist.__all__)]
    for of, name in members():
        is_called = callable(getattr(of, name))
        lines.append(f"{of.__name__}.{name}{inspect.signature(getattr(of, name)) if is_called else ''}")
    return "".join(line + "\n" for line in lines)


def test_the_surface_changes_only_on_purpose() -> None:
    """After a change that is meant: `python -m tests.unit.client.test_table`."""
    assert surface() == SURFACE.read_text()


def test_all_that_can_be_called_is_documented() -> None:
    called = [(of, name) for of, name in members() if not inspect.ismemberdescriptor(inspect.getattr_static(of, name))]
    assert [f"{of.__name__}.{name}" for of, name in called if not inspect.getdoc(getattr(of, name))] == []


def test_a_small_append_asks_what_a_shards_does_and_a_read_too(world: World) -> None:
    """The requests of a small append, and of a read, through a table and through a shard's handles."""
    client = world.client()
    table, write = client.table("c", PLAIN), client.open_writer("d", SCHEMA)
    read = client.open_reader("d")
    asked = []
    for append, look in ((write.append_now, read.snapshot), (table.append, table.read)):
        append(rows(1))
        look().release()
        before = client.metrics().operations
        for number in range(5):
            append(rows(number))
            look().release()
        after = client.metrics().operations
        asked.append({kind: after[kind].calls - before[kind].calls for kind in after if kind in before})
    assert asked[0] == asked[1]
    assert sum(asked[0].values()) >= 10


def test_a_small_append_costs_what_a_shards_does(world: World) -> None:
    client = world.client()
    table, write = client.table("c", PLAIN), client.open_writer("d", SCHEMA)
    for one in (table.append, write.append_now):
        one(rows(1))
    own, through = (
        min(functions_of(partial(one, rows(2))).total() for _ in range(5)) for one in (write.append_now, table.append)
    )
    assert through <= 1.05 * own, (through, own)


if __name__ == "__main__":
    SURFACE.write_text(surface())
