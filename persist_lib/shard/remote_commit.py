"""Changes of shards whose Consensus applies commands itself, as a shard server does.

The command is made from the newest state that this process knows, which may be old by now, and is sent as a value. If
it is refused, it is made again from a fresh state, as after a lost race, and the refusal counts if that is the same
command. A command that got no answer is sent again, the very same, until it gets one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import apply_diff
from persist_lib.core.state import Outcome, Version
from persist_lib.errors import Indeterminate, NotFound, PersistError
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo
from persist_lib.location.commands import Answered, Proposed, TakesCommands, undated
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.funnels import Heart
from persist_lib.shard.in_doubt import Committed, Done, Undone, until_decided
from persist_lib.shard.log import fetch_at, follow_to, followed
from persist_lib.shard.machine import Shard, Wanted


def commit_by_commands(
    wanted: Sequence[Wanted],
    taker: TakesCommands,
    deadline: Deadline,
    token: bytes,
    made_room: Callable[[dict[int, r.Refusal]], bool],
) -> Sequence[Done] | Undone:
    """Commit all transitions at once, or return their refusals, as `commit.try_commit_all` does.

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
    """The success that an answer tells, if it does."""
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
