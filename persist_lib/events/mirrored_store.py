"""Two writers as one: an event is durable when both stores have it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, NotSent, Refused
from persist_lib.events.api import Buffer, Closes, Writer
from persist_lib.runtime import threads

UNDONE = (Determinate, NotSent, Refused, InvalidUsage)
"""After one of these the event is not in that log."""


class Pair(Closes):
    """A `Writer` over two logs with the same events. A failure of one ends both."""

    def __init__(self, first: Writer, second: Writer) -> None:
        self._first, self._second = first, second

    @property
    def last(self) -> int:
        """The last event that is durable in both."""
        return min(self._first.last, self._second.last)

    @property
    def accepted(self) -> int:
        """The last event that both have accepted."""
        return min(self._first.accepted, self._second.accepted)

    @property
    def epoch(self) -> int:
        """That of the second writer."""
        return self._second.epoch

    def write(self, id: int, payload: Buffer, *, timeout: float | None = None) -> Future[None]:  # noqa: A002
        """Write the event to both."""
        return self._both(lambda writer: writer.write(id, payload, timeout=timeout))

    def write_snapshot(self, event_id: int, state: Buffer) -> Future[None]:
        """Write the snapshot to both."""
        return self._both(lambda writer: writer.write_snapshot(event_id, state))

    def write_mark(self, name: str, value: Buffer) -> Future[None]:
        """Write the mark to both."""
        return self._both(lambda writer: writer.write_mark(name, value))

    def flush(self, timeout: float | None = None) -> None:
        """Wait for both."""
        self._first.flush(timeout)
        self._second.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Close both."""
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
    """A future that is done when both are. Where only one failed, nobody knows yet what the next start finds."""
    answer: threads.Future[None] = threads.Future()
    answer.set_running_or_notify_cancel()
    left, lock = [2], Lock()

    def one_is_done(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if not is_last:
            return
        error = _joined(first.exception(), second.exception())
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    first.add_done_callback(one_is_done)
    second.add_done_callback(one_is_done)
    return answer


def _joined(first: BaseException | None, second: BaseException | None) -> BaseException | None:
    if first is None and second is None:
        return None
    if isinstance(first, UNDONE) and isinstance(second, UNDONE):
        return first
    error = first or second
    if isinstance(error, Indeterminate):
        return error
    unknown = Indeterminate(
        f"one of two stores failed, and the event may be in the other: {error}. The next start finds out"
    )
    unknown.__cause__ = error
    return unknown
