"""Loading much at once: the windows of a source are decoded by tasks, and each is one commit to all its collections.

A window is whole times, and a task takes some of them: ranges of bytes of files. What a task makes of its messages
needs nothing of the others, but for upserts: which row a key had before. So tasks send these rows, by their keys, to
others, which make updates of them as an instance would. Instances may run at the same time; all of them make the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.arguments import parse_integer
from persist_lib.catalog.answers import CollectionSplit
from persist_lib.catalog.staging import CollectionStaged, CollectionTicket
from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.errors import Gone, InvalidUsage
from persist_lib.kernel.columns import packed, unpacked
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.order import take
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.schema import Schema
from persist_lib.sources.bindings import Bound, Marks, Window, read_parts, schemas_of, windows
from persist_lib.sources.envelopes import decisive
from persist_lib.sources.pipeline import ERRORS, no_state
from persist_lib.sources.records import SourceRecord
from persist_lib.sources.running import TICK_MS, WINDOW_BYTES, Done, Ingestion

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller


PIECE_BYTES = 8 << 20
"""The most bytes of rows of one bucket that are sent as one piece, about."""
SCHEMAS_S = 300.0


class Work(NamedTuple):
    """One window of a source, for tasks: a range each, then a split each of what the output has before. It pickles.

    `tickets` are those of the collections by what they are for. Without `buckets` the output's rows need no state.
    """

    url: str
    consensus_url: str
    config: Config
    record: SourceRecord
    windows: tuple[Window, ...]
    splits: tuple[CollectionSplit, ...]
    tickets: Mapping[str, CollectionTicket]
    buckets: int
    most_bytes: int

    @property
    def tasks(self) -> int:
        """How many tasks decode or read state."""
        return len(self.windows) + len(self.splits)


class Piece(NamedTuple):
    """Rows of one bucket of keys. Within a bucket `place` says in which order: the state first, then by time."""

    bucket: int
    place: int
    data: bytes


class Answer(NamedTuple):
    """What a task did: staged updates by what collection they are for, and how many messages it read. It pickles."""

    place: int
    staged: Mapping[str, CollectionStaged]
    messages: int = 0
    errors: int = 0
    first_error: pa.Table | None = None


def begin(work: Work, index: int) -> Iterator[Piece | Answer]:
    """Carry out the task at `index`; yields what is to be sent, and at last its answer."""
    if index < len(work.windows):
        return decode(work, index)
    return state(work, index)


def decode(work: Work, index: int) -> Iterator[Piece | Answer]:
    """Decode a range of messages."""
    record, client = work.record, client_of(work)
    pipeline = record.pipeline()
    schemas = record.open_schemas(client)
    reader = record.reader.open_reader(client, record)
    found: dict[str, list[pa.Table]] = {role: [] for role in work.tickets}
    messages, place = 0, (index + 1) << 32
    try:
        for _, some in read_parts(reader, work.windows[index], work.most_bytes):
            if not some.num_rows:
                continue
            deadline = client.runtime.deadline(SCHEMAS_S)
            ready = pipeline.ready(some, schemas_of(schemas, record.decoding, some, deadline))
            rows, _ = pipeline.rows_of(ready)
            messages += some.num_rows
            for role, table in (("errors", rows.errors), ("raw", rows.raw)):
                if role in found and table.num_rows:
                    found[role].append(table)
            if not work.buckets:
                found["output"].append(pipeline.updates_of(rows.output, no_state))
                continue
            for piece in pieces(record.schema, decisive(record.schema, rows.output), work.buckets, place):
                place = piece.place + 1
                yield piece
    finally:
        reader.close()
        if schemas is not None:
            schemas.close()
    staged = {role: work.tickets[role].write(tables) for role, tables in found.items() if tables}
    errors = pa.concat_tables([ERRORS.updates.empty_table(), *found["errors"]])
    yield Answer(index, staged, messages, errors.num_rows, errors.slice(0, 1) if errors.num_rows else None)


def state(work: Work, index: int) -> Iterator[Piece | Answer]:
    """Read a part of what the output has before the window."""
    split, columns = work.splits[index - len(work.windows)], work.record.schema
    place = 0
    for table in split.batches(client_of(work).blob):
        for piece in pieces(columns, table.select(columns.names), work.buckets, place):
            place = piece.place + 1
            yield piece
    yield Answer(index, {})


def settle(work: Work, bucket: int, sent: Iterable[Piece]) -> Answer:
    """Make updates of the rows of one bucket, which come in the order of their places, and stage them."""
    record = work.record
    pipeline = record.pipeline()
    old = [record.schema.contents.empty_table().select(record.schema.names)]
    new: list[pa.Table] = []
    for piece in sent:
        (old if piece.place < 1 << 32 else new).append(unpacked(piece.data))
    before = pa.concat_tables(old)
    place = work.tasks + bucket
    if not new:
        return Answer(place, {})
    updates = pipeline.updates_of(pa.concat_tables(new), lambda _: before)
    return Answer(place, {"output": work.tickets["output"].write(updates)})


def pieces(schema: Schema, rows: pa.Table, buckets: int, place: int) -> Iterator[Piece]:
    """Rows by the hash of their key, each bucket's in their order. Places go up from `place`."""
    if not rows.num_rows:
        return
    hashed = hash_rows(Schema(key=schema.key), rows.select(schema.key_names)) % np.uint64(buckets)
    order = np.argsort(hashed, kind="stable")
    ordered, edges = take(rows, order), np.searchsorted(hashed[order], np.arange(buckets + 1, dtype=np.uint64))
    for bucket, (start, end) in enumerate(pairwise(edges.tolist())):
        share = ordered.slice(start, end - start)
        step = max(1, share.num_rows * PIECE_BYTES // max(PIECE_BYTES, share.nbytes))
        for low in range(0, share.num_rows, step):
            yield Piece(bucket, place, packed(share.slice(low, step), "lz4"))
            place += 1


def client_of(work: Work) -> Client:
    """The location, opened once in each process. It is never closed, and has no thread."""
    # By process, as Spark forks its workers, and a fork must not use its parent's connections.
    return _client(os.getpid(), work.url, work.consensus_url, work.config.model_dump_json())


@lru_cache(maxsize=16)
def _client(_pid: int, url: str, consensus_url: str, config: str) -> Client:
    settings, runtime = Config.model_validate_json(config), Runtime(background=False)
    return open_client(url, consensus_url, config=settings, runtime=runtime, create=False)


LOAD_BYTES = 16 << 30
"""How much is committed together. Upserts read all of the output for each such window but the first."""
PACKED = 4
"""How many bytes the rows of a part have in memory for each that is stored, about."""
MOST_BUCKETS = 4096


Engine = Callable[[Work, str], Sequence[Answer]]
"""Carries out the tasks of a window, somewhere, and answers what all of them did. Raises the first permanent error.

It also gets a text that says what is loaded.
"""


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
        """Let tasks decode the parts, and commit what they made. None if another process began these times."""
        client = self._client
        with ExitStack() as opened:
            stages = self._stages(window, opened, timeout_s)
            if stages is None:
                return None
            tickets = {role: stage.ticket for role, stage in stages.items()}
            splits, buckets = self._by_key(window, opened)
            place = client.url, client.consensus_url, client.config
            answers = self._carry_out(Work(*place, self.record, parts, splits, tickets, buckets, 2 * self._task_bytes))
            messages, errors = sum(one.messages for one in answers), sum(one.errors for one in answers)
            bad = min((one for one in answers if one.first_error is not None), key=lambda one: one.place, default=None)
            if bad is not None and bad.first_error is not None:
                self._check_errors(errors, bad.first_error, window)
            staged = {role: [one.staged[role] for one in answers if role in one.staged] for role in tickets}
            self._append_staged(window, stages, staged, timeout_s)
        return Done(window.end, messages, errors)

    def _by_key(self, window: Window, opened: ExitStack) -> tuple[tuple[CollectionSplit, ...], int]:
        """What the output has before the window, in splits that are kept open; and into how many buckets keys go."""
        if not self.record.meaning.rows.by_key:
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
    if record.decoding.takes_fields:
        return "what fields its messages have is met in their order"
    if record.meaning.transactions is not None:
        return record.reader.unloadable or "transactions wait for one another across its messages"
    return record.reader.unloadable
