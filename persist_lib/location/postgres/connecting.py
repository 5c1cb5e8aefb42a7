"""Connections of psycopg whose every statement is answered in bounded time, or fails.

Psycopg waits for an answer as long as the connection stands, which is for ever where a firewall drops packets. A
statement that is sent while a location is opened has no other deadline.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")
CONNECT_S = 10
ANSWER_S = 30.0
"""The longest that one statement may take: longer than the server may wait for the lock under which tables are made."""


class Connection(psycopg.Connection):
    """See the module. After a statement that was not answered, it is closed."""

    runtime: Runtime

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's, which asks `gen` some ten times a second while nothing comes."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        deadline = self.runtime.deadline(patience_s(ANSWER_S))
        try:
            awaited = next(gen)
            while True:
                ready = yield awaited
                if not ready and deadline.has_passed():
                    self.pgconn.finish()  # so that nothing more is sent: nobody knows what the server is at
                    raise psycopg.OperationalError(f"no answer within {deadline.timeout_s:.3g} s")
                awaited = gen.send(ready)
        except StopIteration as done:
            found: T = done.value
            return found


def connect(conninfo: str, deadline: Deadline) -> Connection:
    """Connect, in autocommit. Raises psycopg.Error.

    Psycopg's own prepared statements are off: their names mean something else in another client of a pooler.
    """
    timeout_s = max(2, min(CONNECT_S, int(deadline.remaining_s())))
    found = Connection.connect(conninfo, autocommit=True, prepare_threshold=None, connect_timeout=timeout_s)
    found.runtime = deadline.runtime
    return found
