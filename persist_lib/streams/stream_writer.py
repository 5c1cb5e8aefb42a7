"""Writing one stream: updates at times that are not sealed yet, in any order, and seals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from persist_lib.arguments import not_pickled, shown
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import Antichain, at
from persist_lib.relation.appends import ROOM_BYTES, Appended, is_shared, take_over
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.streams.committer import Committer
from persist_lib.streams.stream_state import LAST_TIME, Op, check_negatable
from persist_lib.times import Times

if TYPE_CHECKING:
    from persist_lib.streams.stream_runtime import Streams


class Write(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `write`."""

    writer: StreamWriter
    updates: object


class Seal(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `seal`."""

    writer: StreamWriter
    upper: object


class AllowCompaction(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `allow_compaction`."""

    writer: StreamWriter
    since: object


Part = Write | Seal | AllowCompaction
Accepted = Callable[[str], Antichain]


class StreamWriter:
    """Writes one stream. Safe to use from several threads. Calls take effect in the order in which they are made.

    Each call returns a future, which `asyncio.wrap_future` makes awaitable. It is done when the call is durable; its
    result has `upper`, the stream's sealed frontier then. A call that fails fails all that were made after it, with
    NotSent; also the next one, unless the failure was looked at (`result`, `exception`). Calls wait for room when
    `config.buffer_bytes` are under way. `timeout` is in seconds, until the future is done; an outcome that is not known
    by then is still found out, and calls behind it wait for that. `runtime` is the one that all streams of its program
    have in common.
    """

    def __init__(self, runtime: Streams, committer: Committer, name: str, schema: Schema) -> None:
        self.runtime, self._committer = runtime, committer
        self.name, self.schema = name, schema

    @property
    def upper(self) -> Antichain:
        """How far the stream is durably sealed."""
        return self._committer.streams[self.name].upper

    @property
    def since(self) -> Antichain:
        """From when on the stream's history is kept."""
        return self._committer.streams[self.name].since

    def write(self, updates: object, *, timeout: float | None = None) -> Future[Appended]:
        """Write updates at times at or beyond the sealed frontier, in any order. Durable once done, sealed or not.

        `updates` is what `compare_and_append` takes: an Arrow table, a frame, a list of dicts; each has its `_time`.
        Raises InvalidUsage at once for a time that the calls before have sealed. `count` is the number of updates.
        """
        return multi_write(self._committer, [Write(self, updates)], timeout)

    def seal(self, upper: object, *, timeout: float | None = None) -> Future[Appended]:
        """Say that there are no more updates at times before `upper`. Everything before it becomes definite.

        `[]` closes the stream for ever. Nothing happens if it is sealed that far already.
        """
        return multi_write(self._committer, [Seal(self, upper)], timeout)

    def allow_compaction(self, since: object, *, timeout: float | None = None) -> Future[Appended]:
        """Give up history before `since`, which must be before the sealed frontier. It never moves back.

        Readers and other holds of the sealed shard may still keep it.
        """
        return multi_write(self._committer, [AllowCompaction(self, since)], timeout)

    def is_of(self, committer: Committer) -> bool:
        return self._committer is committer

    def times(self) -> Times:
        return Times(self.schema.times, self.runtime.client.consensus.now)

    __reduce__ = not_pickled("A stream's writer", "There is one writer a location")


def multi_write(committer: Committer, parts: object, timeout: float | None) -> Future[Appended]:
    """Accept several parts as one call: all of them take effect, or none."""
    if isinstance(parts, (str, bytes, Mapping)) or not isinstance(parts, Iterable):
        raise _no_parts(parts)
    found = list(parts)
    committer.check()
    deadline = committer.deadline(timeout)
    taken = [_taken(committer, part) for part in found]
    size = ROOM_BYTES + sum(table.nbytes for _, table in taken if table is not None)
    return committer.accept(lambda accepted: _checked(taken, accepted), size, deadline)


def _taken(committer: Committer, part: object) -> tuple[Part, pa.Table | None]:
    """A part, and its updates as a table that the caller cannot change."""
    if not isinstance(part, (Write, Seal, AllowCompaction)) or not isinstance(part.writer, StreamWriter):
        raise _no_parts(part)
    if not part.writer.is_of(committer):
        raise InvalidUsage(f"stream {part.writer.name!r}: this writer is of another runtime. Nothing was accepted")
    if not isinstance(part, Write):
        return part, None
    writer = part.writer
    tables = iter_updates(writer.schema, part.updates, times=writer.times(), whole=False)
    table = take_over(writer.schema, tables, copies=is_shared(part.updates))
    if table is not None:
        check_negatable(table)
    return part, table


def _checked(taken: Sequence[tuple[Part, pa.Table | None]], accepted: Accepted) -> list[Op]:
    """The parts, checked one after the other against what those before them leave."""
    uppers: dict[str, Antichain] = {}
    seals, compacted = set[str](), set[str]()
    ops: list[Op] = []
    for part, table in taken:
        writer, name = part.writer, part.writer.name
        upper, times = uppers.setdefault(name, accepted(name)), writer.times()
        match part:
            case Write():
                if table is not None:
                    if upper.is_top():
                        raise InvalidUsage(f"stream {name!r} is sealed for good. Nothing was accepted", stream=name)
                    check_times(table, upper, at(LAST_TIME + 1), times)
                ops.append(Op(name, table=empty_table(writer.schema.updates) if table is None else table))
            case Seal(_, asked):
                uppers[name] = upper.join(_frontier(times, asked))
                if upper < uppers[name]:
                    seals.add(name)
                ops.append(Op(name, upper=uppers[name]))
            case AllowCompaction(_, asked):
                since = times.frontier(asked, "since")
                if not since < upper:
                    raise InvalidUsage(
                        f"stream {name!r} is sealed up to {times.show(upper)}, and its newest sealed time stays "
                        f"readable: since must be before that, got {times.show(since)}. Seal it further first",
                        stream=name, since=since, upper=upper,
                    )  # fmt: skip
                compacted.add(name)
                ops.append(Op(name, since=since))
    if both := sorted(seals & compacted):
        raise InvalidUsage(
            f"streams {', '.join(both)}: a seal and a move of since of one stream are two commits, so they cannot be "
            "one call. Make two calls, the seal first. Nothing was accepted"
        )
    return ops


def _frontier(times: Times, asked: object) -> Antichain:
    upper = times.frontier(asked, "upper")
    if upper.time is not None and upper.time > LAST_TIME:
        raise InvalidUsage(
            f"times of a stream are at most {LAST_TIME}, so it cannot be sealed up to {upper}", upper=upper
        )
    return upper


def _no_parts(found: object) -> InvalidUsage:
    return InvalidUsage(
        "multi_write takes a list of streams.Write(writer, updates), streams.Seal(writer, upper) and "
        f"streams.AllowCompaction(writer, since): got {shown(found)}. Nothing was accepted"
    )
