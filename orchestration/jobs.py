"""Dagster jobs: passes over the shards on which something is due, without choosing a partition; and their schedules.

Each job is one op in one process, and so one Spark application for any number of shards. The jobs report to the same
assets as the partitioned runs.

Schedules are for duties that are due by the clock. Each tick asks the location first, and starts no run without work.
Duties that are due by the state of shards are in `sensors`.
"""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from orchestration.config import SweepConfig, options_of
from orchestration.duties import DUTIES, Duty
from orchestration.factories import Tick, job_of, op_of, schedule_of
from orchestration.mount import Mount
from orchestration.partitions import SHARDS, add_missing, shown
from orchestration.plans import is_planned, planning
from orchestration.reports import Event, Recording, listed
from orchestration.resources import Persist
from orchestration.stopping import resume_cancelled
from orchestration.sweep import Pass, look, spark_engine, sweep
from persist_lib.core import duties as core
from persist_lib.core.plan.written import PLANNED
from persist_lib.maintain.pauses import even_if_paused
from persist_lib.maintain.survey import Survey
from persist_lib.sources.kinds import owners_of

OP = "{}_of_shards"
JOBS: Mapping[str, tuple[tuple[Duty, ...], str]] = {
    "maintenance": (DUTIES, "Everything, over all shards."),
    **{duty.name: (duty.job or (duty.name,), duty.does) for duty in core.DUTIES},
}
"""A job for each duty, and one for all duties: the duties it does, and its description."""


LOOK_S = 20.0
"""How long a tick looks at shards that changed, in seconds. The others wait for the next tick, or for the run."""


@dataclass(frozen=True)
class Choice:
    """The shards to visit, the most urgent first, and how many there are in the location."""

    shards: tuple[str, ...]
    there: int
    paused: int = 0
    """How many are not visited, as what is due there is paused."""

    @property
    def idle(self) -> int:
        """How many shards have nothing due."""
        return self.there - len(self.shards) - self.paused

    @property
    def says(self) -> str:
        """How many shards are paused, after what is said of the others; nothing for none."""
        return f"; on {self.paused} of them it is paused" if self.paused else ""


def triggers_of(duties: Sequence[Duty]) -> list[Duty]:
    """The duties for which a shard is visited. That it has changed, and so is to be counted, is no work for others."""
    return [duty for duty in duties if duty != "census"] if 1 < len(duties) < len(DUTIES) else list(duties)


def due(survey: Survey, duties: Sequence[Duty]) -> Choice:
    """The shards on which one of the duties is due."""
    found = dict.fromkeys(shard for duty in triggers_of(duties) for shard in survey.due(duty))
    paused = {shard for duty in triggers_of(duties) for shard in survey.paused(duty)}
    return Choice(tuple(found), len(survey.heads), len(paused.difference(found)))


def told(survey: Survey, shards: Iterable[str]) -> Choice:
    """The shards that a run was told to visit. Raises Failure if one does not exist, before anything is done."""
    names = tuple(dict.fromkeys(shards))
    if unknown := [name for name in names if name not in survey.heads]:
        raise dg.Failure(
            f"there are no shards {listed([repr(name) for name in unknown])}. Nothing was done. The location has "
            f"{len(survey.heads)} shards: {listed(sorted(survey.heads))}. Correct `shards` or the partitions of the run"
        )
    return Choice(names, len(survey.heads))


def sweep_op(mount: Mount, job_name: str, duties: tuple[Duty, ...], description: str) -> dg.OpDefinition:
    """The one op of a job."""

    def of_shards(context: dg.OpExecutionContext, config: SweepConfig) -> Iterator[Event]:
        persist: Persist = getattr(context.resources, mount.persist)
        options, client = options_of(config, persist, is_dry=config.dry_run), persist.client
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
        done = yield from sweep(context, client, choice.shards if now else (), now, options, recording)
        counted = {"unrecorded": len(recording.unrecorded)} if recording.unrecorded else {}
        yield recording.summary(duties[-1], figures(choice, done) | counted)

    tags = {"dagster/compute_kind": "python"}
    return op_of(mount, OP.format(job_name), description, of_shards, spark=True, tags=tags, pool=mount.pool_for(duties))


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
    return mount.named(OP.format(job_name))


def run_config(mount: Mount, name: str, **config: object) -> dg.RunConfig:
    """Run configuration for a job in `JOBS`."""
    return dg.RunConfig(ops={op_name(mount, name): SweepConfig.model_validate(config)})


def sweeps(mount: Mount) -> dict[str, dg.JobDefinition]:
    """All jobs, by their names in `JOBS`."""
    return {name: job_of(mount, name, sweep_op(mount, name, *about)) for name, about in JOBS.items()}


def schedules(
    mount: Mount, jobs: Mapping[str, dg.JobDefinition], status: dg.DefaultScheduleStatus
) -> list[dg.ScheduleDefinition]:
    """One schedule for each duty that is due by the clock. Each run is one process for all shards."""
    return [schedule(mount, jobs[duty.name], duty, status) for duty in core.DUTIES if duty.schedule]


def schedule(
    mount: Mount, job: dg.JobDefinition, duty: core.Duty, status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """The schedule of one duty."""

    def when_due(persist: Persist) -> Tick:
        survey = persist.client.survey(seconds=LOOK_S)
        choice = due(survey, JOBS[duty.name][0])
        if not choice.shards and not survey.waiting:
            return dg.SkipReason(f"nothing is due on any of {choice.there} shards{choice.says}")
        return dg.RunRequest()

    return schedule_of(mount, job, duty.schedule, status, f"{duty.does} Runs only where that is due.", when_due)
