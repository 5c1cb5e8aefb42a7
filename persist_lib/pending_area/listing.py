"""What lies in a pending area, as columns: some eighty bytes for each batch, however long its name.

The batches are grouped by what they hold: batches of several writers with the same times, count and digest are one
`Content` with several members, and nobody has to read more than one of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persist_lib.core.pending import PendingName, parse_pending_key
from persist_lib.format.paths import pending_key
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, ShardId
from persist_lib.location.api import BlobEntry

MOST = 1_000_000
"""The most batches that are kept of one listing: those with the earliest times. Another pass has the rest."""
SHOWN = 20
"""How many names are told of things that are counted."""
Indices = npt.NDArray[np.int64]

ROW = np.dtype(
    [("lower", "u8"), ("upper", "u8"), ("count", "i8"), ("size", "i8"), ("digest", "S32"), ("writer", "u4")]
)  # fmt: skip


class Content(NamedTuple):
    """Batches of one or several writers that hold the same. `members` are their rows in the listing."""

    lower: int
    upper: int
    updates: int
    digest: str
    members: Indices

    @property
    def id(self) -> tuple[int, int, int, str]:
        """What it holds, whoever wrote it."""
        return self[:4]


class Others(msgspec.Struct, frozen=True):
    """Objects of the pending area that are never absorbed: how many there are, and the first names."""

    count: int = 0
    names: tuple[str, ...] = ()

    def with_(self, name: str) -> Others:
        """The same and one more."""
        return Others(self.count + 1, (*self.names, name) if self.count < SHOWN else self.names)


class Listing:
    """The batches of one listing, by writer. `writers` are their names; `rows` has a row for each batch.

    Batches without an end and objects that are no batches are in `endless` and `foreign`. All batches that begin
    before `horizon` are in it, or all there are if that is None.
    """

    def __init__(
        self, writers: list[str], rows: npt.NDArray[np.void], endless: Others, foreign: Others, horizon: int | None
    ) -> None:  # fmt: skip
        self.writers, self.rows, self.endless, self.foreign, self.horizon = writers, rows, endless, foreign, horizon

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> PendingName:
        """What the name of a batch says."""
        row = self.rows[index]
        upper = Antichain(int(row["upper"]))
        return PendingName(self.writers[row["writer"]], int(row["lower"]), upper, int(row["count"]), _text(row))

    def keyed(self, indices: Iterable[int]) -> list[tuple[PartKey, int]]:
        """The keys of batches in a state, with their bytes."""
        return [(self.name(index).key, int(self.rows[index]["size"])) for index in indices]

    def late(self, upper: Antichain) -> Indices:
        """The batches whose times are all before `upper`."""
        if upper.time is None:
            return np.arange(len(self.rows))
        return np.flatnonzero(self.rows["upper"] <= np.uint64(upper.time))

    def contents(self, indices: Indices) -> list[Content]:
        """These batches grouped by what they hold, in the order of their lowers."""
        if not len(indices):
            return []
        rows = self.rows[indices]
        order = np.lexsort((rows["writer"], rows["digest"], rows["count"], rows["upper"], rows["lower"]))
        rows, indices = rows[order], indices[order]
        same = np.ones(len(rows), bool)
        for name in ("lower", "upper", "count", "digest"):
            same[1:] &= rows[name][1:] == rows[name][:-1]
        same[0] = False
        starts = np.flatnonzero(~same)
        ends = np.append(starts[1:], len(rows))
        found = zip(rows[starts], starts.tolist(), ends.tolist(), strict=True)
        return [
            Content(int(row["lower"]), int(row["upper"]), int(row["count"]), _text(row), indices[start:end])
            for row, start, end in found
        ]


def read_listing(shard: ShardId, entries: Iterable[BlobEntry], known: Container[str] = ()) -> Listing:
    """The listing that `entries` (below the shard's pending prefix) make up, in bounded memory.

    Those that a state knows (`known`), as it refers to them or as they are garbage, are left out.
    """
    most = MOST
    writers: dict[str, int] = {}
    kept: list[npt.NDArray[np.void]] = []
    endless, foreign, horizon, count = Others(), Others(), None, 0
    for chunk in _chunks(entries):
        rows = []
        for entry in chunk:
            if (key := pending_key(shard, entry.key)) in known:
                continue
            if (name := parse_pending_key(key)) is None:
                foreign = foreign.with_(entry.key)
            elif name.upper.time is None:
                endless = endless.with_(name.key)
            else:
                writer = writers.setdefault(name.writer, len(writers))
                rows.append((name.lower, name.upper.time, name.count, entry.size, name.digest.encode(), writer))
        kept.append(np.array(rows, ROW))
        count += len(rows)
        if count > 2 * most:
            kept, horizon = _earliest(kept, most, horizon)
            count = len(kept[0])
    if count > most:
        kept, horizon = _earliest(kept, most, horizon)
    return Listing(list(writers), np.concatenate(kept) if kept else np.empty(0, ROW), endless, foreign, horizon)


def _earliest(
    kept: list[npt.NDArray[np.void]], most: int, horizon: int | None
) -> tuple[list[npt.NDArray[np.void]], int]:
    """The rows that begin before the time at which the first row is left out, and that time."""
    rows = np.concatenate(kept)
    cut = int(np.partition(rows["lower"], most)[most])
    cut = cut if horizon is None else min(cut, horizon)
    earlier = rows[rows["lower"] < np.uint64(cut)]
    # SUBTLE: where more than that begin at one time, some are left out. They are compared when they are late.
    return ([earlier], cut) if len(earlier) else ([rows[rows["lower"] == np.uint64(cut)][:most]], cut + 1)


def _chunks(entries: Iterable[BlobEntry], rows: int = 10_000) -> Iterator[list[BlobEntry]]:
    chunk: list[BlobEntry] = []
    for entry in entries:
        chunk.append(entry)
        if len(chunk) == rows:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _text(row: np.void) -> str:
    return bytes(row["digest"]).decode()
