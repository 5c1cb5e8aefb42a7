"""The library's values as JSON for machines. Keys are the names of the fields, and stay.

Frontiers are lists, `[5]` or `[]`, and all times of metadata are integers, also of a clock: exact, and of one type in
every shard. Beside them `times` says the clock ("ms" or "us" since 1970). Rows are data, whose moments are ISO 8601.
Bytes are hex; fingerprints are 16 hex digits (JSON's readers round large numbers). Fields that only the library can use
(digests, bounds of keys and values, inline bytes) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from persist_lib.errors import Damage, InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.core.plan.compaction import Plan
    from persist_lib.core.state import Batch, State

Json = Any
"""What JSON can hold."""
LEFT_OUT = frozenset({"digests", "key_lower", "key_upper", "inline", "values"})


def encode(value: object) -> str:
    """One line of JSON: bytes as base64, moments as ISO 8601, decimals as text.

    Floats that are not finite are null: rows go through `row_formats.python_rows` first.
    """
    return msgspec.json.encode(value).decode()


def jsonable(value: object) -> Json:
    """A struct, frontier, mapping or sequence of the library as JSON."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if type(value).__name__ == "Antichain":
        return [] if value.time is None else [value.time]  # type: ignore[attr-defined]
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None)
    if names is not None:
        found = {name: getattr(value, name) for name in names if name not in LEFT_OUT}
        if isinstance(sums := found.get("fingerprint"), int):
            found["fingerprint"] = f"{sums:016x}"
        return {name: jsonable(one) for name, one in found.items()}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return str(value)


def clock(times: str | None) -> dict[str, str]:
    """What JSON says of a shard's times: `{"times": "ms"}` where they are a clock, which its integers count by."""
    return {} if times is None else {"times": times}


def error_value(error: BaseException) -> Json:
    """A failure: which of the library's errors, its message, and its fields."""
    fields = getattr(error, "fields", {})
    return {"error": type(error).__name__, "message": str(error), "fields": jsonable(fields)}


def messages(failed: Mapping[str, Exception]) -> dict[str, str]:
    """What failed, by name, each with its message."""
    return {name: str(error) for name, error in failed.items()}


def plan_value(plan: Plan) -> Json:
    """A compaction plan, without the contents of its batches."""
    names = {"updates": "count", "bytes": "size"}
    fields = ("reason", "ids", "lower", "upper", "since", "updates", "bytes", "cost")
    requests = [{field: jsonable(getattr(one, names.get(field, field))) for field in fields} for one in plan.requests]
    return {
        "debt": plan.debt, "cost": jsonable(plan.cost), "requests": requests, "skipped": jsonable(plan.skipped),
    }  # fmt: skip


def batch_value(batch: Batch) -> Json:
    """A batch, its parts by key and size."""
    return {**jsonable(batch), "id": jsonable(batch.id), "size": batch.size, "inline_size": batch.inline_size}


def state_value(state: State) -> Json:
    """A whole state."""
    return {
        **jsonable(state),
        "upper": jsonable(state.upper),
        "finished": state.is_finished(),
        "trace": [batch_value(batch) for batch in state.trace],
        "outcomes": len(state.outcomes),
    }


def exit_code(error: BaseException) -> int:
    """The exit code of the command: 3 for damage, 2 for wrong usage, 1 for everything else."""
    if isinstance(error, Damage):
        return 3
    return 2 if isinstance(error, InvalidUsage) else 1
