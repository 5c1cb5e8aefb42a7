"""Event logs: no effect before its event is durable, on any store.

    store = events.open_store("disk:/var/lib/ledger")
    with store.writer() as writer:
        writer.write(writer.last + 1, b"...").result()     # durable
    with store.reader() as reader:
        for event in reader.replay():
            print(event.id, bytes(event.payload))

    with events.Loop(store, events.Program(step, initial, release)) as loop:
        loop.submit(b"...").result()                       # durable, computed, and its effects released

`api` says what a store, a writer and a reader are, what a driver has to do, and what a program is.
"""

from __future__ import annotations

from persist_lib.events.api import (
    EVENTS,
    Effect,
    Event,
    Held,
    Input,
    Key,
    Kind,
    Opening,
    Program,
    Put,
    Reader,
    RecordStore,
    Scans,
    Store,
    Writer,
)
from persist_lib.events.in_flight import Done, EventFuture
from persist_lib.events.loop import Loop
from persist_lib.events.migrate import Compared, Copied, compare, copy
from persist_lib.events.recovery import replay
from persist_lib.events.repair import Checked, Looked, Repaired, check, look, repair, set_released
from persist_lib.events.store import Chosen, Specifier, choose, known_kinds, name_of, open_store, parse_specifier

__all__ = [
    "EVENTS", "Checked", "Chosen", "Compared", "Copied", "Done", "Effect", "Event", "EventFuture", "Held", "Input",
    "Key", "Kind", "Looked", "Loop", "Opening", "Program", "Put", "Reader", "RecordStore", "Repaired", "Scans",
    "Specifier", "Store", "Writer", "check", "choose", "compare", "copy", "known_kinds", "look", "name_of",
    "open_store", "parse_specifier", "repair", "replay", "set_released",
]  # fmt: skip
