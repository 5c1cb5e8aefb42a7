"""Several commands of one shard as one row, prepared on the newest version that is known.

`shard.commit` changes shards for one caller. This is for a process that commits for many callers at once, as a shard
server does: each caller's command has its own token and answer, and one compare-and-set commits them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from persist_lib.core import commands as c
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import GROUPS
from persist_lib.core.groups import Answer, apply_together
from persist_lib.core.state import State, Version
from persist_lib.core.validate import check_group
from persist_lib.errors import InvariantViolated
from persist_lib.format.log import LogRow, Step, encode_row
from persist_lib.ids import SeqNo
from persist_lib.shard.log import next_group, next_row
from persist_lib.shard.machine import Prepared, Shard

REFUSAL_CHARACTERS = 200
"""How much of a refusal a row tells."""


class Asked(NamedTuple):
    """A command that a caller wants committed: its value, its token, and who sent it."""

    command: c.Command
    token: bytes
    sender: str = ""


class Group(NamedTuple):
    """The row of the first commands of a lot, and the answer to each of them, in their order.

    `prepared` is None where none of them changes anything. The answers hold only once the row is committed or, without
    a row, once a linearizable read has found that the version `on` is the newest.
    """

    on: Version
    prepared: Prepared | None
    answers: tuple[Answer, ...]


def prepare_group(machine: Shard, version: Version, asked: Sequence[Asked], now: int) -> Group:
    """The row of as many of the first commands as may be one row after `version`; of at least one, if there is one.

    `now` is ms of the store's clock. A command that no reader could read again is answered with that error, and
    does not hurt the others.
    """
    poisoned: dict[int, InvariantViolated] = {}
    while True:
        places = [place for place in range(len(asked)) if place not in poisoned]
        applied = apply_together(version.state, SeqNo(version.seqno + 1), [asked[place].command for place in places])
        steps = [_step(asked[place], answer) for place, answer in zip(places, applied.answers, strict=False)]
        try:
            row = None
            if applied.diffs:
                check_group(applied.diffs, applied.state, SeqNo(version.seqno + 1))
                row = _row(version, steps, applied.state, now)
                data = encode_row(row, applied.state.format)
        except InvariantViolated as error:
            found = [at for at, step in enumerate(steps) if not _is_writable(version, step, applied.state, now)]
            if not found:
                raise
            poisoned |= {places[at]: error for at in found}
            continue
        answers = {**poisoned, **dict(zip(places, applied.answers, strict=False))}
        first = len(answers) if len(applied.answers) == len(places) else places[len(applied.answers)]
        prepared = None if row is None else Prepared(machine, version, row, data, applied.state)
        return Group(version, prepared, tuple(answers[place] for place in range(first)))


def _step(one: Asked, answer: Answer) -> Step:
    command = c.stored_name(one.command)
    if isinstance(answer, StateDiff):
        return Step(one.token, command, one.sender, answer)
    told = str(answer).encode("utf-8", "replace").decode()  # it may quote what could never be stored
    return Step(one.token, command, one.sender, None, told[:REFUSAL_CHARACTERS] or "refused")


def _row(version: Version, steps: Sequence[Step], state: State, now: int) -> LogRow:
    if state.format < GROUPS:  # older formats have no place for what was refused
        steps = [step for step in steps if step.diff is not None]
    return next_group(version, steps, state, now)


def _is_writable(version: Version, step: Step, state: State, now: int) -> bool:
    """Whether a reader could read the step again, alone and in a row of its own."""
    if step.diff is None:
        return True
    try:
        encode_row(next_row(version, step.diff, state, step.token, step.command, now))
    except InvariantViolated:
        return False
    return True
