"""Commands of many clients for one shard: what waits is applied to the newest state and committed as one row.

Nothing is answered before the row that it rests on is committed: neither success, nor a refusal, nor that it was done
before. A refusal may be due to a command of the same row, and after a lost race all of the row is computed again. Where
nothing changes there is no row, and a linearizable read comes first. While the outcome of a row is unknown, its bytes
are sent again until its place is taken, and nothing else of that shard is committed or answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import GROUPS, REMEMBERS_OUTCOMES
from persist_lib.core.groups import CHANGES_MOST, Answer, apply_together
from persist_lib.core.outcomes import remembers_since
from persist_lib.core.state import OUTCOMES_KEPT, TOKENS_KEPT, State, Version
from persist_lib.core.validate import check_group
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, InvariantViolated, Overloaded, PersistError
from persist_lib.format.log import LogRow, Step, encode_row
from persist_lib.ids import SeqNo
from persist_lib.location.commands import Answered, dated
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.client_duties import Room, Upkeep, Wake
from persist_lib.shard.committer import Work, carry_out, in_doubt, until_in_log
from persist_lib.shard.dedup_index import NO_MATTER, Found, Seen
from persist_lib.shard.log import next_group, next_row
from persist_lib.shard.machine import Prepared, Shard
from persist_lib.shard.requests import (
    Observe,
    Queue,
    Request,
    answering,
    committed,
    forgotten,
    refused,
    still_open,
    stopped,
    timed_out,
    unobserved,
)

REFUSAL_CHARACTERS = 200
"""How much of a refusal a row tells."""


class Asked(NamedTuple):
    """A command that a caller wants committed: its value, its token, and who sent it."""

    command: c.Command
    token: bytes
    sender: str = ""


def prepare_group(
    machine: Shard, version: Version, asked: Sequence[Asked], now: int
) -> tuple[Prepared | None, tuple[Answer, ...]]:
    """The row of as many of the first commands as may be one row after `version`, and the answer to each of them.

    Of at least one, if there is one; no row where none of them changes anything. The answers hold only once the row is
    committed or, without a row, once a linearizable read has found that `version` is the newest. `now` is ms of the
    store's clock. A command that no reader could read again is answered with that error, and does not hurt the others.
    """
    poisoned: dict[int, InvariantViolated] = {}
    while True:
        places = [place for place in range(len(asked)) if place not in poisoned]
        applied = apply_together(version.state, SeqNo(version.seqno + 1), [asked[place].command for place in places])
        steps = [_step(asked[place], answer) for place, answer in zip(places, applied.answers, strict=False)]
        try:
            row = None
            if applied.diffs:
                check_group(applied.diffs, applied.state, SeqNo(version.seqno + 1))
                row = _row(version, steps, applied.state, now)
                data = encode_row(row, applied.state.format)
        except InvariantViolated as error:
            found = [at for at, step in enumerate(steps) if not _is_writable(version, step, applied.state, now)]
            if not found:
                raise
            poisoned |= {places[at]: error for at in found}
            continue
        answers = {**poisoned, **dict(zip(places, applied.answers, strict=False))}
        first = len(answers) if len(applied.answers) == len(places) else places[len(applied.answers)]
        prepared = None if row is None else Prepared(machine, version, row, data, applied.state)
        return prepared, tuple(answers[place] for place in range(first))


def _step(one: Asked, answer: Answer) -> Step:
    command = c.stored_name(one.command)
    if isinstance(answer, StateDiff):
        return Step(one.token, command, one.sender, answer)
    told = str(answer).encode("utf-8", "replace").decode()  # it may quote what could never be stored
    return Step(one.token, command, one.sender, None, told[:REFUSAL_CHARACTERS] or "refused")


def _row(version: Version, steps: Sequence[Step], state: State, now: int) -> LogRow:
    if state.format < GROUPS:  # older formats have no place for what was refused
        steps = [step for step in steps if step.diff is not None]
    return next_group(version, steps, state, now)


def _is_writable(version: Version, step: Step, state: State, now: int) -> bool:
    """Whether a reader could read the step again, alone and in a row of its own."""
    if step.diff is None:
        return True
    try:
        encode_row(next_row(version, step.diff, state, step.token, step.command, now))
    except InvariantViolated:
        return False
    return True


T = TypeVar("T")
OF_A_WRITER_MOST = OUTCOMES_KEPT // 16
"""The most unanswered appends of one writer, where the shard remembers `OUTCOMES_KEPT` of all its writers."""


def of_a_writer(state: State | None) -> int:
    """The most unanswered appends of one writer: no more than its tokens that are certainly remembered."""
    return OF_A_WRITER_MOST if state is not None and state.format >= REMEMBERS_OUTCOMES else TOKENS_KEPT


class Funnel:
    """The commands of one shard on their way into its log. `put` may be called from any thread, `turn` from one.

    `machine.turn` is held whenever the shard is changed, so that commits of several shards at once fit in.
    """

    def __init__(self, machine: Shard, observe: Observe = unobserved, wake: Wake | None = None) -> None:
        """`wake` lets it have a turn later. Without it, nothing waits for room in the state."""
        self.machine, self.observe = machine, observe
        self.queue = Queue(machine.shard)
        self.seen = Seen(machine.shard, machine.consensus)
        self._upkeep, self._room = Upkeep(machine.runtime), Room(machine.runtime, wake)
        self._gives_up = False
        self._is_stopping = False

    def put(self, request: Request) -> None:
        """Let a request wait for its turn. It fails with Overloaded when there are too many, or the server stops."""
        known = self.machine.known
        try:
            if self._is_stopping:
                raise stopped(self.machine.shard)
            self.queue.put(request, of_a_writer(None if known is None else known.state))
        except Overloaded as error:
            request.fail(error)

    def stop(self) -> None:
        """Take no more requests; those that wait are served."""
        self._is_stopping = True

    def give_up(self) -> None:
        """Serve no more requests either, and find out no more what became of a row whose outcome is unknown."""
        self._is_stopping = self._gives_up = True

    @property
    def is_idle(self) -> bool:
        return not (len(self.queue) or len(self._room))

    def turn(self) -> None:
        """Commit what waits, as one row. Requests that did not fit wait for the next turn."""
        with self.machine.turn:
            self._readmit()
            self.let_go(self.queue.remove(attrgetter("is_over")))
            if self._gives_up:
                for request in [*self._room.clear(), *self.queue.remove(lambda _: True)]:
                    request.fail(stopped(self.machine.shard))
            if lot := self.queue.take(2 * CHANGES_MOST):
                with answering(lot):
                    carry_out(_Lot(self, lot))
            self._readmit()

    def let_go(self, requests: Sequence[Request]) -> None:
        """Answer requests that waited too long, or whose client is gone. Nothing of them was ever sent."""
        for request in requests:
            if request.is_dropped:
                request.fail(Determinate(f"shard {request.shard}: the client was gone; nothing was done"))
            else:
                request.fail(timed_out(request))

    def look_for(self, lot: Sequence[Request], version: Version) -> list[Request]:
        """Answer those requests that rows up to `version` hold, or may hold. Returns the others."""
        self.seen.follow(version.seqno)
        left = []
        for request in lot:
            found = self._found(request, version)
            if found == "unknown" and not request.is_repeated:
                request.settle(refused(request, r.Forgotten(request.known, self.seen.begins), version.seqno, ()))
            elif found == "unknown":
                request.fail(forgotten(request))
            elif found != "not there":
                request.settle(Answered(SeqNo(found), is_committed=True))
            else:
                left.append(request)
        return left

    def _found(self, request: Request, version: Version) -> Found:
        """The row that committed a request, up to `version`.

        An append at the next time is looked for here only where the state does not remember all appends since it was
        made. If it is certainly not there, it counts as made from this version. If that would take reading old rows and
        it was not sent before, it is refused, and its sender makes it again.
        """
        command = request.command
        if not isinstance(command, c.AppendNow) or remembers_since(version.state, command.since):
            return self.seen.find(request)
        if not request.is_repeated and command.since < self.seen.begins:
            return "not there"
        found = self.seen.look_up(request, command.since)
        if found == "not there":
            request.command = replace(command, since=version.seqno)
        return found

    def prepared(self, version: Version, lot: Sequence[Request]) -> tuple[Prepared | None, tuple[Answer, ...]]:
        now = self.machine.consensus.now()
        asked = [Asked(dated(one.command, now), one.token, one.client) for one in lot]
        return prepare_group(self.machine, version, asked, now)

    def tell(
        self, lot: Sequence[Request], answers: Sequence[Answer], version: Version, before: State | None = None
    ) -> list[Request]:
        """Answer the first requests by `version`, which is committed and holds them. Returns the others.

        `before` is the state before the row that led to it, if there is a row.
        """
        keeper = self._upkeep.tell(lot, answers, before, version, self.machine.config.rollup_every)
        for place, (request, answer) in enumerate(zip(lot, answers, strict=False)):
            rows = self.seen.rows(request.known, version.seqno)
            due = keeper.due if place == keeper.place else ()
            if isinstance(answer, StateDiff):
                request.settle(committed(request, answer, version, rows, due))
            elif isinstance(answer, PersistError):
                request.fail(answer)
            elif not due and self._room.takes(request, answer):
                continue
            elif request.is_repeated and not _is_certain(answer, version.state, request):
                request.fail(still_open(request, answer))
            else:
                request.settle(refused(request, answer, version.seqno, rows, due))
        return list(lot[len(answers) :])

    def send(self, sent: Sequence[Prepared], lot: Sequence[Request]) -> bool | None:
        """Append a row to each of the logs, all or none, and return whether they are there; None if it cannot be known.

        As `until_in_log`, and for as long as it takes. Until then, requests of the lot whose time is over fail as
        unknown. If it cannot be known, all of the lot have failed so.
        """

        def goes_on(doubt: Indeterminate) -> bool:
            for request in lot:
                if request.is_over:
                    request.fail(in_doubt(sent, doubt))
            self.let_go(self.queue.remove(attrgetter("is_over")))
            return not self._gives_up

        try:
            return until_in_log(sent, self._patience(), goes_on, self.ask)
        except (Determinate, InvalidUsage):  # nothing was done
            raise
        except PersistError as error:  # the server gives up, the log is damaged, or it has been truncated
            for request in lot:
                request.fail(error if isinstance(error, Indeterminate) else in_doubt(sent, error))
            return None

    def know(self, prepared: Prepared, commands: int, took_s: float) -> None:
        """Know a row that is in the log, with so many commands."""
        self.observe(self.machine.shard, commands, took_s)
        self.seen.committed(prepared.row, prepared.data)

    def _readmit(self) -> None:
        known = self.machine.known
        self.queue.put_back(self._room.leaving(0 if known is None else known.state.inline_size))

    def ask(self, call: Callable[[], T]) -> T:
        """Run operations on the location, each for no longer than a call of a client may take."""
        return within(self._patience(), call)

    def _patience(self) -> Deadline:
        return self.machine.runtime.deadline(self.machine.config.timeout_s)

    def waiting(self, lot: Sequence[Request]) -> list[Request]:
        """Let go of those that do not wait any more. Returns the others."""
        self.let_go([request for request in lot if request.is_over])
        return [request for request in lot if not request.answer.done()]


class _Lot(Work):
    """The requests of one turn of a funnel: as many of the first as fit become one row."""

    def __init__(self, funnel: Funnel, lot: list[Request]) -> None:
        self._funnel, self._lot, self.machines = funnel, lot, (funnel.machine,)
        self._version, self._answers = Version(SeqNo(0), State(), b""), tuple[Answer, ...]()

    @property
    def deadline(self) -> Deadline:
        return max([request.deadline for request in self._lot], key=lambda deadline: deadline.ends)

    def is_wanted(self) -> bool:
        if lot := self._funnel.waiting(self._lot):
            self._version = self.ask(self._funnel.machine.ground)
            lot = self._funnel.look_for(lot, self._version)
        self._lot = lot
        return bool(lot)

    def prepare(self) -> Sequence[Prepared]:
        prepared, self._answers = self._funnel.prepared(self._version, self._lot)
        return () if prepared is None else (prepared,)

    def is_answered(self, *, is_fresh: bool) -> bool:
        if is_fresh:
            self._tell(self._version)
        return is_fresh

    def send(self, prepared: Sequence[Prepared]) -> bool | None:
        in_row, behind = self._lot[: len(self._answers)], self._lot[len(self._answers) :]
        if (won := self._funnel.send(prepared, in_row)) is None:
            self._funnel.queue.put_back(behind)
        return won

    def committed(self, prepared: Sequence[Prepared], attempts: int, took_s: float) -> None:  # noqa: ARG002
        (one,) = prepared
        self._funnel.know(one, len(self._answers), took_s)
        self._tell(Version(one.row.seqno, one.state, b""), self._version.state)

    def lost(self, prepared: Sequence[Prepared], attempts: int) -> None:
        """Continue: what waits too long is let go of."""

    def ask(self, call: Callable[[], T]) -> T:
        return self._funnel.ask(call)

    def _tell(self, version: Version, before: State | None = None) -> None:
        self._funnel.queue.put_back(self._funnel.tell(self._lot, self._answers, version, before))


def _is_certain(refusal: r.Refusal, state: State, request: Request) -> bool:
    """Whether a refusal holds for ever, or does no harm if it does not.

    A command that may be applied twice, and has nothing to do now, is done. Its client would ask until its timeout.
    """
    if isinstance(refusal, r.NothingDue) and isinstance(request.command, NO_MATTER):
        return True
    if isinstance(refusal, r.Overtaken) and refusal.expected < refusal.actual:
        return True
    return isinstance(refusal, r.AlreadyDone) or is_out_for_ever(state, request.command)
