"""Appends whose objects were written before their time was known, as a task on another machine writes them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pyarrow as pa

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core.formats import as_stored_in
from persist_lib.core.state import Batch, Part, State
from persist_lib.ids import WriterId
from persist_lib.shard.commit import Committed


def written(write: persist.WriteHandle, rows: object, runs: int = 1, *, inline_bytes: int = 0) -> Batch:
    """A batch of rows at time 0 that is uploaded and not committed; dealt to several sorted runs."""
    dealt = list(_dealt(write.schema, rows, runs))
    builder = write._builder(write._deadline(None))
    built = [
        builder.build(iter([table]), persist.at(0), persist.at(1), inline_bytes=inline_bytes).batch for table in dealt
    ]
    parts: list[Part] = []
    starts: list[int] = []
    for batch in built:
        starts += [len(parts) + start for start in batch.runs]
        parts += batch.parts
    return Batch(
        0, 0, persist.at(0), persist.at(1), persist.at(0), sum(b.count for b in built), sum(b.diff_sum for b in built),
        sum(b.fingerprint for b in built) % 2**64, tuple(parts), tuple(starts),
    )  # fmt: skip


def commit_at(
    write: persist.WriteHandle, batch: Batch, lower: int, upper: int, time: int, token: bytes | None = None
) -> Committed:
    """Append what was written, with all of it at `time`."""
    placed = msgspec.structs.replace(
        batch, lower=persist.at(lower), upper=persist.at(upper), parts=tuple(p.counted_at(time) for p in batch.parts)
    )
    token = token or write.machine.runtime.token()

    def build(state: State, now: int) -> c.Command:
        return c.CompareAndAppend(WriterId(write.id), token, as_stored_in(state.format, placed), now + 60_000)

    return write.machine.commit(build, token=token)


def _dealt(schema: persist.Schema, rows: object, runs: int) -> Iterable[pa.Table]:
    from persist_lib.convert.updates import iter_updates  # noqa: PLC0415

    for table in iter_updates(schema, rows, time=0):
        for run in range(runs):
            taken = table.take(pa.array(range(run, table.num_rows, runs), pa.int64()))
            if taken.num_rows:
                yield taken
