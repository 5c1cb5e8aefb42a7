"""The one loop of the calls that take the next time: judge the token, find upper, compute, append, and judge again.

Shards and collections differ in what each step is. SUBTLE: the first attempt of a repeated call may come through at any
moment, also between two steps of the repetition. So a token that is found open is sent only at an upper that is still
its lower. Where upper has moved since, it is judged again, and not replaced by a fresh one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, Self, TypeVar

import pyarrow as pa

from persist_lib.errors import LeaseExpired, PersistError
from persist_lib.frontier import Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.kernel.by_key import Counts
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.outcomes import Verdict, forgotten
from persist_lib.write.times import bounds_of, format_token

Call = TypeVar("Call")
Basis = TypeVar("Basis")
Answer = TypeVar("Answer")


class Named(NamedTuple):
    """An append at one time: its token, and the bounds that this carries."""

    token: bytes
    lower: Antichain
    upper: Antichain

    @classmethod
    def of(cls, token: object) -> Self | None:
        """That of an earlier call, by its token. Raises InvalidUsage for a token that carries no bounds."""
        return None if token is None else cls(*bounds_of(token))

    @classmethod
    def fresh(cls, runtime: Runtime, lower: Antichain, time: int) -> Self:
        """One with a token that nothing else has."""
        return cls(format_token(runtime, lower, at(time + 1)), lower, at(time + 1))

    @property
    def time(self) -> int:
        """The time of its updates."""
        return (self.upper.time or 1) - 1


class Turn(NamedTuple, Generic[Basis]):
    """What is to be appended at an upper: updates without times, what they amount to by key, and what they rest on."""

    lower: Antichain
    changes: pa.Table
    counts: Counts
    basis: Basis


class AtNextTime(ABC, Generic[Call, Basis, Answer]):
    """What writes at the next time: the loop, and the steps of it that a shard and a collection do each in their way.

    `Call` is what a call brings to its steps.
    """

    def _at_next_time(self, call: Call, known: Named | None, deadline: Deadline, *, is_dry: bool = False) -> Answer:
        """Append what the newest contents ask for, at the next time; again if another writer was first.

        `known` is the append of an earlier call: its outcome answers, and it is sent again while it can be committed.
        """
        races = 0
        while True:
            if known is not None:
                verdict = self._certain(known, deadline)
                if verdict.seqno is not None:
                    return self._repeated(call, known, verdict.seqno)
                known = known if verdict.answer == "open" else None
            turn = self._next_turn(call, deadline)
            if known is not None and self._has_moved(known, turn):
                continue
            if not turn.changes.num_rows:
                return self._unwritten(call, turn)
            named = known or self._fresh(call, turn)
            if is_dry:
                return self._unwritten(call, turn)
            try:
                if (answer := self._try_turn(call, turn, named, deadline)) is not None:
                    return answer
            except LeaseExpired:
                if not self._registers_again():
                    raise
            races += 1
            if deadline.has_passed():
                raise self._outrun(deadline, races)

    def _certain(self, known: Named, deadline: Deadline) -> Verdict:
        verdict = self._judge(known, deadline)
        if verdict.answer == "unknown":
            raise forgotten(self._place(), known.token, verdict)
        return verdict

    def _has_moved(self, known: Named, turn: Turn[Basis]) -> bool:
        """Whether upper has passed the lower of an append since it was found open."""
        if turn.lower < known.lower:  # its token is of another place, or this one was put back to an earlier state
            raise self._gap(known, turn.lower)
        return turn.lower != known.lower

    @abstractmethod
    def _place(self) -> str:
        """What it writes, for messages."""

    @abstractmethod
    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        """What became of the append of an earlier call. Reads afresh."""

    @abstractmethod
    def _next_turn(self, call: Call, deadline: Deadline) -> Turn[Basis]:
        """The changes that the newest contents ask for. Writes nothing of them."""

    @abstractmethod
    def _fresh(self, call: Call, turn: Turn[Basis]) -> Named:
        """A name of its own, at the next time. Raises InvalidUsage where times end."""

    @abstractmethod
    def _try_turn(self, call: Call, turn: Turn[Basis], named: Named, deadline: Deadline) -> Answer | None:
        """Append the changes, if upper is still where the turn found it; None if another writer was first."""

    @abstractmethod
    def _repeated(self, call: Call, known: Named, seqno: SeqNo) -> Answer:
        """The answer where an earlier call was committed."""

    @abstractmethod
    def _unwritten(self, call: Call, turn: Turn[Basis]) -> Answer:
        """The answer where nothing is written: nothing is to be changed, or it is a dry run."""

    @abstractmethod
    def _registers_again(self) -> bool:
        """Whether a writer whose lease ended is registered again: until it is closed."""

    @abstractmethod
    def _gap(self, known: Named, upper: Antichain) -> PersistError:
        """The error where an append begins beyond upper."""

    @abstractmethod
    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        """The error where other writers were first until the deadline."""
