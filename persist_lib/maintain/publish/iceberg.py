"""Iceberg metadata (format version 2) over files that are there, written by pyiceberg.

Each commit writes manifests and metadata under fresh names. `version-hint.text` names the newest metadata, and is moved
on the condition that it is what it was.

The files have no ids of columns, so that a name mapping says which column each name in them is: one that was renamed
has several. `_time`, `_diff` and dropped columns have ids there that the table does not, as some readers ask for each
name. Which id a column of ours has there is a property of the table.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.conversions import to_bytes
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import (
    AddSchemaUpdate,
    SetCurrentSchemaUpdate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.typedef import Record
from pyiceberg.types import BinaryType, IcebergType, ListType, MapType, PrimitiveType, StringType, StructType
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

from persist_lib.maintain.publish.columns import Columns
from persist_lib.maintain.publish.files import AS_OF, File, Known
from persist_lib.maintain.publish.folder import Folder, reads_metadata
from persist_lib.schema.schema import DIFF, TIME

TABLE = "_iceberg/"
METADATA = f"{TABLE}metadata/"
HINT = f"{METADATA}version-hint.text"
HIDDEN = {TIME: 100_001, DIFF: 100_002}
"""The ids of the columns that the table does not have."""
HIDDEN_FROM = 100_003
"""Those of columns that were dropped before the table was published."""
BOUND = 16
"""How many characters of a text, or bytes, a bound has at most, as Iceberg's own writers have them."""
NAMES, KEPT = "schema.name-mapping.default", "write.metadata.previous-versions-max"
IDS = "persist.columns"
"""The property that says which of the table's ids each of the shard's columns has, by that column's own id."""


