"""What one task does, in this process or on an executor: reads its chunks, parses them, and stages what is good.
Imports no Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jobs.ingesting.inputs import File
from jobs.ingesting.parquet_rows import read_rows
from jobs.ingesting.plan import Chunk, Task
from jobs.ingesting.reading import FileChanged, LostFile, read_range, read_unpacked
from jobs.ingesting.settings import Settings, decode_settings
from persist_lib.convert.lines import file_columns
from persist_lib.convert.lines.csv_lines import BOM, CsvLines
from persist_lib.convert.lines.debezium import DELETES, ChangeLines, last_of_each_key
from persist_lib.convert.lines.decompression import DamagedFile
from persist_lib.convert.lines.file_columns import Refused, Sifted, sift
from persist_lib.convert.lines.json_lines import JsonLines
from persist_lib.convert.lines.line_blocks import TEXT_BYTES, Block, Line, cut, cut_records, record_ends, split
from persist_lib.kernel.columns import packed
from persist_lib.schema.schema import Schema

FOUND = pa.schema(
    [("file", pa.int32()), ("line", pa.int64()), ("offset", pa.int64()), ("text", pa.string()), ("reason", pa.string())]
)
"""Bad lines on their way. `line` counts from 0: in the chunk, or for Parquet in the file."""
Write = Callable[[Iterator[pa.Table]], Any]


class Counts(msgspec.Struct, array_like=True):
    """What became of a chunk's lines. `lines` counts all line ends, `read` those that should be rows, `silent` those
    that say nothing.
    """

    file: int
    lines: int = 0
    read: int = 0
    written: int = 0
    bad: int = 0
    silent: int = 0


class Done(msgspec.Struct, array_like=True):
    """What a task answers: what it staged (pickled), the last change of each key (Arrow), the bad lines (Arrow), the
    counts of each chunk.
    """

    staged: bytes | None
    changes: bytes | None
    bad: bytes
    counts: list[Counts]


class Work(msgspec.Struct, frozen=True):
    """A task with all it needs. `files` and `names` (their headers) have what its chunks refer to."""

    task: Task
    files: dict[int, File]
    names: dict[int, tuple[str, ...]]
    settings: str
    schema: Schema
    bounds: tuple[int, int] | None = None
    goes_on: bool = False
    """Whether a file that is gone or has changed is a bad line, and no error."""


class Reader:
    """Reads the chunks of one task, and counts."""

    def __init__(self, work: Work) -> None:
        self._work, self._schema = work, work.schema
        self._settings: Settings = decode_settings(work.settings)
        self.counts: list[Counts] = []
        self._bad: list[pa.RecordBatch] = []
        self._multiline = (
            self._settings.quote.encode()[0] if self._settings.multiline and self._settings.format == "csv" else None
        )
        # A line of blanks says nothing in JSON. In CSV it is a value.
        self._blank = b"\r" if self._settings.format == "csv" else b" \t\r"

    def tables(self) -> Iterator[pa.Table]:
        """The good rows of all chunks."""
        for chunk in self._work.task.chunks:
            counts = Counts(chunk.file)
            self.counts.append(counts)
            reads = self._rows if self._settings.format == "parquet" else self._lines
            try:
                for sifted in reads(chunk, counts):
                    if sifted.table.num_rows:
                        counts.written += sifted.table.num_rows
                        yield sifted.table
            except (FileChanged, LostFile) as lost:
                if not self._work.goes_on:
                    raise
                counts.read += 1
                until = "its end" if chunk.end is None else f"the byte {chunk.end}"
                why = f"the file is gone or has changed; this line and those up to {until} were not read ({lost})"
                self._note(counts, [(counts.lines, None, b"", why)])

    def bad(self) -> bytes:
        """All bad lines, packed."""
        return packed(pa.Table.from_batches(self._bad, FOUND), "zstd")

    def _rows(self, chunk: Chunk, counts: Counts) -> Iterator[Sifted]:
        file = self._work.files[chunk.file]
        try:
            for rows in read_rows(file, chunk, self._settings, self._schema, self._finished):
                counts.read += rows.size
                bad = [(rows.first + row, None, rows.texts[row], why) for row, why in rows.sifted.bad.items()]
                self._note(counts, bad)
                yield rows.sifted
        except DamagedFile as damage:
            if chunk.start == 0:  # one of its chunks says it for all
                counts.read += 1
                self._note(counts, [(0, None, b"", str(damage))])

    def _lines(self, chunk: Chunk, counts: Counts) -> Iterator[Sifted]:
        file = self._work.files[chunk.file]
        parser = self._parser(chunk.file)
        try:
            for block in self._blocks(file, chunk):
                yield from self._block(block, parser, counts)
        except DamagedFile as damage:
            counts.read += 1
            self._note(counts, [(counts.lines, None, b"", f"{damage}; what comes after this line was not read")])

    def tables_of(self, block: Block) -> Iterator[pa.Table]:
        """The good rows of one block of the only file."""
        counts = Counts(0)
        self.counts.append(counts)
        for sifted in self._block(block, self._parser(0), counts):
            counts.written += sifted.table.num_rows
            yield sifted.table

    def _block(self, block: Block, parser: CsvLines | JsonLines | ChangeLines, counts: Counts) -> Iterator[Sifted]:
        for part in self._without_header(block, counts):
            counts.lines += part.lines
            yield self._sift(parser, part, counts)

    def _parser(self, file: int) -> CsvLines | JsonLines | ChangeLines:
        if self._settings.format == "csv":
            return CsvLines(self._settings, self._schema, self._settings.names or self._work.names[file])
        return (JsonLines if self._settings.format == "jsonl" else ChangeLines)(self._settings, self._schema)

    def _blocks(self, file: File, chunk: Chunk) -> Iterator[Block]:
        if file.compression is not None:
            pieces: Iterator[bytes] = read_unpacked(file)
        else:
            pieces = read_range(file, max(0, chunk.start - 1))
        if self._multiline is not None:
            return cut_records(pieces, self._multiline)
        return cut(pieces, max(0, chunk.start - 1), chunk.start, chunk.end)

    def _without_header(self, block: Block, counts: Counts) -> Iterator[Block]:
        """The block, of which a file's first line may be the header, and its first bytes a mark of UTF-8."""
        if block.offset or self._settings.format == "parquet":
            yield block
            return
        if block.data.startswith(BOM):
            block = replace(block, data=block.data[len(BOM) :], offset=len(BOM))
        if self._settings.format == "csv" and self._settings.names is None:
            ends = record_ends(block.data, self._multiline) if self._multiline is not None else None
            end = (int(ends[0]) if len(ends) else -1) if ends is not None else block.data.find(b"\n")
            end = len(block.data) if end < 0 else end + 1
            header = replace(block, data=block.data[:end])
            counts.lines += header.lines
            block = Block(block.data[end:], block.offset + end, header.lines, block.problem)
        if block.data:
            yield block

    def _sift(self, parser: CsvLines | JsonLines | ChangeLines, block: Block, counts: Counts) -> Sifted:
        if block.problem is not None:
            counts.read += 1
            self._note(counts, [(block.line, block.offset, block.data, block.problem)])
            return Sifted(file_columns.no_rows(self._schema), np.array([], np.int64), {})
        lines: list[Line] | None = None
        if isinstance(parser, ChangeLines):
            lines = split(block, None, self._blank)
            sifted, silent = parser.sift([line.text for line in lines])
            counts.silent += silent
            counts.read += len(lines)
        else:
            sifted, lines = self._parse(parser, block)
            counts.read += len(lines) if lines is not None else block.lines
            sifted = self._finished(sifted)
        if sifted.bad:
            lines = split(block, self._multiline, self._blank) if lines is None else lines
            self._note(
                counts, [(lines[at].line, lines[at].offset, lines[at].text, why) for at, why in sifted.bad.items()]
            )
        return sifted

    def _finished(self, sifted: Sifted) -> Sifted:
        """Without the rows that lack a value, and with times, where they have their own."""
        sifted = file_columns.without_nulls(self._schema, sifted)
        column, bounds = self._settings.time_column, self._work.bounds
        return (
            sifted
            if column is None or bounds is None
            else file_columns.with_times(self._schema, sifted, column, bounds)
        )

    def _parse(self, parser: CsvLines | JsonLines, block: Block) -> tuple[Sifted, list[Line] | None]:
        """The rows of a block; and its lines, where they had to be looked at."""
        try:
            table = parser.parse_data(block.data)
        except Refused:
            table = None
        if table is not None and self._multiline is None and table.num_rows == block.lines:
            return Sifted(table, np.arange(table.num_rows), {}), None
        lines = split(block, self._multiline, self._blank)
        if table is not None and table.num_rows == len(lines):
            return Sifted(table, np.arange(len(lines)), {}), lines
        if not lines:
            return Sifted(parser.empty, np.array([], np.int64), {}), lines
        return sift(parser.parse, parser.suspect, [line.text for line in lines], parser.empty), lines

    def _note(self, counts: Counts, found: Sequence[tuple[int, int | None, bytes, str]]) -> None:
        if not found:
            return
        counts.bad += len(found)
        columns = [
            [counts.file] * len(found), [line for line, *_ in found], [offset for _, offset, *_ in found],
            [shown(text, self._settings.encoding) for *_, text, _ in found], [why for *_, why in found],
        ]  # fmt: skip
        self._bad.append(
            pa.record_batch(
                [pa.array(column, field.type) for column, field in zip(columns, FOUND, strict=True)], schema=FOUND
            )
        )


def shown(text: bytes, encoding: str = "utf-8") -> str:
    """The beginning of a line as text: bytes that are none are shown as \\xff."""
    return text[:TEXT_BYTES].decode(encoding, errors="backslashreplace")


def run_task(work: Work, write: Write | None) -> Done:
    """Read, parse and stage. Without `write`, the rows are changes by key, and are answered."""
    reader = Reader(work)
    if write is not None:
        staged = write(reader.tables())
        return Done(pickle.dumps(staged), None, reader.bad(), reader.counts)
    latest: pa.Table | None = None
    for table in reader.tables():
        both = table if latest is None else pa.concat_tables([latest, table])
        latest = last_of_each_key(work.schema, both)
    empty = file_columns.no_rows(work.schema).append_column(DELETES, pa.array([], pa.bool_()))
    changes = empty if latest is None else latest
    return Done(None, packed(changes, "zstd"), reader.bad(), reader.counts)
