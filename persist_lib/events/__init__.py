"""Event logs: no effect before its event is durable, on any store.

    store = events.open_store("disk:/var/lib/ledger")
    with store.writer() as writer:
        writer.write(writer.last + 1, b"...").result()     # durable
    with store.reader() as reader:
        for event in reader.replay():
            print(event.id, bytes(event.payload))

`api` says what a store, a writer and a reader are, and what a driver has to do.
"""

from __future__ import annotations

from persist_lib.events.api import (
    EVENTS,
    Event,
    Held,
    Key,
    Kind,
    Opening,
    Put,
    Reader,
    RecordStore,
    Scans,
    Store,
    Writer,
)
from persist_lib.events.kinds import known_kinds
from persist_lib.events.specifier import Specifier, parse_specifier
from persist_lib.events.store import open_store

__all__ = [
    "EVENTS",
    "Event",
    "Held",
    "Key",
    "Kind",
    "Opening",
    "Put",
    "Reader",
    "RecordStore",
    "Scans",
    "Specifier",
    "Store",
    "Writer",
    "known_kinds",
    "open_store",
    "parse_specifier",
]
