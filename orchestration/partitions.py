"""Shards as partitions. A sensor or a run adds each on first sight. None is removed, as names are never reused."""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from orchestration.mount import Mount


def missing(instance: dg.DagsterInstance, mount: Mount, shards: Iterable[str]) -> list[str]:
    """The shards that are no partition yet."""
    known = set(instance.get_dynamic_partitions(mount.named("persist_shards")))
    return [shard for shard in shards if shard not in known]


def add_missing(instance: dg.DagsterInstance, mount: Mount, shards: Iterable[str]) -> None:
    """Make every shard a partition."""
    if new := missing(instance, mount, shards):
        instance.add_dynamic_partitions(mount.named("persist_shards"), new)
