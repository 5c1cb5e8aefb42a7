"""Reads a folder of Avro's object container files as a source: each is a partition, and a block's offset its address.

A message is what one record wrote, as bytes, with the file's schema as its header. The messages of a block share their
address. Files may grow by whole blocks. After a block that is damaged nothing in the file can be found any more: it is
one bad message, and the last one; the check of the mark that covers it ends with `!`.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.kernel.columns import array_of
from persist_lib.sources.avro import Refused, parsed, read_from
from persist_lib.sources.files.contents import DAMAGED, PIECE, Contents
from persist_lib.sources.files.folders import File
from persist_lib.sources.files.reader import LineFiles
from persist_lib.sources.protocol import Mark
from persist_lib.sources.schema_registry import Written

MAGIC = b"Obj\x01"
SYNC = 16
LONGEST_HEAD = 16 * MIB
LONGEST_BLOCK = 256 * MIB
KEPT = 1024
UNPACKING = 256 * MIB
"""The most memory that a block of xz may ask for beside what it makes."""
RECORDS_MOST = 1 << 20
"""How many records without a byte a block may begin with."""
_SCHEMA = pa.schema(
    [pa.field("address", pa.uint64(), False), ("value", pa.binary()), ("header", pa.dictionary(pa.int8(), pa.string())),
     ("problem", pa.string())]
)  # fmt: skip


class Head(NamedTuple):
    """What a file says of itself, and where its blocks begin."""

    schema: str
    codec: str
    sync: bytes
    end: int


class Block(NamedTuple):
    """A block: how many records are in which bytes, and where the next one begins."""

    records: int
    start: int
    end: int
    next: int


class Cut(Exception):
    """The file ends inside."""


class Bytes:
    """The bytes of a file by pieces: numbers and blocks are small, and a request may be dear."""

    def __init__(self, contents: Contents, end: int | None = None) -> None:
        self._contents, self._end, self._at, self._piece = contents, end, 0, b""

    def get(self, start: int, count: int) -> bytes:
        """Exactly these bytes. Raises Cut."""
        if self._end is not None and start + count > self._end:
            raise Cut
        if not self._at <= start or start + count > self._at + len(self._piece):
            self._at, self._piece = start, self._contents.range(start, start + max(PIECE, count))
        found = self._piece[start - self._at : start - self._at + count]
        if len(found) < count:
            raise Cut
        return found

    def is_end(self, at: int) -> bool:
        try:
            self.get(at, 1)
        except Cut:
            return True
        return False

    def size(self, at: int) -> int:
        """The size of all, which is `at` at least."""
        while piece := self._contents.range(at, at + PIECE):
            at += len(piece)
        return at

    def number(self, at: int) -> tuple[int, int]:
        """A number as Avro writes it, and where it ends. Raises Cut and Refused."""
        value = shift = 0
        while shift < 70:
            (byte,) = self.get(at, 1)
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1), at
        raise Refused("a number is too long")


def head_of(data: Bytes) -> Head:
    """The head of a file. Raises Cut if it is not whole, and Refused if it is damaged."""
    if data.get(0, len(MAGIC)) != MAGIC:
        raise Refused("this is no Avro object container file")
    found: dict[bytes, bytes] = {}
    count, at = data.number(len(MAGIC))
    while count:
        if count < 0:
            _, at = data.number(at)
        for _ in range(abs(count)):
            pair = []
            for _ in range(2):
                size, at = data.number(at)
                if not 0 <= size <= LONGEST_HEAD or at > LONGEST_HEAD:
                    raise Refused("the head of the file is damaged")
                pair.append(data.get(at, size))
                at += size
            found[pair[0]] = pair[1]
        count, at = data.number(at)
    codec = found.get(b"avro.codec", b"null").decode(errors="replace")
    if b"avro.schema" not in found or codec not in CODECS:
        raise Refused(f"the head of the file names no schema, or a codec that is none of {', '.join(CODECS)}: {codec}")
    return Head(found[b"avro.schema"].decode(errors="replace"), codec, data.get(at, SYNC), at + SYNC)


def block_at(data: Bytes, head: Head, at: int) -> Block:
    """The block that begins at an offset. Raises Cut if it is not whole, and Refused if there is none."""
    count, start = data.number(at)
    size, start = data.number(start)
    if count < 0 or not 0 <= size <= LONGEST_BLOCK:
        raise Refused("the block is damaged: it has no size")
    if data.get(start + size, SYNC) != head.sync:
        raise Refused("the block is damaged: it does not end where it says")
    return Block(count, start, start + size, start + size + SYNC)


class AvroFiles(LineFiles):
    """A source reader of Avro files."""

    _unit = "block"

    def _end(self, contents: Contents, start: int, limit: int, *, may_grow: bool) -> tuple[int, str]:
        data = Bytes(contents)
        at, is_damaged = last_block(data, start, limit, may_grow=may_grow)
        return (data.size(at), DAMAGED) if is_damaged else (at, "")

    def _read(self, partition: str, file: File, contents: Contents, start: Mark, end: Mark) -> Iterator[pa.Table]:
        contents.keep(0)
        for mark in (start, end):
            self._verify(partition, file, contents, mark)
        # Not beyond the mark, so that what comes after a block that was cut does not change what is said of it.
        yield from messages_of(Bytes(contents, end.address), start.address, end.address)


def last_block(data: Bytes, start: int, limit: int, *, may_grow: bool) -> tuple[int, bool]:
    """The end of the last whole block in `[start, limit)`, of one at least; or `start`, and whether it is damaged."""
    at = start
    try:
        head = head_of(data)
        at = max(start, head.end)
        while not data.is_end(at):
            block = block_at(data, head, at)
            if block.next > limit and at > max(start, head.end):
                break
            at = block.next
    except Cut:
        return at, at == start and not may_grow and not data.is_end(at)
    except Refused:
        return at, at == start
    return at, False


def messages_of(data: Bytes, start: int, end: int) -> Iterator[pa.Table]:
    """The messages of the blocks that begin in `[start, end)`, a table each."""
    at, text = start, ""
    try:
        head = head_of(data)
        text, at = head.schema, max(start, head.end)
        while at < end:
            block = block_at(data, head, at)
            yield _table(data, head, block, at)
            at = block.next
    except (Cut, Refused) as error:
        if at < end:
            why = str(error) or "the block is cut"
            yield _messages(at, pa.array([data.get(at, min(KEPT, end - at))], pa.binary()), text, [why])


def _table(data: Bytes, head: Head, block: Block, at: int) -> pa.Table:
    """The messages of a block. Where one cannot be read, it and those after it are one bad message."""
    try:
        payload = CODECS[head.codec](data.get(block.start, block.end - block.start))
        writer = parsed(Written(head.schema))
    except (Refused, zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, pa.ArrowException) as error:
        return _messages(at, pa.array([b""], pa.binary()), head.schema, [f"the block is damaged: {error}"[:500]])
    stream, places = BytesIO(payload), [0]
    problems: list[str | None] = []
    for number in range(block.records):
        try:
            # A record may have no bytes at all, so that a count alone could ask for any number of them.
            if number >= RECORDS_MOST and not places[-1]:
                raise Refused(f"it has {block.records} records without a byte")
            read_from(stream, writer)
        except Refused as refused:
            problems.append(f"record {number} of {block.records}, and those after it: {refused}"[:500])
            places.append(len(payload))
            break
        problems.append(None)
        places.append(stream.tell())
    offsets = np.array(places, np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), len(places) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(payload)]
    )  # fmt: skip
    return _messages(at, values, head.schema, problems)


def _messages(at: int, values: pa.Array, schema: str, problems: list[str | None]) -> pa.Table:
    count = len(values)
    header = pa.DictionaryArray.from_arrays(array_of(np.zeros(count, np.int8)), pa.array([schema], pa.string()))
    addresses = array_of(np.full(count, at, np.uint64))
    return pa.table([addresses, values, header, pa.array(problems, pa.string())], schema=_SCHEMA)


def _within(unpacker: Any, data: bytes) -> bytes:
    """What zlib's, bz2's or lzma's unpacker makes of all of the data. Raises Refused where it is too much."""
    found: bytes = unpacker.decompress(data, LONGEST_BLOCK + 1)
    _fitting(len(found))
    if not unpacker.eof:
        raise Refused("it is cut")
    return found


def _snappy(data: bytes) -> bytes:
    """Raw snappy and a checksum. The size comes first, seven bits a byte."""
    size = shift = 0
    for byte in data[:5]:
        size, shift = size | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    found = bytes(pa.decompress(data[:-4], _fitting(size), codec="snappy", asbytes=True))
    if zlib.crc32(found) != int.from_bytes(data[-4:]):
        raise Refused("its checksum is wrong")
    return found


def _fitting(size: int) -> int:
    if size > LONGEST_BLOCK:
        raise Refused("it is too large when it is unpacked")
    return size


def _zstandard(data: bytes) -> bytes:
    found = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(LONGEST_BLOCK + 1)
    _fitting(len(found))
    return bytes(found)


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes, "snappy": _snappy, "zstandard": _zstandard,
    "deflate": lambda data: _within(zlib.decompressobj(-15), data),
    "bzip2": lambda data: _within(bz2.BZ2Decompressor(), data),
    "xz": lambda data: _within(lzma.LZMADecompressor(memlimit=UNPACKING), data),
}  # fmt: skip
