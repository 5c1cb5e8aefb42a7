"""Deterministic simulation: real clients at a location in memory, under a schedule and faults that one seed decides.

    found = simulate(lambda seed: ShardStory(seed, schema), range(100))
    found.says, found.failed

`persist simulate` runs it with a user's own schema, settings and policy, and the project's own simulation tests with
others. A story says what processes do and what must hold; the scheduler decides all else.
"""

from persist_lib.simulate.run import Failure, Simulated, Took, simulate, took
from persist_lib.simulate.scheduler import NO_FAULTS, Actor, Faults, SimulatedBlob, SimulatedConsensus, Simulation
from persist_lib.simulate.shard_story import ShardStory
from persist_lib.simulate.story import EAGER, PASSING, NotHeld, Story
from persist_lib.simulate.table_story import Layout, TableStory

__all__ = [
    "EAGER",
    "NO_FAULTS",
    "PASSING",
    "Actor",
    "Failure",
    "Faults",
    "Layout",
    "NotHeld",
    "ShardStory",
    "Simulated",
    "SimulatedBlob",
    "SimulatedConsensus",
    "Simulation",
    "Story",
    "TableStory",
    "Took",
    "simulate",
    "took",
]  # fmt: skip
