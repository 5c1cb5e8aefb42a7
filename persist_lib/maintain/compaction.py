"""Carrying out compaction: plan, split by key range, merge each range, commit one transition per request.

An engine turns tasks into results and knows nothing else: `local_engine` runs them in this process, Spark runs them on
its executors (see `jobs.compact`). If the process is killed at any point, the shard is correct: each request is
committed or the shard still has its inputs. Outputs that were not linked are orphans.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.formats import PART_SUMS, as_stored_in
from persist_lib.core.plan.clusters import By, Clusters, cuts_of, ends
from persist_lib.core.plan.compaction import Plan, Policy, Skipped, plan_compaction, policy_of
from persist_lib.core.plan.requests import MergeTask, Request, TaskResult, output_batch, task_inputs
from persist_lib.core.state import State
from persist_lib.errors import Damage, Missing
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, WriterId
from persist_lib.location.wrap.deadline import Stopped, check_not_stopped
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.merge_tasks import Engine, is_published_by, local_engine, merge_tasks
from persist_lib.maintain.unchanged import kept_by, kept_clusters
from persist_lib.maintain.worker import Progress, Uploader, Worker
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.runs import Stored
from persist_lib.shard.stretches import sample
from persist_lib.telemetry import duty

log = logging.getLogger("persist.compaction")

MOST_ROUNDS = 16
"""A round merges what one merge can read at once. So many rounds are only needed while others append all the time."""


class Applied(msgspec.Struct, frozen=True):
    """One request that was carried out: the seqno of its commit, and what went in and came out.

    `seqno` is None if another compactor replaced the inputs first.
    """

    ids: tuple[tuple[int, int], ...]
    reason: str
    seqno: SeqNo | None
    tasks: int
    updates_in: int
    updates_out: int
    bytes_in: int
    bytes_out: int
    parts_out: int
    attempts: int
    seconds: float
    cost: Cost = Cost()


class Compacted(msgspec.Struct, frozen=True):
    """What a compaction did, or with `dry_run` would do (then `applied` is empty)."""

    plan: Plan
    applied: tuple[Applied, ...]
    batches_before: int
    batches_after: int
    since: Antichain
    cost: Cost = Cost()
    """What the compaction cost, Spark's tasks included; `plan.cost` is the estimate."""

    @property
    def bytes_in(self) -> int:
        return sum(applied.bytes_in for applied in self.applied)

    @property
    def bytes_out(self) -> int:
        return sum(applied.bytes_out for applied in self.applied)


