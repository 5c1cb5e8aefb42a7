"""A server on a port of the loopback interface, which does something with each connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

from persist_lib.runtime.threads import Resource


class Loopback(Resource, ABC):
    """Listens on `port` until it is closed. A thread for each connection calls `connected`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @abstractmethod
    def connected(self, client: socket.socket) -> None:
        """Serve a connection. An error of the system ends it."""

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.connected(client)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def without_delay(*ends: socket.socket) -> None:
    """Send at once what is written."""
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hang_up(ends: Iterable[socket.socket]) -> None:
    """Close both directions of these connections, also where another thread reads them."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
