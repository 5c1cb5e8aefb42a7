"""Messages of a Kafka client as Arrow tables, and what was read ahead of a partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import array_of
from persist_lib.sources.protocol import ADDRESS, VALUE

MOMENT = pa.timestamp("ms", "UTC")
SCHEMA = pa.schema([ADDRESS, VALUE, ("key", pa.binary()), ("headers", pa.string()), ("timestamp", MOMENT)])
EACH = 48
"""Bytes that a message counts beside its key and value."""


class Chunk(NamedTuple):
    """Messages of one partition, in order, and how many bytes there are up to and with each."""

    table: pa.Table
    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]


class Ahead:
    """What was read of one partition: all its messages in `[start, end)`, whatever offsets have none.

    Of what was given out, nothing is kept.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.chunks: list[Chunk] = []

    @property
    def bytes(self) -> int:
        """About how many bytes it holds."""
        return sum(int(chunk.sizes[-1]) for chunk in self.chunks)

    def add(self, chunk: Chunk) -> None:
        """Append messages. What is there already is left out."""
        first = int(np.searchsorted(chunk.addresses, self.end))
        if first == len(chunk.addresses):
            return
        self.chunks.append(_from(chunk, first))
        self.end = int(chunk.addresses[-1]) + 1

    def between(self, start: int, end: int) -> Iterator[pa.Table]:
        for chunk in self.chunks:
            low, high = np.searchsorted(chunk.addresses, [start, end]).tolist()
            if low < high:
                yield chunk.table.slice(low, high - low)

    def forget(self, end: int) -> None:
        kept = [(chunk, int(np.searchsorted(chunk.addresses, end))) for chunk in self.chunks]
        self.chunks = [_from(chunk, first) for chunk, first in kept if first < len(chunk.addresses)]
        self.start = max(self.start, end)
        self.end = max(self.end, end)

    def cut(self, start: int, most_bytes: int) -> tuple[int, int]:
        """Where the messages from `start` on reach `most_bytes`, at least one of them; and how many bytes those are."""
        taken, mark = 0, start
        for chunk in self.chunks:
            low = int(np.searchsorted(chunk.addresses, start))
            if low == len(chunk.addresses):
                continue
            before = int(chunk.sizes[low - 1]) if low else 0
            high = int(np.searchsorted(chunk.sizes, before + most_bytes - taken, side="right"))
            high = high if taken else max(high, low + 1)
            if high > low:
                taken += int(chunk.sizes[high - 1]) - before
                mark = int(chunk.addresses[high - 1]) + 1
            if high < len(chunk.addresses):
                return mark, taken
        return self.end, taken


def chunks_of(messages: Sequence[Any], topics: Mapping[str, int]) -> Iterator[tuple[str, int, Chunk]]:
    """Messages of any partitions as chunks: (topic, number, chunk). Messages of a partition keep their order."""
    count = len(messages)
    # These are the only loops over messages. A method of one is some 50 ns, so that is what a message costs.
    addresses = np.fromiter([message.offset() for message in messages], np.uint64, count)
    numbers = np.fromiter([message.partition() for message in messages], np.int64, count)
    values = pa.array([message.value() for message in messages], pa.binary())
    keys = pa.array([message.key() for message in messages], pa.binary())
    moments = pa.array([message.timestamp()[1] for message in messages], pa.int64()).cast(MOMENT)
    headers = pa.array([_shown(message.headers()) for message in messages], pa.string())
    if len(topics) > 1:
        numbers += np.fromiter([topics[message.topic()] << 32 for message in messages], np.int64, count)
    table = pa.table([array_of(addresses), values, keys, headers, moments], schema=SCHEMA)
    sizes = np.asarray(pc.fill_null(pc.binary_length(values), 0)).astype(np.int64) + EACH
    sizes += np.asarray(pc.fill_null(pc.binary_length(keys), 0))
    sizes += np.asarray(pc.fill_null(pc.binary_length(headers), 0))
    if (numbers != numbers[0]).any():
        order = np.argsort(numbers, kind="stable")
        table, numbers, sizes, addresses = table.take(array_of(order)), numbers[order], sizes[order], addresses[order]
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), count]
    names = list(topics)
    for low, high in pairwise(bounds):
        place = int(numbers[low])
        chunk = Chunk(table.slice(low, high - low), addresses[low:high], np.cumsum(sizes[low:high]))
        yield names[place >> 32], place & 0xFFFFFFFF, chunk


def _from(chunk: Chunk, first: int) -> Chunk:
    if not first:
        return chunk
    return Chunk(chunk.table.slice(first), chunk.addresses[first:], chunk.sizes[first:] - chunk.sizes[first - 1])


def _shown(headers: Sequence[tuple[str, bytes | None]] | None) -> str | None:
    """Headers as JSON: a list of names with texts. Bytes that are no UTF-8 become an object with them in base64."""
    if not headers:
        return None
    return msgspec.json.encode([(name, _text(value)) for name, value in headers]).decode()


def _text(value: bytes | None) -> str | dict[str, bytes] | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": value}
