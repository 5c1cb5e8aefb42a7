"""What a write from Spark is, and the writer of where it goes: one shard, or all shards of a collection.

A plan is made in a Python worker of the driver, and pickled for its tasks. Each process opens what it needs once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Literal, NamedTuple

from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.errors import PersistError, SchemaMismatch
from persist_lib.relation.stage import Staged, Ticket
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.settings import config_of
from persist_lib.shard.commit import Machine
from persist_lib.spark.options import subject_of
from persist_lib.storage import CollectionWriter, Controller
from persist_lib.storage.schema_compat import is_additive
from persist_lib.storage.staged import CollectionStaged, CollectionTicket

OWNER = "Spark"
"""Whose writers these are, in lists of them."""

Mode = Literal["append", "upsert", "overwrite"]
AnyTicket = Ticket | CollectionTicket
AnyStaged = Staged | CollectionStaged
"""Of a shard's stage, or of a collection's."""


class Plan(NamedTuple):
    """What a write is, decided in the driver's Python worker and sent to all tasks."""

    urls: tuple[str, str]
    shard: str
    """Empty where it is a collection."""
    collection: str | None
    schema: Schema
    mode: Mode
    deletes: str | None
    lease_s: float | None
    bounds: tuple[int | str, int | str] | None
    at: int | str | None

    @property
    def client(self) -> Client:
        """The client of its location in this process."""
        return writing_client(*self.urls)

    @property
    def subject(self) -> str:
        """How messages call what is written."""
        return subject_of(self.shard, self.collection)

    @contextmanager
    def writer(self) -> Iterator[WriteHandle | CollectionWriter]:
        """A writer of the shard or the collection: it stages, and appends what was staged."""
        if self.collection is not None:
            yield self.collection_writer(self.collection)
            return
        with self.client.open_writer(self.shard, self.schema, owner=OWNER) as write:
            yield write

    @property
    def remembering(self) -> Machine:
        """The shard that remembers the producers."""
        if self.collection is None:
            return self.client.machine(self.shard)
        return self.client.machine(self.collection_writer(self.collection).collection.shard)

    def collection_writer(self, name: str) -> CollectionWriter:
        writer = collection_writer(self.client, name, is_known=True)
        if not self._fits(writer):
            writer = collection_writer(self.client, name)
        if not self._fits(writer):
            raise SchemaMismatch(
                f"{self.subject} has the schema {writer.schema} by now, and this DataFrame was planned for "
                f"{self.schema}. Nothing was written. Run it again",
                collection=name, expected=self.schema, actual=writer.schema,
            )  # fmt: skip
        return writer

    def _fits(self, writer: CollectionWriter) -> bool:
        if self.mode == "append":
            return is_additive(self.schema, writer.schema)
        return self.schema == writer.schema


class _Open(NamedTuple):
    """What this process has open of a catalog: it asks the location only for what is new."""

    controller: Controller
    writers: dict[str, CollectionWriter]


_open: dict[tuple[int, str, str], _Open] = {}


def collection_writer(client: Client, name: str, *, is_known: bool = False) -> CollectionWriter:
    """A writer of a collection, in its newest columns. It stays open for the next call, as opening takes requests.

    With `is_known` it is the one that this process has: the same call has looked at it before.
    """
    place = (os.getpid(), client.url, client.consensus_url)
    found = _open.setdefault(place, _Open(client.controller(), {}))
    known = found.writers.get(name)
    if known is not None and (is_known or _is_current(found.controller, known)):
        return known
    if known is not None:
        del found.writers[name]
        with suppress(PersistError):
            known.close()
    fresh = found.writers[name] = found.controller.open_writer(name, owner=OWNER)
    return fresh


def _is_current(controller: Controller, writer: CollectionWriter) -> bool:
    """Whether it is the collection of its name still, and has its newest columns."""
    named = controller.catalog.fetch().named(writer.name)
    return named is not None and named.id == writer.collection.id and writer.fetch_schema() == writer.schema


def writing_client(location: str, consensus: str | None) -> Client:
    """The client of a location in this process, which may write. It is created if it is not there. Never closed."""
    return _client(os.getpid(), location, consensus)


@lru_cache(maxsize=16)
def _client(_pid: int, location: str, consensus: str | None) -> Client:
    # SUBTLE: by process, as Spark forks its workers, and a fork must not use its parent's connections.
    config = Config.model_validate(config_of(os.environ))  # noqa: TID251 - an edge, as in `options`
    return open_client(location, consensus, config=config, runtime=Runtime())
