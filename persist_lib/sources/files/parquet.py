"""Reads a folder of Parquet files as a source: each file is a partition, and a row's number is its address.

A message's value is a struct, as its file has decoded it already. A file is there once its footer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from persist_lib.errors import Determinate, Diverged, Gone, NotFound
from persist_lib.format.range_reader import RangeReader
from persist_lib.kernel.columns import array_of
from persist_lib.sources.files.folders import File, Folder, Opened, readable
from persist_lib.sources.files.reader import FolderReader
from persist_lib.sources.protocol import ADDRESS, START, Mark, Unread

ROWS = 65_536
FOOTER = 4096
DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow raises for a file that is no Parquet, or has names that are no UTF-8."""


class _Size(NamedTuple):
    rows: int
    size: int
    check: str


class ParquetFiles(FolderReader):
    """A source reader of Parquet files. They are read whole or not at all, so they do not grow."""

    _counts = "messages"

    def __init__(self, folder: Folder, suffixes: tuple[str, ...]) -> None:
        super().__init__(folder, suffixes)
        self._sizes: dict[File, _Size | None] = {}
        self._unread: dict[str, Unread] = {}

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        self._files = self._listed()
        found: dict[str, Mark] = {}
        left = most_bytes
        for partition, file in self._files.items():
            before = bound.get(partition, START)
            size = self._size(file)
            if size is None:
                continue
            if before.check and before.check != size.check:
                raise self._diverged(partition, before)
            row_bytes = max(1, size.size // max(1, size.rows))
            end = min(size.rows, before.address + max(1, left // row_bytes))
            if left > 0 and end > before.address:
                found[partition] = Mark(end, size.check)
                left -= (end - before.address) * row_bytes
        return found

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        if start.address >= end.address:
            return
        file = self._files.get(partition) or self._listed().get(partition)
        size = None if file is None else self._size(file)
        if file is None or size is None:
            raise Gone(
                f"the file {partition} is gone, or is no Parquet file any more, and its rows from {start.address} on "
                "are still needed. Nothing of them was written. Put it back",
                partition=partition, address=start.address,
            )  # fmt: skip
        if size.rows < end.address or any(mark.check not in {"", size.check} for mark in (start, end)):
            raise self._diverged(partition, start)
        try:
            with closing(self._folder.open(file)) as opened:
                yield from _rows(_parquet(opened), start.address, end.address)
        except (FileNotFoundError, NotFound) as error:
            self._files = {}
            raise Gone(
                f"the file {partition} went while it was read", partition=partition, address=start.address
            ) from error
        except DAMAGED as error:
            raise Determinate(
                f"the file {partition} could not be read from row {start.address} on: {error}. It is tried again; if "
                "the file is damaged, put a whole one in its place and reset the source",
                partition=partition,
            ) from error

    def estimate(self, partition: str, start: int, end: int) -> int:
        file = self._files.get(partition)
        size = None if file is None else self._sizes.get(file)
        return (end - start) * (1024 if size is None else max(1, size.size // max(1, size.rows)))

    def _left(self, file: File, at: int) -> int:
        size = self._sizes.get(file)
        return 0 if size is None else size.rows - at

    def unread(self) -> Mapping[str, Unread]:
        return self._unread

    def _listed(self) -> dict[str, File]:
        files, self._unread = readable(self._folder, lambda file: file.path.lower().endswith(self._suffixes))
        self._sizes = {file: self._sizes[file] for file in files if self._sizes.get(file) is not None}
        return {file.path: file for file in files}

    def _size(self, file: File) -> _Size | None:
        """How much is in a file; None for one that is not whole yet."""
        if file not in self._sizes:
            self._sizes[file] = None
            try:
                with closing(self._folder.open(file)) as opened:
                    footer = opened.range(max(0, opened.size - FOOTER), opened.size)
                    metadata = _parquet(opened).metadata
                check = xxhash.xxh3_64_hexdigest(footer, seed=file.size)
                self._sizes[file] = _Size(metadata.num_rows, file.size, check)
            except (FileNotFoundError, NotFound):
                return None
            except DAMAGED as error:
                self._unread[file.path] = Unread(f"it is no Parquet file, or not whole: {error}", file.changed_ms)
                return None
        return self._sizes[file]

    def _diverged(self, partition: str, mark: Mark) -> Diverged:
        return Diverged(
            f"the file {partition} is not the one that was read before: it was replaced. Nothing of it was written. "
            "Put the former file back, and the new one under another name",
            partition=partition, address=mark.address,
        )  # fmt: skip


def _parquet(opened: Opened) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(RangeReader(opened.size, opened.range), mode="r"))


def _rows(parquet: pq.ParquetFile, start: int, end: int) -> Iterator[pa.Table]:
    metadata = parquet.metadata
    first = 0
    for group in range(metadata.num_row_groups):
        after = first + metadata.row_group(group).num_rows
        if first < end and after > start:
            at = first
            for batch in parquet.iter_batches(ROWS, row_groups=[group]):
                low, high = max(start - at, 0), min(end - at, batch.num_rows)
                if low < high:
                    yield _messages(batch.slice(low, high - low), at + low)
                at += batch.num_rows
        first = after


def _messages(batch: pa.RecordBatch, first: int) -> pa.Table:
    addresses = array_of(np.arange(first, first + batch.num_rows, dtype=np.uint64))
    value = batch.to_struct_array()
    return pa.table([addresses, value], schema=pa.schema([ADDRESS, ("value", value.type)]))
