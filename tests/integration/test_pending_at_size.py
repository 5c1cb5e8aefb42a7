"""Many writers and many batches: bounded memory, a listing for each thousand batches, each content read once.

PERSIST_PENDING_BATCHES of them from PERSIST_PENDING_WRITERS writers; `make pending` takes 100,000 from 1,000.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.core.pending import PendingName
from persist_lib.format.paths import blob_key, pending_prefix
from persist_lib.frontier import at
from persist_lib.ids import ShardId
from persist_lib.location import open_location
from persist_lib.location.api import BlobEntry, Page
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.pending_area.objects import encode
from persist_lib.testing import contents_of
from tests.unit.pending_area.areas import plain, said
from tests.worlds import SCHEMA

WRITERS = int(os.environ.get("PERSIST_PENDING_WRITERS", "100"))
BATCHES = int(os.environ.get("PERSIST_PENDING_BATCHES", "3000"))
SHARD = ShardId("readings")
UPDATES = 3
MIB = 1 << 20


class Many(MemoryBlob):
    """A Blob in which every writer has put all of the same batches: they are made when they are asked for."""

    def __init__(self, writers: int, each: int) -> None:
        super().__init__()
        self.lists = 0
        self.names: list[PendingName] = []
        self.sizes: list[int] = []
        for number in range(each):
            name, data = self._made(number)
            self.names.append(name)
            self.sizes.append(len(data))
        self.writers = [f"edge-{number:05d}" for number in range(writers)]
        self.prefix = pending_prefix(SHARD)
        self.is_gone = np.zeros(writers * each, bool)

    def _made(self, number: int) -> tuple[PendingName, bytes]:
        lower, upper = number * UPDATES, (number + 1) * UPDATES
        table = pa.Table.from_pylist(said(lower, upper), SCHEMA.updates)
        name, data = encode(SCHEMA, table, "", lower, at(upper))
        return name, bytes(data)

    def _place(self, key: str) -> int:
        writer, name = key.removeprefix(self.prefix).split("/")
        return self.writers.index(writer) * len(self.names) + int(name[:20]) // UPDATES

    def _key(self, place: int) -> str:
        writer, number = divmod(place, len(self.names))
        name = self.names[number]
        return blob_key(SHARD, PendingName(self.writers[writer], name.lower, name.upper, name.count, name.digest).key)

    def page(self, prefix: str, after: str) -> Page:
        self.lists += 1
        if not prefix.startswith("-pending/"):
            return Page([entry for entry in super().list(prefix) if entry.key > after], is_last=True)
        first = self._place(after) + 1 if after else 0
        left = np.flatnonzero(~self.is_gone[first:])[:1001] + first
        found = [BlobEntry(self._key(place), self.sizes[place % len(self.names)]) for place in left[:1000].tolist()]
        return Page(found, is_last=len(left) <= 1000)

    def get(self, key: str) -> bytes | None:
        if not key.startswith(self.prefix):
            return super().get(key)
        place = self._place(key)
        return None if self.is_gone[place] else self._made(place % len(self.names))[1]

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        for key in keys:
            if key.startswith(self.prefix):
                self.is_gone[self._place(key)] = True
        return super().delete_many([key for key in keys if not key.startswith(self.prefix)])


@pytest.mark.slow
@pytest.mark.timeout(0 if BATCHES > 10_000 else 120)
def test_many_batches_are_absorbed_in_bounded_memory_with_few_listings():
    each = BATCHES // WRITERS
    blob = Many(WRITERS, each)
    location = replace(open_location("memory:", create=True), blob=blob)
    with persist.open(location, config=persist.Config(lease_ms=600_000)) as client:
        pending_area.create(client, SHARD, SCHEMA).close()
        tracemalloc.start()
        done = pending_area.absorb(client, SHARD)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pages = -(-BATCHES // 1000)
        took = f"{blob.lists} pages, {done.cost.gets:,} GETs, {peak / MIB:.0f} MiB"
        print(f"{BATCHES:,} batches of {WRITERS:,} writers: {took}")
        assert (done.upper, done.left, done.waits) == (at(each * UPDATES), 0, "")
        assert done.batches + done.discarded == BATCHES
        assert blob.lists <= 2 * pages + 10
        assert done.cost.gets <= 2 * each + 200, "each content is read once, however many wrote it"
        assert peak < 32 * MIB + 800 * BATCHES
        assert len(client.inspect(SHARD).state.garbage) <= 7_000
        for _ in range(3):
            client.maintain(SHARD)
        assert blob.is_gone.all()
        with client.open_reader(SHARD) as read, read.snapshot(diff=True) as snapshot:
            assert contents_of(snapshot.to_arrow()) == plain(said(0, each * UPDATES), each * UPDATES - 1)
