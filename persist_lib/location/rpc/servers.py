"""The servers of a location: which of them is asked, and what a failed call says about what it did."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import grpc

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.format.wire import MOST_BYTES, SERVICE, decode_reply, encode_call
from persist_lib.location.rpc.credentials import Credentials
from persist_lib.location.rpc.tls import Tls
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Runtime

CONNECT_S = 2.0
"""How long to wait for a connection to a server before the next one is asked."""
SHUNNED_S = 1.0
"""How long a server that did not answer is asked last."""
GRACE_S = 2.0
"""How much longer than the caller's timeout to wait for an answer, so that the server can say what is so."""
CALL_S = 60.0
"""How long a call may take that has no deadline."""
NOT_DONE = frozenset({
    grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
})  # fmt: skip
"""What a server says before it does anything, where trying again does not help."""
OPTIONS = [
    ("grpc.max_send_message_length", MOST_BYTES), ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.enable_retries", 0),  # a call is never sent twice behind our back
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000),
]  # fmt: skip


class Server:
    """One server: its connection, and whether it answered of late. Safe to use from several threads."""

    def __init__(self, address: str, runtime: Runtime, credentials: Credentials, tls: Tls | None) -> None:
        self.address, self._runtime, self._credentials, self._tls = address, runtime, credentials, tls
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._made_with: grpc.ChannelCredentials | None = None
        self._is_ready = False
        self.shunned_until = 0.0
        self._process = os.getpid()

    def connect(self, seconds: float) -> grpc.Channel:
        """The connection, which is there now. Raises Determinate if there is none after so many seconds."""
        with self._lock:
            tls = None if self._tls is None else self._tls.credentials()
            # A fork cannot use its parent's. A channel with former certificates is left to the calls that use it.
            is_stale = self._process != os.getpid() or (tls is not self._made_with and not self._is_ready)
            if self._channel is None or is_stale:
                self._channel, self._made_with = self._open(tls), tls
                self._is_ready, self._process = False, os.getpid()
            channel = self._channel
        if not self._is_ready:
            # SUBTLE: a call that fails says nothing about whether it was carried out. One that only asks for the time
            # tells beforehand whether there is a server; `channel_ready_future` leaves a thread behind that fails.
            try:
                self.send(channel, "now", encode_call(None, seconds), max(0.001, seconds))
            except grpc.RpcError as error:
                self.shun()
                if error.code() in NOT_DONE:
                    raise _failed(self, "now", error) from error
                raise Determinate(
                    f"the shard server {self.address} cannot be reached ({error.code().name}, {error.details()}); "
                    "nothing was sent to it",
                    address=self.address,
                ) from error
            self._is_ready = True
        return channel

    def send(self, channel: grpc.Channel, name: str, call: bytes, seconds: float) -> bytes:
        """Send a call, with the token, and return the bytes of its answer. Raises grpc.RpcError."""
        data: bytes = channel.unary_unary(f"/{SERVICE}/{name}")(
            call, timeout=seconds, metadata=self._credentials.metadata()
        )
        return data

    def stream(self, channel: grpc.Channel, name: str, said: Iterator[bytes]) -> grpc.Call:
        """Begin a call in which both sides say what they have to say, with the token. Iterate over it for answers."""
        call: grpc.Call = channel.stream_stream(f"/{SERVICE}/{name}")(said, metadata=self._credentials.metadata())
        return call

    def shun(self) -> None:
        """Ask the others first for a while, and make sure of the connection before the next call."""
        self._is_ready = False
        self.shunned_until = self._runtime.monotonic() + SHUNNED_S

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            if self._channel is not None and self._process == os.getpid():
                self._channel.close()
            self._channel = None

    def _open(self, tls: grpc.ChannelCredentials | None) -> grpc.Channel:
        if tls is None:
            return grpc.insecure_channel(self.address, options=OPTIONS)
        return grpc.secure_channel(self.address, tls, options=OPTIONS)


class Servers:
    """All servers of a location. A shard has the same first server for all clients, so that its commands meet there."""

    def __init__(
        self, addresses: list[str], runtime: Runtime, credentials: Credentials | None = None,
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        credentials = credentials or Credentials()
        self._servers = [Server(address, runtime, credentials, tls) for address in addresses]
        self.runtime = runtime
        self._ahead_ms = 0

    def now(self) -> int:
        """The store's clock (ms), as of the newest answer and this process's clock since then."""
        return self._ahead_ms + int(self.runtime.monotonic() * 1000)

    def is_there(self, seconds: float) -> bool:
        """Whether a server answers now, each within so many seconds. Makes one request of each that does not."""
        for server in self._servers:
            try:
                server.connect(seconds)
            except PersistError:
                continue
            return True
        return False

    def call(self, name: str, arguments: object, kind: Any, *, route: str, seconds: float | None, reads: bool) -> Any:
        """Ask a server, and return its answer, of type `kind`. Waits at most `seconds`, or the caller's deadline.

        Servers that cannot be reached are passed over and, if the call only `reads`, those that do not answer as well.
        Raises Gone if that is so of all: none did anything. Raises Indeterminate if a server got the call and did not
        answer, and what a server told, if none carried it out.
        """
        seconds = patience_s(CALL_S) if seconds is None else seconds
        deadline = self.runtime.deadline(max(0.001, seconds))
        told: Determinate | None = None
        gone = Determinate("no shard server was asked; nothing was done")
        for server in self._by_turn(route):
            try:
                channel = server.connect(min(CONNECT_S, deadline.left_s()))
            except Determinate as error:
                gone = error
                continue
            try:
                return self._ask(server, channel, name, arguments, kind, deadline.left_s())
            except Determinate as error:  # it did nothing: perhaps another one can
                told = error
            except _Unanswered as error:
                if not reads:
                    raise Indeterminate(f"{error}; it is not known what was done") from error
                gone = Determinate(f"{error}; nothing was changed")
        if told is not None:
            raise told
        raise Gone(gone.message, **gone.fields) from gone

    def order(self, route: str) -> list[Server]:
        """All servers, in an order that depends on the route alone."""
        first = crc32(route.encode()) % len(self._servers)
        return [*self._servers[first:], *self._servers[:first]]

    def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.close()

    def _ask(
        self, server: Server, channel: grpc.Channel, name: str, arguments: object, kind: Any, seconds: float
    ) -> Any:
        call = encode_call(arguments, seconds)
        try:
            data = server.send(channel, name, call, seconds + GRACE_S)
        except grpc.RpcError as error:
            raise _failed(server, name, error) from error
        value, now = decode_reply(data, kind)
        self._ahead_ms = now - int(self.runtime.monotonic() * 1000)
        return value

    def _by_turn(self, route: str) -> Iterator[Server]:
        """The servers, those first that answered of late; else in an order that depends on the route alone."""
        now = self.runtime.monotonic()
        return iter(sorted(self.order(route), key=lambda server: server.shunned_until > now))


class Gone(Determinate):
    """No server is there: none could be reached or, for a call that only reads, answered."""

    def told(self) -> Determinate:
        """The same as an error that users know."""
        return Determinate(self.message, **self.fields)


class _Unanswered(Exception):
    """A server may have got a call, and did not answer it."""


def _failed(server: Server, name: str, error: grpc.RpcError) -> Exception:
    code, details = error.code(), error.details()
    told = f"the shard server {server.address} failed {name}: {code.name}, {details}"
    if code in NOT_DONE:
        return InvalidUsage(f"{told}. Nothing was done", address=server.address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidUsage(f"{told}. It is too large, or the server has too many calls", address=server.address)
    server.shun()
    return _Unanswered(told)
