"""Parts of the heaviest run that a merge can keep as they are, as no newer update has one of their keys.

Changes of a table mostly come together: today's rows, some customers. What they do not touch need not be read and
written again, and publications still name it. What is kept is proven: such parts say their sums, and the state
machine compares what all parts of a batch say with what the inputs came to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from persist_lib.core.plan.clusters import By, are_apart, ends, place_of
from persist_lib.core.plan.requests import Kept, Request, TaskInput, task_inputs
from persist_lib.core.state import Part
from persist_lib.format.parts import places_of
from persist_lib.ids import is_published
from persist_lib.kernel.keys import encode_row, search
from persist_lib.schema.schema import Schema
from persist_lib.shard.runs import Stored

Stretch = tuple[int | None, int | None]
"""Values in `[lower, upper)`; None is no bound."""
Block = tuple[Part, ...]
"""Neighbouring parts that may share a key."""


def kept_by(request: Request, stored: Stored, most_bytes: int, *, published: bool) -> tuple[Kept, ...]:
    """The parts of the oldest batch that a merge need not touch, and the keys that they alone have.

    `stored` says where the runs are, in the schema of what is written. Of newer runs that have up to `most_bytes` the
    keys are read, of larger ones the bounds count. With `published`, only what stands below a publication's folder can
    be kept.
    """
    oldest, *newer = request.inputs
    if not newer or len(oldest.runs) != 1 or not oldest.exact or len(request.merges) != 1 or len(oldest.parts) < 2:
        return ()
    inputs = task_inputs(request)[1:]
    blocks = _blocks(oldest.parts)
    edges = [block[0].key_lower for block in blocks[1:]]
    free = {
        place
        for place, block in enumerate(blocks)
        if all(_may_stay(part, request, published=published) for part in block)
    }
    for place in _touched(stored, inputs, edges, most_bytes) if free else ():
        free.discard(place)
        if not free:
            return ()
    small = {place for place in free if sum(part.size for part in blocks[place]) < request.part_bytes // 2}
    free -= {place for place in small if {place - 1, place + 1} - free - {-1, len(blocks)}}  # else they become many
    found = []
    for is_free, places in groupby(range(len(blocks)), key=free.__contains__):
        first, *_ = several = list(places)
        if is_free:
            lower = edges[first - 1] if first else None
            upper = edges[several[-1]] if several[-1] < len(edges) else None
            found.append(Kept(lower, upper, tuple(part for place in several for part in blocks[place])))
    return tuple(found)


class Untouched(NamedTuple):
    """Clusters that stay as they are, where they begin and end, and the values between them that are written again.

    These are put into `most` clusters.
    """

    kept: Kept
    edges: set[int]
    stretches: list[Stretch]
    most: int


def kept_clusters(request: Request, most: int, by: By, stored: Stored, most_bytes: int) -> Untouched | None:
    """The clusters of the oldest batch that no newer update belongs into; None where there are none to keep.

    A batch is to have about `most` clusters, and has twice as many at most. So what grows is cut, while others stay;
    where too many would, or what is touched is too large, all are cut again.
    """
    oldest, *newer = request.inputs
    if not newer or len(request.merges) != 1 or not are_apart(oldest, stored.schemas, by):
        return None
    runs = [(found, run) for run in oldest.run_parts() if (found := ends(run, stored.schemas, by))]
    runs.sort(key=itemgetter(0))
    if len(runs) < len(oldest.runs) or any(_has_null(run, stored.schemas, by) for _, run in runs[:-1]):
        return None  # rows with null are not in the last one
    edges = [lower for (lower, _), _ in runs[1:]]
    touched = _touched_clusters(stored, task_inputs(request)[len(runs) :], edges, most_bytes, by)
    touched |= {at for at, (_, run) in enumerate(runs) if not all(_may_stay(one, request) for one in run)}
    free = [at for at in range(len(runs)) if at not in touched]
    size = sum(batch.size for batch in newer) + sum(part.size for at in touched for part in runs[at][1])
    room, wanted = 2 * most - len(free), -(-size * most // oldest.size)
    if not free or wanted > 2 * room:
        return None
    written = list[Stretch]()
    for is_free, places in groupby(range(len(runs)), key=free.__contains__):
        several = list(places)
        if not is_free:
            lower = edges[several[0] - 1] if several[0] else None
            written.append((lower, edges[several[-1]] if several[-1] < len(edges) else None))
    around = {edges[at] for at in range(len(edges)) if not {at, at + 1}.isdisjoint(free)}
    kept = tuple(part for at in free for part in runs[at][1])
    return Untouched(Kept(None, None, kept), around, written, max(1, min(room, wanted)))


def _touched_clusters(
    stored: Stored, inputs: Sequence[TaskInput], edges: Sequence[int], most_bytes: int, by: By
) -> set[int]:
    """The places of the clusters into which updates of newer runs belong; `edges` are the least values of all but one.

    Of few bytes the values are read; of more, the bounds of parts count.
    """
    parts, found = [part for run in inputs for part in run.parts], set[int]()
    name = next(column.name for column in stored.schema.columns if column.id == by.id)
    if sum(part.size for part in parts) <= most_bytes:
        for table in (table for run in stored.streams(inputs, [name]) for table in run):
            found.update(np.unique(places_of(table.column(name), edges)).tolist())
        return found
    for part in parts:
        if (said := ends((part,), stored.schemas, by)) is None:
            return {*range(len(edges) + 1)}
        if _has_null((part,), stored.schemas, by):
            found.add(len(edges))
        if said:
            found.update(range(bisect_right(edges, said[0]), bisect_right(edges, said[1]) + 1))
    return found


def _has_null(run: Sequence[Part], schemas: Sequence[Schema], by: By) -> bool:
    return any(one.has_null for part in run for one in part.values if one.column == place_of(schemas[part.schema], by))


def _may_stay(part: Part, request: Request, *, published: bool = False) -> bool:
    """Whether a part says its sums, stands where it has to, and is what it would be once times have advanced."""
    since, first, last = request.inputs[0].since.time, part.time_lower, part.time_upper
    is_settled = since is None or last <= since  # it was added up as of then
    is_placed = part.inline is None and (not published or is_published(part.key))
    return part.sums is not None and is_placed and (first == last or is_settled or first >= request.advance_to)


def _blocks(parts: Sequence[Part]) -> list[Block]:
    """The parts of a run, cut where one surely ends before the next one begins."""
    starts = [0, *(place + 1 for place, (a, b) in enumerate(pairwise(parts)) if a.key_upper < b.key_lower), len(parts)]
    return [tuple(parts[start:end]) for start, end in pairwise(starts)]


def _touched(stored: Stored, inputs: Sequence[TaskInput], edges: Sequence[bytes], most_bytes: int) -> Iterator[int]:
    """The places of the blocks into which updates of newer runs belong, some of them again and again."""
    parts = [part for run in inputs for part in run.parts]
    if sum(part.size for part in parts) > most_bytes:
        for part in parts:
            yield from range(bisect_right(edges, part.key_lower), bisect_right(edges, part.key_upper) + 1)
        return
    schema = stored.schema
    for table in (table for run in stored.streams(inputs, schema.key_names) for table in run if table.num_rows):
        first = bisect_right(edges, encode_row(schema, table, 0))
        last = bisect_right(edges, encode_row(schema, table, table.num_rows - 1))
        starts = [0, *(search(schema, table, edge) for edge in edges[first:last]), table.num_rows]
        yield from (place for place, (start, end) in enumerate(pairwise(starts), first) if start < end)
