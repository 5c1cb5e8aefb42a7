"""Reads over every carrier: the contents as of a time are the same for ever, for everybody, or a typed error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from tests.unit.relation.carriers import (
    SHARD,
    THREE,
    Carrier,
    over,
    over_all,
    over_handles,
    rows,
    time_of,
)
from tests.worlds import World

HOUR_S = 3600
LATE = "1 minute ago"


@over_all
@pytest.mark.parametrize("read_only", [True, False], ids=["read only", "writes"])
def test_what_was_read_as_of_a_time_is_read_as_of_it_for_ever(world: World, carrier: Carrier, read_only: bool) -> None:
    writer = world.client()
    relation = carrier.make(writer)
    if carrier.mode:
        relation.tables.create("beside", persist.Schema({"id": "int64"}, times="ms"))
    told: dict[int, Counter[Any]] = {}

    def add(n: int) -> None:
        if carrier.mode and n % 2:
            relation.tables.insert("beside", [{"id": n}])
        relation.now(rows(n))
        if carrier.mode:
            relation.tables.insert("beside", [{"id": -n}])  # so that this one is behind its timeline

    def look(as_of: int | None) -> bool:
        reader = carrier.open(world.client(read_only=read_only))
        refused = None
        try:
            found = reader.snapshot(as_of, timeout=None if carrier.mode else 0.001, diff=True)
        except persist.NotComplete as error:
            refused = error
        if refused is not None:
            assert as_of == refused.as_of, "it says what was asked for"
            assert refused.upper <= persist.at(refused.as_of)
            return False
        assert as_of in (None, found.as_of)
        contents = Counter({row["id"]: row["_diff"] for row in found.to_arrow().to_pylist()})
        assert told.setdefault(found.as_of, contents) == contents if found.as_of >= 0 else not contents
        return True

    assert look(None), "a new one is empty, and can be read"
    for n in range(1, 5):
        now = world.clock() // 1_000_000
        looks = [look(as_of) for as_of in (None, now, now + 1, now + 700, None)]
        assert looks[0]
        assert looks[-1]
        assert not looks[3], "a time to come"
        add(n)
        assert all(look(as_of) for as_of in list(told))
        if n % 2:
            world.clock.advance(1)
    assert look(None)
    assert {len(contents) for contents in told.values()} >= {1, 4}


@over_all
def test_a_new_one_is_empty_with_its_columns(world: World, carrier: Carrier) -> None:
    carrier.make(world.client())
    for client in (world.client(), world.client(read_only=True)):
        relation = carrier.open(client)
        found = relation.snapshot(columns=["word"], filter=pc.field("id") > 1)
        assert (found.to_pylist(), found.schema.names) == ([], ["word"])
        assert found.as_of == (0 if carrier.mode == "wal" else -1), "today, a WAL begins complete as of 0"
        assert relation.snapshot(keys=[1]).to_arrow().schema.names == ["id", "word"]
        assert list(relation.snapshot().to_polars()["id"]) == []
        if not carrier.mode:
            assert [split.to_arrow().num_rows for split in relation.snapshot().splits(3)] in ([], [0])
            changes = relation.read.changes(None)
            assert (changes.from_, changes.to, changes.to_arrow().num_rows) == (None, -1, 0)


WRONG: list[dict[str, Any]] = [
    *({"as_of": as_of} for as_of in (-1, 2**64, "1", 1.0, True)),
    *({"columns": columns} for columns in (["nope"], "id", [1])),
    {"key": 1}, {"key": ("x",)}, {"key": (1, 2)}, {"key": (1,), "key_to": (2,)}, {"key_from": ("1",)}, {"diff": 1},
    {"keys": [1], "key": (1,)}, {"keys": 4}, {"keys": ["x"]},
    *({"filter": filter_} for filter_ in (
        pc.field("nope") == 1, pc.field("id") == "x", pc.field("id") + 1, pc.field(0) == 1, pc.field("_diff") > 1,
        pc.field("_time") > 1, "id > 5", 5, True, [("id", "=", 5)], pc.field(("id", "x")) == 1,
    )),
]  # fmt: skip


@over_all
def test_wrong_arguments_are_refused_before_anything_is_read(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    as_of = time_of(relation.now(rows(1)))
    relation.contents()
    world.requests.clear()
    for given in WRONG:
        with pytest.raises(persist.InvalidUsage):
            relation.snapshot(**{"as_of": as_of, **given})
    for from_, to in ((-2, None), ("1", None), (1.5, None), (True, None), (as_of, 2**64), (as_of, as_of - 1)):
        with pytest.raises(persist.InvalidUsage):
            relation.changes(from_, to)
    for wrong in (-2, 2**64, "1", 1.0, True):
        with pytest.raises(persist.InvalidUsage):
            relation.listen(wrong)
    assert world.count("get", "get_range", "compare_and_set", "compare_and_set_many") == 0


@over_all
def test_columns_keys_and_filters_give_what_they_give_of_the_whole(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(inline_bytes=0)))
    relation.now(rows(*range(40), word="a"))
    relation.upsert(rows(*range(0, 40, 3), word="b"))
    relation.now(rows(5, 5, word="c"))
    for _ in range(2):
        whole = relation.snapshot().to_arrow()
        for given, want in (
            ({"filter": (pc.field("word") == "b") & (pc.field("id") > 9)}, lambda r: r["word"] == "b" and r["id"] > 9),
            ({"keys": [3, 5, 99]}, lambda r: r["id"] in (3, 5)), ({"key": (5,)}, lambda r: r["id"] == 5),
            ({"key_from": (7,), "key_to": (11,)}, lambda r: 7 <= r["id"] < 11),
        ):  # fmt: skip
            kept = [one for one in whole.to_pylist() if want(one)]
            for columns in (None, ["word"], []):
                found = relation.snapshot(columns=columns, **given)
                names = found.schema.names
                assert names == (columns if columns is not None else ["id", "word"])
                expected = Counter(tuple(one[name] for name in names) for one in kept)
                assert found.count() == len(kept)
                assert Counter(tuple(one.values()) for one in found.to_arrow().to_pylist()) == expected or not names
                summed = relation.snapshot(columns=columns, diff=True, **given).to_arrow().to_pylist()
                assert {tuple(one[name] for name in names): one["_diff"] for one in summed} == expected
        relation.tend()


@over_handles
def test_history_that_was_given_up_is_refused_and_the_rest_is_exact(world: World, carrier: Carrier) -> None:
    relation, done = carrier.make(world.client()), []
    for n in range(5):
        done.append(time_of(relation.upsert([{"id": 9, "word": str(n)}, {"id": n, "word": "w"}])))
        world.clock.advance(1)
    expected = {time: relation.contents(time) for time in done[2:]}
    relation.close()
    relation.bound_history(done[4] - done[2])
    late = carrier.open(world.client())
    assert {time: late.contents(time) for time in expected} == expected
    for call in (lambda: late.snapshot(done[0]), lambda: late.listen(done[0]), lambda: late.changes(done[0])):
        with pytest.raises(persist.SinceViolation):
            call()
    with late.listen(done[2]) as listener:
        assert sum(event.table.num_rows for event in listener.poll() if isinstance(event, persist.Updates)) > 0
    late.read.downgrade_since(done[4])
    with pytest.raises(persist.SinceViolation):
        late.snapshot(done[3])


@over_handles
def test_a_reader_whose_lease_ended_says_so_and_never_gives_data(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(lease_ms=1000)))
    time = time_of(relation.now(rows(1)))
    relation.contents()
    listener = relation.listen(time)
    world.clock.advance(100_000)
    other = world.client()
    for shard in other.shards():
        other.expire(shard)
    for call in (
        lambda: relation.snapshot(time).to_arrow(), lambda: relation.listen(time), listener.poll,
        lambda: next(listener), lambda: relation.changes(time), lambda: relation.read.downgrade_since(time),
    ):  # fmt: skip
        with pytest.raises(persist.LeaseExpired):
            call()


@over_handles
def test_what_is_closed_reads_no_more_and_leaves_no_lease(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(inline_bytes=0)))
    time = time_of(relation.now(rows(1)))
    relation.now(rows(2))
    relation.snapshot()
    listener = relation.listen(time)
    if carrier.shards:  # today: of a shard it ends with its reader
        listener.close()
        assert (list(listener.poll()), list(listener)) == ([], []), "what is closed gives nothing more"
    relation.close()
    relation.close()
    calls = [lambda: relation.read.snapshot(time), lambda: relation.read.listen(time), lambda: relation.changes(time)]
    for call in [*calls, *[listener.poll, lambda: next(listener)] * (not carrier.shards)]:
        with pytest.raises(persist.LeaseExpired):
            call()
    client = world.client()
    assert not any(client.inspect(shard).state.readers for shard in relation.shards())
    assert not any(client.inspect(shard).state.writers for shard in relation.shards())


@over_all
def test_a_client_that_may_only_read_reads_all_and_writes_nothing(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    times = [time_of(relation.upsert(rows(1, word=str(n)))) for n in range(4)]
    relation.tend()
    relation.upsert(rows(2))
    expected = {time: relation.contents(time) for time in times}
    relation.close()
    before = {shard: world.bytes(shard) for shard in relation.client.shards()}
    looking = carrier.open(world.client(read_only=True))
    assert {time: looking.contents(time) for time in times} == expected
    assert looking.changes(times[0]).num_rows == 7
    with looking.listen(times[0]) as listener:
        assert sum(event.table.num_rows for event in listener.poll() if isinstance(event, persist.Updates)) == 7
    looking.close()
    assert {shard: world.bytes(shard) for shard in relation.client.shards()} == before


# --- times at which nothing was written -----------------------------------------------------------------------------


def quiet(world: World, carrier: Carrier) -> Any:
    """A row was written an hour ago; where times are minted, and nothing else."""
    relation = carrier.make(world.client())
    relation.now(rows(1))
    relation.upsert(rows(2))
    relation.delete([2])
    relation.contents()
    world.clock.advance(HOUR_S)
    return relation


def uppers(client: persist.Client) -> dict[str, persist.Antichain]:
    """Of all that has rows: what is promised may be ahead of that."""
    names = [name for name in client.shards() if not name.endswith(".renditions")]
    return {name: client.inspect(name).state.upper for name in names}


@over_all
def test_who_may_write_completes_what_the_stores_clock_has_passed_with_one_commit(
    world: World, carrier: Carrier
) -> None:
    relation = quiet(world, carrier)
    before, now, started = uppers(relation.client), world.clock() // 1_000_000, world.clock()
    assert relation.snapshot(LATE, timeout=0 if not carrier.mode else None).as_of == now - 60_000
    moved = {name for name, upper in uppers(relation.client).items() if upper != before[name]}
    assert {uppers(relation.client)[name] for name in moved} == {persist.at(now + 1)}, "and not further"
    assert not (carrier.mode == "wal" and moved & set(relation.shards())), "the WAL, and never a table"
    world.requests.clear()
    for ago in ("30 minutes ago", "59 minutes ago", "30 s ago", "now"):
        assert relation.snapshot(ago).to_pylist() == rows(1)
    assert world.count("compare_and_set", "compare_and_set_many") == 0, "one commit serves an hour of questions"
    assert relation.changes("59 minutes ago", "now").num_rows == 0
    assert world.clock() == started, "it waits for nothing"
    world.clock.advance(60)
    assert relation.snapshot("1 s ago").as_of == now + 59_000, "again, as its own append brings no time"
    assert time_of(relation.upsert(rows(3))) > now + 59_000


@over_all
@pytest.mark.parametrize("why", ["read only", "a time to come"])
def test_the_others_get_that_it_is_not_complete_once_their_timeout_has_passed(
    world: World, carrier: Carrier, why: str
) -> None:
    relation = quiet(world, carrier)
    reader = carrier.open(world.client(read_only=True)) if why == "read only" else relation
    reader.contents()
    before, started = uppers(relation.client), world.clock()
    as_of: Any = LATE if why == "read only" else world.clock() // 1_000_000 + HOUR_S * 1000
    with pytest.raises(persist.NotComplete, match=r"not complete yet|upper has to pass|waited") as told:
        reader.snapshot(as_of, timeout=7)
    assert 6.9 <= (world.clock() - started) / 10**9 < 9, "it waits for as long as it was told to"
    assert uppers(relation.client) == before
    assert max(upper for name, upper in before.items() if name != "_catalog") == told.value.upper
    wrote: list[int] = []

    def sleep(seconds: float) -> None:
        world.clock.advance(seconds)
        if not wrote:
            wrote.append(time_of(carrier.open(world.client()).upsert(rows(2))))

    object.__setattr__(reader.client.runtime, "sleep", sleep)
    found = reader.snapshot(world.clock() // 1_000_000 + 1, timeout=60)
    assert len(found.to_pylist()) == (2 if wrote[0] <= found.as_of else 1), "it comes while it waits"


@over(SHARD, THREE)
def test_no_reader_completes_times_that_callers_bring(world: World, carrier: Carrier) -> None:
    relation = quiet(world, carrier)
    upper = relation.write.fetch_upper().time
    relation.at([{**rows(1)[0], "_time": upper}], upper, upper + 1)
    with pytest.raises(persist.NotComplete) as told:
        relation.snapshot(LATE, timeout=1)
    assert told.value.upper == relation.write.fetch_upper() == persist.at(upper + 1)


@over(SHARD, THREE)
@pytest.mark.parametrize("when", [{}, {"at": "now"}], ids=["the library", "the caller"])
def test_what_many_processes_wrote_has_a_chosen_time_unless_the_call_says_one(
    world: World, carrier: Carrier, when: dict[str, str]
) -> None:
    relation = quiet(world, carrier)
    with relation.write.stage() as stage:
        answers = [stage.write([{**rows(5)[0], "_diff": 1}])]
        assert relation.write.append_staged(answers, **when).count == 1
    world.clock.advance(HOUR_S)
    assert relation.write.append_staged(answers).count == 0, "it is there, however its time was chosen"
    if when:
        with pytest.raises(persist.NotComplete):
            relation.snapshot(LATE, timeout=1)
    else:
        assert relation.snapshot(LATE).to_pylist() == relation.snapshot().to_pylist()
