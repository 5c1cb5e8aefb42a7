"""Upsert, delete and append_now, one call at a time: what they answer, what they refuse, and how they lose a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

import persist_lib as persist
from persist_lib.core.formats import CREATED, SCHEMAS_SAY_MORE
from persist_lib.errors import (
    Determinate,
    DiffOverflow,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    Missing,
    SchemaMismatch,
    TimedOut,
    UpperMismatch,
)
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome, Rival, Script, contents_of
from tests.worlds import SCHEMA, SMALL, WIDER, Storm, World, row


def one(id_: int, word: str | None = "w") -> dict[str, Any]:
    return {"id": id_, "word": word}


def contents(world: World, shard: str = "s") -> dict[tuple[Any, ...], int]:
    client = world.client()
    with client.open_reader(shard) as read:
        return dict(contents_of(read.snapshot(diff=True).to_arrow()))


def counts(done: persist.Changed) -> tuple[int, int, int, int]:
    return done.inserted, done.updated, done.unchanged, done.deleted


def test_an_upsert_says_what_became_of_each_key(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    first = write.upsert([one(1, "a"), one(2, "b")])
    assert (counts(first), first.count, first.time, first.upper) == ((2, 0, 0, 0), 2, 0, persist.at(1))
    second = write.upsert([one(1, "a"), one(2, "c"), one(3, None)])
    assert (counts(second), second.count, second.time) == ((1, 1, 1, 0), 3, 1)
    gone = write.delete([1, 9])
    assert (counts(gone), gone.count, gone.upper) == ((0, 0, 1, 1), 1, persist.at(3))
    assert contents(world) == {(2, "c"): 1, (3, None): 1}
    assert isinstance(gone, persist.Appended)


def test_what_changes_nothing_writes_nothing(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.upsert([one(1)])
    before = world.bytes("s")
    for done in (write.upsert([one(1), one(1)]), write.upsert([]), write.delete([7]), write.delete([])):
        assert (done.count, done.attempts, done.time, done.upper, done.token) == (0, 0, None, persist.at(1), b"")
    assert write.append_now([]).upper == persist.at(1)
    assert world.bytes("s") == before


def test_a_key_with_several_rows_has_one_afterwards(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1, "a", diff=3), row(1, "b"), row(1, "c", diff=-2), row(2, "x", diff=5)], 0, 1)
    assert counts(write.upsert([one(1, "b"), one(3)])) == (1, 1, 0, 0)
    assert contents(world) == {(1, "b"): 1, (2, "x"): 5, (3, "w"): 1}
    assert counts(write.delete([2])) == (0, 0, 0, 1)
    assert contents(world) == {(1, "b"): 1, (3, "w"): 1}


def test_the_same_key_twice_is_refused_with_the_keys(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    before = world.bytes("s")
    twice = [one(n, word) for n in range(40) for word in ("a", "b")]
    with pytest.raises(InvalidUsage, match=r"different rows for .*35 others.*keep one") as told:
        write.upsert([*twice, one(50), one(50)])
    assert (told.value.keys, told.value.count) == ([{"id": n} for n in range(5)], 40)
    assert world.bytes("s") == before


@pytest.mark.parametrize(
    ("rows", "kind", "says"),
    [
        (None, InvalidUsage, "updates are an Arrow table"), ("x", InvalidUsage, "updates are an Arrow table"),
        (one(1), InvalidUsage, "Put a single row into a list"), ([{"id": 1}], SchemaMismatch, "missing"),
        ([{**one(1), "no": 1}], SchemaMismatch, "not in the schema"), ([one(None)], InvalidUsage, "not null"),  # type: ignore[arg-type]
        ([one("x")], SchemaMismatch, "takes no str"), ([{**one(1), "_time": 5}], InvalidUsage, "next time itself"),  # type: ignore[arg-type]
        ([{**one(1), "_diff": -1}], InvalidUsage, "no _diff other than 1"),
        (pl.LazyFrame({"id": [1]}), InvalidUsage, "lazy"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_cannot_be_upserted_are_typed_errors(world: World, rows: Any, kind: type, says: str) -> None:
    write = world.client().open_writer("s", SCHEMA)
    before = world.bytes("s")
    with pytest.raises(kind, match=says):
        write.upsert(rows)
    assert world.bytes("s") == before


def test_rows_come_in_many_shapes(world: World) -> None:
    write, read = world.client().open_shard("s", SCHEMA)

    class Key(BaseModel):
        id: int

    class Word(BaseModel):
        word: str

    rows: list[Any] = [
        pa.table({"word": ["a"], "id": [1]}), pa.record_batch({"id": [2], "word": ["b"]}),
        pd.DataFrame({"id": [3], "word": ["c"]}), pl.DataFrame({"id": [4], "word": ["d"]}),
        [one(np.int64(5), "e")], [({"id": 6}, {"word": "f"})], iter([one(7, "g")]), [(Key(id=8), Word(word="h"))],  # type: ignore[arg-type]
    ]  # fmt: skip
    for given in rows:
        assert counts(write.upsert(given)) == (1, 0, 0, 0)
    again = read.snapshot(diff=True).to_arrow()  # with `_diff`, which is 1 everywhere
    assert counts(write.upsert(again)) == (0, 0, 8, 0)
    assert counts(write.delete(again.select(["id", "_diff"]))) == (0, 0, 0, 8)


def test_append_now_takes_the_next_time(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.advance_upper(7)
    done = write.append_now([one(1), {**one(1), "_diff": 2}, one(2, "b")])
    assert (done.upper, done.count, type(done)) == (persist.at(8), 2, persist.Appended)
    assert contents(world) == {(1, "w"): 3, (2, "b"): 1}
    with pytest.raises(InvalidUsage, match="next time itself"):
        write.append_now([row(1, time=3)])


def test_a_closed_shard_a_full_one_and_a_closed_handle_are_refused(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    verbs: list[Callable[[persist.WriteHandle], object]] = [
        lambda w: w.upsert([one(1)]), lambda w: w.delete([1]), lambda w: w.append_now([one(1)]), lambda w: w.upsert([]),
    ]  # fmt: skip
    write.advance_upper(2**64 - 1)
    for verb in verbs[:3:2]:
        with pytest.raises(InvalidUsage, match="no next time"):
            verb(write)
    write.finish()
    for verb in verbs:
        with pytest.raises(UpperMismatch, match="closed for writing"):
            verb(write)
    write.close()
    for verb in verbs:
        with pytest.raises(LeaseExpired, match="was closed"):
            verb(write)
    client.finish("s")
    for verb in verbs:
        with pytest.raises(persist.ShardFinished):
            verb(client.open_writer("s", SCHEMA))


def test_an_older_schema_changes_rows_whose_new_columns_are_null_and_no_others(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    write.upsert([one(1), one(3)])
    client.evolve_schema("s", WIDER)
    assert counts(write.upsert([one(1, "b")])) == (0, 1, 0, 0)
    assert write.delete([3]).deleted == 1
    write.append_now([one(2)])
    newer = client.open_writer("s", WIDER)
    assert counts(newer.upsert([{**one(1, "b"), "more": 3}, {**one(2), "more": None}])) == (0, 1, 1, 0)
    for verb in (lambda: write.upsert([one(1, "c"), one(2, "c")]), lambda: write.delete([1])):
        with pytest.raises(SchemaMismatch, match=r"has the columns \['more'\] since .* something in them.*new writer"):
            verb()
    assert contents(world) == {(1, "b", 3): 1, (2, "w", None): 1}


def test_history_that_was_given_up_does_not_matter(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    for n in range(6):
        write.upsert([one(1, str(n)), one(n + 10)])
    with client.open_reader("s") as read:
        read.downgrade_since(6)
    client.maintain("s")
    assert client.inspect("s").state.since == persist.at(6)
    assert counts(write.upsert([one(1, "last"), one(10)])) == (0, 1, 1, 0)
    assert contents(world)[1, "last"] == 1


# --- races -----------------------------------------------------------------------------------------------------------


def test_a_rival_s_rows_are_replaced_too(world: World) -> None:
    rival = world.rival
    ours = world.client(rival=rival).open_writer("s", SCHEMA)
    theirs = world.client().open_writer("s", SCHEMA)
    ours.upsert([one(1, "first")])
    for n in range(3):
        rival.before_next(lambda n=n: theirs.upsert([one(1, f"theirs {n}"), one(2, f"theirs {n}")]))  # type: ignore[misc]
    done = ours.upsert([one(1, "ours")])
    assert (rival.waiting, done.time, counts(done)) == (0, 4, (0, 1, 0, 0))
    assert contents(world) == {(1, "ours"): 1, (2, "theirs 2"): 1}
    rival.before_next(lambda: theirs.upsert([one(1, "same")]))
    assert counts(ours.upsert([one(1, "same")])) == (0, 0, 1, 0)
    rival.before_next(lambda: theirs.delete([1]))
    assert counts(ours.delete([1])) == (0, 0, 1, 0)


def test_after_a_lost_race_only_what_is_new_is_read(world: World) -> None:
    ours = world.client(SMALL, rival=world.rival).open_writer("s", SCHEMA)
    theirs = world.client(SMALL).open_writer("s", SCHEMA)
    for n in range(5):
        ours.compare_and_append([row(i, str(n), n) for i in range(100)], n, n + 1)
    plain = ours.upsert([one(5, "x")])
    assert plain.cost.gets == 5  # an upsert that is not raced reads a part of each append
    world.rival.before_next(lambda: theirs.compare_and_append([row(7, "theirs", 6)], 6, 7))
    raced = ours.upsert([one(5, "y")])
    assert (world.rival.waiting, raced.upper) == (0, persist.at(8))
    assert raced.cost.gets == 6  # with that of the upsert before; what was appended in between has only key 7
    world.rival.before_next(lambda: theirs.compare_and_append([row(5, "theirs", 8)], 8, 9))
    assert ours.upsert([one(5, "z")]).cost.gets == 7 + 1
    assert contents(world)[5, "z"] == 1


def test_what_a_compaction_moved_forward_is_not_taken_for_new(world: World) -> None:
    """The rival's append and a compaction to its time, in which an older row looks as if it were newer."""
    ours = world.client(SMALL, rival=world.rival).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    theirs = other.open_writer("s", SCHEMA)
    ours.upsert([one(1, "old"), one(2, "old")])

    def act() -> None:
        theirs.upsert([one(n, "theirs" * 99) for n in range(3, 999)])
        other.set_retention("s", 0)
        other.maintain("s")
        state = other.inspect("s").state
        assert state.since == persist.at(1)
        assert [batch.lower for batch in state.trace if batch.count] == [persist.at(0)]

    world.rival.before_next(act)
    assert counts(ours.upsert([one(1, "new"), one(2, "old")])) == (0, 1, 1, 0)
    assert [row for row in contents(world) if row[0] < 3] == [(1, "new"), (2, "old")]