@duty("compaction")
@charged
def compact(
    machine: Machine,
    worker: Worker,
    *,
    policy: Policy | None = None,
    engine: Engine | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    plan: Plan | None = None,
) -> Compacted:
    """Carry out the shard's compaction plan, one transition per request; or exactly `plan`, and then nothing more.

    A request whose inputs another compactor replaced first is skipped. A request whose inputs are damaged is not
    carried out; the others are, and then the first Damage is raised. Calling it again carries out what is left to do.
    With `dry_run` nothing changes and only the plan is returned. `progress` gets the updates merged and their total.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "compaction")
    policy = policy_of(machine.config, policy)
    state, is_given = (machine.fetch() if plan is None else machine.version).state, plan is not None
    plan = plan_compaction(state, policy) if plan is None else plan
    before = len(state.filled)
    if dry_run:
        return Compacted(plan, (), before, before, state.since)
    begun = plan = _allotted(machine, plan, is_whole=is_given)
    applied, damaged = list[Applied](), list[Damage]()
    told = _Told(progress)
    is_partial = False
    try:
        for _ in range(MOST_ROUNDS):
            told.begin(plan.debt)
            for one in _carried_out(machine, worker, plan.requests, engine or local_engine(machine), told):
                if isinstance(one, Damage):
                    damaged.append(one)  # the other requests concern other batches
                else:
                    applied.append(one)
            was_partial, is_partial = is_partial, any(request.is_partial for request in plan.requests)
            if is_given or damaged or not (is_partial or was_partial):
                break  # after the last of several rounds it looks once more, as contents may be due then
            plan = _allotted(machine, plan_compaction(machine.fetch().state, policy), has_begun=True)
            begun = Plan((*begun.requests, *plan.requests), plan.skipped)
    except (KeyboardInterrupt, Stopped) as stopped:
        kept = sum(one.updates_in for one in applied)
        of = f"{len(applied)} of {len(begun.requests)} requests"
        stopped.add_note(
            f"shard {machine.shard}: {of} were committed, {kept:,} updates, and are kept. The rest is as it was "
            "before; compact again to continue"
        )
        raise
    if damaged:
        raise damaged[0]
    return Compacted(begun, tuple(applied), before, len(machine.state.filled), state.since)


def _allotted(machine: Machine, plan: Plan, *, is_whole: bool = False, has_begun: bool = False) -> Plan:
    """What of a plan may begin by the budgets of rules, or all of it (`is_whole`); the rest is left alone.

    Raises Paused where nothing may begin, unless something has begun before.
    """
    costs = [plan.cost] if is_whole and plan.requests else [request.cost for request in plan.requests]
    granted = machine.allot(machine.shard, costs)
    if granted == len(costs):
        return plan
    if not (granted or has_begun):
        machine.may_begin(machine.shard, "compaction")
    left = [Skipped(one.ids, "the budget of the day is spent") for one in plan.requests[granted:]]
    return Plan(plan.requests[:granted], (*plan.skipped, *left))


class _Told:
    """Calls `progress` as tasks are done: each counts for its share of the request's updates."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress or (lambda _done, _total: None)
        self._done = self._total = 0

    def begin(self, updates: int) -> None:
        self._total += updates

    def during(self, request: Request, tasks: Sequence[MergeTask], results: Iterable[TaskResult]) -> list[TaskResult]:
        """Wait for the results of a request."""
        found: list[TaskResult] = []
        for result in results:
            found.append(result)
            self._progress(self._done + request.count * len(found) // max(1, len(tasks)), self._total)
        return found

    def end(self, request: Request) -> None:
        self._done += request.count
        self._progress(self._done, self._total)


def _carried_out(
    machine: Machine, worker: Uploader, requests: Sequence[Request], engine: Engine, told: _Told
) -> Iterator[Applied | Damage]:
    """Carry out the requests of a plan. Yields what became of each as soon as it is committed.

    Small ones, of which there are many where a shard was left alone, are given to the engine together, so that they run
    side by side. Each is committed on its own.
    """
    folds = [request for request in requests if request.reason == "fold"]
    left = list(requests)
    if len(folds) > 1:
        with suppress(Damage, Missing):  # one by one, it shows which request has it
            merges = [merge_tasks(machine, worker.id, request, engine) for request in folds]
            results = iter(engine([task for tasks in merges for task in tasks]))
            for request, tasks in zip(folds, merges, strict=True):
                done = _finish(machine, worker, request, tasks, islice(results, len(tasks)), told)
                left.remove(request)
                told.end(request)
                yield done
    for request in left:
        try:
            one: Applied | Damage = carry_out(machine, worker, request, engine, told)
        except Damage as damage:
            one = damage
        told.end(request)
        yield one


@charged
def carry_out(
    machine: Machine, worker: Uploader, request: Request, engine: Engine, told: _Told | None = None
) -> Applied:
    """Merge one request and commit it. Raises Missing if an input is gone although the state still refers to it.

    Raises Stopped (a Determinate) if the caller stops the work before the commit begins.
    """
    check_not_stopped()
    uploader, tasks = worker.id, list[MergeTask]()  # registered first: a worker may be refused
    request = _keeping(machine, request)

    def run() -> Iterator[TaskResult]:
        tasks.extend(merge_tasks(machine, uploader, request, engine))
        yield from engine(tasks)

    return _finish(machine, worker, request, tasks, run(), told or _Told(None))


@charged
def _finish(
    machine: Machine,
    worker: Uploader,
    request: Request,
    tasks: Sequence[MergeTask],
    running: Iterable[TaskResult],
    told: _Told,
) -> Applied:
    """Wait for the results of a request's tasks, and commit them. `tasks` may be filled while they run."""
    check_not_stopped()
    started = machine.runtime.monotonic()
    try:
        results = told.during(request, tasks, running)
    except Missing:
        if still_there(machine.fetch().state, request):
            raise
        results = None  # another compactor replaced the inputs first, and they were collected
    check_not_stopped()
    merges = [0] if request.kept else [index for index, task in enumerate(tasks) if task.key_lower is None]
    seqno, attempts = (None, 0) if results is None else commit(machine, worker.id, request, results, merges)
    parts = [part for result in results or [] for part in result.parts]
    return Applied(
        request.ids, request.reason, seqno, len(tasks), request.count, sum(part.rows for part in parts),
        request.size, sum(part.size for part in parts), len(parts), attempts, machine.runtime.monotonic() - started,
    )  # fmt: skip


def _keeping(machine: Machine, request: Request) -> Request:
    """The request with the parts that it leaves as they are; before, the shard's format is one in which that can be."""
    move_up(machine, request.format)
    if request.clusters is not None:
        return _clustered(machine, request, request.clusters)
    state = machine.state
    if not request.reads or _is_of_trace(request, state) or state.format < PART_SUMS:
        return request
    stored = Stored(machine.blob, machine.shard, state.schemas, state.schemas[request.schema])
    try:
        kept = kept_by(request, stored, machine.config.task_bytes, published=is_published_by(request, state))
    except Missing:
        return request  # a rival replaced it, or it is lost: the merge finds out which
    return msgspec.structs.replace(request, kept=kept)


def _is_of_trace(request: Request, state: State) -> bool:
    """Whether contents are made of the trace alone. They only keep parts of contents: the trace refers to its own."""
    return request.reason == "ahead" and request.inputs[0] != state.contents


def _clustered(machine: Machine, request: Request, wanted: Clusters) -> Request:
    """The request with where its clusters are cut, by some values of the heaviest runs, and with those that it keeps.

    Where these are all the same and others are not, the greatest of all is by itself, so that there are two clusters.
    """
    state, inputs = machine.state, task_inputs(request)
    schema, column = state.schemas[request.schema], state.schemas[request.schema].columns[wanted.column]
    by, stored = By(column.id, column.type), Stored(machine.blob, machine.shard, state.schemas, schema)
    try:
        found = (
            None
            if _is_of_trace(request, state)
            else kept_clusters(request, wanted.most, by, stored, machine.config.task_bytes)
        )
        keys = {part.key for part in found.kept.parts} if found is not None else ()
        read = [run for run in inputs if not any(part.key in keys for part in run.parts)]
        with machine.runtime.pool(machine.config.read_threads, "persist-cut") as pool:
            values = sample(stored, read, wanted.column, pool.map)
    except Missing:
        return msgspec.structs.replace(request, clusters=None)  # as where it is not known what can be kept
    cuts = cuts_of(values, wanted.most if found is None else found.most)
    if found is None and not cuts:
        all_ = ends([part for run in inputs for part in run.parts], state.schemas, by)
        cuts = all_[1:] if all_ and all_[0] < all_[1] else ()
    stretches, edges = ([(None, None)], set[int]()) if found is None else (found.stretches, found.edges)
    whole = msgspec.structs.replace(wanted, cuts=cuts)
    edges = edges.union(*(whole.between(*stretch).cuts for stretch in stretches))
    whole = msgspec.structs.replace(wanted, cuts=tuple(sorted(edges)))
    return msgspec.structs.replace(
        request, clusters=whole if edges else None, written=tuple(whole.between(*stretch) for stretch in stretches),
        kept=() if found is None else (found.kept,),
    )  # fmt: skip


def move_up(machine: Machine, format_: int) -> None:
    """Bring a shard to a format, if it is below."""
    if machine.state.format < format_:
        machine.try_commit(lambda _state, _now: c.Upgrade(format_))


def commit(
    machine: Machine, worker: WriterId, request: Request, results: Sequence[TaskResult], merges: Sequence[int] = (0,)
) -> tuple[SeqNo | None, int]:
    """Replace the inputs by the results, in one transition. Return the seqno and the attempts of the commit.

    `merges` is where the results of each merge start. The seqno is None if another compactor replaced the inputs first.
    """
    output = output_batch(request, results, merges)
    if request.reason in ("ahead", "drop"):
        is_kept = request.reason == "ahead"
        answer = machine.try_commit(
            lambda state, _now: c.KeepContents(worker, as_stored_in(state.format, output) if is_kept else None)
        )
    else:
        answer = machine.try_commit(
            lambda state, _now: c.ApplyCompaction(worker, request.ids, as_stored_in(state.format, output))
        )
    if isinstance(answer, Committed):
        return answer.seqno, answer.attempts
    # What a rival has replaced is garbage (Exists), and its uploader may have ended since (NotLive).
    is_refused = isinstance(answer, r.NotEquivalent | r.Exists | r.NotLive) and worker in machine.state.writers
    is_other = is_refused and not still_there(machine.state, request)
    if is_other or isinstance(answer, r.InputsGone | r.Finished):
        log.info("shard %s: another compactor replaced the batches %s first", machine.shard, request.ids)
        return None, 0
    raise machine.refused(answer)


def still_there(state: State, request: Request) -> bool:
    """Whether all inputs of a request are still in the trace, unchanged.

    A batch that a compactor rewrote alone kept its id, but it is a different batch. So the batches are compared
    as a whole.
    """
    batches = {(batch.id, batch.since): batch for batch in state.stored}
    return all(batches.get((batch.id, batch.since)) == batch for batch in request.inputs)
