"""Staged writes over a shard and collections: what they take and refuse, and that an answer is appended once."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog.writing import Active
from persist_lib.core import commands as c
from persist_lib.errors import Indeterminate
from persist_lib.frontier import at
from persist_lib.relation.differences import DELETE
from persist_lib.relation.verbs import Turn
from tests.late import AtStep, Lost
from tests.worlds import SCHEMA, SMALL, World, row

Rows = list[dict[str, Any]]
INLINE = persist.Config()
UNIQUE = persist.Schema(SCHEMA.key, {"word": "string"}, unique=True)
SIZES = pytest.mark.parametrize("config", [INLINE, SMALL], ids=["inline", "objects"])
CARRIERS = pytest.mark.parametrize("shards", [0, 1, 3], ids=["shard", "collection of 1", "collection of 3"])
VERBS = pytest.mark.parametrize("verb", ["append_staged", "upsert_staged", "overwrite_staged"])


def opened(client: persist.Client, shards: int, schema: persist.Schema = SCHEMA) -> Any:
    """A writer of a shard, or of a collection of so many."""
    if not shards:
        return client.open_writer("c", schema)
    controller = client.controller()
    if "c" not in controller.list():
        controller.create("c", schema, shards=shards, mode="compare_and_append")
    return controller.open_writer("c")


def rows(*ids: int, word: str = "ours") -> Rows:
    return [{"id": id_, "word": word} for id_ in ids]


def contents(world: World, shards: int) -> dict[tuple[int, str], int]:
    client = world.client()
    with client.controller().open_reader("c") if shards else client.open_reader("c") as read:
        return {(row["id"], row["word"]): row["_diff"] for row in read.snapshot(diff=True).to_arrow().to_pylist()}


def ours(*ids: int) -> dict[tuple[int, str], int]:
    return {(id_, "ours"): 1 for id_ in ids}


@SIZES
@CARRIERS
@VERBS
def test_what_is_passed_again_is_there_once(world: World, config: persist.Config, shards: int, verb: str) -> None:
    with opened(world.client(config), shards) as write:
        stage = write.stage()
        a, b, other = stage.write(rows(1, 2, 3, 4)), stage.write(rows(5, 6, 7)), stage.write(rows(8, 9))
        done = getattr(write, verb)([a, b])
        write.upsert(rows(1, word="theirs"))
        for again in ([a, b], [b, a], [a], [b]):
            repeated = getattr(write, verb)(again)
            assert (repeated.upper, repeated.count) == (done.upper, 0)
            assert getattr(repeated, "time", None) == getattr(done, "time", None)
        before = {**ours(2, 3, 4, 5, 6, 7), (1, "theirs"): 1}
        assert contents(world, shards) == before
        with pytest.raises(
            persist.InvalidUsage, match=r"was appended before.*others of this call were not.*pass those"
        ):
            getattr(write, verb)([a, other])
        assert contents(world, shards) == before, "nothing of it"
        getattr(write, verb)([other])
        stage.close()
        assert getattr(write, verb)([other]).count == 0, "its stage is closed, and the shard remembers its last appends"
        expected = ours(8, 9) if verb == "overwrite_staged" else before | ours(8, 9)
        assert contents(world, shards) == expected


@CARRIERS
@pytest.mark.parametrize(
    ("config", "schema", "late"),
    [(INLINE, SCHEMA, "it arrives"), (INLINE, UNIQUE, "it is repeated"), (SMALL, SCHEMA, "it is repeated")],
    ids=["inline", "inline with constraints", "objects"],
)
def test_it_is_there_once_at_whichever_step_of_the_second_call_the_first_comes_through(
    world: World, config: persist.Config, shards: int, schema: persist.Schema, late: str
) -> None:
    lost, at_step = Lost(world), AtStep(world)
    config = config.model_copy(update={"timeout_s": 1.0})
    first, second = (opened(world.client(config, rival=rival), shards, schema) for rival in (lost, at_step))
    first.upsert(rows(-100))  # a collection's first promise is there already; the next one takes an id
    for step in range(60):
        with first.stage() as stage:
            staged = [stage.write(rows(*range(10 * step, 10 * step + 5))), stage.write(rows(10 * step + 5))]
            first.upsert(rows(-1 - step))  # so that it has its ids, and knows the newest versions
            lost.armed, lost.kept = True, []
            with pytest.raises(Indeterminate):
                first.append_staged(staged, timeout=1)
            lost.armed = False
            at_step.act = lost.kept[0] if late == "it arrives" else partial(first.append_staged, staged, timeout=1)
            at_step.step = step
            assert second.append_staged(staged).upper == second.fetch_upper()
        if at_step.step >= 0:
            break
    at_step.step = -1
    expected = [10 * n + m for n in range(step + 1) for m in range(6)]
    assert contents(world, shards) == ours(*expected, *range(-1 - step, 0), -100)


def test_an_answer_is_not_appended_again_once_its_objects_are_gone(world: World) -> None:
    """Else the shard would refer to objects that are not there, and could not be read any more."""
    client = world.client(SMALL)
    write = client.open_writer("c", SCHEMA)
    stage = write.stage()
    first = stage.write(rows(0))
    write.append_staged([first])
    for id_ in range(1, 8):
        write.append_staged([stage.write(rows(id_))])
    client.set_retention("c", 0)
    for _ in range(3):
        client.maintain("c")
    state = client.inspect("c").state
    key = first.parts[0].key
    assert key not in state.garbage
    assert all(key not in batch.keys for batch in state.trace), "it was compacted, deleted and forgotten"
    assert write.append_staged([first]).upper == at(1)
    assert contents(world, 0) == ours(*range(8))


def test_heartbeats_and_other_appends_of_a_stage_keep_what_it_remembers(world: World) -> None:
    write = world.client().open_writer("c", SCHEMA)
    stage = write.stage(lease_s=60)
    staged = [stage.write(rows(id_)) for id_ in range(3)]
    for one in staged:
        write.append_staged([one])
    until = write.machine.state.writers[stage.id].lease_until
    write.machine.commit(lambda _state, _now: c.Heartbeat((stage.id,), until + 1))
    assert write.machine.fetch().state.writers[stage.id].lease_until > until, "extended"
    assert {outcome.token for outcome in write.machine.state.writers[stage.id].staged} == {one.id for one in staged}
    for given in (staged, *([one] for one in staged)):
        assert write.append_staged(given).count == 0
    assert contents(world, 0) == ours(0, 1, 2)


def test_a_stage_that_remembers_many_answers_is_not_for_a_stream_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist_lib.relation.stage.STAGED_MOST", 2)
    write = world.client().open_writer("c", SCHEMA)
    with write.stage() as stage:
        for id_ in range(2):
            assert write.can_append(stage.local)
            write.append_staged([stage.write(rows(id_))])
        assert not write.can_append(stage.local)
        write.append_staged([stage.write(rows(2))])
    assert contents(world, 0) == ours(0, 1, 2)


def test_shards_that_were_read_before_and_after_the_first_call_are_read_again(world: World) -> None:
    """It came through in between, in all of them at once: that is no part of the answers."""
    first, second = (opened(world.client(), 3) for _ in range(2))
    with first.stage() as stage:
        a, b = stage.write(rows(*range(20))), stage.write(rows(*range(20, 40)))
        timeline = second._timeline()
        turn = Turn(persist.at(0), (), lambda table: (table,), Active(timeline, timeline.last))
        machines = [second.client.machine(name) for name in timeline.last.rendition.names]
        for machine in machines:
            machine.fetch()
        done = first.append_staged([a, b])
        machines[0].fetch()
        found = second._appended_before([a], turn)
        assert found is not None
        assert found.upper == done.upper


# --- what is staged, and what is refused -----------------------------------------------------------------------------


@CARRIERS
def test_rows_may_have_times_of_their_own(world: World, shards: int) -> None:
    with opened(world.client(SMALL), shards) as write:
        with write.stage(lower=0, new_upper=10) as stage:
            staged = [stage.write([row(1, time=3), row(2, time=9)]), stage.write([row(1, time=4, diff=-1)])]
            with pytest.raises(persist.InvalidUsage, match=r"\[0, 10\)"):
                stage.write([row(1, time=10)])
            with pytest.raises(persist.InvalidUsage, match="`at`"):
                write.append_staged(staged, at=10)
            with pytest.raises(persist.InvalidUsage, match="times of their own"):
                write.upsert_staged(staged)
            assert (write.append_staged(staged).upper, write.append_staged(staged).count) == (at(10), 0)
            with pytest.raises(persist.UpperMismatch):
                write.append_staged([stage.write([row(3, time=3)])])
        with write.stage(lower=10, new_upper=12) as stage:
            assert write.append_staged([stage.write([])]).upper == at(12), "bounds complete their times"
        with write.stage() as stage:
            with pytest.raises(persist.InvalidUsage, match="_time"):
                stage.write([row(1, time=3)])
            with pytest.raises(persist.UpperMismatch, match=r"\[12\]"):
                write.append_staged([stage.write(rows(1))], at=11)
            assert write.append_staged([stage.write(rows(7))], at=40).upper == at(41)
            assert write.append_staged([]).count == 0, "nothing staged is no append"
    client = world.client()
    with client.controller().open_reader("c") if shards else client.open_reader("c") as read:
        assert [read.snapshot(time).count() for time in (2, 3, 4, 9, 40)] == [0, 1, 0, 1, 2]


@CARRIERS
def test_an_upsert_begins_anew_when_another_writer_was_first(world: World, shards: int) -> None:
    write, theirs = opened(world.client(SMALL, rival=world.rival), shards), opened(world.client(), shards)
    theirs.append_now(rows(1, 2, 9, word="old"))
    with write.stage() as stage:
        staged = [stage.write(rows(1, 3)), stage.write([{"id": 2, "word": None, "_diff": DELETE}])]
        world.rival.before_next(lambda: theirs.upsert(rows(1, word="theirs")))
        answer = write.upsert_staged(staged)
        assert (answer.inserted, answer.updated, answer.deleted, answer.time) == (1, 1, 1, 2)
        assert contents(world, shards) == {**ours(1, 3), (9, "old"): 1}
        staged = [stage.write(rows(*range(10)))]
        world.rival.before_next(lambda: theirs.append_now(rows(77)))
        write.overwrite_staged(staged)
    assert world.rival.waiting == 0
    assert contents(world, shards) == ours(*range(10))


@CARRIERS
def test_constraints_hold_over_all_tasks(world: World, shards: int) -> None:
    with opened(world.client(), shards, UNIQUE) as write, write.stage() as stage:
        write.append_staged([stage.write(rows(1, 2)), stage.write(rows(3))])
        for bad in (
            [stage.write(rows(4, word="a")), stage.write(rows(4, word="b"))],
            [stage.write(rows(5)), stage.write(rows(2, word="again"))],
        ):
            with pytest.raises(persist.ConstraintViolated, match="unique"):
                write.append_staged(bad)
        with pytest.raises(persist.InvalidUsage, match="different rows"):
            write.upsert_staged([stage.write(rows(6, word="a")), stage.write(rows(6, word="b"))])
        deleted = stage.write([{"id": 1, "word": "a", "_diff": DELETE}])
        with pytest.raises(persist.InvalidUsage, match="both to be written and to be deleted") as caught:
            write.upsert_staged([stage.write(rows(1, 2)), deleted])
        assert caught.value.keys == [{"id": 1}]
    assert contents(world, shards) == ours(1, 2, 3)


@CARRIERS
def test_wrong_arguments_are_refused_before_anything_is_done(world: World, shards: int) -> None:
    client = world.client()
    write = opened(client, shards)
    if shards:
        client.controller().create("o", SCHEMA, mode="compare_and_append")
    other = client.controller().open_writer("o") if shards else client.open_writer("o", SCHEMA)
    with write.stage() as stage, other.stage() as theirs:
        staged = stage.write(rows(1))
        for verb in (write.append_staged, write.upsert_staged, write.overwrite_staged):
            for value in ("x", [1], {"a": 1}, None, 7, [staged, None], [getattr(staged, "parts", staged.rows)]):
                with pytest.raises(persist.InvalidUsage):
                    verb(value)
            with pytest.raises(persist.InvalidUsage, match="twice"):
                verb([staged, pickle.loads(pickle.dumps(staged))])
            with pytest.raises(persist.InvalidUsage, match=r"another collection|shard o"):
                verb([theirs.write(rows(1))])
        for lease in (0, -1, "x", None, float("nan"), 1e12):
            with pytest.raises(persist.InvalidUsage):
                write.stage(lease_s=lease)
        with pytest.raises(persist.InvalidUsage, match="both"):
            write.stage(lower=3)
        if shards:  # today: of a shard, such a stage closes it
            with pytest.raises(persist.InvalidUsage, match="the end of all times"):
                write.stage(lower=0, new_upper=persist.TOP)
        with pytest.raises(persist.InvalidUsage, match=r"pickle|ticket"):
            pickle.dumps(stage)
        assert write.fetch_upper() == at(0)
        assert write.append_staged([staged]).count == 1
