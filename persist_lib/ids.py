"""The names that appear in paths and logs, each a type of its own so that they are never mixed.

`ShardId` is the user's name for a shard. `WriterId` and `ReaderId` are minted once, at random, and never used
again: `w…` and `r…`. A `PartKey` is the path of a blob below its shard's prefix. `SeqNo` counts the versions of one
shard's state: 1 is the first.
"""

from __future__ import annotations

import re
from typing import NewType

from persist_lib.arguments import parse_bytes, parse_integer, shown
from persist_lib.errors import InvalidName, InvalidUsage

ShardId = NewType("ShardId", str)
WriterId = NewType("WriterId", str)
ReaderId = NewType("ReaderId", str)
PartKey = NewType("PartKey", str)
SeqNo = NewType("SeqNo", int)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
WRITER = re.compile(r"w[0-9a-f]{16}")
MEMBER = re.compile(r"[a-z0-9]{1,40}/[0-9]{1,9}")
"""Whose member a shard is: the id of a collection, and an epoch."""
READER = re.compile(r"r[0-9a-f]{16}")
TOKEN_BYTES = 64
"""The longest token. The library mints 16 random bytes."""
PRODUCER_BYTES = 200
"""The longest name of a producer, in bytes of UTF-8. It is limited, as each copy of a state carries it."""
MOST_SEQUENCE = 2**63 - 1
"""The highest sequence number of a producer."""
PENDING = "-pending"
"""What the keys of pending batches start with. No shard's name and no id starts with `-`."""
PUBLISHED = "-published"
"""What the keys of parts start with that stand below a publication's folder, where other engines can name them."""
CATALOG = "_catalog"
"""The shard of a location that says what collections there are."""
KEPT = re.compile(
    r"_catalog(\..*)?|streams\.(lock|list)|c[0-9a-f]{16}\.(renditions|r\d+\.(s\d+|kept))|t[a-z][0-9a-f]{16}\.wal"
)
"""The names of shards that belong to layers above shards, whether they are there yet or not."""
DATA = re.compile(r"(c[0-9a-f]{16})\.r\d+\.s\d+")
"""The names of shards that have rows of a collection, which they begin with the id of."""
ROLLUP = re.compile(r"rollup/v(\d{20})-[0-9a-f]{16}")


def epoch_of(member: str) -> int:
    """The epoch of a member: the greater one is the newer."""
    return int(member.rpartition("/")[2])


def parse_name(name: object, what: str) -> str:
    """Check that `name` follows the rule of shards' names. `what` is what it is to name, in one word."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidName(
            f"a {what}'s name must be 1 to 100 letters, digits, '_', '-' or '.', starting with none of '-.': got "
            f"{shown(name)}",
            name=name,
        )
    return str(name)


def parse_shard_id(name: object) -> ShardId:
    """Check that `name` can be a shard's name: 1 to 100 of letters, digits, `_ . -`, not starting with `.` or `-`."""
    return ShardId(parse_name(name, "shard"))


def check_not_kept(shard: ShardId, layer: str) -> None:
    """Raise InvalidName if a layer above shards keeps this name for itself, and it is not a layer that writes."""
    if not layer and KEPT.fullmatch(shard):
        raise InvalidName(
            f"the shard name {shard!r} is kept for what stands on shards (collections, tables, sources, streams), "
            "which alone makes and writes it. Nothing was done; choose another name, or write through that",
            name=shard,
        )


def parse_hold_name(name: object) -> str:
    """Check that `name` can name a hold; the same rule as for shards."""
    return parse_name(name, "hold")


def parse_token(token: object) -> bytes:
    """Check that `token` can be an append's: 1 to 64 bytes."""
    if type(token) is bytes and 0 < len(token) <= TOKEN_BYTES:
        return token
    return parse_bytes(token, "token", 1, TOKEN_BYTES)


def is_producer_name(name: str) -> bool:
    """Whether this can name a producer: printable, not empty, and at most `PRODUCER_BYTES` long."""
    return name.isprintable() and 0 < len(name.encode(errors="replace")) <= PRODUCER_BYTES


def parse_producer_name(name: object) -> str:
    """Check that `name` can name a producer: 1 to 200 bytes of printable text."""
    if not isinstance(name, str) or not is_producer_name(name):
        raise InvalidName(
            f"a producer's name must be printable text of 1 to {PRODUCER_BYTES} bytes: got {shown(name)}", name=name
        )
    return str(name)


def parse_producer(producer: object) -> tuple[str, int] | None:
    """Check that `producer` is None, or a producer's name and a sequence number."""
    if producer is None:
        return None
    if not isinstance(producer, (tuple, list)) or len(producer) != 2:
        raise InvalidUsage(
            f"producer must be a name and a sequence number, as in ('nightly load', 7): got {shown(producer)}",
            argument="producer", value=producer,
        )  # fmt: skip
    name, sequence = producer
    return parse_producer_name(name), parse_integer(sequence, "the producer's sequence number", 0, MOST_SEQUENCE)


def format_writer_id(entropy: int) -> WriterId:
    """The writer id for 64 random bits."""
    return WriterId(f"w{entropy & 0xFFFF_FFFF_FFFF_FFFF:016x}")


def format_reader_id(entropy: int) -> ReaderId:
    """The reader id for 64 random bits."""
    return ReaderId(f"r{entropy & 0xFFFF_FFFF_FFFF_FFFF:016x}")


def uploader_of(key: PartKey) -> str:
    """The id whose upload a key is: the first segment of its path (`rollup` for rollups), or what follows PUBLISHED."""
    first, _, rest = key.partition("/")
    return rest.partition("/")[0] if first == PUBLISHED else first


def parse_rollup_key(key: PartKey) -> SeqNo | None:
    """The seqno in a rollup's key; None for other keys."""
    match = ROLLUP.fullmatch(key)
    return SeqNo(int(match[1])) if match else None


def is_pending(key: str) -> bool:
    """Whether a key is below those of pending batches."""
    return uploader_of(PartKey(key)) == PENDING


def is_published(key: str) -> bool:
    """Whether a key is of a part that stands below a publication's folder."""
    return key.startswith(f"{PUBLISHED}/")
