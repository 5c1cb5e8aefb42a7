"""Which batches are worth merging, and why: a pure plan from one state.

The rule. Let the non-empty batches hold s1, s2, … sm updates, oldest first. A batch is in debt when it holds less than
half of what all newer ones hold together; the oldest one in debt is merged with everything newer. So at rest each batch
weighs at least half of all that follows, which leaves at most log1.5(n) < 2*log2(n) batches, and an update that is
rewritten finds itself in a batch at least 1.5 times larger, so it is rewritten O(log n) times, however the sizes came.

Besides, a batch is rewritten alone when since has passed a third of its updates, or when it has several runs that are
no clusters (`core.plan.clusters`); neighbouring empty batches fuse without I/O. The trailing empty batch is left alone:
appends extend it.

Where history that does not count outweighs a share of the contents, these are written beside the trace (`ahead`). Then
what they stand for and what came after are two traces, each under the rule, until since has come to them (`settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from persist_lib.arguments import check_type, parse_integer, parse_number, parse_text
from persist_lib.config import Config
from persist_lib.core.cost import S3_LIST, Cost, Prices
from persist_lib.core.formats import CLUSTERS, CONTENTS, OLDEST_MOVED, PART_SUMS
from persist_lib.core.plan import clusters
from persist_lib.core.plan.clusters import By, Clusters
from persist_lib.core.plan.fan_in import Room, grouped, row_bytes, slices
from persist_lib.core.plan.requests import Reason, Request
from persist_lib.core.plan.retention import parse_retention
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, Part, State
from persist_lib.core.trace import CHUNK_BYTES
from persist_lib.frontier import Antichain, at
from persist_lib.times import show_frontier

AHEAD_SHARE = 128
"""A trace of less than this share of a part's bytes is cheap to read as it is: nothing is kept ahead of it."""


ONE_RUN = ("fold", "flush", "fuse", "publish")
"""What is written for these reasons is one run for each merge."""
MOST_READ = 1 / 2
"""A batch of one run is put in clusters where a filter for one value has to read more than this share of it."""
PARTS = 64
"""Into about so many parts an output is cut that is smaller than as many of the settings' size, none below a chunk."""


class Policy(msgspec.Struct, frozen=True):
    """How eager compaction is. The defaults keep the bounds of the module's docstring."""

    weight: float = 0.5
    """A batch is in debt below this share of what is newer than it. Larger: fewer batches, more rewriting."""
    advance: float = 1 / 3
    """A batch is rewritten when since has passed about this share of its updates. If each of them took back another,
    the batch holds three times what it has to."""
    part_bytes: int | None = None
    """Size of an output part. None: what the settings say."""
    ahead: float = 1 / 16
    """Contents are written ahead when the updates that do not count any more, and are kept as history, weigh more than
    this share of the rows. 0: never, and what is kept is given up. Smaller: reads have less to do, and more is
    written."""
    inline_fill: float = 0.5
    """Inline batches are flushed into parts when they fill this share of what a state may carry."""
    prices: Prices | None = None
    """What a plan is priced at. None: what the client's location takes; S3's list prices where no client plans."""
    merge_bytes: int | None = None
    """Memory of a merge, which bounds how many runs it reads at once. None: what the settings say."""
    retention: int | str | None = None
    """The history that a shard without a retention of its own keeps, as rules say it. None: all."""
    cluster: str | None = None
    """The column by whose values large batches are put in clusters, so that filters on it leave most of them out."""
    format: int | None = None
    """The newest format that shards are moved up to. None: what the settings say, and where they say none, the newest
    that this release knows."""

    def __post_init__(self) -> None:
        for name in ("weight", "advance", "ahead", "inline_fill"):
            parse_number(getattr(self, name), name)
        for name in ("part_bytes", "merge_bytes", "format"):
            if getattr(self, name) is not None:
                parse_integer(getattr(self, name), name, 1)
        if self.cluster is not None:
            parse_text(self.cluster, "cluster", 500)
        if self.retention is not None:
            parse_retention(self.retention, "retention")
        if self.prices is not None:
            check_type(self.prices, Prices, "prices", "persist.Prices()")


