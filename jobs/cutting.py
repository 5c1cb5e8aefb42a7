"""How many tasks a request is worth: at least one for each that the executors can run at once, but none too small."""

from __future__ import annotations

from persist_lib.config import MIB

FLOOR_BYTES = 8 * MIB
"""A task reads at least this much, or all. A task takes some 0.1 s to start, in which a core merges about a MiB."""


def pieces(size: int, task_bytes: int, slots: int, floor: int = FLOOR_BYTES) -> int:
    """The number of tasks for a request that reads `size` bytes, where `slots` tasks run at once.

    No task reads more than `task_bytes`. When there are more tasks than slots, their number is a multiple of `slots`,
    so that the last wave is as full as the others, unless the tasks would then read less than `floor`.
    """
    floor = min(floor, task_bytes)
    count = max(-(-size // task_bytes), min(slots, size // floor), 1)
    full = -(-count // slots) * slots
    return full if count > slots and size // full >= floor else count
