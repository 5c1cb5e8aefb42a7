"""All shards of a location where commands of many clients are committed: a funnel each, and threads for their turns.

A funnel with something to do is in the line once, also while a thread takes its turn, so that a shard never keeps more
than one thread. Commits of several shards, which wait for each other's turns, have threads of their own. Without
threads, as in a simulation, `work` takes the next turn.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from persist_lib.config import Config
from persist_lib.errors import Indeterminate, InvalidUsage, Overloaded
from persist_lib.ids import ShardId, parse_shard_id
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.commands import Answered, Proposed
from persist_lib.location.wrap.deadline import RetryingBlob, RetryingConsensus
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.client_duties import Wake
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.machine import Shard
from persist_lib.shard.multi_shard_commit import commit_together
from persist_lib.shard.requests import Observe, Request, unobserved

log = logging.getLogger("persist.server")
SHARDS_MOST = 10_000
"""The most shards whose states are in memory. The one that was asked for longest ago is forgotten."""
THREADS = 16
"""How many shards are committed at the same time."""
JOINT_THREADS = 4
"""How many commits of several shards are under way at the same time, or wait for turns."""
JOINT_MOST = 256
"""The most commits of several shards that wait."""
ITSELF = "itself"
"""What rows of several commands say of who sent one that came through no server."""
OWN_THREADS = 4
GRACE_S = 2.0
"""In a client's own process: the threads, and how much longer than its timeout a caller waits for a definite answer."""
Line = SimpleQueue[Callable[[], None] | None]
Later = Callable[[float, Callable[[], None]], object]


class Funnels:
    """What a server serves. `submit` and `submit_together` may be called from any thread; each request is answered."""

    def __init__(
        self, blob: Blob, consensus: Consensus, config: Config, runtime: Runtime, reads: Blob | None = None,
        observe: Observe = unobserved, later: Later | None = None,
    ) -> None:  # fmt: skip
        """`later` calls something after so many seconds; without it, no append waits for room in its shard."""
        self._make = partial(_funnel, blob, consensus, config, runtime, reads, observe)
        self._later = later
        self._runtime = runtime
        self._funnels: dict[ShardId, Funnel] = {}
        self._lock = threading.Lock()
        self._in_line: set[ShardId] = set()
        self._in_use: Counter[ShardId] = Counter()
        self._turns: Line = SimpleQueue()
        self._joint: Line = SimpleQueue()
        self._threads: list[tuple[threading.Thread, Line]] = []
        self._is_stopping = False

    def start(self, threads: int = THREADS, joint: int = JOINT_THREADS) -> None:
        for line in [self._turns] * threads + [self._joint] * joint:
            thread = threading.Thread(target=_serve, args=(line,), name="persist-funnel", daemon=True)
            self._threads.append((thread, line))
            thread.start()

    def funnel(self, shard: ShardId) -> Funnel:
        with self._lock:
            return self._funnel(shard)

    def machine(self, shard: ShardId) -> Shard | None:
        """The machine of a shard whose state is in memory; None for others, which this changes nothing for."""
        found = self._funnels.get(shard)
        return None if found is None else found.machine

    def submit(self, request: Request) -> None:
        with self._lock:
            funnel = self._funnel(request.shard)
            funnel.put(request)
            if not request.answer.done() and request.shard not in self._in_line:
                self._in_line.add(request.shard)
                self._turns.put(partial(self._turn, funnel))

    def submit_together(self, requests: Sequence[Request]) -> None:
        """Let requests wait that are to be committed together: all or none. Each shard once; all with one token."""
        with self._lock:
            waiting = self._joint.qsize()
            if not self._is_stopping and waiting < JOINT_MOST:
                self._in_use.update(request.shard for request in requests)
                parts = [(self._funnel(request.shard), request) for request in requests]
                self._joint.put(partial(self._commit_together, parts))
                return
        for request in requests:
            error = Overloaded(
                f"shard {request.shard}: this server is stopping, or {waiting} commits of several shards wait. It did "
                "nothing; try again, or ask another one",
                shard=request.shard, waiting=waiting, most=JOINT_MOST,
            )  # fmt: skip
            request.fail(error)

    def work(self) -> bool:
        """Take the next turn, if one is due. Returns whether one was."""
        for line in (self._joint, self._turns):
            with suppress(Empty):
                if (task := line.get_nowait()) is not None:
                    task()
                    return True
        return False

    def known(self) -> int:
        """How many shards' states are in memory."""
        return len(self._funnels)

    def waiting(self) -> list[int]:
        """How many commands wait in each shard where some do."""
        with self._lock:
            waiting = [self._funnels[shard] for shard in self._in_line if shard in self._funnels]
        return [len(funnel.queue) for funnel in waiting]

    def is_idle(self) -> bool:
        """Whether nothing waits and no turn is under way."""
        with self._lock:
            return not (self._in_line or self._in_use)

    def stop(self) -> None:
        """Take no more requests; those that wait are served."""
        self._each(Funnel.stop)

    def give_up(self) -> None:
        """Serve no more requests either. Each is answered soon: if its row was sent without an answer, as unknown."""
        self._each(Funnel.give_up)

    def close(self, seconds: float = 3600.0) -> bool:
        """End the threads, after the turns that are under way. Call `stop` or `give_up` before.

        Returns whether they have ended, within `seconds`.
        """
        deadline = self._runtime.deadline(seconds)
        for _, line in self._threads:
            line.put(None)
        for thread, _ in self._threads:
            thread.join(deadline.remaining_s())
        return not any(thread.is_alive() for thread, _ in self._threads)

    def _funnel(self, shard: ShardId) -> Funnel:
        found = self._funnels.pop(shard, None) or self._make(self._wakes(shard), shard)
        self._funnels[shard] = found  # at the end: asked for last
        if self._is_stopping:
            found.stop()
        if len(self._funnels) > SHARDS_MOST:
            idle = (
                name for name, funnel in self._funnels.items()
                if funnel.is_idle and not (name in self._in_line or self._in_use[name] or name == shard)
            )  # fmt: skip
            if (oldest := next(idle, None)) is not None:
                del self._funnels[oldest]
        return found

    def _wakes(self, shard: ShardId) -> Wake | None:
        later = self._later
        return None if later is None else lambda seconds: later(seconds, partial(self._wake, shard))

    def _wake(self, shard: ShardId) -> None:
        with self._lock:
            if (funnel := self._funnels.get(shard)) is not None and shard not in self._in_line:
                self._in_line.add(shard)
                self._turns.put(partial(self._turn, funnel))

    def _each(self, call: Callable[[Funnel], None]) -> None:
        with self._lock:
            self._is_stopping = True
            for funnel in self._funnels.values():
                call(funnel)

    def _turn(self, funnel: Funnel) -> None:
        try:
            funnel.turn()
        finally:
            with self._lock:
                if len(funnel.queue):
                    self._turns.put(partial(self._turn, funnel))
                else:
                    self._in_line.discard(funnel.machine.shard)

    def _commit_together(self, parts: Sequence[tuple[Funnel, Request]]) -> None:
        try:
            commit_together(parts)
        finally:
            with self._lock:
                self._in_use.subtract(request.shard for _, request in parts)
                self._in_use += Counter()  # without zeros


