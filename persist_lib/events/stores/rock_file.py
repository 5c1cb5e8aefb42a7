"""What RocksDB opens first, looked at before it does: on some bytes of a damaged manifest it would wait for ever."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from persist_lib.errors import Corrupt

CURRENT = re.compile(rb"MANIFEST-\d+\n")
BLOCK = 32768
HEADER = struct.Struct("<IHB")
MOST_BYTES = 1 << 18
"""How much of a manifest is verified. Ours have some hundred bytes, and a few for each file that is made later."""
POLYNOMIAL, MASK = 0x82F63B78, 0xA282EAD8


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901
        found.append(value)
    return found


TABLE = _table()


def check_files(path: Path) -> None:
    """Raise Corrupt if CURRENT names no manifest that is there, or a record of that one does not verify."""
    current = path / "CURRENT"
    try:
        name = current.read_bytes()
        if not CURRENT.fullmatch(name):
            raise _damaged(current, f"it says {name[:40]!r}, where the name of a manifest belongs")
        manifest = path / name.decode().strip()
        with manifest.open("rb") as file:
            at = _first_wrong(file.read(MOST_BYTES))
    except FileNotFoundError as error:
        if current.read_bytes() != name:
            return check_files(path)  # a process that writes made a new manifest
        raise _damaged(current, f"it names {name.decode().strip()}, which is not there") from error
    if at is not None:
        raise _damaged(manifest, f"its record at byte {at} does not verify")
    return None


def _damaged(file: Path, why: str) -> Corrupt:
    return Corrupt(
        f"{file} of a RocksDB database is damaged: {why}. Nothing was changed; restore it from a copy", key=str(file)
    )


def _first_wrong(data: bytes) -> int | None:
    """Where the first whole record begins that does not verify. A record that is not whole may be torn."""
    at = 0
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        masked, length, kind = HEADER.unpack_from(data, at)
        end = at + HEADER.size + length
        if end > len(data):
            return None
        if _masked(data[at + HEADER.size - 1 : end]) != masked and (kind or length or any(data[at:])):
            return at
        at = end
    return None


def _masked(data: bytes) -> int:
    """The checksum (CRC-32C) as RocksDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF
