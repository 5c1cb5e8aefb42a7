"""What the controller tells about collections: values for people and programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from persist_lib.catalog.records import Kind, Mode, State
from persist_lib.frontier import Antichain
from persist_lib.ids import CATALOG
from persist_lib.schema.schema import Schema

if TYPE_CHECKING:
    from persist_lib.catalog.catalog import Contents

MINTED = re.compile(r"(?:c|s|t[a-z])[0-9a-f]{16}")
OF_MINTED = re.compile(rf"\b{MINTED.pattern}(?:\.[a-z0-9]+)*\b")
"""The names of shards in a text that begin with such an id."""
"""The ids of collections, sources and timelines, which the names of their shards begin with."""
KINDS = ("collection", "table", "source", "timeline", "stream")
"""What people named, and shards belong to."""
RENDITION = re.compile(r"r(\d+)\.(?:s(\d+)|kept)")


def is_minted(shard: str) -> bool:
    """Whether a shard's name was minted: it belongs to something that has a name of its own."""
    id_ = shard.partition(".")[0]
    return id_ == CATALOG or shard == "streams.list" or shard.endswith(".unsealed") or bool(MINTED.fullmatch(id_))


class Owners(NamedTuple):
    """Whose the shards of a location are, whose names are minted: by one look at its catalog, after its shards'."""

    contents: Contents
    sources: Mapping[str, str]
    """The names of sources by their ids."""

    def of(self, shard: str) -> str:
        """Whose a shard is, as in `collection orders, rendition 2, shard 0`; empty for a name that people chose."""
        id_, _, rest = shard.partition(".")
        if id_ == CATALOG or shard == "streams.list":
            return "the list of streams" if id_ != CATALOG else f"the catalog{': ' if rest else ''}{rest}"
        if shard.endswith(".unsealed"):
            return f"stream {shard.removesuffix('.unsealed')}: what is not sealed yet"
        if not MINTED.fullmatch(id_):
            place = next((one for one in self.contents.renditions.values() if shard in one.places), None)
            if place is None or not (owner := self._owner(place.collection)):
                return ""
            return f"{owner}, rendition {place.number}, shard {place.places.index(shard)}"
        owner = self._owner(id_)
        if not owner or self.is_gone(shard):
            return f"{owner or 'what was dropped'}{', dropped' if owner else ''}"
        match = RENDITION.fullmatch(rest)
        if match is None:
            return f"{owner}: {rest}"
        return f"{owner}, rendition {match[1]}, " + ("kept differences" if match[2] is None else f"shard {match[2]}")

    def place_of(self, shard: str) -> tuple[str, str]:
        """The kind of what a shard belongs to, and its name; empty and the shard's own where it stands by itself."""
        kind, _, rest = self.of(shard).partition(" ")
        return (kind, rest.replace(":", ",").partition(",")[0]) if kind in KINDS else ("", shard)

    def name_of(self, shard: str) -> str:
        """The name of what a shard belongs to, or its own."""
        return self.place_of(shard)[1]

    def is_gone(self, shard: str) -> bool:
        """Whether a shard belonged to a collection, rendition, source or timeline that was dropped."""
        id_, _, rest = shard.partition(".")
        if not MINTED.fullmatch(id_):
            return False
        match = RENDITION.fullmatch(rest)
        return not self._owner(id_) or (match is not None and (id_, int(match[1])) not in self.contents.renditions)

    def _owner(self, id_: str) -> str:
        if id_ in self.sources:
            return f"source {self.sources[id_]}"
        if (timeline := self.contents.timelines.get(id_)) is not None:
            return f"timeline {timeline.name}"
        found = self.contents.collections.get(id_)
        return "" if found is None or found.state == "dropping" else f"{found.kind} {found.name}"


class RenditionDescription(msgspec.Struct, frozen=True):
    """A rendition. It is the collection at times in `[start, end)`; both are None if it never was.

    `active` says that it is the newest one. `since` is the greatest and `upper` the least frontier of its shards.
    """

    number: int
    shards: tuple[str, ...]
    schema: Schema
    hash_columns: tuple[str, ...]
    mode: Mode
    copies: int | None
    state: State
    active: bool
    start: int | None
    end: int | None
    since: Antichain
    upper: Antichain


class Description(msgspec.Struct, frozen=True):
    """A collection: what it is, and how far it has come. `promised` is below which no handover can ever be.

    `retention` is in times of the collection, None for all history. `pending` are commands that are decided and not
    carried out yet.
    """

    name: str
    id: str
    kind: Kind
    schema: Schema
    mode: Mode
    retention: int | None
    since: Antichain
    upper: Antichain
    promised: Antichain
    renditions: tuple[RenditionDescription, ...]
    pending: tuple[str, ...] = ()

    @property
    def active(self) -> RenditionDescription:
        """The newest rendition that is the collection."""
        return next(rendition for rendition in self.renditions if rendition.active)


class Evolved(msgspec.Struct, frozen=True):
    """What an evolution did, or would do: `added` is what changes, of a new column its name; `renditions` got it.

    Both are empty where the collection had `schema` already.
    """

    schema: Schema
    added: tuple[str, ...]
    renditions: tuple[int, ...]


class HandoverPlan(msgspec.Struct, frozen=True):
    """What a handover would do now: from the time `at` on, `rendition` is the collection in place of `follows`.

    Readers see it once the collection's upper, which is `upper` now, has passed `at`. `reached` is how far the
    rendition has data; where it is a copy (`is_copy`), the rest up to `at` is copied after the handover, and writers
    wait for that. `refused` says why it would be refused; it is empty if it would be done.
    """

    rendition: int
    follows: int
    at: int
    schema: Schema
    upper: Antichain
    reached: Antichain
    is_copy: bool
    refused: str = ""


class Capability(msgspec.Struct, frozen=True):
    """What a process or a hold may do with a collection: read from `since` on, or write.

    A `hold` is durable and has a name; a `read` or `write` is a lease, whose owner is the process that keeps it up.
    """

    kind: Literal["read", "hold", "write"]
    id: str
    owner: str
    shard: str
    since: Antichain | None = None
    lease_until: int | None = None


class Step(msgspec.Struct, frozen=True):
    """One thing that a plan would do, or did, to a collection, and why.

    What is done to the WAL that several tables share has `timeline NAME` in place of a collection.
    """

    collection: str
    action: Literal[
        "settle",
        "expire",
        "promise",
        "move hold",
        "publish",
        "close",
        "release",
        "finish",
        "forget",
        "wait",
        "apply",
        "tidy",
    ]
    subject: str
    reason: str
    gives_up: bool = False
    """Whether something cannot be read any more after it, so that a person may want to decide. The others finish what
    was begun, make readable what is there, or free what cannot be read already."""

    @property
    def exactly(self) -> tuple[str, str, str]:
        """What it is, whatever the reason: two steps with the same do the same."""
        return self.collection, self.action, self.subject


Do = Callable[[], object]
"""Takes a step."""


class Tended(msgspec.Struct, frozen=True):
    """What looking after collections did, or would do."""

    steps: tuple[Step, ...]

    @property
    def waiting(self) -> tuple[Step, ...]:
        """What has to wait, each with who holds it back: readers with their leases, and holds."""
        return tuple(step for step in self.steps if step.action == "wait")
