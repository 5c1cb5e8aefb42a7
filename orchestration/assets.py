"""The duties as assets: one partition a shard, one materialization a shard and duty.

All of them are one op. So a run over many shards, such as a backfill, is one process and one Spark application with
every executor, and one shard is collected while another is still compacted. One asset can be selected alone.

SUBTLE: nothing is yielded as an output. Dagster would record an output for every partition of the run, also for a shard
that failed. So each materialization is recorded by itself, when it is done.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from orchestration.checks import CHECKS, check_specs
from orchestration.duties import DUTIES, Options
from orchestration.partitions import shard_partitions
from orchestration.reports import Event
from orchestration.resources import Persist, Spark
from orchestration.sweep import spark_engine, sweep
from persist_lib.core import duties as core

OWNERS = ["team:storage"]


class DutyConfig(dg.Config):
    """How the duties of a run are done."""

    engine: str = Field(
        default="auto",
        description="auto: Spark for requests that read more than `spark_above_bytes`, else local; spark; local",
    )
    dry_run: bool = Field(default=False, description="change nothing; observe what would be done")
    in_flight: int = Field(default=4, description="shards worked on at once")
    verify_reads: int = Field(
        default=3, description="at how many times contents are compared around a compaction; 0 for none"
    )
    verify_below_bytes: int = Field(default=1 << 30, description="larger shards are not read for this comparison")
    scrub_all: bool = Field(
        default=False, description="scrub everything, not only what was written after the last scrub"
    )


def specs() -> list[dg.AssetSpec]:
    """The assets, drawn in the order in which their duties are done."""
    return [
        dg.AssetSpec(
            duty.name, deps=duty.after, description=duty.does, partitions_def=shard_partitions, skippable=True,
            group_name="maintenance", kinds={"python", *duty.kinds}, owners=OWNERS, code_version="1",
        )
        for duty in core.DUTIES
    ]  # fmt: skip


@dg.multi_asset(
    name="shard_duties",
    specs=specs(),
    check_specs=check_specs(),
    can_subset=True,
    # SUBTLE: runs of such a backfill are tagged with the range of their partitions, not with `dagster/partition`.
    backfill_policy=dg.BackfillPolicy.single_run(),
    retry_policy=dg.RetryPolicy(max_retries=1, delay=5),
)
def shard_duties(
    context: dg.AssetExecutionContext, config: DutyConfig, persist: Persist, spark: Spark
) -> Iterator[Event]:
    """Do the selected duties for the run's partitions. A run of checks without any asset changes nothing."""
    wanted = {key.to_user_string() for key in context.selected_asset_keys}
    checks = {key.name for key in context.selected_asset_check_keys}
    duties = [duty for duty in DUTIES if duty in wanted or any(CHECKS[name][0] == duty for name in checks)]
    is_dry = config.dry_run or not wanted
    options = options_of(config, context.instance, persist, spark, is_dry=is_dry)
    yield from sweep(
        context.log, persist.client, context.partition_keys, duties, options,
        materialize=() if is_dry else wanted, checks=checks, in_flight=config.in_flight,
    )  # fmt: skip


def options_of(
    config: DutyConfig, instance: dg.DagsterInstance, persist: Persist, spark: Spark, *, is_dry: bool
) -> Options:
    """Turn a run's configuration into the options of the duties. Raises Failure for an unknown engine."""
    engine = config.engine
    if engine not in ("auto", "spark", "local"):
        raise dg.Failure(f"engine is auto, spark or local, not {engine!r}", allow_retries=False)
    return Options(
        engine=engine,  # type: ignore[arg-type]
        spark=spark_engine(persist.client, spark, engine),
        dry_run=is_dry,
        verify_reads=config.verify_reads,
        verify_below_bytes=config.verify_below_bytes,
        scrub_after=(lambda _shard: 0) if config.scrub_all else lambda shard: last_scrub(instance, shard),
    )


def last_scrub(instance: dg.DagsterInstance, shard: str) -> int:
    """The seqno up to which the last scrub of a shard read, by its materialization; 0 if there is none."""
    filter_ = dg.AssetRecordsFilter(asset_key=dg.AssetKey("scrub"), asset_partitions=[shard])
    for record in instance.fetch_materializations(filter_, limit=1).records:
        if (materialization := record.asset_materialization) is not None:
            value = materialization.metadata["scrubbed_to"].value
            return value if isinstance(value, int) else 0
    return 0
