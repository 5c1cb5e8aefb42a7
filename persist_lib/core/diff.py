"""The change from one state to the next: what a row of the log holds.

A transition returns a `StateDiff`, and `apply_diff` is the only way to make a new state, in a commit and in a replay.
So a replay cannot come out differently. The diff also holds the old values, which must match those of the state.

`compare` says what differs between two versions of a shard's metadata, however many transitions lie between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from persist_lib.core.state import (
    COUNTS_BYTES,
    Batch,
    Garbage,
    Hold,
    Outcome,
    Pin,
    Produced,
    Reader,
    Rollup,
    State,
    Writer,
)
from persist_lib.core.sums import MODULUS
from persist_lib.errors import InvariantViolated
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Schema


class TraceEdit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The batches with ids `removed`, contiguous, are replaced by `added`; without any, `added` goes to the end."""

    removed: tuple[tuple[int, int], ...]
    added: tuple[Batch, ...]


class OutcomesEdit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The oldest `forgotten` outcomes are forgotten, `added` goes to the end."""

    forgotten: int
    added: tuple[Outcome, ...]


MAPPINGS = ("writers", "readers", "holds", "retired", "garbage", "rollups", "producers", "pins", "identities")
"""The fields of a state that are mappings. A diff says which entries of them changed, by the same names."""


class StateDiff(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What changed: `(old, new)` for values, `(key, old, new)` for entries, with None for absent.

    `core.formats` says in which format a field came.
    """

    since: tuple[Antichain, Antichain] | None = None
    trace: TraceEdit | None = None
    schemas: tuple[Schema, ...] = ()
    writers: tuple[tuple[WriterId, Writer | None, Writer | None], ...] = ()
    readers: tuple[tuple[ReaderId, Reader | None, Reader | None], ...] = ()
    holds: tuple[tuple[str, Hold | None, Hold | None], ...] = ()
    retired: tuple[tuple[str, SeqNo | None, SeqNo | None], ...] = ()
    garbage: tuple[tuple[PartKey, Garbage | None, Garbage | None], ...] = ()
    rollups: tuple[tuple[SeqNo, Rollup | None, Rollup | None], ...] = ()
    retention: tuple[int | None, int | None] | None = None
    format: tuple[int, int] | None = None
    outcomes: OutcomesEdit | None = None
    producers: tuple[tuple[str, Produced | None, Produced | None], ...] = ()
    member: tuple[str, str] | None = None
    contents: tuple[Batch | None, Batch | None] | None = None
    pins: tuple[tuple[str, Pin | None, Pin | None], ...] = ()
    identities: tuple[tuple[str, int | None, int | None], ...] = ()


def apply_diff(state: State, diff: StateDiff) -> State:
    """The state after `diff`. Raises InvariantViolated where the old values are not the state's."""
    changes: dict[str, object] = {}
    for name in ("since", "retention", "format", "member"):
        if (edit := getattr(diff, name)) is not None:
            _expect(edit[0], getattr(state, name), name)
            changes[name] = edit[1]
    if diff.contents is not None:
        changes.update(_apply_contents(state, *diff.contents))
    if diff.outcomes is not None:
        changes["outcomes"] = state.outcomes[diff.outcomes.forgotten :] + diff.outcomes.added
    if diff.schemas:
        changes["schemas"] = state.schemas + diff.schemas
    if diff.trace is not None:
        changes.update(_apply_trace(state, diff.trace))
    for name in MAPPINGS:
        if edits := getattr(diff, name):
            changes[name] = _apply_edits(getattr(state, name), edits, name)
    return msgspec.structs.replace(state, **changes)


def _apply_contents(state: State, old: Batch | None, new: Batch | None) -> dict[str, object]:
    _expect(old, state.contents, "contents")
    if new is None:
        return {"contents": None}
    fresh = _fresh_bytes(() if old is None else (old,), (new,))
    return {"contents": new, "maintained_bytes": state.maintained_bytes + fresh}


def find_slice(trace: tuple[Batch, ...], ids: tuple[tuple[int, int], ...]) -> int | None:
    """Where `ids` start in the trace if they are a contiguous slice of it, else None."""
    start = bisect_left(trace, ids[0][0], key=lambda batch: batch.lo)
    found = trace[start : start + len(ids)]
    return start if tuple(batch.id for batch in found) == ids else None


