"""How the pauses of a location are stored: one object with all of them, a new one for each change.

    -pause/<number, 20 digits>

The greatest number is the list in force. A key is written once, so of two that change it at once one has lost, and
reads again. It is a record of what people want: what cannot be read is an error, and no duty begins.
"""

from __future__ import annotations

import re

import msgspec

from persist_lib.core.pauses import Pause
from persist_lib.format.frame import decode_framed, framed

PREFIX = "-pause/"
NAME = re.compile(r"-pause/(\d{20})")
MAGIC = b"PSTp"
VERSION = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Pause, ...])


def pause_key(number: int) -> str:
    """The key of the list with a number."""
    return f"{PREFIX}{number:020d}"


def number_of(key: str) -> int:
    """The number in a key; 0 for another object."""
    match = NAME.fullmatch(key)
    return int(match[1]) if match else 0


def encode_pauses(pauses: tuple[Pause, ...]) -> bytes:
    """The bytes of a list."""
    return framed(MAGIC, VERSION, _encoder.encode(pauses))


EMPTY_SIZE = len(encode_pauses(()))
"""How long the list of none is. No other is as short, so a listing alone tells that nothing is paused."""


def decode_pauses(data: bytes, key: str) -> tuple[Pause, ...]:
    """The list that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    return decode_framed(
        data, key, MAGIC, VERSION, _decoder, what="the list of pauses that was written there", kind="pauses",
        then=". So no duty begins",
    )  # fmt: skip
