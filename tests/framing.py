"""Bytes of the log as a test frames them."""

from __future__ import annotations

from xxhash import xxh3_128_digest


def framed(magic: bytes, version: int, body: bytes) -> bytes:
    return magic + bytes([version]) + xxh3_128_digest(bytes([version]) + body) + body