class Iceberg:
    """A table as Iceberg: what is published, and the next commit of it."""

    @reads_metadata
    def __init__(self, folder: Folder, *, is_read: bool = True) -> None:
        self._folder = folder
        self._hint = folder.get(folder.prefix + HINT)
        self._table: Table | None = None
        if self._hint is not None and is_read:
            location = f"{folder.address}{METADATA}{self._hint.decode()}.metadata.json"
            metadata = FromInputFile.table_metadata(_Input(folder, location))
            if metadata.location == self.place:  # paths are absolute: in a place that was moved, a table begins
                self._table = self._opened(metadata, location)

    @property
    def place(self) -> str:
        """The table's folder. Its metadata has the name that the hint in it says."""
        return self._folder.address + TABLE.rstrip("/")

    @property
    def version(self) -> str:
        """What reads exactly this, whatever comes later: the address of the newest metadata."""
        return "" if self._table is None else self._table.metadata_location

    @reads_metadata
    def newest(self) -> Known | None:
        """What the newest snapshot names."""
        snapshot = None if self._table is None else self._table.current_snapshot()
        if snapshot is None:
            return None
        as_of = int(str(snapshot.summary[AS_OF])) if snapshot.summary else 0
        return Known(as_of, str(snapshot.snapshot_id), {file.key: file for file in self._files_of(snapshot)})

    @reads_metadata
    def named(self) -> set[str]:
        """The keys in Blob of all files that any snapshot names."""
        snapshots = [] if self._table is None else self._table.metadata.snapshots
        return {file.key for snapshot in snapshots for file in self._files_of(snapshot)}

    @reads_metadata
    def names(self) -> dict[str, str]:
        """Whose column each name in the files is, as far as files are published."""
        ids = {number: id_ for id_, number in self._ids().items()}
        mapping = None if self._table is None else self._table.name_mapping()
        mapped = mapping.root if mapping is not None else []
        return {name: ids[one.field_id] for one in mapped if one.field_id in ids for name in one.names}

    def is_as(self, columns: Columns) -> bool:
        """Whether the table has these columns already."""
        return self._table is not None and self._next_schema(self._table, columns) is None

    def write(self, columns: Columns, files: Sequence[File], as_of: int, keep: int) -> None:
        """Write a snapshot of these files, and that of the older ones the last `keep` - 1 stay."""
        table = self._table = self._table or self._made(columns)
        ids = self._ids()
        if (schema := self._next_schema(table, columns)) is not None:
            to_it = SetCurrentSchemaUpdate(**{"schema-id": schema.schema_id})
            metadata = update_table_metadata(table.metadata, (AddSchemaUpdate(schema_=schema), to_it))
            table = self._table = self._opened(metadata, table.metadata_location)
            ids |= {id_: field.field_id for id_, field in zip(columns.ids, schema.fields, strict=True)}
        for id_ in columns.names.values():
            ids.setdefault(id_, max(HIDDEN_FROM, *(number + 1 for number in ids.values())))
        known = {entry.data_file.file_path: entry.data_file for entry in self._entries(table.current_snapshot())}
        wanted = {self._folder.address_of(file.key): file for file in files}
        with table.transaction() as tx:
            names = _mapping(columns, ids, table.name_mapping(), table.schema())
            tx.set_properties({NAMES: names.model_dump_json(), KEPT: str(keep), IDS: json.dumps(ids)})
            producing: Any = tx.update_snapshot(snapshot_properties={AS_OF: str(as_of)})
            is_append = known.keys() <= wanted.keys()
            with producing.fast_append() if is_append else producing.overwrite() as snapshot:
                for address, file in wanted.items():
                    if address not in known:
                        snapshot.append_data_file(_data_file(address, file, ids, tx.table_metadata.schema()))
                for address in known.keys() - wanted.keys():
                    snapshot.delete_data_file(known[address])
            snapshots = [
                one.snapshot_id for one in sorted(tx.table_metadata.snapshots, key=lambda one: one.sequence_number or 0)
            ]
            if len(snapshots) > keep:
                with ExpireSnapshots(tx) as expired:
                    expired.by_ids(snapshots[:-keep])
        self._table = table

    def point(self) -> bool:
        """Make what was written the newest. False if another program moved the pointer."""
        name = self.version.rpartition("/")[2].removesuffix(".metadata.json").encode()
        return self._folder.point(self._folder.prefix + HINT, name, self._hint)

    def expire(self, keep: int) -> None:
        """Nothing: `write` has expired what is older."""

    def tidy(self) -> None:
        """Delete metadata that nothing names: of crashed publications, and of snapshots that are expired."""
        folder, table = self._folder, self._table
        live = {folder.prefix + HINT}
        if table is not None:
            log = [entry.metadata_file for entry in table.metadata.metadata_log]
            lists = [one.manifest_list for one in table.metadata.snapshots]
            manifests = [m.manifest_path for one in table.metadata.snapshots for m in one.manifests(table.io)]
            live |= {folder.key_of(one) for one in (table.metadata_location, *log, *lists, *manifests)}
        folder.delete(folder.sizes(TABLE).keys() - live)

    def withdraw(self) -> None:
        """Delete the pointer, then the rest."""
        self._folder.delete([self._folder.prefix + HINT])
        self._folder.delete(self._folder.sizes(TABLE))

    def close(self) -> None:
        """Nothing is open."""

    def _files_of(self, snapshot: Snapshot) -> list[File]:
        found = (entry.data_file for entry in self._entries(snapshot))
        return [File(self._folder.key_of(one.file_path), one.file_size_in_bytes, one.record_count) for one in found]

    def _entries(self, snapshot: Snapshot | None) -> list[ManifestEntry]:
        files = _Files(self._folder)
        manifests = [] if snapshot is None else snapshot.manifests(files)
        return [one for manifest in manifests for one in manifest.fetch_manifest_entry(files, discard_deleted=True)]

    def _opened(self, metadata: TableMetadata, location: str) -> Table:
        return Table(("published",), metadata, location, _Files(self._folder), _OneTable(self._folder))

    def _made(self, columns: Columns) -> Table:
        """A table without a snapshot, of which nothing is written yet. `gc.enabled`: no engine deletes its files."""
        schema = _numbered(columns.shown)
        ids = {id_: field.field_id for id_, field in zip(columns.ids, schema.fields, strict=True)}
        made = new_table_metadata(
            schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, self.place,
            {"gc.enabled": "false", IDS: json.dumps(ids)},
        )  # fmt: skip
        return self._opened(made, "")

    def _ids(self) -> dict[str, int]:
        if self._table is None:
            return {}
        said: dict[str, int] = json.loads(self._table.properties.get(IDS, "{}"))
        return said or {field.name: field.field_id for field in self._table.schema().fields}

    def _next_schema(self, table: Table, columns: Columns) -> Schema | None:
        """The table's schema with these columns: a known one keeps its id. None where it is what it has."""
        ids = self._ids()
        old = {field.field_id: field for field in table.schema().fields}
        fresh = itertools.count(table.metadata.last_column_id + 1)
        fields = []
        for id_, given in zip(columns.ids, _numbered(columns.shown).fields, strict=True):
            before = old.get(ids.get(id_, -1))
            if before is None:
                (field,) = assign_fresh_schema_ids(Schema(given), lambda: next(fresh)).fields
            else:
                kind = _wider(before.field_type, given.field_type, fresh)
                field = before.model_copy(update={"name": given.name, "field_type": kind})
            fields.append(field)
        if fields == list(table.schema().fields):
            return None
        return Schema(*fields, schema_id=1 + max(one.schema_id for one in table.metadata.schemas))


class _OneTable(NoopCatalog):
    """What pyiceberg asks to commit a table: it writes metadata under a fresh name, and moves no pointer."""

    def __init__(self, folder: Folder) -> None:
        super().__init__("persist")
        self._folder = folder

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        for requirement in requirements:
            requirement.validate(table.metadata)
        before = table.metadata_location
        metadata = update_table_metadata(table.metadata, updates, metadata_location=before or None)
        number = int(before.rpartition("/")[2].partition("-")[0]) + 1 if before else 0
        fresh = f"{number:05d}-{self._folder.machine.runtime.entropy() % 2**64:016x}.metadata.json"
        location = f"{self._folder.address}{METADATA}{fresh}"
        ToOutputFile.table_metadata(metadata, _Output(self._folder, location))
        return CommitTableResponse(metadata=metadata, **{"metadata-location": location})


