"""What a client asks of a shard server, and what it is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.groups import Answer
from persist_lib.core.state import Version
from persist_lib.errors import Indeterminate, Overloaded, PersistError, TimedOut
from persist_lib.ids import SeqNo, ShardId, WriterId
from persist_lib.location.api import Row
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
        # SUBTLE: so that it cannot be cancelled. A caller that waits for it and goes would otherwise break the turn in
        # which it is answered, and with it the answers of all others.
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
        """Whether its client does not wait for the answer any more."""
        return self.is_dropped or self.deadline.has_passed()

    def settle(self, answered: Answered) -> None:
        """Answer it. A second answer changes nothing."""
        if not self.answer.done():
            self.answer.set_result(answered)

    def fail(self, error: PersistError) -> None:
        """Answer it with an error. A second answer changes nothing.

        A repeated command may be held by another server, which was only paused. So no failure says that it was
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
    """What is called where nothing is measured."""


@contextmanager
def answering(lot: Sequence[Request]) -> Iterator[None]:
    """Answer the requests of a lot with its error if what is done for them fails, unless they are answered."""
    try:
        yield
    except PersistError as error:  # the store cannot be read or reached: nothing of what is left was sent
        for request in lot:
            request.fail(error)
    except Exception as error:  # a bug: it says nothing about what was done
        for request in lot:
            request.fail(Indeterminate(f"shard {request.shard}: the server failed: {error!r}"))
        raise


def committed(
    request: Request, diff: StateDiff, version: Version, rows: tuple[Row, ...], due: tuple[str, ...]
) -> Answered:
    """The answer to a request that a row committed, which led to `version`; `rows` are those since its client's."""
    if not isinstance(request.command, c.AppendNow) or diff.outcomes is None:
        return Answered(version.seqno, is_committed=True, rows=rows)
    return Answered(
        version.seqno, is_committed=True, rows=rows if due else (), outcome=diff.outcomes.added[-1], due=due
    )


def refused(
    request: Request, refusal: r.Refusal, seqno: SeqNo, rows: tuple[Row, ...], due: tuple[str, ...] = ()
) -> Answered:
    """The answer to a request that the version `seqno` refuses."""
    return Answered(seqno, refusal, rows=() if isinstance(request.command, c.AppendNow) else rows, due=due)


def timed_out(request: Request) -> TimedOut:
    """The error for a command that waited too long. Nothing of it was ever sent to the store."""
    timeout_s = request.deadline.timeout_s
    return TimedOut(
        f"shard {request.shard}: the {type(request.command).__name__} was not committed within {timeout_s:g} s, "
        "and will not be; this call changed nothing. Try again, or with a longer timeout",
        shard=request.shard, timeout_s=timeout_s,
    )  # fmt: skip


def stopped(shard: ShardId) -> Overloaded:
    """The error for a command that comes when the server ends."""
    return Overloaded(
        f"shard {shard}: this server is stopping. It did nothing; ask another one",
        shard=shard, waiting=0, most=0,
    )  # fmt: skip


def still_open(request: Request, answer: Answer | None) -> Indeterminate:
    """The error for a repeated command that is not committed, but may still be.

    SUBTLE: another server, which was only paused, may hold the command, and apply it to a later state. So a refusal
    may only be told when no later state accepts it: its writer is retired, or what it needs has passed.
    """
    return Indeterminate(
        f"shard {request.shard}: the {type(request.command).__name__} with token {request.token.hex()} is not "
        f"committed, and it does not apply now ({answer!s:.200}). But it was sent before, and a server that is "
        "paused may still commit it later. Repeat it with the same token, or retire its writer",
        shard=request.shard, token=request.token,
    )  # fmt: skip


def forgotten(request: Request) -> Indeterminate:
    """The error for a command whose first sending is too long ago for the log to tell what became of it."""
    return Indeterminate(
        f"shard {request.shard}: whether the {type(request.command).__name__} with token {request.token.hex()} was "
        f"committed is not known any more: it was first sent after v{request.known}, and the rows since then are "
        "truncated. This call changed nothing. Read the shard to see what is there",
        shard=request.shard, token=request.token,
    )  # fmt: skip
