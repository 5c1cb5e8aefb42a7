"""A stream as a source of a dataflow: its contents as of a time, then what happens after it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from persist_lib.convert.times import shown_times
from persist_lib.frontier import MAX_TIME, TOP, at
from persist_lib.relation.listen import Event, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.schema.schema import DIFF
from persist_lib.streams.plan import u64
from persist_lib.streams.reader import StreamReader
from persist_lib.times import Times


def persisted_source(
    read: StreamReader | ReadHandle, as_of: object, *, until: object = TOP, timeout: float | None = None
) -> Iterator[Event]:
    """The sealed contents as of a time as updates at that time, then sealed updates and progress, as `listen` has them.

    Waits until `as_of` is sealed, and then for what comes, until the frontier `until`; raises TimedOut when nothing
    comes for `timeout` seconds (None: it waits for ever). Close the iterator, or exhaust it, to end its lease. All that
    it gives up to a progress adds up to the contents at that frontier.
    """
    handle = read.sealed if isinstance(read, StreamReader) else read
    schema = handle.schema
    start = Times(schema.times, handle.machine.consensus.now).as_of(as_of)
    with (
        handle.snapshot(start, timeout=timeout, diff=True) as snapshot,
        handle.listen(start, until=until, timeout=timeout) as news,
    ):
        for table in snapshot.batches():
            when = pa.repeat(u64(start), table.num_rows)
            columns = [*(table.column(name) for name in schema.names), when, table.column(DIFF)]
            yield Updates(shown_times(schema, pa.Table.from_arrays(columns, schema=schema.updates)))
        snapshot.release()
        yield Progress(at(start + 1) if start < MAX_TIME else TOP)
        yield from news
