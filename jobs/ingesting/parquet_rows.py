"""Rows of Parquet: the row groups that start in a chunk. A row that does not fit the shard's types is a bad line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.ingesting.inputs import File
from jobs.ingesting.plan import Chunk
from jobs.ingesting.reading import RandomAccess, changed, local_file_is, said_gone
from jobs.ingesting.settings import Settings
from persist_lib.convert.casts import cast_column
from persist_lib.convert.lines import file_columns
from persist_lib.convert.lines.csv_lines import check_names
from persist_lib.convert.lines.decompression import DamagedFile
from persist_lib.convert.lines.file_columns import Refused, Sifted, sift
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.location.objects.target import is_on_cloud
from persist_lib.schema.schema import Schema

ROWS = 65_536
Finished = Callable[[Sifted], Sifted]


class Rows(NamedTuple):
    """Some rows of a file. `first` is the number of the first one, from 0; `texts` are those of the bad ones."""

    sifted: Sifted
    first: int
    size: int
    texts: dict[int, bytes]


def open_parquet(file: File) -> pq.ParquetFile:
    """The file, whose footer is read. Raises DamagedFile."""
    try:
        if is_on_cloud(file.path):
            return pq.ParquetFile(pa.PythonFile(RandomAccess(file), mode="r"))
        if not local_file_is(file):
            raise changed(file)
        return pq.ParquetFile(file.path)
    except FileNotFoundError as error:
        raise said_gone(file) from error
    except pa.ArrowException as error:
        raise DamagedFile(f"this is no Parquet file: {error}") from error


def read_rows(file: File, chunk: Chunk, settings: Settings, schema: Schema, finished: Finished) -> Iterator[Rows]:
    """Yield the rows of a chunk; `finished` has the last word on them. Raises DamagedFile."""
    with open_parquet(file) as parquet:
        names = parquet.schema_arrow.names
        if why := check_names(names, settings, schema):
            raise DamagedFile(f"{why}: none of its rows was taken")
        wanted = [name for name in map(settings.source, schema.names) if name in names]
        first = 0
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            if chunk.start <= (start := _start_of(group)) and (chunk.end is None or start < chunk.end):
                yield from _read_group(parquet, number, wanted, settings, schema, first, finished)
            first += group.num_rows
    if not is_on_cloud(file.path) and not local_file_is(file):
        raise changed(file)


def _start_of(group: Any) -> int:
    if not group.num_columns:
        return 0
    column = group.column(0)
    return int(min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0))


def _read_group(
    parquet: pq.ParquetFile,
    number: int,
    wanted: list[str],
    settings: Settings,
    schema: Schema,
    first: int,
    finished: Finished,
) -> Iterator[Rows]:
    batches = parquet.iter_batches(batch_size=ROWS, row_groups=[number], columns=wanted)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, pa.ArrowException) as error:
            why = f"row group {number} cannot be read from this row on: {error}"
            yield Rows(Sifted(file_columns.no_rows(schema), np.array([], np.int64), {0: why}), first, 1, {0: b""})
            return
        if batch is None:
            return
        table = pa.Table.from_batches([batch])
        sifted = finished(fit(table, settings, schema))
        texts = {row: _text(table, row) for row in sifted.bad}
        yield Rows(sifted, first, table.num_rows, texts)
        first += table.num_rows


def fit(table: pa.Table, settings: Settings, schema: Schema) -> Sifted:
    """The rows in the shard's types. Raises DamagedFile for a column of a kind that never fits."""
    try:
        return Sifted(_cast(table, settings, schema), np.arange(table.num_rows), {})
    except SchemaMismatch as error:
        raise DamagedFile(f"{error.message}: none of its rows was taken") from error
    except (Refused, InvalidUsage):
        places = [str(row).encode() for row in range(table.num_rows)]

        def parse(some: Any) -> pa.Table:
            try:
                return _cast(table.take(pa.array([int(place) for place in some])), settings, schema)
            except InvalidUsage as error:
                raise Refused(error.message) from error

        return sift(parse, lambda _: (), places, file_columns.no_rows(schema))


def _cast(table: pa.Table, settings: Settings, schema: Schema) -> pa.Table:
    columns = []
    for field in schema.data:
        source = settings.source(field.name)
        if source not in table.column_names:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        column = table.column(source)
        try:
            column.validate(full=True)
            if field.name in settings.epochs:
                column = file_columns.from_epoch(column.cast(pa.int64()), settings.epochs[field.name], field.type)
            columns.append(cast_column(column, field))
        except pa.ArrowException as error:
            raise file_columns.said(error) from error
    return pa.table(columns, names=schema.names)


def _text(table: pa.Table, row: int) -> bytes:
    try:
        return json.dumps(table.slice(row, 1).to_pylist()[0], default=str, ensure_ascii=False).encode()
    except (UnicodeDecodeError, ValueError, OverflowError):
        return str(table.slice(row, 1)).encode(errors="replace")