DEFAULTS = Config()


def policy_of(config: Config, policy: Policy | None = None, prices: Prices | None = None) -> Policy:
    """How to plan with these settings: `policy`, or what the settings say. What `policy` leaves open is filled in.

    This is the only place where settings become a policy. All code that plans for a location calls it.
    """
    if policy is None:
        policy = Policy(
            weight=config.compaction_weight, advance=config.compaction_advance, ahead=config.compaction_ahead
        )  # fmt: skip
    part_bytes = config.part_bytes if policy.part_bytes is None else policy.part_bytes
    merge_bytes = config.merge_bytes if policy.merge_bytes is None else policy.merge_bytes
    return msgspec.structs.replace(
        policy, part_bytes=part_bytes, merge_bytes=merge_bytes, prices=policy.prices or prices,
        format=config.format if policy.format is None else policy.format,
    )  # fmt: skip


class Skipped(msgspec.Struct, frozen=True):
    """Batches left alone, and why."""

    ids: tuple[tuple[int, int], ...]
    why: str


class Plan(msgspec.Struct, frozen=True):
    """What compaction would do now, oldest slice first. The slices do not overlap."""

    requests: tuple[Request, ...]
    skipped: tuple[Skipped, ...]

    @property
    def debt(self) -> int:
        """Updates that would be rewritten: the work the trace calls for."""
        return sum(request.count for request in self.requests)

    @property
    def cost(self) -> Cost:
        """The price of all of it."""
        return sum((request.cost for request in self.requests), Cost())


def plan_compaction(state: State, policy: Policy = Policy()) -> Plan:  # noqa: B008 - a frozen value
    """The contiguous slices of the trace that are worth replacing as of the shard's since."""
    if state.is_finished():
        return Plan((), ())
    older, newer = _sides(state)
    first = _settle_or_drop(state, older, policy) or _ahead(state, policy)
    sides = [newer] if first and first.reason == "settle" else [older, newer]
    plans = [_plan_side(state, side, policy) for side in sides]
    requests = [request for found, _ in plans for request in found]
    return Plan((*([first] if first else []), *requests), tuple(one for _, skipped in plans for one in skipped))


def _end_of_contents(state: State) -> int:
    """How many batches the contents that are kept ahead stand for."""
    return 0 if state.contents is None else state.index_of(state.contents.hi)


def _sides(state: State) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """The batches that the contents stand for, if some are kept ahead, and the others: no merge is across."""
    place = _end_of_contents(state)
    return state.trace[:place], state.trace[place:]


def _settle_or_drop(state: State, older: tuple[Batch, ...], policy: Policy) -> Request | None:
    kept = state.contents
    if kept is None:
        return None
    schema, is_reached = _schema_of((kept,)), kept.since <= state.since
    if is_reached and not (len(older) == 1 and kept.since <= older[0].since):
        output = msgspec.structs.replace(kept, since=state.since)
        return Request(older, state.since, schema, "settle", Cost(), DEFAULTS.part_bytes, output=output)
    if is_reached or not policy.ahead:  # the trace has what they are, in other runs; or they are not wanted
        return Request((kept,), kept.since, schema, "drop", Cost(), DEFAULTS.part_bytes)
    return None


def _ahead(state: State, policy: Policy) -> Request | None:
    """The contents as of the newest update, if the updates since the last ones that do not count outweigh a share.

    An update that takes another one back does not count, nor does the other: of rows that are there once, it is the
    updates less the sum of their diffs. What is only added is history and contents at once, and is not written twice.
    """
    inputs, last = _newest(state)
    newer = inputs if state.contents is None else inputs[1:]
    rows = sum(batch.diff_sum for batch in inputs)
    dead = sum(batch.count - batch.diff_sum for batch in newer)
    least = _most(policy) // AHEAD_SHARE
    if not policy.ahead or not newer or last is None or state.size < least or dead <= policy.ahead * max(rows, 1):
        return None
    is_held_back = policy.format is not None and max(policy.format, state.format) < CONTENTS
    if at(last - 1) <= state.since or is_held_back or state.format < OLDEST_MOVED:
        # Compactions say the same of them, and leave no history beside; or an older format is kept on purpose.
        return None
    request = _request(state, inputs, "ahead", policy)
    return _as_contents(request, last, policy) if len(request.merges) == 1 else None


