"""What assets return, as columns: which there are, of what types, and the values in the types of the shard.

The values are converted by the library's own border (`persist_lib.convert`): exactly, or refused with the row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import pyarrow as pa

from persist_lib.arguments import shown
from persist_lib.convert.updates import iter_updates
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.schema.empty import empty_table
from persist_lib.schema.models import is_instance, is_model, values_of
from persist_lib.schema.schema import RESERVED, TIME, Column, Schema
from persist_lib.schema.types import format_type
from persist_lib.times import Times, Unit, parse_unit

KEY, SCHEMA, TIMES = "persist/key", "persist/schema", "persist/times"
RETURNS = (
    "an Arrow table, batch or reader, a pandas or polars frame, or a list of dicts, pydantic models or dataclasses"
)


TypeOf = Callable[[str], pa.DataType | None]


class Given(NamedTuple):
    """What an asset returned. `type_of` tells a column's type by its values, None where no value does."""

    data: Any
    names: tuple[str, ...]
    type_of: TypeOf
    rows: int

    @property
    def is_updates(self) -> bool:
        """Whether these are updates with times of their own, and not the whole contents."""
        return TIME in self.names


def take(obj: object) -> Given:
    """Look at what an asset returned. Raises InvalidUsage for anything but tables."""
    if isinstance(obj, list):
        return _take_rows(obj)
    if (collect := getattr(obj, "collect", None)) is not None and _is_of("polars", "LazyFrame", obj):
        obj = collect()
    if _is_of("pandas", "DataFrame", obj):
        return _take_pandas(obj)
    if isinstance(obj, pa.RecordBatchReader):
        obj = obj.read_all()
    elif isinstance(obj, pa.RecordBatch):
        obj = pa.Table.from_batches([obj])
    elif not isinstance(obj, pa.Table) and _is_of("polars", "DataFrame", obj):
        obj = pa.table(obj)
    if not isinstance(obj, pa.Table):
        raise InvalidUsage(
            f"a shard holds tables: return {RETURNS}; got {type(obj).__module__}.{type(obj).__qualname__}"
        )
    return Given(obj, tuple(obj.schema.names), _types_of(obj.schema), obj.num_rows)


def resolve(
    given: Given, stored: Schema | None, metadata: Mapping[str, Any], annotation: object, clock: str = "ms"
) -> Schema:
    """The schema in which to store this: the shard's own, with the new columns at its end; or a new one.

    `clock` is what the times of a new table are of which nothing else says it. Updates that bring their times, and do
    not say what these are, have integers.

    Raises SchemaMismatch, in words, when a column is gone or has another type, and InvalidUsage when the type of a
    column cannot be known.
    """
    key, times = _key_of(metadata), _times_of(metadata)
    if stored is None and TIMES not in metadata and TIME not in given.names:
        declared = _declared(metadata, annotation, None, None)
        times = _times_of({TIMES: clock}) if declared is None or declared.times is None else None
    declared = _declared(metadata, annotation, key, times)
    _check_times(stored, declared, times)
    _check_constraints(stored, declared)
    names = [name for name in given.names if name not in RESERVED]
    if declared is not None:
        if names and (missing := [name for name in declared.names if name not in names]):
            raise SchemaMismatch(
                f"the asset returned no columns {missing}, which its schema {declared} has; it returned {names}",
                problem="missing column", column=missing[0],
            )  # fmt: skip
        if extra := [name for name in names if name not in declared.names]:
            raise SchemaMismatch(
                f"the asset returned the columns {extra}, which its schema {declared} does not have. Add them there, "
                "or leave them out",
                problem="extra column", column=extra[0],
            )  # fmt: skip
        return declared if stored is None else _extended(stored, declared.columns, key or declared.key_names)
    if stored is None:
        return _fresh(names, given.type_of, key, times)
    if not names and not given.rows:
        return stored
    return _extended(stored, _columns(stored, names, given.type_of), key)