def _serve(line: Line) -> None:
    """Take turns until the line ends."""
    while (task := line.get()) is not None:
        try:
            task()
        except Exception:
            log.exception("a turn failed; its requests are answered, and the others are served on")


def _funnel(
    blob: Blob, consensus: Consensus, config: Config, runtime: Runtime, reads: Blob | None, observe: Observe,
    wake: Wake | None, shard: ShardId,
) -> Funnel:  # fmt: skip
    return Funnel(Shard(shard, blob, consensus, config, runtime, reads), observe, wake)


def ask(
    funnels: Funnels, proposed: Sequence[Proposed], token: bytes, client: str, deadline: Deadline, *, is_repeated: bool
) -> list[Request]:
    """Let commands wait for their turns, and return the requests, whose answers tell what came of them.

    Several commands, each of another shard, are committed together: all or none. Raises InvalidUsage for none at all,
    or for two of one shard.
    """
    requests = [
        Request(parse_shard_id(shard), command, token, client, deadline, known, is_repeated=is_repeated)
        for shard, command, known in proposed
    ]
    shards = {request.shard for request in requests}
    if len(shards) < max(1, len(requests)):
        raise InvalidUsage(
            f"a commit needs at least one command, and each shard once: got {[p.shard for p in proposed]}"
        )
    if len(requests) == 1:
        funnels.submit(requests[0])
    else:
        funnels.submit_together(requests)
    return requests


class Heart(Funnels):
    """All of that in a client's own process, for a client that continues against its store without any server.

    What the client asks is applied as a server applies it: what other processes committed, or may commit yet, is looked
    for by its token, and "not committed" is said only of what can never be committed. Not to be used after a fork.
    """

    def __init__(self, blob: Blob, consensus: Consensus, runtime: Runtime) -> None:
        config = Config()
        blob = RetryingBlob(blob, runtime, config.timeout_s)
        super().__init__(blob, RetryingConsensus(consensus, runtime, config.timeout_s), config, runtime)
        self.start(OWN_THREADS, 1)

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool
    ) -> list[Answered]:
        deadline = self._runtime.deadline(timeout_s)
        requests = ask(self, proposed, token, ITSELF, deadline, is_repeated=is_repeated)
        try:
            return [request.answer.result(deadline.left_s() + GRACE_S) for request in requests]
        except Late as late:
            raise Indeterminate(f"the store did not answer within {timeout_s:g} s", token=token) from late
        finally:
            for request in requests:
                request.is_dropped = True

    def end(self) -> None:
        """Answer what waits, and end the threads."""
        self.give_up()
        self.close()
