"""Ingesting a source: one instance of it. Any number may run at once, be paused, killed or started again.

All that an instance knows beyond one step it can read again, so whatever goes wrong, it drops that and starts at t, the
least upper of what it writes. See docs/design/0042-sources.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.arguments import parse_seconds
from persist_lib.catalog.staging import CollectionStage, CollectionStaged
from persist_lib.catalog.writer import append_staged, open_stage
from persist_lib.config import MIB
from persist_lib.errors import (
    Determinate,
    GivesUpHistory,
    Gone,
    HoldConflict,
    Indeterminate,
    LeaseExpired,
    NotFound,
    Refused,
    ShardFinished,
    SinceViolation,
    UpperMismatch,
)
from persist_lib.runtime.ambient import Deadline
from persist_lib.sources.bindings import Clock, Marks, Window, read, read_parts, schemas_of, tables_of, windows
from persist_lib.sources.decoding import NewFields
from persist_lib.sources.growth import Growth, of_messages
from persist_lib.sources.pipeline import made_of
from persist_lib.sources.protocol import HOLD, Lag, SourceReader, said, settled
from persist_lib.sources.records import SourceRecord, mend_number
from persist_lib.sources.targets import Target

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller

STEP_BYTES = 32 * MIB
WINDOW_BYTES = 64 * MIB
COMMIT_S = 3600.0
"""How long the commit of what was staged may take, at least."""
TICK_MS = 5_000
"""How often a source without new messages moves on in time: each time is an append to each of its collections."""
HOLD_EVERY_MS = 5_000
"""By how much t moves before holds follow."""
PASSING = (LeaseExpired, SinceViolation, UpperMismatch, Determinate, Indeterminate)
"""What the next step may not meet: an instance drops what it has in memory, and starts again."""


Grows = Callable[[SourceRecord, Growth | None, Deadline], SourceRecord]
"""Lets a source take columns, if there are some, and answers its record with all that it has taken by now."""


class Behind(msgspec.Struct, frozen=True):
    """How far a partition is behind: messages and bytes that are left, and seconds since what was read was written.

    None is what its reader does not know.
    """

    messages: int | None
    bytes: int | None
    seconds: float | None


class Progress(msgspec.Struct, frozen=True):
    """What one step did, and what is left. `time` is t: all before it is durable in all collections of the source.

    `lag` is about how many addresses of each partition are there beyond what is durable (of files, bytes or rows);
    `behind_ms` is how far t is behind the store's clock. `is_idle`: it found nothing new, and no table is yet to join.
    `behind` says more of partitions with a lag, where the reader knows it; `held_back` how many bytes the upstream
    keeps for this source, and `warning` what is wrong with that. `unread` says what is there and is not read, and why.
    """

    time: int
    messages: int
    errors: int
    lag: dict[str, int]
    behind_ms: int
    is_idle: bool
    behind: dict[str, Behind] = {}
    held_back: int | None = None
    warning: str = ""
    unread: dict[str, str] = {}


class Done(NamedTuple):
    """What is durable now: all before `end`, with so many messages, of which so many were bad."""

    end: int
    messages: int
    errors: int


class Ingestion:
    """One instance of a source. Use it from one thread."""

    step_bytes = STEP_BYTES
    """Messages that become bound at one time, in bytes, about."""
    window_bytes = WINDOW_BYTES
    """Messages that are in memory at once, and made durable together, in bytes, about; one time's at least."""

    def __init__(
        self, controller: Controller, record: SourceRecord, owner: str, clock: Clock | None = None,
        grows: Grows | None = None,
    ) -> None:  # fmt: skip
        self._controller, self._client, self.record = controller, controller.client, record
        self._fence, self._grows = record.fence, grows
        self._pipelines = record.pipelines()
        self._reader: SourceReader | None = None
        self._clock = record.reader.clock(controller, record, owner) if clock is None else clock
        self._schemas = record.open_schemas(self._client)
        self._owner = owner
        self._targets: dict[str, Target] = {}
        self._late: set[str] = set()
        self._held = -1
        self._at = 0
        self._told = 0

    def step(self, timeout: float | None = None, *, mints: bool = True) -> Progress:
        """Bind what is there now, and make all that is bound durable. With `mints=False` others bind.

        Each window may take `timeout` seconds to be written, by default those of the client's configuration.

        Raises Gone and Diverged, which stay so; HoldConflict when the source was reset or dropped; and what may pass
        (`PASSING`): then call it again. NotFound once it was dropped.
        """
        timeout_s = self._client.config.timeout_s if timeout is None else parse_seconds(timeout)
        try:
            self._grow(self._client.runtime.deadline(timeout_s))
            if mints:
                self._mint(self._client.runtime.deadline(timeout_s))
            while True:
                try:
                    return self._catch_up(timeout_s)
                except NewFields as found:
                    self._take(found, self._client.runtime.deadline(timeout_s))
        except Gone as error:
            uppers = {role: target.fetch_upper() for role, target in self._targets.items()}
            is_late = bool(uppers) and self.record.least(uppers) > self._at  # others made durable what is gone
            self._drop()
            if is_late:
                raise Determinate("other instances were faster: what is gone was durable. It starts again") from error
            raise
        except ShardFinished as error:
            self._drop()
            raise NotFound(f"the source {self.record.name!r} was dropped", source=self.record.name) from error
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        self._drop()
        self._clock.close()
        if self._schemas is not None:
            self._schemas.close()

    def _drop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        targets, self._targets = self._targets, {}
        for target in targets.values():
            with suppress(*PASSING):
                target.close()

    def _opened(self) -> SourceReader:
        if self._reader is None:
            self._reader = self.record.reader.open_reader(self._client, self.record, self._clock)
        return self._reader

    def _grow(self, deadline: Deadline) -> None:
        """Take columns that the upstream has by now, where the source takes such: of one table after the other."""
        while self._grows is not None:
            growth: Growth | None = said(self._opened(), "growth", None)
            if growth is None:
                return
            self.adopt(self._grows(self.record, growth, deadline))

    def _take(self, found: NewFields, deadline: Deadline) -> None:
        """Take fields that messages have. Raises what was found where another instance has to."""
        if self._grows is None:
            raise found
        self.adopt(self._grows(self.record, of_messages(found.columns), deadline))

    def _know(self, deadline: Deadline) -> None:
        """Learn which fields other instances have taken: call it after looking at how far they are.

        What another one wrote with a field is before that, and the field was taken before it was written. So no row is
        looked up here without what it has in such a field: its retraction would be of another row.
        """
        if self._grows is not None and self.record.decoding.takes_fields:
            record = self._grows(self.record, None, deadline)
            if record.epoch == self.record.epoch and record.schema != self.record.schema:
                self.adopt(record)

    def _mint(self, deadline: Deadline) -> None:
        reader = self._opened()
        self._clock.mint(lambda bound: reader.high_watermarks(bound, self.step_bytes), deadline, TICK_MS)

    def _estimate(self, partition: str, start: int, end: int) -> int:
        return self._opened().estimate(partition, start, end)

    def _writing(self) -> dict[str, Target]:
        if not self._targets:
            for role, id_ in self.record.collections.items():
                self._targets[role] = Target(self._controller, id_, self._owner)
        return self._targets

    def _begun(self) -> dict[str, Target]:
        """The collections that are written by now, in this order: not those of tables that are yet to join.

        Those of tables that have joined come first, so that none of the others is ever further. So an instance
        that does not know them gives up nothing that they need.
        """
        targets, joined = self._writing(), self.record.joined
        roles = sorted(targets, key=lambda role: role not in joined)
        return {role: targets[role] for role in roles if role not in self._late}

    def _catch_up(self, timeout_s: float) -> Progress:
        uppers = {role: target.fetch_upper() for role, target in self._writing().items()}
        self._know(self._client.runtime.deadline(timeout_s))
        self._late = {role for role in self.record.joined if not uppers[role]}
        time = self.record.least(uppers)
        self._at = time
        self._move_holds(time)
        bound = self._clock.since(time)
        said(self._opened(), "learn", None, bound.marks)
        messages = errors = 0
        for window in windows(bound, time, self.window_bytes, self._estimate, self.record.joined):
            self._join(window)
            for done in self._through(window, timeout_s):
                messages, errors, time = messages + done.messages, errors + done.errors, done.end
                self._at = time
                self._move_holds(time)
        self._tell()
        return self._progress(time, bound.marks, messages, errors)

    def _joining(self, window: Window) -> list[str]:
        """The tables that join with a window. They have all of it: see `windows`."""
        return [role for role in self.record.joined if window.steps and role in window.steps[0].marks]

    def _join(self, window: Window) -> None:
        """Let the outputs of tables that join with this window begin with it.

        At its very time. An instance that does not know of them yet moves the holds up to there, and no
        further, as it cannot read what is bound then. From there on they count for t, and all that they need is kept.
        """
        for role in self._joining(window):
            target = self._writing()[role]
            target.begin(window.start)
            with suppress(SinceViolation):
                self._client.downgrade_hold(target.collection.shard, HOLD, window.start - 1, expected=self._fence)
            self._late.discard(role)

    def _through(self, window: Window, timeout_s: float) -> Iterator[Done]:
        """Make a window durable, in one go or in several."""
        parts = self._parts(window)
        is_copy = self.record.reader.begins_with_copy and (window.start == 0 or self._joining(window))
        if is_copy and len(window.steps) == 1:
            whole = read(self._opened(), window, 2 * self.window_bytes, may_cut=True)
            if whole is None and (done := self._copy(window, timeout_s)) is not None:
                yield done
                return
            parts = parts if whole is None else [(window, whole)]
        for part, some in parts:
            self._settle(part, self._client.runtime.deadline(timeout_s))
            made = self._made(some, part, self._client.runtime.deadline(timeout_s))
            errors = made["errors"]
            self._check_errors(errors.num_rows, errors, part)
            self._write(made, part, self._client.runtime.deadline(timeout_s))
            yield Done(part.end, some.num_rows, errors.num_rows)

    def _copy(self, window: Window, timeout_s: float) -> Done | None:
        """Make a window durable whose rows have keys of their own: table by table, in one commit.

        None if another process began these times.
        """
        messages = errors = 0
        with ExitStack() as opened:
            stages = self._stages(window, opened, timeout_s)
            if stages is None:
                return None
            staged: dict[str, list[CollectionStaged]] = {role: [] for role in stages}

            def outputs() -> Iterator[tuple[str, pa.Table]]:
                nonlocal messages, errors
                for some in tables_of(self._opened(), window):
                    made = self._made(some, window, self._client.runtime.deadline(timeout_s))
                    messages, errors = messages + some.num_rows, errors + made["errors"].num_rows
                    if made["errors"].num_rows:
                        self._check_errors(errors, made["errors"], window)
                        staged["errors"].append(stages["errors"].write(made["errors"]))
                    yield from ((role, made[role]) for role in self._pipelines if made[role].num_rows)

            for role, tables in groupby(outputs(), itemgetter(0)):  # one table is copied after the other
                staged[role].append(stages[role].write(table for _, table in tables))
            self._append_staged(window, stages, staged, timeout_s)
        return Done(window.end, messages, errors)

    def _stages(self, window: Window, opened: ExitStack, timeout_s: float) -> dict[str, CollectionStage] | None:
        """A stage of each collection for a window's times. None if another process began these."""
        stages: dict[str, CollectionStage] = {}
        for role, target in self._begun().items():
            deadline = self._client.runtime.deadline(timeout_s)
            stage = open_stage(target.writer, window.start, window.end, deadline)
            if stage is None:
                return None
            stages[role] = opened.enter_context(stage)
        return stages

    def _append_staged(
        self, window: Window, stages: Mapping[str, CollectionStage],
        staged: Mapping[str, Sequence[CollectionStaged]], timeout_s: float,
    ) -> None:  # fmt: skip
        targets = self._writing()
        stagings = [(targets[role].writer, stage.rendition, staged[role]) for role, stage in stages.items()]
        append_staged(stagings, window.start, window.end, self._client.runtime.deadline(max(timeout_s, COMMIT_S)))

    def _parts(self, window: Window) -> Iterable[tuple[Window, pa.Table]]:
        return read_parts(self._opened(), window, 2 * self.window_bytes)

    def _made(self, messages: pa.Table, window: Window, deadline: Deadline) -> dict[str, pa.Table]:
        schemas, waiting = schemas_of(self._schemas, self.record.decoding, messages, deadline), self._waiting(window)
        lookup = partial(self._lookup, window)
        return made_of(self._pipelines, self.record.role_of, messages, lookup, schemas, waiting)

    def _settle(self, window: Window, deadline: Deadline) -> None:
        """See to it that the window is decoded as its collections are. If they were handed over, look again.

        SUBTLE: first the output, whose handover decides, and then the errors, whose is at the same time. So while
        neither is promised beyond what is written, the second handover can always follow the first.
        """
        if "raw" not in self.record.collections or self.record.tables:  # only then there are other renditions
            return
        for role in ("output", "errors"):
            commands = self._writing()[role].promise(window.end, deadline)
            numbers = [number for one in commands if (number := mend_number(self.record, one)) is not None]
            if numbers and numbers[-1] != self.record.mended:
                raise Determinate(
                    f"source {self.record.name!r} was mended while it ran, and this instance decodes as before. "
                    "Nothing was written; it continues with the new decoding once the handover is finished",
                    source=self.record.name,
                )  # fmt: skip

    def adopt(self, record: SourceRecord) -> None:
        """Continue by what is declared now: drop what is in memory."""
        self._drop()
        if self._schemas is not None:
            self._schemas.close()
        self.record, self._schemas, self._pipelines = record, record.open_schemas(self._client), record.pipelines()

    def _lookup(self, window: Window, role: str, keys: pa.Table | None) -> pa.Table:
        """The state: what an output has of these keys, or of all, as of just before the window (nothing at 0)."""
        output = self._writing()[role]
        if window.start == 0:
            return output.schema.data.empty_table()
        return output.lookup(keys, window.start - 1)

    def _waiting(self, window: Window) -> pa.Table | None:
        """The state of transactions as of just before the window (none at 0)."""
        target = self._writing().get("waiting")
        return None if target is None or window.start == 0 else target.contents(window.start - 1)

    def _check_errors(self, count: int, some: pa.Table, window: Window) -> None:
        """Raise Refused if the source has too many bad messages with these, of which `some` has the first."""
        most = self.record.meaning.most_errors
        if most is None or not count:
            return
        before = self._writing()["errors"].count(window.start - 1) if window.start else 0
        if before + count > most:
            first = some.slice(0, 1).to_pylist()[0]
            raise Refused(
                f"source {self.record.name!r}: {before + count} messages are bad, and most_errors is "
                f"{most}. Nothing of these was written. The first new one, in {first['partition']} at "
                f"{first['address']}: {first['reason']}",
                source=self.record.name, errors=before + count,
            )  # fmt: skip

    def _write(self, made: Mapping[str, pa.Table], window: Window, deadline: Deadline) -> None:
        targets = self._begun()
        for role, target in targets.items():
            target.check(made[role], window.start, window.end)
        for role, target in targets.items():
            target.append(made[role], window.start, window.end, deadline)

    def _move_holds(self, time: int) -> None:
        """Let the source's holds follow t, the bindings' last: they say what the upstream may forget.

        T only goes up, as it is a least upper. So whichever instance moves a hold, it may; a late one
        is refused, which does no harm. The fence is another one once the source was reset or dropped.
        """
        since = max(0, time - 1)
        every = 1 if self.record.schema.times is None else HOLD_EVERY_MS
        if self._held >= 0 and since < self._held + every:
            return
        holds = [(target.collection.shard, HOLD) for target in self._begun().values()]
        for shard, hold in (*holds, (self._clock.shard, self._clock.hold)):
            try:
                self._client.downgrade_hold(shard, hold, since, expected=self._fence)
            except SinceViolation:
                continue
            except GivesUpHistory:  # a handover under way has promised less than t: this hold follows with a later move
                continue
            except HoldConflict as error:
                raise HoldConflict(
                    f"source {self.record.name!r}: its hold on {shard} was taken away, so this instance ends. If the "
                    "source was not dropped, `persist source pause --resume` sets the hold again",
                    **error.fields,
                ) from error
        for target in self._begun().values():
            target.let_go(since)
        self._clock.let_go(since)
        self._held = since

    def _tell(self) -> None:
        """Tell the upstream what will not be asked for again: the addresses at the bindings' since, never at t."""
        since = self._clock.fetch_told()
        if since <= self._told:
            return
        with suppress(SinceViolation):  # it has moved on just now
            self._opened().tell(self._clock.since(since + 1).start)
            self._told = since

    def _progress(self, time: int, marks: Marks, messages: int, errors: int) -> Progress:
        reader, now = self._opened(), self._client.consensus.now()
        lags: Mapping[str, Lag] = said(reader, "lags", {}, marks)
        behind = {
            partition: Behind(lag.messages, lag.bytes, None if lag.read_ms is None else max(0, now - lag.read_ms) / 1e3)
            for partition, lag in lags.items()
        }
        nothing: tuple[int | None, str] = (None, "")
        kept, warning = said(reader, "held_back", nothing)
        return Progress(
            time, messages, errors, dict(reader.lag(marks)), self._clock.behind_ms(time),
            messages == 0 and not self._late, behind=behind,
            held_back=kept, warning=warning, unread=settled(said(reader, "unread", {}), now),
        )  # fmt: skip
