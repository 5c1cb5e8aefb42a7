"""Building a batch: the user's updates become sorted, consolidated, fingerprinted parts, inline or in Blob.

Memory is bounded by about two parts, however long the input. Each part's worth of updates is one sorted run, unless the
input comes in order. Each object is uploaded while the next one is built, until the caller's deadline. If the batch
fails before it is whole, its objects are deleted again.

Sums are exact. The sum over one part's worth of updates is not final, as another part may hold the same data.
So a sum beyond 64 bits stays several updates of its part; and if several parts could add up to such a sum, they are
read once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.config import Config
from persist_lib.core.state import Batch, Part
from persist_lib.core.sums import Sums, total
from persist_lib.errors import DiffOverflow, PersistError
from persist_lib.format.descriptions import EncodedPart
from persist_lib.format.parts import encode_inline, encode_part
from persist_lib.format.paths import blob_key, part_key
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import PartKey, WriterId
from persist_lib.kernel.columns import integers
from persist_lib.kernel.consolidate import I64_MAX, consolidate
from persist_lib.kernel.fingerprint import diffs_of, hash_rows
from persist_lib.kernel.merge import merge_runs
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.machine import Shard
from persist_lib.shard.runs import Stored, inputs_of

A = TypeVar("A")
B = TypeVar("B")
log = logging.getLogger("persist.write")
FEW = 16
"""A table of at most this many rows is encoded without looking at its size first."""
MANY = 1 << 16
"""A table of more rows is put in order by two cores."""
UPLOADS = 2
"""Objects that are uploaded at once. One is uploaded while the next is encoded."""
DELETE_S = 0.5
"""How long deleting the objects of a failed batch may take beyond the deadline. The audit finds what is left."""


class PutPart(NamedTuple):
    """A part that is stored, and the sums over its updates."""

    part: Part
    sums: Sums


class ByTime(msgspec.Struct, frozen=True):
    """For each distinct time, ascending: the count of updates, their diff sum and fingerprint. Gives suffix sums."""

    times: np.ndarray
    counts: np.ndarray
    diff_sums: np.ndarray
    fingerprints: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[ByTime]) -> ByTime:
        times, order = np.unique(np.concatenate([piece.times for piece in pieces]), return_inverse=True)
        sums = []
        for name in ("counts", "diff_sums", "fingerprints"):
            values = np.concatenate([getattr(piece, name) for piece in pieces])
            total = np.zeros(len(times), values.dtype)
            np.add.at(total, order, values)
            sums.append(total)
        return cls(times, *sums)

    def from_(self, lower: int) -> Sums:
        start = int(np.searchsorted(self.times, lower))
        return Sums(
            int(self.counts[start:].sum()), int(self.diff_sums[start:].sum()), int(self.fingerprints[start:].sum())
        )


class Built(msgspec.Struct, frozen=True):
    """A batch that is ready to be committed. `table` is set while it is inline, `by_time` if it was asked for."""

    batch: Batch
    by_time: ByTime | None = None
    table: pa.Table | None = None

    def trimmed(self, lower: Antichain) -> Batch:
        """The batch registered from `lower` on, with the statistics of the tighter bounds."""
        if lower <= self.batch.lower or self.by_time is None or lower.time is None:
            return self.batch
        sums = self.by_time.from_(lower.time)
        kept = msgspec.structs.replace(
            self.batch, lower=lower, count=sums.count, diff_sum=sums.diff_sum, fingerprint=sums.fingerprint, exact=False
        )
        return kept if sums.count else Batch(0, 0, lower, self.batch.upper, MINIMUM, 0, 0, 0)


class Laid(msgspec.Struct, frozen=True):
    """Parts of a batch that is not whole yet, each sorted and consolidated, and the sums over all their updates.

    `most` is at least the absolute value of the sum for any one data, as far as these parts have it. From `I64_MAX` on
    only a look at all parts of the batch tells whether a sum fits. `table` has the rows while they are inline.
    """

    parts: tuple[Part, ...] = ()
    sums: Sums = Sums()
    most: int = 0
    table: pa.Table | None = None


class Builder:
    """Builds batches for one uploader until a deadline. The caller has checked the tables' times and schema.

    `uploader` is called only when there is something to upload, so updates that are refused register no writer.
    """

    def __init__(
        self, shard: Shard, uploader: Callable[[], WriterId], schema: Schema, schema_id: int, deadline: Deadline,
        config: Config | None = None,
    ) -> None:  # fmt: skip
        self._shard, self._blob, self._runtime = shard.shard, shard.blob, shard.runtime
        self._config = config or shard.config
        self._uploader, self._schema, self._schema_id, self._deadline = uploader, schema, schema_id, deadline
        self._keys: list[PartKey] = []

    def build(
        self,
        tables: Iterator[pa.Table],
        lower: Antichain,
        upper: Antichain,
        *,
        inline_bytes: int,
        by_time: bool = False,
    ) -> Built:
        """The batch of all updates of `tables`. It is inline if it has at most `inline_bytes` bytes."""
        chunks = _chunks(tables, self._config.part_bytes)
        first = next(chunks, None)
        if first is None:
            return Built(Batch(0, 0, lower, upper, MINIMUM, 0, 0, 0))
        try:
            if first.num_rows > MANY:
                with self._runtime.pool(UPLOADS, "persist-sort") as pool:
                    first = consolidate(self._schema, first, spread=partial(_map, pool))
            elif first.num_rows > 1:
                first = consolidate(self._schema, first)
        except DiffOverflow:
            if (second := next(chunks, None)) is None:
                raise
            first = consolidate(self._schema, first, "split")
        else:
            second = next(chunks, None)
        if second is None and not first.num_rows:
            return Built(Batch(0, 0, lower, upper, MINIMUM, 0, 0, 0))
        if second is None and (first.num_rows <= FEW or first.nbytes <= inline_bytes):
            inline = encode_inline(self._schema, self._schema_id, first)
            if inline.size <= inline_bytes:
                stored = PutPart(as_part(inline, None, self._schema_id), inline.said.sums)
                return self._built([stored], lower, upper, [_by_time(self._schema, first)] if by_time else [], first)
        return self._upload(first, second, chunks, lower, upper, by_time)

    def externalised(self, built: Built) -> Built:
        """The same batch, with its one inline part uploaded as an object."""
        if built.table is None or not built.batch.parts:
            return built
        encoded = encode_part(self._schema, self._schema_id, built.table)
        try:
            part = self._put(self._fresh_key(), encoded).part
        except Exception:
            self.discard()
            raise
        # Its bounds are those of the inline part, so that the runs stay as they are.
        parts = tuple(part if old.inline is not None else old for old in built.batch.parts)
        return msgspec.structs.replace(built, batch=msgspec.structs.replace(built.batch, parts=parts), table=None)

    @property
    def has_uploaded(self) -> bool:
        return bool(self._keys)

    def discard(self) -> None:
        """Try to delete what was uploaded. Call it only if no commit was ever asked to refer to the objects.

        An upload that got no answer may still arrive after this. Then it is an orphan for the audit, as is an
        object that cannot be deleted now.
        """
        keys, self._keys = [blob_key(self._shard, key) for key in self._keys], []
        if not keys:
            return
        try:
            deadline = self._runtime.deadline(max(DELETE_S, min(self._deadline.remaining_s(), 10 * DELETE_S)))
            failed: object = within(deadline, lambda: self._blob.delete_many(keys))
        except PersistError as error:
            failed = error
        if failed:
            log.info("shard %s: some of %d unused objects are left to the audit: %s", self._shard, len(keys), failed)

    def lay(self, tables: Iterator[pa.Table], *, inline_bytes: int) -> Laid:
        """Parts of all updates of `tables`, for a batch that has others beside them. Inline if they are that small.

        A sum beyond 64 bits stays several updates: only the whole batch says whether it is one.
        """
        ready = (table for table in self._consolidated(tables) if table.num_rows)
        if (first := next(ready, None)) is None:
            return Laid()
        second = next(ready, None)
        if second is None and (first.num_rows <= FEW or first.nbytes <= inline_bytes):
            inline = encode_inline(self._schema, self._schema_id, first)
            if inline.size <= inline_bytes:
                part = as_part(inline, None, self._schema_id)
                return Laid((part,), inline.said.sums, _largest(first), first)
        stored, most, _ = self._put_all(chain([first] if second is None else [first, second], ready), by_time=False)
        return Laid(tuple(piece.part for piece in stored), total(piece.sums for piece in stored), most)

    def _consolidated(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for chunk in _chunks(tables, self._config.part_bytes):
            yield consolidate(self._schema, chunk, "split")

    def _upload(
        self, first: pa.Table, second: pa.Table | None, rest: Iterator[pa.Table], lower: Antichain, upper: Antichain,
        by_time: bool,
    ) -> Built:  # fmt: skip
        stored, most, times = self._put_all(_all(first, second, rest, self._schema), by_time=by_time)
        try:
            built = self._built(stored, lower, upper, times, None)
            return self.totalled(built) if second is not None and most >= I64_MAX else built
        except Exception:
            self.discard()
            raise

    def _put_all(self, tables: Iterator[pa.Table], *, by_time: bool) -> tuple[list[PutPart], int, list[ByTime]]:
        """Upload each table as a part. Returns them, the sum of their largest diffs, and their sums by time."""
        uploads: list[Future[PutPart]] = []
        times: list[ByTime] = []
        most = 0
        try:
            with self._runtime.pool(UPLOADS, "persist-upload") as pool:
                for table in tables:
                    if not table.num_rows:
                        continue
                    most += _largest(table)
                    if by_time:
                        times.append(_by_time(self._schema, table))
                    encoded = encode_part(self._schema, self._schema_id, table, partial(_map, pool))
                    if len(uploads) >= UPLOADS:
                        uploads[-UPLOADS].result()
                    uploads.append(_submit(pool, partial(self._put, self._fresh_key(), encoded)))
            return [upload.result() for upload in uploads], most, times
        except Exception:
            self.discard()  # leaving the pool has waited for the uploads that were under way
            raise

    def totalled(self, built: Built) -> Built:
        """The same, or DiffOverflow when a sum over several parts does not fit. Reads them, in bounded memory."""
        schemas = [self._schema] * (self._schema_id + 1)

        def read() -> None:
            runs = Stored(self._blob, self._shard, schemas, self._schema).streams(inputs_of((built.batch,)))
            for _ in merge_runs(runs, self._schema, merge_bytes=self._config.merge_bytes):
                pass

        within(self._deadline, read)
        return built

    def _built(
        self,
        stored: Sequence[PutPart],
        lower: Antichain,
        upper: Antichain,
        times: Sequence[ByTime],
        table: pa.Table | None,
    ) -> Built:
        parts = [piece.part for piece in stored]
        sums = stored[0].sums if len(stored) == 1 else total(piece.sums for piece in stored)
        batch = Batch(
            0, 0, lower, upper, MINIMUM,
            count=sums.count, diff_sum=sums.diff_sum, fingerprint=sums.fingerprint,
            parts=tuple(parts), runs=_runs(parts),
        )  # fmt: skip
        return Built(batch, ByTime.of(times) if times else None, table)

    def _fresh_key(self) -> PartKey:
        key = part_key(self._uploader(), self._runtime.entropy())
        self._keys.append(key)
        return key

    def _put(self, key: PartKey, encoded: EncodedPart) -> PutPart:
        within(self._deadline, lambda: self._blob.set(blob_key(self._shard, key), encoded.data))
        return PutPart(as_part(encoded, key, self._schema_id), encoded.said.sums)


def as_part(encoded: EncodedPart, key: PartKey | None, schema_id: int) -> Part:
    """How the state refers to an encoded part: stored under `key`, or inline (None)."""
    said = encoded.said
    return Part(
        key or PartKey(""), encoded.size, said.sums.count, encoded.digests, said.key_lower, said.key_upper,
        said.time_lower, said.time_upper, schema_id, None if key else bytes(encoded.data), said.earliest,
        values=said.values if key else (),
    )  # fmt: skip


def _chunks(tables: Iterator[pa.Table], chunk_bytes: int) -> Iterator[pa.Table]:
    """The same updates in tables of about `chunk_bytes` in memory."""
    first, second = next(tables, None), next(tables, None)
    if second is None and first is not None and first.num_rows <= FEW:
        yield first  # a small append: nothing to measure
        return
    tables = chain([table for table in (first, second) if table is not None], tables)
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        row_bytes, rest = max(1, table.nbytes // max(1, table.num_rows)), table
        while rest.num_rows:
            room = max(1, (chunk_bytes - size) // row_bytes)
            piece = rest if rest.num_rows <= room else rest.slice(0, room)
            held.append(piece)
            size += piece.num_rows * row_bytes
            if size >= chunk_bytes:
                yield pa.concat_tables(held)
                held, size = [], 0
            if piece is rest:
                break
            rest = rest.slice(room)
    if held:
        yield pa.concat_tables(held) if len(held) > 1 else held[0]


def _all(first: pa.Table, second: pa.Table | None, rest: Iterator[pa.Table], schema: Schema) -> Iterator[pa.Table]:
    yield first
    if second is not None:
        yield consolidate(schema, second, "split")
    for table in rest:
        yield consolidate(schema, table, "split")


def _largest(table: pa.Table) -> int:
    """The largest diff by absolute value. A sum beyond 64 bits shows as the largest diff that there can be."""
    diffs = integers(table.column(DIFF))
    return max(abs(int(diffs.min())), abs(int(diffs.max())))


def _runs(parts: list[Part]) -> tuple[int, ...]:
    """Where runs start. Parts in key order are one run; where bounds touch, parts may overlap, and a new run starts."""
    return tuple(i for i, part in enumerate(parts) if i == 0 or not parts[i - 1].key_upper < part.key_lower)


def _by_time(schema: Schema, table: pa.Table) -> ByTime:
    times, diffs = integers(table.column(TIME)), diffs_of(table)
    order = np.argsort(times, kind="stable")
    distinct, starts, counts = np.unique(times[order], return_index=True, return_counts=True)
    with np.errstate(over="ignore"):
        products = (diffs * hash_rows(schema, table))[order]
        sums = np.add.reduceat(diffs[order], starts).astype(np.int64)
        return ByTime(distinct, counts, sums, np.add.reduceat(products, starts))


# When the interpreter ends, it waits for the threads that are at work, but none can start. The thread that
# writes what an outbox still has then encodes and uploads by itself.


def _submit(pool: Executor, work: Callable[[], A]) -> Future[A]:
    try:
        return pool.submit(work)
    except RuntimeError:
        done: Future[A] = Future()
        done.set_result(work())
        return done


def _map(pool: Executor, work: Callable[[B], A], values: Iterable[B]) -> Iterator[A]:
    values = list(values)
    try:
        return pool.map(work, values)
    except RuntimeError:
        return map(work, values)
