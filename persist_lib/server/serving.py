"""The server itself: calls over gRPC, served by an event loop in a thread of its own.

A call for the store runs in a thread of a pool; a commit waits in the loop until the funnels have answered it, so that
thousands can wait. When a client goes, its commands are dropped unless they were sent already.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from persist_lib.client import Client
from persist_lib.core.plan.debts import Debts
from persist_lib.core.rights import needed_for
from persist_lib.errors import Indeterminate, InvalidUsage, PersistError
from persist_lib.format import wire
from persist_lib.format.pushed import FOLLOW
from persist_lib.location.commands import Proposed
from persist_lib.location.rpc.credentials import is_loopback
from persist_lib.location.wrap.deadline import within
from persist_lib.server.access import Access, Caller, anybody
from persist_lib.server.announcing import Announcing
from persist_lib.server.answers import Answers
from persist_lib.server.asking import ask
from persist_lib.server.certificates import Certificates
from persist_lib.server.following import Following
from persist_lib.server.funnels import Funnels
from persist_lib.server.looks import Looks
from persist_lib.server.pushing import Pushing
from persist_lib.server.raw import RAW, Raw
from persist_lib.server.watching import Watching

log = logging.getLogger("persist.server")
READERS = 32
"""How many calls of the store, other than commits, are carried out at the same time."""
LONGEST_S = 600.0
"""The longest timeout of a call that is believed."""
SURVEYS = 2
"""How many calls for what is due are carried out at the same time: one looks, and the next one waits for it."""
DEBTS = tuple[str, dict[str, list[str]], int | None, float]
CALLS_MOST = 4096
"""How many calls are served at the same time; more are refused before anything is done."""
OPTIONS = [
    ("grpc.max_send_message_length", wire.MOST_BYTES), ("grpc.max_receive_message_length", wire.MOST_BYTES),
    ("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
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
    ) -> None:  # fmt: skip
        """`token_file` lists the clients and their rights (`server.access`); without it, everybody may do everything.

        `tls_cert` and `tls_key` are a certificate chain and its key, in PEM; with `tls_client_ca`, clients need a
        certificate of one of these authorities besides. All files are read anew when they change. Raises InvalidUsage
        if one cannot be read or is wrong, or for a certificate without its key.
        """
        self._client, self._listen = client, listen
        self._access = None if token_file is None else Access(token_file)
        if (tls_cert is None) != (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
            raise InvalidUsage(
                "TLS needs both a certificate and its private key; authorities of clients come with them"
            )
        self._certificates = (
            None if tls_cert is None or tls_key is None else Certificates(tls_cert, tls_key, tls_client_ca)
        )
        self._pushing = Pushing()
        self._consensus = Announcing(client.consensus, self._pushing)
        self._watching = Watching(self._consensus, self._pushing, client.runtime)
        self._funnels = Funnels(client.blob, self._consensus, client.config, client.runtime, client.reads)
        self._looks = Looks(client, self._consensus, self._funnels)
        self._surveys = ThreadPoolExecutor(SURVEYS, thread_name_prefix="persist-debts")
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="persist-server")
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def start(self) -> int:
        """Begin to serve, and return the port. Raises InvalidUsage if the address cannot be listened on.

        Without both tokens and TLS, only addresses of the loopback interface are taken.
        """
        _check_address(self._listen, is_safe=self._access is not None and self._certificates is not None)
        self._loop = asyncio.new_event_loop()
        self._answers = Answers(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="persist-server", daemon=True)
        self._funnels.start()
        self._thread.start()
        self._pushing.start(self._loop)
        self.port = self._run(self._start())
        self._watching.start()
        return self.port

    def stop(self, seconds: float = 10.0) -> None:
        """Take no more calls, serve those that wait for at most `seconds`, and end. Each call is answered."""
        self._funnels.stop()
        self._run(self._stop(seconds))
        self._watching.close()
        self._funnels.give_up()
        self._funnels.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown()
        self._surveys.shutdown()

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def _start(self) -> int:
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._serve, raw.kind, partial(self._raw, name, raw)))
            for name, raw in RAW.items()
        }
        handlers["commit"] = grpc.unary_unary_rpc_method_handler(partial(self._serve, wire.Commit, self._commit))
        follow = Following(self._pushing, self._caller).serve
        handlers[FOLLOW] = grpc.stream_stream_rpc_method_handler(follow)
        handlers["debts"] = grpc.unary_unary_rpc_method_handler(partial(self._serve, DEBTS, self._debts))
        server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=CALLS_MOST)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        try:
            if self._certificates is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, self._certificates.credentials())
        except RuntimeError as error:
            raise InvalidUsage(f"cannot listen on {self._listen}: {error}", listen=self._listen) from error
        await server.start()
        self._server = server
        return int(port)

    async def _stop(self, seconds: float) -> None:
        self._pushing.stop()
        if self._server is not None:
            await self._server.stop(seconds)

    def _caller(self, context: Any) -> Caller:
        return anybody(context.peer()) if self._access is None else self._access.caller(context.invocation_metadata())

    async def _serve(
        self, kind: Any, call: Callable[[Any, float, Caller], Awaitable[Any]], data: bytes, context: Any
    ) -> bytes:
        """Carry out a call, and encode its answer or its error."""
        now = self._client.consensus.now
        try:
            caller = self._caller(context)
            given, timeout_s = wire.decode_call(data, kind)
            value = await call(given, min(timeout_s, LONGEST_S), caller)
            return wire.encode_reply(value, now())
        except PersistError as error:
            return wire.encode_error(error, now())
        except Exception as error:
            log.exception("a call failed")
            return wire.encode_error(Indeterminate(f"the server failed: {error!r}"), now())

    async def _raw(self, name: str, raw: Raw, given: Any, timeout_s: float, caller: Caller) -> Any:
        for shard in raw.shards(given):
            caller.check(shard, raw.needed, f"{name} the log of")
        deadline = self._client.runtime.deadline(timeout_s)
        call = partial(raw.call, self._consensus, given)
        return raw.shown(await self._loop.run_in_executor(self._pool, within, deadline, call), caller)

    async def _debts(self, given: Any, timeout_s: float, caller: Caller) -> Debts | None:
        call = partial(self._looks.debts, self._looks.ask(), caller, *given)
        deadline = self._client.runtime.deadline(timeout_s)
        return await self._loop.run_in_executor(self._surveys, within, deadline, call)

    async def _commit(self, given: wire.Commit, timeout_s: float, caller: Caller) -> list[wire.Answer]:
        proposed = [
            Proposed(shard, wire.decode_command(name, fields), known) for shard, known, name, fields in given.commands
        ]
        for one in proposed:  # all of them before the first is taken
            caller.check(one.shard, needed_for(one.command), f"{type(one.command).__name__} on")
        deadline = self._client.runtime.deadline(timeout_s)
        requests = ask(self._funnels, proposed, given.token, caller.name, deadline, is_repeated=given.is_repeated)
        try:
            answers = await self._answers.of(requests)
        finally:
            for request in requests:
                request.is_dropped = True
        return [
            wire.Answer(
                one.seqno,
                one.is_committed,
                None if one.refusal is None else wire.encode_refusal(one.refusal),
                one.rows,
                one.outcome,
                one.is_due,
            )
            for one in answers
        ]
