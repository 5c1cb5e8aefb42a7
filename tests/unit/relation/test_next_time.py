"""The next time of a shard whose times are a clock: clocks that differ or go back, calls in doubt, the clock's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Indeterminate, InvalidUsage
from persist_lib.frontier import MAX_TIME, TOP, at
from persist_lib.location.wrap.around import Operation
from persist_lib.relation.registration import next_time
from persist_lib.schema.schema import Schema
from persist_lib.testing import ManualClock, Rival, contents_of
from persist_lib.times import END_S, PER_SECOND, UNITS, Unit
from tests.worlds import World

PLAIN = persist.Schema({"id": "int64"}, {"word": "string"}, unique=True)
CLOCKS = {unit: persist.Schema({"id": "int64"}, {"word": "string"}, times=unit, unique=True) for unit in UNITS}
ROW = {"id": 1, "word": "a"}
by_unit = pytest.mark.parametrize("unit", UNITS)


def now(world: World, unit: Unit) -> int:
    return world.clock() // 10**6 * PER_SECOND[unit] // 10**3  # clocks are read in ms


def skewed(client: persist.Client, seconds: float) -> persist.Client:
    """A client on the same location, whose machine's clock is off by so much."""
    runtime = client.runtime
    runtime = replace(runtime, clock_ms=lambda: client.runtime.clock_ms() + round(seconds * 1_000))
    return persist.open(client.location, runtime=runtime)


def test_the_next_time_is_now_but_never_before_upper() -> None:
    clock = ManualClock()
    runtime, now_ms = clock.runtime(), clock() // 10**6

    def found(schema: Schema, upper: persist.Antichain) -> int:
        return next_time(schema, "shard s", upper, runtime, lambda: now_ms)

    assert found(CLOCKS["ms"], at(5)) == now_ms
    assert found(CLOCKS["us"], at(5)) == now_ms * 1_000
    assert found(CLOCKS["ms"], at(now_ms + 7)) == now_ms + 7, "the clock went back, or is behind another machine's"
    assert found(PLAIN, at(5)) == 5
    for schema in (*CLOCKS.values(), PLAIN):
        with pytest.raises(InvalidUsage, match=r"shard s: upper is \[\], and the shard is closed for writing"):
            found(schema, TOP)
        end = MAX_TIME if schema.times is None else END_S * PER_SECOND[schema.times]
        assert found(schema, at(end - 1)) == end - 1
        with pytest.raises(InvalidUsage, match=rf"shard s: upper is \[{end}\], and its times end there") as told:
            found(schema, at(end))
        assert told.value.upper == at(end)


@by_unit
def test_times_never_go_back_whatever_the_clocks_of_the_writers_say(world: World, unit: Unit) -> None:
    client = world.client()
    skews = (0, -3_600, 3_600)
    writers = [skewed(client, skew).open_writer("s", CLOCKS[unit]) for skew in skews]
    upper = 0
    for turn in range(12):
        world.clock.advance([1, 0, -500, 2][turn % 4])
        done = writers[turn % 3].upsert([{"id": turn % 4, "word": str(turn)}])
        assert done.time == max(upper, now(world, unit) + skews[turn % 3] * PER_SECOND[unit])
        upper = done.time + 1
        assert done.upper == at(upper)
    assert len(contents_of(client.open_reader("s").snapshot(diff=True).to_arrow())) == 4


