"""A collection with a pending area in a location of a test, its writers, and a plain list of what they wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.core.pending import PendingName
from persist_lib.format.paths import blob_key, pending_key, pending_prefix
from persist_lib.frontier import at
from persist_lib.ids import ShardId
from persist_lib.testing import contents_of
from tests.worlds import SCHEMA, SMALL, World, row

NAME = ShardId("readings")
Rows = list[dict[str, Any]]


def said(lower: int, upper: int, word: str = "w") -> Rows:
    """What happens in these times, of which all writers say the same; with another word, one says something else."""
    return [row(time % 7, word, time, 1 if time % 3 else -1) for time in range(lower, upper)]


class Area:
    """A collection, and what is in its pending area."""

    def __init__(self, world: World, config: persist.Config | None = None, schema: persist.Schema = SCHEMA) -> None:
        self.world, self.schema = world, schema
        self.client = world.client(config or SMALL)
        self.reader = pending_area.create(self.client, NAME, schema)
        self._writers: dict[str, pending_area.Writer] = {}

    def writer(self, name: str) -> pending_area.Writer:
        if name not in self._writers:
            runtime = self.world.clock.runtime(7)
            self._writers[name] = pending_area.Writer(self.world.inner.url, NAME, name, self.schema, runtime=runtime)
        return self._writers[name]

    def put(self, name: str, lower: int, upper: int, word: str = "w") -> str:
        """Have a writer put what happens in these times. Returns its key."""
        return self.writer(name).put(said(lower, upper, word), lower, upper).key

    def pending(self) -> list[str]:
        """The keys of all that lies in the pending area."""
        entries = self.world.inner.blob.list(pending_prefix(NAME))
        return sorted(pending_key(NAME, entry.key) for entry in entries)

    def damage(self, key: str, data: bytes = b"damaged") -> None:
        stored = blob_key(NAME, pending_key(NAME, blob_key(NAME, key)))  # type: ignore[arg-type]
        self.world.inner.blob.delete(stored)
        self.world.inner.blob.set(stored, data)

    def absorb(self, **options: Any) -> pending_area.Absorbed:
        return pending_area.absorb(self.client, NAME, **options)

    def rest(self) -> None:
        """Absorb and maintain until nothing changes."""
        for _ in range(12):
            before = self.client.inspect(NAME).seqno
            self.absorb()
            self.client.maintain(NAME)
            if self.client.inspect(NAME).seqno == before:
                return
        raise AssertionError("it does not come to rest")

    def merged(self) -> Counter[Any]:
        """What the shard holds at its newest complete time."""
        with self.client.open_reader(NAME) as read, read.snapshot(diff=True) as snapshot:
            return contents_of(snapshot.to_arrow())


def plain(updates: Iterable[dict[str, Any]], as_of: int) -> Counter[Any]:
    """The contents that a plain list of updates has as of a time."""
    found: Counter[Any] = Counter()
    for one in updates:
        if one["_time"] <= as_of:
            found[one["id"], one["word"]] += one["_diff"]
    return Counter({data: diff for data, diff in found.items() if diff})


def name_of(key: str) -> PendingName:
    from persist_lib.core.pending import parse_pending_key  # noqa: PLC0415

    found = parse_pending_key(key)
    assert found is not None
    return found


__all__ = ["NAME", "Area", "at", "name_of", "plain", "said"]
