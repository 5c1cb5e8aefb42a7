"""Dagster jobs: passes over the shards on which something is due, without choosing a partition.

Each job is one op in one process, and so one Spark application for any number of shards. The jobs report to the same
assets as the partitioned runs.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterator, Mapping

import dagster as dg

from orchestration.choice import Choice, due, told
from orchestration.config import SweepConfig, options_of
from orchestration.duties import DUTIES, Duty
from orchestration.mount import Mount
from orchestration.partitions import SHARDS, add_missing, shown
from orchestration.plans import is_planned, planning
from orchestration.reports import Event, Recording
from orchestration.resources import Persist, traced
from orchestration.settings import IN_FLIGHT
from orchestration.stopping import resume_cancelled
from orchestration.sweep import Pass, look, spark_engine, sweep
from persist_lib.core import duties as core
from persist_lib.core.plan.written import PLANNED
from persist_lib.maintain.pauses import even_if_paused
from persist_lib.maintain.survey import Survey
from persist_lib.sources.kinds import owners_of

JOBS: Mapping[str, tuple[tuple[Duty, ...], str]] = {
    "maintenance": (DUTIES, "Everything, over all shards."),
    **{duty.name: (duty.job or (duty.name,), duty.does) for duty in core.DUTIES},
}
"""A job for each duty, and one for all duties: the duties it does, and its description."""

RETRIES = {"dagster/max_retries": "2", "dagster/retry_on_asset_or_op_failure": "false"}
"""Tags of every run of a job: one whose process was killed starts again. One that failed has tried again what may pass.

Runs of assets cannot have tags of their own: for them, dagster.yaml says the same.
"""


def sweep_op(mount: Mount, job_name: str, duties: tuple[Duty, ...], description: str) -> dg.OpDefinition:
    """The one op of a job."""

    @dg.op(
        name=op_name(mount, job_name),
        description=description,
        out={},
        required_resource_keys={mount.persist, mount.spark},
        tags={"dagster/compute_kind": "python"},
        pool=mount.pool_for(duties),
    )
    @traced
    def of_shards(context: dg.OpExecutionContext, config: SweepConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        options, client = (
            options_of(config, is_dry=config.dry_run, may_delete=persist.settings.may_delete),
            persist.client,
        )
        is_plan = is_planned(persist, config)
        if not (config.dry_run or is_plan):
            resume_cancelled(context, client, config.shards)
        with even_if_paused(config.even_if_paused):
            survey = look(context.log, client)
        choice = chosen(survey, config, duties)
        context.log.info(
            "%d of %d shards have something due%s%s", len(choice.shards), choice.there, choice.says,
            f"; {survey.waiting} were not looked at" if survey.waiting else "",
        )  # fmt: skip
        owners = owners_of(client)
        add_missing(context.instance, mount, SHARDS, set(choice.shards).intersection(shown(survey, owners)))
        recording = Recording(
            context.instance, mount, duties, everything=config.everything, is_dry=config.dry_run, owner=owners.of
        )
        options = spark_engine(client, getattr(context.resources, mount.spark), options)
        now = [duty for duty in duties if not is_plan or duty not in PLANNED]
        if is_plan:
            yield from planning(context, mount, client, choice.shards, duties)
        done = yield from sweep(
            context,
            client,
            choice.shards if now else (),
            now,
            options,
            recording,
            config.in_flight or persist.settings.in_flight or IN_FLIGHT,
        )
        counted = {"unrecorded": len(recording.unrecorded)} if recording.unrecorded else {}
        yield recording.summary(duties[-1], figures(choice, done) | counted)

    return of_shards


def chosen(survey: Survey, config: SweepConfig, duties: tuple[Duty, ...]) -> Choice:
    """The shards that a run visits. To scrub everything again is due on each of them."""
    if config.shards:
        return told(survey, config.shards)
    is_all = config.everything or (config.scrub_all and "scrub" in duties)
    return told(survey, sorted(survey.heads)) if is_all else due(survey, duties)


def figures(choice: Choice, done: Pass) -> dict[str, float]:
    """A pass in figures."""
    return {
        "shards": choice.there, "visited": len(choice.shards), "idle": choice.idle, "failed": len(done.problems),
        "left": len(done.left), "paused": choice.paused, "seconds": round(done.seconds, 3),
    }  # fmt: skip


def op_name(mount: Mount, job_name: str) -> str:
    """The name of a job's op."""
    return mount.named(f"{job_name}_of_shards")


def sweep_job(mount: Mount, name: str) -> dg.JobDefinition:
    """A job by its name in `JOBS`. At most two runs of each at a time, by its tag in dagster.yaml."""
    duties, description = JOBS[name]
    op = sweep_op(mount, name, duties, description)

    @dg.job(
        name=mount.named(name),
        description=description,
        executor_def=dg.in_process_executor,
        tags={"persist/duty": mount.named(name), **RETRIES},
    )
    def job() -> None:
        op()

    return job


def run_config(mount: Mount, name: str, **config: object) -> dg.RunConfig:
    """Run configuration for a job in `JOBS`."""
    return dg.RunConfig(ops={op_name(mount, name): SweepConfig.model_validate(config)})


def sweeps(mount: Mount) -> dict[str, dg.JobDefinition]:
    """All jobs, by their names in `JOBS`."""
    return {name: sweep_job(mount, name) for name in JOBS}
