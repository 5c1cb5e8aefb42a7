"""The commit loop: the only way in which a shard changes.

Fetch the newest state (cached), build the command afresh, apply it, validate, encode the change, compare-and-set. A
lost
race is tried again from the newest state; a refusal is reported only after a fresh read; an indeterminate outcome is
resolved from the log, never guessed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.state import State, Version
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change
from persist_lib.errors import (
    CompactionRefused,
    Determinate,
    HoldConflict,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    NotFound,
    PersistError,
    SchemaMismatch,
    ShardFinished,
    SinceViolation,
    StillRead,
    TimedOut,
    UpperMismatch,
)
from persist_lib.format.log import LogRow, encode_row
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Blob, Change, Consensus
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.shard.contention import Pace, give_way, wait_after_loss
from persist_lib.shard.log import after, fetch_newer, fetch_newest, next_row, row_to_follow
from persist_lib.shard.refusals import after_expiry, hold_conflict, rarely_told

DOUBT_PAUSE_S = 0.01
ROOM_S = 0.5
ROOM_PAUSE_S = 0.03
"""How long somebody else is given to make room in a full state, and how often to look."""


class Committed(NamedTuple):
    """An acknowledged transition: what it is called in the log, and the states around it."""

    seqno: SeqNo
    token: bytes
    before: State
    after: State
    attempts: int


class Prepared(NamedTuple):
    """A transition that only has to be committed: the version it follows, its row, the bytes of that, and the state."""

    before: Version
    row: LogRow
    data: bytes
    state: State

    @property
    def change(self) -> Change:
        """What Consensus is asked to append."""
        return row_to_follow(self.before), self.data

    def committed(self, attempts: int) -> Committed:
        """How it is acknowledged."""
        return Committed(self.row.seqno, self.row.token, self.before.state, self.state, attempts)


Build = Callable[[State, int], c.Command]
"""Makes a command from the newest state and the store's clock (ms). Called again after every lost race."""