def _as_contents(request: Request, last: int, policy: Policy) -> Request:
    """The request as one for contents, in a format that has these."""
    format_ = max(CONTENTS, min(PART_SUMS, policy.format or PART_SUMS))
    part_bytes = _cut(policy, request.inputs) if format_ >= PART_SUMS else _most(policy)
    return msgspec.structs.replace(request, since=at(last - 1), format=format_, part_bytes=part_bytes)


def _plan_side(state: State, trace: tuple[Batch, ...], policy: Policy) -> tuple[list[Request], list[Skipped]]:
    start, end = _debt_slice(trace, policy)
    requests = _merges(state, trace[start:end], policy) if start < end else []
    older = trace[:start] if requests else trace
    skipped = []
    for batch in filter(attrgetter("count"), older):
        if reason := _rewrite_reason(batch, state, policy):
            requests.append(_request(state, (batch,), reason, policy))
        else:
            skipped.append(Skipped((batch.id,), _why_not(batch, state)))
    requests += [_request(state, fused, "fuse", policy) for fused in _empty_runs(older)]
    return sorted(requests, key=lambda request: request.ids), skipped


def plan_flush(state: State, policy: Policy = Policy()) -> Request | None:  # noqa: B008 - a frozen value
    """The newest slice with inline batches, to be merged into a part so that the state has room for more.

    Where others lie in between, it is the slice that has the most of their bytes.
    """
    # From the end, and no further than needed: writers plan this whenever the state is full, however long the trace is.
    best, most, left = (0, 0), 0, state.inline_size
    end, ahead = len(state.trace), _end_of_contents(state)
    while left > most:
        start, end = _inline_run(state.trace, end)
        start = max(start, ahead) if end > ahead else start
        size = sum(batch.inline_size for batch in state.trace[start:end])
        left -= size
        if size > most:
            best, most = (start, end), size
        end = start
    return _request(state, state.trace[slice(*best)], "flush", policy) if most else None


def plan_contents(state: State, policy: Policy) -> Request | None:
    """Write the contents as of the newest update ahead, whatever they weigh; None where since has passed it.

    As a rule it is one merge. Where that cannot read all runs, the request is partial, and to be carried out before.
    """
    inputs, last = _newest(state)
    if last is None or at(last - 1) <= state.since:
        return None
    return _as_contents(_request(state, inputs, "ahead", policy), last, policy)


def _newest(state: State) -> tuple[tuple[Batch, ...], int | None]:
    """The batches that make the contents as of the newest update, and where their times end; None without one."""
    found = state.batches_at()
    filled = max((place for place, batch in enumerate(found) if batch.count), default=-1)
    return found[: filled + 1], found[filled].upper.time if filled >= 0 else None


def plan_rewrite(state: State, ids: Sequence[tuple[int, int]], policy: Policy) -> list[Request]:
    """Merge the batches with these ids, those in between, and what stands for them by now, whatever they weigh.

    Where one merge cannot read them all, the first merges come alone: they are partial. None where nothing could become
    less: one run, as of since.
    """
    first, last = min(ids)[0], max(ids)[1]
    batches = tuple(batch for batch in state.trace if batch.hi > first and batch.lo < last)
    settled = all(one.exact and len(one.runs) == 1 and one.since == state.since for one in batches)
    return [] if len(batches) == 1 and settled else _merges(state, batches, policy)


def is_filled(state: State) -> bool:
    """Whether somebody has to flush: inline batches take half of their room."""
    return state.inline_size >= INLINE_TOTAL_BYTES // 2


