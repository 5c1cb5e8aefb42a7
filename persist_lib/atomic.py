"""One commit over several shards: all of their transitions, or none.

As `machine.commit` for each of them, but decided by one compare-and-set over all rows. What one shard refuses is
refused for all, a race lost in one is tried again for all, and an unknown outcome is one unknown outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from persist_lib.config import Deadline
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, Indeterminate, PersistError
from persist_lib.location.api import Change
from persist_lib.location.deadline import within
from persist_lib.machine import (
    DOUBT_PAUSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Build,
    Committed,
    Machine,
    Prepared,
    in_doubt,
    is_remembered,
    timed_out,
)

Done = Committed | c.AlreadyDone


class Undone(NamedTuple):
    """Nothing was changed: which of the transitions were refused, by their place, and why. Never empty."""

    refusals: dict[int, c.Refusal]


class Wanted(NamedTuple):
    """A transition of one shard."""

    machine: Machine
    build: Build


def try_commit_all(wanted: Sequence[Wanted], deadline: Deadline, token: bytes) -> list[Done] | Undone:
    """Commit them all at once, or answer why not. All of one location, each shard once, at least one.

    Each transition has the same token. AlreadyDone says that a call with this token was committed before.
    """
    with ExitStack() as turns, within(deadline):
        # SUBTLE: whoever takes several turns takes them in the order of names, or two could wait for each other.
        for machine in sorted((one.machine for one in wanted), key=lambda machine: machine.shard):
            turns.enter_context(machine.turn)
        return _Attempt(wanted, deadline, token).commit()


class _Attempt:
    """A commit under way, with the turns of all machines taken."""

    def __init__(self, wanted: Sequence[Wanted], deadline: Deadline, token: bytes) -> None:
        self._wanted, self._deadline, self._token = wanted, deadline, token
        self._shards = [one.machine.shard for one in wanted]

    def commit(self) -> list[Done] | Undone:
        is_fresh, attempts, pause = False, 0, FIRST_PAUSE_S
        while True:
            answers = [machine.prepare(build, self._token) for machine, build in self._wanted]
            if any(map(is_remembered, answers)):
                return self._remembered()
            prepared = [answer for answer in answers if isinstance(answer, Prepared)]
            if len(prepared) < len(answers):
                if is_fresh:
                    return Undone({n: answer for n, answer in enumerate(answers) if not isinstance(answer, Prepared)})
                self._fetch()
                is_fresh = True
                continue
            attempts += 1
            if self._compare_and_set(prepared):
                for (machine, _), one in zip(self._wanted, prepared, strict=True):
                    machine.adopt(one)
                return [one.committed(attempts) for one in prepared]
            if self._deadline.has_passed():
                self._fetch()
                raise timed_out(self._shards, self._deadline, f"{attempts} lost races")
            if attempts > 1:
                self._deadline.pause(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)
            self._fetch()
            is_fresh = True

    def _fetch(self) -> None:
        for machine, _ in self._wanted:
            machine.fetch()

    def _remembered(self) -> list[Done]:
        """What a call with this token did before, for each shard.

        SUBTLE: as it was all or nothing, one shard that remembers speaks for all. Another may be known here in a
        version from before, so it is read again; it may also have forgotten (a writer remembers its last few tokens,
        and ends with its lease), and would then refuse what it has done. It answers AlreadyDone without an outcome.
        """
        self._fetch()
        answers = [machine.prepare(build, self._token) for machine, build in self._wanted]
        return [answer if isinstance(answer, c.AlreadyDone) else c.AlreadyDone() for answer in answers]

    def _compare_and_set(self, prepared: Sequence[Prepared]) -> bool:
        """Whether all are in their logs now. Resolves what is indeterminate, or raises Indeterminate.

        As for one row, the same bytes are sent again until that is decided.
        """
        consensus = self._wanted[0].machine.consensus
        changes: dict[str, Change] = dict(zip(self._shards, (one.change for one in prepared), strict=True))
        doubt: PersistError | None = None
        while True:
            try:
                won = consensus.compare_and_set_many(changes)
                if won or doubt is None:
                    return won
                is_done = self._is_done(prepared)
            except Indeterminate as error:
                doubt = doubt or error
            except Determinate:
                if doubt is None:
                    raise
            else:
                if is_done is None:
                    raise in_doubt(self._shards, self._token, doubt) from doubt
                return is_done
            if self._deadline.has_passed():
                raise in_doubt(self._shards, self._token, doubt) from doubt
            self._deadline.pause(DOUBT_PAUSE_S)

    def _is_done(self, prepared: Sequence[Prepared]) -> bool | None:
        """What became of rows that were sent with an unknown outcome, and refused when sent again; None: nothing tells.

        SUBTLE: refused means that in at least one shard our place is taken. Where it is not, nothing is decided. Where
        it is taken by our row, all of ours are there, as they came together; where by another's, ours can never come
        to that place, and so to none, however late a copy of the request arrives. Which shard it is does not matter,
        nor that they are looked at one after the other: what is in a place stays there. Only truncation can hide it;
        then a writer's memory tells, which can say yes, but never no.
        """
        for (machine, _), one in zip(self._wanted, prepared, strict=True):
            if (is_ours := machine.is_in_log(one)) is not None:
                return is_ours
        return any(machine.remembers(self._token) for machine, _ in self._wanted) or None
