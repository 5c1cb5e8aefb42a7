"""A Delta log over files that are there, written by deltalake.

deltalake commits to a copy of the log in a folder of this machine, and what it wrote there is put beside the others, by
our own Blob. An entry of the log has the number that follows, and is written once: that decides. Paths are relative, as
most readers find no others. A removed file says that it was removed far in the future: no vacuum may delete it, as the
shard may still have it. Entries have no bounds of values: where a column of several has none, as floats, deltalake's
Arrow datasets (1.6) leave out every row for each filter of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from persist_lib.errors import Corrupt
from persist_lib.maintain.publish.columns import Columns
from persist_lib.maintain.publish.files import AS_OF, File, Known
from persist_lib.maintain.publish.folder import Folder, reads_metadata

LOG = "_delta_log/"
NEVER_MS = 2**53
"""When a file counts as removed, for vacuums: in the year 287396."""


class Delta:
    """A table as Delta: what is published, and the next commit of it."""

    @reads_metadata
    def __init__(self, folder: Folder, *, is_read: bool = True) -> None:
        self._folder = folder
        self._local = tempfile.TemporaryDirectory(prefix="persist-delta-", ignore_cleanup_errors=True)
        self._path = Path(self._local.name)
        self._there = set[str]()
        try:
            self._table = self._read(folder) if is_read else None
        except BaseException:
            self._local.cleanup()
            raise

    def _read(self, folder: Folder) -> DeltaTable | None:
        """The table of a copy of the log; None where there is no log."""
        (self._path / LOG).mkdir()
        for key in sorted(folder.sizes(LOG)):
            name = key.removeprefix(folder.prefix)
            if (data := folder.get(key)) is not None:
                (self._path / name).write_bytes(data)
                self._there.add(name)
        return DeltaTable(self._local.name) if any(name.endswith(".json") for name in self._there) else None

    @property
    def place(self) -> str:
        """The table's folder."""
        return self._folder.address.rstrip("/")

    @property
    def version(self) -> str:
        """The number of the newest version."""
        return "" if self._table is None else str(self._table.version())

    @reads_metadata
    def newest(self) -> Known | None:
        """What the newest version names."""
        if self._table is None:
            return None
        commit: dict[str, Any] = self._table.history(1)[0]
        if AS_OF not in commit:
            raise ValueError(f"its version {self.version} does not say as of which time it is")
        return Known(int(commit[AS_OF]), self.version, {file.key: file for file in self._files(self._table)})

    @reads_metadata
    def named(self) -> set[str]:
        """The keys in Blob of all files that any version names."""
        found = set[str]()
        for version in self._versions():
            found |= {file.key for file in self._files(DeltaTable(self._local.name, version=version))}
        return found

    def names(self) -> dict[str, str]:
        """Nothing: its readers go by the names that columns have."""
        return {}

    def is_as(self, columns: Columns) -> bool:
        """Whether the table has these columns already."""
        return set(columns.shown.names) == self._names()

    def write(self, columns: Columns, files: Sequence[File], as_of: int, keep: int) -> None:  # noqa: ARG002
        """Write a version of these files, here."""
        prefix, now = self._folder.prefix, self._folder.machine.consensus.now()
        known = {} if self._table is None else {file.key: file for file in self._files(self._table)}
        wanted = {file.key: file for file in files}
        said = CommitProperties(custom_metadata={AS_OF: str(as_of)})
        adding = [
            AddAction(key.removeprefix(prefix), one.size, {}, now, True, json.dumps({"numRecords": one.rows}))
            for key, one in wanted.items()
            if key not in known
        ]
        if self._table is None:
            create_table_with_add_actions(
                self._local.name, Schema.from_arrow(columns.shown), adding, commit_properties=said
            )
        else:
            if not self.is_as(columns):
                fields = [one for one in Schema.from_arrow(columns.shown).fields if one.name not in self._names()]
                self._table.alter.add_columns(fields, commit_properties=self._as_before())
            removing = [
                RemoveAction(path=key.removeprefix(prefix), deletion_timestamp=NEVER_MS, data_change=True)
                for key in known.keys() - wanted.keys()
            ]
            self._table.create_write_transaction(
                [*adding, *removing], mode="append", schema=self._table.schema(), commit_properties=said
            )
        self._table = DeltaTable(self._local.name)

    def _as_before(self) -> CommitProperties:
        before = self.newest()
        return CommitProperties(custom_metadata={} if before is None else {AS_OF: str(before.as_of)})

    def point(self) -> bool:
        """Put what was written beside the others. False if another program was first."""
        for name in sorted(self._here() - self._there):
            try:
                self._folder.put(self._folder.prefix + name, (self._path / name).read_bytes())
            except Corrupt:
                return False
        return True

    def expire(self, keep: int) -> None:
        """Keep the last versions: a checkpoint of the oldest of them stands for what came before."""
        versions = self._versions()
        if len(versions) <= keep:
            return
        first = versions[-keep]
        DeltaTable(self._local.name, version=first).create_checkpoint()
        name = f"{LOG}{first:020d}.checkpoint.parquet"
        self._folder.put(self._folder.prefix + name, (self._path / name).read_bytes())
        gone = [name for name in self._here() if name[len(LOG) :][:20].isdigit() and int(name[len(LOG) :][:20]) < first]
        for name in gone:
            (self._path / name).unlink()
        self._folder.delete(self._folder.prefix + name for name in gone)

    def tidy(self) -> None:
        """Nothing: no entry of the log is ever left over."""

    def withdraw(self) -> None:
        """Delete the log, its newest entries last: what is left of it after a crash is no table."""
        for key in sorted(self._folder.sizes(LOG)):
            self._folder.delete([key])

    def close(self) -> None:
        """Remove the copy of the log."""
        self._local.cleanup()

    def _versions(self) -> list[int]:
        return sorted(int(Path(name).stem) for name in self._here() if name.endswith(".json"))

    def _here(self) -> set[str]:
        return {LOG + path.name for path in (self._path / LOG).iterdir() if not path.name.startswith("_last")}

    def _names(self) -> set[str]:
        return set() if self._table is None else {field.name for field in self._table.schema().fields}

    def _files(self, table: DeltaTable) -> list[File]:
        added: Any = pa.table(table.get_add_actions(flatten=True))
        columns = (added.column(name).to_pylist() for name in ("path", "size_bytes", "num_records"))
        return [File(self._folder.prefix + path, size, rows) for path, size, rows in zip(*columns, strict=True)]
