"""Snapshots of many keys at once: the keys as a caller passes them, and as a split carries them to another process."""

from __future__ import annotations

from functools import lru_cache

from persist_lib.convert.by_key import parse_keys
from persist_lib.kernel import packing
from persist_lib.kernel.keyset import Keys
from persist_lib.schema.schema import Schema


def keys_of(schema: Schema, keys: object) -> Keys:
    """The distinct keys among what a caller passed. Raises InvalidUsage."""
    return Keys.of(schema, parse_keys(schema, keys))


def packed(keys: Keys) -> bytes:
    """Keys as bytes, which compare, hash and pickle as a split does."""
    return packing.packed(keys.table.combine_chunks())


@lru_cache(maxsize=8)
def unpacked(schema: Schema, data: bytes) -> Keys:
    """The keys again, which are in order."""
    return Keys(schema, packing.unpacked(data))
