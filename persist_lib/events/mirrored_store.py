"""Two writers as one: an event is durable when both stores have it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, NotSent, Refused
from persist_lib.events.api import Buffer, Writer
from persist_lib.runtime import threads
from persist_lib.runtime.resource import Resource

UNDONE = (Determinate, NotSent, Refused, InvalidUsage)
"""After one of these the event is not in that log."""


class MirroredWriter(Resource):
    """A `Writer` over two logs with the same events. A failure of one ends both. Its epoch is that of the second."""

    def __init__(self, first: Writer, second: Writer) -> None:
        self._first, self._second = first, second

    @property
    def last(self) -> int:
        return min(self._first.last, self._second.last)

    @property
    def accepted(self) -> int:
        return min(self._first.accepted, self._second.accepted)

    @property
    def epoch(self) -> int:
        return self._second.epoch

    def write(self, id: int, payload: Buffer, *, timeout: float | None = None) -> Future[None]:  # noqa: A002
        return self._both(lambda writer: writer.write(id, payload, timeout=timeout))

    def write_snapshot(self, event_id: int, state: Buffer) -> Future[None]:
        return self._both(lambda writer: writer.write_snapshot(event_id, state))

    def write_mark(self, name: str, value: Buffer) -> Future[None]:
        return self._both(lambda writer: writer.write_mark(name, value))

    def flush(self, timeout: float | None = None) -> None:
        self._first.flush(timeout)
        self._second.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        try:
            self._first.close(timeout)
        finally:
            self._second.close(timeout)

    def _both(self, write: Callable[[Writer], Future[None]]) -> Future[None]:
        first = write(self._first)
        try:
            second = write(self._second)
        except UNDONE as error:
            second = threads.Future()
            second.set_exception(error)
        return joined(first, second)


def joined(first: Future[None], second: Future[None]) -> Future[None]:
    """A future that is done when both are. Where only one failed, only the next start finds out what is in the logs."""
    answer: threads.Future[None] = threads.Future()
    answer.set_running_or_notify_cancel()
    done = itertools.count(1)

    def one_is_done(_: Future[None]) -> None:
        if next(done) < 2:
            return
        if (error := _error_of(first.exception(), second.exception())) is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    first.add_done_callback(one_is_done)
    second.add_done_callback(one_is_done)
    return answer


def _error_of(first: BaseException | None, second: BaseException | None) -> BaseException | None:
    error = first or second
    if error is None or isinstance(error, Indeterminate) or (isinstance(first, UNDONE) and isinstance(second, UNDONE)):
        return error
    unknown = Indeterminate(
        f"one of two stores failed, and the event may be in the other: {error}. The next start finds out"
    )
    unknown.__cause__ = error
    return unknown
