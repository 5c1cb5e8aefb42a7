"""Schemas of shards as Spark's, and Spark's as schemas of shards: each type exactly, or refused.

    bool int8 int16 int32 int64    BOOLEAN TINYINT SMALLINT INT BIGINT     and back
    uint8 uint16 uint32            SMALLINT INT BIGINT                     the next wider, as in Spark's Parquet reader
    uint64                         DECIMAL(20,0)                           all of its values fit
    float32 float64                FLOAT DOUBLE                            and back
    string binary                  STRING BINARY                           and back
    fixed_size_binary[n]           BINARY
    date32 time64[us]              DATE TIME(6)                            and back
    timestamp[us, UTC]             TIMESTAMP                               and back; other zones and units come in too
    timestamp[us]                  TIMESTAMP_NTZ                           and back; other units come in too
    duration[us]                   INTERVAL DAY TO SECOND                  and back; other units come in too
    decimal128(p, s)               DECIMAL(p,s)                            and back
    list<t> list<t>[n]             ARRAY<t>                                and back, as list<t>
    struct<name: t>                STRUCT<name: t>                         and back
    map<k, v>                      MAP<k, v>                               and back

Spark's times have microseconds. Of a column in nanoseconds, a value that is no whole number of them is refused when it
is read, with its row; so is one in seconds that is too far away. Decimals of more than 38 digits are refused.
Variants, intervals of months and user-defined types have no column type here: store them as JSON text (`to_json`).

`_diff` is a BIGINT. `_time` is a BIGINT too, and a time beyond 2^63 - 1 is refused; where the shard's times are a
clock, `_time` is a TIMESTAMP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from persist_lib.arguments import check_type, did_you_mean, shown
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.schema.schema import DIFF, TIME, Column, Schema
from persist_lib.schema.types import format_type, parse_type
from persist_lib.times import Unit

_is = pa.types
_SIMPLE: dict[str, t.DataType] = {
    "bool": t.BooleanType(), "int8": t.ByteType(), "int16": t.ShortType(), "int32": t.IntegerType(),
    "int64": t.LongType(), "uint8": t.ShortType(), "uint16": t.IntegerType(), "uint32": t.LongType(),
    "uint64": t.DecimalType(20, 0), "float32": t.FloatType(), "float64": t.DoubleType(), "string": t.StringType(),
    "binary": t.BinaryType(), "date32": t.DateType(), "time64[us]": t.TimeType(6),
}  # fmt: skip
_BACK: dict[type[t.DataType], str] = {
    t.BooleanType: "bool", t.ByteType: "int8", t.ShortType: "int16", t.IntegerType: "int32", t.LongType: "int64",
    t.FloatType: "float32", t.DoubleType: "float64", t.StringType: "string", t.CharType: "string",
    t.VarcharType: "string", t.BinaryType: "binary", t.DateType: "date32", t.TimeType: "time64[us]",
    t.TimestampType: "timestamp[us, UTC]", t.TimestampNTZType: "timestamp[us]", t.DayTimeIntervalType: "duration[us]",
}  # fmt: skip
TIME_SPARK = t.LongType()
SPARKS_DIGITS = 38


def spark_type(kind: pa.DataType) -> t.DataType:
    """Spark's type for the values of a column."""
    if (found := _SIMPLE.get(format_type(kind))) is not None:
        return found
    if _is.is_timestamp(kind):
        return t.TimestampNTZType() if kind.tz is None else t.TimestampType()
    if _is.is_duration(kind):
        return t.DayTimeIntervalType()
    if _is.is_decimal(kind) and kind.precision <= SPARKS_DIGITS:
        return t.DecimalType(kind.precision, kind.scale)
    if _is.is_decimal(kind):
        raise InvalidUsage(
            f"Spark has no type for {kind}: its decimals have {SPARKS_DIGITS} digits. Read the other "
            "columns with the option columns, or this one with the library",
            type=format_type(kind),
        )  # fmt: skip
    if _is.is_struct(kind):
        return t.StructType([t.StructField(field.name, spark_type(field.type), field.nullable) for field in kind])
    if _is.is_map(kind):
        return t.MapType(spark_type(kind.key_type), spark_type(kind.item_type), kind.item_field.nullable)
    if _is.is_nested(kind):
        return t.ArrayType(spark_type(kind.value_type), kind.value_field.nullable)
    if _is.is_fixed_size_binary(kind):
        return t.BinaryType()
    raise AssertionError(f"a column type without one of Spark's: {kind}")


def spark_field(field: pa.Field, times: Unit | None) -> t.StructField:
    """A column of a table of Persist's as Spark's, `_time` and `_diff` included."""
    if field.name == TIME:
        return t.StructField(TIME, t.TimestampType() if times else TIME_SPARK, nullable=False)
    return t.StructField(field.name, spark_type(field.type), field.nullable)


def spark_schema(columns: pa.Schema, times: Unit | None) -> t.StructType:
    """The schema of a DataFrame of such tables: of `schema.data`, `schema.contents` or `schema.changes`."""
    return t.StructType([spark_field(field, times) for field in columns])


def column_type(field: t.StructField) -> str:
    """The column type that holds a column of a DataFrame exactly. Raises InvalidUsage where there is none."""
    kind = field.dataType
    if isinstance(kind, t.DecimalType):
        if 0 <= kind.scale <= kind.precision:
            return f"decimal128({kind.precision}, {kind.scale})"
    elif isinstance(kind, t.ArrayType | t.MapType | t.StructType):
        return _nested_type(kind)
    elif (found := _BACK.get(type(kind))) is not None and (not isinstance(kind, t.TimeType) or kind.precision <= 6):
        return found
    hint = "Cast it first"
    if isinstance(kind, t.VariantType):
        hint = f"Store it as JSON text: to_json({field.name})"
    elif isinstance(kind, t.NullType):
        hint = "It has no type yet; cast it to the one it is to have"
    raise InvalidUsage(
        f"column {shown(field.name)} is {kind.simpleString()} in Spark, which no column type holds exactly. {hint}",
        column=field.name, type=kind.simpleString(),
    )  # fmt: skip


