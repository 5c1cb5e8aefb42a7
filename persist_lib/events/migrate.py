"""Two logs: comparing them, copying one into the other, and moving a log to another store.

Both end as they are if the process dies: the next call compares what is there already, byte for byte, and continues. A
log that holds anything else is refused before anything is written to it. As long as a copy is not complete, it carries
a mark that the log continues elsewhere, so that no program takes it for the log. A log that was moved carries it too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from persist_lib.errors import Determinate, Diverged, Indeterminate, InvalidUsage, NotFound, NotSent, Refused
from persist_lib.events.api import Buffer, Reader, Store, Writer
from persist_lib.events.log import (
    Elsewhere,
    check_here,
    check_released,
    read_elsewhere,
    read_released,
    write_elsewhere,
    write_released,
)
from persist_lib.events.record import caused
from persist_lib.events.store import find_log, log_of, name_of
from persist_lib.runtime import threads
from persist_lib.runtime.threads import Resource

Progress = Callable[[int, int], object]
"""Called with the number of events that are done and their total number."""
FLIGHT = 256
"""Events of a copy that are under way at a time; the writer limits their bytes."""
SHOWN_BYTES = 40
HERE = Elsewhere()


class Compared(msgspec.Struct, frozen=True):
    """Two logs that are the same up to the shorter one's last event. `first` and `second` are their last events."""

    first: int
    second: int


class Copied(msgspec.Struct, frozen=True):
    """What a copy did: how many events it compared (`checked`) and wrote, and the last event of the copy."""

    checked: int
    written: int
    last: int


def quiet(_done: int, _total: int) -> None:
    """Report nothing."""


def compare(first: Store, second: Store, *, progress: Progress = quiet) -> Compared:
    """Compare all events that both logs have, byte for byte, and check them as `replay` does. Changes nothing.

    Raises Diverged at the first event that differs, NotFound where there is no log, and Damage for what was not written
    like that.
    """
    with first.reader() as one, second.reader() as other:
        _compare(one, other, 1, (name_of(first), name_of(second)), progress)
        return Compared(one.last, other.last)


def copy(source: Store, target: Store, *, dry_run: bool = False, progress: Progress = quiet) -> Copied:
    """Copy a log: its events, how far effects are released, and its newest snapshot. The source is only read.

    The target has the first events of the source, or none; they are compared. Raises Diverged, before anything is
    written, if it has others, or more than the source. A copy that was interrupted is finished by the next one. With
    `dry_run` it only compares, and says what would be written.
    """
    names = name_of(source), name_of(target)
    with ExitStack() as held:
        read = held.enter_context(source.reader())
        _check_two(source, target, names)
        check_here(read, names[0])
        check_released(read, names[0])  # a copy would continue as if nothing were gone
        there = _checked(read, target, names, progress)
        if there > read.last:
            raise Diverged(
                f"{names[1]} ends at event {there}, beyond {names[0]}, which ends at {read.last}. Nothing was changed. "
                "Is it the other way round? If the log was replaced since the copy was made, copy into a new store",
                last=there, source=read.last,
            )  # fmt: skip
        if dry_run:
            return Copied(there, read.last - there, read.last)
        write = held.enter_context(target.writer(owner=f"copy of {names[0]}"))
        with target.reader() as before:
            _compare(read, before, there + 1, names, progress)
            stays = read_elsewhere(before).is_moved  # then it does not continue here, whatever it has
            begun = 1 + write.last
            if not stays and write.last < read.last:
                write_elsewhere(write, _place(source, names[0], is_part=True)).result()
            written = fill(read, write, progress)
            keep_beside(read, write, before)
        with target.reader() as after:
            _compare(read, after, begun, names, progress)
        if not stays:
            write_elsewhere(write, HERE).result()
        return Copied(there, written, write.last)


class Moved(NamedTuple):
    """A log where it continues: its writer, and what closes that."""

    writer: Writer
    held: ExitStack


