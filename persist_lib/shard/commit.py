"""The commit loop: the only way in which shards change, one of them or several together.

Fetch the newest state (cached), build the command, apply it, validate, encode the change, compare-and-set. After a
lost race, the loop tries again from the newest state. It reports a refusal only after a fresh read. An indeterminate
outcome is resolved from the log, never guessed.

Several shards of one location change together by one compare-and-set over all their rows: all of the transitions are
committed, or none. If one shard refuses, all are refused; if one loses a race, all are tried again; and an unknown
outcome is the same for all. A change of one shard is the special case of one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from persist_lib.config import Config
from persist_lib.core import refusals as r
from persist_lib.core.commands import stored_name
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import PARTS_AT_A_TIME
from persist_lib.core.state import Outcome, State, Version
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change
from persist_lib.errors import InvalidUsage, NotFound, PersistError, TimedOut
from persist_lib.format.log import LogRow, encode_row
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Blob, Change, Consensus
from persist_lib.location.wrap.around import takes_commands
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Lock, giving_back, taking
from persist_lib.shard.contention import Pace, give_way, wait_after_loss
from persist_lib.shard.in_doubt import Build, Committed, Done, Undone, until_in_log
from persist_lib.shard.log import after, fetch_newer, fetch_newest, next_row, row_to_follow
from persist_lib.shard.refusals import named, refused
from persist_lib.shard.remote_commit import commit_by_commands
from persist_lib.times import Times

__all__ = ["Build", "Committed", "Done", "Machine", "Prepared", "Undone", "Wanted", "try_commit_all"]

ROOM_S = 0.5
ROOM_PAUSE_S = 0.03
"""How long to wait for another process to make room in a full state, and the pause between looks."""


class Prepared(NamedTuple):
    """A transition that is ready to commit: the version before it, its row, the row's bytes, and the state after it."""

    machine: Machine
    before: Version
    row: LogRow
    data: bytes
    state: State

    @property
    def shard(self) -> ShardId:
        return self.machine.shard

    @property
    def change(self) -> Change:
        return row_to_follow(self.before), self.data

    def committed(self, attempts: int) -> Committed:
        return Committed(self.row.seqno, self.row.token, self.before.state, self.state, attempts)

    def is_in_log(self) -> bool | None:
        """Whether its row is in its place; False when another row is, for ever; None when there is no row there."""
        rows = self.machine.consensus.scan(self.shard, self.row.seqno, 1)
        if not rows or rows[0].seqno != self.row.seqno:
            return None
        return rows[0].data == self.data

    def is_remembered(self) -> bool | None:
        """Whether the newest state remembers that it was committed; None when it cannot tell.

        SUBTLE: an append that was sent again to another server has the same token in another row, which may be the one
        that was committed at this seqno. So for a group the tokens can only say that it was not committed.
        """
        state, row = self.machine.fetch().state, self.row
        known = (*state.outcomes, *(outcome for writer in state.writers.values() for outcome in writer.outcomes))
        there = {outcome.token for outcome in known if outcome.seqno == row.seqno}
        if not row.group and row.token in there:
            return True
        sent = {step.token for step in row.steps if step.diff is not None and step.diff.outcomes is not None}
        is_kept = bool(sent) and state.outcomes[0].seqno < row.seqno
        return False if is_kept and sent != there else None


class Wanted(NamedTuple):
    """A transition of one shard."""

    machine: Machine
    build: Build


