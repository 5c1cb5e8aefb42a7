"""Digests of stored objects: one xxh3_128 for each 8 MiB chunk, so that a ranged read can be verified too.

A part's `digests` are its chunks' digests in order, 16 bytes each. They live in the state, not in the object, so an
object that was truncated, swapped for another or is stale does not match. A digest is checked before any value is used.
"""

from __future__ import annotations

import xxhash

from persist_lib.errors import Corrupt

CHUNK = 8 << 20
WIDTH = 16

Bytes = bytes | bytearray | memoryview


def chunk_count(size: int) -> int:
    """How many chunks an object of `size` bytes has; an empty object has one."""
    return max(1, -(-size // CHUNK))


def chunk_range(index: int, size: int) -> tuple[int, int]:
    """Where chunk `index` of an object of `size` bytes starts and ends."""
    return index * CHUNK, min(size, (index + 1) * CHUNK)


def digest(data: Bytes) -> bytes:
    """The digests of all chunks of `data`."""
    view = memoryview(data)
    if view.nbytes <= CHUNK:
        return xxhash.xxh3_128_digest(view)
    return b"".join(xxhash.xxh3_128_digest(view[start : start + CHUNK]) for start in range(0, view.nbytes, CHUNK))


def verify(key: str, data: Bytes, digests: bytes) -> None:
    """Raise Corrupt unless `data` is exactly the object that `digests` were taken of."""
    actual = digest(data)
    if actual != digests:
        raise _corrupt(key, f"{memoryview(data).nbytes} bytes", digests, actual)


def verify_chunk(key: str, index: int, chunk: Bytes, digests: bytes) -> None:
    """Raise Corrupt unless `chunk` is chunk `index` of that object."""
    expected = digests[index * WIDTH : (index + 1) * WIDTH]
    actual = xxhash.xxh3_128_digest(chunk)
    if actual != expected:
        raise _corrupt(key, f"chunk {index} ({memoryview(chunk).nbytes} bytes)", expected, actual)


def _corrupt(key: str, what: str, expected: bytes, actual: bytes) -> Corrupt:
    return Corrupt(
        f"{key}: {what} do not match the digest in the state: expected {expected.hex()}, got {actual.hex()}. "
        "The object was damaged, truncated or replaced; restore it from a copy",
        key=key, expected=expected.hex(), actual=actual.hex(),
    )  # fmt: skip