class Machine:
    """One shard as one process sees it. Shared by all its handles there, so that they never race each other.

    `version` only advances. All methods are safe to call from several threads; whoever commits holds `turn`.
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
        self.config = config
        self.runtime = runtime
        self.turn = threading.RLock()
        self._version: Version | None = None
        self._closed: str | None = None
        self.pace = Pace()
        enrol(self, Stage.SHARDS)

    def after_fork_in_child(self) -> None:
        """Whoever held the lock is not here. The version is whole: it is only ever replaced."""
        self.turn = threading.RLock()

    def close(self, why: str) -> None:
        """Ask nothing more of the location, and say `why`."""
        self._closed = why

    @property
    def is_closed(self) -> bool:
        """Whether the client that it belongs to is closed."""
        return self._closed is not None

    def _check_open(self) -> None:
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
        """The newest state this process knows."""
        return self.version.state

    def fetch(self) -> Version:
        """The newest version there is (linearizable). Raises NotFound when there is no such shard."""
        if (version := self.try_fetch()) is None:
            raise NotFound(
                f"there is no shard {self.shard!r} in this location; create it with client.open_shard(name, schema)",
                shard=self.shard,
            )
        return version

    def try_fetch(self) -> Version | None:
        """The newest version there is, None when there is no such shard."""
        self._check_open()
        with self.turn:
            if (known := self._version) is None:
                self._version = fetch_newest(self.reads, self.consensus, self.shard)
            else:
                self._version = fetch_newer(self.reads, self.consensus, self.shard, known)
                if self._version.seqno > known.seqno:
                    self.pace.overtaken()
            return self._version

    def forget(self) -> None:
        """Know no version any more: what was known has been taken back."""
        with self.turn:
            self._version = None

    def commit(self, build: Build, timeout_s: float | None = None, token: bytes | None = None) -> Committed:
        """Commit what `build` makes, or raise why not. Nothing to do is a success with no seqno of its own."""
        answer = self.try_commit(build, timeout_s, token)
        if isinstance(answer, Committed):
            return answer
        if isinstance(answer, c.AlreadyDone):
            version = self.version
            seqno = answer.outcome.seqno if answer.outcome else version.seqno
            return Committed(seqno, token or b"", version.state, version.state, 0)
        raise refused(self.shard, answer)

    def try_commit(
        self, build: Build, timeout_s: float | None = None, token: bytes | None = None
    ) -> Committed | c.Refusal:
        """Commit what `build` makes, or answer the refusal of a state that was read afresh."""
        self._check_open()
        deadline = self.runtime.deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        token = token or self.runtime.token()
        with self.turn:
            return within(deadline, lambda: self._commit(build, deadline, token))

    def _commit(self, build: Build, deadline: Deadline, token: bytes) -> Committed | c.Refusal:
        is_fresh, attempts = give_way((self,), deadline), 0
        while True:
            started = self.runtime.monotonic()
            prepared = self.prepare(build, token)
            if not isinstance(prepared, Prepared):
                if is_remembered(prepared) or (is_fresh and not self.others_made_room(prepared, deadline)):
                    return prepared
                # The version may be stale: look once more before saying no, or that it is so already.
                self.try_fetch()
                is_fresh = True
                continue
            attempts += 1
            if self._compare_and_set(prepared, deadline):
                self.adopt(prepared, self.runtime.monotonic() - started)
                return prepared.committed(attempts)
            if deadline.has_passed():
                self.try_fetch()  # or the next call starts from the same stale version, and loses again
                raise timed_out((self.shard,), deadline, f"{attempts} lost races for {prepared.row.command}")
            wait_after_loss((self,), deadline, self.runtime.monotonic() - started)
            is_fresh = True

    def others_made_room(self, refusal: c.Refusal, deadline: Deadline) -> bool:
        """Whether it was refused for want of room, and others have made some meanwhile.

        Whoever is told that a state is full makes room, which is much work. Told all at once, all would do the same.
        """
        if not isinstance(refusal, c.InlineFull) or not self.pace.is_others_duty(self.version):
            return False
        full = self.state.inline_size
        patience = self.runtime.deadline(min(deadline.remaining_s(), ROOM_S * self.runtime.random.uniform(0.5, 1.5)))
        while not patience.has_passed():
            patience.pause(ROOM_PAUSE_S)
            if self.fetch().state.inline_size < full:
                return True
        return False

    def prepare(self, build: Build, token: bytes) -> Prepared | c.Refusal:
        """What `build` makes of the newest version this process knows, or why that says no."""
        version = self._version if self._version is not None else self._create_or_fetch()
        seqno, now = SeqNo(version.seqno + 1), self.consensus.now()
        command = build(version.state, now)
        diff = change(version.state, seqno, command)
        if not isinstance(diff, StateDiff):
            return diff
        state = apply_diff(version.state, diff)
        check_change(version.state, diff, state, seqno)
        row = next_row(version, diff, state, token, type(command).__name__, now)
        return Prepared(version, row, encode_row(row, state.format), state)

    def adopt(self, prepared: Prepared, took_s: float) -> None:
        """Know the version that was just committed, by an attempt that took so long (s).

        SUBTLE: to find out about an unknown outcome, newer versions than this one may have been fetched.
        """
        if self._version is None or self._version.seqno < prepared.row.seqno:
            self._version = after(prepared.row, prepared.data, prepared.state)
            self.pace.won(prepared.row.seqno, took_s)

    def _create_or_fetch(self) -> Version:
        return self.try_fetch() or Version(SeqNo(0), State(), bytes(16))

    def _compare_and_set(self, prepared: Prepared, deadline: Deadline) -> bool:
        """Whether it is in the log now. Resolves what is indeterminate, or raises Indeterminate."""
        change = prepared.change
        return until_decided(lambda: self.consensus.compare_and_set(self.shard, *change), [(self, prepared)], deadline)

    def is_in_log(self, prepared: Prepared) -> bool | None:
        """Whether its row is there; False when another's is, for ever; None when there is no row in its place."""
        rows = self.consensus.scan(self.shard, prepared.row.seqno, 1)
        if not rows or rows[0].seqno != prepared.row.seqno:
            return None
        return rows[0].data == prepared.data

    def remembers(self, prepared: Prepared) -> bool | None:
        """Whether it was committed, as far as the newest state remembers its last appends; None when it does not."""
        state, row = self.fetch().state, prepared.row
        known = (*state.outcomes, *(outcome for writer in state.writers.values() for outcome in writer.outcomes))
        if any((outcome.token, outcome.seqno) == (row.token, row.seqno) for outcome in known):
            return True
        is_kept = row.diff.outcomes is not None and state.outcomes[0].seqno < row.seqno
        return False if is_kept else None


def until_decided(send: Callable[[], bool], sent: Sequence[tuple[Machine, Prepared]], deadline: Deadline) -> bool:
    """Whether the rows that `send` appends together, by one compare-and-set, are in their logs now.

    Resolves what is indeterminate, or raises Indeterminate. SUBTLE: after an indeterminate answer the rows may still
    arrive later, so that "not there" decides nothing. The same bytes are sent again until some row is there: ours, or
    another's, which keeps ours out for ever.
    """
    doubt: PersistError | None = None
    while True:
        try:
            won = send()
            if won or doubt is None:
                return won
            is_done = _is_done(sent)
        except Indeterminate as error:
            doubt = doubt or error
        except Determinate:
            if doubt is None:
                raise
        except InvalidUsage as error:  # say, a password that was changed meanwhile: no further attempt helps
            if doubt is None:
                raise
            raise _in_doubt(sent, error) from error
        else:
            if is_done is None:
                raise _in_doubt(sent, doubt) from doubt
            return is_done
        if deadline.has_passed():
            raise _in_doubt(sent, doubt) from doubt
        deadline.pause(DOUBT_PAUSE_S)


