"""Tables that keep deleted keys: changes in any order, in any batches, again, by two writers, equal the sorted stream.

The model is what each key got, and what is remembered of deletes. While nothing is forgotten that says nothing beyond
the first; then a row that may be older than what is forgotten is refused, and so not delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import persist_lib as persist
from persist_lib.relation.deleted_keys import DELETED_AT, FLOOR
from persist_lib.testing import Rival
from persist_lib.timeline import Tables
from tests.properties.uncached import NothingKept
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "word": "string"}, unique=True)
SPAN_S = 10.0
IDS, SEQS = st.integers(0, 3), st.integers(0, 9)
CHANGES = st.lists(st.tuples(IDS, SEQS, st.booleans()), min_size=1, max_size=5)
"""Of a key, at a value of the column, and whether it is a delete. One of one value says the same each time."""
WHO = st.integers(0, 1)
DOORS = st.sampled_from(["table", "transaction"])
Change = tuple[int, int, bool]


def row(id_: int, seq: int) -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": f"{id_} at {seq}"}


def parts(changes: list[Change]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows to upsert, and the deletes."""
    upserts = [row(id_, seq) for id_, seq, is_delete in changes if not is_delete]
    return upserts, [{"id": id_, "seq": seq} for id_, seq, is_delete in changes if is_delete]


class Kept(NamedTuple):
    """A moment: of each key the last change that counts, and what is remembered."""

    last: dict[int, tuple[int, bool]]
    marks: dict[int, int]
    floor: int

    @property
    def rows(self) -> dict[int, int]:
        return {id_: seq for id_, (seq, is_delete) in self.last.items() if not is_delete}

    def applied(self, changes: list[Change]) -> Kept | None:
        """After an `apply`; None where it is refused."""
        last, marks = dict(self.last), dict(self.marks)
        for id_ in {change[0] for change in changes}:
            seq, is_delete = max((seq, is_delete) for each, seq, is_delete in changes if each == id_)
            is_known = id_ in self.rows or id_ in marks
            if not is_known and not is_delete and seq <= self.floor:
                return None
            last[id_] = max(last.get(id_, (-1, False)), (seq, is_delete))
            if not is_delete and last[id_] == (seq, False):
                marks.pop(id_, None)
            elif is_delete and last[id_] == (seq, True) and seq > max(self.floor, marks.get(id_, -1)):
                marks[id_] = seq
        return Kept(last, marks, self.floor)

    def without(self, ids: list[int]) -> Kept:
        """After a delete that says no value."""
        last, marks = dict(self.last), dict(self.marks)
        for id_ in self.rows.keys() & set(ids):
            seq = last[id_][0]
            last[id_] = seq, True
            if seq > self.floor:
                marks[id_] = seq
        return Kept(last, marks, self.floor)

    def written(self, id_: int, seq: int) -> Kept:
        """After an upsert that asks for no order."""
        return Kept({**self.last, id_: (seq, False)}, {k: v for k, v in self.marks.items() if k != id_}, self.floor)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.rival = Rival(self.world.inner.consensus)
        clients = [self.world.client(rival=self.rival), self.world.client()]
        self.clients = [client.controller().tables() for client in clients]
        self.clients[0].create("a", SCHEMA, mode="wal", keep_deletes=("seq", f"{SPAN_S:g} s"))
        self.tables = [client.table("a") for client in clients]
        kept = self.tables[0].describe().keep_deletes
        assert kept is not None
        self.marks = kept.table
        self.now = Kept({}, {}, -1)
        self.history: list[tuple[int, Kept]] = []

    def changed(self, now: Kept) -> None:
        self.now = now
        time = self.clients[0].read_time()
        if not self.history or self.history[-1][0] < time:
            self.history.append((time, now))

    def apply(self, who: int, door: str, changes: list[Change]) -> None:
        upserts, deletes = parts(changes)
        if door == "table":
            self.tables[who].apply(upserts, deletes)
            return
        with self.clients[who].transaction() as t:
            t.apply("a", upserts, deletes)

    def expect(self, expected: Kept | None, call: Callable[[], object]) -> None:
        if expected is not None:
            call()
            self.changed(expected)
            return
        with pytest.raises(persist.DeletesForgotten) as refused:
            call()
        assert refused.value.fields["floor"] == self.now.floor

    @rule(who=WHO, door=DOORS, changes=CHANGES)
    def comes(self, who: int, door: str, changes: list[Change]) -> None:
        self.expect(self.now.applied(changes), lambda: self.apply(who, door, changes))

    @rule(mine=CHANGES, theirs=CHANGES)
    def race(self, mine: list[Change], theirs: list[Change]) -> None:
        between = self.now.applied(theirs)
        if between is None or self.now.applied(mine) is None:
            return
        self.rival.before_next(lambda: self.apply(1, "table", theirs))
        try:
            self.apply(0, "table", mine)
            expected = between.applied(mine) if not self.rival.waiting else self.now.applied(mine)
        except persist.DeletesForgotten:
            expected = between
            assert between.applied(mine) is None
        if self.rival.waiting:  # nothing was to be written, so there was no race
            self.rival._acts.clear()
        assert expected is not None
        self.changed(expected)

    @rule(theirs=CHANGES, mine=CHANGES)
    def conflict(self, theirs: list[Change], mine: list[Change]) -> None:
        """A transaction that read before another one committed: both count, or this one is refused."""
        between = self.now.applied(theirs)
        if between is None or self.now.applied(mine) is None:
            return
        t = self.clients[0].transaction()
        t.apply("a", *parts(mine))
        self.apply(1, "table", theirs)
        self.changed(between)
        try:
            t.commit()
        except persist.WriteConflict:
            assert {id_ for id_, *_ in mine} & {id_ for id_, *_ in theirs}
            return
        expected = between.applied(mine)
        assert expected is not None
        self.changed(expected)

    @rule(who=WHO, ids=st.lists(IDS, min_size=1, max_size=2))
    def delete(self, who: int, ids: list[int]) -> None:
        self.tables[who].delete(ids)
        self.changed(self.now.without(ids))

    @rule(who=WHO, id_=IDS, seq=SEQS, verb=st.sampled_from(["upsert", "append"]))
    def write(self, who: int, id_: int, seq: int, verb: str) -> None:
        if verb == "append" and id_ in self.now.rows:
            return
        getattr(self.tables[who], verb)([row(id_, seq)])
        self.changed(self.now.written(id_, seq))

    @rule(who=WHO, seconds=st.sampled_from([1.0, SPAN_S / 2, SPAN_S * 2]))
    def forget(self, who: int, seconds: float) -> None:
        self.world.clock.advance(seconds)
        before, now_ms = self.remembered(), self.world.clock() // 1_000_000
        self.clients[who].controller.tend()
        after = self.remembered()
        for id_, (_, at_ms) in before.items():
            if id_ >= 0 and now_ms - at_ms > SPAN_S * 1000:
                assert id_ not in after
            if id_ >= 0 and now_ms - at_ms < SPAN_S * 1000 - 500:
                assert id_ in after
        gone = [seq for id_, (seq, _) in before.items() if id_ not in after]
        marks = {id_: seq for id_, seq in self.now.marks.items() if id_ in after}
        self.changed(Kept(self.now.last, marks, max([self.now.floor, *gone])))

    @precondition(lambda self: self.history)
    @rule(who=WHO, back=st.integers(0, 5))
    def restore(self, who: int, back: int) -> None:
        time, then = self.history[-1 - min(back, len(self.history) - 1)]
        self.tables[who].restore(time)
        self.changed(then)

    @rule(who=WHO)
    def copy(self, who: int) -> None:
        self.clients[who].apply()
        self.clients[who].tidy()

    def remembered(self) -> dict[int, tuple[int, int]]:
        """The marks as they are, with when each was made; -1 is the floor."""
        found = self.clients[1].read(self.marks, diff=True).to_pylist()
        assert all(each["_diff"] == 1 for each in found)
        return {
            -1 if each[FLOOR] else each["id"]: (each["seq"], round(each[DELETED_AT].timestamp() * 1000))
            for each in found
        }

    @invariant()
    def the_contents_are_those_of_the_sorted_stream(self) -> None:
        found = self.tables[1].read(diff=True).to_pylist()
        assert sorted(found, key=lambda each: each["id"]) == [
            {**row(id_, seq), "_diff": 1} for id_, seq in sorted(self.now.rows.items())
        ]
        remembered = {id_: seq for id_, (seq, _) in self.remembered().items()}
        assert remembered == {**self.now.marks, **({-1: self.now.floor} if self.now.floor >= 0 else {})}

    def teardown(self) -> None:
        self.world.close()


