"""The store behind shard servers, for a client that may use it itself where no server answers.

Reads and rows go to the store as from any client. Commands are applied by the heart of a server, in this process: a
command that a server may hold, which is only paused, is resolved there by the same rules as by another server. Servers
are looked for now and then, and asked again as soon as one is there.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from persist_lib.errors import PersistError
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.commands import Heart, MakesHeart
from persist_lib.location.rpc.servers import Servers
from persist_lib.location.scheme import Stores
from persist_lib.runtime.ambient import Backoff, Runtime
from persist_lib.runtime.forks import Stage, enrol

log = logging.getLogger("persist")
CHECK_S = 0.25
"""How long a server may take to answer that it is there."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long to wait until servers are looked for again; each time twice as long."""


class FallbackStore:
    """The store at `url`, which is opened when it is first needed. Safe to use from several threads."""

    def __init__(self, url: str, stores: Stores, servers: Servers, runtime: Runtime) -> None:
        self._url, self._stores, self._servers, self._runtime = url, stores, servers, runtime
        self._lock = threading.Lock()
        self._opened: tuple[Blob, Consensus] | None = None
        self._heart: Heart | None = None
        self._is_away, self._is_closed = False, False
        self._backoff, self._next_look = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        enrol(self, Stage.STORES)

    def after_fork_in_child(self) -> None:
        """Make a new lock and, when needed, a new heart: the threads of this one are the parent's."""
        self._lock, self._heart = threading.Lock(), None

    @property
    def is_in_use(self) -> bool:
        """Whether this store is asked now, and no server. Looks for servers, if that is due."""
        if self._is_away and self._is_due() and self._servers.is_there(CHECK_S):
            self._is_away = False
            log.info("a shard server answers again, and is asked from now on")
        return self._is_away

    def leave(self, error: Exception) -> None:
        """Ask this store from now on, until a server is there again. Raises what keeps it from being opened."""
        self.consensus()
        if not self._is_away:
            with self._lock:
                self._is_away = True
                self._backoff.reset()
                self._next_look = self._runtime.monotonic() + self._backoff.take()
            log.warning("no shard server answers, so this client asks the store itself until one does: %s", error)

    def consensus(self) -> Consensus:
        return self._stores_opened()[1]

    def heart(self, make: MakesHeart) -> Heart:
        """What applies commands to this store. It is made when it is first needed."""
        blob, consensus = self._stores_opened()
        with self._lock:
            self._heart = self._heart or make(blob, consensus, self._runtime)
            return self._heart

    def close(self) -> None:
        """End the heart, and release the store's connections."""
        with self._lock:
            heart, opened, self._heart, self._opened = self._heart, self._opened, None, None
        if heart is not None:
            heart.end()
        if opened is not None:
            with suppress(PersistError):
                opened[1].close()

    def _stores_opened(self) -> tuple[Blob, Consensus]:
        with self._lock:
            if self._opened is None:
                self._opened = self._stores.open(self._url)
            return self._opened

    def _is_due(self) -> bool:
        """Whether this thread is the one that looks for servers now."""
        with self._lock:
            now = self._runtime.monotonic()
            if now < self._next_look:
                return False
            self._next_look = now + self._backoff.take()
            return True
