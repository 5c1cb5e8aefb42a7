"""The server itself: its start, its end, and what it listens on. Its calls are in `rpc_calls`.

An event loop in a thread of its own serves them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from persist_lib.client import Client
from persist_lib.errors import InvalidUsage
from persist_lib.format import wire
from persist_lib.format.wire import FOLLOW
from persist_lib.location.rpc.credentials import is_loopback
from persist_lib.location.rpc.grpc_forks import CORE
from persist_lib.location.wrap.deadline import within
from persist_lib.server.access import Access, Certificates, TableNames
from persist_lib.server.metrics import CONTENT_TYPE, Measures, figures
from persist_lib.server.probes import LOOK_S, Page, Pages, Readiness
from persist_lib.server.row_push import Announcing, Following, Pushing, Watching
from persist_lib.server.rpc_calls import Calls, Looks
from persist_lib.shard.funnels import Funnels
from persist_lib.telemetry import collector

log = logging.getLogger("persist.server")
READERS = 32
"""How many calls of the store, other than commits, are carried out at the same time."""
SURVEYS = 2
"""How many calls for what is due are carried out at the same time: one looks, and the next one waits for it."""
CALLS_MOST = 16_384
"""How many calls there are at the same time, heartbeats and those that are refused included. gRPC refuses more."""
CONNECTIONS_MOST = 8192
"""The most connections; more are closed at once. Fewer where the process may open fewer files: half of them."""
ANSWER_S = 2.0
"""At the end, how long to wait for answers to reach those whose commands were given up."""
OPTIONS = [
    ("grpc.max_send_message_length", wire.MOST_BYTES), ("grpc.max_receive_message_length", wire.MOST_BYTES),
    ("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.max_metadata_size", 8192), ("grpc.absolute_max_metadata_size", 16_384),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),  # also for the first frames: a silent connection is closed then
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 60_000), ("grpc.keepalive_timeout_ms", 20_000),
]  # fmt: skip


def _check_address(listen: str, *, is_safe: bool) -> None:
    if not listen.rpartition(":")[2].isdecimal() or not listen.rpartition(":")[0]:
        raise InvalidUsage(f"a shard server listens on HOST:PORT, as in 127.0.0.1:7600 on the loopback interface: got "
                           f"{listen!r}", listen=listen)  # fmt: skip
    if not (is_safe or is_loopback(listen)):
        raise InvalidUsage(
            "without both tokens and TLS a shard server listens on the loopback interface only, as in 127.0.0.1:7600: "
            f"anybody could change every shard, or read tokens on their way. Got {listen!r}; give it a token file, "
            "a certificate and its key as well",
            listen=listen,
        )


class ShardServer:
    """Serves the shards of a location to clients that name it as `consensus="persist://host:port"`.

    `client` is a client of that location; its Consensus is asked directly. Use it from one thread.
    """

    def __init__(
        self, client: Client, listen: str = "127.0.0.1:7600", *, token_file: Path | None = None,
        tls_cert: Path | None = None, tls_key: Path | None = None, tls_client_ca: Path | None = None,
        http: str | None = None, named_shards: int = 0,
    ) -> None:  # fmt: skip
        """`token_file` lists the clients and their rights (`server.access`); without it, everybody may do everything.

        `tls_cert` and `tls_key` are a certificate chain and its key, in PEM; with `tls_client_ca`, clients need a
        certificate of one of these authorities too. All files are read again when they change. At `http`, pages tell
        health and figures; `named_shards` of them have names there. Raises InvalidUsage if a file cannot be read or is
        wrong, or for a certificate without its key.
        """
        self._client, self._listen = client, listen
        self._names = TableNames(client)
        self._access = None if token_file is None else Access(token_file, self._names.of)
        if (tls_cert is None) != (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
            raise InvalidUsage(
                "TLS needs both a certificate and its private key; authorities of clients come with them"
            )
        self._certificates = (
            None if tls_cert is None or tls_key is None else Certificates(tls_cert, tls_key, tls_client_ca)
        )
        runtime, self._pushing = client.runtime, Pushing()
        consensus = Announcing(client.consensus, self._pushing)
        self._watching = Watching(consensus, self._pushing, runtime)
        self._measures = Measures(named_shards, lambda: runtime.clock_ms() / 1000, collector(client))
        self._funnels = Funnels(
            client.blob, consensus, client.config, runtime, client.reads, observe=self._measures.committed,
            later=lambda seconds, call: self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call),
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="persist-server")
        self._surveys = ThreadPoolExecutor(SURVEYS, thread_name_prefix="persist-debts")
        looks = Looks(client, consensus, self._funnels, self._surveys)
        self._calls = Calls(
            consensus, self._funnels, self._access, runtime, self._pool, self._measures, looks, self._names
        )
        look = partial(client.consensus.head, "-ready")
        self._readiness = Readiness(lambda: within(runtime.deadline(LOOK_S), look), runtime.monotonic)
        self._pages = None if http is None else Pages(http, self._shown())
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self.port = self.http_port = 0

    def start(self) -> int:
        """Begin to serve, and return the port. Raises InvalidUsage if an address cannot be listened on, or in a process
        that was forked from one which used gRPC, as one with a server does.

        Without both tokens and TLS, only addresses of the loopback interface are taken. The store has answered then, or
        had some seconds to.
        """
        CORE.use("a shard server")
        _check_address(self._listen, is_safe=self._access is not None and self._certificates is not None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="persist-server", daemon=True)
        self._funnels.start()
        self._thread.start()
        self._pushing.start(self._loop)
        try:
            self.port = self._run(self._start())
        except BaseException:
            self.stop(0)
            raise
        self._watching.start()
        figures(
            self._measures, self._funnels, self._calls.load, self._pushing, self._access, self._certificates, self.port
        )
        return self.port

    def stop(self, seconds: float = 10.0) -> bool:
        """Take no more calls, serve those that wait for at most `seconds`, and end. Each call is answered.

        Probes fail first. What is still in doubt after that time is answered as unknown. Returns whether all
        threads have ended: one that waits for the store, which does not answer, ends when the store's timeout does.
        Raises InvalidUsage in a forked child: the server and its threads are the parent's.
        """
        CORE.use("the shard server of another process")
        self._run(self._not_ready())
        self._funnels.stop()
        if self._server is not None:
            self._drain(self._server, seconds)
        self._watching.close()
        self._funnels.give_up()
        ended = self._funnels.close(ANSWER_S)
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # GRPC ends its own thread when the last server is freed. Amid a collection in a forked child, which has
        # no such thread, it would wait for ever; after `close`, the loop no longer lets go of gRPC's socket.
        self._server = None
        self._loop.close()
        for pool in (self._pool, self._surveys):
            pool.shutdown(wait=ended, cancel_futures=True)
        self._names.close()
        return ended

    def _drain(self, server: grpc.aio.Server, seconds: float) -> None:
        stopped: Future[None] = asyncio.run_coroutine_threadsafe(server.stop(seconds + 2 * ANSWER_S), self._loop)
        give_up = partial(self._loop.call_soon_threadsafe, self._calls.give_up)
        for longest_s, gives_up in ((seconds, self._funnels.give_up), (ANSWER_S, give_up)):
            try:
                return stopped.result(longest_s)
            except Late:
                gives_up()
        return stopped.result()

    def _serve(self) -> None:
        # A method, so that the thread refers to the server. Without a reference it would be collected, and end.
        self._loop.run_forever()

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def _start(self) -> int:
        options = [*OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections())]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_MOST)
        following = Following(self._pushing, self._calls.caller, self._calls.known)
        handlers = {**self._calls.handlers(), FOLLOW: grpc.stream_stream_rpc_method_handler(following.serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._readiness, server)
        try:
            if self._certificates is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, self._certificates.credentials(self._client.runtime.sleep))
        except RuntimeError as error:
            raise InvalidUsage(f"cannot listen on {self._listen}: {error}", listen=self._listen) from error
        if self._pages is not None:
            self.http_port = await self._pages.start()
        await server.start()
        self._server = server
        self._looking = asyncio.create_task(self._readiness.run(self._pool))
        await self._readiness.first(LOOK_S)
        return int(port)

    async def _not_ready(self) -> None:
        self._readiness.stop()
        self._pushing.stop()

    async def _end(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._pages is not None:
            await self._pages.stop()

    def _shown(self) -> dict[str, Any]:
        def ready() -> Page:
            why_not = self._readiness.why_not()
            return Page("200 OK", b"ready\n") if why_not is None else Page("503 Service Unavailable", why_not.encode())

        return {
            "/healthz": lambda: Page("200 OK", b"alive\n"),
            "/readyz": ready,
            "/metrics": lambda: Page("200 OK", self._measures.shown(), CONTENT_TYPE),
        }


def most_connections() -> int:
    """How many connections there may be, so that files are left for the store."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MOST if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS_MOST, soft // 2))
