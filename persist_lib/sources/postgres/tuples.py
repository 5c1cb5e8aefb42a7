"""What is in messages of PostgreSQL: the columns' texts, all rows at once. Pure.

A message is one of `pgoutput`'s (insert, update, delete, truncate), or a line of CSV, which is a row of the first
snapshot. Values are as PostgreSQL writes them; `values.py` makes Arrow's of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from persist_lib.convert.casts import uuid_bytes, wrong_places
from persist_lib.convert.json_columns import REFUSED, canonical_texts
from persist_lib.errors import Corrupt
from persist_lib.kernel.columns import Flags, joined, mask_of
from persist_lib.schema.types import JSON, format_type, is_json

Rows = npt.NDArray[np.int64]
INSERT, UPDATE, DELETE, TRUNCATE = b"IUDT"
KEY, OLD, NEW, TEXT, NULL, UNCHANGED = b"KONtnu"
SLICE_BYTES = 16 << 20
SHORTEST = 6
"""A kind, the table's id, and one byte more, at least."""


class Texts(NamedTuple):
    """What is in some messages. `new` and `old` have a column of bytes for each of the table.

    `unchanged` says by column which new values were not sent, as they did not change. Old values are there where
    `has_old` (a delete, or an update of the key), all of them where `is_whole`, else those of the key.
    """

    has_new: Flags
    is_update: Flags
    has_old: Flags
    is_whole: Flags
    empties: Flags
    new: list[pa.Array]
    unchanged: list[Flags]
    old: list[pa.Array]


def slices(values: pa.Array) -> Iterator[tuple[int, int]]:
    """Cut messages into slices of bounded size, one message each at least."""
    offsets = _offsets(values)
    start = 0
    while start < len(values):
        end = int(np.searchsorted(offsets, offsets[start] + SLICE_BYTES, side="right")) - 1
        end = min(max(end, start + 1), len(values))
        yield start, end
        start = end


def copied_texts(values: pa.Array, columns: int) -> Texts:
    """The columns of lines of CSV, in which each value that is not null is quoted."""
    count, offsets = len(values), _offsets(values)
    names = [str(n) for n in range(columns)]
    data = values.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    try:
        table = _read_copied(data, names)
    except pa.ArrowException as error:
        raise Corrupt(
            f"copied rows do not have {columns} columns: {error}", key="snapshot", expected=columns, actual=str(error)
        ) from error
    if table.num_rows != count:
        raise Corrupt(
            f"{count} copied rows make {table.num_rows}", key="snapshot", expected=count, actual=table.num_rows
        )
    no, yes = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    nothing = pa.nulls(count, pa.large_binary())
    return Texts(yes, no, no, no, no, [*map(joined, table.columns)], [no] * columns, [nothing] * columns)


def _read_copied(data: pa.Buffer, names: list[str]) -> pa.Table:
    return pcsv.read_csv(
        io.BytesIO(data),
        read_options=pcsv.ReadOptions(column_names=names, block_size=len(data) + 1, use_threads=False),
        parse_options=pcsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_binary()), null_values=[""], strings_can_be_null=True,
            quoted_strings_can_be_null=False, check_utf8=False,
        ),
    )  # fmt: skip


def changed_texts(values: pa.Array, columns: int) -> Texts:
    """The columns of messages of pgoutput. Raises Corrupt for anything else."""
    offsets = _offsets(values)
    starts = offsets[:-1]
    if (offsets[1:] - starts < SHORTEST).any():
        raise _corrupt("a message that is cut")
    buffer = values.buffers()[2]
    data = np.frombuffer(buffer, np.uint8)
    kind = data[starts]
    has_new, is_update, empties = np.isin(kind, [INSERT, UPDATE]), kind == UPDATE, kind == TRUNCATE
    mark = data[np.minimum(starts + 5, len(data) - 1)]
    has_old = (kind == DELETE) | (is_update & (mark != NEW))
    if not (has_new | has_old | empties).all() or not np.isin(mark[has_old], [KEY, OLD]).all():
        raise _corrupt("a kind of message that is not known")
    which = np.flatnonzero(has_old)
    old = _tuples(data, starts[which] + 6, columns)
    new_at = starts + 6
    new_at[which] = old.end + 1
    changed = np.flatnonzero(has_new)
    if not (data[np.minimum(new_at[changed] - 1, len(data) - 1)] == NEW).all():
        raise _corrupt("a message without a new row")
    new = _tuples(data, new_at[changed], columns)
    ends = np.concatenate([new.end, old.end[kind[which] == DELETE]])
    if not np.isin(ends, offsets[1:]).all():
        raise _corrupt("a message that does not end where it should")
    count = len(values)
    unchanged = []
    for kinds in new.kinds:
        flags = np.zeros(count, np.bool_)
        flags[changed] = kinds == UNCHANGED
        unchanged.append(flags)
    is_whole = has_old & (mark == OLD)
    return Texts(
        has_new, is_update, has_old, is_whole, empties,
        [_taken(buffer, count, changed, new, n) for n in range(columns)], unchanged,
        [_taken(buffer, count, which, old, n) for n in range(columns)],
    )  # fmt: skip


