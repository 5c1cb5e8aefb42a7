"""Parts of the heaviest run that a merge can keep as they are, as no newer update has one of their keys.

Changes of a table mostly come together: today's rows, some customers. What they do not touch need not be read and
written again, and publications still name it. What is kept is proven: such parts say their sums, and the state
machine compares what all parts of a batch say with what the inputs came to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from persist_lib.core.plan.compaction import Kept, Request, TaskInput, task_inputs
from persist_lib.core.state import Part
from persist_lib.ids import is_published
from persist_lib.kernel.keys import encode_row, search
from persist_lib.shard.runs import Stored

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
    free = {place for place, block in enumerate(blocks) if all(_may_stay(part, request, published) for part in block)}
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


def _may_stay(part: Part, request: Request, published: bool) -> bool:
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
