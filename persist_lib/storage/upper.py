"""How far the data of a collection has come: read from its shards, across handovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from persist_lib.client import Client
from persist_lib.frontier import MINIMUM, TOP, Antichain, at
from persist_lib.storage.at_once import states_of
from persist_lib.storage.records import RenditionRecord
from persist_lib.storage.timeline import Timeline


def meet(client: Client, names: Sequence[str]) -> Antichain:
    """The least upper of shards, read from the location."""
    return min((state.upper for state in states_of(client, names)), default=TOP)


def upper_of(client: Client, timeline: Timeline) -> Antichain:
    """All updates of the collection before this are known: of each rendition, up to where the next one follows."""
    return upper_by(timeline, lambda rendition: meet(client, rendition.names))


def upper_by(timeline: Timeline, meet_of: Callable[[RenditionRecord], Antichain]) -> Antichain:
    """The same, of uppers of renditions that were read after the timeline."""
    for span in timeline.spans:
        upper = meet_of(span.rendition)
        if span.end is None or upper < at(span.end):
            return upper if span.start == 0 or at(span.start) < upper else at(span.start)
    return MINIMUM
