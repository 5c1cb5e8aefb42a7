"""Ingesting a source: one instance of it. Any number may run at once, be paused, killed or started again.

All that an instance knows beyond one step it can read again, so whatever goes wrong, it drops that and starts at t, the
least upper of what it writes. See docs/design/0042-sources.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.arguments import parse_seconds
from persist_lib.config import MIB
from persist_lib.errors import (
    Determinate,
    HoldConflict,
    Indeterminate,
    LeaseExpired,
    NotFound,
    Refused,
    ShardFinished,
    SinceViolation,
    UpperMismatch,
)
from persist_lib.kernel.columns import array_of, integers
from persist_lib.kernel.order import take
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import TIME_FIELD
from persist_lib.storage.sources.bindings import Bindings, Marks
from persist_lib.storage.sources.pipeline import NO_SCHEMAS, Made, Pipeline
from persist_lib.storage.sources.protocol import SourceReader, TellsLags
from persist_lib.storage.sources.reclock import Window, in_order, windows
from persist_lib.storage.sources.records import HOLD, SourceRecord
from persist_lib.storage.sources.registry import Written
from persist_lib.storage.sources.schemas import Schemas
from persist_lib.storage.sources.targets import Target

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

STEP_BYTES = 32 * MIB
"""Messages that become bound at one time, in bytes, about."""
WINDOW_BYTES = 64 * MIB
"""Messages that are in memory at once, in bytes, about; one time's at least."""
TICK_MS = 5_000
"""How often a source without new messages goes on in time: each time is an append to each of its collections."""
HOLD_EVERY_MS = 5_000
"""By how much t goes on before holds follow."""
PASSING = (LeaseExpired, SinceViolation, UpperMismatch, Determinate, Indeterminate)
"""What the next step may not meet: an instance drops what it has in memory, and starts again."""
OPTIONAL = ("key", "header", "problem")


class Behind(msgspec.Struct, frozen=True):
    """How far a partition is behind: messages and bytes that are left, and seconds since what was read was written."""

    messages: int
    bytes: int | None
    seconds: float | None


class Progress(msgspec.Struct, frozen=True):
    """What one step did, and what is left. `time` is t: all before it is durable in all collections of the source.

    `lag` is about how many addresses of each partition are there beyond what is durable (of files, bytes or rows);
    `behind_ms` is how far t is behind the store's clock. `is_idle`: this step found nothing new. `behind` says more of
    partitions with a lag, where the reader knows it.
    """

    time: int
    messages: int
    errors: int
    lag: dict[str, int]
    behind_ms: int
    is_idle: bool
    behind: dict[str, Behind] = {}


