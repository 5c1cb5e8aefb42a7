"""A relay between clients and a shard server that can leave the clients, while the server goes on with what it has."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

DATA = 0


class Relay:
    """Forwards a port of its own to `target`. Counts the frames of HTTP/2 with data, by direction."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._changed = threading.Condition()
        self.asked = self.answered = self.bytes_asked = 0
        self.holds_answers = False
        self.loses_what_is_said = False
        """What clients send does not reach the server any more: that a call is given up, say."""
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def leave_clients(self) -> None:
        """Close the connections of clients, and take no more. The server's stay, and what it answers is counted."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def wait(self, what: str, count: int) -> None:
        """Until so many frames with data have passed."""
        with self._changed:
            assert self._changed.wait_for(lambda: getattr(self, what) >= count, 30), f"{what}: {getattr(self, what)}"

    def close(self) -> None:
        """End. The server has ended before."""
        self.leave_clients()
        for thread in self._threads:
            thread.join(30)

    def _start(self, call: Callable[..., None], *sockets: socket.socket) -> None:
        thread = threading.Thread(target=call, args=sockets, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._clients.append(client)
                self._start(self._ask, client, server)
                self._start(self._answer, client, server)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        frames = Frames(preface=24)
        with contextlib.suppress(OSError), client:
            while data := client.recv(1 << 16):
                if self.loses_what_is_said:
                    continue
                self.bytes_asked += len(data)
                self._count("asked", frames.data(data))  # first, as the answer may be there before this thread goes on
                server.sendall(data)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        frames = Frames()
        with contextlib.suppress(OSError), server:
            while data := server.recv(1 << 16):
                found = frames.data(data)
                self._count("answered", found)
                if not (self.holds_answers and found):
                    with contextlib.suppress(OSError):
                        client.sendall(data)

    def _count(self, what: str, by: int) -> None:
        with self._changed:
            setattr(self, what, getattr(self, what) + by)
            self._changed.notify_all()


class Frames:
    """Counts the frames with data of one direction of a connection."""

    def __init__(self, preface: int = 0) -> None:
        self._skip, self._head, self._is_data = preface, b"", False

    def data(self, received: bytes) -> int:
        """How many frames with data end in what was received next."""
        found = 0
        while received:
            if self._skip:
                received, self._skip = received[self._skip :], max(0, self._skip - len(received))
                found += self._is_data and not self._skip
                continue
            more = 9 - len(self._head)
            self._head, received = self._head + received[:more], received[more:]
            if len(self._head) == 9:
                length = int.from_bytes(self._head[:3], "big")
                self._is_data = self._head[3] == DATA and length > 0
                self._skip, self._head = length, b""
        return found
