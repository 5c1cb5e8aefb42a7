"""The duties as assets: one partition a shard, one materialization a shard and duty.

All of them are one op. So a run over many shards, such as a backfill, is one process and one Spark application with
every executor, and one shard is collected while another is still compacted. One asset can be selected alone.

SUBTLE: nothing is yielded as an output. Dagster would record an output for every partition of the run, also for a shard
that failed. So each materialization is recorded by itself, when it is done.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator

import dagster as dg

from orchestration import backfills
from orchestration.checks import CHECKS, check_specs
from orchestration.choice import told
from orchestration.config import DutyConfig, options_of
from orchestration.duties import DUTIES
from orchestration.mount import Mount
from orchestration.reports import Event, Recording
from orchestration.resources import Persist, traced
from orchestration.settings import IN_FLIGHT
from orchestration.stopping import resume_cancelled
from orchestration.sweep import look, spark_engine, sweep
from persist_lib.core import duties as core
from persist_lib.sources.kinds import owners_of

OWNERS = ["team:storage"]


def specs(mount: Mount) -> list[dg.AssetSpec]:
    """The assets, drawn in the order in which their duties are done."""
    return [
        dg.AssetSpec(
            mount.key(duty.name), deps=[mount.key(one) for one in duty.after], description=duty.does,
            partitions_def=mount.partitions, skippable=True, group_name=mount.group, kinds={"python", *duty.kinds},
            owners=OWNERS, code_version="1",
        )
        for duty in core.DUTIES
    ]  # fmt: skip


def duties_asset(mount: Mount) -> dg.AssetsDefinition:
    """All duties as one asset with several keys."""

    @dg.multi_asset(
        name=mount.named("shard_duties"),
        specs=specs(mount),
        check_specs=check_specs(mount),
        can_subset=True,
        # SUBTLE: runs of such a backfill are tagged with the range of their partitions, not with `dagster/partition`.
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys={mount.persist, mount.spark},
        pool=mount.pool_for(DUTIES),
    )
    @traced
    def shard_duties(context: dg.AssetExecutionContext, config: DutyConfig) -> Iterator[Event]:
        """Do the selected duties for the run's partitions. A run of checks without any asset changes nothing."""
        persist: Persist = getattr(context.resources, mount.persist)
        wanted = {mount.duty_of(key) for key in context.selected_asset_keys}
        checks = {key.name for key in context.selected_asset_check_keys}
        duties = [duty for duty in DUTIES if duty in wanted or any(CHECKS[name][0] == duty for name in checks)]
        is_dry = config.dry_run or not wanted
        options, client = options_of(config, is_dry=is_dry, may_delete=persist.settings.may_delete), persist.client
        choice = told(look(context.log, client), backfills.partitions_of(context))
        if choice.shards and not is_dry:
            resume_cancelled(context.op_execution_context, client, choice.shards)
        if not choice.shards:
            context.log.info("an earlier run of this backfill takes these partitions")
            return
        recording = Recording(
            context.instance, mount, wanted, checks, everything=True, is_dry=config.dry_run, owner=owners_of(client).of
        )
        options = spark_engine(client, getattr(context.resources, mount.spark), options)
        try:
            yield from sweep(
                context.op_execution_context,
                client,
                choice.shards,
                duties,
                options,
                recording,
                config.in_flight or persist.settings.in_flight or IN_FLIGHT,
            )
        finally:
            backfills.remove_waiting(context)

    return shard_duties
