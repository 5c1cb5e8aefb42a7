"""One commit over several shards: all of their transitions, or none.

As `machine.commit` for each of them, but decided by one compare-and-set over all rows. What one shard refuses is
refused for all, a race lost in one is tried again for all, and an unknown outcome is one unknown outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from persist_lib.core import commands as c
from persist_lib.location.api import Change
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back, taking
from persist_lib.shard.commit import Build, Committed, Machine, Prepared, is_remembered, timed_out, until_decided
from persist_lib.shard.contention import give_way, wait_after_loss

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
    held: list[Lock] = []
    give_back = giving_back(held)
    try:
        # SUBTLE: whoever takes several turns takes them in the order of names, or two could wait for each other.
        for machine in sorted((one.machine for one in wanted), key=lambda machine: machine.shard):
            held += taking(machine.turn)
        return within(deadline, _Attempt(wanted, deadline, token).commit)
    finally:
        give_back()


class _Attempt:
    """A commit under way, with the turns of all machines taken."""

    def __init__(self, wanted: Sequence[Wanted], deadline: Deadline, token: bytes) -> None:
        self._wanted, self._deadline, self._token = wanted, deadline, token
        self._machines = [one.machine for one in wanted]
        self._shards = [machine.shard for machine in self._machines]

    def commit(self) -> list[Done] | Undone:
        is_fresh, attempts = give_way(self._machines, self._deadline), 0
        while True:
            started = self._now()
            answers = [machine.prepare(build, self._token) for machine, build in self._wanted]
            if any(map(is_remembered, answers)):
                return self._remembered()
            prepared = [answer for answer in answers if isinstance(answer, Prepared)]
            if len(prepared) < len(answers):
                if is_fresh and not self._others_made_room(answers):
                    return Undone({n: answer for n, answer in enumerate(answers) if not isinstance(answer, Prepared)})
                self._fetch()
                is_fresh = True
                continue
            attempts += 1
            if self._compare_and_set(prepared):
                for (machine, _), one in zip(self._wanted, prepared, strict=True):
                    machine.adopt(one, self._now() - started)
                return [one.committed(attempts) for one in prepared]
            if self._deadline.has_passed():
                self._fetch()
                raise timed_out(self._shards, self._deadline, f"{attempts} lost races")
            wait_after_loss(self._machines, self._deadline, self._now() - started)
            is_fresh = True

    def _now(self) -> float:
        return self._deadline.runtime.monotonic()

    def _fetch(self) -> None:
        for machine in self._machines:
            machine.fetch()

    def _others_made_room(self, answers: Sequence[Prepared | c.Refusal]) -> bool:
        """Whether all that is in the way is want of room, and others have made some meanwhile."""
        refused = [
            (machine, answer)
            for machine, answer in zip(self._machines, answers, strict=True)
            if not isinstance(answer, Prepared)
        ]
        return all(machine.others_made_room(answer, self._deadline) for machine, answer in refused)

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
        """Whether all are in their logs now. Resolves what is indeterminate, or raises Indeterminate."""
        machines = self._machines
        changes: dict[str, Change] = dict(zip(self._shards, (one.change for one in prepared), strict=True))
        sent = list(zip(machines, prepared, strict=True))
        return until_decided(lambda: machines[0].consensus.compare_and_set_many(changes), sent, self._deadline)
