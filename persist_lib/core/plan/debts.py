"""What all shards of a location call for, as one value: what a shard server answers a survey with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from persist_lib.core.plan.look import Look
from persist_lib.ids import SeqNo


class Debts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The looks at all shards that the caller may see, by the store's clock `now` (ms).

    `moved` has the newest seqnos of those shards only whose look is of another seqno, or that have none: they wait to
    be looked at, or are `unread`, which says why they could not be.
    """

    now: int
    looks: Mapping[str, Look]
    moved: Mapping[str, SeqNo]
    unread: Mapping[str, str]

    @property
    def heads(self) -> dict[str, SeqNo]:
        """The newest seqno of every shard."""
        return {**{name: look.seqno for name, look in self.looks.items()}, **self.moved}

    @property
    def waiting(self) -> int:
        """How many shards wait to be looked at."""
        return sum(1 for name in self.moved if name not in self.unread)
