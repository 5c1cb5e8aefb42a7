"""What the tasks of a load do: decode ranges of a source, and make updates of rows by key. They run in any process.

`decode` reads one range: errors, raw messages, and rows that are only added, are staged; other rows are sent by key.
`state` sends one split of what the output has before the window by key. `settle` makes updates of all that was sent
for one bucket of keys, in its order, and stages them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.kernel.fingerprint import hash_rows
from persist_lib.kernel.order import take
from persist_lib.kernel.packing import packed, unpacked
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.storage.sources.envelopes import decisive
from persist_lib.storage.sources.opening import open_reader
from persist_lib.storage.sources.pipeline import ERRORS, Pipeline
from persist_lib.storage.sources.reading import read_parts, schemas_of
from persist_lib.storage.sources.reclock import Window
from persist_lib.storage.sources.records import SourceRecord
from persist_lib.storage.sources.schemas import Schemas
from persist_lib.storage.splits import CollectionSplit
from persist_lib.storage.staged import CollectionStaged, CollectionTicket

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
    pipeline = Pipeline(record.decoding, record.meaning, record.columns, record.message_columns)
    registry = record.decoding.registry
    schemas = None if registry is None else Schemas(client, record.schemas, registry)
    reader = open_reader(client, record)
    found: dict[str, list[pa.Table]] = {role: [] for role in work.tickets}
    messages, place = 0, (index + 1) << 32
    try:
        for _, some in read_parts(reader, work.windows[index], work.most_bytes):
            if not some.num_rows:
                continue
            deadline = client.runtime.deadline(SCHEMAS_S)
            rows = pipeline.rows_of(some, schemas_of(schemas, record.decoding, some, deadline))
            messages += some.num_rows
            for role, table in (("errors", rows.errors), ("raw", rows.raw)):
                if role in found and table.num_rows:
                    found[role].append(table)
            if not work.buckets:
                found["output"].append(pipeline.updates_of(rows.rows, _no_state))
                continue
            for piece in pieces(record.columns, decisive(record.columns, rows.rows), work.buckets, place):
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
    split, columns = work.splits[index - len(work.windows)], work.record.columns
    place = 0
    for table in split.batches(client_of(work).blob):
        for piece in pieces(columns, table.select(columns.names), work.buckets, place):
            place = piece.place + 1
            yield piece
    yield Answer(index, {})


def settle(work: Work, bucket: int, sent: Iterable[Piece]) -> Answer:
    """Make updates of the rows of one bucket, which come in the order of their places, and stage them."""
    record = work.record
    pipeline = Pipeline(record.decoding, record.meaning, record.columns, record.message_columns)
    old = [record.columns.contents.empty_table().select(record.columns.names)]
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
    # SUBTLE: by process, as Spark forks its workers, and a fork must not use its parent's connections.
    return _client(os.getpid(), work.url, work.consensus_url, work.config.model_dump_json())


@lru_cache(maxsize=16)
def _client(_pid: int, url: str, consensus_url: str, config: str) -> Client:
    settings, runtime = Config.model_validate_json(config), Runtime(background=False)
    return open_client(url, consensus_url, config=settings, runtime=runtime, create=False)


def _no_state(_keys: pa.Table | None) -> pa.Table:
    raise AssertionError("rows that are only added need no state")
