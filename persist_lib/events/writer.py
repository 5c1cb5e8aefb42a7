"""The writer of a log: a bounded queue, and one thread that makes what waits durable, together and in order."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from itertools import chain
from queue import Empty, SimpleQueue
from typing import NamedTuple

from persist_lib.arguments import not_pickled, parse_integer, parse_seconds, parse_text, shown
from persist_lib.errors import AlreadyWritten, BufferFull, Indeterminate, InvalidUsage, NotSent, PersistError, TimedOut
from persist_lib.events.api import EVENTS, MOST_ID, Buffer, Put, RecordStore
from persist_lib.events.log import FORGET_EVERY, SNAPSHOTS, Log, check_limit, cut, space_of_mark
from persist_lib.events.record import NOTHING, caused
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import SLICE_S, Bell, Future, Resource, aside

log = logging.getLogger("persist.events")
MOST_EVENTS = 1024
"""The most that is accepted and not durable yet: so many events, and so many bytes."""
MOST_BYTES = 64 << 20
BATCH_BYTES = 8 << 20
"""What is made durable together, at most. One payload may be larger."""
KEPT = 2
"""How many snapshots, and versions of a mark, are kept."""
DIGESTS = 4096
"""Of how many of the last events the digests are remembered, for snapshots of the state after them."""


class _Entry(NamedTuple):
    """What was accepted: an event, a snapshot (`space`), or a mark."""

    space: str
    id: int
    payload: memoryview
    future: Future[None]


class LogWriter(Resource):
    """See `api.Writer`. One call (`put`) accepts an entry, so an interrupt comes before or after that.

    What the caller's side notes afterwards (`accepted`, the bytes) may lag by an entry then. The thread goes by what it
    finds in the queue: an id that comes twice is compared, and one that leaves a gap is refused.
    """

    def __init__(self, opened: Log, epoch: int, last: int, digest: bytes, runtime: Runtime) -> None:
        self._log, self._records, self._where, self._runtime = opened, opened.records, opened.where, runtime
        self.epoch = epoch
        self._last = self._accepted = last
        self._digests: OrderedDict[int, bytes] = OrderedDict({last: digest})
        self._note_ids: dict[str, int] = {}
        self._forgotten: dict[str, int] = {}
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._bell = Bell(self._lock)
        self._put = self._put_bytes = self._ended = self._ended_bytes = 0
        self._failure: PersistError | None = None
        self._is_closed = self._is_over = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        if runtime.background:
            self._thread = threading.Thread(target=self._serve, name="persist-events", daemon=True)
            aside(self._thread.start)

    __reduce__ = not_pickled("a writer of events", "Open the store there, which fences this writer.")

    @property
    def last(self) -> int:
        return self._last

    @property
    def accepted(self) -> int:
        return self._accepted

    def write(self, id: int, payload: Buffer, *, timeout: float | None = None) -> Future[None]:  # noqa: A002
        id_ = id if type(id) is int and 0 < id <= MOST_ID else parse_integer(id, "id", 1, MOST_ID)
        return self._accept(EVENTS, id_, _view(payload, "payload"), timeout)

    def write_snapshot(self, event_id: int, state: Buffer) -> Future[None]:
        id_ = parse_integer(event_id, "event_id", 0, MOST_ID)
        return self._accept(SNAPSHOTS, id_, _view(state, "state"), None)

    def write_mark(self, name: str, value: Buffer) -> Future[None]:
        return self._accept(space_of_mark(name), 0, _view(value, "value"), None)

    def _accept(self, space: str, id_: int, payload: memoryview, timeout: float | None) -> Future[None]:
        entry = _Entry(space, id_, payload, Future())
        entry.future.set_running_or_notify_cancel()
        deadline = None if timeout is None else self._runtime.deadline(parse_seconds(timeout))
        while True:
            with self._lock:
                self._check(space, id_)
                if has_room := self._has_room():
                    self._queue.put(entry)
                    self._put, self._put_bytes = self._put + 1, self._put_bytes + payload.nbytes
                    self._accepted = max(self._accepted, id_) if space == EVENTS else self._accepted
            if has_room:
                self._run_without_thread()
                return entry.future
            if deadline is not None and deadline.has_passed():
                raise BufferFull(
                    f"{self._where}: {self._put - self._ended} events ({self._put_bytes - self._ended_bytes:,} bytes) "
                    f"are under way, and none became durable within {deadline.timeout_s:g} s. This call did nothing",
                    size=payload.nbytes, waiting=self._put_bytes - self._ended_bytes, most=MOST_BYTES,
                )  # fmt: skip
            self._bell.wait(
                lambda: self._has_room() or self._failure is not None,
                SLICE_S if deadline is None else deadline.remaining_s(),
            )

    def _has_room(self) -> bool:
        is_full = self._put - self._ended >= MOST_EVENTS or self._put_bytes - self._ended_bytes >= MOST_BYTES
        # A callback of a future runs in the thread that makes room, so it must not wait for it.
        return not is_full or threading.current_thread() is self._thread

    def _check(self, space: str, id_: int) -> None:
        if self._pid != os.getpid():
            raise InvalidUsage(f"the writer of {self._where} is of the process that forked this one; open one here")
        if self._failure is not None:
            raise _not_sent(self._failure, self._where)
        if self._is_closed:
            raise InvalidUsage(f"the writer of {self._where} was closed; open another one")
        if space == EVENTS and id_ > self._accepted + 1:
            raise InvalidUsage(
                f"{self._where}: event {id_} would leave a gap, as the next one is {self._accepted + 1}. Nothing was "
                "written",
                id=id_, last=self._accepted,
            )  # fmt: skip
        if space == SNAPSHOTS and id_ > self._accepted:
            raise InvalidUsage(
                f"{self._where}: there cannot be a snapshot after event {id_}, as the last one is {self._accepted}",
                id=id_, last=self._accepted,
            )  # fmt: skip

    def flush(self, timeout: float | None = None) -> None:
        until = self._put
        self._wait(lambda: self._ended >= until or self._failure is not None, timeout, "not all of it is durable yet")
        if self._failure is not None:
            raise self._failure

    def close(self, timeout: float | None = None) -> None:
        if self._pid != os.getpid():
            return
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        self._run_without_thread()
        self._wait(lambda: self._is_over, timeout, "it continues to finish what it accepted")

    def _wait(self, is_done: object, timeout: float | None, how: str) -> None:
        deadline = None if timeout is None else self._runtime.deadline(parse_seconds(timeout))
        while not self._bell.wait(is_done, SLICE_S):  # type: ignore[arg-type]
            if deadline is not None and deadline.has_passed():
                raise TimedOut(f"{self._where}: after {timeout:g} s {how}", timeout_s=timeout)

    def _serve(self) -> None:
        while not self._is_over:
            self._carry_out(self._take(self._queue.get()))

    def _run_without_thread(self) -> None:
        while self._thread is None and not self._is_over and not self._queue.empty():
            self._carry_out(self._take(self._queue.get()))

    def _take(self, first: _Entry | None) -> list[_Entry | None]:
        """The first entry, and those that wait behind it."""
        taken, size = [first], 0 if first is None else first.payload.nbytes
        while taken[-1] is not None and size < BATCH_BYTES:
            try:
                taken.append(entry := self._queue.get_nowait())
            except Empty:
                break
            size += 0 if entry is None else entry.payload.nbytes
        return taken

    def _carry_out(self, taken: list[_Entry | None]) -> None:
        """Make a batch durable, and resolve its futures in order."""
        entries = [entry for entry in taken if entry is not None]
        batch, earlier = _Batch(self._last), self._failure
        if earlier is None:
            self._failure = self._write(batch, entries)
        for entry in entries:
            error = self._failure if earlier is None else _not_sent(earlier, self._where)
            error = error or batch.refused.get(id(entry))
            if error is None:
                entry.future.set_result(None)
            else:
                entry.future.set_exception(error)
        self._ended += len(entries)
        self._ended_bytes += sum(entry.payload.nbytes for entry in entries)
        if taken[-1] is None:
            self._end()
        self._bell.ring()

    def _write(self, batch: _Batch, entries: list[_Entry]) -> PersistError | None:
        """Write a batch. Returns what failed."""
        try:
            for entry in entries:
                self._add(batch, entry)
            if batch.puts or batch.notes:
                self._records.put(self.epoch, [*batch.puts, *chain.from_iterable(batch.notes.values())])
            self._forget_old(batch.spaces)
            self._last = batch.last
        except PersistError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - the thread must end all futures
            text = f"{self._where}: could not write, and may have: {type(error).__name__}: {error}"
            return caused(Indeterminate(text), error)
        return None

    def _end(self) -> None:
        try:
            self._records.close()
        except Exception as error:  # noqa: BLE001 - all that was acknowledged is durable
            log.warning("could not close %s: %s", self._where, error)
        finally:
            self._is_over = True

    def _add(self, batch: _Batch, entry: _Entry) -> None:
        if entry.space == EVENTS:
            self._add_event(batch, entry)
            return
        if entry.space == SNAPSHOTS:
            id_, previous = entry.id, self._digest_of(entry.id)
        else:
            id_, previous = self._next_version(entry.space), NOTHING
        puts, _ = cut(
            entry.space, id_, entry.payload, log=self._records.log, epoch=self.epoch, previous=previous,
            limit=self._records.limit,
        )  # fmt: skip
        batch.notes[entry.space, id_] = puts  # one record of a key: of two snapshots after one event, the later one
        batch.spaces[entry.space] = id_

    def _next_version(self, space: str) -> int:
        if space not in self._note_ids:
            self._note_ids[space] = max(self._records.ids(space), default=0)
        self._note_ids[space] += 1
        return self._note_ids[space]

    def _forget_old(self, written: dict[str, int]) -> None:
        """Remove what newer snapshots and versions have replaced. `written`: the newest id of each space written to."""
        for space, newest in written.items():
            if space != SNAPSHOTS and newest - self._forgotten.get(space, 0) < FORGET_EVERY:
                continue
            self._forgotten[space] = newest
            there = self._records.ids(space)
            if len(there) > KEPT:
                self._records.remove(self.epoch, space, there[-KEPT])

    def _add_event(self, batch: _Batch, entry: _Entry) -> None:
        if entry.id <= batch.last:
            if not self._is_same(batch, entry):
                batch.refused[id(entry)] = AlreadyWritten(
                    f"{self._where}: event {entry.id} was written before with other bytes. It stays as it is, and "
                    "nothing of this one was written",
                    id=entry.id,
                )
            return
        if entry.id != batch.last + 1:  # an interrupt kept the one before from being accepted
            raise InvalidUsage(f"{self._where}: event {entry.id} would leave a gap after {batch.last}", id=entry.id)
        puts, digest = cut(
            EVENTS, entry.id, entry.payload, log=self._records.log, epoch=self.epoch,
            previous=self._digest_of(batch.last), limit=self._records.limit,
        )  # fmt: skip
        batch.puts += puts
        batch.last = entry.id
        batch.payloads[entry.id] = entry.payload
        self._digests[entry.id] = digest
        if len(self._digests) > DIGESTS:
            self._digests.popitem(last=False)

    def _is_same(self, batch: _Batch, entry: _Entry) -> bool:
        """Whether an event that is there, or in this batch, has these bytes."""
        if entry.id in batch.payloads:
            return batch.payloads[entry.id] == entry.payload
        whole = self._log.fetch(EVENTS, entry.id)
        try:
            return whole is not None and whole.payload == entry.payload
        finally:
            if whole is not None:
                whole.release()

    def _digest_of(self, id_: int) -> bytes:
        return self._digests.get(id_) or self._log.digest_of(id_)

    def __repr__(self) -> str:
        return f"<writer of {self._where}, epoch {self.epoch}, last {self._last}>"


class _Batch:
    def __init__(self, last: int) -> None:
        self.last = last
        self.puts: list[Put] = []
        self.notes: dict[tuple[str, int], list[Put]] = {}
        self.spaces: dict[str, int] = {}
        self.payloads: dict[int, memoryview] = {}
        self.refused: dict[int, PersistError] = {}


def open_writer(records: RecordStore, where: str, runtime: Runtime, owner: str) -> LogWriter:
    """Claim an epoch, find the end of the log, discard what lies beyond, and begin. Closes the driver if that fails."""
    parse_text(owner, "owner", 200)
    try:
        return LogWriter(opened := Log(records, where), *aside(lambda: _recover(opened, owner)), runtime)
    except BaseException:
        records.close()
        raise


def _recover(opened: Log, owner: str) -> tuple[int, int, bytes]:
    """Become the writer: its epoch, the last event, and its digest.

    SUBTLE: the order matters. What a predecessor still writes after the claim, it does not acknowledge: so all that was
    acknowledged is there when the end is looked for. What lies beyond the first gap was not, as ids are acknowledged in
    order. It is discarded durably before anything is written: otherwise the new event of that id would be refused for
    ever, or the old one be taken for part of the log.
    """
    records = opened.records
    check_limit(records.limit)
    epoch = records.claim(owner)
    last = records.last()
    opened.check_evidence(last)
    digest = opened.check_tail(last)
    records.discard(epoch, last)
    return epoch, last, digest


def _view(payload: object, what: str) -> memoryview:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        view = memoryview(payload)
        if view.c_contiguous:
            return view.cast("B")
    raise InvalidUsage(f"{what} must be contiguous bytes, a bytearray or a memoryview: got {shown(payload)}")


def _not_sent(failure: PersistError, where: str) -> NotSent:
    error = NotSent(
        f"{where}: an earlier write failed ({failure.message}), so this one was not sent, and nothing of it was "
        "written. Open a writer again, which finds what there is",
        earlier=failure.message,
    )
    return caused(error, failure)
