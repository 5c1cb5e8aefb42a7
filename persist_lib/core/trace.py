"""The trace: all batches of a shard, oldest first, contiguous from the minimum time to upper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from persist_lib.core import refusals as r
from persist_lib.core.diff import TraceEdit
from persist_lib.core.state import Batch, Garbage, Part, State
from persist_lib.core.sums import Sums, total
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import PartKey, SeqNo, uploader_of
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import has_bounds

CHUNK_BYTES = 8 * 1024 * 1024
"""Each chunk of this size in an object has a digest of its own, so that ranges of it can be verified."""
DIGEST_BYTES = 16
Freed = tuple[tuple[PartKey, Garbage | None, Garbage | None], ...]
"""The entries of a diff that make objects garbage."""
GROUP_ROWS = 1 << 17
GROUP_BYTES = 2 * CHUNK_BYTES
"""At most the size of a row group, in rows and bytes. With smaller ones, some columns would lie in every chunk."""


class Level(NamedTuple):
    """The batches of one size class: `2**level` updates or a little fewer. `level` is -1 for empty batches."""

    level: int
    batches: int
    updates: int
    size: int


def level_of(count: int) -> int:
    """The size class of a batch with `count` updates: -1 for none, k for (2**(k-1), 2**k]."""
    return (count - 1).bit_length() if count > 0 else -1


def levels(trace: Iterable[Batch]) -> list[Level]:
    """The trace by size class, largest first."""
    found: dict[int, Level] = {}
    for batch in trace:
        level = level_of(batch.count)
        old = found.get(level, Level(level, 0, 0, 0))
        found[level] = Level(level, old.batches + 1, old.updates + batch.count, old.size + batch.size)
    return sorted(found.values(), reverse=True)


def push(state: State, batch: Batch, seqno: SeqNo) -> TraceEdit:
    """Put a batch at the end. An empty batch after an empty one extends that one, so idle time costs no space.

    Not over the end of the contents that are kept ahead, which stand for whole batches.
    """
    last = state.trace[-1] if state.trace else None
    ahead = -1 if state.contents is None else state.contents.hi
    if last is not None and last.count == 0 and batch.count == 0 and last.hi != ahead:
        since = last.since.join(batch.since)
        fused = Batch(last.lo, last.hi + 1, last.lower, batch.upper, since, 0, 0, 0, born=seqno)
        return TraceEdit((last.id,), (fused,))
    lo = state.next_id
    return TraceEdit((), (msgspec.structs.replace(batch, lo=lo, hi=lo + 1, born=seqno),))


def batch_problems(batch: Batch, state: State) -> list[str]:
    """The problems of a batch by itself, one sentence each; empty for a sound batch."""
    found = []
    if not batch.lower < batch.upper:
        found.append(f"bounds [{batch.lower}, {batch.upper}) are empty")
    if batch.count < 0 or (batch.count == 0) != (not batch.parts):
        found.append(f"{batch.count} updates in {len(batch.parts)} parts")
    rows = sum([part.rows for part in batch.parts])
    if batch.count > rows or (batch.exact and batch.count != rows):
        found.append(f"{batch.count} updates, but the parts hold {rows}")
    if batch.count == 0 and (batch.fingerprint or batch.diff_sum):
        found.append("an empty batch has a fingerprint")
    is_ascending = len(batch.runs) < 2 or list(batch.runs) == sorted(set(batch.runs))
    if not is_ascending or bool(batch.runs) != bool(batch.parts):
        found.append(f"runs {batch.runs} are not ascending starts")
    if batch.runs and (batch.runs[0] != 0 or batch.runs[-1] >= len(batch.parts)):
        found.append(f"runs {batch.runs} do not fit {len(batch.parts)} parts")
    if not batch.sums.is_in_range():
        found.append("fingerprint or diff sum is out of range")
    if len(keys := batch.keys) > 1 and len(set(keys)) != len(keys):
        found.append("it refers to a blob twice")
    for part in batch.parts:
        found += _part_problems(part, batch, state.schemas)
    if batch.exact and batch.parts and (said := sums_of_parts(batch.parts)) is not None and said != batch.sums:
        found.append(f"its parts say that they add up to {said}, and it says {batch.sums}")
    return found


def sums_of_parts(parts: Iterable[Part]) -> Sums | None:
    """What these parts say that they add up to; None if one of them does not say it."""
    said = [part.sums for part in parts]
    return None if None in said else total(one for one in said if one is not None)


def known_keys(state: State, keys: Iterable[PartKey]) -> list[PartKey]:
    """Those of `keys` that the state's batches refer to or that are garbage: neither may ever be linked again.

    Without keys it returns at once, so that appends without an object do not pay for a look through the trace.
    """
    if not (asked := set(keys)):
        return []
    found = {part.key for batch in state.stored for part in batch.parts if part.key in asked}
    return sorted(found.union(key for key in asked if key in state.garbage))


def dead_uploaders(state: State, keys: Iterable[PartKey]) -> tuple[str, ...]:
    """Who uploaded these and is not live any more: what they uploaded is never linked."""
    return tuple(sorted({uploader_of(key) for key in keys} - state.writers.keys()))


def cannot_link(state: State, batch: Batch, held: Mapping[PartKey, Part]) -> r.Refusal | None:
    """Why `batch`, which takes the place of what has the objects `held`, cannot be linked with its own; None if it can.

    Those that it keeps must be described as they were; others must be new.
    """
    if any(part != held.get(part.key, part) for part in batch.parts):
        return r.NotEquivalent("a part that is kept is described differently")
    known = known_keys(state, (key for key in batch.keys if key not in held))
    return r.Exists(known[0]) if known else None


def freed(held: Mapping[PartKey, Part], keys: Iterable[PartKey], seqno: SeqNo) -> Freed:
    """The objects of `held` as garbage, but for `keys`."""
    return tuple((key, None, Garbage(seqno, held[key].size)) for key in sorted(held.keys() - set(keys)))


def _are_sound(part: Part, schema: Schema) -> bool:
    """Whether bounds of values can be those of a part of this schema: of an object, each column at most once."""
    places = [one.column for one in part.values]
    if (
        part.inline is not None
        or places != sorted(set(places))
        or not 0 <= places[0] <= places[-1] < len(schema.columns)
    ):
        return False
    return all(
        has_bounds(schema.columns[one.column].type)
        and (
            one.has_null if one.lower is None or one.upper is None else one.lower <= one.upper  # which NaN is not
        )
        and (one.lower is None) is (one.upper is None)
        for one in part.values
    )


def _part_problems(part: Part, batch: Batch, schemas: Sequence[Schema]) -> list[str]:
    found = []
    if (part.inline is None) != bool(part.key):
        found.append(f"part {part.key!r} must be either an object or inline")
    if part.rows <= 0 or part.size <= 0:
        found.append(f"part {part.key!r} is empty")
    if part.sums is not None and (part.sums.count != part.rows or not part.sums.is_in_range()):
        found.append(f"part {part.key!r} of {part.rows} updates says that they add up to {part.sums}")
    if not 0 <= part.earliest <= part.rows:
        found.append(f"part {part.key!r} has {part.earliest} of {part.rows} updates at its first time")
    if len(part.digests) != DIGEST_BYTES * -(-part.size // CHUNK_BYTES):
        found.append(f"part {part.key!r} lacks digests")
    if part.inline is not None and len(part.inline) != part.size:
        found.append("an inline part's size is not its bytes'")
    if not 0 <= part.schema < len(schemas):
        found.append(f"part {part.key!r} has unknown schema {part.schema}")
    elif part.values and not _are_sound(part, schemas[part.schema]):
        found.append(f"part {part.key!r} has impossible bounds of values: {part.values}")
    if not 0 <= part.time_lower <= part.time_upper <= MAX_TIME or part.key_lower > part.key_upper:
        found.append(f"part {part.key!r} has impossible bounds")
    if part.at is not None and not (part.at == part.time_lower == part.time_upper and part.earliest == part.rows):
        found.append(f"part {part.key!r} counts at {part.at}, and is said to have other times")
    if batch.exact and not (batch.lower.is_before(part.time_lower) and batch.upper.has_passed(part.time_upper)):
        found.append(f"part {part.key!r} has times outside of [{batch.lower}, {batch.upper})")
    return found
