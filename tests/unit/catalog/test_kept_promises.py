"""A promise that was read once is a fact for ever: writers of a collection keep it, and pay what a shard's pay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter, Controller, committing
from persist_lib.catalog.records import Mode
from persist_lib.frontier import Antichain
from persist_lib.testing import contents_of
from persist_lib.timeline import Tables
from tests.worlds import SCHEMA, World, functions_of

CLOCK = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")
KINDS = ("scan", "compare_and_set", "compare_and_set_many")
A, B, C = ([{"id": 1, "word": word}] for word in "abc")


def made(
    world: World, schema: persist.Schema = SCHEMA, shards: int = 1, mode: Mode = "compare_and_append"
) -> Controller:
    controller = world.client().controller()
    controller.create("c", schema, shards=shards, mode=mode)
    return controller


def asked(world: World, call: Callable[[], Any]) -> tuple[int, ...]:
    """How many scans, compare-and-sets and compare-and-sets of several rows a call makes."""
    world.requests.clear()
    call()
    assert {request.kind for request in world.requests} <= {*KINDS}
    return tuple(world.count(kind) for kind in KINDS)


def handed(world: World, at: int | None = None) -> int:
    """What another process does: it hands the collection over to a copy, at the earliest time or at this one."""
    controller = world.client().controller()
    new = controller.make_rendition("c", shards=2, copy=True).number
    controller.copy_rendition("c", new)
    start = controller.hand_over("c", new, at=at, advance=at is None)
    if at is None:
        controller.copy_rendition("c", new, to_end=True)
    return start


def handed_later(world: World, start: int) -> int:
    """The same in future, and all that is left to do there once that time has come."""
    handed(world, at=start)
    controller = world.client().controller()
    with controller.open_writer("c") as write:
        write.advance_upper(start)
    controller.copy_rendition("c", 2, to_end=True)
    return start


def rows(world: World) -> set[tuple[int, str]]:
    with world.client().controller().open_reader("c") as read:
        return {(row["id"], row["word"]) for row in read.snapshot().to_pylist()}


def append(write: Any, upper: int) -> Any:
    return write.compare_and_append([{"id": 3, "word": "x", "_time": upper}], upper, upper + 1)


PRICES: dict[tuple[int | None, str], tuple[int, ...]] = {
    (None, "upsert"): (0, 1, 0), (None, "append_now"): (0, 1, 0), (None, "compare_and_append"): (0, 1, 0),
    (1, "upsert"): (0, 1, 0), (1, "append_now"): (0, 1, 0), (1, "compare_and_append"): (0, 1, 0),
    (3, "upsert"): (0, 0, 1), (3, "append_now"): (0, 0, 1), (3, "compare_and_append"): (0, 0, 1),
}  # fmt: skip
INTEGERS: dict[tuple[int | None, str], tuple[int, ...]] = {
    (1, "upsert"): (2, 0, 1), (1, "append_now"): (2, 0, 1), (1, "compare_and_append"): (1, 0, 1),
    (3, "upsert"): (4, 0, 1), (3, "append_now"): (4, 0, 1), (3, "compare_and_append"): (1, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("schema", [CLOCK, SCHEMA], ids=["clock", "integers"])
@pytest.mark.parametrize("shards", [None, 1, 3])
def test_a_collection_of_one_shard_is_written_at_a_shards_price(
    world: World, shards: int | None, schema: persist.Schema
) -> None:
    """Where times are integers nothing is promised ahead, so that the promise is a part of each append."""
    if shards is None:
        write: Any = world.client().open_writer("s", schema)
    else:
        write = made(world, schema, shards).open_writer("c")
    with write:
        write.upsert([{"id": id_, "word": "a"} for id_ in range(20)])
        write.append_now([{"id": id_, "word": "a"} for id_ in range(20, 40)])
        prices = PRICES if schema is CLOCK or shards is None else INTEGERS
        for _ in range(2):
            assert asked(world, lambda: write.upsert(C)) == prices[shards, "upsert"]
            assert asked(world, lambda: write.append_now(A)) == prices[shards, "append_now"]
            upper = write.fetch_upper().time
            assert asked(world, partial(append, write, upper)) == prices[shards, "compare_and_append"]
            write.delete([{"id": 1}])


def test_a_promise_is_made_once_a_second(world: World) -> None:
    with made(world, CLOCK).open_writer("c") as write:
        write.upsert(A)
        for step, price in ((0.5, (0, 1, 0)), (0.4, (0, 1, 0)), (0.2, (1, 0, 1)), (0.9, (0, 1, 0))):
            world.clock.advance(step)
            assert asked(world, partial(write.upsert, [{"id": 1, "word": f"{step}"}])) == price


def test_definite_appends_read_what_is_promised_once(world: World) -> None:
    with made(world, mode="append").open_writer("c") as write:
        for time in range(3):
            write.append([{"id": 1, "word": "a", "_time": time}], time, time + 1)
        assert asked(world, lambda: write.append([{"id": 1, "word": "a", "_time": 3}], 3, 4)) == (3, 2, 0)


@pytest.mark.parametrize("schema", [CLOCK, SCHEMA], ids=["clock", "integers"])
@pytest.mark.parametrize("verb", ["upsert", "append_now", "compare_and_append", "append_async"])
def test_what_is_written_beyond_a_kept_promise_goes_where_the_collection_is(
    world: World, schema: persist.Schema, verb: str
) -> None:
    """A writer that keeps which rendition is active, instead of up to when, writes where no reader looks."""
    controller = made(world, schema)
    with controller.open_writer("c") as write:
        start = handed_later(world, (write.upsert(A).upper.time or 0) + 2_000)
        row = [{"id": 2, "word": "b"}]
        timed = [{**row[0], "_time": start}]
        match verb:
            case "compare_and_append":
                write.compare_and_append(timed, start, start + 10)
            case "append_async":
                write.append_async(timed, start, start + 10)
                write.flush()
            case _:
                getattr(write, verb)(row)
    assert rows(world) == {(1, "a"), (2, "b")}


@pytest.mark.parametrize("schema", [CLOCK, SCHEMA], ids=["clock", "integers"])
def test_at_a_kept_promise_a_writer_looks_where_the_collection_is(world: World, schema: persist.Schema) -> None:
    """The old rendition ends at the promise. Who takes its contents for the newest ones finds nothing to change."""
    with made(world, schema).open_writer("c") as write:
        write.upsert(A)
        handed(world)
        with world.client().controller().open_writer("c") as other:
            last = other.upsert(B).upper
        assert write.fetch_upper() == last
        assert write.upsert(A, dry_run=True).updated == 1
        assert write.upsert(A).updated == 1
        assert write.delete([{"id": 1}]).deleted == 1
    assert rows(world) == set()


def test_below_a_kept_promise_it_does_not_matter_that_another_rendition_follows(world: World) -> None:
    controller = made(world, CLOCK)
    with controller.open_writer("c") as write:
        upper = write.upsert(A).upper.time or 0
        start = handed(world, at=upper + 5_000)
        world.clock.advance(0.1)
        # The copy has written into the shard since, so that what this process knows loses its race first.
        assert asked(world, lambda: write.upsert(B)) == (1, 2, 0)
        world.clock.advance(6)
        with controller.open_writer("c") as other:
            other.advance_upper(start)
        controller.copy_rendition("c", 2, to_end=True)
        written = write.upsert(C)
        assert (written.time or 0) > start
        assert written.updated == 1
    assert rows(world) == {(1, "c")}


def test_an_upsert_at_a_time_beyond_a_handover_first_ends_the_old_rendition(world: World) -> None:
    controller = made(world, CLOCK)
    with controller.open_writer("c") as write:
        handed(world, at=(write.upsert(A).upper.time or 0) + 5_000)
        world.clock.advance(6)
        with pytest.raises(persist.TimedOut):
            write.upsert(B, timeout=0.1)
        controller.copy_rendition("c", 2, to_end=True)
        assert write.upsert(B).updated == 1
    assert rows(world) == {(1, "b")}


def test_a_handover_is_delayed_by_no_more_than_the_slack_however_often(world: World) -> None:
    controller = made(world, CLOCK)
    with controller.open_writer("c") as write:
        for n in range(4):
            write.upsert([{"id": 1, "word": str(n)}])
            assert handed(world) <= world.clock() // 1_000_000 + 1_000 + 2 * n + 1
    assert rows(world) == {(1, "3")}


def test_a_rendition_that_is_written_beside_and_is_level_can_be_handed_over_to(world: World) -> None:
    """Writers promise ahead of both, so that its data never is beyond the promise. Readers wait for it for a second."""
    controller = made(world, CLOCK)
    number = controller.make_rendition("c").number
    with controller.open_writer("c") as write, controller.open_writer("c", rendition=number) as beside:
        for word in ("a", "b", "c"):
            world.clock.advance(0.4)
            write.upsert([{"id": 1, "word": word}])
            beside.upsert([{"id": 1, "word": word.upper()}])
        start = controller.hand_over("c", number)
        assert start <= world.clock() // 1_000_000 + 1_001
        world.clock.advance(1.5)
        beside.upsert([{"id": 1, "word": "D"}])
        write.upsert([{"id": 2, "word": "d"}])
    assert rows(world) == {(1, "D"), (2, "d")}


def test_what_was_written_and_not_promised_is_promised_by_who_reads_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers end between the two on a store without transactions."""
    controller = made(world)
    with monkeypatch.context() as cut, controller.open_writer("c") as write:
        cut.setattr(committing, "_promise_for", lambda _table, _lower, _upper: persist.at(0))
        cut.setattr(CollectionWriter, "_promise", lambda _self, _upper, _deadline: None)
        write.compare_and_append([{"id": 1, "word": "a", "_time": 2}], 0, 3)
    assert controller.describe("c").promised < persist.at(3)
    with controller.open_reader("c") as read, read.snapshot() as found:
        assert (found.as_of, found.count()) == (2, 1)
    assert controller.describe("c").promised == persist.at(3), "so that no handover comes below what was read"


