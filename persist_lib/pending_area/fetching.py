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
from persist_lib.pending_area.comparing import TimeSums, sums_of
from persist_lib.pending_area.listing import SHOWN, Content, Listing
from persist_lib.pending_area.objects import Batch, decode
from persist_lib.pending_area.outcome import Disagreement
from persist_lib.schema.schema import Schema

AHEAD = 16
"""How many objects are fetched before they are asked for."""
AHEAD_BYTES = 32 << 20
"""How many bytes these have together, unless a single one has more."""
TRIES = 5
"""How many writers' batches of one content are tried before it counts as damaged."""
SUMS_KEPT = 64

Id = tuple[int, int, int, str]


class Fetcher:
    """Reads contents of one listing. `damaged` names the batches that are not what their names say."""

    def __init__(self, blob: Blob, shard: ShardId, listing: Listing, schemas: Sequence[Schema], pool: Executor) -> None:
        self._blob, self._shard, self._listing, self._schemas, self._pool = blob, shard, listing, schemas, pool
        self._under_way: dict[Id, tuple[PendingName, Future[bytes | None]]] = {}
        self._sums: OrderedDict[Id, TimeSums] = OrderedDict()
        self.damaged: dict[str, str] = {}

    def ahead(self, contents: Sequence[Content]) -> None:
        """Begin to fetch these, which will be asked for soon, in this order."""
        size = 0
        for content in contents[:AHEAD]:
            size += int(self._listing.rows[content.members[0]]["size"])
            if size > AHEAD_BYTES and content.id not in self._under_way and self._under_way:
                return
            if content.id not in self._under_way:
                name = self._listing.name(content.members[0])
                self._under_way[content.id] = name, self._pool.submit(self._get, name)

    def read(self, content: Content) -> Batch | None:
        """What it holds; None if none of its batches that were tried is there and sound."""
        first = self._under_way.pop(content.id, None)
        for member in content.members[:TRIES]:
            name = self._listing.name(member)
            data = first[1].result() if first is not None and first[0] == name else self._get(name)
            if data is None:
                continue  # absorbed and deleted by another process since it was listed
            try:
                return decode(name, data, self._schemas)
            except (Corrupt, NewerFormat) as error:
                self.damaged[name.key] = error.message
        return None

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
        """The names of all its writers."""
        return {self._listing.writers[writer] for writer in self._listing.rows[content.members]["writer"]}

    def disagreement(self, time: int, contents: Sequence[Content], *, with_shard: bool = False) -> Disagreement:
        """That these contents, and the shard if it is one of the sides, say something else about a time."""
        sides = sorted(
            (tuple(sorted(self.writers(content))[:SHOWN]), self._listing.name(content.members[0]).key)
            for content in contents
        )
        writers, keys = tuple(side for side, _ in sides), tuple(key for _, key in sides)
        return Disagreement(time, keys, (*writers, ()) if with_shard else writers)

    def _get(self, name: PendingName) -> bytes | None:
        return self._blob.get(blob_key(self._shard, name.key))
