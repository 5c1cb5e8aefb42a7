"""The stream from one server: what it tells of the shards that are followed there, in a thread of its own.

The thread begins when the first shard is followed there, and ends some time after the last one. When the server is
gone, the shards are followed elsewhere, and the thread looks now and then whether the server is back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import grpc

from persist_lib.errors import Determinate, PersistError
from persist_lib.format.wire import FOLLOW, Pushed, decode_pushed, encode_follow
from persist_lib.location.rpc.servers import CONNECT_S, NOT_DONE, Server
from persist_lib.runtime.ambient import Backoff, Runtime

log = logging.getLogger("persist.push")
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""The pauses before a server that is gone is looked for again: the first one, and the longest."""
UNABLE_S = 15.0
"""How long a server is not asked again that cannot tell news, or may not tell them to this client."""
LINGER_S = 5.0
LOST_S = 5.0
"""After so many seconds without a sign of life a server is given up. It gives one each second."""
STOP_S = 2.0


class PushStream:
    """One server and the `shards` followed there. `lock` guards it; the thread alone opens and ends the stream."""

    def __init__(
        self, server: Server, lock: threading.Lock, runtime: Runtime,
        take: Callable[[PushStream, Pushed], None], lose: Callable[[PushStream], None], is_wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`take` gets what is told, `lose` tells that nothing is told any more, `is_wanted` whether it may be."""
        self._server, self._lock, self._runtime = server, lock, runtime
        self._take, self._lose, self._is_wanted = take, lose, is_wanted
        self.shards: dict[str, None] = {}
        self.is_gone = False
        self._is_closed = False
        self._heard = runtime.monotonic()
        self._said: SimpleQueue[bytes | None] | None = None
        self._call: grpc.Call | None = None
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def begin(self, shard: str) -> None:
        """Follow a shard here. Call it with the lock taken, and `ensure_thread` after that, without it."""
        self.shards[shard] = None
        if self._said is not None:
            self._said.put(encode_follow((shard,)))
        self._wake.put(None)

    def end(self, shard: str) -> None:
        """Do not follow a shard here any more. Call it with the lock taken."""
        if self.shards.pop(shard, shard) is None and self._said is not None:
            self._said.put(encode_follow((), (shard,)))

    def ensure_thread(self) -> None:
        """Start the thread, if there is none. Not from a thread that gets interrupts."""
        with self._lock:
            if self.thread is not None or self._is_closed:
                return
            self.thread = threading.Thread(target=self._run, name="persist-push", daemon=True)
            self.thread.start()

    def check(self) -> None:
        """Give the server up if it has not given a sign of life for long: it may be paused, or cut off."""
        call = self._call
        if call is not None and self._runtime.monotonic() - self._heard > LOST_S:
            call.cancel()

    def close(self) -> None:
        with self._lock:
            self._is_closed, thread = True, self.thread
            self._hang_up()
        self._wake.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def _hang_up(self) -> None:
        if self._said is not None:
            self._said.put(None)
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while not self._is_over():
            try:
                self._serve()
                backoff.reset()
                continue
            except grpc.RpcError as error:
                if error.code() in NOT_DONE:
                    backoff.pause_s = UNABLE_S
            except PersistError:
                pass
            except Exception:  # an invalid message, a channel that was closed: as if the server were gone
                log.info("push from a shard server ended; it is tried again", exc_info=True)
                backoff.pause_s = LONGEST_PAUSE_S
            self._until_back(backoff)

    def _is_over(self) -> bool:
        """Whether the thread ends now: closed, or nothing is followed here and nothing was for a while."""
        while not (self._is_closed or self.shards):
            try:
                self._wake.get(timeout=LINGER_S)
            except Empty:
                with self._lock:
                    if not self.shards:
                        self.thread = None
                        return True
        return self._is_closed

    def _serve(self) -> None:
        """Take what the server tells until nothing is followed here any more. Raises when the server is gone."""
        said: SimpleQueue[bytes | None] = SimpleQueue()
        with (
            self._server.connected(CONNECT_S) as channel,
            self._server.stream(channel, FOLLOW, iter(said.get, None)) as call,
        ):
            self._follow(call, said)

    def _follow(self, call: grpc.Call, said: SimpleQueue[bytes | None]) -> None:
        try:
            with self._lock:
                if self._is_closed:
                    call.cancel()
                    return
                said.put(encode_follow(tuple(self.shards)))
                self._said, self._call, self._heard = said, call, self._runtime.monotonic()
            for data in call:
                self._heard = self._runtime.monotonic()
                self._take(self, decode_pushed(data))
                if not self.shards:
                    return
            if not self._is_closed:
                raise Determinate("the server has ended the stream")
        finally:
            with self._lock:
                said.put(None)
                call.cancel()
                self._said = self._call = None
            self._lose(self)

    def _until_back(self, backoff: Backoff) -> None:
        """Wait until the server answers again, while anything may be followed here."""
        while not self._is_closed:
            self.is_gone = True
            deadline = self._runtime.deadline(backoff.take())
            while not (self._is_closed or deadline.has_passed()):
                with suppress(Empty):
                    self._wake.get(timeout=deadline.left_s())
            if self._is_wanted():
                try:
                    with self._server.connected(CONNECT_S):
                        break
                except Exception as error:  # noqa: BLE001 - whatever it is, the server is not back
                    log.debug("the shard server is not back: %s", error)
        self.is_gone = False
