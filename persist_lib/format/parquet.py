"""Parts as Parquet objects: writing them row group by row group, and reading them whole or by key range.

A part carries its format version, its schema id and the key bounds of its row groups in the file's own metadata, and
Arrow's schema, so that it can be understood by itself. Bytes have been verified before they come here; whatever does
not decode nevertheless is `Corrupt`, by name.

What is written how was chosen by measurement: row groups small enough that sixteen runs read side by side stay within
memory and that key ranges read parts of a file; dictionaries only where a sample repeats itself, packed integers, LZ4
for the rest. Key bounds in our own encoding serve every type. Statistics of data columns serve filters; floats have
none, as NaN and -0.0 are left out of them. Parts of earlier releases have none at all, and are filtered without them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist_lib.arguments import UNREADABLE
from persist_lib.core.trace import GROUP_BYTES, GROUP_ROWS
from persist_lib.errors import Corrupt, Damage, InvalidUsage, NewerFormat
from persist_lib.format.conform import counted_at, cut, names_of
from persist_lib.format.descriptions import Description, EncodedPart, describe_group, join
from persist_lib.format.dictionaries import as_stored, stored_as
from persist_lib.format.digest import digest
from persist_lib.format.predicate import Where, statistics_columns
from persist_lib.format.range_reader import ChunkedReader
from persist_lib.kernel.columns import array_of, plain_table
from persist_lib.kernel.keys import Start, lower_bound, may_reach
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import column_of
from persist_lib.schema.schema import DIFF, RESERVED, TIME, Schema

VERSION: Final = 1
SHORT_DICTIONARY = 16 << 10
MARK, SCHEMA_ID = b"persist.part", b"persist.schema"
GROUPS, KEYS, STARTS, ARROW = b"persist.groups", b"persist.keys", b"persist.starts", b"ARROW:schema"
COLUMNS = b"persist.columns"
"""The ids of the columns, where their names are others."""
KEYS_A_GROUP, ROWS_A_KEY = 16, 64
"""How many keys of a row group are noted, where it can be cut, and how many rows lie between two at least."""
_SAMPLE = 1024
_REPEATS = 0.25  # a column gets a dictionary when at most this share of a sample is distinct

Bounds = tuple[bytes, bytes]
T = TypeVar("T")


Describing = Callable[[Callable[[pa.Table], Description], Iterable[pa.Table]], Iterable[Description]]
"""Like `map`; an executor's map describes row groups while others are written."""


