"""Where things are in Blob.

    <shard>/<writer id>/<part id>.parquet       parts, below the id of their uploader
    <shard>/rollup/v<seqno>-<random>            copies of the state

A `PartKey` is what follows `<shard>/`. Uploader and seqno are in the path so that an orphan can be told from a key that
may still be linked, without reading it.
"""

from __future__ import annotations

from persist_lib.ids import PartKey, SeqNo, ShardId, WriterId

ROLLUPS = "rollup"


def part_key(uploader: WriterId, entropy: int) -> PartKey:
    """A fresh part's key, given 64 random bits."""
    return PartKey(f"{uploader}/{entropy:016x}.parquet")


def rollup_key(seqno: SeqNo, entropy: int) -> PartKey:
    """A fresh rollup's key, given 64 random bits."""
    return PartKey(f"{ROLLUPS}/v{seqno:020d}-{entropy:016x}")


def prefix(shard: ShardId) -> str:
    """What all blob keys of a shard start with."""
    return f"{shard}/"


def blob_key(shard: ShardId, key: PartKey) -> str:
    """The key in Blob."""
    return f"{shard}/{key}"