class Machine:
    """One shard as one process sees it. All handles of a client share it, so that they never race each other.

    `version` only advances. All methods are safe to call from several threads; the committing thread holds `turn`.
    """

    def __init__(
        self,
        shard: ShardId,
        blob: Blob,
        consensus: Consensus,
        config: Config,
        runtime: Runtime,
        reads: Blob | None = None,
    ) -> None:
        self.shard = shard
        self.blob = blob
        self.reads = reads or blob
        self.consensus = consensus
        self.taker = takes_commands(consensus)
        self.config = config
        self.runtime = runtime
        self.turn = threading.RLock()
        self._version: Version | None = None
        self._noted = Outcome(b"", SeqNo(0), MINIMUM)
        self._closed: str | None = None
        self.pace = Pace()
        enrol(self, Stage.SHARDS)

    def after_fork_in_child(self) -> None:
        """Make a new lock: the thread that held it is not in the child. The version is whole: it is only replaced."""
        self.turn = threading.RLock()

    def close(self, why: str) -> None:
        """Ask nothing more of the location. Later calls raise InvalidUsage with `why`."""
        self._closed = why

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        """Raise InvalidUsage when it is closed."""
        if self._closed is not None:
            raise InvalidUsage(f"shard {self.shard}: {self._closed}", shard=self.shard)

    @property
    def version(self) -> Version:
        """The newest version this process knows; fetched when it knows none."""
        return self._version or self.fetch()

    @property
    def known(self) -> Version | None:
        """The newest version this process knows; None when it knows none."""
        return self._version

    @property
    def state(self) -> State:
        return self.version.state

    @property
    def seen(self) -> SeqNo:
        """The newest seqno of which this process knows that it is there. It may not know that version."""
        return max(self._noted.seqno, self.version.seqno)

    @property
    def upper(self) -> Antichain:
        return self.state.upper.join(self._noted.upper)

    @property
    def places_appends(self) -> bool:
        """Whether a server chooses the time of appends at the next time."""
        return self.taker is not None and self.state.format >= PARTS_AT_A_TIME

    def note(self, outcome: Outcome) -> None:
        """Know that an append was committed, without reading the log up to there."""
        with self.turn:
            newest = max(self._noted.seqno, outcome.seqno)
            self._noted = Outcome(b"", newest, self._noted.upper.join(outcome.upper))

    def times(self) -> Times:
        """How a call reads and shows the shard's times. A shard never changes that, so any version tells."""
        return Times(self.state.times, self.consensus.now)

    def refused(self, refusal: r.Refusal) -> PersistError:
        return refused(self.shard, refusal, None if self._version is None else self._version.state.times)

    def fetch(self) -> Version:
        """The newest version there is (linearizable). Raises NotFound when there is no such shard."""
        if (version := self.try_fetch()) is None:
            raise NotFound(
                f"there is no shard {self.shard!r} in this location; create it with client.open_shard(name, schema)",
                shard=self.shard,
            )
        return version

    def try_fetch(self) -> Version | None:
        """The newest version there is (linearizable); None when there is no such shard."""
        self.check_open()
        with self.turn:
            if (known := self._version) is None:
                self._version = fetch_newest(self.reads, self.consensus, self.shard)
            else:
                self._version = fetch_newer(self.reads, self.consensus, self.shard, known)
                if self._version.seqno > known.seqno:
                    self.pace.overtaken()
            return self._version

    def take_over(self, version: Version) -> None:
        """Know a version that was just read from the log, unless a newer one is known. Call it with the turn taken."""
        if self._version is None or self._version.seqno < version.seqno:
            self._version = version

    def forget(self) -> None:
        """Forget the known version, as it has been taken back."""
        with self.turn:
            self._version, self._noted = None, Outcome(b"", SeqNo(0), MINIMUM)

    def commit(self, build: Build, timeout_s: float | None = None, token: bytes | None = None) -> Committed:
        """Commit the command that `build` makes, or raise its refusal. If there is nothing to do, that is a success."""
        answer = self.try_commit(build, timeout_s, token)
        if isinstance(answer, Committed):
            return answer
        if isinstance(answer, r.AlreadyDone):
            version = self.version
            seqno = answer.outcome.seqno if answer.outcome else version.seqno
            return Committed(seqno, token or b"", version.state, version.state, 0)
        raise self.refused(answer)

    def try_commit(
        self, build: Build, timeout_s: float | None = None, token: bytes | None = None
    ) -> Committed | r.Refusal:
        """Commit the command that `build` makes, or return its refusal by a freshly read state."""
        deadline = self.runtime.deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        answers = try_commit_all((Wanted(self, build),), deadline, token or self.runtime.token())
        return answers.refusals[0] if isinstance(answers, Undone) else answers[0]

    def others_made_room(self, refusal: r.Refusal, deadline: Deadline) -> bool:
        """Whether the state was full and another process has made room since. Waits up to `ROOM_S` for that.

        A process that is refused for want of room makes room itself, which is much work. Without this wait, all
        processes that are refused at once would do the same work.
        """
        if not isinstance(refusal, r.InlineFull) or not self.pace.is_others_duty(self.version):
            return False
        full = self.state.inline_size
        patience = self.runtime.deadline(min(deadline.remaining_s(), ROOM_S * self.runtime.random.uniform(0.5, 1.5)))
        while not patience.has_passed():
            patience.pause(ROOM_PAUSE_S)
            if self.fetch().state.inline_size < full:
                return True
        return False

    def prepare(self, build: Build, token: bytes) -> Prepared | r.Refusal:
        """The transition that `build` makes of the newest version this process knows, or its refusal."""
        version = self._version if self._version is not None else self.ground()
        seqno, now = SeqNo(version.seqno + 1), self.consensus.now()
        command = build(version.state, now)
        diff = change(version.state, seqno, command)
        if not isinstance(diff, StateDiff):
            return diff
        state = apply_diff(version.state, diff)
        check_change(version.state, diff, state, seqno)
        row = next_row(version, diff, state, token, stored_name(command), now)
        return Prepared(self, version, row, encode_row(row, state.format), state)

    def adopt(self, prepared: Prepared, took_s: float) -> None:
        """Take over the version that was just committed, by an attempt that took `took_s` seconds.

        Resolving an unknown outcome may have fetched versions newer than this one.
        """
        if self._version is None or self._version.seqno < prepared.row.seqno:
            self._version = after(prepared.row, prepared.data, prepared.state)
            self.pace.won(prepared.row.seqno, took_s)

    def ground(self) -> Version:
        """The newest version this process knows, fetched when it knows none; v0 where there is no such shard."""
        return self._version or self.try_fetch() or Version(SeqNo(0), State(), bytes(16))


