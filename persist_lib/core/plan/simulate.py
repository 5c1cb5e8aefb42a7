"""What a policy would have made of a shard: its appends once more, through the real state machine, without data.

Compaction's plans are those that upkeep makes, and each is applied as a command, so what the state machine would refuse
shows. What is written into the parts is not known, and is estimated: how many updates are left once since has passed
them, and the bytes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.cost import Cost, Prices, storage_dollars
from persist_lib.core.formats import NEWEST
from persist_lib.core.plan.compaction import Policy, plan_compaction
from persist_lib.core.plan.requests import Request, TaskResult, output_batch
from persist_lib.core.plan.retention import last_of, plan_retention
from persist_lib.core.state import INLINE_TOTAL_BYTES, Batch, Part, State
from persist_lib.core.sums import MODULUS, Sums
from persist_lib.core.trace import CHUNK_BYTES
from persist_lib.core.transitions import apply
from persist_lib.frontier import at
from persist_lib.ids import PartKey, SeqNo, format_reader_id, format_writer_id
from persist_lib.schema.schema import Schema
from persist_lib.times import Times, Unit

INLINE = PartKey("")
WRITER = format_writer_id(0xFFFF)
READER = format_reader_id(1)
BYTES_EACH = 64
PART_BYTES = 8 << 20
DIGEST = 16
MEETING = 8
"""What it costs to meet an update that is not in the heaviest run, beside one that is only decoded."""
MONTH_MS = 30 * 86_400_000
POINTS = 400
"""How many points a curve has at most."""

N = TypeVar("N", int, float)
Left = Callable[[State, Request], int]
"""How many updates a merge leaves."""


class Appended(NamedTuple):
    """An append: when (ms), up to which time, how many updates, the sum of their diffs, their bytes, and whether these
    are in the state itself.

    `since` is the shard's by then. `is_tended`: upkeep ran after it, and before the next one.
    """

    now: int
    upper: int
    since: int
    updates: int
    diff_sum: int
    size: int
    is_inline: bool
    is_tended: bool = False


class History(msgspec.Struct, frozen=True):
    """What happened to a shard, as far as that is known. `there` of the appends are batches that were there before.

    `bytes_each` is about how many bytes an update takes once it was merged. `assumed` says, in sentences, what was not
    known.
    """

    shard: str
    appends: tuple[Appended, ...]
    there: int
    bytes_each: float
    times: Unit | None
    assumed: tuple[str, ...] = ()

    @property
    def span_ms(self) -> int:
        """From the first append that is known to the last one, in ms; at least one."""
        known = self.appends[self.there :]
        return max(1, known[-1].now - known[0].now) if known else 1


class Simulated(msgspec.Struct, frozen=True):
    """What a shard would be under a policy. Counts are of updates, sizes in bytes.

    `batches` there are at the end and `most` at most after upkeep. `rewritten` updates for each one that was appended.
    `cost` is that of all upkeep; `written` are bytes of appends and upkeep together. `read` is what a read of the
    newest contents does for each row, on average, and `worst` at worst: 1 is a fresh batch. `read_size` and `read_gets`
    are bytes and requests of one read, on average. `dollars_month` is for appends, upkeep, storage, and reads.
    The curves have a point for each append, or for some.
    """

    policy: str
    appended: int
    batches: int
    most: int
    rewritten: float
    written: int
    stored: int
    cost: Cost
    read: float
    worst: float
    read_size: int
    read_gets: float
    dollars_month: float
    batches_curve: tuple[int, ...]
    read_curve: tuple[float, ...]


class Simulation:
    """A shard without data. `left` says how many updates a merge leaves; by default all of them.

    An update takes `bytes_each` bytes. With `cuts` what is written is cut into parts, as an executor does; else it is
    one part of at most PART_BYTES, whatever it holds.
    """

    def __init__(
        self, policy: Policy | None = None, left: Left | None = None, bytes_each: float = BYTES_EACH, *,
        cuts: bool = False,
    ) -> None:  # fmt: skip
        self.state = State()
        self.seqno = SeqNo(0)
        self.left: Left = left or (lambda _state, request: request.count)
        self.policy = policy or Policy()
        self.bytes_each, self.cuts = bytes_each, cuts
        self.keys = count(1)
        self.appended = self.rewritten = self.written = self.most = 0
        self.cost = Cost()
        self.do(c.Create(Schema(key={"id": "int64"}), NEWEST))
        self.do(c.RegisterWriter(WRITER, "ingest", 2**62))
        self.do(c.RegisterReader(READER, 2**62))

    def do(self, command: c.Command) -> None:
        """Apply a command that has to be accepted."""
        answer = apply(self.state, SeqNo(self.seqno + 1), command)
        if not isinstance(answer, State):
            raise AssertionError(f"{type(command).__name__} was refused: {answer}")  # noqa: TRY004 - a wrong plan
        self.state, self.seqno = answer, SeqNo(self.seqno + 1)

    def append(
        self, size: int, times: int = 1, rows: int | None = None, held: int | None = None, *, inline: bool = False
    ) -> None:  # fmt: skip
        """Append `size` updates over the next `times` times, which leave `rows` rows more; by default each adds one.

        They take `held` bytes, `inline` in the state itself if there is room, else as parts.
        """
        lower = self.state.upper.time or 0
        first, last = lower, lower + times - 1
        if not size:
            parts: tuple[Part, ...] = ()
        elif inline and held and self.state.inline_size + held <= INLINE_TOTAL_BYTES:
            parts = (Part(INLINE, held, size, _zeros(DIGEST), b"", b"", first, last, 0, _zeros(held)),)
        else:
            parts = self.parts(size, first, last, each=None if held is None else held / size)
        runs = (0,) if size else ()
        added = size if rows is None else rows
        batch = Batch(0, 1, at(lower), at(lower + times), at(0), size, added, size, parts, runs)
        self.do(c.CompareAndAppend(WRITER, lower.to_bytes(8, "big"), batch, 0))
        self.appended += size
        self.written += batch.size

    def parts(
        self, rows: int, first: int, last: int, earliest: int = 0, each: float | None = None
    ) -> tuple[Part, ...]:  # fmt: skip
        """Parts that nothing was written for, of `each` bytes an update."""
        limit, each = self.policy.part_bytes or PART_BYTES, each or self.bytes_each
        most = max(1, int(limit / each)) if self.cuts else rows
        found = []
        for start in range(0, rows, most):
            some = min(most, rows - start)
            size, soon = max(1, min(limit, int(some * each))), max(0, min(earliest - start, some))
            key = PartKey(f"{WRITER}/{next(self.keys):016x}.parquet")
            digests = _zeros(DIGEST * -(-size // CHUNK_BYTES))
            found.append(Part(key, size, some, digests, b"", b"", first, last, 0, earliest=soon))
        return tuple(found)

    def advance(self, since: int) -> None:
        """Let the only reader give up history."""
        if at(since) != self.state.since:
            self.do(c.DowngradeSince(READER, at(since), self.seqno, 0))

    def carry_out(self, request: Request) -> None:
        """What an executor would commit for one request."""
        self.cost += request.cost
        if request.reason == "drop":
            self.do(c.KeepContents(WRITER, None))
            return
        if request.output is not None:
            self.do(c.ApplyCompaction(WRITER, request.ids, request.output))
            return
        self.rewritten += request.count
        sums = sum(b.diff_sum for b in request.inputs), sum(b.fingerprint for b in request.inputs)
        if request.reason == "ahead":
            rows, time = sums[0], request.since.time or 0
            result = TaskResult(self.parts(rows, time, time, rows), Sums(rows, rows, sums[1] % MODULUS))
            output = output_batch(request, [result])
            self.do(c.KeepContents(WRITER, output))
        else:
            output = output_batch(request, [self._merged(request, *sums)])
            self.do(c.ApplyCompaction(WRITER, request.ids, output))
        self.written += output.size

    def _merged(self, request: Request, diff_sum: int, fingerprint: int) -> TaskResult:
        rows = self.left(self.state, request)
        # Times at or below since become one; the newest stay apart. What was registered with tighter bounds is cut.
        last = max((part.time_upper for batch in request.inputs for part in batch.parts), default=0)
        first = min((part.time_lower for batch in request.inputs for part in batch.parts), default=0)
        first, last = max(first, request.lower.time or 0), max(last, request.lower.time or 0)
        end = last if request.upper.time is None else min(last, request.upper.time - 1)
        first, last = min(max(first, request.advance_to), end), max(end, request.advance_to)
        settled = sum(until(part, request.advance_to) for batch in request.inputs for part in batch.parts)
        parts = self.parts(rows, first, last, settled) if rows else ()
        return TaskResult(parts, Sums(rows, diff_sum, fingerprint))

    def read(self) -> float:
        """What a read of the newest contents does for each row: updates that it decodes, and those that are not in the
        heaviest run once more by what it costs to meet them.
        """
        found = self.state.batches_at()
        weights = [sum(part.rows for part in run) for batch in found for run in batch.run_parts()]
        rows = sum(batch.diff_sum for batch in found)
        return (sum(weights) + MEETING * (sum(weights) - max(weights, default=0))) / max(1, rows)

    def maintain(self) -> int:
        """Carry out plans until there is nothing left to do. Answers how many passes that took."""
        for passes in count():
            plan = plan_compaction(self.state, self.policy)
            for request in plan.requests:
                self.carry_out(request)
            if not plan.requests:
                self.most = max(self.most, len(self.state.filled))
                return passes
        raise AssertionError("unreachable")


@cache
def _zeros(size: int) -> bytes:
    return bytes(size)


def until(part: Part, time: int) -> int:
    """How many of a part's updates are at or before a time, if they are spread evenly."""
    first, last = part.time_lower, part.time_upper
    if not first <= time < last:
        return part.rows if last <= time else 0
    return int(part.earliest + (part.rows - part.earliest) * (time - first) / (last - first))


