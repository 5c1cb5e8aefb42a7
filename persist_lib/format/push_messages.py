"""What goes between a shard server and a client that follows shards: one stream in each direction, for all shards.

The client says which shards it follows from now on, and which no longer. The server tells new rows as they come, or the
newest seqno alone, where the client lags. An answer without anything says that the server is there.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from persist_lib.arguments import UNREADABLE
from persist_lib.errors import InvalidUsage, NewerFormat
from persist_lib.format.wire import SERVICE, VERSION
from persist_lib.ids import SeqNo

T = TypeVar("T", "Follow", "Pushed")
FOLLOW = "follow"
"""The name of the call."""


class Follow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client says: the shards that it follows from now on, and those that it does not follow any more."""

    version: int
    begun: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class News(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """News of one shard: rows, and the seqno of the newest one that the server knows. The rows may end before it."""

    shard: str
    rows: tuple[tuple[SeqNo, bytes], ...]
    newest: SeqNo


class Pushed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a server says. `ended`: shards that it tells nothing of, as the client has no right on them, or too many.

    Each shard that a client begins to follow is answered, with news or as ended.
    """

    version: int
    news: tuple[News, ...] = ()
    ended: tuple[str, ...] = ()


_encode = msgspec.msgpack.Encoder().encode


def encode_follow(begun: tuple[str, ...], ended: tuple[str, ...] = ()) -> bytes:
    """The bytes of what a client says."""
    return _encode(Follow(VERSION, begun, ended))


def encode_pushed(news: tuple[News, ...], ended: tuple[str, ...] = ()) -> bytes:
    """The bytes of what a server says."""
    return _encode(Pushed(VERSION, news, ended))


def decode_follow(data: bytes) -> Follow:
    """What a client said. Raises InvalidUsage or NewerFormat."""
    return _decoded(data, Follow)


def decode_pushed(data: bytes) -> Pushed:
    """What a server said. Raises InvalidUsage or NewerFormat."""
    return _decoded(data, Pushed)


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise InvalidUsage(f"what the other side says of shards cannot be read: {error}") from error
    if found.version > VERSION:
        raise NewerFormat(
            f"the other side speaks version {found.version}, and this side versions up to {VERSION}: upgrade it",
            key=SERVICE, found=found.version, known=VERSION,
        )  # fmt: skip
    return found
