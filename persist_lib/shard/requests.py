"""What a client asks of a shard server, and what it is answered; and the queue: bounded, fair, heartbeats first."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    why = f"and the {type(request.command).__name__} was not committed, and will not be"
    return request.deadline.gave_up(f"shard {request.shard}", why, shard=request.shard)


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


WAITING_MOST = 2048
"""The most unanswered requests of a shard."""
OF_A_CLIENT_MOST = 256
"""The most unanswered requests of one client for a shard. Fewer clients than eight cannot fill the queue."""

URGENT_MOST = 16_384
"""How many heartbeats wait beside all that. Beyond it, which only a client that is out of its mind reaches, they count
as other requests do."""


class Queue:
    """What waits for one shard. Safe to use from several threads.

    A request counts until it is answered, also after it was taken: only then is its token known to be remembered.
    """

    def __init__(self, shard: ShardId) -> None:
        self._shard = shard
        self._lock = threading.Lock()
        self._urgent: deque[Request] = deque()
        self._first: deque[Request] = deque()
        self._waiting: dict[str, deque[Request]] = {}
        self._all: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._writers: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many requests wait."""
        with self._lock:
            return len(self._urgent) + len(self._first) + sum(map(len, self._waiting.values()))

    def put(self, request: Request, of_a_writer: int) -> None:
        """Let a request wait. Raises Overloaded when there are too many of the shard, of its client, or of its writer.

        At most `of_a_writer` appends of one writer are unanswered at a time: as many as a shard remembers, or the
        outcome of the first of them could not be told after an answer was lost.
        """
        with self._lock:
            if request.is_urgent and len(self._urgent) < URGENT_MOST:
                self._urgent.append(request)
                return
            bounds = (WAITING_MOST, OF_A_CLIENT_MOST, of_a_writer)
            for (counted, name), most in zip(self._counters(request), bounds, strict=False):
                if (waiting := counted[name]) >= most:
                    raise Overloaded(
                        f"shard {self._shard}: {waiting} requests of {name} wait for an answer, as many as may. "
                        "This one was not taken, and nothing was done; wait for an answer, and try again",
                        shard=self._shard, waiting=waiting, most=most,
                    )  # fmt: skip
            self._count(request, 1)
            self._waiting.setdefault(request.client, deque()).append(request)
        request.answer.add_done_callback(lambda _: self._answered(request))

    def take(self, most: int) -> list[Request]:
        """Take at most `most` requests: heartbeats, what was put back, then one of each client in turn, and so on.

        What one client sends stays in its order.
        """
        with self._lock:
            found: list[Request] = []
            for line in (self._urgent, self._first):
                while line and len(found) < most:
                    found.append(line.popleft())
            while self._waiting and len(found) < most:
                client = next(iter(self._waiting))
                line = self._waiting.pop(client)
                found.append(line.popleft())
                if line:
                    self._waiting[client] = line  # at the end: the others come first
            return found

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests that were taken before all others, in their order."""
        with self._lock:
            self._first.extendleft(reversed(list(requests)))

    def remove(self, is_over: Callable[[Request], bool]) -> list[Request]:
        """Take out all requests that are over."""
        with self._lock:
            gone: list[Request] = []
            for line in (self._urgent, self._first, *self._waiting.values()):
                kept: list[Request] = []
                for request in line:
                    (gone if is_over(request) else kept).append(request)
                if len(kept) < len(line):
                    line.clear()
                    line.extend(kept)
            self._waiting = {client: line for client, line in self._waiting.items() if line}
            return gone

    def _answered(self, request: Request) -> None:
        with self._lock:
            self._count(request, -1)

    def _count(self, request: Request, by: int) -> None:
        for counted, name in self._counters(request):
            counted[name] += by
            if counted[name] == 0:
                del counted[name]

    def _counters(self, request: Request) -> list[tuple[Counter[str], str]]:
        """What the request counts among: those of the shard, of its client and, if it is an append, of its writer."""
        found = [(self._all, self._shard), (self._clients, request.client)]
        return found if request.writer is None else [*found, (self._writers, request.writer)]
