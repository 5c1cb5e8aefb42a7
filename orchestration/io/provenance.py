"""What a load leaves in Dagster: which shards it read and as of when; and for earlier times, which data version."""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG, extract_data_version_from_entry
from dagster._core.events import DagsterEvent

from orchestration.io.loading import NAMED, Source
from orchestration.io.names import Place
from orchestration.io.times import AS_OF_TIME, READ

LOOKED_AT = 1000
"""How many materializations of an asset or partition are looked at to find the one of an earlier time."""


def record_load(context: dg.InputContext, sources: Sequence[Source], missing: Sequence[Place], found: Any) -> None:
    """Observe the asset that was read, in the consumer's run: shards, times, seqnos and rows."""
    metadata: dict[str, Any] = {READ: {source.place.table: source.as_of for source in sources}}
    if hasattr(found, "__len__"):
        metadata["rows"] = len(found)
    if len(sources) == 1:
        (source,) = sources
        metadata |= {"table": source.place.table, "as_of": source.as_of}
        if source.seqno is not None:
            metadata["seqno"] = source.seqno
        if source.schema.times is not None:
            metadata[AS_OF_TIME] = source.schema.show(source.as_of)
    else:
        metadata["partitions"] = len(sources)
    if missing:
        names = [place.partition for place in missing]
        metadata |= {"missing": len(names), "missing_partitions": names[:NAMED]}
        context.log.warning("%d partitions have nothing stored: %s", len(names), names[:NAMED])
    _observe(context, sources, metadata)
    if any(source.is_earlier for source in sources):
        _own_up(context, sources)


def _observe(context: dg.InputContext, sources: Sequence[Source], metadata: dict[str, Any]) -> None:
    """Log the observation.

    SUBTLE: `add_input_metadata` is for one partition at most. And the observation of an asset that Dagster does not
    materialize is its newest version: without a data version it would hide the one that was observed before.
    """
    layer, key = context.step_context.job_def.asset_layer, context.asset_key
    if len(sources) == 1 and layer.has(key) and layer.get(key).is_executable:
        context.add_input_metadata(metadata)
        return
    partition = sources[0].place.partition if len(sources) == 1 else None
    record = context.instance.get_latest_data_version_record(key, partition_key=partition)
    version = None if record is None else extract_data_version_from_entry(record.event_log_entry)
    tags = {} if version is None else {DATA_VERSION_TAG: version.value}
    DagsterEvent.asset_observation(  # which logs it
        context.step_context, dg.AssetObservation(key, partition=partition, metadata=metadata, tags=tags)
    )


def _own_up(context: dg.InputContext, sources: Sequence[Source]) -> None:
    """Have Dagster compare with what was read, and not with the newest: otherwise the consumer would look fresh.

    SUBTLE: for a partitioned input Dagster compares what came after the event that provenance points at, and for
    another one the data versions. So both become those of the materialization that stored what was read.
    """
    infos = cast("dict[dg.AssetKey, Any]", context.step_context.input_asset_records)
    if (info := infos.get(context.asset_key)) is None:
        return
    ids, versions = [info.storage_id], []
    for source in sorted(sources, key=lambda source: source.place.partition or ""):
        stored = _materialization(context, source) if source.is_earlier else None
        ids += [] if stored is None else [stored.storage_id]
        version = None if stored is None else extract_data_version_from_entry(stored.event_log_entry)
        versions.append(f"{source.place.table}@{source.as_of}" if version is None else version.value)
    text = versions[0] if sources[0].place.partition is None else hashlib.sha256("".join(versions).encode()).hexdigest()
    infos[context.asset_key] = replace(info, data_version=dg.DataVersion(text), storage_id=min(ids))


def _materialization(context: dg.InputContext, source: Source) -> dg.EventLogRecord | None:
    """The one that stored what was read, if it is among the newest: the last one not after the time."""
    partitions = None if source.place.partition is None else [source.place.partition]
    found = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(context.asset_key, asset_partitions=partitions), limit=LOOKED_AT
    )
    for record in found.records:
        event = record.asset_materialization
        as_of = None if event is None else event.metadata.get("as_of")
        if as_of is not None and cast("int", as_of.value) <= source.as_of:
            return record
    return None
