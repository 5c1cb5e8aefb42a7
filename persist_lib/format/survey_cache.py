"""How the looks at all shards are stored: one object in Blob, below a prefix that no shard's name can have.

    -survey/<ms, 20 digits>-<random>

It is a memory and no record: what is damaged, of another release or gone is not used, and costs one look at each shard.
So no release has to read the format of another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from persist_lib.core.plan.look import Look
from persist_lib.errors import Corrupt, NewerFormat
from persist_lib.format.frame import Form

PREFIX = "-survey/"
NAME = re.compile(r"-survey/(\d{20})-[0-9a-f]{16}")


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """The looks at all shards, the settings they depend on, and the shards that could not be read: when, and why."""

    settings: str = ""
    looks: Mapping[str, Look] = {}
    failed: Mapping[str, tuple[int, str]] = {}


MEMORY_FORM = Form[Memory](b"PSTl", 1, Memory, "a memory", "memories")


def memory_key(now: int, entropy: int) -> str:
    """A fresh key. Of several, the greatest one is the newest."""
    return f"{PREFIX}{now:020d}-{entropy:016x}"


def memory_ms(key: str) -> int | None:
    """The time in a key, in ms of the store's clock; None for another object."""
    match = NAME.fullmatch(key)
    return int(match[1]) if match else None


def decode_memory(data: bytes) -> Memory | None:
    """The memory that `data` holds; None if it is damaged, or of another release."""
    try:
        return MEMORY_FORM.decode(data, "")
    except (Corrupt, NewerFormat):
        return None