def test_where_times_are_integers_or_of_the_past_a_handover_is_at_upper(world: World) -> None:
    with made(world).open_writer("c") as write:
        upper = write.upsert(A).upper.time
    assert handed(world) == upper
    old = World()
    with made(old, CLOCK).open_writer("c") as write:
        write.compare_and_append([{"id": 1, "word": "a", "_time": 5}], 0, 6)
    assert handed(old) == 6 + 1_000, "not a second before the clock's time: what is written next may be of the past"
    old.close()


def test_a_producer_does_not_push_the_promise_ahead(world: World) -> None:
    controller = made(world, CLOCK)
    with controller.open_writer("c") as write:
        for n in range(1, 50):
            assert write.append_now(A, producer=("job", n)).count == 1
        described = controller.describe("c")
        assert (described.promised.time or 0) - (described.upper.time or 0) <= 1_000


def test_a_promise_of_tables_is_no_further_than_their_data(world: World) -> None:
    controller = world.client().controller()
    with Tables(controller) as tables:
        tables.create("t", CLOCK)
        for _ in range(3):
            tables.insert("t", A)
        described = controller.describe("t")
        assert described.promised == described.upper


def test_without_transactions_a_gap_that_closes_lets_nothing_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is appended there would not be promised, so that a handover could come below it."""
    controller = made(world)
    with controller.open_writer("c") as write, controller.open_writer("c") as other:
        write.has_transactions = other.has_transactions = False
        looks: list[Antichain] = []

        def meet(client: persist.Client, names: list[str]) -> Antichain:
            looks.append(found := min(client.machine(name).fetch().state.upper for name in names))
            if len(looks) == 1:  # another writer is just faster than the append
                append(other, 0)
            return found

        monkeypatch.setattr(committing, "meet", meet)
        with pytest.raises(persist.UpperMismatch):
            append(write, 1)
        append(write, 1)
        described = controller.describe("c")
        assert described.promised == described.upper == persist.at(2)


def test_a_writer_of_a_dropped_collection_learns_it_at_its_next_promise(world: World) -> None:
    controller = made(world)
    with controller.open_writer("c") as write:
        write.upsert(A)
        other = world.client().controller()
        other.drop("c")
        other.tend()
        with pytest.raises(persist.NotFound, match="was dropped"):
            write.upsert(B)


def test_two_writers_keep_promises_of_one_another(world: World) -> None:
    made(world, CLOCK)
    writers: list[CollectionWriter] = [world.client().controller().open_writer("c") for _ in range(2)]
    total = 0
    for n in range(40):
        world.clock.advance(0.3)
        writers[n % 3 % 2].append_now([{"id": n, "word": "x"}])
        total += 1
    for write in writers:
        write.close()
    with world.client().controller().open_reader("c") as read:
        assert sum(contents_of(read.snapshot(diff=True).to_arrow()).values()) == total


def test_an_upsert_into_a_collection_of_one_shard_takes_little_more_work_than_into_a_shard(world: World) -> None:
    shard = world.client().open_writer("s", CLOCK)
    with made(world, CLOCK).open_writer("c") as collection:
        for write in (shard, collection):
            write.upsert(A)
            write.upsert(B)
        own, over = functions_of(lambda: shard.upsert(C)), functions_of(lambda: collection.upsert(C))
        assert over.total() <= 1.3 * own.total()
        assert len({file for file, _ in over}) <= 72
