"""How the log's rows and rollups are stored: a header, then canonical msgpack.

    magic (4) | format version (1) | xxh3_128 of version and body (16) | body

The same value gives the same bytes in any process: struct fields have a fixed order, mapping keys are sorted. Decoding
checks magic, version and checksum before it looks at the body, so damage is `Corrupt` and never a wrong value.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from persist_lib.core.diff import StateDiff
from persist_lib.core.state import Rollup, State
from persist_lib.errors import Corrupt, InvalidUsage, NewerFormat
from persist_lib.ids import SeqNo

FORMAT_VERSION = 1
ROW_MAGIC = b"PSTr"
ROLLUP_MAGIC = b"PSTs"
HEADER_BYTES = 21
GENESIS = bytes(16)
"""What the first row names as the row before it."""


class LogRow(msgspec.Struct, frozen=True, array_like=True):
    """One transition: which, by whom it can be recognised, what it changed, and what it follows.

    `now` is the store's clock when it was built, for people to read. `rollup` is the newest one linked by then.
    """

    seqno: SeqNo
    token: bytes
    command: str
    now: int
    previous: bytes
    rollup: tuple[SeqNo, Rollup] | None
    diff: StateDiff


class StoredState(msgspec.Struct, frozen=True, array_like=True):
    """A rollup's contents: the state at a seqno, and the digest of the row that led there."""

    seqno: SeqNo
    digest: bytes
    state: State


MAPPINGS = ("writers", "readers", "holds", "retired", "garbage", "rollups")
_encoder = msgspec.msgpack.Encoder()
_rows = msgspec.msgpack.Decoder(LogRow)
_states = msgspec.msgpack.Decoder(StoredState)
T = TypeVar("T")


def encode_row(row: LogRow) -> bytes:
    """The bytes of a row of the log."""
    return _frame(ROW_MAGIC, _encoder.encode(row))


def decode_row(data: bytes, key: str) -> LogRow:
    """The row that `data` holds; Corrupt or NewerFormat naming `key` otherwise."""
    return _decode(data, key, ROW_MAGIC, _rows)


def encode_state(stored: StoredState) -> bytes:
    """The bytes of a rollup. SUBTLE: mappings keep the order of their history, which no other process shares: sort."""
    ordered = {name: dict(sorted(getattr(stored.state, name).items())) for name in MAPPINGS}
    canonical = StoredState(stored.seqno, stored.digest, msgspec.structs.replace(stored.state, **ordered))
    return _frame(ROLLUP_MAGIC, _encoder.encode(canonical))


def decode_state(data: bytes, key: str) -> StoredState:
    """The state that `data` holds; Corrupt or NewerFormat naming `key` otherwise."""
    return _decode(data, key, ROLLUP_MAGIC, _states)


def row_digest(data: bytes) -> bytes:
    """What the next row names as the row before it: the checksum in the header."""
    return data[5:HEADER_BYTES]


def row_start(digest: bytes) -> bytes:
    """What a row with this digest starts with. SUBTLE: a next format has to say which rows have which version."""
    return ROW_MAGIC + bytes((FORMAT_VERSION,)) + digest


def _frame(magic: bytes, body: bytes) -> bytes:
    versioned = bytes((FORMAT_VERSION,)) + body
    return magic + versioned[:1] + xxh3_128_digest(versioned) + body


def _decode(data: bytes, key: str, magic: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(data) < HEADER_BYTES or data[:4] != magic:
        raise Corrupt(
            f"{key} is not what Persist wrote there: it starts with {data[:4]!r}, not {magic!r}. Restore it from a "
            f"copy",
            key=key, expected=magic, actual=data[:4],
        )  # fmt: skip
    actual = xxh3_128_digest(data[4:5] + data[HEADER_BYTES:])
    if actual != data[5:HEADER_BYTES]:
        raise Corrupt(
            f"{key} is damaged: its checksum is {actual.hex()}, stored is {data[5:HEADER_BYTES].hex()}. "
            "Nothing was changed; restore it from a copy",
            key=key, expected=data[5:HEADER_BYTES], actual=actual,
        )  # fmt: skip
    if data[4] < 1:
        raise Corrupt(f"{key} claims to have format {data[4]}, which no release ever wrote", key=key, actual=data[4])
    if data[4] > FORMAT_VERSION:
        raise NewerFormat(
            f"{key} has format {data[4]}, and this release knows formats up to {FORMAT_VERSION}: upgrade persist_lib. "
            "Nothing was touched",
            key=key, found=data[4], known=FORMAT_VERSION,
        )  # fmt: skip
    try:
        return decoder.decode(data[HEADER_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidUsage) as error:
        raise Corrupt(f"{key} has a valid checksum but does not decode: {error}", key=key) from error
