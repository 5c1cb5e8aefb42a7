"""What a store is called in messages and marks."""

from __future__ import annotations

from persist_lib.events.api import Store


def name_of(store: Store) -> str:
    """The specifier of a store, without a password; of one without a specifier its type."""
    specifier = getattr(store, "specifier", None)
    return type(store).__name__ if specifier is None else str(specifier)
