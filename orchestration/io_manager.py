"""`PersistIOManager`: the assets of users, stored in shards and read from them.

    import dagster as dg
    import pyarrow as pa
    from orchestration.io_manager import PersistIOManager
    from orchestration.resources import Persist

    @dg.asset(metadata={"persist/key": ["customer_id"]})
    def customers() -> pa.Table: ...            # the new contents: the differences are appended

    @dg.asset(metadata={"persist/key": ["order_id"]})
    def order_updates() -> pa.Table: ...        # has `_time` and `_diff`: appended as they are

    persist = Persist(location="s3://bucket/prefix", consensus="postgresql://…")
    defs = dg.Definitions(
        assets=[customers, order_updates], resources={"io_manager": PersistIOManager(persist=persist)}
    )

With the metadata `persist/times: "ms"` (or "us") the shard's times are a clock: `_time` may hold timestamps, and new
contents are stored as of now.

Each partition of an asset has a shard of its own (`orchestration.io.names`). A step that is tried again after its
append was committed changes nothing: the same contents have no difference to append, and the same updates are skipped
because the shard already has their times. The manual is docs/io-manager.md.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG, extract_data_version_from_entry
from dagster._core.events import DagsterEvent
from pydantic import Field

from jobs import program
from orchestration.io import loading
from orchestration.io.names import Place, claim, place_of
from orchestration.io.storing import Stored, store
from orchestration.io.tables import RETURNS, resolve, take
from orchestration.io.times import AS_OF_TIME, READ, Asked, clock_of
from orchestration.resources import Persist
from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.location.wrap.spending import Spending

__all__ = ["PersistIOManager"]

LOOKED_AT = 1000
"""How many materializations of an asset or partition are looked at to find the one of an earlier time."""


class PersistIOManager(dg.ConfigurableIOManager):
    """Stores tables of many kinds, and loads them as the type that the consumer's parameter is annotated with."""

    persist: dg.ResourceDependency[Persist]
    times: str = Field(
        default="ms", description="what the times of new tables are: ms, us, or none for integers; unless assets say it"
    )

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Append what is new. The asset's metadata `persist/key` names the key columns; the others are values.

        A step of several partitions returns a dict with the contents of each. None stores nothing.
        """
        if obj is None:
            context.log.warning("the asset returned None: nothing was stored, and its shard is as it was")
            context.add_output_metadata({"stored": "nothing, as the asset returned None"})
            return
        metadata = context.definition_metadata or {}
        places = _places(context, metadata)
        given = {place: take(part) for place, part in _parts(places, obj).items()}
        client = self.persist.client
        versions: list[str] = []
        for place, part in given.items():
            with Spending() as spent:
                claim(client, place)
                schema_of = partial(
                    resolve, part, metadata=metadata, annotation=context.dagster_type.typing_type, clock=self.times
                )
                stored = store(client, place.table, part, schema_of)
            versions.append(stored.version(place.table))
            figures = _figures(place, part.rows, stored) | program.spent(spent.cost)
            if stored.skipped:
                context.log.info("%s: %d updates have times that the shard already had", place, stored.skipped)
            _add_metadata(context, place, figures, alone=len(given) == 1)
        if context.has_asset_key:
            several = hashlib.sha256("\n".join(versions).encode()).hexdigest()  # Dagster gives an output one version
            version = versions[0] if len(versions) == 1 else several
            context.step_context.set_data_version(context.asset_key, dg.DataVersion(version))

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the newest contents, or those as of an earlier time that was asked for (`persist/as_of`).

        Those of several partitions follow one another. Partitions in which nothing is stored are an error that names
        them, unless the input's metadata has `allow_missing_partitions`.
        """
        build = loading.builder(context.dagster_type.typing_type)
        upstream = context.upstream_output
        places = _places(context, {} if upstream is None else upstream.definition_metadata or {})
        is_in_run = context.has_input_name  # and not by `Definitions.load_asset_value`, outside of any run
        tags = context.step_context.dagster_run.tags if is_in_run else {}
        asked = Asked(lambda: context.instance, tags, context.definition_metadata or {})
        client = self.persist.client
        if is_in_run and (context.definition_metadata or {}).get(loading.WINDOW):
            source, found = loading.changes(client, places[0], *_window(context), build)
            record_load(context, [source], [], found)
            return found
        sources, missing = loading.find(client, places, asked.of, clock_of(context, client))
        if missing and not (sources and (context.definition_metadata or {}).get(loading.MISSING)):
            raise loading.absent(missing, client)
        found = loading.read(client, sources, build)
        if is_in_run:
            record_load(context, sources, missing, found)
        return found


