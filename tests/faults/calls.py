"""A proxy in front of a shard server that breaks the n-th call: gRPC is HTTP/2, of which it knows the frames' headers.

A call is a stream of frames that a client opens, and many of them share a connection. So a fault strikes one call at a
known place, and what it does to the connection is what the network would do. No fault waits for a time: what comes late
comes once the caller has given up, which is a frame as well.

    plan = Plan()
    with CallProxy(port, plan) as proxy:
        plan.at(3, Fault.ANSWER_LOST)         # of the calls from now on, the third
        ...                                   # use 127.0.0.1:proxy.port
"""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum
from typing import NamedTuple

from tests.counted import count
from tests.loopback import Loopback, without_delay

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM = 0, 1, 3
HEADER_BYTES = 9


class Fault(Enum):
    """What becomes of a call."""

    LOST = "the server never sees it, and the connection is closed"
    HALF = "the server sees the first half of it, and the connection is closed"
    ANSWER_LOST = "the server acts on it, and the connection is closed instead of an answer"
    HALF_ANSWER = "the connection is closed in the middle of the answer"
    LATE = "the server sees it once its caller has given up"
    ANSWER_LATE = "the server acts on it, and the answer comes once its caller has given up"
    REFUSED = "the connection is closed, as are the next few"


IN_TIME = [fault for fault in Fault if fault not in (Fault.LATE, Fault.ANSWER_LATE)]
REFUSALS = 3
"""How many connections are refused by REFUSED."""


class Plan:
    """Which call breaks, and how, over all proxies that have it. Since the last `at`: `calls`, and `struck`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._index = self._refusals = 0
        self.calls = self.struck = 0

    def at(self, index: int, fault: Fault | None) -> None:
        """Break the `index`-th call from now on (from 1)."""
        with self._lock:
            self._fault, self._index, self._refusals = fault, index, 0
            self.calls = self.struck = 0

    def decide(self) -> Fault | None:
        """A call begins: what is to become of it."""
        with self._lock:
            self.calls += 1
            if self._fault is None or self.calls != self._index:
                return None
            self.struck += 1
            count("broken requests", faults={self._fault.name: 1})
            self._refusals = REFUSALS if self._fault is Fault.REFUSED else 0
            return self._fault

    def refuses(self) -> bool:
        """Whether a connection that comes now is refused."""
        with self._lock:
            self._refusals -= 1
            return self._refusals >= 0


class Frame(NamedTuple):
    """A frame as it is sent, and what its header says."""

    kind: int
    stream: int
    data: bytes


class Frames:
    """The frames of one direction of a connection."""

    def __init__(self, from_: socket.socket) -> None:
        self._from = from_
        self._left = b""

    def read(self, count: int) -> bytes:
        """The next bytes. Raises EOFError at the end."""
        while len(self._left) < count:
            if not (more := self._from.recv(1 << 16)):
                raise EOFError
            self._left += more
        found, self._left = self._left[:count], self._left[count:]
        return found

    def next(self) -> Frame:
        header = self.read(HEADER_BYTES)
        stream = int.from_bytes(header[5:], "big") & 0x7FFFFFFF
        return Frame(header[3], stream, header + self.read(int.from_bytes(header[:3], "big")))


class CallProxy(Loopback):
    """Forwards a port of its own to `target`, whose calls break as the plan says."""

    def __init__(self, target: int, plan: Plan) -> None:
        self._target, self.plan = target, plan
        self._links: list[_Link] = []
        super().__init__()

    def connected(self, client: socket.socket) -> None:
        if self.plan.refuses():
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self._target))
        without_delay(client, server)
        link = _Link(self.plan, client, server)
        self._links.append(link)
        link.start()

    def close(self) -> None:
        super().close()
        for link in self._links:
            link.close()


class _Link:
    """One connection: a thread for each direction. `_struck` is the stream of the call that breaks, `_held` what waits.

    SUBTLE: headers are compressed by what was sent before on the connection. So nothing is left out of it and nothing
    overtakes: what comes late holds up all that is behind it.
    """

    def __init__(self, plan: Plan, client: socket.socket, server: socket.socket) -> None:
        self._plan, self._client, self._server = plan, client, server
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._struck = 0
        self._held: list[bytes] | None = None

    def start(self) -> None:
        for work in (self._requests, self._answers):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: object) -> None:
        with contextlib.suppress(OSError, EOFError):
            work()  # type: ignore[operator]
        self.close()

    def _requests(self) -> None:
        frames = Frames(self._client)
        self._server.sendall(frames.read(len(PREFACE)))
        while True:
            frame = frames.next()
            if frame.kind == HEADERS and self._fault is None and (fault := self._plan.decide()):
                self._begin(fault, frame.stream)
            if frame.stream == self._struck and frame.kind == RST_STREAM and self._give_up():
                continue
            if frame.stream == self._struck and self._fault in (Fault.LOST, Fault.REFUSED):
                return
            if frame.stream == self._struck and self._fault is Fault.HALF and frame.kind == DATA:
                self._server.sendall(frame.data[: len(frame.data) // 2])
                return
            if self._fault is Fault.LATE and self._held is not None:
                self._held.append(frame.data)
            else:
                self._server.sendall(frame.data)

    def _begin(self, fault: Fault, stream: int) -> None:
        with self._lock:
            self._fault, self._struck = fault, stream
            self._held = [] if fault in (Fault.LATE, Fault.ANSWER_LATE) else None

    def _give_up(self) -> bool:
        """The caller has given up: what was held continues. Whether the other side is not to know that."""
        with self._lock:
            held, self._held = self._held or [], None
            to = self._server if self._fault is Fault.LATE else self._client
            for data in held:
                to.sendall(data)
        return self._fault is Fault.LATE

    def _answers(self) -> None:
        frames = Frames(self._server)
        while True:
            frame = frames.next()
            is_struck = frame.stream == self._struck != 0
            if is_struck and self._fault is Fault.ANSWER_LOST:
                return
            if is_struck and self._fault is Fault.HALF_ANSWER and frame.kind == DATA:
                self._client.sendall(frame.data[: len(frame.data) // 2])
                return
            with self._lock:
                if self._fault is Fault.ANSWER_LATE and self._held is not None and (is_struck or self._held):
                    self._held.append(frame.data)
                    continue
            self._client.sendall(frame.data)

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
