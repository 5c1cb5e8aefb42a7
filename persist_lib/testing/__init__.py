"""A test kit for users of Persist.

It has a clock that the test moves, locations that fail as planned, rivals, recordings of requests, the reference model,
and checks of a whole shard.
"""

from persist_lib.testing.checks import World, check_history, check_location, check_swept, check_world, read_history
from persist_lib.testing.faults import (
    Chances,
    Fate,
    FaultyBlob,
    FaultyConsensus,
    ManualClock,
    Outcome,
    Plan,
    RecordingLocation,
    Rival,
    Script,
)
from persist_lib.testing.model import Model, contents_of, updates_of

__all__ = [
    "Chances", "Fate", "FaultyBlob", "FaultyConsensus", "ManualClock", "Model", "Outcome", "Plan",
    "RecordingLocation", "Rival", "Script", "World", "check_history", "check_location", "check_swept", "check_world",
    "contents_of", "read_history", "updates_of",
]  # fmt: skip
