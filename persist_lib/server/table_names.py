"""Which tables the shards of a location are of, for rights by the names of tables: as the usual catalog says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from persist_lib.catalog.catalog import NOTHING, Catalog, Contents
from persist_lib.catalog.names import minted, rendition_shard
from persist_lib.catalog.wal import minted_timeline, wal_shard
from persist_lib.client import Client
from persist_lib.ids import KEPT

TablesOf = Callable[[str], Sequence[str]]
Shards = Mapping[str, Sequence[str]]
"""Shards, and of which tables each is."""
FRESH_S = 1.0
"""For how long a table that was renamed, or dropped and made again, may still count as what it was."""


class TableNames:
    """The names of the tables that each shard has rows of. Safe to use from several threads.

    A shard that stands by itself is the table of its name. One of a collection is that collection's, by its minted id,
    whatever it is called now; the WAL of a timeline is that of all of its tables.
    """

    def __init__(self, client: Client) -> None:
        self._catalog, self._now = Catalog(client), client.runtime.monotonic
        self._lock = threading.Lock()
        self._contents: Contents = NOTHING
        self._names: Mapping[str, Sequence[str]] = {}
        self._read_s = float("-inf")

    def of(self, shard: str) -> Sequence[str]:
        """The tables of a shard, as far as is known; none for one that is no table's, or of a table not known yet."""
        found = self._names.get(shard) or self._names.get(shard.partition(".")[0])
        return found or (() if KEPT.fullmatch(shard) else (shard,))

    def promoted(self, table: str, timeline: str | None) -> list[tuple[Shards, Shards]]:
        """What those need who use the tables that a promotion changes: shards and their tables, before and after it."""
        made: Shards = {rendition_shard(minted(0)): (table,)}  # patterns of names match its id or, to be sure, do not
        before = made if self._contents.named(table) is not None else {table: (table,)}
        if timeline is None:
            return [(before, made)]
        record = next((one for one in self._contents.timelines.values() if one.name == timeline), None)
        wal = wal_shard(minted_timeline(0, "wal") if record is None else record.id)
        on = self._names.get(wal, ())
        joined: Shards = {wal: (*on, table)}
        return [(before, {**made, **joined}), *([({wal: on}, joined)] if on else [])]

    def is_older(self, seconds: float) -> bool:
        """Whether the catalog was read longer ago than that."""
        return self._now() - self._read_s > seconds

    def refresh(self) -> None:
        """Read what has changed in the catalog: one request, if nothing has."""
        with self._lock:
            began = self._now()
            if (contents := self._catalog.fetch()) is not self._contents:
                self._names, self._contents = _names(contents), contents
            self._read_s = began

    def close(self) -> None:
        """Close what it has open. Idempotent."""
        self._catalog.close()


def _names(contents: Contents) -> dict[str, Sequence[str]]:
    every = contents.collections
    # The deleted keys that a table keeps are that table's: who may use it may use them.
    found: dict[str, Sequence[str]] = {id_: (every.get(one.marks_of, one).name,) for id_, one in every.items()}
    for (collection, _), rendition in contents.renditions.items():
        found |= {place: found.get(collection, ()) for place in rendition.places}
    for id_ in contents.timelines:
        tables = (one for one in every.values() if one.timeline == id_ and not one.marks_of)
        on = [one.name for one in tables if one.state != "dropping"]
        found[wal_shard(id_)] = tuple(on)
    return found