def _apply_trace(state: State, edit: TraceEdit) -> dict[str, object]:
    start = find_slice(state.trace, edit.removed) if edit.removed else len(state.trace)
    if start is None:
        raise InvariantViolated(f"the diff removes batches {edit.removed} which the trace does not have")
    end = start + len(edit.removed)
    gone, came = state.trace[start:end], edit.added
    inline_size, fingerprint, count, size = state.inline_size, state.fingerprint, state.count, state.size
    for sign, batches in ((1, came), (-1, gone)):
        for batch in batches:
            inline_size += sign * batch.inline_size
            fingerprint += sign * batch.fingerprint
            count += sign * batch.count
            size += sign * batch.size
    trace = state.trace[:start] + came + state.trace[end:]
    changes: dict[str, object] = {
        "trace": trace, "inline_size": inline_size, "fingerprint": fingerprint % MODULUS, "count": count, "size": size,
    }  # fmt: skip
    if state.format >= COUNTS_BYTES:
        if not gone:  # an append
            changes["appended_bytes"] = state.appended_bytes + size - state.size
        elif fresh := _fresh_bytes(gone if state.contents is None else (*gone, state.contents), came):
            changes["maintained_bytes"] = state.maintained_bytes + fresh
    return changes


def _fresh_bytes(gone: tuple[Batch, ...], came: tuple[Batch, ...]) -> int:
    """The bytes of the parts of `came` that are not objects of `gone`: those that a compaction wrote."""
    kept = {key for batch in gone for key in batch.keys}
    return sum(part.size for batch in came for part in batch.parts if part.inline is not None or part.key not in kept)


K = TypeVar("K")
V = TypeVar("V")


def _apply_edits(entries: Mapping[K, V], edits: tuple[tuple[K, V | None, V | None], ...], what: str) -> dict[K, V]:
    changed = dict(entries)
    for key, old, new in edits:
        _expect(old, changed.get(key), f"{what}[{key}]")
        if new is None and old is None:
            raise InvariantViolated(f"the diff removes {what}[{key}], which is not there")
        if new is None:
            del changed[key]
        else:
            changed[key] = new
    return changed


def _expect(recorded: object, actual: object, what: str) -> None:
    if recorded != actual:
        raise InvariantViolated(f"the diff changes {what} from {recorded!r}, but it is {actual!r}")


COMPARED = ("since", "retention", "format", "contents")
COMPARED_MAPPINGS = tuple(name for name in MAPPINGS if name not in ("producers", "identities"))


class Comparison(msgspec.Struct, frozen=True):
    """The difference of two states, the older one first.

    `edits` are the slices of the older trace that were replaced, each by the batches that stand in its place now, and
    at last what was added at the end. `terms` has everything else: since, schemas, leases, holds, garbage, rollups.
    """

    edits: tuple[TraceEdit, ...]
    terms: StateDiff


def compare(older: State, newer: State) -> Comparison:
    """Compare two versions of one shard. Batches with the same id, parts and bounds are the same batch."""
    pairs = {name: (getattr(older, name), getattr(newer, name)) for name in COMPARED}
    moved: dict[str, Any] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    entries: dict[str, Any] = {name: _entries(getattr(older, name), getattr(newer, name)) for name in COMPARED_MAPPINGS}
    terms = StateDiff(schemas=newer.schemas[len(older.schemas) :], **moved, **entries)
    return Comparison(tuple(_edits(older.trace, newer.trace)), terms)


def _entries(old: Mapping[K, V], new: Mapping[K, V]) -> tuple[tuple[K, V | None, V | None], ...]:
    keys = sorted({*old, *new}, key=str)
    return tuple((key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))


def _edits(old: tuple[Batch, ...], new: tuple[Batch, ...]) -> list[TraceEdit]:
    """The slices that differ. Each ends where a batch ends in both traces, so that its two sides stand for the same."""
    end = old[-1].hi if old else 0
    kept, appended = (tuple(batch for batch in new if (batch.lo >= end) is is_new) for is_new in (False, True))
    ends = {batch.hi for batch in old} & {batch.hi for batch in kept}
    pairs = [*zip_longest(_cut(old, ends), _cut(kept, ends), fillvalue=()), ((), appended)]
    return [TraceEdit(tuple(batch.id for batch in gone), came) for gone, came in pairs if gone != came]


def _cut(trace: tuple[Batch, ...], ends: set[int]) -> list[tuple[Batch, ...]]:
    """The trace in slices, each up to a batch that ends at one of these ids; the last slice has what follows."""
    slices: list[tuple[Batch, ...]] = []
    start = 0
    for place, batch in enumerate(trace, 1):
        if batch.hi in ends:
            slices.append(trace[start:place])
            start = place
    return [*slices, trace[start:]] if start < len(trace) else slices