def settled_left(state: State, request: Request) -> int:
    """How many updates a merge leaves, as far as sums tell: of what since has passed, the rows that are there, if the
    merge begins with the oldest batch; all of them if it does not, as what they take back may be in an older one.
    """
    is_whole = bool(request.inputs) and request.inputs[0].lo == state.trace[0].lo
    left = 0.0
    for batch in request.inputs:
        passed = sum(until(part, request.advance_to) for part in batch.parts)
        share = passed / batch.count if batch.count else 0
        left += batch.count - passed + (max(0, batch.diff_sum) * share if is_whole else passed)
    return max(0, round(left))


def replay(history: History, name: str, policy: Policy, prices: Prices, reads_a_day: float = 0) -> Simulated:
    """Let a history happen once more under a policy that is called `name`. Pure.

    Upkeep runs where it ran, and at the end. Since is where it was, or where `policy.retention` lets it. Raises
    InvalidUsage for a retention in time of times that are integers.
    """
    policy = msgspec.structs.replace(policy, prices=prices)
    kept = _kept(history, policy)
    there, simulation = history.there, Simulation(policy, settled_left, history.bytes_each, cuts=True)
    batches, reads, sizes, gets = list[int](), list[float](), list[int](), list[int]()
    own = Cost()
    for number, one in enumerate(history.appends):
        times = max(1, one.upper - (simulation.state.upper.time or 0))
        before = simulation.seqno
        simulation.append(one.updates, times, one.diff_sum, max(1, one.size), inline=one.is_inline)
        if number >= there:
            own += Cost(puts=len(simulation.state.trace[-1].keys), commits=simulation.seqno - before)
        since = at(one.since) if kept is None else plan_retention(simulation.state, kept)
        if since is not None:
            simulation.advance(since.join(simulation.state.since).time or 0)
        if number == there - 1:
            simulation.appended = simulation.rewritten = simulation.written = simulation.most = 0
            simulation.cost = Cost()
        if number < there:
            continue
        if one.is_tended or number == len(history.appends) - 1:
            simulation.maintain()
        found = simulation.state.batches_at()
        batches.append(len(simulation.state.filled))
        reads.append(simulation.read())
        sizes.append(sum(batch.size for batch in found))
        gets.append(sum(len(batch.keys) for batch in found))
    stored = sum(batch.size for batch in simulation.state.stored)
    samples = max(1, len(reads))
    cost, read_gets = simulation.cost.priced(prices), sum(gets) / samples
    of_reads = Cost(gets=1, bytes_read=sum(sizes) // samples).priced(prices)
    month = (cost.dollars + own.priced(prices).dollars) * MONTH_MS / history.span_ms
    a_read = read_gets * prices.get + of_reads.dollars - prices.get
    month += storage_dollars(stored, prices) + 30 * reads_a_day * a_read
    return Simulated(
        name, simulation.appended, batches[-1] if batches else len(simulation.state.filled), simulation.most,
        simulation.rewritten / max(1, simulation.appended), simulation.written, stored, cost,
        sum(reads) / samples, max(reads, default=0.0), sum(sizes) // samples, read_gets, month,
        _some(batches), _some(reads),
    )  # fmt: skip


def _kept(history: History, policy: Policy) -> int | str | None:
    """The policy's retention, a length of time as a number of times; None where since is as it was."""
    kept = policy.retention
    is_time = isinstance(kept, str) and last_of(kept) is None
    return Times(history.times, int).distance(kept, "retention") if is_time else kept


def _some(values: Sequence[N]) -> tuple[N, ...]:
    """At most POINTS of the values, at even distances, the last one among them."""
    return tuple(values[:: -max(1, -(-len(values) // POINTS))][::-1])
