"""Where things are in Blob.

    <shard>/<writer id>/<part id>.parquet       parts, below the id of their uploader
    <shard>/rollup/v<seqno>-<random>            copies of the state
    -pending/<shard>/<writer>/<name>            batches of the pending area; `core.pending` has their names
    -published/<folder>/                        what other engines read (`publish`): a table's metadata, and
    -published/<shard>/_parts/<writer id>/…     the parts of contents that can be published where they are; those of
    -published/<collection>/_parts/<shard>/…    a collection's shards are in one folder
    -pause/<number>, -spent/<number>            what is kept as one value with a new object for each change
    -scrub/<shard>/<ms>-<random>                what scrubs found, below a prefix that no shard's name can have
    -scrub/<shard>/<ms>-<random>.damaged        the same, where some of it is damage
    -scrub/<shard>/<ms>-<random>.walked         up to which row of the log all was found sound

A `PartKey` is what follows `<shard>/`; that of a pending batch is its key without the shard. Uploader and seqno are in
the path so that an orphan can be told from a key that may still be linked, without reading it. `.damaged` is in the
path so that a listing alone tells where there is none.
"""

from __future__ import annotations

import re

from persist_lib.ids import DATA, PENDING, PUBLISHED, PartKey, SeqNo, ShardId, WriterId, is_pending, is_published

ROLLUPS = "rollup"
MARKS = "-scrub/"
"""What the keys of all marks start with. A shard's name never starts with `-`."""
MARKS_KEY = re.compile(r"-scrub/([^/]+)/\d{20}-[0-9a-f]{16}(\.damaged)?")
WALKED = ".walked"
"""What the key of a verdict on the log ends with. A release that knows none leaves it: it is no key of marks."""


PARTS = "_parts/"
"""Where parts are below a publication's folder. What vacuums other engines' tables leaves out of its listings
what is below a name that starts with `_`, so that none of these goes with it, whether it is published or not."""


def part_key(uploader: WriterId, entropy: int, *, published: bool = False) -> PartKey:
    """A fresh part's key, given 64 random bits; one that can be `published` where it is."""
    return PartKey(f"{f'{PUBLISHED}/' if published else ''}{uploader}/{entropy:016x}.parquet")


def rollup_key(seqno: SeqNo, entropy: int) -> PartKey:
    """A fresh rollup's key, given 64 random bits."""
    return PartKey(f"{ROLLUPS}/v{seqno:020d}-{entropy:016x}")


def prefix(shard: ShardId) -> str:
    """What all blob keys of a shard start with."""
    return f"{shard}/"


def blob_key(shard: ShardId, key: PartKey) -> str:
    """The key in Blob."""
    if is_published(key):
        return f"{parts_prefix(shard)}{key[len(PUBLISHED) + 1 :]}"
    return f"{pending_prefix(shard)}{key[len(PENDING) + 1 :]}" if is_pending(key) else f"{shard}/{key}"


def key_of(shard: ShardId, name: str) -> PartKey:
    """How a state names what has this key in Blob: an object below `prefix` or `parts_prefix`."""
    if name.startswith(below := parts_prefix(shard)):
        return PartKey(f"{PUBLISHED}/{name.removeprefix(below)}")
    return PartKey(name.removeprefix(prefix(shard)))


def folder_of(shard: str) -> str:
    """Whose folder a shard's parts stand in: its own, or that of the collection whose rows it has."""
    match = DATA.fullmatch(shard)
    return match[1] if match else shard


def published_prefix(folder: str) -> str:
    """The folder that other engines know as the table: what the keys in Blob of all that is published start with.

    `folder` is the name of a shard, or a collection's id.
    """
    return f"{PUBLISHED}/{folder}/"


def parts_prefix(shard: ShardId) -> str:
    """What the keys in Blob of all of a shard's parts below a publication's folder start with."""
    folder = folder_of(shard)
    return f"{published_prefix(folder)}{PARTS}{'' if folder == shard else f'{shard}/'}"


def pending_prefix(shard: ShardId) -> str:
    """What the keys in Blob of all pending batches of a shard start with."""
    return f"{PENDING}/{shard}/"


def pending_key(shard: ShardId, key: str) -> PartKey:
    """How a state names what is below `pending_prefix` in Blob."""
    return PartKey(f"{PENDING}/{key.removeprefix(pending_prefix(shard))}")


def marks_prefix(shard: ShardId) -> str:
    """What the keys of a shard's marks start with."""
    return f"{MARKS}{shard}/"


def marks_key(shard: ShardId, now: int, entropy: int, *, is_damaged: bool) -> str:
    """A fresh key in Blob for marks, given the store's clock (ms) and 64 random bits."""
    return f"{marks_prefix(shard)}{now:020d}-{entropy:016x}{'.damaged' if is_damaged else ''}"


def has_damage(key: str) -> bool | None:
    """Whether the marks of this key name damage; None if it is no key of marks."""
    match = MARKS_KEY.fullmatch(key)
    return None if match is None else match[2] is not None


def walked_key(shard: ShardId, now: int, entropy: int) -> str:
    """A fresh key in Blob for a verdict on the log, given the store's clock (ms) and 64 random bits."""
    return f"{marks_prefix(shard)}{now:020d}-{entropy:016x}{WALKED}"


NUMBER = re.compile(r"\d{20}")


def numbered_key(prefix: str, number: int) -> str:
    """The key of an object with a number."""
    return f"{prefix}{number:020d}"


def number_in(prefix: str, key: str) -> int:
    """The number in a key; 0 for another object."""
    number = key.removeprefix(prefix)
    return int(number) if number != key and NUMBER.fullmatch(number) else 0