def _is_done(sent: Sequence[tuple[Machine, Prepared]]) -> bool | None:
    """What became of rows that were sent with an unknown outcome, and refused when sent again; None: nothing tells.

    SUBTLE: refused means that in at least one shard our place is taken. Where it is not, nothing is decided. Where it
    is taken by our row, all of ours are there, as they came together; where by another's, ours can never come to that
    place, and so to none, however late a copy of the request arrives. Which shard it is does not matter, nor that they
    are looked at one after the other: what is in a place stays there. Only truncation can hide it; then the state's
    memory of its last appends tells.
    """
    for look in (Machine.is_in_log, Machine.remembers):
        for machine, prepared in sent:
            if (is_ours := look(machine, prepared)) is not None:
                return is_ours
    return None


def _in_doubt(sent: Sequence[tuple[Machine, Prepared]], cause: PersistError) -> Indeterminate:
    shards, row = [machine.shard for machine, _ in sent], sent[0][1].row
    token, appended = (
        row.token,
        row.diff.trace.added[-1] if row.diff.trace and row.command == "CompareAndAppend" else None,
    )
    what = f"append of [{appended.lower}, {appended.upper})" if appended else f"change ({row.command})"
    return Indeterminate(
        f"{named(shards)}: it is not known whether the {what} with token {token.hex()} was committed ({cause}). "
        "Repeat the call with the same token and it answers what happened; delete nothing that it refers to",
        shard=shards[0], token=token,
    )  # fmt: skip


def is_remembered(refusal: c.Refusal | Prepared) -> bool:
    """Whether it says that the token was seen: the one refusal that is true of a stale state, for it stays true."""
    return isinstance(refusal, c.AlreadyDone) and refusal.outcome is not None


def timed_out(shards: Sequence[ShardId], deadline: Deadline, what: str) -> TimedOut:
    """The error for a call that ran out of time with nothing changed."""
    return TimedOut(
        f"{named(shards)}: gave up after {deadline.timeout_s:g} s and {what}; this call changed nothing. "
        "Try again, or with a longer timeout",
        shard=shards[0], timeout_s=deadline.timeout_s,
    )  # fmt: skip


def named(shards: Sequence[ShardId]) -> str:
    """How messages name one shard or several."""
    return f"shard {shards[0]}" if len(shards) == 1 else f"shards {', '.join(shards)}"


def refused(shard: ShardId, refusal: c.Refusal) -> PersistError:
    """The exception that tells a caller of a refusal: what was asked, what is so, what to do."""
    match refusal:
        case c.Finished():
            return ShardFinished(f"shard {shard} is finished for good: it can neither be read nor written", shard=shard)
        case c.NotLive(ids):
            return LeaseExpired(
                f"shard {shard}: {', '.join(ids)} is not live: its lease ended without a heartbeat, or it was closed. "
                f"This change was not made. {after_expiry(ids)}",
                shard=shard, id=ids[0] if ids else "",
            )  # fmt: skip
        case c.WrongUpper(expected, actual) if actual.is_top():
            return UpperMismatch(
                f"shard {shard}: the batch starts at {expected}, but the shard is closed for writing: its upper is "
                f"{actual}, for ever. This append wrote nothing. Whether it holds this data, only reading tells",
                shard=shard, expected=expected, actual=actual,
            )  # fmt: skip
        case c.WrongUpper(expected, actual):
            return UpperMismatch(
                f"shard {shard}: the batch starts at {expected}, but upper is {actual}: another writer was first, or "
                f"there "
                f"is a gap. Nothing was written; decide from {actual} on",
                shard=shard, expected=expected, actual=actual,
            )  # fmt: skip
        case c.BelowSince(asked, since):
            return SinceViolation(
                f"shard {shard}: nothing can be held at {asked}. History before {since} is given up, or the hold is "
                f"there already and never moves back. Hold {since} or later",
                shard=shard, as_of=asked, since=since,
            )  # fmt: skip
        case c.WrongOpaque(name, expected, actual):
            return HoldConflict(
                f"shard {shard}: {hold_conflict(name, expected, actual)}. This change was not made",
                shard=shard, name=name, expected=expected, actual=actual,
            )  # fmt: skip
        case c.NotEquivalent(reason):
            return CompactionRefused(
                f"shard {shard}: the compaction was refused, as its output is not what its inputs hold: {reason}. "
                "It was not applied. This is damage or a bug: run `persist scrub`",
                shard=shard, reason=reason,
            )  # fmt: skip
        case c.InputsGone(inputs):
            return CompactionRefused(
                f"shard {shard}: the batches {inputs} were replaced meanwhile; plan again",
                shard=shard, reason="inputs gone",
            )  # fmt: skip
        case c.WrongSchema(newest, reason):
            return SchemaMismatch(f"shard {shard}: {reason}", shard=shard, newest=newest)
        case c.Held(by):
            return StillRead(
                f"shard {shard} is still read by {', '.join(by)}; close the readers and release the holds first",
                shard=shard, by=by,
            )  # fmt: skip
        case c.Unknown(("shard",)):
            return NotFound(f"there is no shard {shard!r} in this location; create it first", shard=shard)
        case _:
            return rarely_told(shard, refusal)