def converted(schema: Schema, given: Given, time: int | None, clock_ms: Callable[[], int]) -> pa.Table:
    """The rows as updates, in exactly the schema's columns: at `time`, or at their own times where they have some."""
    times = Times(schema.times, clock_ms)
    tables = list(iter_updates(schema, given.data if given.names else [], time=time, times=times))
    return pa.concat_tables([empty_table(schema.updates), *tables])


def _take_rows(rows: list[Any]) -> Given:
    found = [_row(row, index) for index, row in enumerate(rows)]
    names = tuple(dict.fromkeys(name for row in found for name in row))
    models = {type(row) for row in rows if is_instance(row)}
    fields = _types_of(Schema(key=models.pop()).data) if len(models) == 1 else None

    def type_of(name: str) -> pa.DataType | None:
        declared = fields(name) if fields else None
        return declared or _inferred(name, [row.get(name) for row in found])

    return Given([{name: row.get(name) for name in names} for row in found], names, type_of, len(found))


def _row(row: Any, index: int) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if is_instance(row):
        return values_of(row)
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    raise InvalidUsage(
        f"a shard holds tables: return {RETURNS}; row {index} of the list is {shown(row)}", problem="row", row=index
    )


def _take_pandas(frame: Any) -> Given:
    names = tuple(frame.columns)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise InvalidUsage(f"a column's name is text; the frame has the names {shown(wrong)}", problem="column name")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SchemaMismatch(f"column {twice[0]!r} occurs more than once; give each its own name", column=twice[0])
    return Given(frame, names, lambda name: _inferred(name, frame[name]), len(frame))


