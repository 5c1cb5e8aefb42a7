"""Pages over plain HTTP, for probes and Prometheus: `/healthz`, `/readyz`, `/metrics`. They take no token.

They are served by the server's own loop: one that hangs answers none of them. Whoever asks gets one answer on a
connection, which is bounded in size, in time and in number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from persist_lib.errors import InvalidUsage

CONNECTIONS_MOST = 64
PATIENCE_S = 5.0
"""How long a request may take to arrive, and its answer to be read."""
REQUEST_BYTES = 8192


class Page(NamedTuple):
    """An answer: its status, its content, and the type of that."""

    status: str
    content: bytes
    kind: str = "text/plain; charset=utf-8"


class Pages:
    """The pages at `listen` (HOST:PORT; port 0 takes a free one). For one thread: a server's loop."""

    def __init__(self, listen: str, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._listen, self._pages = listen, pages
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises InvalidUsage for an address that cannot be listened on."""
        host, colon, port = self._listen.rpartition(":")
        try:
            if not (host and colon and port.isdecimal()):
                raise OSError("it is not HOST:PORT")
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=REQUEST_BYTES, reuse_address=True
            )
        except (OSError, OverflowError) as error:
            raise InvalidUsage(
                f"cannot serve HTTP on {self._listen}, as in 127.0.0.1:7601: {error}", listen=self._listen
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            # Whoever asks badly, slowly or too often is left without an answer.
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                if self._open <= CONNECTIONS_MOST:
                    async with asyncio.timeout(PATIENCE_S):
                        writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                        await writer.drain()
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        page = self._pages.get(rest.partition(" ")[0].partition("?")[0])
        if method not in ("GET", "HEAD"):
            told = Page("405 Method Not Allowed", b"only GET and HEAD\n")
        elif page is None:
            told = Page("404 Not Found", f"there are: {' '.join(self._pages)}\n".encode())
        else:
            told = page()
        head = (
            f"HTTP/1.1 {told.status}\r\nContent-Type: {told.kind}\r\nContent-Length: {len(told.content)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else told.content)
