"""Work on several shards at once, by a bounded pool of threads, which wait for Spark, Arrow or stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import TypeVar

from persist_lib.runtime.threads import Threads

Item = TypeVar("Item")
Answer = TypeVar("Answer")

IN_FLIGHT = 4
"""Shards worked on at once. A larger number hides the waiting for commits, but small merges take more memory."""


def in_parallel(
    one: Callable[[Item], Answer], items: Sequence[Item], in_flight: int, cancel: Callable[[], None] | None = None
) -> Iterator[Answer]:
    """Yield answers as they come. If the caller stops early, items not begun are dropped, and `cancel` is called."""
    pool = Threads(max_workers=max(1, in_flight), thread_name_prefix="persist-shard")
    try:
        for future in as_completed([pool.submit(one, item) for item in items]):
            yield future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        if cancel is not None:
            cancel()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