def _inferred(name: str, values: Any) -> pa.DataType | None:
    try:
        return _known(pa.array(values, from_pandas=_is_of("pandas", "Series", values) or None).type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(
            f"column {name!r} has values of different kinds, or of a kind that no column holds: {error}. Give its type "
            f"in the asset's metadata {SCHEMA!r}, or convert its values",
            problem="type", column=name,
        ) from error  # fmt: skip


def _types_of(schema: pa.Schema) -> TypeOf:
    types = {field.name: _known(field.type) for field in schema}
    return types.get


def _known(type_: pa.DataType) -> pa.DataType | None:
    is_dictionary = pa.types.is_dictionary(type_)
    return None if pa.types.is_null(type_.value_type if is_dictionary else type_) else type_


def _is_of(module: str, name: str, obj: object) -> bool:
    """Whether this is the module's class, without loading the module: who has such an object has loaded it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(obj, kind)


def _key_of(metadata: Mapping[str, Any]) -> list[str] | None:
    key = metadata.get(KEY)
    if key is None:
        return None
    names = [key] if isinstance(key, str) else key
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidUsage(f"{KEY} names the key columns, like ['customer_id']; got {shown(key)}", key=key)
    return list(names)


def _declared(
    metadata: Mapping[str, Any], annotation: object, key: list[str] | None, times: Unit | None
) -> Schema | None:
    """The schema that the metadata or the return annotation `list[Model]` gives."""
    given = metadata.get(SCHEMA)
    if given is None:
        given = next((item for item in get_args(annotation) if is_model(item)), None)
    if given is None or isinstance(given, Schema):
        if given is None or times is None or given.times is not None:
            return given
        return msgspec.structs.replace(given, times=times)
    return _split(Schema(key=given).columns, key, times)


def _fresh(names: Sequence[str], type_of: TypeOf, key: list[str] | None, times: Unit | None) -> Schema:
    if not names:
        raise InvalidUsage(
            "the asset returned nothing that has columns, and its shard does not exist yet, so its columns are not "
            f"known. {_WAYS}",
            problem="no schema",
        )  # fmt: skip
    return _split(tuple(_column(name, type_of) for name in names), key, times)


def _split(columns: tuple[Column, ...], key: list[str] | None, times: Unit | None) -> Schema:
    """Key and value columns. Without a key, all columns are the key."""
    by_name = {column.name: column for column in columns}
    names = list(by_name) if key is None else key
    if missing := [name for name in names if name not in by_name]:
        raise SchemaMismatch(f"{KEY} names the columns {missing}, and the asset has {list(by_name)}", column=missing[0])
    value = [column for column in columns if column.name not in names]
    return Schema([by_name[name] for name in names], value, times=times)


def _times_of(metadata: Mapping[str, Any]) -> Unit | None:
    given = metadata.get(TIMES)
    try:
        return None if given == "none" else parse_unit(given)
    except InvalidUsage as error:
        raise InvalidUsage(f"{TIMES} in the asset's metadata: {error.message}", **error.fields) from error


def _check_times(stored: Schema | None, declared: Schema | None, times: Unit | None) -> None:
    """Refuse a clock that is another than the shard's, or than that of the asset's own schema."""
    said = {one for one in (times, None if declared is None else declared.times) if one is not None}
    has = said if stored is None else {stored.times}
    if len(said) > 1 or not said <= has:
        what = f"the shard has the schema {stored}" if stored is not None else f"its schema is {declared}"
        raise SchemaMismatch(
            f"the asset says that its times are a clock in {' and in '.join(sorted(said))} ({TIMES} or {SCHEMA}), and "
            f"{what}. Nothing was written. What times are never changes: give the asset another shard with "
            "persist/table",
            problem="not additive", actual=stored,
        )  # fmt: skip


def _check_constraints(stored: Schema | None, declared: Schema | None) -> None:
    """Refuse a constraint that the asset's own schema has and the shard's does not: it would not be kept."""
    if stored is None or declared is None:
        return
    if missing := [name for name in declared.constraints if name not in stored.constraints]:
        raise SchemaMismatch(
            f"the asset says that its shard is {' and '.join(missing)} ({SCHEMA}), and the shard has the schema "
            f"{stored}, which is not. Nothing was written. Constraints never change: give the asset another shard with "
            "persist/table, or leave them out",
            problem="not additive", actual=stored,
        )  # fmt: skip


def _columns(stored: Schema, names: Sequence[str], type_of: TypeOf) -> tuple[Column, ...]:
    """The columns of the data: those that the shard has as it has them, as values are converted to its types."""
    known = {column.name: column for column in stored.columns}
    return tuple(known.get(name) or _column(name, type_of) for name in names)


def _column(name: str, type_of: TypeOf) -> Column:
    if (type_ := type_of(name)) is None:
        raise InvalidUsage(
            f"column {name!r} has no value in any row, so its type is not known. {_WAYS}", problem="type", column=name
        )
    try:
        return Column(name, format_type(type_))
    except InvalidUsage as error:
        raise InvalidUsage(f"column {name!r}: {error.message}", **{**error.fields, "column": name}) from error


def _extended(stored: Schema, columns: Sequence[Column], key: list[str] | None) -> Schema:
    """The shard's schema with the columns that it does not have yet, all nullable."""
    known = {column.name: column for column in stored.columns}
    found = {column.name: column for column in columns}
    different = [f"column {name!r} is gone" for name in known if name not in found]
    different += [
        f"column {name!r} is {column.type} and was {known[name].type}"
        for name, column in found.items()
        if name in known and column.type != known[name].type
    ]
    if key is not None and key != stored.key_names:
        different.append(f"the key is {key} and was {stored.key_names}")
    if different:
        raise SchemaMismatch(
            f"the shard has the schema {stored}, and {'; '.join(different)}. Nothing was written. A shard may only "
            "gain nullable value columns: give the column another name, or the asset another shard with persist/table",
            problem="not additive", actual=stored,
        )  # fmt: skip
    new = [Column(name, column.type) for name, column in found.items() if name not in known]
    return msgspec.structs.replace(stored, value=(*stored.value, *new)) if new else stored


_WAYS = (
    "Say it in the asset's metadata, like {'persist/schema': {'id': 'int64', 'name': 'string'}}, or annotate the "
    "returned list with a pydantic model: list[Customer]"
)
