"""The servers of a location: which of them is asked, and what a failed call says about what it did."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import grpc

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.format.wire import MOST_BYTES, SERVICE, Unread, decode_reply, encode_call
from persist_lib.location.rpc.credentials import Credentials, Tls
from persist_lib.location.rpc.grpc_forks import CORE
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Bell

log = logging.getLogger("persist")
CONNECT_S = 2.0
"""How long to wait for a connection to a server before the next one is asked."""
SHUNNED_S = 1.0
SHUNNED_MOST_S = 30.0
"""How long a server that did not answer is asked last: at first, and at most. Each further time twice as long."""
CHECK_S = 0.25
"""How long such a server may take to answer that it is there, when it is tried again."""
SHARE_S, SHARE_LEAST_S = 2.0, 1.0
"""How long a server may take to answer where another one is there to ask, and at least where it has half of the time.
It may be paused or cut off, which no connection tells."""
GRACE_S = 2.0
"""How much longer than the caller's timeout to wait for an answer, so that the server can say what happened."""
FORK_WAITS_S = 5.0
"""How long a fork waits for calls under way."""
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
    """One server: its connection, and whether it answered of late. Safe to use from several threads, and after a fork.

    No connection is open across a fork: a child cannot use its parent's, and gRPC has to end before (`rpc.grpc_forks`).
    """

    def __init__(self, address: str, runtime: Runtime, credentials: Credentials, tls: Tls | None) -> None:
        self.address, self._runtime, self._credentials, self._tls = address, runtime, credentials, tls
        self._channel: grpc.Channel | None = None
        self.shunned_until = self._shunned_s = 0.0
        self._begin()
        enrol(self, Stage.STORES)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._bell = Bell(self._lock)
        self._users: set[object] = set()
        self._streams: set[grpc.Call] = set()
        self._forking = False
        self._made_with: grpc.ChannelCredentials | None = None
        self._is_ready = False

    @contextmanager
    def connected(self, seconds: float) -> Iterator[grpc.Channel]:
        """The connection, which is there now, and while it is in use. Forks wait for that.

        Raises Unreached if there is none after so many seconds.
        """
        use = object()
        try:
            self._enter(use)
            yield self._ready(seconds)
        finally:
            self._users.discard(use)
            if self._forking:
                self._bell.ring()

    def _enter(self, use: object) -> None:
        while use not in self._users:
            with self._lock:
                if not self._forking:
                    self._users.add(use)
            self._bell.wait(lambda: not self._forking, FORK_WAITS_S)

    def _ready(self, seconds: float) -> grpc.Channel:
        CORE.use(f"the shard server {self.address}")
        with self._lock:
            tls = None if self._tls is None else self._tls.credentials()
            # A channel with former certificates is left to the calls that use it.
            if self._channel is None or (tls is not self._made_with and not self._is_ready):
                self._channel, self._made_with, self._is_ready = self._open(tls), tls, False
            channel = self._channel
        if not self._is_ready:
            # A call that fails says nothing about whether it was carried out. One that only asks for the time
            # tells beforehand whether there is a server; `channel_ready_future` leaves a thread behind that fails.
            try:
                self.send(channel, "now", encode_call(None, seconds), max(0.001, seconds))
            except grpc.RpcError as error:
                self.shun()
                if error.code() in NOT_DONE:
                    raise _failed(self, "now", error) from error
                raise Unreached(
                    f"the shard server {self.address} cannot be reached ({error.code().name}, {error.details()}); "
                    "nothing was sent to it",
                    is_slow=error.code() == grpc.StatusCode.DEADLINE_EXCEEDED,
                ) from error
            self._is_ready = True
        return channel

    def send(self, channel: grpc.Channel, name: str, call: bytes, seconds: float) -> bytes:
        """Send a call, with the token, and return the bytes of its answer. Raises grpc.RpcError."""
        data: bytes = channel.unary_unary(f"/{SERVICE}/{name}")(
            call, timeout=seconds, metadata=self._credentials.metadata()
        )
        return data

    @contextmanager
    def stream(self, channel: grpc.Channel, name: str, said: Iterator[bytes]) -> Iterator[grpc.Call]:
        """A call in which both sides say what they have to say, with the token. Iterate over it for answers.

        It is cancelled at a fork.
        """
        call: grpc.Call = channel.stream_stream(f"/{SERVICE}/{name}")(said, metadata=self._credentials.metadata())
        try:
            self._streams.add(call)
            if self._forking:
                call.cancel()
            yield call
        finally:
            self._streams.discard(call)

    def shun(self) -> None:
        """Ask the others first for a while, and make sure of the connection before the next call."""
        now, self._is_ready = self._runtime.monotonic(), False
        if now < self.shunned_until:
            return  # for this time it is: other calls were under way, or nothing else is there to ask
        self._shunned_s = min(SHUNNED_MOST_S, 2 * self._shunned_s) or SHUNNED_S
        self.shunned_until = now + self._shunned_s
        log.info("the shard server %s does not answer; it is asked last for %g s", self.address, self._shunned_s)

    def answered(self) -> None:
        self._shunned_s = 0.0

    @property
    def is_shunned(self) -> bool:
        return self.shunned_until > self._runtime.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether it has answered no call since it was shunned."""
        return self._shunned_s > 0

    def close(self) -> None:
        with self._lock:
            channel, self._channel, self._is_ready = self._channel, None, False
        if channel is not None:
            channel.close()

    def before_fork(self) -> None:
        """Wait for calls under way, end streams and the connection, and begin nothing more.

        A call that does not end keeps its connection; the child then refuses to use gRPC.
        """
        self._forking = True
        deadline = self._runtime.deadline(FORK_WAITS_S)
        for call in list(self._streams):
            call.cancel()
        while not (self._bell.wait(lambda: not self._users, deadline.left_s()) or deadline.has_passed()):
            pass
        if not self._users:
            self.close()

    def after_fork_in_parent(self) -> None:
        self._forking = False
        self._bell.ring()

    def after_fork_in_child(self) -> None:
        """Begin without a connection: one of the parent's is left alone."""
        CORE.keep(self._channel)
        self._channel = None
        self._begin()

    def _open(self, tls: grpc.ChannelCredentials | None) -> grpc.Channel:
        if tls is None:
            return grpc.insecure_channel(self.address, options=OPTIONS)
        return grpc.secure_channel(self.address, tls, options=OPTIONS)


