"""The requests that wait for a shard: bounded, fair among clients, heartbeats first."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from persist_lib.errors import Overloaded
from persist_lib.ids import ShardId
from persist_lib.shard.requests import Request

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

    def __init__(self, shard: ShardId, most: int = WAITING_MOST, of_a_client: int = OF_A_CLIENT_MOST) -> None:
        self._shard, self._most, self._of_a_client = shard, most, of_a_client
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
            bounds = (self._most, self._of_a_client, of_a_writer)
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
