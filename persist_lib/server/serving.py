"""The server itself: calls over gRPC, served by an event loop in a thread of its own.

A call for the store runs in a thread of a pool; a commit waits in the loop until the funnels have answered it, so that
thousands can wait. When a client goes, its commands are dropped unless they were sent already.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import grpc.aio

from persist_lib.client import Client
from persist_lib.errors import Indeterminate, InvalidUsage, PersistError
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest, Row
from persist_lib.location.commands import Proposed
from persist_lib.location.wrap.deadline import within
from persist_lib.server.asking import ask
from persist_lib.server.funnels import Funnels

log = logging.getLogger("persist.server")
READERS = 32
"""How many calls of the store, other than commits, are carried out at the same time."""
LONGEST_S = 600.0
"""The longest timeout of a call that is believed."""
CALLS_MOST = 4096
"""How many calls are served at the same time; more are refused before anything is done."""
OPTIONS = [
    ("grpc.max_send_message_length", wire.MOST_BYTES), ("grpc.max_receive_message_length", wire.MOST_BYTES),
    ("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
]  # fmt: skip
Call = Callable[[Any], Any]


def _check_loopback(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback and port.isdecimal()):
        raise InvalidUsage(
            f"a shard server listens on the loopback interface only, as in 127.0.0.1:7600, as it has neither TLS nor "
            f"tokens: got {listen!r}",
            listen=listen,
        )


class ShardServer:
    """Serves the shards of a location to clients that name it as `consensus="persist://host:port"`.

    `client` is a client of that location; its Consensus is asked directly. Use it from one thread.
    """

    def __init__(self, client: Client, listen: str = "127.0.0.1:7600") -> None:
        self._client, self._listen = client, listen
        self._funnels = Funnels(client.blob, client.consensus, client.config, client.runtime, client.reads)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="persist-server")
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def start(self) -> int:
        """Begin to serve, and return the port. Raises InvalidUsage if the address cannot be listened on.

        Whoever reaches the port may change every shard. So only addresses of the loopback interface are taken.
        """
        _check_loopback(self._listen)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="persist-server", daemon=True)
        self._funnels.start()
        self._thread.start()
        self.port = self._run(self._start())
        return self.port

    def stop(self, seconds: float = 10.0) -> None:
        """Take no more calls, serve those that wait for at most `seconds`, and end. Each call is answered."""
        self._funnels.stop()
        self._run(self._stop(seconds))
        self._funnels.give_up()
        self._funnels.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown()

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def _start(self) -> int:
        consensus = self._client.consensus
        calls: dict[str, tuple[Any, Call]] = {
            "now": (type(None), lambda _: None),
            "head": (str, consensus.head),
            "scan": (tuple[str, SeqNo, int], lambda given: self._scan(*given)),
            "compare_and_set": (tuple[str, Newest | None, bytes], lambda given: consensus.compare_and_set(*given)),
            "compare_and_set_many": (dict[str, tuple[Newest | None, bytes]], consensus.compare_and_set_many),
            "truncate": (tuple[str, SeqNo], lambda given: consensus.truncate(*given)),
            "rewind": (tuple[str, SeqNo, Newest], lambda given: consensus.rewind(*given)),
            "list_keys": (type(None), lambda _: list(consensus.list_keys())),
            "heads": (type(None), lambda _: consensus.heads()),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._serve, kind, partial(self._in_pool, call)))
            for name, (kind, call) in calls.items()
        }
        handlers["commit"] = grpc.unary_unary_rpc_method_handler(partial(self._serve, wire.Commit, self._commit))
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=CALLS_MOST)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        try:
            port = server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise InvalidUsage(f"cannot listen on {self._listen}: {error}", listen=self._listen) from error
        await server.start()
        self._server = server
        return int(port)

    async def _stop(self, seconds: float) -> None:
        if self._server is not None:
            await self._server.stop(seconds)

    async def _serve(
        self, kind: Any, call: Callable[[Any, float, str], Awaitable[Any]], data: bytes, context: Any
    ) -> bytes:
        """Carry out a call, and encode its answer or its error."""
        now = self._client.consensus.now
        try:
            given, timeout_s = wire.decode_call(data, kind)
            value = await call(given, min(timeout_s, LONGEST_S), context.peer())
            return wire.encode_reply(value, now())
        except PersistError as error:
            return wire.encode_error(error, now())
        except Exception as error:
            log.exception("a call failed")
            return wire.encode_error(Indeterminate(f"the server failed: {error!r}"), now())

    async def _in_pool(self, call: Call, given: Any, timeout_s: float, _peer: str) -> Any:
        deadline = self._client.runtime.deadline(timeout_s)
        return await self._loop.run_in_executor(self._pool, within, deadline, partial(call, given))

    async def _commit(self, given: wire.Commit, timeout_s: float, peer: str) -> list[wire.Answer]:
        proposed = [
            Proposed(shard, wire.decode_command(name, fields), known) for shard, known, name, fields in given.commands
        ]
        deadline = self._client.runtime.deadline(timeout_s)
        requests = ask(self._funnels, proposed, given.token, peer, deadline, is_repeated=given.is_repeated)
        try:
            answers = await asyncio.gather(*(asyncio.wrap_future(request.answer) for request in requests))
        finally:
            for request in requests:
                request.is_dropped = True
        return [
            wire.Answer(seqno, is_committed, None if refusal is None else wire.encode_refusal(refusal), rows)
            for seqno, refusal, is_committed, rows in answers
        ]

    def _scan(self, key: str, from_seqno: SeqNo, limit: int) -> tuple[list[Row], bool]:
        rows = self._client.consensus.scan(key, from_seqno, limit)
        fit = wire.rows_that_fit(rows, lambda row: len(row.data))
        return rows[:fit], fit == len(rows)
