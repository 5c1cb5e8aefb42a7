"""An ingest: plans runs and carries them out, group by group, from wherever the last attempt came to.

outcome = ingest(client, Ingest("orders", ["./folder"], Settings("jsonl"), schema), Local(Stop()))
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from jobs.aside import Call
from jobs.ingesting.committing import Committed, Committer, Shards, producer_name
from jobs.ingesting.engines import Engine
from jobs.ingesting.inputs import find_files
from jobs.ingesting.journal import BAD, JOURNAL, Known, Run, Tally, read_journal, try_begin, unpack_names
from jobs.ingesting.plan import Group
from jobs.ingesting.planning import Changed, new_files, plan_run
from jobs.ingesting.settings import Settings, encode_settings
from jobs.ingesting.work import Done, Work
from jobs.stop import Stop
from persist_lib.arguments import check_type
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.frontier import MINIMUM
from persist_lib.ids import parse_shard_id
from persist_lib.relation.stage import Stage
from persist_lib.schema.schema import Schema

LOOKS = 100
"""How often the journal and the shard are read until they belong together."""


Lost = Literal["refuse", "bad"]


class Ingest(msgspec.Struct, frozen=True):
    """What to ingest, and where to. `name` tells ingests apart that write to one shard from different inputs."""

    shard: str
    inputs: Sequence[str]
    settings: Settings
    schema: Schema
    name: str = "default"
    changed: Changed = "refuse"
    bad: str | None = None
    """The name of the shard of bad lines. None: `<shard>_bad`."""
    lost: Lost = "refuse"
    """What to do when a file of a run that is not done is gone, or has changed: stop, or note it as a bad line."""
    bounds: tuple[int | None, int] | None = None
    """Where rows have times of their own: from which (None: the shard's upper), and before which all of them are."""

    @property
    def shards(self) -> Shards:
        """The three shards."""
        return Shards(self.shard, self.bad or f"{self.shard}_bad", f"{self.shard}_files")

    def check(self) -> None:
        """Raise InvalidUsage for what cannot be."""
        check_type(self.settings, Settings, "settings", 'Settings("jsonl")')
        for name in self.shards:
            parse_shard_id(name)
        if len(set(self.shards)) < len(self.shards):
            raise InvalidUsage(f"the data, the bad lines and the journal are three shards: got {list(self.shards)}")
        parse_shard_id(self.name)
        self.settings.check_schema(self.schema)
        if self.schema.constraints and not (self.settings.format == "debezium" and self.settings.changes == "by-key"):
            raise InvalidUsage(
                f"shard {self.shard} has the constraint {self.schema.constraints[0]}, and rows that are staged in "
                "parallel are not checked against it. "
                "Ingest into a shard without constraints, or changes by key"
            )


class Outcome(NamedTuple):
    """What became of it. `tally` counts the lines of the runs that this call worked on, whichever attempt read them."""

    tally: Tally
    runs: int
    files: int
    groups: int
    updates: int
    seconds: float


Tells = Callable[[str, float, float], object]


def ingest(
    client: Client, job: Ingest, engine: Engine, stop: Stop | None = None, tells: Tells = lambda *_: None
) -> Outcome:
    """Take all files that no run took. May be killed at any point, and called again: then it continues.

    `tells` gets what is done, the groups that are, and the groups that there are.
    """
    job.check()
    stop, began = stop or Stop(), time.monotonic()
    total = Outcome(Tally(), 0, 0, 0, 0, 0.0)
    worked: set[int] = set()
    while True:
        stop.check()
        known, sequence = look(client, job)
        if known.last is not None and known.last.number in worked and sequence >= known.last.last:
            total = total._replace(
                tally=sum(known.tallies.values(), total.tally),
                runs=total.runs + 1,
                files=total.files + len(known.last.files),
            )
            worked.discard(known.last.number)
        if known.last is not None and sequence < known.last.last:
            check_same(job, known.last)
            worked.add(known.last.number)
            committed = carry_out(client, job, known, sequence, engine, stop, tells)
            total = total._replace(
                groups=total.groups + len(committed), updates=total.updates + sum(one.updates for one in committed)
            )
            continue
        files = new_files(find_files(job.inputs, job.settings.format).files, known, job.changed)
        if not files:
            return total._replace(seconds=time.monotonic() - began)
        run = plan_run(files, job.settings, job.schema, known, bounds_of(client, job))
        for name, schema in zip(job.shards, (job.schema, BAD, JOURNAL), strict=True):  # not before the files fit
            client.open_writer(name, schema).close()
        try_begin(client, job.shards.journal, job.name, known, run)


def bounds_of(client: Client, job: Ingest) -> tuple[int, int] | None:
    """The times of the run's rows, where they have their own."""
    if job.bounds is None:
        return None
    version = client.machine(job.shard).try_fetch()
    lower = 0 if version is None else version.state.upper.time
    if lower is None or lower >= job.bounds[1]:
        raise InvalidUsage(
            f"shard {job.shard} is complete up to {lower} already, and --until is {job.bounds[1]}: nothing can be "
            "added before that"
        )
    return lower, job.bounds[1]


def check_same(job: Ingest, run: Run) -> None:
    """Raise InvalidUsage if a run that is not done was begun with other settings."""
    given = encode_settings(job.settings)
    if given != run.info.settings:
        raise InvalidUsage(
            f"run {run.number} of the ingest {job.name!r} into {job.shard} is not done, and was begun with other "
            f"settings: {run.info.settings}; given are "
            f"{given}. Run it with its own settings until it is done, or give this one another --name. Nothing was "
            "written"
        )


def look(client: Client, job: Ingest) -> tuple[Known, int]:
    """The journal, and the last group that the data shard has. Raises InvalidUsage if they contradict each other."""
    for _ in range(LOOKS):
        before = last_sequence(client, job)
        try:
            known = read_journal(client, job.shards.journal, job.name)
        except NotFound:
            known = Known(MINIMUM)
        if last_sequence(client, job) == before:
            break
    if not before <= known.highest <= before + 1:
        raise InvalidUsage(
            f"the journal {job.shards.journal} counts {known.highest} groups of the ingest {job.name!r}, and shard "
            f"{job.shard} has taken {before}. One of them "
            f"was restored, or the producer {producer_name(job.name)!r} was forgotten. Nothing was written; use "
            "another --name, and only inputs that are not in "
            "the shard yet"
        )
    return known, before


def last_sequence(client: Client, job: Ingest) -> int:
    """The number of the last group that the data shard has; 0 for none."""
    version = client.machine(job.shard).try_fetch()
    last = None if version is None else version.state.producers.get(producer_name(job.name))
    return 0 if last is None else last.sequence


def carry_out(
    client: Client, job: Ingest, known: Known, sequence: int, engine: Engine, stop: Stop, tells: Tells
) -> list[Committed]:
    """Do the groups of the last run that are not done. Stops early if another program does them too, and was first."""
    if (run := known.last) is None:
        return []
    groups = [group for group in run.groups() if group.number > sequence]
    committer = Committer(client, job.shards, job.name, run, known.lines.get(sequence, (-1, 0)))
    found: list[Committed] = []
    is_by_key = run.settings.format == "debezium" and run.settings.changes == "by-key"
    lower, upper = run.info.bounds or (None, None)
    stage = None if is_by_key else committer.data.stage(lower=lower, new_upper=upper)
    try:
        for group, done in in_order(groups, partial(_answers, run, stage, engine, job, tells), engine.ahead, stop):
            found.append(committer.commit(group, done))
            tells(f"{job.shard}: committed", group.number - run.first + 1, run.last - run.first + 1)
            if found[-1].was_there:
                break
    finally:
        if stage is not None:
            stage.close()
        committer.close()
    return found


def _answers(
    run: Run, stage: Stage | None, engine: Engine, job: Ingest, tells: Tells, group: Group
) -> list[Done]:  # fmt: skip
    place, groups = group.number - run.first, run.last - run.first + 1
    says = f"{job.shard}: group {place + 1} of {groups}, {group.size:,} bytes"

    def told(done: int, of: int) -> None:
        tells(says, place + done / max(1, of), groups)

    return engine(works_of(run, group, goes_on=job.lost == "bad"), stage, says, told)


def works_of(run: Run, group: Group, *, goes_on: bool) -> list[Work]:
    """The tasks of a group with what they need."""
    names = unpack_names(run.info)
    found = []
    for task in group.tasks:
        places = {chunk.file for chunk in task.chunks}
        files = {place: run.files[place] for place in places}
        some = {place: names[place] for place in places if place in names}
        found.append(Work(task, files, some, run.info.settings, run.info.schema, run.info.bounds, goes_on))
    return found


def in_order(
    groups: Sequence[Group], answers: Callable[[Group], list[Done]], ahead: int, stop: Stop
) -> Iterator[tuple[Group, list[Done]]]:
    """Yield each group with its answers, in order, while the next ones are worked on."""
    waiting = deque(groups)
    running: deque[tuple[Group, Call[list[Done]]]] = deque()

    def fill() -> None:
        while waiting and len(running) < ahead:
            group = waiting.popleft()
            running.append((group, Call(partial(answers, group), "persist-ingest-group")))

    fill()
    while running:
        group, call = running.popleft()
        done = call.result(stop)
        fill()
        yield group, done
