"""The Consensus of a server: whatever rows it writes or reads are told to those that follow their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Consensus, Newest, Row
from persist_lib.location.contract import next_seqno
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.server.pushing import Pushing

T = TypeVar("T")


class Announcing(AroundConsensus):
    """The same Consensus. A row is told when it is known to be in the log, never before."""

    def __init__(self, inner: Consensus, pushing: Pushing) -> None:
        super().__init__(inner)
        self._pushing = pushing

    def around(self, operation: Operation, call: Callable[[], T]) -> T:  # noqa: ARG002
        """Run it."""
        return call()

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        rows = self.inner.scan(key, from_seqno, limit)
        self._pushing.saw(key, rows)
        return rows

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        won = self.inner.compare_and_set(key, expected, data)
        if won:
            self._pushing.saw(key, [Row(next_seqno(expected), data)])
        return won

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        won = self.inner.compare_and_set_many(changes)
        if won:
            for key, (expected, data) in changes.items():
                self._pushing.saw(key, [Row(next_seqno(expected), data)])
        return won
