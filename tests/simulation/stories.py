"""How tests play the stories of `persist_lib.simulate`: which seeds, and what is said and counted of each."""

from __future__ import annotations

import os
import random
from typing import TypeVar

from persist_lib.simulate.run import took
from persist_lib.simulate.story import Story
from tests.counted import count

S = TypeVar("S", bound=Story)
ONE = os.environ.get("PERSIST_SIM_SEED")
DRAWN = os.environ.get("PERSIST_SEED")
SEEDS = int(os.environ.get("PERSIST_SIM_SEEDS", "12"))
COLLECTION_SEEDS = int(os.environ.get("PERSIST_COLLECTION_SEEDS", "4"))


def seeds(most: int = SEEDS) -> list[int]:
    """PERSIST_SIM_SEEDS of them, or the one PERSIST_SIM_SEED; with a PERSIST_SEED a third of them are drawn by it."""
    if ONE:
        return [int(ONE)]
    fresh = most // 3 if DRAWN else 0
    return [*range(most - fresh), *random.Random(DRAWN).sample(range(most, 2**32), fresh)]


def play(story: S) -> S:
    """Run a story. A failure says its seed, and the end of its history."""
    try:
        story.run()
    except BaseException:
        print("\n".join(story.simulation.lines), f"\nPERSIST_SIM_SEED={story.seed} is the seed")
        raise
    done = took(story)
    print(f"{type(story).__name__} {story.seed}: {done.says}")
    count(
        "simulation", seeds=1, steps=done.steps, operations=done.operations.total(), crashes=done.crashes,
        faults=dict(done.faults), checks=done.held.total(),
    )  # fmt: skip
    return story
