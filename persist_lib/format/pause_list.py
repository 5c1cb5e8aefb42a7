"""How the pauses and rules of a location are stored: one object with all of them, a new one for each change.

    -pause/<number, 20 digits>

The greatest number is the list in force. A key is written once, so of two that change it at once one has lost, and
reads again. It is a record of what people want: what cannot be read is an error, and no duty begins.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from persist_lib.core.pauses import Pause
from persist_lib.core.rules import Rule
from persist_lib.format.frame import decode_framed, framed, has_magic, version_of

PREFIX = "-pause/"
NAME = re.compile(r"-pause/(\d{20})")
MAGIC = b"PSTp"
VERSION, WITH_RULES = 1, 2
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[Pause, ...])


def pause_key(number: int) -> str:
    """The key of the list with a number."""
    return f"{PREFIX}{number:020d}"


def number_of(key: str) -> int:
    """The number in a key; 0 for another object."""
    match = NAME.fullmatch(key)
    return int(match[1]) if match else 0


class Wishes(NamedTuple):
    """What people want of upkeep in a location."""

    pauses: tuple[Pause, ...] = ()
    rules: tuple[Rule, ...] = ()


def encode_wishes(wishes: Wishes) -> bytes:
    """The bytes of a list. Without rules they are those that releases without rules read."""
    if not wishes.rules:
        return framed(MAGIC, VERSION, _encoder.encode(wishes.pauses))
    return framed(MAGIC, WITH_RULES, _encoder.encode(wishes))


_with_rules: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Wishes)
EMPTY_SIZE = len(encode_wishes(Wishes()))
"""How long the list of none is. No other is as short, so a listing alone tells that nothing is wanted."""


def decode_wishes(data: bytes, key: str) -> Wishes:
    """The list that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    has_rules = not has_magic(data, MAGIC) or version_of(data) != VERSION
    version, decoder = (WITH_RULES, _with_rules) if has_rules else (VERSION, _decoder)
    found: Any = decode_framed(
        data, key, MAGIC, version, decoder, what="the list of pauses that was written there", kind="pauses",
        then=". So no duty begins",
    )  # fmt: skip
    return found if has_rules else Wishes(found)
