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
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from jobs import program
from orchestration.io import loading
from orchestration.io.names import Place, place_of
from orchestration.io.owners import claim
from orchestration.io.provenance import record_load
from orchestration.io.storing import Stored, store
from orchestration.io.tables import RETURNS, resolve, take
from orchestration.io.times import AS_OF_TIME, Asked, clock_of
from orchestration.resources import Persist
from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.location.wrap.spending import Spending

__all__ = ["PersistIOManager"]


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
            version = versions[0] if len(versions) == 1 else _digest(versions)
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


def _digest(versions: Sequence[str]) -> str:
    """One version for several partitions, as Dagster gives one version to an output."""
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()
