"""What a store is called in messages and marks, and what log is in it."""

from __future__ import annotations

from persist_lib.events.api import Store


def name_of(store: Store) -> str:
    """The specifier of a store, without a password; of one without a specifier its type."""
    specifier = getattr(store, "specifier", None)
    return type(store).__name__ if specifier is None else str(specifier)


def log_of(store: Store) -> bytes:
    """The id of the log in a store, which no other log has. Raises NotFound where there is none.

    SUBTLE: the driver is closed again. While a process has a connection to a SQLite database that only reads (that of a
    shard in `file:`), its other connections to it may not write either.
    """
    try:
        return store.records.log
    finally:
        store.close()
