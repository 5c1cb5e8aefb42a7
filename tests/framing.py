"""Bytes of the log as a test frames them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.log import ROW_MAGIC
from persist_lib.location.api import Row


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    return magic + bytes([version]) + xxh3_128_digest(bytes([version]) + body) + body


def chained(good: list[Row], index: int, change: Callable[[list[Any]], None]) -> list[Row]:
    """The rows with another one at `index`, and all that follow linked to it: checksums and digests are right."""
    made, previous = list(good[:index]), None
    for stored in good[index:]:
        fields = msgspec.msgpack.decode(stored.data[HEADER_BYTES:])
        if previous is None:
            change(fields)
        else:
            fields[4] = previous
        data = framed(ROW_MAGIC, stored.data[4], msgspec.msgpack.encode(fields))
        previous = data[5:HEADER_BYTES]
        made.append(stored._replace(data=data))
    return made
