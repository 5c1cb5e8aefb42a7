"""Values as PostgreSQL writes them become Arrow's, and those that are none are named. Pure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import Flags
from persist_lib.schema.types import format_type


def typed(name: str, texts: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """The values of a column, and of those that `wanted` cannot hold, which are null then, why."""
    try:
        return _cast(texts, wanted), {}
    except (pa.ArrowException, ValueError):
        pass
    distinct = texts.dictionary_encode()
    wrong = _wrong(distinct.dictionary, wanted)
    is_wrong = np.isin(np.asarray(distinct.indices.fill_null(-1)), wrong)
    kept = pc.if_else(pa.array(is_wrong), pa.nulls(len(texts), texts.type), texts)
    bad: dict[int, str] = {}
    for index in np.flatnonzero(is_wrong).tolist():
        value = texts[index].as_py()[:100].decode(errors="replace")
        bad[index] = f"column {name}: {value!r} is no {format_type(wanted)}; a column declared as string would hold it"
    return _cast(kept, wanted), bad


def _wrong(distinct: pa.Array, wanted: pa.DataType) -> list[int]:
    """The places of values that cannot be cast, by halves."""
    found: list[int] = []
    waiting = [(0, len(distinct))]
    while waiting:
        start, end = waiting.pop()
        try:
            _cast(distinct.slice(start, end - start), wanted)
        except (pa.ArrowException, ValueError):
            middle = (start + end) // 2
            if end - start == 1:
                found.append(start)
            else:
                waiting += [(start, middle), (middle, end)]
    return found


def _cast(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_binary(wanted):  # \x and hexadecimal digits
        return pa.array([None if one is None else bytes.fromhex(one[2:].decode()) for one in texts.to_pylist()], wanted)
    strings = texts.cast(pa.large_string())
    if pa.types.is_boolean(wanted):
        return pc.equal(strings, pa.scalar("t", pa.large_string()))
    return strings.cast(pa.string()).cast(wanted)


def flags_of(count: int, bad: dict[int, str]) -> Flags:
    """Which of `count` are bad."""
    found = np.zeros(count, np.bool_)
    found[list(bad)] = True
    return found
