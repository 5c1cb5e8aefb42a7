"""What a source is and how it is, as a value for callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from persist_lib.schema.schema import Schema
from persist_lib.storage.sources.declared import Decoding, From, Meaning
from persist_lib.storage.sources.health import AT_WORK
from persist_lib.storage.sources.protocol import Mark


class SourceDescription(msgspec.Struct, frozen=True):
    """A source. `collections` are those that it writes, by what they are for. `time` is t: all before it is durable.

    `bound` says up to which address each partition has times, and `durable` up to which it is durable. `instances` are
    the rows of its health collection; one that was not heard of for five minutes has the state "unseen". `behind_ms` is
    how far t is behind the store's clock (or the collection that it reads), `errors` how many messages were bad, and
    `left` what is left of partitions, as an instance says it: addresses (`left`), messages, bytes and seconds.
    `unread` is what is there and is not read, with why, as the instance said it that looked last.
    """

    name: str
    id: str
    state: str
    reader: From
    decoding: Decoding
    meaning: Meaning
    schema: Schema
    collections: Mapping[str, str]
    time: int
    bound: Mapping[str, Mark]
    durable: Mapping[str, Mark]
    instances: Sequence[Mapping[str, object]]
    behind_ms: int = 0
    errors: int = 0
    why: str = ""
    left: Mapping[str, Mapping[str, object]] = {}
    unread: Mapping[str, str] = {}

    @property
    def alive(self) -> Sequence[Mapping[str, object]]:
        """The instances that are at work, as far as is known."""
        return [one for one in self.instances if one["state"] in AT_WORK]
