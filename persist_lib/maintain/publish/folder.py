"""The folder of a shard or a collection that other engines know as the table, below `-published/`.

    _delta_log/                    Delta's log; the folder is the table
    _iceberg/metadata/             Iceberg's metadata; `_iceberg` is the table
    _parts/<writer id>/…           parts that the shard's state refers to; a collection's have the shard before that
    _copies/…                      files that only publications refer to

Every engine's vacuum that lists leaves out what is below a name that starts with `_`. So none reaches an object
here, and there is nothing else in the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from persist_lib.errors import Corrupt, PersistError, Unpublishable
from persist_lib.format.paths import parts_prefix, published_prefix
from persist_lib.ids import ShardId
from persist_lib.location.wrap.around import points_others
from persist_lib.shard.commit import Machine

COPIES = "_copies/"
C = TypeVar("C", bound=Callable[..., Any])


def reads_metadata(call: C) -> C:
    """Let a method raise Corrupt for metadata that cannot be read, whatever the format's own library raises for it."""

    @wraps(call)
    def reading(self: Any, *given: Any, **more: Any) -> Any:
        try:
            return call(self, *given, **more)
        except (PersistError, MemoryError):
            raise
        except Exception as error:
            folder: Folder = self._folder
            raise Corrupt(
                f"what is published of table {folder.table} cannot be read: {type(error).__name__}: {error}. "
                "Another program changed it, or it is damaged. Nothing was published; withdraw it, and publish again",
                key=folder.prefix, actual=str(error),
            ) from error  # fmt: skip

    return cast("C", reading)


class Folder:
    """The objects of one table's publications, by their names in its folder. `written` is the bytes put so far.

    `machine` is that of any of its shards, `folder` the name of a shard or a collection's id.
    """

    def __init__(self, machine: Machine, folder: str = "", table: str = "") -> None:
        blob = points_others(machine.blob)
        if blob is None:
            raise Unpublishable(
                f"table {table or machine.shard} cannot be published: no other program can read this location's "
                "objects, or its store cannot replace a pointer on a condition. Nothing was done",
                table=table or machine.shard,
            )
        self.machine, self._pointing, self.table = machine, blob, table or machine.shard
        self.prefix = published_prefix(folder or machine.shard)
        self.address = blob.address + self.prefix
        self.written = 0
        self._known: dict[str, bytes] = {}

    def address_of(self, key: str) -> str:
        """Where other programs find the object with this key in Blob."""
        return self._pointing.address + key

    def key_of(self, address: str) -> str:
        """The key in Blob of what is there."""
        return address.removeprefix(self._pointing.address)

    def has(self, shard: ShardId) -> bool:
        """Whether a shard's parts that can be published where they are stand below it."""
        return parts_prefix(shard).startswith(self.prefix)

    def get(self, key: str) -> bytes | None:
        """The object with this key in Blob. What is written once is read once; pointers are asked for again."""
        if (known := self._known.get(key)) is not None:
            return known
        data = self.machine.blob.get(key)
        if data is not None and not key.endswith(".text"):
            self._known[key] = data
        return data

    def put(self, key: str, data: bytes) -> None:
        self.machine.blob.set(key, data)
        self._known[key] = data
        self.written += len(data)

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        self.written += len(data)
        return self._pointing.point(key, data, follows)

    def sizes(self, below: str) -> dict[str, int]:
        """The objects below a name of the folder, by key in Blob, and their sizes."""
        return {entry.key: entry.size for entry in self.machine.blob.list(self.prefix + below)}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. What cannot be deleted now is found by the next publication."""
        if found := sorted(keys):
            self.machine.blob.delete_many(found)
