"""Real clients under simulated schedules and faults, as `persist simulate` runs them."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.simulate import NO_FAULTS, ShardStory
from tests.simulation.stories import play, seeds
from tests.worlds import SCHEMA

ODD = persist.Schema(
    {"k": "string", "b": "bool"},
    {"f": "float64", "l": "list<struct<a: int64>>", "m": "map<string, decimal128(18, 2)>"},
    times="ms",
)  # fmt: skip
SCHEMAS = [
    SCHEMA,
    SCHEMA,
    persist.Schema({"b": "bool"}),
    ODD,
    persist.Schema({"id": "int64"}, {"w": "date32"}, unique=True),
]
"""Also one whose rows cannot be told apart."""


@pytest.mark.parametrize("seed", seeds())
def test_whatever_the_schedule_nothing_is_lost_doubled_or_left(seed: int) -> None:
    story = play(ShardStory(seed, SCHEMAS[seed % len(SCHEMAS)]))
    assert story.ledger.outcomes["acknowledged"] > 3


def test_the_same_seed_gives_the_same_history() -> None:
    first = ShardStory(1, ODD).run()
    assert first == ShardStory(1, ODD).run()
    assert first != ShardStory(2, ODD).run()


def test_without_faults_everything_is_acknowledged() -> None:
    story = play(ShardStory(3, SCHEMA, faults=NO_FAULTS))
    assert set(story.ledger.outcomes) <= {"acknowledged", "refused"}
