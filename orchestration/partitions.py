"""Shards as partitions. A sensor or a run adds each on first sight. None is removed, as names are never reused."""

from __future__ import annotations

import dagster as dg

shard_partitions = dg.DynamicPartitionsDefinition(name="persist_shards")


def add_missing(instance: dg.DagsterInstance, shards: list[str]) -> list[str]:
    """Make every shard a partition; returns those that were not one yet."""
    known = set(instance.get_dynamic_partitions("persist_shards"))
    missing = [shard for shard in shards if shard not in known]
    if missing:
        instance.add_dynamic_partitions("persist_shards", missing)
    return missing
