"""Objects by name, put on a condition and asked for again, as an event log uses them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from persist_lib.errors import Determinate, Indeterminate
from persist_lib.events.stores.shared import sent_again
from persist_lib.location.object_store import Object, ObjectStore
from persist_lib.runtime.ambient import Runtime


class Objects:
    """Objects by name. As each record says its epoch, no two have the same bytes.

    Each request is sent again while it fails: a condition that our own request made false is recognised.
    """

    def __init__(self, objects: ObjectStore, runtime: Runtime) -> None:
        self._objects, self._runtime = objects, runtime
        self.where = objects.where

    def get(self, name: str, most: int | None = None) -> Object | None:
        """Return an object, or its first `most` bytes, and its version; None if there is none."""
        try:
            return sent_again(self._runtime, lambda: self._objects.get(name, f"read {name!r}", 0, most))
        except Indeterminate as error:
            raise Determinate(f"could not read {name} of {self.where}: {error.message}") from error

    def put(self, name: str, data: bytes, version: str | None) -> bool:
        """Store an object if there is none (version None), or if its version is this one. Returns whether it did."""
        return sent_again(self._runtime, lambda: self._objects.put(name, data, f"store {name!r}", version))

    def overwrite(self, name: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        sent_again(self._runtime, lambda: self._objects.overwrite(name, data, f"store {name!r}"))

    def names(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """The names that start with a prefix and are greater than `after`, ascending; the first `most` of them."""
        doing = f"list {prefix!r}"
        found = sent_again(self._runtime, lambda: list(islice(self._objects.entries(prefix, doing, after), most)))
        return [entry.name for entry in found]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. It is no error if there are none."""

        def delete() -> None:
            for error in self._objects.delete(names).values():
                raise error

        sent_again(self._runtime, delete)

    def close(self) -> None:
        """Release connections. Idempotent."""
        self._objects.close()
