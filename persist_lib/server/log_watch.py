"""Rows that others commit, past this server: it hears of them from the store, or else looks at the heads now and then.

One request answers the heads of all shards, whatever the number of clients and of shards that they follow. The rows of
a shard are then read once for all that follow it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from persist_lib.errors import PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Consensus, Newest, Row
from persist_lib.location.contract import next_seqno
from persist_lib.location.wrap.around import AroundConsensus
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.row_push import ROWS_MOST, Pushing


class Announcing(AroundConsensus):
    """The same Consensus. A row is announced when it is known to be in the log, never before."""

    def __init__(self, inner: Consensus, pushing: Pushing) -> None:
        super().__init__(inner)
        self._pushing = pushing

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        rows = self.inner.scan(key, from_seqno, limit)
        self._pushing.saw(key, rows)
        return rows

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        return self._announced(self.inner.compare_and_set(key, expected, data), {key: (expected, data)})

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        return self._announced(self.inner.compare_and_set_many(changes), changes)

    def _announced(self, won: bool, changes: Mapping[str, Change]) -> bool:
        for key, (expected, data) in changes.items() if won else ():
            self._pushing.saw(key, [Row(next_seqno(expected), data)])
        return won


log = logging.getLogger("persist.server")
POLL_S = 0.5
"""How often the heads are looked at, where the store does not tell of new rows."""
CHECK_S = 5.0
"""How often they are looked at where it does, as what it tells can get lost."""
SHARE = 20
"""The pause is at least so many times what a look takes: of a slow store, the heads are looked at less often."""
READERS = 4
PATIENCE_S = 10.0


class Watching:
    """A thread that looks for the rows of others while anybody follows a shard."""

    def __init__(self, consensus: Announcing, pushing: Pushing, runtime: Runtime, poll_s: float = POLL_S) -> None:
        self._consensus, self._pushing, self._runtime, self._poll_s = consensus, pushing, runtime, poll_s
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="persist-watch")
        self._thread = threading.Thread(target=self._run, name="persist-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._wake.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown()

    def look(self) -> None:
        """Look at the heads, and read the rows that this server has not seen."""
        followed = self._pushing.followed()
        self._read(within(self._runtime.deadline(PATIENCE_S), lambda: self._consensus.heads(followed)))

    def _run(self) -> None:
        next_look, was_told = self._runtime.monotonic(), False
        while not self._is_over:
            try:
                heard = self._consensus.heard(self._poll_s) if self._pushing.is_followed() else None
                if heard:
                    self._read(heard)
                # What was committed before the store began to tell was not told.
                is_news, was_told = heard is not None and not was_told, heard is not None
                started = self._runtime.monotonic()
                if self._pushing.is_followed() and (is_news or started >= next_look):
                    self.look()
                    took_s = self._runtime.monotonic() - started
                    next_look = started + max(CHECK_S if was_told else self._poll_s, SHARE * took_s)
            except PersistError as error:
                log.info("could not look for rows of others; those that follow get them late: %s", error)
                next_look = self._runtime.monotonic() + CHECK_S
            except Exception:
                log.exception("could not look for rows of others; those that follow get them late")
                next_look = self._runtime.monotonic() + CHECK_S
            if not was_told:
                with suppress(Empty):
                    self._wake.get(timeout=self._poll_s)

    def _read(self, heads: Mapping[str, SeqNo]) -> None:
        """Read what is new in these shards, several at a time. All of it before the next look: that bounds it."""
        behind = self._pushing.behind(heads)
        for _ in self._pool.map(lambda shard: self._read_one(shard, behind[shard], heads[shard]), behind):
            pass

    def _read_one(self, shard: str, seen: SeqNo, newest: SeqNo) -> None:
        if seen > 0 and newest - seen <= ROWS_MOST:
            # `Announcing` announces the rows where they are read.
            within(self._runtime.deadline(PATIENCE_S), lambda: self._consensus.scan(shard, SeqNo(seen + 1), ROWS_MOST))
        self._pushing.knows(shard, newest)