def try_commit_all(wanted: Sequence[Wanted], deadline: Deadline, token: bytes) -> Sequence[Done] | Undone:
    """Commit all transitions at once, or return their refusals. At least one, of one location, and each shard once.

    All transitions have the same token. AlreadyDone with an outcome says that a call with this token was committed
    before. Raises TimedOut when races were lost until `deadline`; then nothing was changed. Raises Indeterminate when
    it is not known whether they were committed; to find out, repeat the call with the same token.
    """
    machines = [one.machine for one in wanted]
    turns: list[Lock] = []
    give_back = giving_back(turns)
    try:
        # Turns are always taken in the order of shard names. Otherwise two threads could wait for each other.
        for machine in sorted(machines, key=_name):
            machine.check_open()
            turns += taking(machine.turn)
        return within(deadline, partial(_commit, wanted, machines, deadline, token))
    finally:
        give_back()


_name = attrgetter("shard")


def _commit(
    wanted: Sequence[Wanted], machines: Sequence[Machine], deadline: Deadline, token: bytes
) -> Sequence[Done] | Undone:
    """The loop itself, with the turns of all machines taken."""
    if machines[0].taker is not None:
        made_room = partial(_others_made_room, machines, deadline=deadline)
        return commit_by_commands(wanted, machines[0].taker, deadline, token, made_room)
    is_fresh, attempts = give_way(machines, deadline), 0
    while True:
        started = deadline.runtime.monotonic()
        prepared, refusals = _prepare(wanted, token)
        if refusals:
            if any(map(_is_repeated, refusals.values())):
                return _done_before(wanted, refusals, token)
            if is_fresh and not _others_made_room(machines, refusals, deadline):
                return _refused(wanted, refusals)
            # A version may be stale: read once more before reporting a refusal or that nothing has to be done.
            _fetch(machines)
            is_fresh = True
            continue
        attempts += 1
        if until_in_log(partial(compare_and_set_rows, prepared), prepared, deadline):
            took_s = deadline.runtime.monotonic() - started
            for one in prepared:
                one.machine.adopt(one, took_s)
            return [one.committed(attempts) for one in prepared]
        if deadline.has_passed():
            _fetch(machines)  # otherwise the next call starts from the same stale versions, and loses again
            raise _timed_out(prepared, deadline, attempts)
        wait_after_loss(machines, deadline, deadline.runtime.monotonic() - started)
        is_fresh = True


