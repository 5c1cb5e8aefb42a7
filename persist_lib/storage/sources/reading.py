"""Reading the messages of whole times: those of all partitions, with the times that their bindings give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.order import take
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import TIME, TIME_FIELD
from persist_lib.storage.sources.declared import Decoding
from persist_lib.storage.sources.pipeline import NO_SCHEMAS
from persist_lib.storage.sources.protocol import SourceReader
from persist_lib.storage.sources.reclock import Window, in_order
from persist_lib.storage.sources.registry import Written
from persist_lib.storage.sources.schemas import Schemas


def read(reader: SourceReader, window: Window, most_bytes: int) -> pa.Table | None:
    """The messages of a window with their times, in the order of times, partitions and addresses.

    None if they are more than `most_bytes`, and the window could be a shorter one.
    """
    tables, times, size = [], [], 0
    for partition, (start, end) in window.ranges().items():
        for table in reader.read(partition, start, end):
            indices = pa.array(np.zeros(table.num_rows, np.int32))
            names = pa.DictionaryArray.from_arrays(indices, pa.array([partition]))
            some = table.append_column("partition", names)
            if TIME not in table.column_names:
                mine = window.times_of(partition, integers(table.column("address")))
                some = some.append_column(TIME_FIELD, array_of(mine))
            times.append(integers(some.column(TIME)))
            tables.append(some)
            size += table.nbytes
            if size > most_bytes and len(window.steps) > 1:
                return None
    if not tables:
        return pa.table({"partition": pa.array([], pa.string())})
    whole = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    order = in_order(times)
    return whole if (order[1:] > order[:-1]).all() else take(whole, order)


def read_parts(reader: SourceReader, window: Window, most_bytes: int) -> Iterable[tuple[Window, pa.Table]]:
    """The window with its messages; in parts, if these turn out to be much more than was estimated."""
    some = read(reader, window, most_bytes)
    if some is not None:
        yield window, some
        return
    for half in window.halves():
        yield from read_parts(reader, half, most_bytes)


def schemas_of(
    schemas: Schemas | None, decoding: Decoding, messages: pa.Table, deadline: Deadline
) -> Mapping[int, Written]:
    """The schemas that messages name, as they are committed."""
    if schemas is None:
        return NO_SCHEMAS
    from persist_lib.storage.sources.avro import ids_of  # noqa: PLC0415 - fastavro is an extra

    return schemas.learn(ids_of(decoding, messages), deadline)
