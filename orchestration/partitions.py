"""What a location has as partitions: shards, tables, collections, pending areas, sources. What was dropped is none.

A sensor or a run adds each on first sight. The sensor takes away what was dropped; its events stay in Dagster's log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import dagster as dg

from orchestration.mount import Mount
from persist_lib.catalog.describe import Owners
from persist_lib.maintain.survey import Survey

SHARDS, COLLECTIONS, PENDING, SOURCES = "persist_shards", "persist_collections", "persist_pending", "persist_sources"
TABLES = "persist_tables"
NONE_YET = "(none yet)"
"""The partition of an asset that has no other. Dagster draws an asset of which all partitions are materialized green,
also where there are none; and nothing that never ran is green."""


def defined(mount: Mount, what: str) -> dg.DynamicPartitionsDefinition:
    """The partitions of an asset. Dagster keeps them by their name, for all code locations."""
    return dg.DynamicPartitionsDefinition(name=mount.named(what))


def add_missing(instance: dg.DagsterInstance, mount: Mount, what: str, names: Iterable[str]) -> list[str]:
    """Make names partitions. Returns those that were none."""
    known = set(instance.get_dynamic_partitions(mount.named(what)))
    if new := [name for name in names if name not in known]:
        instance.add_dynamic_partitions(mount.named(what), new)
        if NONE_YET in known and NONE_YET not in new:
            instance.delete_dynamic_partition(mount.named(what), NONE_YET)
    return new


def begin(instance: dg.DagsterInstance, mount: Mount, more: Iterable[str] = ()) -> None:
    """Give each asset a partition that is missing, if it has none: before anything was found, or if nothing can be."""
    for what in (SHARDS, COLLECTIONS, PENDING, SOURCES, TABLES, *more):
        if not instance.get_dynamic_partitions(mount.named(what)):
            instance.add_dynamic_partitions(mount.named(what), [NONE_YET])


def keep(instance: dg.DagsterInstance, mount: Mount, what: str, names: Collection[str]) -> None:
    """The partitions of an asset are these names and no others; one that says so where there are none."""
    there = names or [NONE_YET]
    add_missing(instance, mount, what, there)
    for gone in set(instance.get_dynamic_partitions(mount.named(what))).difference(there):
        instance.delete_dynamic_partition(mount.named(what), gone)


def shown(survey: Survey, owners: Owners) -> Sequence[str]:
    """The shards that are partitions: all but those that were dropped."""
    dead = {name for name, look in survey.looks.items() if look.is_tombstone and look.seqno == survey.heads.get(name)}
    return sorted(name for name in survey.heads if name not in dead and not owners.is_gone(name))