class Servers:
    """All servers of a location. A shard has the same first server for all clients, so that its commands meet there."""

    def __init__(
        self, addresses: list[str], runtime: Runtime, credentials: Credentials | None = None,
        tls: Tls | None = None, *, has_store: bool = False,
    ) -> None:  # fmt: skip
        """`has_store`: whether the store behind them can be asked as well."""
        credentials = credentials or Credentials()
        self._servers = [Server(address, runtime, credentials, tls) for address in addresses]
        self._has_store, self._has_other = has_store, has_store or len(addresses) > 1
        self.runtime = runtime
        self._ahead_ms = 0

    def now(self) -> int:
        """The store's clock (ms), as of the newest answer and this process's clock since then."""
        return self._ahead_ms + int(self.runtime.monotonic() * 1000)

    def is_there(self, seconds: float) -> bool:
        """Whether a server answers now, each within so many seconds. Makes one request of each that does not."""
        return any(self._answers(server, seconds) for server in self._servers)

    def call(
        self, name: str, arguments: object, kind: Any, *, route: str, seconds: float | None, reads: bool,
        takes_s: float = 0.0,
    ) -> Any:  # fmt: skip
        """Ask a server, and return its answer, of type `kind`. Waits at most `seconds`, or the caller's deadline.

        Where there is another one to ask, a server has a share of that time, and `takes_s` more, which the call may
        take. The last one has half of what is left: all may only be slow, and one that answered before may be paused.
        Servers that cannot be reached are passed over and, if the call only `reads`, those that do not answer in time
        as well. Raises Unreached if that is so of all: none did anything. Raises Indeterminate if a server got the call
        and did not answer, and what a server told, if none carried it out. Repeated then, another server is asked.
        """
        seconds = patience_s(CALL_S) if seconds is None else seconds
        deadline = self.runtime.deadline(max(0.001, seconds))
        told: Determinate | None = None
        gone = Unreached("no shard server was asked; nothing was done")
        # Those first that answered of late; else in an order that depends on the route alone.
        for server in sorted(self.order(route), key=lambda server: server.is_shunned):
            try:
                with server.connected(min(self._connect_s(server), deadline.left_s())) as channel:
                    share_s = self._share_s(server, deadline.left_s()) + takes_s
                    return self._ask(server, channel, name, arguments, kind, deadline.left_s(), share_s)
            except _Unanswered as error:
                if not reads:
                    raise Indeterminate(f"{error}; it is not known what was done") from error
                gone = Unreached(f"{error}; nothing was changed", is_slow=True)
            except Unread as error:
                if not reads:
                    told_by = f"the shard server {server.address} answered {name}, but {error}"
                    raise Indeterminate(f"{told_by}; it is not known what was done") from error
                raise error.error from error
            except Unreached as error:
                error.is_slow |= gone.is_slow
                gone = error
            except Determinate as error:  # it did nothing: perhaps another one can
                told = error
        if told is not None:
            raise told
        raise gone

    def order(self, route: str) -> list[Server]:
        """All servers, in an order that depends on the route alone."""
        first = crc32(route.encode()) % len(self._servers)
        return [*self._servers[first:], *self._servers[:first]]

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _connect_s(self, server: Server) -> float:
        """How long to wait for a connection: not for long where one that is silent is tried before something else."""
        is_before = self._has_store or (self._has_other and not server.is_shunned)
        return CHECK_S if server.is_silent and is_before else CONNECT_S

    def _share_s(self, server: Server, left_s: float) -> float:
        """How long a server may take to answer of what is left."""
        if not self._has_other:
            return left_s
        half_s, others = max(SHARE_LEAST_S, left_s / 2), [one for one in self._servers if one is not server]
        # One that is silent may only not have been asked since it came back, as this one answered all calls.
        has_fresh = any(not one.is_silent or not one.is_shunned for one in others)
        return min(SHARE_S, half_s) if has_fresh or (self._has_store and not server.is_silent) else half_s

    def _answers(self, server: Server, seconds: float) -> bool:
        try:
            with server.connected(seconds):
                return True
        except (PersistError, Unreached):
            return False

    def _ask(
        self, server: Server, channel: grpc.Channel, name: str, arguments: object, kind: Any, left_s: float,
        share_s: float,
    ) -> Any:  # fmt: skip
        seconds = min(left_s, share_s)
        call = encode_call(arguments, seconds)
        if len(call) > MOST_BYTES:
            raise InvalidUsage(f"this {name} has {len(call)} bytes, and a shard server takes at most {MOST_BYTES}. "
                               "Nothing was sent; make it smaller", size=len(call), most=MOST_BYTES)  # fmt: skip
        try:
            data = server.send(channel, name, call, seconds if seconds < left_s else left_s + GRACE_S)
        except grpc.RpcError as error:
            raise _failed(server, name, error) from error
        server.answered()
        value, now = decode_reply(data, kind)
        self._ahead_ms = now - int(self.runtime.monotonic() * 1000)
        return value


class Unreached(Exception):
    """A server, or all of them, could not be reached: it got nothing. Or it did not answer a call that only reads.

    `is_slow`: one may be there, as it does not answer yet.
    """

    def __init__(self, message: str, *, is_slow: bool = False) -> None:
        super().__init__(message)
        self.is_slow = is_slow


class _Unanswered(Exception):
    """A server may have got a call, and did not answer it."""


def _failed(server: Server, name: str, error: grpc.RpcError) -> Exception:
    code, details = error.code(), error.details()
    told = f"the shard server {server.address} failed {name}: {code.name}, {details}"
    if code in NOT_DONE:
        return InvalidUsage(f"{told}. Nothing was done", address=server.address)
    server.shun()
    return _Unanswered(told)
