"""How one caller of this process changes shards, one of them or several together. All other code does it by this.

The command is built from the newest state, again after each lost race (`committer`); where the Consensus applies
commands itself, as a shard server does, it is sent to it (`commit_by_commands`). Several shards of one location change
together: if one refuses, all are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from weakref import WeakMethod

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import apply_diff
from persist_lib.core.state import Outcome, Version
from persist_lib.errors import Indeterminate, InvalidUsage, NotFound, PersistError
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, ShardId, epoch_of, parse_shard_id
from persist_lib.location.commands import Answered, Proposed, TakesCommands, undated
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back, taking
from persist_lib.shard.committer import Work, carry_out, fetch_all, until_decided, until_in_log
from persist_lib.shard.funnels import Heart
from persist_lib.shard.log import fetch_at, follow_to, followed
from persist_lib.shard.machine import Build, Committed, Done, Prepared, Shard, Undone, Wanted
from persist_lib.shard.numbers import Numbers
from persist_lib.shard.refusals import named

__all__ = ["Build", "Committed", "Done", "Machine", "Prepared", "Undone", "Wanted", "try_commit_all"]


class Machine(Shard):
    """A shard that this process changes. All handles of a client share it, so that they never race each other."""

    @cached_property
    def numbers(self) -> Numbers:
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


def commit_by_commands(
    wanted: Sequence[Wanted],
    taker: TakesCommands,
    deadline: Deadline,
    token: bytes,
    made_room: Callable[[dict[int, r.Refusal]], bool],
) -> Sequence[Done] | Undone:
    """Commit all transitions at once, or return their refusals, as `try_commit_all` does.

    The commands are made from the newest states that this process knows, which may be old by now, and are sent as
    values. Those that are refused are made again from fresh states, as after a lost race, and a refusal counts if that
    gives the same command. Commands that got no answer are sent again, the very same, until they get one.
    `made_room`: whether all refusals were for want of room, and other processes have made room since.
    """
    machines = [one.machine for one in wanted]
    commands, attempts = _make(wanted), 0
    while True:
        attempts += 1
        proposed = [
            Proposed(machine.shard, command, machine.ground().seqno)
            for machine, command in zip(machines, commands, strict=True)
        ]
        answers = until_answered(taker, proposed, token, deadline)
        done = [
            _done(machine, command, token, answer, attempts)
            for machine, command, answer in zip(machines, commands, answers, strict=True)
        ]
        if all(one is not None for one in done):
            return [one for one in done if one is not None]
        refusals = {at: answer.refusal for at, answer in enumerate(answers) if answer.refusal is not None}
        if isinstance(commands[0], c.AppendNow) and isinstance(refusals.get(0), r.InlineFull):
            return Undone(refusals, answers[0].due)  # nothing of it depends on the state
        for machine, command, answer in zip(machines, commands, answers, strict=True):
            _catch_up(machine, command, answer)
        commands, former = _make(wanted), commands
        is_too_old = any(isinstance(refusal, r.Forgotten) for refusal in refusals.values())
        if not is_too_old and _plain(commands) == _plain(former) and not made_room(refusals):
            return Undone(refusals)
        if deadline.has_passed():
            shard, why = machines[0].shard, f"and {attempts} attempts, as the shard changed each time"
            raise deadline.gave_up(f"shard {shard}", why, shard=shard)


def until_answered(
    taker: TakesCommands, proposed: Sequence[Proposed], token: bytes, deadline: Deadline
) -> list[Answered]:
    """The answers to commands, which are sent again without a change while they get none.

    Raises Indeterminate when that is so until `deadline`, and Determinate if they were certainly not committed.
    """

    def send(doubt: Indeterminate | None) -> list[Answered]:
        is_repeated = doubt is not None
        return taker.commit_commands(proposed, token, deadline.left_s(), is_repeated=is_repeated, heart=Heart)

    def told(cause: PersistError, _doubt: Indeterminate) -> Indeterminate:
        shard, command = proposed[0].shard, type(proposed[0].command).__name__
        return Indeterminate(
            f"shard {shard}: it is not known whether the {command} with token {token.hex()} was committed "
            f"({cause.message}). Repeat the call with the same token and it answers what happened; delete nothing that "
            "it refers to",
            shard=shard, token=token,
        )  # fmt: skip

    return until_decided(send, deadline, told=told)


def _make(wanted: Sequence[Wanted]) -> list[c.Command]:
    """The commands, from the newest states that are known, with durations for moments."""
    made = []
    for machine, build in wanted:
        version, now = machine.ground(), machine.consensus.now()
        made.append(undated(machine.addressed(build(version.state, now), version.state), now))
    return made


def _plain(commands: Sequence[c.Command]) -> list[c.Command]:
    """Commands without their durations, in which two that were made one after the other may differ."""
    return [undated(command, getattr(command, "lease_until", 0)) for command in commands]


def _done(machine: Shard, command: c.Command, token: bytes, answer: Answered, attempts: int) -> Done | None:
    if answer.is_committed and answer.outcome is not None:
        machine.note(answer.outcome)
        known = (_newest(machine, answer) if answer.due else machine.ground()).state
        return Committed(answer.seqno, token, known, known, attempts, answer.outcome, answer.due)
    if answer.is_committed:
        return committed_at(machine, answer, token, c.stored_name(command), attempts)
    return answer.refusal if isinstance(answer.refusal, r.AlreadyDone) else None


def _catch_up(machine: Shard, command: c.Command, answer: Answered) -> None:
    """Know the version by which a command was answered, or a newer one. It was the newest when the command came.

    Without a request, where the rows up to it came along: a refused caller then knows as much, and as soon, as one that
    was not, and does not lose the next race for that.
    """
    with machine.turn:
        if isinstance(command, c.AppendNow) and isinstance(
            answer.refusal, r.Forgotten
        ):  # the command is made again from that seqno on, whatever was there
            machine.note(Outcome(b"", answer.seqno, MINIMUM))
            return
        _newest(machine, answer)


def _newest(machine: Shard, answer: Answered) -> Version:
    """The version by which a command was answered, or a newer one. The machine knows it then."""
    with machine.turn:
        if (known := machine.ground()).seqno >= answer.seqno:
            return known
        found = followed(machine.shard, known, answer.rows)
        if found is not None and found.newest.seqno >= answer.seqno:
            machine.take_over(found.newest)
        else:
            machine.try_fetch()
        return machine.ground()


def committed_at(machine: Shard, answer: Answered, token: bytes, command: str, attempts: int) -> Committed:
    """The transition with this token and command in the row that an answer names, from the log.

    The machine knows that version or a newer one then. Where the log does not go back so far any more, the states are
    those of the newest version.
    """
    with machine.turn:
        known, seqno = machine.ground(), answer.seqno
        found = followed(machine.shard, known, answer.rows)
        if found is None and known.seqno < seqno:
            found = follow_to(machine.consensus, machine.shard, known, seqno)
        if found is not None:
            machine.take_over(found.newest)
        else:
            newest = machine.fetch()
            try:
                base = fetch_at(machine.reads, machine.consensus, machine.shard, newest, SeqNo(seqno - 1))
                found = follow_to(machine.consensus, machine.shard, base, seqno)
            except NotFound:
                found = None
        if found is None:
            return Committed(seqno, token, machine.state, machine.state, attempts)
    before = found.before.state
    for step in found.row.steps:
        if step.diff is not None:
            if (step.token, step.command) == (token, command):
                break
            before = apply_diff(before, step.diff)
    return Committed(seqno, token, before, found.after.state, attempts)


class Machines:
    """One machine for each shard, shared by all handles; it is called with the shard's name.

    Collections have machines of their own: a member takes nothing by its own name, also not of a handle that the same
    program opened by that before. `make` makes one for a shard and whose member it is, and does not keep the client.
    This takes no lock, as a fork could happen while another thread holds it. When two threads make one at once,
    both get the first one.
    """

    def __init__(self, make: WeakMethod[Callable[[ShardId, str], Machine]], url: str) -> None:
        self._make, self._url = make, url
        self._lone: dict[ShardId, Machine] = {}
        self._members: dict[ShardId, list[str]] = {}
        """As whose members each is known, in epochs of the collection."""
        self._by_member: dict[str, dict[ShardId, Machine]] = {}
        self._closed = ""

    def __call__(self, name: str) -> Machine:
        self.check_open()
        shard = parse_shard_id(name)
        return self._lone.get(shard) or self._made(self._lone, shard, "")

    def get(self, shard: ShardId) -> Machine | None:
        return self._lone.get(shard)

    def of_layer(self, name: str, most: int | None = None) -> Machine:
        """That of a shard for a collection, which knows whose member it is: in the newest epoch, or up to `most`."""
        shard = ShardId(name)
        members = [one for one in self._members.get(shard, ()) if most is None or epoch_of(one) <= most]
        if not members:
            return self(name)
        newest = max(members, key=epoch_of)
        made = self._by_member.setdefault(newest, {})
        return made.get(shard) or self._made(made, shard, newest)

    def know_members(self, names: Iterable[str], member: str) -> None:
        """Know that these shards may be members, and whose."""
        for shard in map(ShardId, names):
            members = self._members.setdefault(shard, [])  # it only grows, as this takes no lock either
            if member not in members:
                members.append(member)

    def close(self) -> None:
        """Let all of them refuse every call, and make no other."""
        self._closed = f"this client of {self._url} was closed; open a new one with persist.open"
        for machines in [self._lone, *self._by_member.values()]:
            for machine in list(machines.values()):
                machine.close(self._closed)

    def check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(self._closed, url=self._url)

    def _made(self, machines: dict[ShardId, Machine], shard: ShardId, member: str) -> Machine:
        if (make := self._make()) is None:
            raise AssertionError("a machine is made for a client that is there")
        found = machines.setdefault(shard, make(shard, member))
        self.check_open()  # a `close` that comes after this check finds the machine
        return found
