"""The law of a stream on Spark: each update once, whatever is appended at whichever request the reader makes.

The reader is driven in Spark's order: initialOffset, latestOffset, partitions, read, commit; restarted from what a
checkpoint keeps; by each kind of trigger; with and without limits. A rival appends at the requests that it makes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

import persist_lib as persist
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.spark import batch_reader, offsets
from persist_lib.spark.offsets import Contents, Offset, Updates
from tests.unit.spark.test_collections import Told
from tests.unit.spark.test_streaming_reads import Sink
from tests.unit.spark.worlds import SCHEMA, TINY, Stream, Trigger, World, added

T = TypeVar("T")
READS = ("head", "scan", "heads")


class Rivalled(AroundConsensus):
    """A Consensus of the reader's: before those of its reads that are chosen by number, a rival acts."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.act: Callable[[], None] | None = None
        self.chosen: Callable[[int], bool] = lambda _: False
        self.seen = 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind in READS and (act := self.act) is not None:
            self.seen += 1
            if self.chosen(self.seen):
                self.act = None  # its own requests have no rival
                act()
                self.act = act
        return call()

    def at(self, *numbers: int) -> None:
        """Act before these reads, counted from now on."""
        self.chosen, self.seen = numbers.__contains__, 0


class Setting:
    """A location in memory, whose reader has a rival."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        location = open_location("memory:", create=True)
        self.rivalled = Rivalled(location.consensus)
        config, runtime = persist.Config(**TINY), Runtime(background=False)
        self.writes = persist.open(open_location(location.url), config=config, runtime=runtime)
        self.reads = persist.open(replace(location, consensus=self.rivalled), config=config, runtime=runtime)
        monkeypatch.setattr(batch_reader, "client_of", lambda *_, **__: self.reads)

    def stream(self, sink: Any, **options: str) -> Stream:
        return Stream(self.reads, sink, location="file:/in-memory", changes="true", **options)

    def close(self) -> None:
        self.reads.close()
        self.writes.close()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    made = Setting(monkeypatch)
    yield made
    made.close()


LIMITS: list[dict[str, str]] = [{}, {"max_updates": "5"}, {"max_times": "1"}, {"max_bytes": "1"}]
TRIGGERS: list[Trigger] = ["once", "available now", "processing"]


def told(setting: Setting, carrier: str) -> tuple[World | Told, dict[str, str]]:
    if carrier == "shard":
        setting.writes.open_writer("orders", SCHEMA).close()
        return World(setting.writes), {}
    return Told(setting.writes, shards=2), {}


def run(query: Stream, trigger: Trigger, rng: random.Random) -> None:
    """One process of a query, which ends by itself or is killed at any step."""
    query.start(trigger)
    for _ in range(2 if trigger == "processing" else 100):
        for step in (query.plan, query.run, query.finish):
            if step() is False or rng.random() < 0.1:
                return
        if trigger == "once":
            return
    assert trigger == "processing", "it ends, as it reads no further than what was complete"


def check(query: Stream, sink: Sink, world: World | Told) -> None:
    """All that was ever appended has been delivered, each update once."""
    query.start()
    while query.step():
        assert query.done < 500, "it does not end"
    began = next(found["began"] for found in map(json.loads, query.planned) if "began" in found)
    if (first := began.get("contents")) is None:
        assert sink.updates() == world.changes(began["at"] - 1, world.upper - 1)
        return
    expected = added(((data, first), diff) for data, diff in world.contents(first).items())
    expected.update(world.changes(first, world.upper - 1))
    assert sink.updates() == added(expected.items())


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize(
    ("carrier", "limits"),
    [*(("shard", one) for one in LIMITS), ("collection", LIMITS[0]), ("collection", LIMITS[2])],
    ids=str,
)
def test_each_update_comes_once_with_appends_at_many_requests(
    setting: Setting, carrier: str, limits: dict[str, str], trigger: Trigger
) -> None:
    rng, sink, rivalled = random.Random(f"{trigger} {limits}"), Sink(), setting.rivalled
    world, options = told(setting, carrier)
    if rng.random() < 0.7:
        world.append(rng, 12, times=2)
    rivalled.act = lambda: world.append(rng, 2, times=rng.randrange(1, 3))
    query = setting.stream(sink, **options, **limits)
    for _ in range(3):
        rivalled.at(*rng.sample(range(1, 9), 3))
        run(query, trigger, rng)
    rivalled.act = None
    check(query, sink, world)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("carrier", ["shard", "collection"])
def test_an_append_at_any_one_request_of_a_first_batch_comes_once(
    setting: Setting, carrier: str, trigger: Trigger
) -> None:
    rng, rivalled, number, seen = random.Random(1), setting.rivalled, 0, 1
    world, options = told(setting, carrier)
    world.append(rng, 5, times=2)
    while seen > number:
        number, sink = number + 1 + number // 2, Sink()
        query = setting.stream(sink, **options)
        query.start(trigger)
        rivalled.act = lambda: world.append(rng, 1)
        rivalled.at(number)
        query.step()
        seen, rivalled.act = rivalled.seen, None
        check(query, sink, world)
    assert number > 3


@pytest.mark.parametrize(("trigger", "number"), [("once", 2), ("once", 5), ("available now", 3), ("processing", 4)])
def test_a_handover_within_the_first_call_comes_once(setting: Setting, trigger: Trigger, number: int) -> None:
    rng, sink, rivalled = random.Random(2), Sink(), setting.rivalled
    world = Told(setting.writes, shards=1)
    world.append(rng, 5, times=2)
    query = setting.stream(sink)
    query.start(trigger)

    def act() -> None:
        world.append(rng, 2)
        world.hand_over(1, drop=3)
        world.append(rng, 2)

    rivalled.act = act
    rivalled.at(number)
    query.step()
    assert rivalled.seen >= number
    rivalled.act = None
    check(query, sink, world)


def test_a_checkpoint_whose_first_end_lies_before_its_contents_goes_on_after_them() -> None:
    """Such offsets are in checkpoints that a stream with `once` began: what follows is not delivered again."""
    written = offsets.encode(Offset("orders", "h", Updates(5), Contents(6)))
    found = offsets.decode(written, "orders", "shard orders")
    assert found == Offset("orders", "h", Updates(7), Contents(6))


def test_a_step_back_is_refused() -> None:
    for start, end in ((Updates(5), Updates(4)), (Contents(6), Updates(5)), (Contents(6, b"k"), Contents(6, b"a"))):
        with pytest.raises(persist.errors.InvalidUsage, match="a stream goes forward"):
            offsets.steps(start, end)


@pytest.mark.parametrize(
    ("carrier", "options", "trigger"),
    [
        *(("shard", options, trigger) for options in ({}, {"hold": "h"}, {"from": "latest"}) for trigger in TRIGGERS),
        ("collection", {}, "available now"), ("collection", {"hold": "h"}, "once"),
    ],
    ids=str,
)  # fmt: skip
def test_a_new_stream_looks_again_where_history_goes_between_its_look_and_its_lease(
    setting: Setting, carrier: str, options: dict[str, str], trigger: Trigger
) -> None:
    rng, rivalled, number, seen = random.Random(3), setting.rivalled, 0, 1
    world, chosen = told(setting, carrier)
    world.append(rng, 5, times=2)
    reader = setting.writes.open_reader("orders") if isinstance(world, World) else None

    def act() -> None:
        world.append(rng, 1)
        if isinstance(world, World):
            assert reader is not None
            reader.downgrade_since(world.upper - 1)
        else:
            world.controller.alter("orders", retention=0)
            world.controller.tend()

    while seen > number:
        number, sink = number + 1 + number // 3, Sink()
        query = setting.stream(sink, **chosen, **options)
        rivalled.act = act
        rivalled.at(number)
        query.start(trigger)
        query.step()
        seen, rivalled.act = rivalled.seen, None
        check(query, sink, world)
        if "hold" in options:
            setting.writes.release_hold("orders", "h") if reader else world.controller.release_hold("orders", "h")  # type: ignore[union-attr]
    assert number > 3


def test_a_new_stream_that_asks_for_history_that_goes_meanwhile_says_so(setting: Setting) -> None:
    rng, rivalled = random.Random(4), setting.rivalled
    world, _ = told(setting, "shard")
    world.append(rng, 5, times=4)
    reader = setting.writes.open_reader("orders")
    for number in range(2, 5):
        query = setting.stream(Sink(), **{"from": str(world.upper - 2)})
        query.start()

        def act() -> None:
            world.append(rng, 1, times=3)
            reader.downgrade_since(world.upper - 1)

        rivalled.act = act
        rivalled.at(number)
        with pytest.raises(persist.SinceViolation) as told_:
            query.step()
        rivalled.act = None
        assert "hold" not in told_.value.message or "a hold would have kept it" in told_.value.message, told_.value
        assert "continues" not in told_.value.message