def _window(context: dg.InputContext) -> tuple[float, float]:
    """The seconds since 1970 at which the window of the run's partitions begins and ends."""
    if not context.step_context.has_partition_key and not context.step_context.has_partition_key_range:
        raise InvalidUsage(f"{loading.WINDOW} is for an asset with partitions of time, and this one has none")
    window = context.step_context.partition_time_window
    return window.start.timestamp(), window.end.timestamp()


def _places(context: dg.OutputContext | dg.InputContext, metadata: Mapping[str, Any]) -> list[Place]:
    """The asset, or those of its partitions that this run or this input is about."""
    if not context.has_asset_key:
        raise InvalidUsage(
            f"a shard is an asset's, and {context.name!r} of op {context.op_def.name} is none. Make it an asset, or "
            "write and read with the resource: persist.client"
        )
    path = context.asset_key.path
    keys: Sequence[str | None] = context.asset_partition_keys if context.has_asset_partitions else [None]
    if not keys:
        raise InvalidUsage(f"asset {'/'.join(path)} has no partitions here, so there is nothing to load or to store")
    return [place_of(path, key, metadata) for key in keys]


def _parts(places: Sequence[Place], obj: Any) -> Mapping[Place, Any]:
    """What was returned for each partition."""
    if not isinstance(obj, Mapping):
        if len(places) == 1:
            return {places[0]: obj}
        raise InvalidUsage(
            f"this run is about {len(places)} partitions of asset {'/'.join(places[0].asset)}: return a dict of each "
            f"partition's key and {RETURNS}; got {type(obj).__qualname__}"
        )
    by_key = {place.partition: place for place in places}
    if None in by_key or obj.keys() != by_key.keys():
        wanted = f"the partitions {shown(list(by_key))}" if None not in by_key else "no partitions"
        raise InvalidUsage(
            f"asset {'/'.join(places[0].asset)} returned a dict with the keys {shown(list(obj))}, and this run is "
            f"about {wanted}. A dict has one entry for each partition of the run; otherwise return {RETURNS}"
        )
    return {by_key[key]: part for key, part in obj.items()}


def _figures(place: Place, rows: int, stored: Stored) -> dict[str, Any]:
    figures: dict[str, Any] = {"table": place.table, "rows": rows, "updates": stored.updates}
    if stored.seqno is not None:
        figures["seqno"] = stored.seqno
    if stored.as_of >= 0:
        show = stored.schema.show
        figures |= {"as_of": stored.as_of, "upper": show(stored.as_of + 1)}
        if stored.schema.times is not None:
            figures[AS_OF_TIME] = show(stored.as_of)
    if stored.skipped:
        figures["skipped"] = stored.skipped
    return figures | {"attempts": stored.attempts}


def _add_metadata(context: dg.OutputContext, place: Place, figures: dict[str, Any], *, alone: bool) -> None:
    if alone or place.partition is None:
        context.add_output_metadata(figures)
    else:
        context.step_context.add_asset_metadata(figures, context.asset_key, place.partition)


def record_load(
    context: dg.InputContext, sources: Sequence[loading.Source], missing: Sequence[Place], found: Any
) -> None:
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
        metadata |= {"missing": len(names), "missing_partitions": names[: loading.NAMED]}
        context.log.warning("%d partitions have nothing stored: %s", len(names), names[: loading.NAMED])
    _observe(context, sources, metadata)
    if any(source.is_earlier for source in sources):
        _own_up(context, sources)


def _observe(context: dg.InputContext, sources: Sequence[loading.Source], metadata: dict[str, Any]) -> None:
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


def _own_up(context: dg.InputContext, sources: Sequence[loading.Source]) -> None:
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


def _materialization(context: dg.InputContext, source: loading.Source) -> dg.EventLogRecord | None:
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