class _Growing(io.RawIOBase):
    """A file in memory that is written from its start to its end, and then taken.

    Arrow's own keeps its bytes twice while it grows and when it is taken. A large bytearray is moved by the system.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return len(self._data)

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def taken(self) -> memoryview:
        return memoryview(self._data).toreadonly()


class PartEncoder:
    """Encodes a part from tables that follow each other in canonical order. `size` grows as row groups are written."""

    def __init__(self, schema: Schema, schema_id: int) -> None:
        self._schema, self._schema_id = schema, schema_id
        self._sink = _Growing()
        self._writer: pq.ParquetWriter | None = None
        self._stored = schema.updates
        self._groups: list[Description] = []
        self._keys: list[list[bytes]] = []
        self._starts: list[list[Start]] = []

    @property
    def size(self) -> int:
        return int(self._sink.tell())

    @property
    def rows(self) -> int:
        return sum(group.sums.count for group in self._groups)

    def write(self, table: pa.Table, parallel: Describing = map) -> None:
        """Append rows, a row group for every GROUP_ROWS or GROUP_BYTES of them. `parallel` describes them beside."""
        if table.num_rows == 0:
            return
        if self._writer is None:
            self._writer = self._open(table)
        groups = list(groups_of(table))
        described = parallel(partial(describe_group, self._schema), groups)
        for group in groups:
            self._writer.write_table(as_stored(group, self._stored), row_group_size=group.num_rows)
        self._groups += described
        for group in groups:
            keys = inner_keys(self._schema, group)
            self._keys.append(keys)
            self._starts.append(starts_of(self._schema, group, keys))

    def finish(self) -> EncodedPart:
        """Close the object and describe it. InvalidUsage when nothing was written."""
        if self._writer is None:
            raise InvalidUsage("a part holds at least one update; an empty batch has no parts")
        bounds = [(group.key_lower, group.key_upper) for group in self._groups]
        said = {MARK: str(VERSION).encode(), SCHEMA_ID: str(self._schema_id).encode()}
        noted: dict[bytes, list[Any]] = {GROUPS: bounds, KEYS: self._keys, STARTS: self._starts}
        ids = [column.id for column in self._schema.columns]
        noted[COLUMNS] = [] if ids == self._schema.names else ids
        self._writer.add_key_value_metadata(
            {
                **said,
                ARROW: base64.b64encode(self._schema.updates.with_metadata(said).serialize()),
                **{name: _packed(value) for name, value in noted.items() if any(value)},
            }
        )
        self._writer.close()
        data = self._sink.taken()
        return EncodedPart(data, self._schema_id, digest(data), join(self._groups))

    def _open(self, table: pa.Table) -> pq.ParquetWriter:
        encodings = _encodings(table)
        self._stored = stored_as(table, self._schema.updates, encodings["use_dictionary"])
        # The Arrow schema that the writer would store says how the tables are in memory. `finish` stores what
        # they mean.
        return pq.ParquetWriter(
            self._sink,
            self._stored,
            store_schema=False,
            write_statistics=statistics_columns(table.schema) or False,
            **encodings,
        )


def groups_of(table: pa.Table) -> Iterator[pa.Table]:
    """A table cut into row groups of like size."""
    row_bytes = max(1, table.nbytes // table.num_rows)
    rows = max(1, min(GROUP_ROWS, GROUP_BYTES // row_bytes))
    groups = max(1, round(table.num_rows / rows))
    rows = -(-table.num_rows // groups)
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def inner_keys(schema: Schema, group: pa.Table) -> list[bytes]:
    """Lower bounds of keys in the middle of a row group, at even distances: where its rows can be cut, and how many."""
    return [lower_bound(schema, group.slice(place, 1)) for place in _places(group)]


def starts_of(schema: Schema, group: pa.Table, keys: list[bytes]) -> list[Start]:
    """The first row of a group, and those whose keys are noted; none of them if these keys tell them apart."""
    noted = [lower_bound(schema, group.slice(0, 1)), *keys]
    if len(set(noted)) == len(noted):
        return []
    return [Start.of(schema, group, place) for place in (0, *_places(group))]


def _places(group: pa.Table) -> range:
    step = max(ROWS_A_KEY, -(-group.num_rows // KEYS_A_GROUP))
    return range(step, group.num_rows, step)


def _encodings(table: pa.Table) -> dict[str, Any]:
    """How the writer stores each column: dictionaries and packed integers are small by themselves, the rest is LZ4."""
    repeating = repeating_columns(table)
    leaves = leaves_of(plain_table(table.slice(0, 0)).schema)
    packed = [leaf for leaf, field in leaves.items() if leaf not in repeating and _is_packable(field.type)]
    small = {*repeating, *packed}
    return {
        "use_dictionary": repeating,
        "column_encoding": dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
        "compression": {leaf: "none" if leaf in small else "lz4" for leaf in leaves},
    }


def leaves_of(columns: pa.Schema) -> dict[str, pa.Field]:
    """What Parquet stores as columns, by its paths: a plain column by its name, and all that a nested one holds."""
    found: dict[str, pa.Field] = {}
    for field in columns:
        _add_leaves(found, field.name, field)
    return found


def _add_leaves(found: dict[str, pa.Field], path: str, field: pa.Field) -> None:
    kind = field.type
    if pa.types.is_struct(kind):
        for inner in kind:
            _add_leaves(found, f"{path}.{inner.name}", inner)
    elif pa.types.is_map(kind):
        _add_leaves(found, f"{path}.key_value.key", kind.key_field)
        _add_leaves(found, f"{path}.key_value.value", kind.item_field)
    elif pa.types.is_nested(kind):
        _add_leaves(found, f"{path}.list.element", kind.value_field)
    else:
        found[path] = field


def _top(file: pq.ParquetFile) -> list[int]:
    """The column of the table to which each of Parquet's columns belongs. A name may have dots, as paths have."""
    return [at for at, field in enumerate(file.schema_arrow) for _ in leaves_of(pa.schema([field]))]