class _Files(FileIO):
    """pyiceberg's files, by our own Blob: counted, retried, and written once."""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self._folder = folder

    def new_input(self, location: str) -> InputFile:
        return _Input(self._folder, location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(self._folder, location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Nothing: what nothing names is deleted by `Iceberg.tidy`, after the pointer has moved."""


class _Input(InputFile):
    def __init__(self, folder: Folder, location: str) -> None:
        super().__init__(location)
        self._folder = folder

    def _data(self) -> bytes | None:
        return self._folder.get(self._folder.key_of(self.location))

    def __len__(self) -> int:
        return len(self._data() or b"")

    def exists(self) -> bool:
        return self._data() is not None

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - pyiceberg's interface
        if (data := self._data()) is None:
            raise FileNotFoundError(self.location)
        return io.BytesIO(data)


class _Output(OutputFile):
    def __init__(self, folder: Folder, location: str) -> None:
        super().__init__(location)
        self._folder = folder

    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        return self.to_input_file().exists()

    def to_input_file(self) -> InputFile:
        return _Input(self._folder, self.location)

    def create(self, overwrite: bool = False) -> OutputStream:  # noqa: ARG002 - each name is fresh
        return _Stream(self._folder, self._folder.key_of(self.location))


class _Stream(io.BytesIO):
    """Bytes that are stored when they are complete, and not after an error."""

    def __init__(self, folder: Folder, key: str) -> None:
        super().__init__()
        self._folder, self._key = folder, key

    def __enter__(self) -> Self:
        return self

    def __del__(self) -> None:
        """What was not closed is not stored."""

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._folder.put(self._key, data)


def _numbered(schema: pa.Schema) -> Any:
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(schema))


def _wider(before: IcebergType, given: IcebergType, fresh: Iterator[int]) -> IcebergType:
    """The type as it is now: what was there within keeps its ids, and fields that were added get fresh ones."""
    match before, given:
        case StructType(), StructType():
            pairs = zip(before.fields, given.fields, strict=False)
            known = [
                old.model_copy(update={"field_type": _wider(old.field_type, new.field_type, fresh)})
                for old, new in pairs
            ]
            more = assign_fresh_schema_ids(Schema(*given.fields[len(known) :]), lambda: next(fresh)).fields
            return StructType(*known, *more)
        case ListType(), ListType():
            inner = _wider(before.element_type, given.element_type, fresh)
            return ListType(before.element_id, inner, before.element_required)
        case MapType(), MapType():
            inner = _wider(before.value_type, given.value_type, fresh)
            return MapType(before.key_id, before.key_type, before.value_id, inner, before.value_required)
        case _:
            return given


def _mapping(columns: Columns, ids: dict[str, int], before: NameMapping | None, schema: Schema) -> NameMapping:
    """All names in files with the ids of their columns; within nested ones, as they are or were."""
    nested = {one.field_id: one.fields for one in (*(before.root if before else ()), *schema.name_mapping.root)}
    found: dict[int, list[str]] = {id_: [name] for name, id_ in HIDDEN.items()}
    for name, id_ in columns.names.items():
        found.setdefault(ids[id_], []).append(name)
    each = ({"field-id": id_, "names": names, "fields": nested.get(id_, [])} for id_, names in found.items())
    return NameMapping([MappedField(**one) for one in each])


def _data_file(address: str, file: File, ids: dict[str, int], schema: Schema) -> DataFile:
    lower, upper = dict[int, bytes](), dict[int, bytes]()
    for id_, (least, greatest) in file.bounds.items():
        kind = schema.find_type(ids[id_])
        if isinstance(kind, PrimitiveType) and (most := _at_most(kind, greatest)) is not None:
            lower[ids[id_]], upper[ids[id_]] = to_bytes(kind, _at_least(kind, least)), to_bytes(kind, most)
    return DataFile.from_args(
        content=DataFileContent.DATA, file_path=address, file_format=FileFormat.PARQUET, partition=Record(),
        record_count=file.rows, file_size_in_bytes=file.size, lower_bounds=lower, upper_bounds=upper,
    )  # fmt: skip


def _at_least(kind: PrimitiveType, value: Any) -> Any:
    return value[:BOUND] if isinstance(kind, StringType | BinaryType) else value


def _at_most(kind: PrimitiveType, value: Any) -> Any:
    """A value that is no less, and short where a type has short ones; None where there would be none."""
    if not isinstance(kind, StringType | BinaryType) or len(value) <= BOUND:
        return value
    is_text = isinstance(kind, StringType)
    return (truncate_upper_bound_text_string if is_text else truncate_upper_bound_binary_string)(value, BOUND)
