"""Whether a server is to be asked: it serves, its store has answered of late, and it is not about to end.

HTTP (`Pages`) and gRPC's own health service say so, to load balancers and to supervisors. Neither needs a token: they
tell nothing of any shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.format.wire import SERVICE

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
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            # Clients that ask badly, slowly or too often get no answer.
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


log = logging.getLogger("persist.server")
LOOK_S = 5.0
"""How often the store is asked for something."""
LATE_S = 15.0
"""A store that has not answered for so long is not there."""
WATCHES_MOST = 64
"""How many may wait for changes of the health service. They wait for ever, and have no token."""


class Readiness(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Looks at the store now and then, by `look`, in a thread of `pool`. For one thread: a server's loop."""

    def __init__(self, look: Callable[[], object], monotonic: Callable[[], float]) -> None:
        self._look, self._monotonic = look, monotonic
        self._answered: float | None = None
        self._failed = "it was not asked yet"
        self._is_stopping = False
        self._watches = 0
        self._changed = asyncio.Event()
        self._told = False

    def why_not(self) -> str | None:
        """Why this server is not to be asked; None if it is."""
        if self._is_stopping:
            return "this server is stopping"
        if self._answered is None or self._monotonic() - self._answered > LATE_S:
            return f"the store does not answer: {self._failed}"
        return None

    def stop(self) -> None:
        """This server is about to end."""
        self._is_stopping = True
        self._tell()

    async def first(self, seconds: float) -> None:
        """Wait for the first look, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def run(self, pool: Executor) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_once(pool), LATE_S)
            self._tell()
            await asyncio.sleep(LOOK_S)

    async def _look_once(self, pool: Executor) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(pool, self._look)
            self._answered = self._monotonic()
        except PersistError as error:
            self._failed = error.message

    def _tell(self) -> None:
        if (is_ready := self.why_not() is None) != self._told:
            self._told = is_ready
            log.warning("ready: the store answers" if is_ready else f"not ready: {self.why_not()}")
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if service not in ("", SERVICE):
            return kinds.SERVICE_UNKNOWN
        return kinds.NOT_SERVING if self.why_not() else kinds.SERVING

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        """As the health service says. It ends when the server does."""
        if self._watches >= WATCHES_MOST:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wait for changes: use Check")
        self._watches += 1
        try:
            last = None
            while True:
                changed = self._changed
                if (status := self._status(request.service)) != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                    continue  # it may have changed while this was sent
                if self._is_stopping:
                    return
                await changed.wait()
        finally:
            self._watches -= 1
