"""What the state machine takes as the next schema, and of which shards."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import EVOLVED, PINS, least_for_state
from persist_lib.core.state import MARK, Hold, Pin, State
from persist_lib.core.transitions import change
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo
from persist_lib.schema.evolution import adopted
from persist_lib.schema.schema import Schema

FIRST = Schema({"id": "int64"}, {"a": "int32", "b": "string not null", "in": "list<struct<x: int8>>"})
STATE = State(schemas=(FIRST,), format=EVOLVED)
CHANGES = {
    "renamed": FIRST.rename({"a": "x"}), "dropped": FIRST.drop("a"),
    "default": FIRST.add({"x": "string"}, {"x": "-"}), "used again": FIRST.drop("a").add({"a": "int8"}),
    "widened": FIRST.widen({"a": "int64"}), "relaxed": FIRST.relax("b"),
    "widened within": FIRST.widen({"in": "list<struct<x: int64>>"}),
    "a field": FIRST.widen({"in": "list<struct<x: int8, y: string>>"}),
    "a name of the key": FIRST.rename({"id": "k"}),
}  # fmt: skip


def evolve(state: State, schema: Schema) -> StateDiff | r.Refusal:
    return change(state, SeqNo(7), c.EvolveSchema(len(state.schemas) - 1, adopted(state.schemas[-1], schema)))


@pytest.mark.parametrize("schema", CHANGES.values(), ids=CHANGES)
def test_each_change_needs_the_format_and_a_shard_of_no_layer_that_is_not_published(schema: Schema) -> None:
    assert isinstance(evolve(STATE, schema), StateDiff)
    assert isinstance(evolve(msgspec.structs.replace(STATE, format=PINS), schema), r.Malformed)
    published = msgspec.structs.replace(STATE, pins={"delta": Pin((), b"", 0, 1)})
    for state, said in (
        (published, "published as delta"),
        (msgspec.structs.replace(STATE, holds={MARK: Hold(MINIMUM, b"stream")}), "one of stream"),
    ):
        refused = evolve(state, schema)
        assert isinstance(refused, r.WrongSchema)
        assert said in refused.reason
        assert isinstance(evolve(state, FIRST.add({"x": "int8"})), StateDiff), "what any program knows"
    collected = msgspec.structs.replace(STATE, holds={MARK: Hold(MINIMUM, b"collection")})
    assert isinstance(evolve(collected, schema), StateDiff)


def pinned(*schemas: Schema) -> StateDiff | r.Refusal:
    state = msgspec.structs.replace(STATE, schemas=schemas)
    return change(state, SeqNo(7), c.PinKeys("delta", (), None, b"", 0, 1, False))


@pytest.mark.parametrize("schema", CHANGES.values(), ids=CHANGES)
def test_an_evolved_shard_is_not_pinned_for_other_engines(schema: Schema) -> None:
    assert isinstance(pinned(FIRST, adopted(FIRST, schema)), r.WrongSchema)
    assert isinstance(pinned(FIRST, adopted(FIRST, FIRST.add({"x": "int8"}))), StateDiff)


def test_a_name_that_is_there_again_was_another_one_in_between() -> None:
    renamed = adopted(FIRST, CHANGES["renamed"])
    assert isinstance(pinned(FIRST, renamed, adopted(renamed, renamed.rename({"x": "a"}))), r.WrongSchema)


@pytest.mark.parametrize("schema", CHANGES.values(), ids=CHANGES)
def test_a_state_that_evolved_says_what_only_its_format_can(schema: Schema) -> None:
    state = msgspec.structs.replace(STATE, schemas=(FIRST, adopted(FIRST, schema)))
    assert least_for_state(state) == EVOLVED
    assert (
        least_for_state(msgspec.structs.replace(STATE, schemas=(FIRST, adopted(FIRST, FIRST.add({"x": "int8"})))))
        < PINS
    )


def test_a_late_evolution_does_not_undo_a_newer_one() -> None:
    renamed = adopted(FIRST, CHANGES["renamed"])
    back = adopted(renamed, renamed.rename({"x": "a"}))
    state = msgspec.structs.replace(STATE, schemas=(FIRST, renamed, back))
    assert isinstance(change(state, SeqNo(7), c.EvolveSchema(0, renamed)), r.WrongSchema)
