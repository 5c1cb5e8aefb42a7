"""The frame around all that is stored as msgpack: rows of the log, rollups, and what surveys and scrubs remember.

magic (4) | format version (1) | xxh3_128 of version and body (16) | body
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

HEADER_BYTES = 21


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    """The bytes of a body in its frame."""
    versioned = bytes((version,)) + body
    return magic + versioned[:1] + xxh3_128_digest(versioned) + body


def has_magic(data: bytes, magic: bytes) -> bool:
    """Whether `data` has a whole header that starts with `magic`."""
    return len(data) >= HEADER_BYTES and data[:4] == magic


def version_of(data: bytes) -> int:
    """The format version that the header says."""
    return data[4]


def stored_checksum(data: bytes) -> bytes:
    """The checksum that the header says."""
    return data[5:HEADER_BYTES]


def checksum(data: bytes) -> bytes:
    """The checksum that version and body have."""
    return xxh3_128_digest(data[4:5] + body_of(data))


def body_of(data: bytes) -> bytes:
    """What is in the frame."""
    return data[HEADER_BYTES:]