class _Tuples(NamedTuple):
    """Rows in the bytes of messages: by column, of what kind values are, and where they start and how long they are."""

    kinds: list[npt.NDArray[np.uint8]]
    starts: list[Rows]
    lengths: list[Rows]
    end: Rows


def _tuples(data: npt.NDArray[np.uint8], at: Rows, columns: int) -> _Tuples:
    """Read rows that start at `at` with their number of columns, column by column."""
    last = max(0, len(data) - 1)
    found = (data[np.minimum(at, last)].astype(np.int64) << 8) | data[np.minimum(at + 1, last)]
    if not (found == columns).all():
        raise _corrupt(f"a row has other than {columns} columns")
    cursor = at + 2
    kinds, starts, lengths = [], [], []
    for _ in range(columns):
        kind = data[np.minimum(cursor, last)]
        size = np.zeros(len(at), np.int64)
        for n in range(1, 5):
            size = (size << 8) | data[np.minimum(cursor + n, last)]
        is_text = kind == TEXT
        if not (is_text | (kind == NULL) | (kind == UNCHANGED)).all():
            raise _corrupt("a kind of value that is not known")
        kinds.append(kind)
        lengths.append(np.where(is_text, size, 0))
        starts.append(cursor + np.where(is_text, 5, 1))
        cursor = starts[-1] + lengths[-1]
    return _Tuples(kinds, starts, lengths, cursor)


def _taken(buffer: pa.Buffer, count: int, which: Rows, found: _Tuples, column: int) -> pa.Array:
    """The values of one column, for all messages; null where they have none.

    An array over the messages' own bytes, whose elements are by turns a value and what lies between two. So
    Arrow copies the values, all at once.
    """
    if not len(which):
        return pa.nulls(count, pa.large_binary())
    bounds = np.empty(2 * len(which), np.int64)
    bounds[0::2] = found.starts[column]
    bounds[1::2] = found.starts[column] + found.lengths[column]
    turns = pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), buffer])
    places, is_text = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    places[which] = np.arange(0, len(bounds), 2)
    is_text[which] = found.kinds[column] == TEXT
    return turns.take(pa.array(places, mask=~is_text))


def _offsets(values: pa.Array) -> Rows:
    width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    found = np.frombuffer(values.buffers()[1], width, len(values) + 1, values.offset * np.dtype(width).itemsize)
    return found.astype(np.int64)


def _corrupt(what: str) -> Corrupt:
    return Corrupt(f"the messages of PostgreSQL have {what}", key="pgoutput", expected="pgoutput", actual=what)


def choose(flags: Flags, yes: pa.Array, no: pa.Array) -> pa.Array:
    """Values of one column or the other."""
    return pc.if_else(mask_of(flags), yes, no) if flags.any() else no


def typed(field: pa.Field, texts: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """The values of a column, and of those that it cannot hold, which are null then, why."""
    try:
        return _cast(texts, field), {}
    except (pa.ArrowException, *REFUSED):
        pass
    distinct = texts.dictionary_encode()
    wrong = wrong_places(distinct.dictionary, lambda some: _cast(some, field), (pa.ArrowException, *REFUSED))
    is_wrong = np.isin(np.asarray(distinct.indices.fill_null(-1)), wrong)
    kept = pc.if_else(pa.array(is_wrong), pa.nulls(len(texts), texts.type), texts)
    bad: dict[int, str] = {}
    for index in np.flatnonzero(is_wrong).tolist():
        value = texts[index].as_py()[:100].decode(errors="replace")
        wanted = JSON if is_json(field) else format_type(field.type)
        bad[index] = f"column {field.name}: {value!r} is no {wanted}; a column declared as string would hold it"
    return _cast(kept, field), bad


def _cast(texts: pa.Array, field: pa.Field) -> pa.Array:
    wanted = field.type
    if pa.types.is_binary(wanted):  # \x and hexadecimal digits
        return pa.array([None if one is None else bytes.fromhex(one[2:].decode()) for one in texts.to_pylist()], wanted)
    strings = texts.cast(pa.large_string())
    if pa.types.is_fixed_size_binary(wanted) and not pa.types.is_decimal(wanted):
        return pa.array([None if one is None else uuid_bytes(one) for one in strings.to_pylist()], wanted)
    if pa.types.is_boolean(wanted):
        return pc.equal(strings, pa.scalar("t", pa.large_string()))
    if is_json(field):
        return canonical_texts(pa.chunked_array([strings.cast(wanted)])).chunk(0)
    return strings.cast(pa.string()).cast(wanted)


def flags_of(count: int, bad: dict[int, str]) -> Flags:
    """Which of `count` are bad."""
    found = np.zeros(count, np.bool_)
    found[list(bad)] = True
    return found