def _nested_type(kind: t.ArrayType | t.MapType | t.StructType) -> str:
    """The text of a nested type. What is within is exact, or refused by its own name."""

    def inner(name: str, type_: t.DataType, nullable: bool) -> pa.Field:
        return pa.field(name, parse_type(column_type(t.StructField(name, type_))), nullable)

    if isinstance(kind, t.StructType):
        return format_type(pa.struct([inner(field.name, field.dataType, field.nullable) for field in kind]))
    if isinstance(kind, t.ArrayType):
        return format_type(pa.list_(inner("element", kind.elementType, kind.containsNull)))
    key = inner("key", kind.keyType, False)
    return format_type(pa.map_(key.type, inner("value", kind.valueType, kind.valueContainsNull)))


def persist_schema(
    frame: t.StructType,
    key: Iterable[str],
    *,
    times: Unit | None = None,
    unique: bool = False,
    non_negative: bool = False,
) -> Schema:
    """The schema of a shard that holds rows of such a DataFrame, with these of its columns as the key.

    Columns `_time` and `_diff` are left out, as every shard has them. Raises InvalidUsage for a type that no column
    holds exactly, and for a key that is not among the columns.
    """
    check_type(frame, t.StructType, "frame", "df.schema")
    fields = {field.name: field for field in frame if field.name not in (TIME, DIFF)}
    names = list(key)
    for name in names:
        if name not in fields:
            raise InvalidUsage(
                f"there is no column {shown(name)} for the key. {did_you_mean(name, fields)}There are {list(fields)}",
                column=name,
            )
    columns = {name: Column(name, column_type(field), field.nullable) for name, field in fields.items()}
    return Schema(
        key=[columns[name] for name in names],
        value=[column for name, column in columns.items() if name not in names],
        times=times, unique=unique, non_negative=non_negative,
    )  # fmt: skip


def arrow_schema(frame: t.StructType) -> pa.Schema:
    """What Spark's Arrow batches of such rows look like, to the letter."""
    return to_arrow_schema(frame, timezone="UTC")


def check_asked(asked: t.StructType, offered: t.StructType, what: str) -> None:
    """Raise SchemaMismatch unless a schema that a user passed has some of the columns, each with its type."""
    by_name = {field.name: field for field in offered}
    for field in asked:
        found = by_name.get(field.name)
        if found is None:
            raise SchemaMismatch(
                f"{what} has no column {shown(field.name)}. {did_you_mean(field.name, by_name)}It has {list(by_name)}",
                column=field.name,
            )
        if found.dataType != field.dataType or (found.nullable and not field.nullable):
            raise SchemaMismatch(
                f"column {field.name} of {what} is {_words(found)}, and the schema that was passed: {_words(field)}. "
                "Leave the schema out, or cast after reading",
                column=field.name,
            )  # fmt: skip


def to_spark(table: pa.Table, target: pa.Schema, what: str) -> pa.Table:
    """The columns of `target` in a table of Persist's, in Spark's types, exactly. `what` names the shard.

    Nothing is copied where the types are the same. Raises InvalidUsage for a value that Spark's type does not hold.
    """
    columns = [_cast(table.column(field.name), field, what) for field in target]
    return pa.table(columns, schema=target) if columns else table.select([])


def _cast(column: pa.ChunkedArray, field: pa.Field, what: str) -> pa.ChunkedArray:
    kind, wanted = column.type, field.type
    if kind == wanted:
        return column
    try:
        if _is.is_timestamp(kind) and _is.is_timestamp(wanted) and kind.unit == wanted.unit:
            from_ = partial(pa.Array.from_buffers, wanted)
            chunks = [from_(len(one), one.buffers(), one.null_count, one.offset) for one in column.chunks]
            return pa.chunked_array(chunks, wanted)
        if _is.is_timestamp(kind) and kind.tz is not None:  # the same instant, in UTC
            column = column.cast(pa.timestamp(kind.unit, "UTC"))
        if _is.is_uint64(kind) and _is.is_decimal(wanted):
            return column.cast(pa.decimal128(20, 0))
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise _inexact(column, field, what, error) from error


def _inexact(column: pa.ChunkedArray, field: pa.Field, what: str, error: pa.ArrowInvalid) -> InvalidUsage:
    cast = column.cast(field.type, safe=False)
    row = pc.index(pc.not_equal(cast.cast(column.type, safe=False), column), pa.scalar(True)).as_py()
    value = column[row] if row >= 0 else error
    if field.name == TIME:
        reason = "Spark's BIGINT ends at 2^63 - 1"
    else:
        reason = f"Spark's type for it, {field.type}, does not hold that exactly"
    return InvalidUsage(
        f"column {field.name} of {what} has the value {value} ({column.type}), and {reason}. Nothing is rounded: "
        "read the other columns with the option columns, or read it with the library",
        column=field.name,
    )  # fmt: skip


def _words(field: t.StructField) -> str:
    return f"{field.dataType.simpleString()}{'' if field.nullable else ' not null'}"


def chosen(schema: Schema, names: Sequence[str] | None, what: str) -> tuple[str, ...] | None:
    """The columns that an option names, which must be the shard's; None for all."""
    if names is None:
        return None
    for name in names:
        if name not in schema.names:
            raise InvalidUsage(
                f"{what} has no column {shown(name)}. {did_you_mean(name, schema.names)}It has {schema.names}",
                column=name,
            )
    return tuple(names)