def _inline_run(trace: tuple[Batch, ...], end: int) -> tuple[int, int]:
    """The newest batches before `end` that are inline or empty, as indices; the last of them is inline."""
    while not _has_inline(trace[end - 1]):
        end -= 1
    start = end
    while start > 0 and (_has_inline(trace[start - 1]) or not trace[start - 1].count):
        start -= 1
    return start, end


def _has_inline(batch: Batch) -> bool:
    return any(part.inline is not None for part in batch.parts)


def batch_bound(count: int) -> float:
    """At rest a trace with `count` updates has at most this many non-empty batches."""
    return 2.0 * (count + 1).bit_length() + 2


def bound_of(state: State) -> int:
    """The most non-empty batches that this trace has at rest: on both sides, where contents are kept ahead."""
    return int(sum(batch_bound(sum(batch.count for batch in side)) for side in _sides(state) if side))


def _debt_slice(trace: tuple[Batch, ...], policy: Policy) -> tuple[int, int]:
    """From the oldest batch in debt to the newest non-empty one, as indices; equal for none."""
    newer, start, end = 0, len(trace), 0
    for index in range(len(trace) - 1, -1, -1):
        count = trace[index].count
        if not count:
            continue
        end = end or index + 1
        if newer and count < policy.weight * newer:
            start = index
        newer += count
    # Several equal small ones at the end are not in debt one by one; two that weigh the same are one merge.
    return (start, end) if start < end else (end, end)


def _merges(state: State, batches: tuple[Batch, ...], policy: Policy) -> list[Request]:
    """One request for all of them; or several, which come before that one where it would read too many runs at once."""
    by = _by(state, batches, policy)
    first = slices(batches, _row_bytes(state), _room(policy), lambda one: clusters.merged_runs(one, state.schemas, by))
    if not first:
        return [_request(state, batches, "merge", policy)]
    return [_request(state, batches[start:end], "fold", policy) for start, end in first]


def _row_bytes(state: State) -> int:
    return row_bytes(state.schemas[-1]) if state.schemas else 0


def _room(policy: Policy) -> Room:
    return Room.of(policy.merge_bytes or DEFAULTS.merge_bytes)


def _rewrite_reason(batch: Batch, state: State, policy: Policy) -> Reason | None:
    if batch.inline_size and state.inline_size > policy.inline_fill * INLINE_TOTAL_BYTES:
        return "flush"
    by = _by(state, (batch,), policy)
    if (len(batch.runs) > 1 or not batch.exact) and not clusters.are_apart(batch, state.schemas, by):
        return "sort"
    if _passed(batch, state.since) >= policy.advance:
        return "advance"
    # A batch is not rewritten as it was but for its runs: the state machine takes it only as of a later since.
    is_due = len(batch.runs) == 1 and batch.since < state.since and bool(_clusters(state, (batch,), "cluster", policy))
    return "cluster" if is_due and by is not None and clusters.share(batch, state.schemas, by) > MOST_READ else None


def _passed(batch: Batch, since: Antichain) -> float:
    """About which share of a batch's updates `since` would let meet others, beyond those that its own since did.

    Each update is passed once, so a batch that waits for a share of them is rewritten O(1) times an update.
    """
    return sum(_passed_rows(part, batch.since, since) for part in batch.parts) / batch.count


def _passed_rows(part: Part, settled_at: Antichain, since: Antichain) -> float:
    """The same for a part: its updates that are not settled yet, as if spread evenly over their times."""
    first, last = part.time_lower, part.time_upper
    settled = 0
    if settled_at.time is None or settled_at.time >= first:
        settled, first = part.earliest, max(first, last if settled_at.time is None else settled_at.time)
    reached = last if since.time is None else min(since.time, last)
    return (part.rows - settled) * (reached - first) / (last - first) if reached > first else 0.0


