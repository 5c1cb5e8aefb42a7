"""Reading contents of the pending area: ahead of their use, from any of their writers, and only what is sound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from persist_lib.core.pending import PendingName
from persist_lib.errors import Corrupt, NewerFormat
from persist_lib.format.paths import blob_key
from persist_lib.ids import ShardId
from persist_lib.location.api import Blob
from persist_lib.pending_area.listing import SHOWN, Content, Disagreement, Listing
from persist_lib.pending_area.objects import Batch, TimeSums, decode, sums_of
from persist_lib.schema.schema import Schema

THREADS = 16
AHEAD = 256
"""How many contents are read before they are asked for."""
AHEAD_BYTES = 16 << 20
"""How many bytes their objects have together, unless a single one has more."""
TOGETHER = 16
"""How many of them a thread reads one after the other: handing over each by itself takes longer than reading it."""
TRIES = 5
"""How many writers' batches of one content are tried before it counts as damaged."""
SUMS_KEPT = 64

Id = tuple[int, int, int, str]
Found = Batch | tuple[str, str] | None
"""A batch, or its key and why it is damaged; None if it is gone."""


class Fetcher:
    """Reads contents of one listing. `damaged` names the batches that are not what their names say."""

    def __init__(self, blob: Blob, shard: ShardId, listing: Listing, schemas: Sequence[Schema], pool: Executor) -> None:
        self._blob, self._shard, self._listing, self._schemas, self._pool = blob, shard, listing, schemas, pool
        self._under_way: dict[Id, tuple[Future[list[Found]], int]] = {}
        self._bytes = 0
        self._sums: OrderedDict[Id, TimeSums] = OrderedDict()
        self.damaged: dict[str, str] = {}

    def ahead(self, contents: Sequence[Content]) -> None:
        """Begin to read these, which will be asked for soon, in this order."""
        if self._has(contents, 0) and self._has(contents, min(AHEAD, len(contents)) - TOGETHER):
            return  # This is asked once a content, so that looking at each of them here would be the most work
        wanted = [content for content in contents[:AHEAD] if content.id not in self._under_way]
        if not wanted or (len(wanted) < TOGETHER and contents[0].id in self._under_way):
            return
        for start in range(0, len(wanted), TOGETHER):
            together = wanted[start : start + TOGETHER]
            size = sum(self._size(content) for content in together)
            if self._under_way and self._bytes + size > AHEAD_BYTES:
                return
            self._bytes += size
            future = self._pool.submit(self._read_all, together)
            self._under_way |= {content.id: (future, place) for place, content in enumerate(together)}

    def _has(self, contents: Sequence[Content], place: int) -> bool:
        return 0 <= place < len(contents) and contents[place].id in self._under_way

    def read(self, content: Content) -> Batch | None:
        """What it holds; None if none of its batches that were tried is there and sound."""
        for place, member in enumerate(content.members[:TRIES].tolist()):
            found = self._first(content) if place == 0 else self._read(self._listing.name(member))
            if isinstance(found, Batch):
                return found
            if found is not None:
                key, why = found
                self.damaged[key] = why
        return None

    def _first(self, content: Content) -> Found:
        """What its first batch is, which may have been read ahead."""
        if (under_way := self._under_way.pop(content.id, None)) is None:
            return self._read(self._listing.name(content.members[0]))
        future, place = under_way
        self._bytes -= self._size(content)
        results = future.result()
        found, results[place] = results[place], None
        return found

    def _size(self, content: Content) -> int:
        return int(self._listing.rows[content.members[0]]["size"])

    def _read_all(self, contents: Sequence[Content]) -> list[Found]:
        return [self._read(self._listing.name(content.members[0])) for content in contents]

    def _read(self, name: PendingName) -> Found:
        """A batch; its key and what is wrong with it; or None if another process absorbed and deleted it since."""
        data = self._blob.get(blob_key(self._shard, name.key))
        if data is None:
            return None
        try:
            return decode(name, data, self._schemas)
        except (Corrupt, NewerFormat) as error:
            return name.key, error.message

    def sums(self, content: Content, batch: Batch | None = None) -> TimeSums | None:
        """Its sums by time. `batch` is what it holds, if that was read already."""
        if (found := self._sums.get(content.id)) is not None:
            return found
        batch = batch or self.read(content)
        if batch is None:
            return None
        self._sums[content.id] = found = sums_of(self._schemas[-1], [batch.table])
        if len(self._sums) > SUMS_KEPT:
            self._sums.popitem(last=False)
        return found

    def writers(self, content: Content) -> set[str]:
        return {self._listing.writers[writer] for writer in self._listing.rows[content.members]["writer"]}

    def disagreement(self, time: int, contents: Sequence[Content], *, with_shard: bool = False) -> Disagreement:
        """That these contents, and the shard if it is one of the sides, say something else about a time."""
        sides = sorted(
            (tuple(sorted(self.writers(content))[:SHOWN]), self._listing.name(content.members[0]).key)
            for content in contents
        )
        writers, keys = tuple(side for side, _ in sides), tuple(key for _, key in sides)
        return Disagreement(time, keys, (*writers, ()) if with_shard else writers)
