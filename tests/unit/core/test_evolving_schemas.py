"""What the state machine takes as the next schema, and of which shards."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import EVOLVED, PINS
from persist_lib.core.state import MARK, Hold, Pin, State
from persist_lib.core.transitions import change
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo
from persist_lib.schema.evolution import adopted
from persist_lib.schema.schema import Schema

FIRST = Schema({"id": "int64"}, {"a": "int32", "b": "string"})
STATE = State(schemas=(FIRST,), format=EVOLVED)
CHANGES = {
    "renamed": FIRST.rename({"a": "x"}), "dropped": FIRST.drop("a"),
    "default": FIRST.add({"x": "string"}, {"x": "-"}), "used again": FIRST.drop("a").add({"a": "int8"}),
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


def test_an_evolved_shard_is_not_pinned_for_other_engines() -> None:
    state = msgspec.structs.replace(STATE, schemas=(FIRST, adopted(FIRST, CHANGES["renamed"])))
    refused = change(state, SeqNo(7), c.PinKeys("delta", (), None, b"", 0, 1, False))
    assert isinstance(refused, r.WrongSchema)


def test_a_late_evolution_does_not_undo_a_newer_one() -> None:
    renamed = adopted(FIRST, CHANGES["renamed"])
    back = adopted(renamed, renamed.rename({"x": "a"}))
    state = msgspec.structs.replace(STATE, schemas=(FIRST, renamed, back))
    assert isinstance(change(state, SeqNo(7), c.EvolveSchema(0, renamed)), r.WrongSchema)