def _why_not(batch: Batch, state: State) -> str:
    if batch.since < state.since:
        since = show_frontier(state.since, state.times)
        return f"{batch.count} updates weigh enough, and since {since} has not passed enough of its times"
    return f"{batch.count} updates weigh enough, already compacted as of {show_frontier(batch.since, state.times)}"


def _empty_runs(trace: tuple[Batch, ...]) -> list[tuple[Batch, ...]]:
    runs = [tuple(run) for is_empty, run in groupby(trace, key=lambda batch: batch.count == 0) if is_empty]
    return [run for run in runs if len(run) > 1]


def _request(state: State, inputs: tuple[Batch, ...], reason: Reason, policy: Policy) -> Request:
    objects = [part for batch in inputs for part in batch.parts if part.inline is None]
    size = sum(part.size for part in objects)
    part_bytes = _cut(policy, inputs) if _is_cut(state, inputs, policy) else _most(policy)
    written = sum(batch.size for batch in inputs)
    puts = -(-written // part_bytes) if any(batch.count for batch in inputs) else 0
    gets = sum(-(-part.size // CHUNK_BYTES) for part in objects)
    cost = Cost(bytes_read=size, bytes_written=written, gets=gets, puts=puts).priced(policy.prices or S3_LIST)
    found = _clusters(state, inputs, reason, policy)
    merges = _grouped(state, inputs, policy, None if found is None else _by(state, inputs, policy))
    if found is not None and len(merges) > 1:
        found, merges = None, _grouped(state, inputs, policy)
    return Request(
        inputs, state.since, _schema_of(inputs), reason, cost, part_bytes, tuple(merges), clusters=found
    )  # fmt: skip


def _grouped(state: State, inputs: tuple[Batch, ...], policy: Policy, by: By | None = None) -> list[int]:
    """Where groups of runs start that one merge can read; of clusters, as tasks of a merge into clusters read them."""
    runs = [run for batch in inputs for run in clusters.merged_runs(batch, state.schemas, by)]
    return grouped(runs, _row_bytes(state), _room(policy))


def _by(state: State, inputs: tuple[Batch, ...], policy: Policy) -> By | None:
    """What clusters go by in the schema that is written."""
    if policy.cluster is None or not state.schemas or state.pins:
        return None  # a publication names files of one run
    return clusters.by_name(state.schemas, policy.cluster, state.schemas[_schema_of(inputs)])


def _clusters(state: State, inputs: tuple[Batch, ...], reason: Reason, policy: Policy) -> Clusters | None:
    """What an output is put into; None for one run."""
    by = _by(state, inputs, policy)
    if by is None or reason in ONE_RUN or state.format < CLUSTERS:
        return None
    count = clusters.count_of(sum(batch.size for batch in inputs), _most(policy))
    if len(inputs) == 1 and not inputs[0].since < state.since:
        count = min(count, len(inputs[0].runs) - 1)  # the state machine takes it where it has fewer runs
    place = clusters.place_of(state.schemas[_schema_of(inputs)], by)
    return Clusters(place, count) if count > 1 and place is not None else None


def _most(policy: Policy) -> int:
    """About the size of large parts."""
    return policy.part_bytes or DEFAULTS.part_bytes


def _cut(policy: Policy, inputs: Sequence[Batch]) -> int:
    """About the size of parts of an output that may be kept, so that what is not touched stays."""
    return min(_most(policy), max(CHUNK_BYTES, sum(one.size for one in inputs) // PARTS))


def _is_cut(state: State, inputs: Sequence[Batch], policy: Policy) -> bool:
    """Whether the contents are in small parts, or the heaviest batch is, as it were contents: there are updates.

    What is only appended is in large parts, of which columns are read without the others.
    """
    if state.format < PART_SUMS:
        return False
    heaviest = max(inputs, key=attrgetter("size"))
    return state.contents is not None or len(heaviest.parts) > 2 * (1 + heaviest.size // _most(policy))


def _schema_of(inputs: tuple[Batch, ...]) -> int:
    """The newest schema among the inputs: never an older one, which would drop columns."""
    return max((part.schema for batch in inputs for part in batch.parts), default=0)
