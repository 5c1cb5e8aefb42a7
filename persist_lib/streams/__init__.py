"""Streams: written first, closed later. For programs that learn only afterwards how far their times are complete.

`open` gives a runtime on a location. A stream's sealed part is a shard, which everything that reads shards can read.
Its unsealed updates are durable in a second shard until a seal covers them.
"""

from __future__ import annotations

from persist_lib.streams.lifecycle import (
    Wiped,
    open,  # noqa: A004 - `streams.open` is what users write
    wipe_all,
)
from persist_lib.streams.lock import Lock, break_lock, fetch_lock
from persist_lib.streams.stream_reader import Accepted, Contents, StreamListen, StreamReader, Unsealed, persisted_source
from persist_lib.streams.stream_runtime import Streams
from persist_lib.streams.stream_writer import AllowCompaction, Seal, StreamWriter, Write

__all__ = [
    "Accepted", "AllowCompaction", "Contents", "Lock", "Seal", "StreamListen", "StreamReader", "StreamWriter",
    "Streams", "Unsealed", "Wiped", "Write", "break_lock", "fetch_lock", "open", "persisted_source", "wipe_all",
]  # fmt: skip
