"""The upstream of a replayed source: one partition of messages in memory, which it may forget, or begin again.

`open_reader` is the factory of a source of the kind `Custom`. What a reader promises of it is checked by
`persist_lib.sources.conformance`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pyarrow as pa

from persist_lib.errors import Diverged, Gone
from persist_lib.sources import Mark
from persist_lib.sources.protocol import ADDRESS, START, VALUE

PARTITION = "log"
LIVES = 10
UPSTREAMS: dict[str, Upstream] = {}
"""By the name that a source's options have."""


class Upstream:
    """Messages at addresses from `first` to `have`, of the `life` that it is in. `told`: what it may forget."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.have = self.first = self.life = self.told = 0
        UPSTREAMS[name] = self

    def begin_again(self) -> None:
        """Begin at 0, with other messages."""
        self.life, self.have, self.first = self.life + 1, 0, 0

    def message(self, address: int) -> bytes:
        """The message at an address, which no other life has."""
        return json.dumps({"id": LIVES * address + self.life}).encode()


class UpstreamReader:
    """A `SourceReader`. The check of a mark is the life that it is of."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        """The end, or the next address where few bytes are asked for. Raises Diverged for a mark of another life."""
        known = bound.get(PARTITION, START)
        self._check(known)
        up = self._upstream
        end = min(up.have, known.address + most_bytes)
        return {PARTITION: Mark(end, str(up.life))} if end > known.address else {}

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        """The messages between two marks. Raises Diverged, and Gone."""
        self._check(start)
        self._check(end)
        if start.address < min(self._upstream.first, end.address):
            raise Gone(f"{partition}: {start.address} is forgotten", partition=partition, address=start.address)
        addresses = range(start.address, end.address)
        values = [self._upstream.message(address) for address in addresses]
        yield pa.table([pa.array(addresses, pa.uint64()), pa.array(values, pa.binary())], pa.schema([ADDRESS, VALUE]))

    def _check(self, mark: Mark) -> None:
        if mark.check and mark.check != str(self._upstream.life):
            raise Diverged(f"{PARTITION} began again", partition=PARTITION, address=mark.address)

    def estimate(self, _partition: str, start: int, end: int) -> int:
        return end - start

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        left = self._upstream.have - marks.get(PARTITION, START).address
        return {PARTITION: left} if left > 0 else {}

    def tell(self, marks: Mapping[str, Mark]) -> None:
        """Forget what is before a mark of this life."""
        mark, up = marks.get(PARTITION, START), self._upstream
        up.told = max(up.told, mark.address)
        if mark.check == str(up.life):
            up.first = max(up.first, mark.address)

    def close(self) -> None: ...


def open_reader(name: str) -> UpstreamReader:
    """A reader of the upstream of this name."""
    return UpstreamReader(UPSTREAMS[name])