def move(source: Store, target: Store, *, both: bool = False, progress: Progress = quiet) -> Moved:
    """Copy a log to where it continues, and keep it from continuing in the source.

    Both logs are claimed, so that a program that still runs on either is fenced. If the target is ahead, as after a
    move that was made before, the log continues there. With `both`, the source gets what the target is ahead, and both
    continue alike. Raises Diverged, before anything is written, if the two logs are not the same, and Refused if one of
    them continues in a third store.
    """
    names = name_of(source), name_of(target)
    with source.reader() as read:
        _check_two(source, target, names)
        _check_third(read, target, names[0])
        check_released(read, names[0])
        checked = _checked(read, target, names, progress)
    with ExitStack() as held:
        first = held.enter_context(source.writer(owner=f"moving to {names[1]}"))
        second = held.enter_context(target.writer(owner=f"moving from {names[0]}"))
        with source.reader() as read, target.reader() as there:
            _check_third(read, target, names[0])  # it may have been moved until it was claimed
            _check_third(there, source, names[1])
            _compare(read, there, min(checked, read.last) + 1, names, progress)  # what either got until it was claimed
            begun = 1 + min(first.last, second.last)
            if first.last > second.last:
                write_elsewhere(second, _place(source, names[0], is_part=True)).result()
                fill(read, second, progress)
            elif both:
                fill(there, first, progress)
            keep_beside(read, second, there)
            if both:
                keep_beside(there, first, read)
        with source.reader() as read, target.reader() as there:
            _compare(read, there, begun, names, progress)
        # In this order. In between, neither continues alone, and the next move finishes it.
        write_elsewhere(first, HERE if both else _place(target, names[1])).result()
        write_elsewhere(second, HERE).result()
        if not both:
            first.close()
        return Moved(MirroredWriter(first, second) if both else second, held.pop_all())


def fill(read: Reader, write: Writer, progress: Progress = quiet) -> int:
    """Write what a log has beyond the writer's last event, and wait until it is durable. Returns how many events."""
    under_way: deque[Future[None]] = deque()
    begun, through = write.last, read.last
    for event in read.replay(begun + 1, through):
        under_way.append(write.write(event.id, bytes(event.payload)))
        if len(under_way) >= FLIGHT:
            under_way.popleft().result()
            progress(event.id - FLIGHT, through)
    for answer in under_way:
        answer.result()
    return max(0, through - begun)


def keep_beside(read: Reader, write: Writer, there: Reader) -> None:
    """Bring the released-through mark and the newest snapshot of a log to where its events were copied."""
    released = min(read_released(read), write.last)
    if released > read_released(there):
        write_released(write, released).result()
    ours, theirs = read.newest_snapshot(write.last), there.newest_snapshot(write.last)
    if ours is not None and (theirs is None or ours[0] > theirs[0]):
        write.write_snapshot(*ours).result()


def _place(store: Store, name: str, *, is_part: bool = False) -> Elsewhere:
    return Elsewhere(name, log_of(store).hex(), is_part)


def _check_two(source: Store, target: Store, names: tuple[str, str]) -> None:
    """Raise InvalidUsage if both are the same log, however they are spelled."""
    if log_of(source) == find_log(target):
        raise InvalidUsage(f"{names[0]} and {names[1]} are the same log. Nothing was changed; name two stores")


def _check_third(read: Reader, other: Store, name: str) -> None:
    """Raise Refused if a log continues elsewhere than in that other store."""
    log = find_log(other)
    if log is None or read_elsewhere(read).log != log.hex():
        check_here(read, name)


def _checked(read: Reader, target: Store, names: tuple[str, str], progress: Progress) -> int:
    """Compare what the target has, if it is there. Returns its last event."""
    try:
        with target.reader() as there:
            _compare(read, there, 1, names, progress)
            return there.last
    except NotFound:
        return 0


def _compare(one: Reader, other: Reader, from_id: int, names: tuple[str, str], progress: Progress) -> None:
    through = min(one.last, other.last)
    for ours, theirs in zip(one.replay(from_id, through), other.replay(from_id, through), strict=True):
        if ours.payload != theirs.payload:
            raise Diverged(
                f"event {ours.id} is not the same in {names[0]} ({len(ours.payload)} bytes, "
                f"{bytes(ours.payload[:SHOWN_BYTES])!r}) and in {names[1]} ({len(theirs.payload)} bytes, "
                f"{bytes(theirs.payload[:SHOWN_BYTES])!r}): these are two logs. Nothing was changed",
                event_id=ours.id,
            )  # fmt: skip
        progress(ours.id, through)


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
    text = f"one of two stores failed, and the event may be in the other: {error}. The next start finds out"
    return caused(Indeterminate(text), error)
