"""The same for many shards at once: what one request takes, a thousand should not take one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from persist_lib.client import Client
from persist_lib.core.state import State
from persist_lib.runtime.ambient import Runtime

THREADS = 16
FEW = 2
"""So many are done one after the other: to begin threads takes longer than a request to a database nearby."""
T = TypeVar("T")
Answer = TypeVar("Answer")


def at_once(runtime: Runtime, call: Callable[[T], Answer], things: Sequence[T]) -> list[Answer]:
    """Call `call` with each of `things`, in threads where they are many. Raises the first error, once all have ended.

    The calls after the first that fails are made or not.
    """
    if len(things) <= FEW:
        return [call(thing) for thing in things]
    with runtime.pool(min(THREADS, len(things)), "persist-shards") as pool:
        return list(pool.map(call, things))


def states_of(client: Client, names: Sequence[str]) -> list[State]:
    """The newest state of each shard, read from the location."""
    return at_once(client.runtime, lambda name: client.machine(name).fetch().state, names)
