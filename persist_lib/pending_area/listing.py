"""What lies in a pending area, as columns: some eighty bytes for each batch, however long its name; and reading it.

The batches are grouped by what they hold: batches of several writers with the same times, count and digest are one
`Content` with several members, and a reader needs only one of them. Contents are read ahead of their use, from any of
their writers, and only what is sound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persist_lib.core.cost import Cost
from persist_lib.core.pending import PendingName, parse_pending_key
from persist_lib.errors import Corrupt, NewerFormat
from persist_lib.format.paths import blob_key, pending_key, pending_prefix
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import PartKey, ShardId
from persist_lib.location.api import Blob, BlobEntry
from persist_lib.location.wrap.around import listed
from persist_lib.pending_area.objects import Batch, TimeSums, decode, sums_of
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine

MOST = 1_000_000
"""The most batches that are kept of one listing: those with the earliest times. Another pass has the rest."""
PAGE = 10_000
SHOWN = 20
"""How many names are given of things that are counted."""
T = TypeVar("T")
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
        """What it holds, whichever writer it is from."""
        return self[:4]


class Others(msgspec.Struct, frozen=True):
    """Objects of the pending area that are never absorbed: how many there are, and the first names."""

    count: int = 0
    names: tuple[str, ...] = ()

    def with_(self, name: str) -> Others:
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


class Known(Container[str]):
    """The keys that a pass leaves out: what the state knows, and what is not in a plan, if there is one."""

    def __init__(self, known: Container[str], planned: Container[str] | None) -> None:
        self.known, self.planned = known, planned

    def __contains__(self, key: object) -> bool:
        return key in self.known or (self.planned is not None and key not in self.planned)


def read_listing(shard: ShardId, entries: Iterable[BlobEntry], known: Container[str] = ()) -> Listing:
    """The listing that `entries` (below the shard's pending prefix) make up, in bounded memory.

    Those that a state knows (`known`), as it refers to them or as they are garbage, are left out.
    """
    most = MOST
    writers: dict[str, int] = {}
    kept: list[npt.NDArray[np.void]] = []
    endless, foreign, horizon, count = Others(), Others(), None, 0
    for chunk in pages(entries, PAGE):
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


def fetch_listing(machine: Machine, known: Container[str] = (), writer: str = "") -> Listing:
    """What is pending in a shard's area, or there of one writer, without what is `known`."""
    prefix = pending_prefix(machine.shard) + (f"{writer}/" if writer else "")
    return read_listing(machine.shard, listed(machine.blob, prefix), known)


def _earliest(
    kept: list[npt.NDArray[np.void]], most: int, horizon: int | None
) -> tuple[list[npt.NDArray[np.void]], int]:
    """The rows that begin before the time at which the first row is left out, and that time."""
    rows = np.concatenate(kept)
    cut = int(np.partition(rows["lower"], most)[most])
    cut = cut if horizon is None else min(cut, horizon)
    earlier = rows[rows["lower"] < np.uint64(cut)]
    # Where more than that begin at one time, some are left out. They are compared when they are late.
    return ([earlier], cut) if len(earlier) else ([rows[rows["lower"] == np.uint64(cut)][:most]], cut + 1)


def pages(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """The same things, `size` at a time."""
    left = iter(things)
    return iter(lambda: list(islice(left, size)), [])


def _text(row: np.void) -> str:
    return bytes(row["digest"]).decode()


class Sweep:
    """A frontier that moves through contents, which are in the order of their lowers."""

    def __init__(self, contents: Sequence[Content], frontier: int) -> None:
        self.frontier = frontier
        self._contents = contents
        self._next = 0
        self._around: list[Content] = []

    def advance(self, to: int) -> None:
        """Move the frontier. It never moves back."""
        self.frontier = to
        self._around = [content for content in self._around if content.upper > to]

    def candidates(self) -> list[Content]:
        """The contents that continue from the frontier, the best first: what reaches furthest, and is not cut."""
        self._read(self.frontier + 1)
        found = [content for content in self._around if content.lower <= self.frontier]
        return sorted(found, key=lambda content: (-content.upper, content.lower != self.frontier, content.id))

    def overlapping(self, upper: int) -> list[Content]:
        """The contents that have some of the times from the frontier to `upper`."""
        self._read(upper)
        return [content for content in self._around if content.lower < upper]

    def _read(self, before: int) -> None:
        """Have all contents around that begin before a time, and end after the frontier."""
        while self._next < len(self._contents) and self._contents[self._next].lower < before:
            content = self._contents[self._next]
            self._next += 1
            if content.upper > self.frontier:
                self._around.append(content)


def chain_of(contents: Sequence[Content], frontier: int) -> list[Content]:
    """The contents that a sweep would pick if all of them were sound, one after the other without a gap."""
    sweep, chain = Sweep(contents, frontier), list[Content]()
    while found := sweep.candidates():
        chain.append(found[0])
        sweep.advance(found[0].upper)
    return chain


class Disagreement(msgspec.Struct, frozen=True):
    """Batches that hold other updates for the same time. `time` is the earliest one, `writers` who says what.

    Each side is one content, with the key of one of its batches, and the names of its writers (the first ones). A side
    without writers is the shard: then the batch of the other side came late, and what the shard has stays as it is.
    """

    time: int
    keys: tuple[str, ...]
    writers: tuple[tuple[str, ...], ...]

    @property
    def is_late(self) -> bool:
        """Whether it is about a time that the shard has already."""
        return () in self.writers


class Absorbed(msgspec.Struct, frozen=True):
    """What became of the batches of a pending area.

    `batches` were absorbed with `updates`, of these `adopted` without being rewritten. `discarded` are others that
    nothing needs: those of other writers for the same times, and late ones. `left` are still pending, beyond `upper`.
    """

    shard: str
    lower: Antichain = MINIMUM
    upper: Antichain = MINIMUM
    batches: int = 0
    adopted: int = 0
    updates: int = 0
    size: int = 0
    discarded: int = 0
    deleted: int = 0
    """Batches deleted beneath a tombstone."""
    left: int = 0
    transitions: int = 0
    gap: int | None = None
    """A time from which on nothing continues, though batches beyond it are there; None if there is no such time."""
    ahead: int = 0
    """Batches that end too far ahead of the store's clock, and are not absorbed before that has come closer."""
    disagreements: tuple[Disagreement, ...] = ()
    damaged: dict[str, str] = {}
    """Batches that are not what their names say, and why."""
    endless: Others = Others()
    foreign: Others = Others()
    waits: str = ""
    """Why it stopped before everything that could be absorbed was."""
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""

    @property
    def is_blocked(self) -> bool:
        """Whether an operator has to choose, as writers disagree about a time that the shard does not have."""
        return any(not one.is_late for one in self.disagreements)


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


def fetch_batch(blob: Blob, shard: ShardId, name: PendingName, schemas: Sequence[Schema]) -> Found:
    """A batch; its key and what is wrong with it; or None if it is gone."""
    data = blob.get(blob_key(shard, name.key))
    try:
        return None if data is None else decode(name, data, schemas)
    except (Corrupt, NewerFormat) as error:
        return name.key, error.message


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
        return fetch_batch(self._blob, self._shard, name, self._schemas)

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