def _prepare(wanted: Sequence[Wanted], token: bytes) -> tuple[list[Prepared], dict[int, r.Refusal]]:
    """The transitions that can be committed, and the refusals of the others by their place."""
    prepared: list[Prepared] = []
    refusals: dict[int, r.Refusal] = {}
    for at, (machine, build) in enumerate(wanted):
        answer = machine.prepare(build, token)
        if isinstance(answer, Prepared):
            prepared.append(answer)
        else:
            refusals[at] = answer
    return prepared, refusals


def compare_and_set_rows(prepared: Sequence[Prepared]) -> bool:
    """Append the rows of all by one compare-and-set. Returns whether it won."""
    first = prepared[0]
    if len(prepared) == 1:
        return first.machine.consensus.compare_and_set(first.machine.shard, *first.change)
    return first.machine.consensus.compare_and_set_many({one.shard: one.change for one in prepared})


def _fetch(machines: Sequence[Machine]) -> None:
    for machine in machines:
        machine.try_fetch()


def _others_made_room(machines: Sequence[Machine], refusals: Mapping[int, r.Refusal], deadline: Deadline) -> bool:
    """Whether all refusals were for want of room, and other processes have made room since."""
    return all(machines[at].others_made_room(refusal, deadline) for at, refusal in refusals.items())


def _refused(wanted: Sequence[Wanted], refusals: dict[int, r.Refusal]) -> Sequence[Done] | Undone:
    done = [refusal for refusal in refusals.values() if isinstance(refusal, r.AlreadyDone)]
    return done if len(done) == len(wanted) else Undone(refusals)


def _done_before(wanted: Sequence[Wanted], refusals: Mapping[int, r.Refusal], token: bytes) -> Sequence[Done]:
    """What an earlier call with this token did, for each shard.

    SUBTLE: the earlier call did all or nothing, so one shard that remembers it speaks for all. The known version of
    another shard may be from before that call, so it is read again. That shard may also have forgotten the call (a
    writer remembers its last few tokens, and ends with its lease), and would then refuse a repetition. Its answer is
    AlreadyDone without an outcome.
    """
    done: list[Done] = []
    for at, (machine, build) in enumerate(wanted):
        answer: Prepared | r.Refusal | None = refusals.get(at)
        if answer is None or not _is_repeated(answer):
            machine.try_fetch()
            answer = machine.prepare(build, token)
        done.append(answer if isinstance(answer, r.AlreadyDone) else r.AlreadyDone())
    return done


def _is_repeated(refusal: r.Refusal | Prepared) -> bool:
    """Whether the refusal says that the token was seen. Only this refusal can be trusted from a stale state."""
    return isinstance(refusal, r.AlreadyDone) and refusal.outcome is not None


def _timed_out(prepared: Sequence[Prepared], deadline: Deadline, attempts: int) -> TimedOut:
    shards, command = [one.shard for one in prepared], prepared[0].row.command
    return TimedOut(
        f"{named(shards)}: gave up after {deadline.timeout_s:g} s and {attempts} lost races for {command}; this call "
        "changed nothing. Try again, or with a longer timeout",
        shard=shards[0], timeout_s=deadline.timeout_s,
    )  # fmt: skip
