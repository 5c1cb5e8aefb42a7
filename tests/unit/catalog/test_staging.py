"""Staged writes of a collection: they do what one writer would, whatever is handed over or written meanwhile."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import persist_lib as persist
from persist_lib.catalog import Controller
from persist_lib.catalog.staging import CollectionStaged
from persist_lib.format.paths import blob_key
from persist_lib.testing import contents_of
from tests.renditions import Told, create, handed, write
from tests.worlds import SCHEMA

Rows = list[dict[str, Any]]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(inline_bytes=100)) as client:
        yield client


def rows(*ids: int, word: str = "w") -> Rows:
    return [{"id": id_, "word": word} for id_ in ids]


def contents(controller: Controller, as_of: int | None = None) -> Counter[Any]:
    with controller.open_reader("c") as reader:
        return contents_of(reader.snapshot(as_of, diff=True).to_arrow())


def multiset(made: Rows) -> Counter[Any]:
    return Counter((one["id"], one["word"]) for one in made)


def sent(staged: CollectionStaged) -> CollectionStaged:
    """As it comes from another process."""
    assert pickle.loads(pickle.dumps(staged)) == staged
    return msgspec.msgpack.decode(msgspec.msgpack.encode(staged), type=CollectionStaged)


def test_what_tasks_stage_is_one_append_to_all_shards(client: persist.Client) -> None:
    controller = create(client)
    with controller.open_writer("c") as writer, writer.stage() as stage:
        ticket = pickle.loads(pickle.dumps(stage.ticket))
        staged = [sent(ticket.write(rows(*range(i, 300, 3)))) for i in range(3)]
        assert sum(one.rows for one in staged) == 300
        assert all(one.cost.requests > 0 and one.size > 0 for one in staged)
        done = writer.append_staged(staged)
        assert (done.count, done.time, done.upper) == (300, 0, persist.at(1))
        assert writer.append_staged([]).count == 0, "nothing staged is no append"
        assert writer.append_staged([stage.write(rows(7))], at=40).upper == persist.at(41)
    assert contents(controller, 39) == multiset(rows(*range(300)))
    assert contents(controller) == multiset(rows(*range(300), 7))
    names = controller.describe("c").active.shards
    assert {client.inspect(name).state.upper for name in names} == {persist.at(41)}
    assert not any(client.inspect(name).state.writers for name in names), "ids are retired"


def one_row_each(made: Rows) -> dict[int, str]:
    return {one["id"]: one["word"] for one in made}


@pytest.mark.parametrize("seed", range(6))
def test_any_calls_are_those_of_a_plain_multiset_across_handovers(client: persist.Client, seed: int) -> None:
    rng = random.Random(seed)
    controller, told = create(client, shards=rng.randint(1, 4)), Counter[Any]()
    by_time: dict[int, Counter[Any]] = {}
    with ExitStack() as held:
        writer = held.enter_context(controller.open_writer("c"))
        stage = held.enter_context(writer.stage())
        for step in range(14):
            what = rng.choice(["append", "upsert", "overwrite"])
            drawn = [{"id": rng.randrange(25), "word": rng.choice("abc")} for _ in range(rng.randrange(12))]
            if what != "append":
                drawn = [{"id": id_, "word": word} for id_, word in one_row_each(drawn).items()]
            tasks = rng.randint(1, 3)
            staged = [sent(stage.write(drawn[task::tasks])) for task in range(tasks)]
            if rng.random() < 0.3:  # the parts are of the rendition before
                handed(controller, Told(), shards=rng.randint(1, 4))
            if rng.random() < 0.3:
                extra = rows(rng.randrange(25), word="other")
                with controller.open_writer("c") as other:
                    by_time[other.append_now(extra).time or 0] = told = told + multiset(extra)
            done = {"append": writer.append_staged, "upsert": writer.upsert_staged,
                    "overwrite": writer.overwrite_staged}[what](staged)  # fmt: skip
            before = told
            if what == "append":
                told = told + multiset(drawn)
            else:
                keys = {one["id"] for one in drawn} if what == "upsert" else {id_ for id_, _ in told}
                told = Counter({one: n for one, n in told.items() if one[0] not in keys}) + multiset(drawn)
            assert (done.time is None) == (told == before), f"step {step}: {what}"
            if done.time is not None:
                by_time[done.time] = told
            if rng.random() < 0.3:
                stage = held.enter_context(writer.stage())
    last: Counter[Any] = Counter()
    for time in range(max(by_time) + 1):
        last = by_time.get(time, last)
        assert contents(controller, time) == last, f"as of {time}"


def test_times_on_both_sides_of_a_handover_are_refused_and_those_of_one_side_go_there(client: persist.Client) -> None:
    controller, told = create(client), Told()
    write(controller, told, range(4))
    with controller.open_writer("c") as writer:
        made = controller.make_rendition("c", copy=True, shards=2).number
        controller.copy_rendition("c", made)
        start = controller.hand_over("c", made, at=8)
        across: Rows = [{"id": i, "word": "x", "_time": 4 + i, "_diff": 1} for i in range(8)]
        with writer.stage(lower=4, new_upper=12) as stage:
            staged = [stage.write(across)]
            with pytest.raises(persist.InvalidUsage, match=f"handed over at {start}"):
                writer.append_staged(staged)
        assert writer.fetch_upper() == persist.at(4), "nothing was written"
        with writer.stage(lower=4, new_upper=8) as before:
            writer.append_staged([before.write(across[:4])])
        controller.copy_rendition("c", made, to_end=True)
        with writer.stage(lower=8, new_upper=12) as after:
            assert after.ticket.rendition.number == made
            writer.append_staged([after.write(across[4:])])
    assert contents(controller) == told.contents(3) + multiset(across)


def test_a_producer_is_remembered_with_the_collection_whatever_is_handed_over(client: persist.Client) -> None:
    controller = create(client)
    with controller.open_writer("c") as writer, writer.stage() as stage:
        staged = [stage.write(rows(1, 2, 3))]
        writer.append_staged(staged, producer=("q", 4))
        handed(controller, Told(), shards=5)
        again = [stage.write(rows(1, 2, 3))]
        for call in (writer.append_staged, writer.upsert_staged, writer.overwrite_staged):
            with pytest.raises(persist.AlreadyProduced):
                call(again, producer=("q", np.int64(4)))  # type: ignore[arg-type]
        with controller.open_writer("c") as other:
            other.upsert_staged(again, producer=("q", 5))
    assert contents(controller) == multiset(rows(1, 2, 3))


def test_a_handover_between_what_was_prepared_and_the_commit(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = create(client)
    with controller.open_writer("c") as writer, writer.stage() as stage:
        writer.append_now(rows(*range(30), word="old"))
        staged, prepare = [stage.write(rows(*range(0, 60, 2), word="new"))], writer._prepare
        pending = [5]

        def late(*args: Any) -> None:
            prepare(*args)
            if pending:
                handed(controller, Told(), shards=pending.pop())

        monkeypatch.setattr(writer, "_prepare", late)
        assert writer.can_append(stage.ticket)
        done = writer.upsert_staged(staged)
        assert (done.updated, done.inserted) == (15, 15)
        assert not writer.can_append(stage.ticket)
    assert contents(controller) == multiset([*rows(*range(1, 30, 2), word="old"), *rows(*range(0, 60, 2), word="new")])
    assert controller.describe("c").active.number == 2


def test_what_cannot_be_resumed_is_refused_in_words(client: persist.Client) -> None:
    controller = create(client)
    controller.create("other", SCHEMA, mode="compare_and_append")
    controller.create("definite", SCHEMA, mode="append")
    with controller.open_writer("definite") as definite, pytest.raises(persist.InvalidUsage, match="identical data"):
        definite.stage()
    with controller.open_writer("c") as writer, controller.open_writer("other") as other, writer.stage() as stage:
        staged = stage.write(rows(1))
        with pytest.raises(persist.InvalidUsage, match="same collection"):
            other.resume_stage(stage.ticket)
        with pytest.raises(persist.InvalidUsage, match="cannot be pickled"):
            pickle.dumps(stage)
        writer.resume_stage(stage.ticket).close()
        with pytest.raises(persist.LeaseExpired, match="Write again"):
            writer.append_staged([staged])
        assert writer.fetch_upper() == persist.at(0)


def test_a_rendition_that_was_dropped_meanwhile_has_no_parts_left_to_append(client: persist.Client) -> None:
    controller = create(client)
    with controller.open_writer("c") as writer:
        writer.append_now(rows(1))
        stage = writer.stage()
        staged, other = [stage.write(rows(*range(2, 500)))], stage.write(rows(*range(500, 900)))
        handed(controller, Told(), shards=2)
        writer.append_now(rows(2))
        controller.alter("c", retention=0)
        for _ in range(3):
            controller.tend("c")
        assert [one.number for one in controller.describe("c").renditions] == [2]
        assert writer.append_staged(staged).count == 498, "they are still there"
        client.blob.delete_many([blob_key(one.shard, part.key) for one in other.staged for part in one.parts])
        with pytest.raises(persist.LeaseExpired, match="dropped"):
            writer.append_staged([other])
    assert contents(controller) == multiset(rows(1, 2, *range(2, 500)))
