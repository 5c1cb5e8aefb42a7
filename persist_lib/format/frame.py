"""The frame around all that is stored as msgpack: rows of the log, rollups, and what surveys and scrubs remember.

magic (4) | format version (1) | xxh3_128 of version and body (16) | body
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from persist_lib.arguments import UNREADABLE
from persist_lib.errors import Corrupt, InvalidUsage, NewerFormat

T = TypeVar("T")
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


class Form(Generic[T]):
    """How values of one type are stored in frames of one version. Errors call what is stored `what`, its format that
    of this `kind`, and end with what `then` follows.
    """

    def __init__(self, magic: bytes, version: int, type_: Any, what: str, kind: str, then: str = "") -> None:
        self.magic, self.version, self._what, self._kind, self._then = magic, version, what, kind, then
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type_)

    def encode(self, value: T) -> bytes:
        """The bytes of a value."""
        return framed(self.magic, self.version, self._encode(value))

    def decode(self, data: bytes, key: str) -> T:
        """The value that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
        then = self._then
        if not has_magic(data, self.magic):
            raise Corrupt(f"{key} is not {self._what}: it starts with {data[:4]!r}{then}", key=key)
        if checksum(data) != stored_checksum(data):
            raise Corrupt(f"{key} is damaged: its checksum is another one than it says{then}", key=key)
        if (found := version_of(data)) != self.version:
            raise NewerFormat(
                f"{key} has format {found}, and this release knows format {self.version} of {self._kind}{then}",
                key=key, found=found, known=self.version,
            )  # fmt: skip
        try:
            return self._decoder.decode(body_of(data))
        except (*UNREADABLE, InvalidUsage) as error:
            raise Corrupt(f"{key} has a valid checksum but does not decode: {error}{then}", key=key) from error
