"""Loading much at once: the windows of a source are decoded by tasks, and each is one commit to all its collections.

A window is whole times, and a task takes some of them: ranges of bytes of files. What a task makes of its messages
needs nothing of the others, but for upserts: which row a key had before. So tasks send these rows, by their keys, to
others, which make updates of them as an instance would. Instances may run meanwhile; all of them make the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

from persist_lib.arguments import parse_integer
from persist_lib.errors import Gone, InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.storage.multi_append import append_staged, open_stage
from persist_lib.storage.sources.bindings import Bound, Marks
from persist_lib.storage.sources.declared import Collection
from persist_lib.storage.sources.kafka import Kafka
from persist_lib.storage.sources.load_tasks import Answer, Work
from persist_lib.storage.sources.postgres import Postgres
from persist_lib.storage.sources.reading import read_parts
from persist_lib.storage.sources.reclock import Window, windows
from persist_lib.storage.sources.records import SourceRecord
from persist_lib.storage.sources.running import TICK_MS, WINDOW_BYTES, Done, Ingestion
from persist_lib.storage.splits import CollectionSplit
from persist_lib.storage.staged import CollectionStage

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

LOAD_BYTES = 16 << 30
"""How much is committed together. Upserts read all of the output for each such window but the first."""
COMMIT_S = 3600.0
PACKED = 4
"""How many bytes the rows of a part have in memory for each that is stored, about."""
MOST_BUCKETS = 4096


class Engine(Protocol):
    """Carries out the tasks of a window, somewhere."""

    def __call__(self, work: Work, says: str) -> Sequence[Answer]:
        """What all tasks answered. Raises the first permanent error of one."""


class Loads(NamedTuple):
    """How an instance loads: by which engine, what is more than `above_bytes`; the rest it decodes itself.

    About `load_bytes` are committed together, and a task takes about `task_bytes`.
    """

    engine: Engine
    above_bytes: int = 0
    load_bytes: int = LOAD_BYTES
    task_bytes: int = WINDOW_BYTES


class Loading(Ingestion):
    """An instance of a source whose large windows are decoded by an engine."""

    def __init__(self, controller: Controller, record: SourceRecord, owner: str, loads: Loads) -> None:
        check_loadable(record)
        super().__init__(controller, record, owner)
        self._engine, self._above = loads.engine, parse_integer(loads.above_bytes, "above_bytes", 0)
        self._task_bytes = parse_integer(loads.task_bytes, "task_bytes", 1)
        self.window_bytes = parse_integer(loads.load_bytes, "load_bytes", 1)

    def _mint(self, deadline: Deadline) -> None:
        """Bind as much as a window takes, or all that is there."""
        reader, bound, size = self._opened(), 1, 0

        def propose(known: Marks) -> Marks:
            nonlocal bound
            new = reader.high_watermarks(known, self.step_bytes)
            starts = {partition: known[partition].address if partition in known else 0 for partition in new}
            bound = sum(reader.estimate(one, starts[one], mark.address) for one, mark in new.items())
            return new

        while bound and size < self.window_bytes:
            self._clock.mint(propose, self._client.runtime.deadline(deadline.timeout_s), TICK_MS)
            size += bound

    def _through(self, window: Window, timeout_s: float) -> Iterator[Done]:
        bound = Bound(window.before, window.steps, window.end)
        parts = tuple(windows(bound, window.start, self._task_bytes, self._estimate))
        if len(parts) > 1 and sum(self._estimate(*one) for one in _ranges(window)) > self._above:
            self._settle(window, self._client.runtime.deadline(timeout_s))
            done = self._spread(window, parts, timeout_s)
            if done is not None:
                yield done
                return
        for part in parts:
            yield from super()._through(part, timeout_s)

    def _parts(self, window: Window) -> Iterable[tuple[Window, pa.Table]]:
        return read_parts(self._opened(), window, 2 * self._task_bytes)

    def _spread(self, window: Window, parts: tuple[Window, ...], timeout_s: float) -> Done | None:
        """Let tasks decode the parts, and commit what they made. None where somebody has begun to write these times."""
        client, start, end = self._client, window.start, window.end
        targets = self._writing()
        with ExitStack() as opened:
            stages: dict[str, CollectionStage] = {}
            for role, target in targets.items():
                stage = open_stage(target.writer, start, end, client.runtime.deadline(timeout_s))
                if stage is None:
                    return None
                stages[role] = opened.enter_context(stage)
            tickets = {role: stage.ticket for role, stage in stages.items()}
            splits, buckets = self._by_key(window, opened)
            place = client.url, client.consensus_url, client.config
            answers = self._carry_out(Work(*place, self.record, parts, splits, tickets, buckets, 2 * self._task_bytes))
            messages, errors = sum(one.messages for one in answers), sum(one.errors for one in answers)
            bad = min((one for one in answers if one.first_error is not None), key=lambda one: one.place, default=None)
            if bad is not None and bad.first_error is not None:
                self._check_errors(errors, bad.first_error, window)
            stagings = [
                (target.writer, tickets[role].rendition, [one.staged[role] for one in answers if role in one.staged])
                for role, target in targets.items()
            ]
            append_staged(stagings, start, end, client.runtime.deadline(max(timeout_s, COMMIT_S)))
        return Done(end, messages, errors)

    def _by_key(self, window: Window, opened: ExitStack) -> tuple[tuple[CollectionSplit, ...], int]:
        """What the output has before the window, in splits that are kept open; and into how many buckets keys go."""
        if self.record.meaning.envelope == "none":
            return (), 0
        size = sum(self._estimate(*one) for one in _ranges(window))
        splits: tuple[CollectionSplit, ...] = ()
        if window.start:
            before = opened.enter_context(self._writing()["output"].snapshot(window.start - 1))
            stored = PACKED * before.size
            size, splits = size + stored, tuple(before.splits(1 + stored // self._task_bytes))
        return splits, min(MOST_BUCKETS, 1 + size // self._task_bytes)

    def _carry_out(self, work: Work) -> Sequence[Answer]:
        try:
            return self._engine(work, f"{self.record.name}: loading {len(work.windows)} ranges")
        except Gone as error:
            raise Gone(
                f"{error.message}. Tasks read it: whatever carries them out has to see the same files as this process",
                **error.fields,
            ) from error


def _ranges(window: Window) -> Iterator[tuple[str, int, int]]:
    return ((name, low.address, high.address) for name, (low, high) in window.ranges().items())


def check_loadable(record: SourceRecord) -> None:
    """Raise InvalidUsage for a source that tasks cannot load side by side."""
    if why := unloadable(record):
        raise InvalidUsage(
            f"source {record.name!r} is not loaded by tasks, as {why}. Nothing was read; persist ingest takes all of it"
        )


def unloadable(record: SourceRecord) -> str:
    """Why tasks cannot load a source side by side; empty if they can."""
    if isinstance(record.reader, Postgres):
        return "a table's first snapshot is one copy"
    if isinstance(record.reader, (Kafka, Collection)):
        return f"{type(record.reader).__name__.lower()} is read in order"
    if record.meaning.transactions is not None:
        return "transactions wait for one another across its messages"
    return ""
