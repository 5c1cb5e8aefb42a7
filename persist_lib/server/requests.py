"""What a client asks of a shard server, and what it is answered."""

from __future__ import annotations

from collections.abc import Callable

from persist_lib.core import commands as c
from persist_lib.errors import Indeterminate, PersistError
from persist_lib.ids import SeqNo, ShardId, WriterId
from persist_lib.location.commands import Answered
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Future


class Request:
    """A command of a client for one shard.

    In the command, `lease_until` and `now` are durations from the moment at which it is applied (`location.commands`).
    `known` is a version that the client knew when it sent this command for the first time, and so one that certainly
    does not have it. `is_repeated`: it may have been sent before, to this or another server, with the same token and
    the same value. `patience`: until when it waits for room. `answer` is set once: to an `Answered`, or to the error of
    a command that was neither committed nor refused.
    """

    __slots__ = (
        "answer", "client", "command", "deadline", "is_dropped", "is_repeated", "known", "patience", "shard", "token",
    )  # fmt: skip

    def __init__(
        self, shard: ShardId, command: c.Command, token: bytes, client: str, deadline: Deadline,
        known: SeqNo, *, is_repeated: bool = False,
    ) -> None:  # fmt: skip
        self.shard, self.command, self.token, self.client, self.deadline = shard, command, token, client, deadline
        self.known, self.is_repeated = known, is_repeated
        self.is_dropped = False
        self.patience: Deadline | None = None
        self.answer: Future[Answered] = Future()
        # SUBTLE: so that nobody can cancel it. Whoever waits for it and goes would otherwise break the turn in which it
        # is answered, and with it the answers of all others.
        self.answer.set_running_or_notify_cancel()

    @property
    def writer(self) -> WriterId | None:
        """The writer whose tokens remember it; None for a command that is no append."""
        return self.command.writer if isinstance(self.command, APPENDS) else None

    @property
    def is_urgent(self) -> bool:
        """Whether it only keeps leases up. It is never put off: a busy server would expire its clients."""
        return isinstance(self.command, c.Heartbeat)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for its answer any more."""
        return self.is_dropped or self.deadline.has_passed()

    def settle(self, answered: Answered) -> None:
        """Answer it. A second answer changes nothing."""
        if not self.answer.done():
            self.answer.set_result(answered)

    def fail(self, error: PersistError) -> None:
        """Answer it with an error. A second answer changes nothing.

        SUBTLE: a repeated command may be held by another server, which was only paused. So no failure says that it was
        not committed.
        """
        if self.answer.done():
            return
        if self.is_repeated and not isinstance(error, Indeterminate):
            error = Indeterminate(
                f"{error.message}. But the command was sent before, so it is not known whether it was or will be "
                f"committed. Repeat it with the same token {self.token.hex()}",
                shard=self.shard, token=self.token,
            )  # fmt: skip
        self.answer.set_exception(error)


APPENDS = (c.CompareAndAppend, c.AppendNow, c.Append, c.Absorb)
"""The commands that the state itself remembers by their tokens."""
Observe = Callable[[str, int, float], object]
"""Called with a shard's name, how many commands a row of it answered, and how many seconds its commit took."""


def unobserved(_shard: str, _commands: int, _seconds: float) -> None:
    """What is called where nobody measures."""
