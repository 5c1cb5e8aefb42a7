"""Event logs of every kind, each of its own, for tests that are about all of them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from persist_lib.events import open_store
from persist_lib.events.store import LogStore
from tests import servers

KINDS = ("disk", "sqlt", "lmdb", "rock", "pg", "s3", "persist")
_numbers = itertools.count()


def specifier(kind: str, folder: Path, limit: int | None = None) -> str:
    """A log that is not there yet."""
    name = f"log{os.getpid()}x{next(_numbers)}"
    match kind:
        case "pg":
            place = servers.postgres_at().replace(":", "\\:") + f":{name}"
        case "s3" | "gs" | "az":
            servers.use_test_credentials()
            place = servers.store_url(kind, name=name).replace(":", "\\:")
        case "persist":
            place = f"file:{folder}/{name}".replace(":", "\\:")
        case _:
            place = str(folder / name)
    return f"{kind}:{place}" + ("" if limit is None else f":limit={limit}")


def store_of(kind: str, folder: Path, limit: int | None = None) -> LogStore:
    """The same, opened."""
    return open_store(specifier(kind, folder, limit))


def write(store: LogStore, payloads: list[bytes]) -> None:
    """Write these events, and wait until they are durable."""
    with store.writer() as writer:
        for future in [writer.write(writer.accepted + 1, payload) for payload in payloads]:
            future.result(60)


def contents(store: LogStore, from_id: int = 1) -> list[bytes]:
    """All payloads from an id on."""
    with store.reader() as reader:
        return [bytes(event.payload) for event in reader.replay(from_id)]