class NothingKeptModel(NothingKept, Model):
    """The same."""


TestDeletedKeys = Model.TestCase
TestDeletedKeys.settings = settings(max_examples=25, stateful_step_count=30)
TestNothingKept = NothingKeptModel.TestCase
TestNothingKept.settings = settings(max_examples=8, stateful_step_count=20)


def test_a_stream_in_any_order_is_the_sorted_stream() -> None:
    """Without a model of what is remembered: 300 changes, shuffled, in batches, each twice."""
    import random  # noqa: PLC0415 - of this test alone

    chances = random.Random(7)
    stream = [(chances.randrange(6), seq, chances.random() < 0.4) for seq in range(150)]
    comes = stream * 2
    chances.shuffle(comes)
    world = World()
    tables: Tables = world.client().controller().tables()
    tables.create("a", SCHEMA, mode="wal", keep_deletes=("seq", "1 day"))
    table = world.client().table("a")
    while comes:
        count = chances.randrange(1, 9)
        table.apply(*parts(comes[:count]))
        comes = comes[count:]
    expected = {id_: (seq, is_delete) for id_, seq, is_delete in stream}  # the last one of each
    rows = [row(id_, seq) for id_, (seq, is_delete) in sorted(expected.items()) if not is_delete]
    assert sorted(table.read().to_pylist(), key=lambda each: each["id"]) == rows
    world.close()
