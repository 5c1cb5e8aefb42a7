"""Dagster jobs: sweeps over all shards that exist, without choosing a partition.

Each job is one op in one process, and so one Spark application for any number of shards. The jobs report to the same
assets as the partitioned runs.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator, Mapping

import dagster as dg
from pydantic import Field

from orchestration.assets import DutyConfig, options_of
from orchestration.checks import CHECKS
from orchestration.duties import DUTIES, Duty
from orchestration.partitions import add_missing
from orchestration.reports import Event
from orchestration.resources import Persist, Spark
from orchestration.sweep import sweep
from persist_lib.core import duties as core

JOBS: Mapping[str, tuple[tuple[Duty, ...], str]] = {
    "maintenance": (DUTIES, "Everything, over all shards."),
    **{duty.name: (duty.job or (duty.name,), duty.does) for duty in core.DUTIES},
}
"""A job for each duty, and one for all duties: the duties it does, and its description."""


class SweepConfig(DutyConfig):
    """How the duties are done, and for which shards."""

    shards: list[str] = Field(default=[], description="empty: all")


def sweep_op(job_name: str, duties: tuple[Duty, ...], description: str) -> dg.OpDefinition:
    """The one op of a job."""

    @dg.op(
        name=f"{job_name}_of_shards",
        description=description,
        out={},
        retry_policy=dg.RetryPolicy(max_retries=1, delay=5),
        tags={"dagster/compute_kind": "python"},
    )
    def of_shards(
        context: dg.OpExecutionContext, config: SweepConfig, persist: Persist, spark: Spark
    ) -> Iterator[Event]:
        there = persist.client.shards()
        add_missing(context.instance, there)
        chosen = [shard for shard in there if not config.shards or shard in config.shards]
        options = options_of(config, context.instance, persist, spark, is_dry=config.dry_run)
        yield from sweep(
            context.log, persist.client, chosen, duties, options,
            materialize=() if config.dry_run else duties, checks=CHECKS, in_flight=config.in_flight,
        )  # fmt: skip

    return of_shards


def sweep_job(name: str) -> dg.JobDefinition:
    """A job by its name in `JOBS`. At most one run of each at a time, by its tag in dagster.yaml."""
    duties, description = JOBS[name]
    op = sweep_op(name, duties, description)

    @dg.job(name=name, description=description, executor_def=dg.in_process_executor, tags={"persist/duty": name})
    def job() -> None:
        op()

    return job


def run_config(name: str, **config: object) -> dg.RunConfig:
    """Run configuration for a job in `JOBS`."""
    return dg.RunConfig(ops={f"{name}_of_shards": SweepConfig.model_validate(config)})


SWEEPS: Mapping[str, dg.JobDefinition] = {name: sweep_job(name) for name in JOBS}
