"""The pending area: any number of writers that only put objects, and a shard that takes what they put.

    Writer(url, collection, writer, schema)     puts batches; loads no database driver
    create, acquire_read_handle, delete         a collection with a pending area, by a client
    absorb, choose, discard                     what the controller does, at any time, from any number of processes
    plan, apply                                 what `absorb` would do, to be done exactly, or not
    census, pending_collections                 what lies there

Each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persist_lib.pending_area.area import (
        PendingCensus,
        absorb,
        acquire_read_handle,
        apply,
        census,
        choose,
        create,
        delete,
        discard,
        due_collections,
        pending_collections,
        plan,
    )
    from persist_lib.pending_area.area_reader import PendingListen, PendingReader
    from persist_lib.pending_area.listing import Absorbed, Disagreement
    from persist_lib.pending_area.objects import Put, Writer

_NAMES = {
    "area": (
        "PendingCensus", "absorb", "acquire_read_handle", "apply", "census", "choose", "create", "delete", "discard",
        "due_collections", "pending_collections", "plan",
    ),
    "listing": ("Absorbed", "Disagreement"),
    "area_reader": ("PendingListen", "PendingReader"),
    "objects": ("Put", "Writer"),
}  # fmt: skip
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Absorbed", "Disagreement", "PendingCensus", "PendingListen", "PendingReader", "Put", "Writer", "absorb",
    "acquire_read_handle", "apply", "census", "choose", "create", "delete", "discard", "due_collections",
    "pending_collections", "plan",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a name of this package. A writer must not load what the others need, such as database drivers."""
    if (module := _WHERE.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{module}"), name)
    return found
