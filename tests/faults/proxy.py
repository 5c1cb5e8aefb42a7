"""A TCP proxy that breaks what passes through it, at the n-th request.

A request is what a client sends between two answers of the server: so it knows neither PostgreSQL's protocol nor HTTP.

    with Proxy(port) as proxy:
        proxy.at(3, Fault.DROP_REPLY)         # of the requests from now on, the third
        ...                                   # use 127.0.0.1:proxy.port
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from enum import Enum

from tests.counted import count
from tests.loopback import Loopback, hang_up, without_delay

CHUNK = 1 << 16


class Fault(Enum):
    """What becomes of a request."""

    DROP_REQUEST = "the server never sees it, and the connection is closed"
    DROP_REPLY = "the server acts on it, and the connection is closed instead of an answer"
    HALF_REPLY = "the connection is closed in the middle of the answer"
    DELAY = "it arrives late"
    DUPLICATE = "the server gets it twice on the same connection"
    BLACK_HOLE = "nothing ever comes back, and nothing is closed"
    BLACK_HOLE_REPLY = "the server acts on it, and nothing comes back"


class Proxy(Loopback):
    """Forwards a port of its own to `target`. Since the last `at`: `requests`, and `struck`, how many of them broke.

    `target` may be changed for connections to come. Without one, each is closed at once.
    """

    def __init__(self, target: int | None, delay_s: float = 0.3) -> None:
        self.target = target
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._index = 0
        self._keep_bytes: int | None = None
        self.requests = 0
        self.struck = 0
        self.replied = 0
        self._links: list[_Link] = []
        super().__init__()

    def at(self, index: int, fault: Fault | None, *, keep_bytes: int | None = None) -> None:
        """Break the `index`-th request from now on (from 1). `keep_bytes`: how much HALF_REPLY lets pass."""
        with self._lock:
            self._fault, self._index, self._keep_bytes = fault, index, keep_bytes
            self.requests = self.struck = self.replied = 0

    def decide(self) -> tuple[Fault | None, int | None]:
        """A request begins: what is to become of it."""
        with self._lock:
            self.requests += 1
            if self._fault is None or self.requests != self._index:
                return None, None
            self.struck += 1
            count("broken requests", faults={self._fault.name: 1})
            return self._fault, self._keep_bytes

    @property
    def delay_s(self) -> float:
        return self._delay_s

    def connected(self, client: socket.socket) -> None:
        try:
            if (target := self.target) is None:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", target))
        except OSError:
            client.close()
            return
        without_delay(client, server)
        link = _Link(self, client, server)
        self._links.append(link)
        link.start()

    def cut(self) -> None:
        """Close every connection there is now."""
        links, self._links = self._links, []
        for link in links:
            link.close()

    def close(self) -> None:
        super().close()
        self.cut()


class _Link:
    """One connection: a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._lock = threading.Lock()
        self._is_clients_turn = True
        self._fault: Fault | None = None
        self._keep: int | None = None
        self._sent = bytearray()

    def start(self) -> None:
        for work in (self._requests, self._replies):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: object) -> None:
        with contextlib.suppress(OSError):
            work()  # type: ignore[operator]
        self.close()

    def _requests(self) -> None:
        while data := self._client.recv(CHUNK):
            with self._lock:
                begins, self._is_clients_turn = self._is_clients_turn, False
                if begins:
                    self._fault, self._keep = self._proxy.decide()
                    self._sent.clear()
                fault = self._fault
            if fault is Fault.DROP_REQUEST:
                return
            if fault is Fault.BLACK_HOLE:
                continue
            if fault is Fault.DELAY and begins:
                time.sleep(self._proxy.delay_s)
            self._sent += data
            self._server.sendall(data)

    def _replies(self) -> None:
        while data := self._server.recv(CHUNK):
            with self._lock:
                fault, begins = self._fault, not self._is_clients_turn
                self._is_clients_turn = True
            if fault is Fault.DROP_REPLY:
                return
            if fault is Fault.BLACK_HOLE_REPLY:
                continue
            if fault is Fault.HALF_REPLY:
                self._client.sendall(data[: len(data) // 2 if self._keep is None else self._keep])
                return
            if fault is Fault.DUPLICATE and begins:
                self._fault = None
                self._server.sendall(bytes(self._sent))
            self._proxy.replied += len(data)
            self._client.sendall(data)

    def close(self) -> None:
        hang_up((self._client, self._server))