class Ingestion:
    """One instance of a source. Use it from one thread."""

    def __init__(self, controller: Controller, record: SourceRecord, bindings: str, owner: str) -> None:
        self._controller, self._client, self.record = controller, controller.client, record
        self._fence = record.fence
        self._pipeline = Pipeline(record.decoding, record.meaning, record.columns, record.message_columns)
        self._reader: SourceReader | None = None
        self._bindings = Bindings(self._client, bindings)
        registry = record.decoding.registry
        self._schemas = None if registry is None else Schemas(self._client, record.schemas, registry)
        self._owner = owner
        self._targets: dict[str, Target] = {}
        self._held = -1
        self._told = 0

    def step(self, timeout: float | None = None, *, mints: bool = True) -> Progress:
        """Bind what is there now, and make all that is bound durable. With `mints=False` others bind.

        Each window may take `timeout` seconds to be written, by default those of the client's configuration.

        Raises Gone and Diverged, which stay so; HoldConflict when the source was reset or dropped; and what may pass
        (`PASSING`): then call it again. NotFound once it was dropped.
        """
        timeout_s = self._client.config.timeout_s if timeout is None else parse_seconds(timeout)
        try:
            if mints:
                self._mint(self._client.runtime.deadline(timeout_s))
            return self._catch_up(timeout_s)
        except ShardFinished as error:
            self._drop()
            raise NotFound(f"the source {self.record.name!r} was dropped", source=self.record.name) from error
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """Release what it has open. Idempotent."""
        self._drop()
        self._bindings.close()
        if self._schemas is not None:
            self._schemas.close()

    def _drop(self) -> None:
        """Forget what is in memory."""
        targets, self._targets = self._targets, {}
        for target in targets.values():
            with suppress(*PASSING):
                target.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _opened(self) -> SourceReader:
        if self._reader is None:
            self._reader = self.record.reader.open()
        return self._reader

    def _mint(self, deadline: Deadline) -> None:
        reader = self._opened()
        self._bindings.mint(lambda bound: reader.high_watermarks(bound, STEP_BYTES), deadline, TICK_MS)

    def _writing(self) -> dict[str, Target]:
        if not self._targets:
            for role, id_ in self.record.collections.items():
                self._targets[role] = Target(self._controller, id_, self._owner)
        return self._targets

    def _catch_up(self, timeout_s: float) -> Progress:
        targets = self._writing()
        time = min(target.fetch_upper() for target in targets.values())
        self._move_holds(time)
        bound = self._bindings.since(time)
        messages = errors = 0
        for window in windows(bound, time, WINDOW_BYTES, self._opened().estimate):
            for part, some in self._parts(window):
                schemas = self._schemas_of(some, timeout_s)
                made = self._pipeline.apply(some, partial(self._lookup, part), schemas, self._waiting(part))
                self._check_errors(made, part)
                self._write(made, part, self._client.runtime.deadline(timeout_s))
                messages, errors, time = messages + some.num_rows, errors + made.errors.num_rows, part.end
                self._move_holds(time)
        self._tell()
        return self._progress(time, bound.marks, messages, errors)

    def _parts(self, window: Window) -> Iterator[tuple[Window, pa.Table]]:
        """The window with its messages; in parts, if these turn out to be much more than was estimated."""
        some = self._read(window)
        if some is not None:
            yield window, some
            return
        for half in window.halves():
            yield from self._parts(half)

    def _read(self, window: Window) -> pa.Table | None:
        """The messages of a window with their times, in the order of times, partitions and addresses.

        None if they are too many for the memory, and the window could be a shorter one.
        """
        reader = self._opened()
        tables, times, size = [], [], 0
        for partition, (start, end) in window.ranges().items():
            for table in reader.read(partition, start, end):
                times.append(window.times_of(partition, integers(table.column("address"))))
                count = table.num_rows
                names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([partition]))
                tables.append(table.append_column("partition", names).append_column(TIME_FIELD, array_of(times[-1])))
                size += table.nbytes
                if size > 2 * WINDOW_BYTES and len(window.steps) > 1:
                    return None
        if not tables:
            return pa.table({"partition": pa.array([], pa.string())})
        whole = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
        order = in_order(times)
        return whole if (order[1:] > order[:-1]).all() else take(whole, order)

    def _schemas_of(self, messages: pa.Table, timeout_s: float) -> Mapping[int, Written]:
        """The schemas that messages name, as they are committed."""
        if self._schemas is None:
            return NO_SCHEMAS
        from persist_lib.storage.sources.avro import ids_of  # noqa: PLC0415 - fastavro is an extra

        ids = ids_of(self.record.decoding, messages)
        return self._schemas.learn(ids, self._client.runtime.deadline(timeout_s))

    def _lookup(self, window: Window, keys: pa.Table) -> pa.Table:
        """The state: what the output has of these keys as of just before the window (nothing at 0)."""
        output = self._writing()["output"]
        if window.start == 0:
            return output.schema.contents.empty_table()
        return output.lookup(keys, window.start - 1)

    def _waiting(self, window: Window) -> pa.Table | None:
        """The state of transactions as of just before the window (none at 0)."""
        target = self._writing().get("waiting")
        return None if target is None or window.start == 0 else target.contents(window.start - 1)

    def _check_errors(self, made: Made, window: Window) -> None:
        most = self.record.meaning.most_errors
        if most is None or not made.errors.num_rows:
            return
        before = self._writing()["errors"].count(window.start - 1) if window.start else 0
        if before + made.errors.num_rows > most:
            first = made.errors.slice(0, 1).to_pylist()[0]
            raise Refused(
                f"source {self.record.name!r}: {before + made.errors.num_rows} messages are bad, and most_errors is "
                f"{most}. Nothing of these was written. The first new one, in {first['partition']} at "
                f"{first['address']}: {first['reason']}",
                source=self.record.name, errors=before + made.errors.num_rows,
            )  # fmt: skip

    def _write(self, made: Made, window: Window, deadline: Deadline) -> None:
        """Compare all with what is committed, and then append."""
        targets = self._writing()
        for role, target in targets.items():
            target.check(getattr(made, role), window.start, window.end)
        for role, target in targets.items():
            target.append(getattr(made, role), window.start, window.end, deadline)

    def _move_holds(self, time: int) -> None:
        """Let the source's holds follow t, the bindings' last: they say what the upstream may forget.

        SUBTLE: t only goes up, as it is a least upper. So whichever instance moves a hold, it may; one that is late is
        told so, and need not care. The fence is another one once the source was reset or dropped.
        """
        since = max(0, time - 1)
        if self._held >= 0 and since < self._held + HOLD_EVERY_MS:
            return
        shards = [target.collection.shard for target in self._writing().values()]
        for shard in (*shards, self._bindings.shard):
            try:
                self._client.set_hold(shard, HOLD, since, opaque=self._fence, expected=self._fence)
            except SinceViolation:
                continue
            except HoldConflict as error:
                raise HoldConflict(
                    f"source {self.record.name!r}: its hold on {shard} was taken away, so this instance ends. If the "
                    "source was not dropped, `persist source resume` sets the hold again",
                    **error.fields,
                ) from error
        for target in self._writing().values():
            target.let_go(since)
        self._held = since

    def _tell(self) -> None:
        """Tell the upstream what nobody will ask for again: the addresses at the bindings' since, never at t."""
        since = self._client.machine(self._bindings.shard).fetch().state.since.time or 0
        if since <= self._told:
            return
        with suppress(SinceViolation):  # it has moved on just now
            self._opened().tell(self._bindings.since(since + 1).start)
            self._told = since

    def _progress(self, time: int, marks: Marks, messages: int, errors: int) -> Progress:
        reader, now = self._opened(), self._client.consensus.now()
        behind = {
            partition: Behind(lag.messages, lag.bytes, None if lag.read_ms is None else max(0, now - lag.read_ms) / 1e3)
            for partition, lag in (reader.lags(marks) if isinstance(reader, TellsLags) else {}).items()
        }
        return Progress(time, messages, errors, dict(reader.lag(marks)), max(0, now - time), messages == 0, behind)
