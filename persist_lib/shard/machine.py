"""One shard as one process sees it: what it knows of its log, and the transitions that it prepares for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import msgspec

from persist_lib.config import Config
from persist_lib.core import refusals as r
from persist_lib.core.commands import Command, NamesMember, stored_name
from persist_lib.core.cost import Cost
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import PARTS_AT_A_TIME
from persist_lib.core.plan.upkeep import rollup_is_duty
from persist_lib.core.state import Outcome, State, Version
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change
from persist_lib.errors import InvalidUsage, NotFound, PersistError
from persist_lib.format.log import LogRow, encode_row
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Blob, Change, Consensus, PushesRows
from persist_lib.location.commands import ROLL_UP
from persist_lib.location.wrap.around import takes_commands
from persist_lib.location.wrap.deadline import having
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.shard.contention import Pace
from persist_lib.shard.log import IN_TURN, after, apply_rows, fetch_newer, fetch_newest, next_row, row_to_follow
from persist_lib.shard.refusals import refused
from persist_lib.times import Times

ROOM_S = 0.5
ROOM_PAUSE_S = 0.03
"""How long to wait for another process to make room in a full state, and the pause between looks."""
RECENT_S = 0.1
"""How long after a look a command is made by it without another one. Too old, it costs a lost race."""

T = TypeVar("T")
_moments = itertools.count(1)
"""The moments of this process at which something began, in order."""
_begun: ContextVar[int] = ContextVar("persist_call_begun", default=0)


def moment() -> int:
    """This moment: later than those that were asked for before."""
    return next(_moments)


def as_one_call(call: Callable[[], T]) -> T:
    """Return the result of `call`, in which what `Shard.newest` answers may be of any moment since this began."""
    return having(_begun, moment(), call)


class Committed(NamedTuple):
    """An acknowledged transition: its seqno and token in the log, the states before and after it, and the attempts.

    In a row of several commands, `before` is the state that the ones before it left, and `after` that of the whole row.
    With an `outcome` of an append, both may be one and the same, an older state, as nothing was read back.
    `due`: what a server says that its sender has to do. `after` is the newest state then.
    """

    seqno: SeqNo
    token: bytes
    before: State
    after: State
    attempts: int
    outcome: Outcome | None = None
    due: tuple[str, ...] = ()

    def calls_for(self, every: int) -> tuple[str, ...]:
        """The upkeep that the writer of this append has to do now. A rollup is due each `every` transitions."""
        # Where nothing was read back, the states are old ones, by which it would be everybody's duty.
        is_own = self.before is not self.after and rollup_is_duty(self.seqno, self.before, self.after, every)
        return tuple(dict.fromkeys((*self.due, ROLL_UP))) if is_own else self.due


Build = Callable[[State, int], Command]
"""Makes a command from the newest state and the store's clock (ms). Called again after every lost race."""

Done = Committed | r.AlreadyDone
"""A success: a transition, or nothing to change."""


class Undone(NamedTuple):
    """Nothing was changed. Maps the place of each refused transition to its refusal. Never empty.

    `due`: what a server says that the sender of the first one has to do before it tries again.
    """

    refusals: dict[int, r.Refusal]
    due: tuple[str, ...] = ()


class Prepared(NamedTuple):
    """A transition that is ready to commit: the version before it, its row, the row's bytes, and the state after it."""

    machine: Shard
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

        An append that was sent again to another server has the same token in another row, which may be the one
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


