"""Appends to a collection that are accepted and sent later: as if they were made one by one, in the order of calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter
from persist_lib.frontier import at
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome
from tests.renditions import Told, check, create, handed, write
from tests.worlds import SCHEMA, World, row, updates


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data") as client:
        yield client


def accept(writer: CollectionWriter, told: Told, times: range, **options: Any) -> list[Any]:
    """Append something at each of these times."""
    futures = []
    for time in times:
        made = [row(10 * i + time % 10, "a", time) for i in range(5)]
        futures.append(writer.append_async(made, time, time + 1, **options))
        told.last.append(updates(made), at(time), at(time + 1))
    return futures


def test_accepted_appends_are_sent_in_order_and_together(client: persist.Client) -> None:
    told, controller = Told(), create(client)
    with controller.open_writer("c", batching=persist.Batching(bytes=1 << 30, age_s=1_000)) as writer:
        futures = accept(writer, told, range(20))
        assert not any(future.done() for future in futures)
        writer.flush()
        done = [future.result(0) for future in futures]
        assert len({one.token for one in done}) == 1, "one commit"
        assert {(one.count, one.upper) for one in done} == {(5, at(20))}
        accept(writer, told, range(20, 25))
        assert writer.upsert([{"id": 1, "word": "b"}]).time == 25, "it comes after what was accepted"
    old = [((1, "a"), 25, -n) for (id_, _), n in told.contents(24).items() if id_ == 1]
    told.last.append([*old, ((1, "b"), 25, 1)], at(25), at(26))
    check(controller, told, 0, 25)


def test_appends_on_both_sides_of_a_handover_are_sent_apart(client: persist.Client) -> None:
    told, controller = Told(), create(client)
    write(controller, told, range(2))
    made = controller.make_rendition("c", copy=True, shards=2).number
    controller.copy_rendition("c", made)
    assert controller.hand_over("c", made, at=4) == 4
    with controller.open_writer("c") as writer:
        batch = [row(i, "b", time) for i in range(3) for time in (2, 3, 4, 5)]
        waiting = [
            writer._accepted(
                [one for one in batch if one["_time"] == time], time, time + 1, None, None, None, copies=False
            )
            for time in (2, 3, 4, 5)
        ]
        stops = threading.Event()

        def copy() -> None:
            while not stops.is_set():
                controller.copy_rendition("c", made)

        copying = threading.Thread(target=copy)
        copying.start()
        try:
            answers = writer._send(waiting)
        finally:
            stops.set()
            copying.join()
    assert [getattr(one, "upper", one) for one in answers] == [at(3), at(4), at(5), at(6)]
    told.last.append(updates([one for one in batch if one["_time"] < 4]), at(2), at(4))
    told.copy(made, 1)
    told.hand_over(made, 4)
    told.last.append(updates([one for one in batch if one["_time"] >= 4]), at(4), at(6))
    check(controller, told, 0, 5)


class Cut:
    """From the next commit over several shards on, no answer comes; that commit itself happens or not."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.is_ready, self.is_cut = outcome, False, False

    def decide(self, operation: Operation) -> Fate:
        if self.is_cut:
            return Fate(Outcome.LOST_UNKNOWN, 0.01)
        self.is_cut = self.is_ready and operation.kind == "compare_and_set_many" and operation.size > 0
        return Fate(self.outcome) if self.is_cut else Fate()


def test_an_unknown_outcome_is_decided_by_the_token_for_all_that_were_sent_together(world: World) -> None:
    for happened in (Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN):
        cut = Cut(happened)
        client = world.client(persist.Config(timeout_s=1), plan=cut)
        name = f"c-{happened.name}"
        controller = client.controller()
        controller.create(name, SCHEMA, shards=3, mode="compare_and_append")
        with controller.open_writer(name) as writer:
            writer.compare_and_append([], 0, 1)
            made = [[row(i, "u", time) for i in range(4)] for time in (1, 2, 3)]
            waiting = [
                writer._accepted(one, time, time + 1, None, None, None, copies=False)
                for time, one in zip((1, 2, 3), made, strict=True)
            ]
            cut.is_ready = True
            answers = writer._send(waiting)
            cut.is_ready = cut.is_cut = False
            assert all(isinstance(one, persist.Indeterminate) for one in answers), answers
            token = answers[0].fields["token"]  # type: ignore[union-attr]
            for time in (2, 1, 3):  # in any order
                assert writer.compare_and_append(made[time - 1], time, time + 1, token=token).token == token
            assert writer.fetch_upper() == at(4)
            with controller.open_reader(name) as reader:
                assert reader.snapshot(3, diff=True).to_arrow().num_rows == 4
                assert sum(reader.snapshot(3, diff=True).to_arrow()["_diff"].to_pylist()) == 12


def test_bad_input_is_refused_where_it_is_passed(world: World) -> None:
    controller: Any = create(world.client())
    with controller.open_writer("c") as writer:
        bad = (
            lambda: writer.append_async([row(1)], 1, 1),
            lambda: writer.append_async("rows", 0, 1),
            lambda: writer.append_async([row(1)], 0, 1, block="yes"),
            lambda: writer.append_async([row(1)], 0, 1, token=""),
            lambda: writer.append_async([row(1)], 0, 1, timeout="1"),
            lambda: writer.flush(timeout=-1),
            lambda: controller.open_writer("c", batching=7),
        )
        for call in bad:
            with pytest.raises(persist.InvalidUsage):
                call()
        assert writer.append_async([row(1)], np.int64(0), np.int32(1)).result().upper == at(1)
    controller.create("d", SCHEMA, mode="append")
    with controller.open_writer("d") as writer, pytest.raises(persist.InvalidUsage, match="not by append_async"):
        writer.append_async([row(1)], 0, 1)


def test_a_producer_is_told_what_it_has_appended(world: World) -> None:
    told, controller = Told(), create(world.client())
    with controller.open_writer("c") as writer:
        assert writer.append_async([row(1)], 0, 1, producer=("p", 0)).result().count == 1
        again = writer.append_async([row(1)], 0, 1, producer=("p", 0))
        assert isinstance(again.exception(), persist.AlreadyProduced)
    told.last.append(updates([row(1)]), at(0), at(1))
    handed(controller, told)
    check(controller, told, 0, 0)