def test_objects_that_are_collected_meanwhile_are_looked_for_in_a_newer_state(world: World) -> None:
    plan = Vanishing()
    ours = world.client(SMALL, plan=plan).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    for n in range(4):
        ours.upsert([one(1, str(n)), one(n + 10)])

    def act() -> None:
        before = {entry.key for entry in world.inner.blob.list("s/")}
        other.maintain("s")
        assert len(before - {entry.key for entry in world.inner.blob.list("s/")}) > 1

    plan.acts = [act]
    assert counts(ours.upsert([one(1, "new"), one(10)])) == (0, 1, 1, 0)
    assert not plan.acts
    assert contents(world)[1, "new"] == 1


class Vanishing:
    """A plan that acts before the next read of an object."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []

    def decide(self, operation: Operation) -> Fate:
        if operation.kind == "get" and self.acts:
            self.acts.pop()()
        return Fate()


def test_an_object_that_is_really_gone_is_damage(world: World) -> None:
    write = world.client(SMALL).open_writer("s", SCHEMA)
    write.upsert([one(1)])
    for entry in list(world.inner.blob.list("s/")):
        world.inner.blob.delete(entry.key)
    with pytest.raises(Missing):
        write.upsert([one(1, "b")])


def test_who_loses_all_the_time_is_told_so(world: World) -> None:
    ours = world.client(rival=world.rival).open_writer("s", SCHEMA)
    theirs = world.client().open_writer("s", SCHEMA)
    ours.upsert([one(1)])

    def again() -> None:
        theirs.append_now([one(2)])
        world.clock.advance(0.4)
        world.rival.before_next(again)

    world.rival.before_next(again)
    with pytest.raises(TimedOut, match=r"wrote nothing|changed nothing") as told:
        ours.upsert([one(1, "b")], timeout=2)
    assert told.value.timeout_s == 2
    world.rival._acts.clear()
    assert contents(world)[1, "w"] == 1


# --- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
def test_a_doubt_that_can_be_resolved_is_no_doubt(world: World, outcome: Outcome) -> None:
    plan = Script({("compare_and_set", 3): outcome})
    write = world.client(plan=plan).open_writer("s", SCHEMA)
    done = write.append_now([one(1)])
    assert plan.seen["compare_and_set"] >= 3
    assert (done.upper, contents(world)) == (persist.at(1), {(1, "w"): 1})


@pytest.mark.parametrize("arrives", ["before", "never", "late", "while it is repeated"])
@pytest.mark.parametrize("then", ["nothing", "others", "many others"])
@pytest.mark.parametrize("verb", ["append_now", "upsert"])
def test_a_call_in_doubt_is_repeated_with_its_token_and_never_doubles(
    world: World, arrives: str, then: str, verb: str
) -> None:
    storm, late, inner = Storm(Outcome.LOST_UNKNOWN), list[Callable[[], object]](), world.inner.consensus

    class Keeping(Rival):
        def compare_and_set(self, key: Any, expected: Any, data: bytes) -> bool:
            if storm.blows and not late:
                late.append(lambda: inner.compare_and_set(key, expected, data))
                if arrives == "before":
                    late[0]()
            return super().compare_and_set(key, expected, data)

        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            if storm.blows and operation.kind == "compare_and_set":
                raise Indeterminate("no answer")
            return call()

    ours = world.client(persist.Config(timeout_s=1), rival=Keeping(inner)).open_writer("s", SCHEMA)
    theirs = world.client().open_writer("s", SCHEMA)
    ours.append_now([one(0)])
    storm.blows = True
    with pytest.raises((Indeterminate, Determinate)) as told:
        getattr(ours, verb)([one(1, "ours")])
    storm.blows = False
    if not isinstance(told.value, Indeterminate):
        pytest.fail(str(told.value))
    rivals = {"nothing": 0, "others": 1, "many others": 5}[then]
    for n in range(rivals):
        theirs.upsert([one(2, f"theirs {n}")])
    if arrives == "late":
        late[0]()
    token = told.value.token
    if arrives == "while it is repeated":
        world.rival.before_next(late[0])
    again = world.client(rival=world.rival).open_writer(
        "s", SCHEMA
    )  # another handle, as in a process that started again
    done = getattr(again, verb)([one(1, "ours")], token=token)
    once = getattr(ours, verb)([one(1, "ours")], token=done.token or token)
    assert once.upper == done.upper or verb == "upsert"
    expected = {(0, "w"): 1, (1, "ours"): 1, **({(2, f"theirs {rivals - 1}"): 1} if rivals else {})}
    assert contents(world) == expected


def test_only_a_token_of_such_a_call_is_taken(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    for token in (b"mine", b"x" * 36, b"next" + bytes(32)):
        with pytest.raises(InvalidUsage, match="only a token that the Indeterminate"):
            write.upsert([one(1)], token=token)
    for wrong in ("text", 5, b""):
        with pytest.raises(InvalidUsage, match="token"):
            write.append_now([one(1)], token=wrong)  # type: ignore[arg-type]


def test_a_fault_before_anything_is_sent_is_certain(world: World) -> None:
    plan = Storm(Outcome.LOST_UNKNOWN, "get", "scan")
    write = world.client(persist.Config(timeout_s=1, inline_bytes=0), plan=plan).open_writer("s", SCHEMA)
    write.upsert([one(1)])
    plan.blows = True
    with pytest.raises(Determinate, match=r"appended nothing|Nothing was changed"):
        write.upsert([one(1, "b")])
    plan.blows = False
    assert contents(world) == {(1, "w"): 1}


def test_a_lease_that_ended_is_renewed_by_the_call_itself(world: World) -> None:
    client = world.client(persist.Config(lease_ms=10_000))
    write = client.open_writer("s", SCHEMA)
    write.upsert([one(1)])
    former = write.id
    world.clock.advance(60)
    world.client().expire("s")
    assert counts(write.upsert([one(1, "b")])) == (0, 1, 0, 0)
    assert write.id != former


def test_a_multiplicity_that_no_update_can_retract_is_told(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1, "x", diff=-(2**63)), row(2)], 0, 1)
    with pytest.raises(DiffOverflow, match="add to it first"):
        write.upsert([one(1)])
    write.append_now([{**one(1, "x"), "_diff": 2}])
    assert counts(write.upsert([one(1, "x"), one(2)])) == (0, 1, 1, 0)
    assert contents(world) == {(1, "x"): 1, (2, "w"): 1}


def test_shards_are_created_in_a_format_that_has_constraints() -> None:
    assert CREATED >= SCHEMAS_SAY_MORE
