"""`PersistIOManager`: the assets of users, stored in shards and read from them.

    @dg.asset(io_manager_key="persist_io", metadata={"persist/key": ["customer_id"]})
    def customers() -> pa.Table: ...            # the new contents: the differences are appended

    @dg.asset(io_manager_key="persist_io", metadata={"persist/key": ["order_id"]})
    def order_updates() -> pa.Table: ...        # has `_time` and `_diff`: appended as they are

An asset's shard is named after its key, joined by `.`, and each of its partitions has a shard of its own. A step that
is tried again after its append was committed changes nothing: the same contents have no difference to append, and the
same updates are skipped because the shard already has their times.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from typing import Any

import dagster as dg
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from jobs import program
from orchestration.resources import Persist
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.consolidate import consolidate
from persist_lib.location.wrap.spending import Spending
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.write.handle import Appended, WriteHandle

KEY = "persist/key"


class PersistIOManager(dg.ConfigurableIOManager):
    """Stores Arrow tables, pandas frames and lists of dicts. Loads the consumer's annotated type, else Arrow."""

    persist: dg.ResourceDependency[Persist]

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Append what is new. The asset's metadata `persist/key` names the key columns; the others are values."""
        if obj is None:
            return
        table = as_table(obj)
        (shard,), schema = shards_of(context), schema_of(table, (context.definition_metadata or {}).get(KEY))
        client = self.persist.client
        with Spending() as spent, client.open_writer(shard, schema) as write:
            token = f"{context.run_id}:{context.step_key}"
            appended = (
                append_updates(write, table) if TIME in table.schema.names else self._replace(write, table, schema)
            )
        figures: dict[str, Any] = {"rows": table.num_rows, "shard": shard, "token": token, **program.spent(spent.cost)}
        if appended is not None:
            figures |= {"updates": appended.count, "seqno": appended.seqno, "upper": str(appended.upper)}
        context.add_output_metadata(figures)

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the newest contents. Those of several partitions are concatenated."""
        tables = []
        for shard in shards_of(context):
            with self.persist.client.open_reader(shard) as read:
                tables.append(repeated(read.snapshot().to_arrow()))
        table = pa.concat_tables(tables)
        wanted = context.dagster_type.typing_type
        if wanted is pd.DataFrame:
            return table.to_pandas()
        return table.to_pylist() if wanted in (list, list[dict[str, Any]]) else table

    def _replace(self, write: WriteHandle, table: pa.Table, schema: Schema) -> Appended | None:
        """Append the difference between the shard and `table`, at the next time; nothing if they are equal."""
        upper = write.fetch_upper().time
        if upper is None:
            raise InvalidUsage(f"shard {write.shard} is closed for writing")
        old = schema.contents.empty_table()
        if upper > 0:
            with self.persist.client.open_reader(write.shard, schema) as read:
                old = read.snapshot(upper - 1).to_arrow()
        updates = difference(schema, old, table, upper)
        return write.compare_and_append(updates, upper, upper + 1) if updates.num_rows or upper == 0 else None


def difference(schema: Schema, old: pa.Table, new: pa.Table, time: int) -> pa.Table:
    """The updates at `time` that turn the contents `old` into the rows of `new`."""
    fields = schema.data
    added = new.select(fields.names).cast(fields)
    rows = pa.concat_tables([added, old.select(fields.names).cast(fields)])
    minus = pc.negate(old[DIFF].combine_chunks())
    diffs = pa.concat_arrays([pa.array([1] * added.num_rows, pa.int64()), minus])
    times = pa.array([time] * rows.num_rows, pa.uint64())
    return consolidate(schema, pa.table([*rows.columns, times, diffs], schema=schema.updates))


def append_updates(write: WriteHandle, updates: pa.Table) -> Appended | None:
    """Append updates with their own times. Times that the shard already has are skipped."""
    if not updates.num_rows:
        return None
    times = pc.min_max(updates[TIME])
    upper = write.fetch_upper().time
    lower = min(times["min"].as_py(), times["min"].as_py() if upper is None else upper)
    return write.append(updates, lower, times["max"].as_py() + 1)


def repeated(contents: pa.Table) -> pa.Table:
    """The rows of a collection, each repeated by its multiplicity."""
    diffs = contents[DIFF].to_numpy()
    data = contents.drop_columns([DIFF])
    return data if (diffs == 1).all() else data.take(np.repeat(np.arange(len(diffs)), diffs.clip(0)))


def as_table(obj: object) -> pa.Table:
    """What an asset returned, as an Arrow table."""
    if isinstance(obj, pa.Table):
        return obj
    if isinstance(obj, pd.DataFrame):
        return pa.Table.from_pandas(obj, preserve_index=False)
    if isinstance(obj, list):
        return pa.Table.from_pylist(obj)
    raise InvalidUsage(
        f"a shard holds tables: return an Arrow table, a pandas frame or a list of dicts, not {type(obj)}"
    )


def schema_of(table: pa.Table, key: object) -> Schema:
    """The shard's schema: the columns in `key` are the key, the others the value. Without `key`, all are the key."""
    names = [name for name in table.schema.names if name not in (TIME, DIFF)]
    keys = [str(name) for name in key] if isinstance(key, (list, tuple)) else names
    fields = {name: table.schema.field(name).type for name in names}
    return Schema({name: fields[name] for name in keys}, {name: fields[name] for name in names if name not in keys})


def shards_of(context: dg.OutputContext | dg.InputContext) -> list[str]:
    """The shard of an asset, or those of its partitions in this run."""
    name = ".".join(context.asset_key.path)
    return [f"{name}.{key}" for key in context.asset_partition_keys] if context.has_asset_partitions else [name]