def _is_packable(kind: pa.DataType) -> bool:
    """Whether Parquet stores the type as a 32- or 64-bit integer."""
    test = pa.types
    return bool(test.is_integer(kind) or test.is_temporal(kind))


def repeating_columns(table: pa.Table) -> list[str]:
    """The columns for which a dictionary pays, judged by a sample."""
    if table.num_rows < _SAMPLE:
        return []
    rows = array_of(np.arange(_SAMPLE) * (table.num_rows // _SAMPLE))
    sample = plain_table(table.take(rows))
    names = [f.name for f in sample.schema if not pa.types.is_boolean(f.type) and not pa.types.is_nested(f.type)]
    distinct = {name: pc.count_distinct(sample.column(name)).as_py() for name in names}
    return [name for name, count in distinct.items() if count <= _REPEATS * _SAMPLE]


class PartFile:
    """A verified part that is open for reading, whole or by row groups.

    `columns` are the wanted ones of the schema's; `_diff` always comes along, `_time` unless no `times` are wanted.
    Columns that are newer than the part are null. Row groups without a row that `where` keeps are not decoded; the
    others come whole. With `at`, all updates are at that time. `dictionaries`: text that repeats stays encoded.
    """

    def __init__(
        self,
        key: str,
        source: pa.NativeFile | ChunkedReader,
        schema: Schema,
        columns: Sequence[str] | None = None,
        *,
        dictionaries: bool = False,
        times: bool = True,
        where: Where | None = None,
        at: int | None = None,
    ) -> None:
        self._key, self._schema, self._columns, self._times, self._at = key, schema, columns, times, at
        with undamaged(key):
            self._file = pq.ParquetFile(source, pre_buffer=False)
            if dictionaries and (names := _short_dictionaries(self._file)):
                self._file = pq.ParquetFile(
                    source, metadata=self._file.metadata, read_dictionary=names, pre_buffer=False
                )
            metadata = self._file.metadata.metadata or {}
            _check_version(key, metadata.get(MARK))
            stored = self._file.schema_arrow
            plain = [name for name in stored.names if name not in RESERVED]
            self.ids: list[str] = _unpacked(metadata[COLUMNS], _IDS) if COLUMNS in metadata else plain
            names = names_of(stored.names, self.ids, schema)
            self._in_file = dict(zip(names, stored.names, strict=True))
            self._ours = {} if names == stored.names else dict(zip(stored.names, names, strict=True))
            self._stored = pa.schema([field.with_name(name) for field, name in zip(stored, names, strict=True)])
            self._top = [names[at] for at in _top(self._file)]
            self.bounds: list[Bounds] = _unpacked(metadata[GROUPS], _BOUNDS)
            """The least and the greatest key of each row group, both inclusive, perhaps cut short."""
            self._noted = metadata.get(KEYS)
            self._noted_starts = metadata.get(STARTS)
            told = where is not None and all(map(self._is_told, where.names))
            self._kept = where.groups(self._file.metadata, schema.data, stored) if where is not None and told else None

    @property
    def rows(self) -> int:
        return int(self._file.metadata.num_rows)

    @property
    def footer(self) -> pq.FileMetaData:
        return self._file.metadata

    @property
    def group_rows(self) -> list[int]:
        metadata = self._file.metadata
        return [int(metadata.row_group(index).num_rows) for index in range(metadata.num_row_groups)]

    def groups(self, lo: bytes | None = None, hi: bytes | None = None) -> list[int]:
        """The row groups that may hold keys in `[lo, hi)` and rows that the filter keeps."""
        return [
            index
            for index, (lower, upper) in enumerate(self.bounds)
            if may_reach(upper, lo)
            and (hi is None or lower < hi)
            and self._is_within(index, lo, hi)
            and (self._kept is None or index in self._kept)
        ]

    def byte_ranges(self, groups: Sequence[int]) -> list[tuple[int, int]]:
        metadata = self._file.metadata
        found = []
        for group in map(metadata.row_group, groups):
            spans = [_span(group.column(index)) for index in range(group.num_columns)]
            found.append((min(start for start, _ in spans), max(end for _, end in spans)))
        return found

    def wanted_ranges(self, lo: bytes | None = None, hi: bytes | None = None) -> list[tuple[int, int]]:
        """Where in the object the wanted columns of the row groups that may hold what is wanted lie."""
        return self.column_ranges(self.groups(lo, hi), self._wanted(lo, hi) or self._stored.names)

    def read(
        self, lo: bytes | None = None, hi: bytes | None = None, groups: Sequence[int] | None = None, *,
        use_threads: bool = True,
    ) -> pa.Table:  # fmt: skip
        """All rows in `[lo, hi)` at once, or those of them in some of the row groups. Threads may read side by side."""
        names = self._wanted(lo, hi)
        groups = self.groups(lo, hi) if groups is None else groups
        with undamaged(self._key):
            if len(groups) == len(self.bounds):
                table = self._file.read(columns=self._file_names(names), use_threads=use_threads)
            else:
                table = self._file.read_row_groups(groups, columns=self._file_names(names), use_threads=use_threads)
        return self._finish(self._named(table), lo, hi)

    @property
    def row_bytes(self) -> int:
        metadata = self._file.metadata
        size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        return max(1, int(size) // max(1, self.rows))

    def batches(self, rows: int, lo: bytes | None = None, hi: bytes | None = None) -> Iterator[pa.Table]:
        """The rows in `[lo, hi)`, at most `rows` at a time, on the calling thread."""
        names = self._file_names(self._wanted(lo, hi))
        with undamaged(self._key):
            batches = self._file.iter_batches(rows, row_groups=self.groups(lo, hi), columns=names, use_threads=False)
        while True:
            with undamaged(self._key):
                batch = next(batches, None)
            if batch is None:
                return
            table = self._finish(self._named(pa.Table.from_batches([batch])), lo, hi)
            if table.num_rows:
                yield table

    def inner_keys(self) -> list[list[bytes]] | None:
        """Keys at even distances within each row group. None in parts of earlier releases, and in small ones."""
        if self._noted is None:
            return None
        with undamaged(self._key):
            return _unpacked(self._noted, _KEYS)

    @cached_property
    def _starts(self) -> list[list[Start]]:
        if self._noted_starts is None:
            return [[]] * len(self.bounds)
        with undamaged(self._key):
            return _unpacked(self._noted_starts, _STARTS)

    def starts(self) -> list[list[Start]]:
        """For each row group in which keys repeat, its first row and those whose keys are noted; [] for the others."""
        if self._at is None:
            return self._starts
        return [[Start(data, None if time is None else self._at) for data, time in starts] for starts in self._starts]

    def key_columns(self) -> tuple[list[str], list[str]]:
        """The names of the stored key columns, and of the other columns that are wanted."""
        wanted, keys = self._wanted(b"", None) or self._stored.names, set(self._schema.key_names)
        return [name for name in wanted if name in keys], [name for name in wanted if name not in keys]

    def column_ranges(self, groups: Sequence[int], names: Sequence[str]) -> list[tuple[int, int]]:
        """Where in the object these columns of these row groups lie."""
        metadata, wanted = self._file.metadata, set(names)
        places = [at for at, name in enumerate(self._top) if name in wanted]
        return [_span(group.column(at)) for group in map(metadata.row_group, groups) for at in places]

    def read_group(self, group: int, names: Sequence[str], *, use_threads: bool = True) -> pa.Table:
        """Some columns of a row group, as they are stored, under the reader's names."""
        with undamaged(self._key):
            return self._named(
                self._file.read_row_group(group, columns=self._file_names(names), use_threads=use_threads)
            )

    def conformed(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Rows with the wanted columns as they are stored, but for dictionaries, as the reader's schema has them."""
        wanted = set(self._wanted(b"", None) or self._stored.names)
        empty = plain_table(empty_table(pa.schema([field for field in self._stored if field.name in wanted])))
        return self._finish(
            pa.concat_tables([table.select(empty.schema.names) for table in (empty, *tables)]), None, None
        )

    def _is_within(self, index: int, lo: bytes | None, hi: bytes | None) -> bool:
        """Whether a row group may reach into the range, by the first rows of it and of the next one."""
        starts = [*self._starts, []]
        if hi is not None and starts[index] and starts[index][0].data >= hi:
            return False
        return not starts[index + 1] or may_reach(starts[index + 1][0].data, lo)

    def _file_names(self, names: Sequence[str] | None) -> list[str] | None:
        return None if names is None else [self._in_file[name] for name in names]

    def _named(self, table: pa.Table) -> pa.Table:
        return table.rename_columns([self._ours[name] for name in table.schema.names]) if self._ours else table

    def _is_told(self, name: str) -> bool:
        """Whether the file's statistics under this name are of the reader's column, or that has only nulls here."""
        if name in self._in_file:
            return self._in_file[name] == name
        column = column_of(self._schema, name)
        return name not in self._in_file.values() and (column is None or column.default is None)

    def _wanted(self, lo: bytes | None, hi: bytes | None) -> list[str] | None:
        if self._columns is None and self._times:
            return None
        keys = self._schema.key_names if lo is not None or hi is not None else []
        wanted = {*(self._schema.names if self._columns is None else self._columns), *keys, DIFF, *[TIME] * self._times}
        return [name for name in self._stored.names if name in wanted]

    def _finish(self, table: pa.Table, lo: bytes | None, hi: bytes | None) -> pa.Table:
        if self._times:
            table = counted_at(table, self._at)
        return cut(self._key, table, self._schema, self._columns, lo, hi, times=self._times)


def _short_dictionaries(file: pq.ParquetFile) -> list[str]:
    """The text columns that have a short dictionary in every row group."""
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    fields = [file.schema_arrow.field(top) for top in _top(file)]
    texts = [(at, f.name) for at, f in enumerate(fields) if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
    return [name for index, name in texts if all(_is_short(group.column(index)) for group in groups)]


def _is_short(column: pq.ColumnChunkMetaData) -> bool:
    if not column.has_dictionary_page or column.dictionary_page_offset is None:
        return False
    return bool(column.data_page_offset - column.dictionary_page_offset <= SHORT_DICTIONARY)


def _span(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return start, start + column.total_compressed_size


def _packed(value: object) -> bytes:
    return base64.b64encode(msgspec.msgpack.encode(value))


_IDS = msgspec.msgpack.Decoder(list[str])
_BOUNDS = msgspec.msgpack.Decoder(list[Bounds])
_KEYS = msgspec.msgpack.Decoder(list[list[bytes]])
_STARTS = msgspec.msgpack.Decoder(list[list[Start]])


def _unpacked(text: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    return decoder.decode(base64.b64decode(text))


def _check_version(key: str, mark: bytes | None) -> None:
    if mark is None or not mark.isdigit():
        raise Corrupt(f"{key}: a Parquet object, but not a part of Persist", key=key)
    if int(mark) > VERSION:
        raise NewerFormat(
            f"{key}: part format {int(mark)}, this release knows up to {VERSION}; upgrade first",
            key=key, found=int(mark), known=VERSION,
        )  # fmt: skip


@contextmanager
def undamaged(key: str) -> Iterator[None]:
    """Whatever goes wrong while decoding is damage of the object named `key`."""
    try:
        yield
    except (Damage, MemoryError):
        raise
    except (pa.ArrowException, OSError, EOFError, KeyError, ValueError, *UNREADABLE) as error:
        raise Corrupt(f"{key}: does not decode as a part: {error}", key=key, actual=str(error)) from error
