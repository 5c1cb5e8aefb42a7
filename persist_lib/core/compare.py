"""What differs between two versions of a shard's metadata, however many transitions lie between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TypeVar

import msgspec

from persist_lib.core.diff import StateDiff, TraceEdit
from persist_lib.core.state import Batch, State

K = TypeVar("K")
V = TypeVar("V")


class Comparison(msgspec.Struct, frozen=True):
    """The difference of two states, the older one first.

    `edits` are the slices of the older trace that were replaced, each by the batches that stand in its place now, and
    at last what was added at the end. `terms` has everything else: since, schemas, leases, holds, garbage, rollups.
    """

    edits: tuple[TraceEdit, ...]
    terms: StateDiff


def compare(older: State, newer: State) -> Comparison:
    """Compare two versions of one shard. Batches with the same id, parts and bounds are the same batch."""
    terms = StateDiff(
        since=_moved(older.since, newer.since),
        schemas=newer.schemas[len(older.schemas) :],
        writers=_entries(older.writers, newer.writers),
        readers=_entries(older.readers, newer.readers),
        holds=_entries(older.holds, newer.holds),
        retired=_entries(older.retired, newer.retired),
        garbage=_entries(older.garbage, newer.garbage),
        rollups=_entries(older.rollups, newer.rollups),
        retention=_moved(older.retention, newer.retention),
        format=_moved(older.format, newer.format),
        contents=_moved(older.contents, newer.contents),
        pins=_entries(older.pins, newer.pins),
    )
    return Comparison(tuple(_edits(older.trace, newer.trace)), terms)


def _moved(old: V, new: V) -> tuple[V, V] | None:
    return None if old == new else (old, new)


def _entries(old: Mapping[K, V], new: Mapping[K, V]) -> tuple[tuple[K, V | None, V | None], ...]:
    keys = sorted({*old, *new}, key=str)
    return tuple((key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))


def _edits(old: tuple[Batch, ...], new: tuple[Batch, ...]) -> list[TraceEdit]:
    """The slices that differ. Each ends where a batch ends in both traces, so that its two sides stand for the same."""
    end = old[-1].hi if old else 0
    kept, appended = (tuple(batch for batch in new if (batch.lo >= end) is is_new) for is_new in (False, True))
    ends = {batch.hi for batch in old} & {batch.hi for batch in kept}
    pairs = [*zip_longest(_cut(old, ends), _cut(kept, ends), fillvalue=()), ((), appended)]
    return [_edit(gone, came) for gone, came in pairs if gone != came]


def _cut(trace: tuple[Batch, ...], ends: set[int]) -> list[tuple[Batch, ...]]:
    """The trace in slices, each up to a batch that ends at one of these ids; the last slice has what follows."""
    slices: list[tuple[Batch, ...]] = []
    start = 0
    for place, batch in enumerate(trace, 1):
        if batch.hi in ends:
            slices.append(trace[start:place])
            start = place
    return [*slices, trace[start:]] if start < len(trace) else slices


def _edit(gone: tuple[Batch, ...], came: tuple[Batch, ...]) -> TraceEdit:
    return TraceEdit(tuple(batch.id for batch in gone), came)
