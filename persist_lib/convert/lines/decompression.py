"""Unpacks streams of gzip and zstd, piece by piece. The same bytes come out however the pieces were cut."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator

import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage, NotFound

PIECE = 4 * MIB
"""Bytes of one read. What is unpacked before damage depends on it, so it never changes."""
UNPACKED = 64 << 10
"""Bytes that are unpacked at once: of these, damage loses all."""


class DamagedFile(Exception):
    """A compressed file cannot be unpacked from here on."""


def unpacked(pieces: Iterable[bytes], compression: str | None) -> Iterator[bytes]:
    """The bytes that are packed in pieces as `.gz`, `.zst` or not at all. Raises DamagedFile where they are damaged."""
    if compression is None:
        return iter(pieces)
    return gathered(_gunzip(pieces) if compression == ".gz" else _unzstd(pieces))


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces. What came before damage comes before it here too."""
    some: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            some.append(piece)
            size += len(piece)
            if size >= PIECE:
                yield b"".join(some)
                some, size = [], 0
    except DamagedFile:
        if some:
            yield b"".join(some)
        raise
    if some:
        yield b"".join(some)


def same_size(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of one size, so that the same are unpacked wherever the file is."""
    buffer = b""
    for piece in pieces:
        buffer += piece
        while len(buffer) >= MIB:
            yield buffer[:MIB]
            buffer = buffer[MIB:]
    if buffer:
        yield buffer


def _gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Unpack members one after the other. Zeros after the last one are padding."""
    unpacker = zlib.decompressobj(wbits=31)
    is_between = True
    for piece in pieces:
        left = piece
        while left:
            if is_between and not (left := left.lstrip(b"\0")):
                break
            try:
                # Bounded, as a MiB may become a GiB.
                unpacked = unpacker.decompress(left, PIECE)
            except zlib.error as error:
                raise DamagedFile(f"the gzip data is damaged: {error}") from error
            is_between = False
            if unpacked:
                yield unpacked
            left = unpacker.unconsumed_tail
            if unpacker.eof:
                left, unpacker, is_between = unpacker.unused_data, zlib.decompressobj(wbits=31), True
    if not is_between:
        raise DamagedFile("the gzip data ends too early: the file was cut")


def _unzstd(pieces: Iterable[bytes]) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(_Stream(pieces), mode="r"), "zstd")
    while True:
        try:
            piece = stream.read(UNPACKED)
        except (OSError, pa.ArrowException) as error:
            if isinstance(error.__context__, (InvalidUsage, NotFound)):
                raise
            raise DamagedFile(f"the zstd data is damaged: {error}") from error
        if not piece:
            return
        yield piece


class _Stream(io.RawIOBase):
    """Pieces as a file that can only be read on."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._buffer) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._buffer += piece
        size = len(self._buffer) if size < 0 else size
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found