class Shard:
    """One shard as one process sees it; with a `member`, as the member of a collection.

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
        member: str = "",
    ) -> None:
        self.shard = shard
        self.member = member
        self.blob = blob
        self.reads = self.lookups = reads or blob
        self.consensus = consensus
        self.taker = takes_commands(consensus)
        self.config = config
        self.runtime = runtime
        self.turn = threading.RLock()
        self.opens_by = IN_TURN
        """By whose threads a rollup is fetched while the rows after it are."""
        self._version: Version | None = None
        self._newest_after = 0
        """A moment after which the known version was the newest there was."""
        self._looked_s = float("-inf")
        """When that was told, by the monotonic clock."""
        self._noted = Outcome(b"", SeqNo(0), MINIMUM)
        self._closed: str | None = None
        self.pace = Pace()
        self.table_of: Callable[[str], str] = lambda _collection: ""
        """The name that a collection has now, by its id; empty where that is not known."""
        self.may_begin: Callable[[str, str], None] = lambda _shard, _duty: None
        """Raises Paused for a duty that is paused on a shard or a table."""
        self.allot: Callable[[str, Sequence[Cost]], int] = lambda _shard, costs: len(costs)
        """How many compactions of a shard at these costs may begin, by the budgets of rules. It charges them."""
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
    def alone_at(self) -> Version | None:
        """The newest version this process knows, if it made that itself and knows of no live writer of another one.

        So it is most likely the newest there is. A shard server lets others write in between: then None.
        """
        version = self._version
        return version if version and self.taker is None and self.pace.is_alone(version) else None

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
        table = self.table_of(refusal.member.partition("/")[0]) if isinstance(refusal, r.OfMember) else ""
        return refused(self.shard, refusal, None if self._version is None else self._version.state.times, table)

    def addressed(self, command: Command, state: State) -> Command:
        """The command, naming the member that this machine is for, if the shard is one.

        Only then, as a server of the release before knows no members.
        """
        if not (self.member and state.member and isinstance(command, NamesMember)):
            return command
        return msgspec.structs.replace(command, member=self.member)

    def check_same(self, state: State) -> None:
        """Raise MemberOf if the shard is a member by now, and this machine is for the shard by its name."""
        if state.member and state.member != self.member:
            raise self.refused(r.OfMember(state.member))

    def fetch(self) -> Version:
        """The newest version there is (linearizable). Raises NotFound when there is no such shard."""
        if (version := self.try_fetch()) is None:
            raise NotFound(
                f"there is no shard {self.shard!r} in this location; create it with client.open_shard(name, schema)",
                shard=self.shard,
            )
        return version

    def newest(self) -> Version:
        """The newest version there was at some moment of the call that this is part of (`as_one_call`), or is now."""
        self.check_open()
        if (begun := _begun.get()) and self._newest_after > begun and (version := self._version) is not None:
            return version
        return self.fetch()

    @property
    def is_recent(self) -> bool:
        """Whether a version is known that was the newest a moment ago. Commands that are made by it show if it is."""
        return self._version is not None and self.runtime.monotonic() - self._looked_s <= RECENT_S

    # What this process was sent without a request is for those that follow: what was committed before a call may be
    # missing. Opening, `fetch`, commits and audits scan the log.

    def follow(self) -> Version:
        """The newest version that this process was told of; as `fetch` reads it, where only the log can tell."""
        return self.told() or self.fetch()

    def told(self) -> Version | None:
        """The newest version that this process was told of, which it knows then; None if only the log can tell.

        A pushed row is checked as one that is read: it must follow the known version by its digest, apply, and pass
        all checks. If it does not, the log is asked, which tells whether it is damaged.
        """
        self.check_open()
        with self.turn:
            known, consensus = self.known, self.consensus
            if known is None or not isinstance(consensus, PushesRows):
                return None
            if (rows := consensus.pushed(self.shard, known.seqno)) is None:
                return None
            if rows:
                try:
                    self.take_over(apply_rows(self.shard, known, list(rows)))
                except PersistError:
                    return None
                self.pace.overtaken()
            return self.known

    def try_fetch(self) -> Version | None:
        """The newest version there is (linearizable); None when there is no such shard."""
        self.check_open()
        with self.turn:
            asked = moment()
            if (known := self._version) is None:
                self._version = fetch_newest(self.reads, self.consensus, self.shard, self.opens_by)
            else:
                self._version = fetch_newer(self.reads, self.consensus, self.shard, known)
                if self._version.seqno > known.seqno:
                    self.pace.overtaken()
            self._looked(asked)
            return self._version

    def _looked(self, asked: int) -> None:
        """Know that the known version was the newest after a moment. Call it with the turn taken, and the version."""
        self._newest_after, self._looked_s = max(self._newest_after, asked), self.runtime.monotonic()

    def take_over(self, version: Version) -> None:
        """Know a version that was just read from the log, unless a newer one is known. Call it with the turn taken."""
        if self._version is None or self._version.seqno < version.seqno:
            self._version = version

    def forget(self) -> None:
        """Forget the known version, as it has been taken back."""
        with self.turn:
            self._version, self._noted = None, Outcome(b"", SeqNo(0), MINIMUM)
            self._newest_after, self._looked_s = 0, float("-inf")

    def prepare(self, build: Build, token: bytes) -> Prepared | r.Refusal:
        """The transition that `build` makes of the newest version this process knows, or its refusal."""
        version = self._version if self._version is not None else self.ground()
        seqno, now = SeqNo(version.seqno + 1), self.consensus.now()
        command = self.addressed(build(version.state, now), version.state)
        diff = change(version.state, seqno, command)
        if not isinstance(diff, StateDiff):
            return diff
        state = apply_diff(version.state, diff)
        check_change(version.state, diff, state, seqno)
        row = next_row(version, diff, state, token, stored_name(command), now)
        return Prepared(self, version, row, encode_row(row, state.format), state)

    def adopt(self, prepared: Prepared, took_s: float, begun: int) -> None:
        """Take over the version that was just committed, by an attempt that took `took_s` seconds from a moment on.

        It was the newest when it was committed. Resolving an unknown outcome may have fetched versions newer than it.
        """
        if self._version is None or self._version.seqno < prepared.row.seqno:
            self._version = after(prepared.row, prepared.data, prepared.state)
            self.pace.won(prepared.row.seqno, took_s)
        self._looked(begun)

    def ground(self) -> Version:
        """The newest version this process knows, fetched when it knows none; v0 where there is no such shard."""
        return self._version or self.try_fetch() or Version(SeqNo(0), State(), bytes(16))

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


class Wanted(NamedTuple):
    """A transition of one shard."""

    machine: Shard
    build: Build
