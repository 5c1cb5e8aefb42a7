"""How one caller of this process changes shards, one of them or several together. All other code does it by this.

The command is built from the newest state, again after each lost race (`committer`); where the Consensus applies
commands itself, it is sent to it (`remote_commit`). Several shards of one location change together: if one refuses, all
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter

from persist_lib.core import refusals as r
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back, taking
from persist_lib.shard.committer import Work, carry_out, fetch_all, until_in_log
from persist_lib.shard.in_doubt import Build, Committed, Done, Undone
from persist_lib.shard.machine import Prepared, Shard, Wanted
from persist_lib.shard.numbers import Numbers
from persist_lib.shard.refusals import named
from persist_lib.shard.remote_commit import commit_by_commands

__all__ = ["Build", "Committed", "Done", "Machine", "Prepared", "Undone", "Wanted", "try_commit_all"]


class Machine(Shard):
    """A shard that this process changes. All handles of a client share it, so that they never race each other."""

    @cached_property
    def numbers(self) -> Numbers:
        """The numbers of its columns that count up."""
        return Numbers(self)

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
        for machine in sorted(machines, key=attrgetter("shard")):
            machine.check_open()
            turns += taking(machine.turn)
        if machines[0].taker is not None:
            made_room = partial(_others_made_room, machines, deadline=deadline)
            send = partial(commit_by_commands, wanted, machines[0].taker, deadline, token, made_room)
            return within(deadline, send)
        call = _Call(wanted, deadline, token)
        within(deadline, partial(carry_out, call))
        return call.answer
    finally:
        give_back()


class _Call(Work):
    """The transitions that one caller wants. `answer` is there once they are carried out."""

    def __init__(self, wanted: Sequence[Wanted], deadline: Deadline, token: bytes) -> None:
        self._wanted, self._deadline, self._token = wanted, deadline, token
        self.machines = self._machines = [one.machine for one in wanted]
        self._refusals: dict[int, r.Refusal] = {}
        self.answer: Sequence[Done] | Undone = ()

    @property
    def deadline(self) -> Deadline:
        return self._deadline

    def prepare(self) -> Sequence[Prepared]:
        """The transitions, if all of them can be committed."""
        prepared, self._refusals = list[Prepared](), {}
        for at, (machine, build) in enumerate(self._wanted):
            answer = machine.prepare(build, self._token)
            if isinstance(answer, Prepared):
                prepared.append(answer)
            else:
                self._refusals[at] = answer
        return () if self._refusals else prepared

    def is_answered(self, *, is_fresh: bool) -> bool:
        if any(map(_is_repeated, self._refusals.values())):
            self.answer = self._done_before()
            return True
        if not is_fresh or _others_made_room(self._machines, self._refusals, self._deadline):
            return False
        done = [refusal for refusal in self._refusals.values() if isinstance(refusal, r.AlreadyDone)]
        self.answer = done if len(done) == len(self._wanted) else Undone(self._refusals)
        return True

    def send(self, prepared: Sequence[Prepared]) -> bool:
        return until_in_log(prepared, self._deadline)

    def committed(self, prepared: Sequence[Prepared], attempts: int, took_s: float) -> None:  # noqa: ARG002
        self.answer = [one.committed(attempts) for one in prepared]

    def lost(self, prepared: Sequence[Prepared], attempts: int) -> None:
        if self._deadline.has_passed():
            fetch_all(self._machines)  # otherwise the next call starts from the same stale versions, and loses again
            shards, command = [one.shard for one in prepared], prepared[0].row.command
            raise self._deadline.gave_up(named(shards), f"and {attempts} lost races for {command}", shard=shards[0])

    def _done_before(self) -> Sequence[Done]:
        """What an earlier call with this token did, for each shard.

        SUBTLE: the earlier call did all or nothing, so one shard that remembers it speaks for all. The known version of
        another shard may be from before that call, so it is read again. That shard may also have forgotten the call (a
        writer remembers its last few tokens, and ends with its lease), and would then refuse a repetition. Its answer
        is AlreadyDone without an outcome.
        """
        done: list[Done] = []
        for at, (machine, build) in enumerate(self._wanted):
            answer: Prepared | r.Refusal | None = self._refusals.get(at)
            if answer is None or not _is_repeated(answer):
                machine.try_fetch()
                answer = machine.prepare(build, self._token)
            done.append(answer if isinstance(answer, r.AlreadyDone) else r.AlreadyDone())
        return done


def _others_made_room(machines: Sequence[Shard], refusals: Mapping[int, r.Refusal], deadline: Deadline) -> bool:
    """Whether all refusals were for want of room, and other processes have made room since."""
    return all(machines[at].others_made_room(refusal, deadline) for at, refusal in refusals.items())


def _is_repeated(refusal: r.Refusal | Prepared) -> bool:
    """Whether the refusal says that the token was seen. Only this refusal can be trusted from a stale state."""
    return isinstance(refusal, r.AlreadyDone) and refusal.outcome is not None
