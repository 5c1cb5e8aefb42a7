"""How a partition becomes red when a duty failed on its shard, whichever run it was.

Dagster calls a partition failed if a materialization of it was planned in a run that failed, and none came after that.
It plans only the partitions that it was asked for itself, so a run plans those on which it failed.
"""

from __future__ import annotations

import logging

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData

from orchestration.mount import Mount


def mark_failed(context: dg.OpExecutionContext, mount: Mount, shard: str, duty: str) -> None:
    """Make the partition of a shard red once this run has failed. The next materialization makes it green again."""
    event = dg.DagsterEvent.build_asset_materialization_planned_event(
        context.job_name, str(context.op_handle), AssetMaterializationPlannedData(mount.key(duty), shard)
    )
    context.instance.report_dagster_event(event, context.run_id, logging.INFO)
