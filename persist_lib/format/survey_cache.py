"""How the looks at all shards are stored: one object in Blob, below a prefix that no shard's name can have.

    -survey/<ms, 20 digits>-<random>

It is a memory and no record: what is damaged, of another release or gone is not used, and costs one look at each shard.
So no release has to read the format of another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from persist_lib.arguments import UNREADABLE
from persist_lib.core.plan.look import Look
from persist_lib.format.frame import body_of, checksum, framed, has_magic, stored_checksum, version_of

PREFIX = "-survey/"
NAME = re.compile(r"-survey/(\d{20})-[0-9a-f]{16}")
MAGIC = b"PSTl"
VERSION = 1


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """The looks at all shards, the settings they depend on, and the shards that could not be read: when, and why."""

    settings: str = ""
    looks: Mapping[str, Look] = {}
    failed: Mapping[str, tuple[int, str]] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Memory)


def memory_key(now: int, entropy: int) -> str:
    """A fresh key. Of several, the greatest one is the newest."""
    return f"{PREFIX}{now:020d}-{entropy:016x}"


def memory_ms(key: str) -> int | None:
    """The time in a key, in ms of the store's clock; None for another object."""
    match = NAME.fullmatch(key)
    return int(match[1]) if match else None


def encode_memory(memory: Memory) -> bytes:
    """The bytes of a memory."""
    return framed(MAGIC, VERSION, _encoder.encode(memory))


def decode_memory(data: bytes) -> Memory | None:
    """The memory that `data` holds; None if it is damaged, or of another release."""
    if not has_magic(data, MAGIC) or version_of(data) != VERSION or stored_checksum(data) != checksum(data):
        return None
    try:
        return _decoder.decode(body_of(data))
    except UNREADABLE:
        return None
