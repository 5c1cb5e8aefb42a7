"""Snapshots of many keys at once: the keys as a caller passes them, and as a split carries them to another process."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

from persist_lib.convert.by_key import parse_keys
from persist_lib.kernel.keyset import Keys
from persist_lib.schema.schema import Schema


def keys_of(schema: Schema, keys: object) -> Keys:
    """The distinct keys among what a caller passed. Raises InvalidUsage."""
    return Keys.of(schema, parse_keys(schema, keys))


def packed(keys: Keys) -> bytes:
    """Keys as bytes, which compare, hash and pickle as a split does."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, keys.table.schema) as stream:
        stream.write_table(keys.table.combine_chunks())
    return bytes(sink.getvalue())


@lru_cache(maxsize=8)
def unpacked(schema: Schema, data: bytes) -> Keys:
    """The keys again, which are in order."""
    return Keys(schema, pa.ipc.open_stream(data).read_all())
