"""Recordings of the requests that a piece of code makes, for tests that count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from persist_lib.location.api import Blob, Consensus
from persist_lib.location.open import Location
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation

T = TypeVar("T")


class RecordingBlob(AroundBlob):
    """A Blob whose operations are appended to `requests` before they are carried out."""

    def __init__(self, inner: Blob, requests: list[Operation]) -> None:
        super().__init__(inner)
        self.requests = requests

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Record it."""
        self.requests.append(operation)
        return call()


class RecordingConsensus(AroundConsensus):
    """A Consensus whose operations are appended to `requests` before they are carried out."""

    def __init__(self, inner: Consensus, requests: list[Operation]) -> None:
        super().__init__(inner)
        self.requests = requests

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Record it."""
        self.requests.append(operation)
        return call()


class RecordingLocation:
    """A location that records its requests in `requests`, in order. Pass `location` to the code under test."""

    def __init__(self, location: Location) -> None:
        self.requests: list[Operation] = []
        self.blob = RecordingBlob(location.blob, self.requests)
        self.consensus = RecordingConsensus(location.consensus, self.requests)
        self.location = replace(location, blob=self.blob, consensus=self.consensus)

    def count(self, *kinds: str) -> int:
        """How many requests of these kinds there were (of any kind, if none is given)."""
        return sum(1 for request in self.requests if not kinds or request.kind in kinds)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.requests.clear()
