"""The commit loop: the only way in which a shard changes.

Fetch the newest state (cached), build the command afresh, apply it, validate, encode the change, compare-and-set. A
lost
race is tried again from the newest state; a refusal is reported only after a fresh read; an indeterminate outcome is
resolved from the log, never guessed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from persist_lib.config import Config, Deadline, Runtime
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
from persist_lib.format.encoding import encode_row
from persist_lib.history import after, fetch_newer, fetch_newest, next_row, row_to_follow
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.deadline import within

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.25


class Committed(NamedTuple):
    """An acknowledged transition: what it is called in the log, and the states around it."""

    seqno: SeqNo
    token: bytes
    before: State
    after: State
    attempts: int


Build = Callable[[State, int], c.Command]
"""Makes a command from the newest state and the store's clock (ms). Called again after every lost race."""


class Machine:
    """One shard as one process sees it. Shared by all its handles there, so that they never race each other.

    `version` only advances. All methods are safe to call from several threads.
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
        self._lock = threading.RLock()
        self._version: Version | None = None
        _everywhere.add(self)

    def after_fork_in_child(self) -> None:
        """Whoever held the lock is not here. The version is whole: it is only ever replaced."""
        self._lock = threading.RLock()

    @property
    def version(self) -> Version:
        """The newest version this process knows; fetched when it knows none."""
        return self._version or self.fetch()

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
        with self._lock:
            if self._version is None:
                self._version = fetch_newest(self.reads, self.consensus, self.shard)
            else:
                self._version = fetch_newer(self.reads, self.consensus, self.shard, self._version)
            return self._version

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
        deadline = self.runtime.deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        token = token or self.runtime.token()
        with self._lock, within(deadline):
            return self._commit(build, deadline, token)

    def _commit(self, build: Build, deadline: Deadline, token: bytes) -> Committed | c.Refusal:
        is_fresh, attempts, pause = False, 0, FIRST_PAUSE_S
        while True:
            version = self._version if self._version is not None else self._create_or_fetch()
            seqno, now = SeqNo(version.seqno + 1), self.consensus.now()
            command = build(version.state, now)
            diff = change(version.state, seqno, command)
            if not isinstance(diff, StateDiff):
                if is_fresh or (isinstance(diff, c.AlreadyDone) and diff.outcome is not None):
                    return diff
                # `version` may be stale: look once more before saying no, or that it is so already. Only a token that
                # was seen stays seen.
                self.try_fetch()
                is_fresh = True
                continue
            state = apply_diff(version.state, diff)
            check_change(version.state, diff, state, seqno)
            row = next_row(version, diff, state, token, type(command).__name__, now)
            data = encode_row(row)
            attempts += 1
            if self._compare_and_set(version, data, deadline, token):
                # SUBTLE: to find out about an unknown outcome, newer versions than this one may have been fetched.
                if self._version is None or self._version.seqno < seqno:
                    self._version = after(row, data, state)
                return Committed(seqno, token, version.state, state, attempts)
            if deadline.has_passed():
                self.try_fetch()  # or the next call starts from the same stale version, and loses again
                raise self._timed_out(deadline, f"{attempts} lost races for {type(command).__name__}")
            if attempts > 1:
                deadline.pause(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)
            self.try_fetch()
            is_fresh = True

    def _create_or_fetch(self) -> Version:
        return self.try_fetch() or Version(SeqNo(0), State(), bytes(16))

    def _compare_and_set(self, version: Version, data: bytes, deadline: Deadline, token: bytes) -> bool:
        """Whether `data` is the row after `version`. Resolves what is indeterminate, or raises Indeterminate.

        SUBTLE: after an indeterminate answer the row may still arrive later, so that "not there" decides nothing. The
        same bytes are sent again until some row is there: ours, or another's, which keeps ours out for ever.
        """
        expected, seqno = row_to_follow(version), SeqNo(version.seqno + 1)
        doubt: PersistError | None = None
        while True:
            try:
                won = self.consensus.compare_and_set(self.shard, expected, data)
                if won or doubt is None:
                    return won
                rows = self.consensus.scan(self.shard, seqno, 1)
                if rows and rows[0].seqno == seqno:
                    return rows[0].data == data
                # Decided, but truncated since: only the state's memory of tokens can tell.
                return self._remembers(token, doubt)
            except Indeterminate as error:
                doubt = doubt or error
            except Determinate:
                if doubt is None:
                    raise
            if deadline.has_passed():
                raise self._in_doubt(token, doubt) from doubt
            deadline.pause(FIRST_PAUSE_S * 5)

    def _remembers(self, token: bytes, doubt: PersistError) -> bool:
        version = self.fetch()
        for writer in version.state.writers.values():
            if any(outcome.token == token for outcome in writer.outcomes):
                return True
        raise self._in_doubt(token, doubt) from doubt

    def _in_doubt(self, token: bytes, cause: PersistError) -> Indeterminate:
        return Indeterminate(
            f"shard {self.shard}: it is not known whether the change with token {token.hex()} was committed ({cause}). "
            "Repeat the call with the same token and it answers what happened; delete nothing that it refers to",
            shard=self.shard, token=token,
        )  # fmt: skip

    def _timed_out(self, deadline: Deadline, what: str) -> TimedOut:
        return TimedOut(
            f"shard {self.shard}: gave up after {deadline.timeout_s:g} s and {what}; nothing was changed. "
            "Try again, or with a longer timeout",
            shard=self.shard, timeout_s=deadline.timeout_s,
        )  # fmt: skip


def refused(shard: ShardId, refusal: c.Refusal) -> PersistError:
    """The exception that tells a caller of a refusal: what was asked, what is so, what to do."""
    match refusal:
        case c.Finished():
            return ShardFinished(f"shard {shard} is finished for good: it can neither be read nor written", shard=shard)
        case c.NotLive(ids):
            return LeaseExpired(
                f"shard {shard}: {', '.join(ids)} is not live: its lease ended without a heartbeat, or it was closed. "
                "Nothing was changed; open a new handle",
                shard=shard, id=ids[0] if ids else "",
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
                f"shard {shard}: history at {asked} is given up; since is {since}",
                shard=shard, as_of=asked, since=since,
            )  # fmt: skip
        case c.WrongOpaque(name, expected, actual):
            return HoldConflict(
                f"shard {shard}: hold {name!r} has the fencing value {actual!r}, not {expected!r} (None: no such "
                f"hold). "
                "Somebody else moved it; read it again before deciding",
                shard=shard, name=name, expected=expected, actual=actual,
            )  # fmt: skip
        case c.NotEquivalent(reason):
            return CompactionRefused(
                f"shard {shard}: the compaction was refused, as its output is not what its inputs hold: {reason}. "
                f"The shard "
                "is unchanged; this is damage or a bug, run `persist scrub`",
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
        case c.InvalidBounds(reason):
            return InvalidUsage(f"shard {shard}: the batch was refused: {reason}", shard=shard)
        case _:
            return InvalidUsage(f"shard {shard}: refused: {refusal}", shard=shard, refusal=refusal)


_everywhere: weakref.WeakSet[Machine] = weakref.WeakSet()


def _in_child() -> None:
    for machine in list(_everywhere):
        machine.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
