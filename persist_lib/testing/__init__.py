"""A test kit for users of Persist: a clock moved by hand, locations that fail as planned, rivals, and recordings."""

from persist_lib.testing.clock import ManualClock
from persist_lib.testing.faults import Chances, Fate, FaultyBlob, FaultyConsensus, Outcome, Plan, Script
from persist_lib.testing.recording import RecordingLocation
from persist_lib.testing.rival import Rival

__all__ = [
    "Chances",
    "Fate",
    "FaultyBlob",
    "FaultyConsensus",
    "ManualClock",
    "Outcome",
    "Plan",
    "RecordingLocation",
    "Rival",
    "Script",
]
