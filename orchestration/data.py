"""Tables and sources as assets of their own, in a group of their own, so that Dagster shows data and not only duties.

    import dagster as dg
    import pyarrow as pa
    from orchestration.definitions import build_definitions
    from orchestration.settings import Data, Settings

    @dg.asset(ins={"orders": dg.AssetIn(key="orders", input_manager_key="persist_io")})
    def report(orders: pa.Table) -> None: ...            # downstream of the table, and reads it

    data = Data(
        tables=["orders", "people", "events_*"],        # one asset each; of a pattern one, with a partition a table
        sources=["orders"],                             # each upstream of the table of its name
    )
    defs = dg.Definitions.merge(dg.Definitions(assets=[report]), build_definitions(Settings(data=data)))

Without `build_definitions` in the same code location, `orchestration.tables` has specs and a sensor.

What is declared is what Dagster loads: that opens nothing. The job `fleet` reports each hour what moved, and what is
wrong, by one survey for all of them; `tables.table_sensor` reports single tables within a minute.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import dagster as dg
from dagster._core.events import DagsterEventType

from orchestration.mount import NAME, Mount
from orchestration.partitions import TABLES, defined, keep
from orchestration.reports import DATA_VERSION, Event, figure, judged
from orchestration.resources import Persist
from orchestration.settings import Data
from orchestration.tables import key_of, table_spec
from persist_lib import report
from persist_lib.core.pauses import WILD
from persist_lib.core.units import of
from persist_lib.errors import InvalidUsage
from persist_lib.report import Fleet, Row
from persist_lib.times import Times

SOURCE, CHECK = "source", "kept_well"
NAMED = 3
"""How many tables a verdict names."""


class Asset(NamedTuple):
    """An asset of data: its key, and the table, pattern or source that it shows. `partitions` is empty for none."""

    key: dg.AssetKey
    name: str
    partitions: str = ""
    is_source: bool = False


def data_assets(mount: Mount, data: Data) -> list[Asset]:
    """What is declared. Raises InvalidUsage for what cannot be a key, or would be one twice."""
    found = [_asset(mount, data, name) for name in data.tables]
    found += [Asset(_key(mount, data, SOURCE, name), name, is_source=True) for name in data.sources]
    by_key: dict[dg.AssetKey, Asset] = {}
    for one in found:
        if (other := by_key.setdefault(one.key, one)) is not one:
            raise InvalidUsage(f"data: {other.name!r} and {one.name!r} would be the same asset, {_shown(one.key)}")
    if not NAME.fullmatch(data.group):
        raise InvalidUsage(f"data: group must be letters, digits and '_': got {data.group!r}")
    return found


def _asset(mount: Mount, data: Data, name: str) -> Asset:
    if not name or not WILD.intersection(name):
        return Asset(_key(mount, data, *key_of(name).path), name)
    word = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    return Asset(_key(mount, data, word or "tables"), name, f"{TABLES}_{word}" if word else TABLES)


def _key(mount: Mount, data: Data, *path: str) -> dg.AssetKey:
    if not all(path) or any(set(part) & set("/[]") for part in path):
        raise InvalidUsage(f"data: no asset can be called {'/'.join(path)!r}; name tables and sources")
    return dg.AssetKey([*mount.key_prefix, *data.key_prefix, *path])


def _shown(key: dg.AssetKey) -> str:
    return key.to_user_string()


def data_specs(mount: Mount, data: Data, taken: Collection[dg.AssetKey]) -> list[dg.AssetSpec]:
    """The assets, with lineage from sources to tables. None of them is materialized by Dagster.

    Raises InvalidUsage for a key that is `taken`, as by a duty.
    """
    declared = data_assets(mount, data)
    for one in declared:
        if one.key in taken:
            raise InvalidUsage(
                f"data: {one.name!r} would be the asset {_shown(one.key)}, which there is: give key_prefix"
            )
    return [_spec(mount, data, one, declared) for one in declared]


def _fits(one: Asset, table: str) -> bool:
    return not one.is_source and fnmatchcase(table, one.name)


def _spec(mount: Mount, data: Data, one: Asset, declared: Sequence[Asset]) -> dg.AssetSpec:
    """One asset. A table can be read through the IO manager, by those that are downstream of it."""
    if one.is_source:
        return dg.AssetSpec(
            one.key, group_name=mount.named(data.group), kinds={"source"}, owners=["team:storage"],
            description=f"The source `{one.name}`: `persist source show {one.name}`.",
        )  # fmt: skip
    deps = [source.key for source in declared if source.is_source and asset_of(declared, source.name) == one]
    if one.partitions:
        return dg.AssetSpec(
            one.key, group_name=mount.named(data.group), kinds={"table"}, owners=["team:storage"], deps=deps,
            partitions_def=defined(mount, one.partitions),
            description=f"The tables `{one.name}`, a partition each.",
        )  # fmt: skip
    return table_spec(
        one.name, io_manager=mount.io, key=one.key, group_name=mount.named(data.group), kinds={"table"},
        owners=["team:storage"], deps=deps, description=f"The table `{one.name}`: `persist describe {one.name}`.",
    )  # fmt: skip


def asset_of(declared: Sequence[Asset], table: str) -> Asset | None:
    """The asset of a table: the first that fits."""
    return next((one for one in declared if _fits(one, table)), None)


def tables_of(found: Fleet) -> dict[str, list[Row]]:
    """The shards of each table, of whatever carries it."""
    tables: dict[str, list[Row]] = {}
    for row in found.rows:
        if row.kind in {"table", "collection"}:
            tables.setdefault(row.table, []).append(row)
    return tables


def keep_tables(instance: dg.DagsterInstance, mount: Mount, data: Data, found: Fleet) -> None:
    """Make the tables of each pattern its partitions, and no others."""
    declared = data_assets(mount, data)
    for one in declared:
        if one.partitions:
            names = [table for table in tables_of(found) if asset_of(declared, table) == one]
            keep(instance, mount, one.partitions, names)


def data_checks(mount: Mount, data: Data) -> list[dg.AssetChecksDefinition]:
    """A check of each asset: nothing that is known is wrong with its shards. It looks at all of them at once."""
    declared = data_assets(mount, data)
    if not declared:
        return []
    says = "No damage is known, no duty is overdue, and all of it could be read."

    @dg.multi_asset_check(
        name=mount.named("data_kept_well"), specs=[dg.AssetCheckSpec(CHECK, asset=one.key, description=says)
                                                  for one in declared],
        required_resource_keys={mount.persist}, can_subset=True,
    )  # fmt: skip
    def kept_well(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        persist: Persist = getattr(context.resources, mount.persist)
        found = report.fleet(persist.client)
        for one in declared:
            if dg.AssetCheckKey(one.key, CHECK) in context.selected_asset_check_keys:
                yield verdict(declared, one, found)

    return [kept_well]


def verdict(declared: Sequence[Asset], one: Asset, found: Fleet) -> dg.AssetCheckResult:
    """What is wrong with the shards of an asset: an error where data is damaged or cannot be read, else a warning."""
    rows = rows_of(declared, one, found)
    wrong = [f"{row.owner or row.shard}: {says}" for row in rows if (says := _wrong(row))]
    if not rows and not one.partitions:
        wrong.append(f"there is no {'source' if one.is_source else 'table'} {one.name!r}")
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    is_damaged = any(row.damaged or row.unread for row in rows)
    return dg.AssetCheckResult(
        asset_key=one.key, check_name=CHECK, passed=not wrong, metadata={"shards": figure(len(rows))},
        severity=dg.AssetCheckSeverity.ERROR if is_damaged else dg.AssetCheckSeverity.WARN,
        description="; ".join(wrong[:NAMED]) + more or f"nothing is wrong with {of(len(rows), 'shard')}",
    )  # fmt: skip


def rows_of(declared: Sequence[Asset], one: Asset, found: Fleet) -> list[Row]:
    """The shards of an asset."""
    if one.is_source:
        return [row for row in found.rows if row.kind == "source" and row.table == one.name]
    return [row for table, rows in tables_of(found).items() if asset_of(declared, table) == one for row in rows]


def _wrong(row: Row) -> str:
    if row.damaged:
        return f"{of(row.damaged, 'damaged batch')}: {row.damage}"
    return row.unread or "; ".join(f"{duty} is overdue: {says}" for duty, says in row.overdue.items())


def data_events(instance: dg.DagsterInstance, mount: Mount, data: Data, found: Fleet) -> Iterator[Event]:
    """What moved since it was last recorded, a materialization each; and a verdict on each asset."""
    declared, tables = data_assets(mount, data), tables_of(found)
    for one in declared:
        known = _recorded(instance, one)
        for name, rows in tables.items() if not one.is_source else [(one.name, rows_of(declared, one, found))]:
            if not rows or (not one.is_source and asset_of(declared, name) != one):
                continue
            place, version = name if one.partitions else None, version_of(rows)
            if known.get(place) != version:
                yield dg.AssetMaterialization(
                    one.key, partition=place, metadata=_metadata(rows), tags={DATA_VERSION: version}
                )
        said = verdict(declared, one, found)
        yield dg.AssetCheckEvaluation(
            asset_key=one.key, check_name=CHECK, passed=said.passed, severity=said.severity, metadata=said.metadata,
            description=said.description, target_materialization_data=judged(instance, one.key),
        )  # fmt: skip


def _recorded(instance: dg.DagsterInstance, one: Asset) -> dict[str | None, str]:
    """The version that was recorded last of each partition, or of the asset."""
    if one.partitions:
        tags = instance.event_log_storage.get_latest_tags_by_partition(
            one.key, DagsterEventType.ASSET_MATERIALIZATION, [DATA_VERSION]
        )
        return {partition: tag[DATA_VERSION] for partition, tag in tags.items() if DATA_VERSION in tag}
    last = instance.get_latest_materialization_event(one.key)
    made = last.asset_materialization if last is not None else None
    return {None: made.tags[DATA_VERSION]} if made is not None and made.tags and DATA_VERSION in made.tags else {}


def version_of(rows: Sequence[Row]) -> str:
    """What changes with the data of these shards and with their since, and with nothing else."""
    text = "\n".join(f"{row.shard} {row.mark}" for row in sorted(rows, key=lambda row: row.shard))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _metadata(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures, which draw timelines. Of a table that one shard carries also how far it has come."""
    found = {name: figure(sum(getattr(row, name) for row in rows))
             for name in ("updates", "stored", "dollars_month")}  # fmt: skip
    found["shards"] = figure(len(rows))
    if len(rows) == 1:
        row = rows[0]
        show = Times(row.times, lambda: 0).show
        found["upper"] = figure("closed" if row.upper is None else show(row.upper) if row.times else row.upper)
    return found