@by_unit
@pytest.mark.parametrize("moved", [-7_200, 7_200])
@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("raced", [True, False])
def test_a_call_in_doubt_is_repeated_after_the_clock_has_moved(
    world: World, unit: Unit, moved: int, arrives: bool, raced: bool
) -> None:
    inner, blows = world.inner.consensus, list[bool]()

    class Doubtful(Rival):
        def compare_and_set(self, key: Any, expected: Any, data: bytes) -> bool:
            if blows and arrives:
                inner.compare_and_set(key, expected, data)
            return super().compare_and_set(key, expected, data)

        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            if blows and operation.kind in ("compare_and_set", "head", "scan"):
                blows.append(True)
                if operation.kind == "compare_and_set" or len(blows) > 2:
                    raise Indeterminate("no answer")
            return call()

    write = world.client(persist.Config(timeout_s=1), rival=Doubtful(inner)).open_writer("s", CLOCKS[unit])
    theirs = world.client().open_writer("s", CLOCKS[unit])
    write.append_now([{"id": 0, "word": "z"}])
    asked_at = now(world, unit)
    blows.append(True)
    with pytest.raises(Indeterminate) as told:
        write.upsert([ROW])
    blows.clear()
    if raced:
        theirs.upsert([{"id": 7, "word": "theirs"}])
    world.clock.advance(moved)
    again = write.upsert([ROW], token=told.value.token)
    assert again.time is not None
    assert again.upper == at(again.time + 1)
    if arrives or not raced:  # that append, at its time
        assert asked_at <= again.time <= asked_at + 1
    else:  # it can never be committed any more, so the call makes another, at a time of now
        assert again.time == max(now(world, unit), (theirs.upper.time or 0))
    expected = {(0, "z"): 1, (1, "a"): 1, **({(7, "theirs"): 1} if raced else {})}
    with world.client().open_reader("s") as read:
        assert contents_of(read.snapshot(diff=True).to_arrow()) == expected
        assert sum(row["id"] == 1 for row in read.changes(None).to_pylist()) == 1, "once"


@by_unit
def test_upper_in_the_far_future_is_where_the_next_time_is(world: World, unit: Unit) -> None:
    client = world.client()
    write = client.open_writer("s", CLOCKS[unit])
    write.advance_upper("2525-01-01T00:00Z")
    far = write.upper.time
    assert write.upsert([ROW], dry_run=True).upper == at(far or 0)
    assert write.upsert([ROW]).time == far
    assert write.append_now([{"id": 2, "word": "b"}]).upper == at((far or 0) + 2)
    assert client.restore("s", far or 0).upper == (far or 0) + 2
    assert contents_of(client.open_reader("s").snapshot(diff=True).to_arrow()) == {(1, "a"): 1}


@by_unit
def test_at_the_end_of_the_clock_every_call_says_so_dry_runs_too(world: World, unit: Unit) -> None:
    client = world.client()
    write = client.open_writer("s", CLOCKS[unit])
    end = END_S * PER_SECOND[unit]
    write.upsert([ROW])
    write.advance_upper(end - 1)
    assert write.upsert([{"id": 1, "word": "last"}]).time == end - 1
    for call in (
        lambda: write.upsert([{"id": 1, "word": "b"}]), lambda: write.delete([1]),
        lambda: write.upsert([{"id": 1, "word": "b"}], dry_run=True), lambda: write.delete([1], dry_run=True),
        lambda: write.append_now([{"id": 2, "word": "b"}]), lambda: client.restore("s", end - 2),
    ):  # fmt: skip
        with pytest.raises(InvalidUsage, match=r"shard s: upper is .*its times end there"):
            call()
    assert write.upsert([{"id": 1, "word": "last"}]).count == 0, "nothing to write needs no time"
    assert client.open_reader("s").snapshot(diff=True).to_pylist() == [{"id": 1, "word": "last", "_diff": 1}]


def test_a_violation_says_the_time_as_it_is_shown(world: World) -> None:
    write = world.client().open_writer("s", CLOCKS["ms"])
    write.advance_upper("2026-11-22T12:00Z")
    rows = [{**ROW, "_time": "2026-11-22T12:00Z"}, {"id": 1, "word": "b", "_time": "2026-11-22T12:00:01Z"}]
    with pytest.raises(persist.ConstraintViolated, match="at time 2026-11-22T12:00:01Z"):
        write.compare_and_append(rows, "2026-11-22T12:00Z", "2026-11-22T13:00Z")
