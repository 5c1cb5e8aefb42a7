"""Which shard of a rendition a row goes to: by a hash of its key columns, the same on every machine, for ever.

The hash is the one of fingerprints, whose definition is durable. A null counts as nothing, and so has one place, too.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

from persist_lib.kernel.columns import Rows
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.order import take
from persist_lib.schema.schema import Schema
from persist_lib.storage.records import RenditionRecord


def places(rendition: RenditionRecord, table: pa.Table) -> Rows:
    """The index of the shard of each row."""
    columns = {column.name: column for column in rendition.columns.key}
    hashed = Schema(key=tuple(columns[name] for name in rendition.hash_columns))
    return (hash_rows(hashed, table.select(list(rendition.hash_columns))) % np.uint64(rendition.shards)).view(np.int64)


def routed(rendition: RenditionRecord, table: pa.Table) -> list[pa.Table]:
    """The rows of each shard, in their order."""
    if rendition.shards == 1:
        return [table]
    found = places(rendition, table)
    order = np.argsort(found, kind="stable")
    ordered = take(table, order) if table.num_rows else table
    edges = np.searchsorted(found[order], np.arange(rendition.shards + 1))
    return [ordered.slice(start, end - start) for start, end in pairwise(edges.tolist())]
