"""Erasing keys in Dagster: an asset that a person materializes, and whose run fails while something still has them.

The keys come from a file: what is in the configuration of a run stays in Dagster's database.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from orchestration.collection_reports import table
from orchestration.mount import Mount
from orchestration.reports import DRY_RUN, Event, figure
from orchestration.resources import Persist
from persist_lib.cli.input_files import read_file
from persist_lib.errors import PersistError
from persist_lib.runtime.each import why
from persist_lib.schema.schema import Schema

ERASURES = "erasures"
MOST_ROWS = 100


class EraseConfig(dg.Config):
    """What is erased."""

    table: str = Field(description="the name of the table")
    keys: str = Field(description="a .parquet, .csv or .jsonl file of the key columns, where the run is")
    dry_run: bool = Field(default=True, description="change nothing; say what has the keys, and who is in the way")


def erasures_asset(mount: Mount) -> dg.AssetsDefinition:
    """The asset, which is materialized by hand: each time, the keys of a file are erased from a table."""
    key = mount.key(ERASURES)

    @dg.multi_asset(
        name=mount.named(ERASURES),
        specs=[
            dg.AssetSpec(
                key, owners=["team:storage"], group_name=mount.group, kinds={"python"}, skippable=True,
                description="Rows of some keys, taken away for ever: `persist erase`. A dry run unless you say so.",
            )
        ],
        required_resource_keys={mount.persist},
    )  # fmt: skip
    def erasures(context: dg.AssetExecutionContext, config: EraseConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        try:
            on = persist.client.table(config.table)
            keys = read_file(Path(config.keys), Schema(on.schema.key, []))
            done = on.erase(keys, dry_run=config.dry_run)
        except PersistError as error:
            raise dg.Failure(why(error), allow_retries=False) from error
        rows = [{"what": one} for one in (*(f"in the way: {name}" for name in done.in_the_way), *done.left)]
        metadata: dict[str, Any] = {
            "table": config.table, "keys": figure(done.keys), "deleted": figure(done.deleted),
            "left": figure(len(done.left)), "objects_gone": figure(sum(len(one.gone) for one in done.shards)),
            "places": table(rows[:MOST_ROWS]),
            "as_of": table([{"shard": one.shard, "version": one.seqno} for one in done.shards]),
        }  # fmt: skip
        if config.dry_run:
            yield dg.AssetObservation(key, metadata=metadata, tags={DRY_RUN: "true"})
        elif done.left:
            says = f"table {config.table!r}: the keys are not gone yet, {len(done.left)} places still have some of them"
            who = f", and in the way are {', '.join(done.in_the_way)}" if done.in_the_way else ""
            raise dg.Failure(f"{says}{who}. Erase them again: it continues", metadata, allow_retries=False)
        else:
            yield dg.AssetMaterialization(key, metadata=metadata)

    return erasures
