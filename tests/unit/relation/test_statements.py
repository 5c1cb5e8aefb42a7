"""Changes by key and appends at the next time, over every carrier: what they answer, refuse, and make of a race."""

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
from persist_lib.testing import Outcome, Script
from tests.circles import by_day
from tests.unit.relation.carriers import (
    KINDS,
    UNIQUE,
    WIDER,
    Carrier,
    Cut,
    over_all,
    over_handles,
    racing,
    rows,
    time_of,
)
from tests.worlds import DiesAt, Killed, Storm, World


def one(id_: int, word: str | None = "w") -> dict[str, Any]:
    return {"id": id_, "word": word}


def counts(done: Any) -> tuple[int, int, int, int]:
    return done.inserted, done.updated, done.unchanged, done.deleted


@over_all
def test_a_change_says_what_became_of_each_key_and_earlier_times_stay(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    first = relation.upsert([one(1, "a"), one(2, "b")])
    assert (counts(first), first.count) == ((2, 0, 0, 0), 2)
    second = relation.upsert([one(1, "a"), one(2, "c"), one(3, None)])
    assert (counts(second), second.count) == ((1, 1, 1, 0), 3)
    gone = relation.delete([1, 9])
    assert (gone.deleted, gone.count) == (1, 1)
    assert gone.time > second.time > first.time
    added = relation.now([one(2, "c"), one(7)])
    assert (added.count, time_of(added) > gone.time) == (2, True)
    expected = {
        first.time: {(1, "a"): 1, (2, "b"): 1}, second.time: {(1, "a"): 1, (2, "c"): 1, (3, None): 1},
        gone.time: {(2, "c"): 1, (3, None): 1}, time_of(added): {(2, "c"): 2, (3, None): 1, (7, "w"): 1},
    }  # fmt: skip
    for _ in range(2):
        assert {time: relation.contents(time) for time in expected} == expected
        relation.tend()


@over_all
def test_what_changes_nothing_writes_nothing(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.upsert([one(1)])
    before, newest = relation.contents(), relation.snapshot().as_of
    world.clock.advance(1)
    world.requests.clear()
    calls = (
        relation.upsert([one(1), one(1)]), relation.upsert([]), relation.delete([7]), relation.delete([]),
        relation.upsert([one(2)], dry_run=True), relation.delete([1], dry_run=True),
    )  # fmt: skip
    for done in calls[:4]:
        assert (done.count, done.time, done.token) == (0, None, b"")
    assert (calls[4].inserted, calls[5].deleted) == (1, 1)
    relation.now([])
    assert world.count(*KINDS) == 0
    assert (relation.contents(), relation.snapshot(newest).as_of) == (before, newest)


@over_all
def test_a_key_with_several_rows_has_one_afterwards(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.now([*rows(1, 1, 1, word="a"), one(1, "b"), *rows(2, 2, 2, 2, 2, word="x")])
    assert counts(relation.upsert([one(1, "b"), one(3)])) == (1, 1, 0, 0)
    assert relation.contents() == {(1, "b"): 1, (2, "x"): 5, (3, "w"): 1}
    assert counts(relation.delete([2])) == (0, 0, 0, 1)
    assert relation.contents() == {(1, "b"): 1, (3, "w"): 1}


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "none": (None, "updates are an Arrow table"), "text": ("x", "updates are an Arrow table"),
    "one dict": (one(1), "Put a single row into a list"), "a column less": ([{"word": "w"}], "missing"),
    "a column more": ([{**one(1), "no": 1}], "not in the schema"), "null": ([one(None)], "not null"),  # type: ignore[arg-type]
    "another type": ([one("x")], "takes no str"),   # type: ignore[arg-type]
    **{f"the time {time}": ([{**one(1), "_time": time}], "next time itself|have no _time") for time in (5, "now")},
    "lazy": (pl.LazyFrame({"id": [1]}), "lazy"),
}  # fmt: skip
ONLY_UPSERTS: dict[str, tuple[Any, str]] = {
    "a diff": ([{**one(1), "_diff": -1}], "no _diff other than 1"),
    "twice": ([one(n, word) for n in range(40) for word in "ab"], r"different rows for .*35 others.*keep one"),
}
BAD_KEYS: dict[str, tuple[Any, str]] = {
    "one": (4, "Put a single key into a list"),
    "another type": (["x"], "takes no str"),
    "not a key": ([{"no": 1}], "are not in the schema"),
    "null": ([None], "not null"),
}


@over_all
def test_rows_and_keys_that_cannot_be_are_typed_errors(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.upsert([one(77)])
    relation.contents()
    world.requests.clear()
    for bad, call in (
        (BAD_ROWS, relation.upsert), (BAD_ROWS, relation.now), (ONLY_UPSERTS, relation.upsert),
        (BAD_KEYS, relation.delete), (BAD_KEYS, lambda keys: relation.snapshot(keys=keys)),
    ):  # fmt: skip
        for what, (given, says) in bad.items():
            with pytest.raises(persist.InvalidUsage, match=says) as told:
                call(given)
            if what == "twice":
                assert (told.value.keys, told.value.count) == ([{"id": n} for n in range(5)], 40)
    for call in (relation.upsert, relation.now, relation.delete):
        for timeout in ("1", -1, float("nan"), True):
            with pytest.raises(persist.InvalidUsage, match="timeout"):
                call([], timeout=timeout)
    assert world.count(*KINDS) == 0
    assert relation.contents() == {(77, "w"): 1}


@over_all
def test_rows_come_in_many_shapes(world: World, carrier: Carrier) -> None:
    class Key(BaseModel):
        id: int

    class Word(BaseModel):
        word: str

    relation = carrier.make(world.client())
    shapes: list[Any] = [
        pa.table({"word": ["a"], "id": [1]}), pa.record_batch({"id": [2], "word": ["b"]}),
        pd.DataFrame({"id": [3], "word": ["c"]}), pl.DataFrame({"id": [4], "word": ["d"]}),
        [one(np.int64(5), "e")], [({"id": 6}, {"word": "f"})], iter([one(7, "g")]), [(Key(id=8), Word(word="h"))],  # type: ignore[arg-type]
    ]  # fmt: skip
    for given in shapes:
        assert counts(relation.upsert(given)) == (1, 0, 0, 0)
    again = relation.snapshot(diff=True).to_arrow()  # with `_diff`, which is 1 everywhere
    assert counts(relation.upsert(again)) == (0, 0, 8, 0)
    relation.now(again)
    assert set(relation.contents().values()) == {2}
    assert counts(relation.delete(again.select(["id", "_diff"]))) == (0, 0, 0, 8)


@over_all
def test_a_second_row_of_a_key_is_refused_and_nothing_written(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(), UNIQUE)
    relation.now(rows(*range(20), word="a"))
    for _ in range(2):
        for added in ([one(99), one(7, "b")], [one(30, "a"), one(30, "b")], rows(1, word="a")):
            with pytest.raises(persist.ConstraintViolated, match="unique"):
                relation.now(added)
        assert relation.contents() == {(n, "a"): 1 for n in range(20)}
        if carrier.shards:
            relation.hand_over(shards=3)
    relation.upsert([one(7, "b"), one(50, "b")])
    relation.delete([1, 99])
    assert relation.contents() == {(n, "b" if n in (7, 50) else "a"): 1 for n in (0, *range(2, 20), 50)}


@over_all
@pytest.mark.parametrize("when", ["closed handle", "read only"])
def test_who_may_not_write_is_refused_whatever_it_is(world: World, carrier: Carrier, when: str) -> None:
    relation = carrier.make(world.client())
    relation.upsert([one(1)])
    if when == "read only":
        relation = carrier.open(world.client(read_only=True))
    elif not carrier.mode:  # what `Tables` closed it opens again
        relation.write.close()
        relation.write.close()
    else:
        relation.client.close()
    world.requests.clear()
    calls: list[Callable[[], object]] = [
        lambda: relation.now([one(2)]), lambda: relation.upsert([one(1)]), lambda: relation.upsert([]),
        lambda: relation.delete([1]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((persist.InvalidUsage, persist.LeaseExpired), match=r"read_only|closed"):
            call()
    assert world.count(*KINDS) == 0


@over_handles
def test_what_is_closed_for_writing_refuses_also_what_changes_nothing(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.now([one(1)])
    relation.write.advance_upper(persist.TOP)
    for call in (
        lambda: relation.now([]), lambda: relation.now([one(1)]), lambda: relation.upsert([one(1)]),
        lambda: relation.upsert([]), lambda: relation.delete([7]),
    ):  # fmt: skip
        with pytest.raises(persist.UpperMismatch) as told:
            call()
        assert told.value.actual == persist.TOP


@over_handles
def test_older_columns_change_rows_whose_new_ones_are_null_and_no_others(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.upsert([one(1), one(3)])
    if carrier.shards:
        relation.controller.evolve("c", WIDER)
    else:
        relation.client.evolve_schema("c", WIDER)
    assert counts(relation.upsert([one(1, "b")])) == (0, 1, 0, 0)
    assert relation.delete([3]).deleted == 1
    relation.now([one(2)])
    newer = carrier.open(world.client())
    newer_write = newer.controller.open_writer("c") if carrier.shards else newer.client.open_writer("c", WIDER)
    assert counts(newer_write.upsert([{**one(1, "b"), "more": 3}, {**one(2), "more": None}])) == (0, 1, 1, 0)
    for verb in (lambda: relation.upsert([one(1, "c"), one(2, "c")]), lambda: relation.delete([1])):
        with pytest.raises(persist.SchemaMismatch, match=r"have something in them|something in them"):
            verb()
    assert newer.contents() == {(1, "b", 3): 1, (2, "w", None): 1}


@over_all
def test_history_that_was_given_up_does_not_matter(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    for n in range(6):
        relation.upsert([one(1, str(n)), one(n + 10)])
    relation.bound_history(0)
    assert counts(relation.upsert([one(1, "last"), one(10)])) == (0, 1, 1, 0)
    assert relation.contents()[1, "last"] == 1


# --- races -----------------------------------------------------------------------------------------------------------

RACES: dict[str, tuple[Any, Any, dict[Any, int]]] = {
    "an upsert of a key": (("upsert", [one(1, "theirs")]), ("upsert", [one(1, "ours")]), {(1, "ours"): 1}),
    "an upsert of the same row": (("upsert", [one(1, "same")]), ("upsert", [one(1, "same")]), {(1, "same"): 1}),
    "an upsert of what they add": (("now", [one(3)]), ("upsert", [one(3, "ours")]), {(1, "a"): 1, (3, "ours"): 1}),
    "a delete of what they add": (("now", [one(3, "theirs")]), ("delete", [1, 3]), {}),
    "an upsert of what they delete": (("delete", [1]), ("upsert", [one(1, "ours")]), {(1, "ours"): 1}),
    "an append to what they delete": (("delete", [1]), ("now", [one(1, "ours")]), {(1, "ours"): 1}),
    "both add": (("now", [one(1, "a")]), ("now", [one(1, "a")]), {(1, "a"): 3}),
}  # fmt: skip


@over_all
@pytest.mark.parametrize("race", RACES)
def test_what_another_writer_did_just_before_the_commit_is_seen(world: World, carrier: Carrier, race: str) -> None:
    (verb, theirs), (own, mine), after = RACES[race]
    ours, others = racing(world, carrier)
    others.upsert([one(1, "a")])
    world.rival.before_next(lambda: getattr(others, verb)(theirs))
    getattr(ours, own)(mine)
    assert world.rival.waiting == 0
    assert ours.contents() == others.contents() == after


@over_all
def test_a_constraint_that_another_writer_made_bind_refuses(world: World, carrier: Carrier) -> None:
    ours, others = racing(world, carrier, UNIQUE)
    world.rival.before_next(lambda: others.now([one(3, "theirs")]))
    with pytest.raises(persist.ConstraintViolated):
        ours.now([one(3, "ours")])
    assert world.rival.waiting == 0
    assert ours.contents() == {(3, "theirs"): 1}


@over_all
def test_many_that_are_first_do_not_starve_a_call_but_one_that_always_is_does(world: World, carrier: Carrier) -> None:
    ours, others = racing(world, carrier)
    for n in range(5):
        world.rival.before_next(lambda n=n: others.upsert([one(1, f"theirs {n}")]))  # type: ignore[misc]
    assert ours.upsert([one(1, "ours")]).updated == 1

    def again() -> None:
        others.now([one(2)])
        world.clock.advance(0.4)
        world.rival.before_next(again)

    world.rival.before_next(again)
    with pytest.raises(persist.TimedOut) as told:
        ours.upsert([one(1, "b")], timeout=2)
    assert told.value.timeout_s == 2 or carrier.shards, "today, a shard alone says the caller's"
    world.rival._acts.clear()
    assert others.contents()[1, "ours"] == 1


# --- outcomes --------------------------------------------------------------------------------------------------------


@over_all
@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
def test_a_doubt_that_can_be_resolved_is_no_doubt(world: World, carrier: Carrier, outcome: Outcome) -> None:
    others = carrier.make(world.client())
    others.now([one(0)])
    for n in range(1, 7):
        plan = Script({(kind, n): outcome for kind in KINDS})
        ours = carrier.open(world.client(plan=plan))
        done = ours.upsert([one(n)])
        assert ours.contents() == others.contents() == {(id_, "w"): 1 for id_ in range(n + 1)}
        assert (n, "w") in others.contents(time_of(done))
        assert (n, "w") not in others.contents(time_of(done) - 1)
        ours.close()


@over_all
@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize(("verb", "moved"), [("now", 7_200), ("upsert", -7_200)])
def test_a_call_in_doubt_is_done_once_by_its_token(
    world: World, carrier: Carrier, happens: bool, verb: str, moved: int
) -> None:
    """Also where the clock has moved since, and others have written. At which step it comes: tests/races."""
    outcome = Outcome.HAPPENED_UNKNOWN if happens else Outcome.LOST_UNKNOWN
    cut = Cut(outcome, *KINDS)
    others = carrier.make(world.client())
    ours = carrier.open(world.client(persist.Config(timeout_s=1), plan=cut))
    ours.upsert([one(0)])
    cut.is_armed = True
    with pytest.raises(persist.Indeterminate) as told:
        getattr(ours, verb)([one(1, "ours")])
    cut.is_armed = False
    others.upsert([one(2, "theirs")])
    world.clock.advance(moved)
    again = ours if happens else carrier.open(world.client())
    again.repeat(verb, [one(1, "ours")], told.value)
    assert others.contents() == {(0, "w"): 1, (1, "ours"): 1, (2, "theirs"): 1}


@over_all
def test_a_fault_before_anything_is_sent_is_certain(world: World, carrier: Carrier) -> None:
    plan = Storm(Outcome.LOST_UNKNOWN, "get", "scan", "heads")
    relation = carrier.make(world.client(persist.Config(timeout_s=1, inline_bytes=0), plan=plan))
    relation.upsert([one(1)])
    plan.blows = True
    with pytest.raises(persist.Determinate):
        relation.upsert([one(1, "b")])
    plan.blows = False
    assert relation.contents() == {(1, "w"): 1}


@over_all
def test_a_process_that_dies_at_any_request_leaves_all_or_nothing(world: World, carrier: Carrier) -> None:
    others = carrier.make(world.client())
    expected = dict.fromkeys(((n, "old") for n in range(6)), 1)
    others.now(rows(*range(6), word="old"))
    outcomes = []
    for number in by_day(range(1, 60), 4):
        plan = DiesAt(number)
        relation = carrier.open(world.client(plan=plan))
        plan.is_armed = True
        word = str(number)
        try:
            relation.upsert(rows(*range(6), word=word))
        except Killed:
            plan.is_armed = False
            found = others.contents()
            outcomes.append(found != expected)
            assert found in (expected, dict.fromkeys(((n, word) for n in range(6)), 1)), f"killed at request {number}"
            expected = dict(found)
        else:
            break
    plan.is_armed = False
    assert outcomes[0] is False
    assert outcomes == sorted(outcomes), "once it is committed it stays"
    others.upsert([one(0, "last")])
    assert others.contents()[0, "last"] == 1


@over_all
def test_leases_that_ended_do_not_matter_to_a_call(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(lease_ms=10_000)))
    relation.upsert([one(1)])
    world.clock.advance(3600)
    other = world.client()
    for shard in other.shards():
        other.expire(shard)
    assert counts(relation.upsert([one(1, "b")])) == (0, 1, 0, 0)
    assert carrier.open(other).contents() == {(1, "b"): 1}


@over_handles
def test_a_producer_appends_a_number_once_and_only_tokens_of_the_verb_are_taken(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    for number in (0, 1, 7):
        relation.now([one(number)], producer=("job", number))
        for of in (relation, carrier.open(world.client())):
            with pytest.raises(persist.AlreadyProduced) as told:
                of.now([one(number)], producer=("job", number))
            assert (told.value.producer, told.value.last) == ("job", number)
    assert sum(relation.contents().values()) == 3
    for token in (b"mine", b"x" * 36, b"next" + bytes(32)):
        with pytest.raises(persist.InvalidUsage, match="only a token that the Indeterminate"):
            relation.upsert([one(1)], token=token)
    for wrong in ("text", 5, b""):
        with pytest.raises(persist.InvalidUsage, match="token"):
            relation.now([one(1)], token=wrong)
    for producer in (
        "job",
        ("job",),
        ("job", "1"),
        ("", 1),
        ("a\nb", 1),
        ("é" * 101, 1),
        (7, 7),
        ("q", -1),
        ("q", True),
    ):
        with pytest.raises(persist.InvalidUsage, match="producer"):
            relation.now([one(1)], producer=producer)
