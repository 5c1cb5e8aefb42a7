"""Which keys the tasks of a Spark job have, in words: for Spark's pages."""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.core.plan.requests import MergeTask
from persist_lib.kernel.keys import decode_key
from persist_lib.schema.schema import Schema

MOST_RANGES = 100
"""Key ranges that are listed on the page of a stage."""
LONGEST_KEY = 60


def ranges(tasks: Sequence[MergeTask]) -> str:
    """The key range of each task, a line each, by the index that Spark's pages show; the first hundred of them."""
    lines = [f"task {index}: {range_of(task)}" for index, task in enumerate(tasks[:MOST_RANGES])]
    more = len(tasks) - len(lines)
    return "\n".join([*lines, f"and {more:,} more"] if more else lines)


def range_of(task: MergeTask) -> str:
    """The keys of one task, as `[('a',), ('b',))`. A key that was cut short shows what is left of it."""
    schema = task.schemas[task.schema]
    lower, upper = (_key(schema, bound) for bound in (task.key_lower, task.key_upper))
    return f"all keys of {task.shard}" if lower is upper is None else f"[{lower or 'first'}, {upper or 'last'})"


def _key(schema: Schema, bound: bytes | None) -> str | None:
    if bound is None:
        return None
    try:
        text = str(tuple(value.as_py() for value in decode_key(schema, bound)))
    except (ValueError, OverflowError):  # bytes that were cut within a character, or a date that Python does not have
        text = bound.hex()
    return text if len(text) <= LONGEST_KEY else f"{text[: LONGEST_KEY - 1]}…"
