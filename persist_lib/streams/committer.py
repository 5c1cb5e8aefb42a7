"""The one writer of a location: its streams, the queue of calls, and their commits.

All calls take effect in the order in which they were made. Those that wait while a commit is under way share the next
one. When one fails, all behind it fail; when it is not known whether one was committed, all wait until that is known.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from persist_lib.arguments import parse_seconds
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.state import State
from persist_lib.errors import Damage, DiffOverflow, Fenced, Indeterminate, InvalidUsage, PersistError, Refused
from persist_lib.frontier import MINIMUM, Antichain
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.append_queue import Answer, Outbox, one_by_one
from persist_lib.relation.appends import Appended, AppendFuture, Pending, copied
from persist_lib.relation.writer import Append, append_together
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import is_ending
from persist_lib.shard.commit import Wanted
from persist_lib.shard.committer import until_decided
from persist_lib.streams.lock import WriterLock, commit_together, hold_command
from persist_lib.streams.stream_state import Call, Op, Step, Stream, plan

Check = Callable[[Callable[[str], Antichain]], Sequence[Op]]
FATAL = (Refused, Indeterminate, Damage)
"""After one of these, what this process knows of its streams may not be what is there: it takes no more calls."""


class Committer:
    """The queue of one runtime, and the streams that it has loaded, by name."""

    def __init__(self, client: Client, lock: WriterLock) -> None:
        self._client, self.lock = client, lock
        self.streams: dict[str, Stream] = {}
        self._kept_bytes = 0  # of unsealed updates in memory, of all streams
        self._waiting: dict[str, deque[tuple[Call, Antichain]]] = {}
        self._noted = set[Call]()  # the calls of the commit under way whose effect is noted
        self._what = f"the streams of {client.url}"
        self._outbox = Outbox("", client.runtime, client.config.buffer_bytes, None, self._what)
        self.applying = threading.RLock()
        """Held while what a commit did is noted. With it, streams and the calls that wait belong together."""
        self._dead: PersistError | None = None
        self._is_stopping = False
        self._stop_by: Deadline | None = None
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        """The parent's runtime runs on; this process has none."""
        self.applying = threading.RLock()
        self._outbox.after_fork_in_child()
        self._dead = Fenced(
            f"this runtime of the streams of {self._client.url} belongs to the parent of this process, which continues "
            "with it. Nothing was changed; open a runtime here only if the parent stops",
            epoch=self.lock.epoch, found=self.lock.epoch, owner="",
        )  # fmt: skip

    def deadline(self, timeout: float | None) -> Deadline:
        return deadline_of(self._client, timeout)

    def check(self) -> None:
        """Raise why this runtime takes no more calls, if it does not."""
        if self._dead is not None:
            raise copied(self._dead)
        if self._is_stopping:
            raise InvalidUsage(
                f"this runtime of the streams of {self._client.url} was stopped. Nothing was changed; open a new one"
            )

    def accept(self, check: Check, size: int, deadline: Deadline) -> AppendFuture:
        """Accept a call of `size` bytes and return its future. Waits for room in the queue.

        `check` gives the parts of the call, given the frontier that calls before it leave. Raises what `check` raises,
        and NotSent, TimedOut and Fenced when the call was not accepted.
        """
        made: list[Call] = []

        def make() -> Call:
            self.check()
            accepted_s, ops = self._client.runtime.monotonic(), tuple(check(self.accepted_upper))
            made.append(call := Call(None, MINIMUM, MINIMUM, None, deadline, accepted_s, size, ops=ops))
            for op in ops:
                if op.upper is not None:
                    self._waiting.setdefault(op.stream, deque()).append((call, op.upper))
            return call

        try:
            return self._outbox.accept(make, size, deadline, self._send, block=True)
        except BaseException:
            for call in made:
                call.future.cancel()
            raise

    def accepted_upper(self, name: str) -> Antichain:
        """How far the calls that were accepted so far will seal a stream."""
        waiting = self._waiting.setdefault(name, deque())
        while waiting and waiting[0][0].future.done():
            waiting.popleft()
        # A seal behind the first that is done nevertheless was cancelled, or failed with all that are behind it.
        left = [upper for call, upper in waiting if not call.future.done()]
        return max([self.streams[name].upper, *left])

    def waiting(self) -> list[Call]:
        """The calls that were accepted and have no outcome yet, in their order."""
        with self.applying:
            calls = (call for call in self._outbox.unfinished() if isinstance(call, Call))
            return [call for call in calls if not (call in self._noted or call.future.done())]

    def settle(self, deadline: Deadline) -> None:
        """Wait until all calls that were accepted before this have ended. Raises TimedOut; they continue then."""
        self._outbox.settle(deadline)

    def stop(self, deadline: Deadline) -> None:
        """Finish what was accepted, take nothing more, and let go of the streams and the lock. Idempotent."""
        self._is_stopping = True
        with ExitStack() as left:
            left.callback(self.lock.release)
            for stream in self.streams.values():
                left.callback(stream.close)
            self._stop_by = deadline
            self._outbox.close(deadline)
        self._outbox.raise_failure(copied)

    def _send(self, batch: Sequence[Pending]) -> Sequence[Answer]:
        """Carry out accepted calls: all of them by one commit, or none."""
        if self._dead is not None:
            raise copied(self._dead)
        self._noted = set()
        try:
            return self._carry_out(batch)
        except DiffOverflow:  # perhaps of the sum of several calls: then each alone may be carried out
            return one_by_one(batch, lambda call: self._carry_out([call]), "", self._what)

    def _carry_out(self, calls: Sequence[Pending]) -> Sequence[Answer]:
        try:
            return self._carried_out([call for call in calls if isinstance(call, Call)])
        except FATAL as error:
            self._dead = error
            raise
        except Exception:
            raise
        except BaseException:
            self._dead = Indeterminate(
                f"a commit of the streams of {self._client.url} was interrupted, so this runtime does not know what "
                "is there. Stop it and open a new one, which finds out",
            )
            raise

    def _carried_out(self, calls: Sequence[Call]) -> Sequence[Answer]:
        deadline = calls[0].deadline
        if deadline.has_passed():
            why = "as calls accepted before it took that long"
            raise deadline.gave_up(f"shard {_named(calls)}", why, shard=_named(calls))
        ops = [op for call in calls for op in call.ops]
        steps = plan(ops, {op.stream: self.streams[op.stream].upper for op in ops})
        check_since(steps)
        token, runtime, again_s = self._client.runtime.token(), self._client.runtime, self._client.config.timeout_s

        def attempt(doubt: Indeterminate | None) -> dict[str, SeqNo]:
            trying = deadline if doubt is None else runtime.deadline(again_s)  # also beyond the call's own
            return commit_steps(self._client, self.lock, self.streams, steps, token, trying)

        with Spending() as spent:
            found = until_decided(attempt, deadline, self._goes_on)
            with self.applying:
                for name, step in steps.items():
                    if step.tables or step.seals:
                        self._kept_bytes -= self.streams[name].size
                        self.streams[name].apply(step)
                        self._kept_bytes += self.streams[name].size
                    if step.since is not None:
                        self.streams[name].since = self.streams[name].since.join(step.since)
                self._noted |= set(calls)
            self._bound_memory(steps)
            return [_answer(call, self.streams, found, token, spent.cost) for call in calls]

    def _goes_on(self, _doubt: Indeterminate) -> bool:
        """Whether to find out what became of a commit: also beyond its deadline, as calls behind it wait for that."""
        return not (is_ending() or (self._stop_by is not None and self._stop_by.has_passed()))

    def _bound_memory(self, steps: dict[str, Step]) -> None:
        """Keep at most `config.buffer_bytes` of unsealed updates, by letting go of the largest streams first."""
        most = self._client.config.buffer_bytes
        for name, step in steps.items():
            if step.seals and self.streams[name].kept is None:
                self.streams[name].keep_again(min(most // 4, self.room()))
                self._kept_bytes += self.streams[name].size
        while self._kept_bytes > most:
            largest = max(self.streams.values(), key=lambda stream: stream.size)
            self._kept_bytes -= largest.size
            largest.spill()

    def room(self) -> int:
        """How many bytes of unsealed updates may still be kept in memory."""
        return max(0, self._client.config.buffer_bytes - self._kept_bytes)

    def add(self, stream: Stream) -> Stream:
        """Write this stream through here. Returns the one that is there already, if another thread was first."""
        with self.applying:
            found = self.streams.setdefault(stream.name, stream)
            self._kept_bytes += stream.size if found is stream else 0
        return found


def deadline_of(client: Client, timeout: float | None) -> Deadline:
    """The deadline of a call that may take that many seconds (None: as the settings say). Raises InvalidUsage."""
    return client.runtime.deadline(client.config.timeout_s if timeout is None else parse_seconds(timeout))


def _named(calls: Sequence[Call]) -> ShardId:
    return ShardId(", ".join(sorted({op.stream for call in calls for op in call.ops})))


def _answer(
    call: Call, streams: Mapping[str, Stream], found: Mapping[str, SeqNo], token: bytes, cost: Cost
) -> Appended:
    first = call.ops[0].stream if call.ops else ""
    upper = streams[first].upper if first else MINIMUM
    count = sum(op.table.num_rows for op in call.ops if op.table is not None)
    return Appended(found.get(first, SeqNo(0)), upper, count, token, 1, cost)


def check_since(steps: Mapping[str, Step]) -> None:
    """A move of since was checked against seals that may have failed since then."""
    for name, step in steps.items():
        if step.since is not None and not step.since < step.upper:
            raise InvalidUsage(
                f"stream {name!r} is sealed up to {step.upper} only, as a seal before this call failed, so since "
                f"cannot move to {step.since}. Nothing was changed; seal it first",
                stream=name,
            )


def commit_steps(
    client: Client, lock: WriterLock, streams: Mapping[str, Stream], steps: Mapping[str, Step], token: bytes,
    deadline: Deadline,
) -> dict[str, SeqNo]:  # fmt: skip
    """One attempt. Returns the newest seqno of each stream's shard that it changed."""
    appends, holds, names = list[Append](), list[Wanted](), list[str]()
    for name, step in sorted(steps.items()):
        stream = streams[name]
        if step.seals or step.tables:
            more = stream.appends(step)
            appends += more
            names += [name] * len(more)
        if step.since is not None and stream.since < step.since:
            holds.append(Wanted(stream.sealed, partial(_moving, lock=lock, since=step.since)))
    if appends:
        done = append_together(appends, client.consensus, client.machine, deadline, token, holds)
        return {name: one.seqno for name, one in zip(reversed(names), reversed(done), strict=True)}
    if holds:
        commit_together(holds, deadline, token)
    return {}


def _moving(state: State, _now: int, *, lock: WriterLock, since: Antichain) -> c.SetHold | c.DowngradeHold:
    return hold_command(state, lock, since)
