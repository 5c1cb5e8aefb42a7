"""Nested columns: lists, structs and maps of other people's types, and of Python values, as the schema's.

A nested value is taken apart, what is within is converted as a column of its own would be, and put together again. So
all that holds for plain columns holds at every level: nothing is rounded, cut or guessed. A list takes lists of any
layout, one of a fixed length only such as have it; a struct takes fields in any order, and null for those that it has
and the given does not; a map's entries are sorted by key, as a map has no order, and each key is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.errors import InvalidUsage
from persist_lib.schema.models import is_instance, values_of

Convert = Callable[[pa.Array, pa.DataType], pa.Array]
Child = Callable[[pa.Array], pa.Array]
Children = Callable[[pa.DataType, pa.Field], Child | None]
Build = Callable[[Sequence[Any], pa.Field], pa.Array]

_is = pa.types
_ENTRY = "entry"


def nested_conversion(source: pa.DataType, target: pa.DataType, child: Children) -> Convert | None:
    """How to get from one type to a nested one; None where values of one are not values of the other.

    `child` answers the same for what is within. What it answers raises ArrowInvalid for a value that does not fit.
    """
    if _is.is_struct(target):
        return _struct_conversion(source, target, child)
    entry = _entry(source) if _is.is_map(target) else _item(source)
    if entry is None:
        return None
    inside = _entry(target) if _is.is_map(target) else target.value_field
    convert = child(entry, inside)
    if convert is None:
        return None
    return lambda array, kind: assembled(kind, *_taken_apart(array, convert), _present(array))


def _taken_apart(array: pa.Array, convert: Child) -> tuple[pa.Array, npt.NDArray[Any]]:
    if _is.is_map(array.type):
        array = array.cast(pa.list_(_entries_of(array.type)))
    fixed = _is.is_fixed_size_list(array.type)
    counts = np.where(_present(array), array.type.list_size, 0) if fixed else array.value_lengths().fill_null(0)
    # `flatten` leaves out what lies under nulls and outside of a slice.
    return convert(array.flatten()), np.asarray(counts, np.int64)


def _struct_conversion(source: pa.DataType, target: pa.DataType, child: Children) -> Convert | None:
    if not _is.is_struct(source):
        return None
    given = [source.field(at).name for at in range(source.num_fields)]
    if len(set(given)) < len(given) or not {*given} <= {field.name for field in target}:
        return None
    steps: list[tuple[int, Child]] = []
    for field in target:
        if field.name not in given:
            steps.append((-1, _nulls(field.type)))
            continue
        convert = child(source.field(given.index(field.name)), field)
        if convert is None:
            return None
        steps.append((given.index(field.name), convert))

    def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
        columns, valid = array.flatten(), _present(array)
        found = [convert(array if at < 0 else columns[at]) for at, convert in steps]
        return pa.StructArray.from_arrays(found, fields=list(kind), mask=None if valid.all() else _nulls_where(~valid))

    return converted


def _nulls(kind: pa.DataType) -> Child:
    return lambda array: pa.nulls(len(array), kind)


def assembled(kind: pa.DataType, inner: pa.Array, counts: npt.NDArray[Any], valid: npt.NDArray[Any]) -> pa.Array:
    """Lists or maps of `inner`, `counts` of them each, null where not `valid`. ArrowInvalid where they do not fit."""
    mask = None if valid.all() else _nulls_where(~valid)
    if _is.is_fixed_size_list(kind):
        return _fixed_lists(kind, inner, counts, valid, mask)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    if offsets[-1] >= 1 << 31:
        raise pa.ArrowInvalid("more than 2**31 items in one piece; append fewer rows at a time")
    if _is.is_map(kind):
        inner = _by_key(inner, counts)
        keys, items = inner.flatten()
        return pa.MapArray.from_arrays(_array_of(offsets.astype(np.int32)), keys, items, type=kind, mask=mask)
    return pa.ListArray.from_arrays(_array_of(offsets.astype(np.int32)), inner, type=kind, mask=mask)


def _fixed_lists(
    kind: pa.DataType, inner: pa.Array, counts: npt.NDArray[Any], valid: npt.NDArray[Any], mask: Any
) -> pa.Array:
    size = kind.list_size
    if (wrong := counts[valid] != size).any():
        raise pa.ArrowInvalid(f"{size} items are wanted, and a list has {counts[valid][wrong][0]}")
    if mask is not None:  # null lists have items as well, of any value
        of_list = np.repeat(np.maximum(np.cumsum(valid) - 1, 0) * size, size) + np.tile(np.arange(size), len(valid))
        inner = inner.take(_array_of(of_list)) if len(inner) else pa.nulls(len(valid) * size, inner.type)
    return pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=mask)


def _by_key(entries: pa.Array, counts: npt.NDArray[Any]) -> pa.Array:
    """The entries of maps in the order of their keys, map by map. ArrowInvalid if a key is null or twice in a map."""
    keys = entries.field(0)
    if keys.null_count or entries.null_count:
        raise pa.ArrowInvalid("a key of a map is null")
    of_map = np.repeat(np.arange(len(counts)), counts)
    if _ascend(keys, of_map):
        return entries
    both = pa.table([_array_of(of_map), keys], names=["map", "key"])
    order = pc.sort_indices(both, sort_keys=[(name, "ascending") for name in both.schema.names])
    entries = entries.take(order)
    keys, of_map = entries.field(0), of_map[np.asarray(order)]
    same = np.asarray(pc.equal(keys.slice(1), keys.slice(0, max(0, len(keys) - 1)))) & (of_map[1:] == of_map[:-1])
    if same.any():
        raise pa.ArrowInvalid(f"the key {keys[int(np.flatnonzero(same)[0])]} is there twice in a map")
    return entries


def _ascend(keys: pa.Array, of_map: npt.NDArray[Any]) -> bool:
    """Whether the keys of each map are in order, each once: then there is nothing to sort, which takes far longer."""
    less = np.asarray(pc.less(keys.slice(0, max(0, len(keys) - 1)), keys.slice(1)))
    return bool((less | (of_map[1:] != of_map[:-1])).all())


def _array_of(values: npt.NDArray[Any]) -> pa.Array:
    # As `kernel.columns.array_of`: `pa.array` would import pandas for it.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _nulls_where(flags: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(np.packbits(flags, bitorder="little"))])


def _present(array: pa.Array) -> npt.NDArray[Any]:
    return np.asarray(array.is_valid())


def _item(kind: pa.DataType) -> pa.Field | None:
    """The items of lists of any layout."""
    return kind.value_field if _is_list(kind) else None


def _entry(kind: pa.DataType) -> pa.Field | None:
    """The entries of a map, or of a list of structs that may be taken for one."""
    if _is.is_map(kind):
        return pa.field(_ENTRY, _entries_of(kind), nullable=False)
    item = _item(kind)
    if item is None or not _is.is_struct(item.type) or [field.name for field in item.type] != ["key", "value"]:
        return None
    return item


def _entries_of(kind: pa.MapType) -> pa.StructType:
    return pa.struct([pa.field("key", kind.key_type, nullable=False), kind.item_field.with_name("value")])


def _is_list(kind: pa.DataType) -> bool:
    kinds = (_is.is_list, _is.is_large_list, _is.is_fixed_size_list, _is.is_list_view, _is.is_large_list_view)
    return any(test(kind) for test in kinds)


def build_nested(kind: pa.DataType, build: Build) -> Callable[[Sequence[Any]], pa.Array]:
    """How Python values (lists, dicts) become an array of a nested type; `build` makes the columns within.

    Raises InvalidUsage for what is not a value of the type.
    """

    def structs(values: Sequence[Any]) -> pa.Array:
        there = [value for value in values if value is not None]
        names = {field.name for field in kind}
        for value in there:
            if not value.keys() <= names:
                raise InvalidUsage(f"{sorted(map(str, value.keys() - names))} are no fields of {kind}", value=value)
        columns = [build([value.get(field.name) for value in there], field) for field in kind]
        return _with_nulls(pa.StructArray.from_arrays(columns, fields=list(kind)), values)

    def lists(values: Sequence[Any]) -> pa.Array:
        there = [value for value in values if value is not None]
        inner = build([item for value in there for item in value], kind.value_field)
        return _with_nulls(assembled(kind, inner, *_counts(there)), values)

    def maps(values: Sequence[Any]) -> pa.Array:
        there = [_entries(value) for value in values if value is not None]
        pairs = [pair for value in there for pair in value]
        fields = list(_entries_of(kind))
        columns = [build([pair[at] for pair in pairs], field) for at, field in enumerate(fields)]
        inner = pa.StructArray.from_arrays(columns, fields=fields)
        return _with_nulls(assembled(kind, inner, *_counts(there)), values)

    return structs if _is.is_struct(kind) else maps if _is.is_map(kind) else lists


def python_types(kind: pa.DataType) -> tuple[type, ...]:
    """The Python types that a nested column takes; `near_nested` makes others these."""
    return (dict,) if _is.is_struct(kind) else (dict, list) if _is.is_map(kind) else (list,)


def near_nested(kind: pa.DataType) -> Callable[[Any], Any]:
    """Mappings as dicts, and other sequences as lists. Text, sets and iterators are none of these."""

    def near(value: Any) -> Any:
        if is_instance(value):
            return values_of(value)
        if isinstance(value, Mapping):
            return value if _is_list(kind) else dict(value)
        if _is.is_struct(kind):
            return value
        if isinstance(value, (list, tuple)):
            return list(value)
        return value.tolist() if isinstance(value, np.ndarray) and value.ndim else value

    return near


def _entries(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value):
        raise InvalidUsage("a map is a dict, or a list of pairs", value=value)
    return list(value)


def _counts(values: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    return np.fromiter(map(len, values), np.int64, len(values)), np.ones(len(values), np.bool_)


def _with_nulls(found: pa.Array, values: Sequence[Any]) -> pa.Array:
    if len(found) == len(values):
        return found
    valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    places = np.where(valid, np.cumsum(valid) - 1, 0)
    return found.take(pa.array(places, pa.int64(), mask=~valid))
