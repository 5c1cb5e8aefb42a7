"""Numbers of columns that count up: taken from the state by ranges, and given out one after the other."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from persist_lib.convert.filling import Filling
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.identities import END, next_of
from persist_lib.core.state import State
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.schema.schema import Column
from persist_lib.shard.machine import Committed

if TYPE_CHECKING:
    from persist_lib.shard.commit import Machine

MOST = 1024
"""The most numbers that are taken ahead of need. A process takes twice as many each time, and ends with a gap."""


def filling_of(machine: Machine, *, is_dry: bool = False) -> Filling:
    """What fills columns in one call that writes a shard. In a dry run it takes no numbers."""
    return Filling(machine.runtime, machine.numbers.peek if is_dry else machine.numbers.take)


class Numbers:
    """The numbers of one shard that this process has taken. Safe to use from several threads."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._taken: dict[str, tuple[int, int, int]] = {}
        """By the id of a column: its next number here, the end of the range, and how many to take ahead."""
        enrol(self, Stage.SHARDS)

    def after_fork_in_child(self) -> None:
        """Forget what the parent has taken, and gives out."""
        self._lock, self._taken = threading.Lock(), {}

    def take(self, column: Column, count: int) -> int:
        """The first of so many numbers in a row. Raises InvalidUsage where a column has not as many left.

        Numbers are noted as given before they are: an interrupt in between leaves a gap.
        """
        with self._lock:
            first, end, ahead = self._taken.get(column.id, (0, 0, 1))
            if end - first < count:
                first, end = self._reserve(column, count, max(count, ahead))
                ahead = min(2 * ahead, MOST)
            self._taken[column.id] = (first + count, end, ahead)
            return first

    def peek(self, column: Column, count: int) -> int:  # noqa: ARG002 - of so many
        """The same for a dry run: what they may be, and none is taken."""
        with self._lock:
            first, end, _ = self._taken.get(column.id, (0, 0, 1))
            return first if first < end else min(next_of(self._machine.state, column.id), END - 1)

    def _reserve(self, column: Column, least: int, most: int) -> tuple[int, int]:
        """Take a range of at least and at most so many numbers: where it begins, and where it ends."""
        machine = self._machine

        def build(state: State, _now: int) -> c.Reserve:
            first = next_of(state, column.id)
            if first + least > END:
                raise InvalidUsage(
                    f"shard {machine.shard}: column {column.name!r} has {END - first} numbers left, and {least} are "
                    "needed. Nothing was written",
                    problem="identity", column=column.name,
                )  # fmt: skip
            return c.Reserve(column.id, first, min(most, END - first))

        deadline, doubt = machine.runtime.deadline(machine.config.timeout_s), ""
        while not deadline.has_passed():
            try:
                answer = machine.try_commit(build, deadline.left_s())
            except Indeterminate as error:
                doubt = error.message  # they may be taken, and are left out
                continue
            if isinstance(answer, r.Overtaken):
                machine.fetch()
                continue
            if not isinstance(answer, Committed):
                raise machine.refused(answer)
            # What was committed need not be what was built last. The states beside it say what it took.
            first = next_of(answer.before, column.id)
            end = min(first + most, END)
            if first < end <= next_of(answer.after, column.id):
                return first, end
            doubt = f"v{answer.seqno} is no longer in the log"
        raise Determinate(
            f"shard {machine.shard}: nothing was written, as no numbers could be taken for column {column.name!r} in "
            f"{deadline.timeout_s:g} s{doubt and ': '}{doubt}. Try again",
            shard=machine.shard,
        )  # fmt: skip
