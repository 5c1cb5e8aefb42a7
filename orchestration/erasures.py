"""Erasing keys in Dagster: a job that a person launches, which fails while something still has them, and its asset.

The keys come from a file: what is in the configuration of a run stays in Dagster's database.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from orchestration.collection_reports import table
from orchestration.duties import MAY_NOT
from orchestration.factories import op_of
from orchestration.mount import Mount
from orchestration.reports import DRY_RUN, Event, figure
from orchestration.resources import Persist
from persist_lib.cli.input_files import read_file
from persist_lib.errors import PersistError
from persist_lib.runtime.each import why
from persist_lib.schema.schema import Schema

ERASURES, ERASE = "erasures", "erase"
MOST_ROWS = 100


class EraseConfig(dg.Config):
    """What is erased."""

    table: str = Field(description="the name of the table")
    keys: str = Field(description="a .parquet, .csv or .jsonl file of the key columns, where the run is")
    dry_run: bool = Field(default=True, description="change nothing; say what has the keys, and who is in the way")


def erase_op(mount: Mount) -> dg.OpDefinition:
    """Erase the keys of a file from a table. It fails while something still has them."""
    key = mount.key(ERASURES)

    def of_keys(context: dg.OpExecutionContext, config: EraseConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        try:
            on = persist.client.table(config.table)
            keys = read_file(Path(config.keys), Schema(on.schema.key, []))
            is_dry = config.dry_run or not persist.settings.may_delete
            done = on.erase(keys, dry_run=is_dry)
        except PersistError as error:
            raise dg.Failure(why(error), allow_retries=False) from error
        rows = [{"what": one} for one in (*(f"in the way: {name}" for name in done.in_the_way), *done.left)]
        metadata: dict[str, Any] = {
            "table": config.table, "keys": figure(done.keys), "deleted": figure(done.deleted),
            "left": figure(len(done.left)), "objects_gone": figure(sum(len(one.gone) for one in done.shards)),
            "places": table(rows[:MOST_ROWS]),
            "as_of": table([{"shard": one.shard, "version": one.seqno} for one in done.shards]),
        }  # fmt: skip
        if is_dry:
            if not config.dry_run:
                context.log.warning("%d rows would be erased, and nothing was: %s", done.deleted, MAY_NOT)
            yield dg.AssetObservation(key, metadata=metadata, tags={DRY_RUN: "true"})
        elif done.left:
            says = f"table {config.table!r}: the keys are not gone yet, {len(done.left)} places still have some of them"
            who = f", and in the way are {', '.join(done.in_the_way)}" if done.in_the_way else ""
            raise dg.Failure(f"{says}{who}. Erase them again: it continues", metadata, allow_retries=False)
        else:
            yield dg.AssetMaterialization(key, metadata=metadata)

    says = "Take rows of some keys away for ever, as `persist erase` does. A dry run unless you say so."
    return op_of(mount, "erasing_of_keys", says, of_keys)
