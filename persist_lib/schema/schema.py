"""What a shard's updates look like: typed key and value columns, and how they may change.

    Schema(key={"order_id": "int64 not null"}, value={"state": "string", "cents": "int64"})
    Schema(key=OrderKey, value=Order)          # pydantic models: columns from fields, rows as instances
    Schema.json()   Schema.bytes()             # any JSON value, any bytes

    Schema(key=…, value=…, times="ms")         # times are a clock: milliseconds since 1970, see persist_lib.times

A `Schema` is the user's columns; on the wire they are followed by `_time: uint64` and `_diff: int64`, both not null.
Columns are nullable unless their type ends in ` not null`; of a model, those that are Optional. How a schema may change
is said in `schema.evolution`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec
import pyarrow as pa
from msgspec.structs import force_setattr

from persist_lib.arguments import native, parse_flag, shown
from persist_lib.errors import InvalidName, InvalidUsage
from persist_lib.frontier import Antichain, parse_time
from persist_lib.schema.models import Model, is_model, model_fields
from persist_lib.schema.types import (
    JSON,
    JSON_FIELD,
    NOT_NULL,
    canonical_type,
    check_zone,
    format_type,
    has_bounds,
    is_nested,
    parse_type,
)
from persist_lib.schema.widening import check_fill, default_text, read_default
from persist_lib.times import Unit, moment, parse_unit, show_frontier, show_time

TIME = "_time"
DIFF = "_diff"
RESERVED = (TIME, DIFF)
TIME_FIELD = pa.field(TIME, pa.uint64(), nullable=False)
DIFF_FIELD = pa.field(DIFF, pa.int64(), nullable=False)

Codec = Literal["columns", "json", "bytes"]
CONSTRAINTS = ("unique", "non_negative")
BOUNDED_MOST = 8
"""Of how many columns a part says the least and the greatest value, at most: some 20 bytes each."""
PLAIN_FIELDS = 3
"""How many fields of a schema, and of a column, are stored whatever they hold."""


class Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One column: its name, its type in canonical text (an alias becomes canonical), and whether null is allowed.

    `default` is what rows have that do not say it: those that are given without the column, and those that are older
    than it. A column that was renamed, widened or dropped says what it was (`schema.evolution`).
    """

    name: str
    type: str
    nullable: bool = True
    default: Any = None
    """A value of the type; stored as text."""
    first_name: str = ""
    """The name that it was made with, if it is another now, or was taken: fingerprints go by it, and stored data."""
    first_type: str = ""
    """The type that it was made with, if values are hashed otherwise by the present one. Of a nested column, the type
    that each number in it was made with."""
    is_dropped: bool = False
    """Whether it is only there for what older rows have in it."""
    fill: str = ""
    """What a writer fills in where a row that it adds does not say the column: `now()`, `uuid()`, or nothing."""
    rank: int = 0
    """Where a value column is shown among those that were reordered, from 1 on; 0 for those added since, at the end."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        for name in ("nullable", "is_dropped"):
            force_setattr(self, name, parse_flag(getattr(self, name), name))
        canonical = _canonical(self.type)
        if canonical != self.type:
            force_setattr(self, "type", canonical)
        if self.default is not None:
            force_setattr(self, "default", default_text(self.name, self.type, self.default))
        if self.fill:
            check_fill(self.name, self.type, self.fill)

    @property
    def id(self) -> str:
        """What it is among all columns that the shard ever had."""
        return self.first_name or self.name

    @property
    def field(self) -> pa.Field:
        """The column in Arrow."""
        said = JSON_FIELD if self.type == JSON else None
        return pa.field(self.name, parse_type(self.type), nullable=self.nullable, metadata=said)

    @property
    def is_plain(self) -> bool:
        """Whether it has always been what and where it is, and rows that do not say it have null."""
        return not (self.first_name or self.first_type or self.is_dropped or self.rank) and self.default is None

    @property
    def may_lack(self) -> bool:
        """Whether rows may be stored without it."""
        return self.nullable or self.default is not None

    @property
    def said(self) -> str:
        """The text that says it in a schema: `int64 not null default '7'`."""
        default = "" if self.default is None else f" default {self.default!r}"
        fill = f" default {self.fill}" if self.fill else ""
        return f"{self.type}{'' if self.nullable else NOT_NULL}{default}{fill}"

    def __str__(self) -> str:
        return f"{self.name}: {self.said}"


Side: TypeAlias = "Mapping[str, Any] | Iterable[Column] | Model"  # or a pa.Schema, which has no types of its own


class Schema(msgspec.Struct, frozen=True, array_like=True, dict=True, forbid_unknown_fields=True):
    """Key and value columns: at least one key column, all names different. All of it but the models is durable.

    Each side is a mapping of names to types, an Arrow schema, columns, or a pydantic model. Models decide how Python
    rows are read and written, not what the schema is: a shard opened with plain columns like theirs is the same shard.

    With `times="ms"` (or "us") the shard's times are a clock: milliseconds (microseconds) since 1970, in UTC. Then
    datetimes, pandas and numpy timestamps, ISO texts and "1 hour ago" are times wherever one is taken, integers as
    well, and times are shown as such. `show` and `moment` turn integers into times.

    Two constraints may be part of it; they hold at every time, and an append that would break one is refused with
    ConstraintViolated. `unique`: each key has at most one row, and that once. `non_negative`: no row's multiplicity is
    below 0. Times and constraints are set when the shard is created, and stay as the schema evolves.
    """

    key: tuple[Column, ...]
    value: tuple[Column, ...] = ()
    codec: Codec = "columns"
    times: Unit | None = None
    unique: bool = False
    non_negative: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            key: Side,
            value: Side = (),
            codec: Codec = "columns",
            times: Unit | None = None,
            *,
            unique: bool = False,
            non_negative: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        # Also runs when a stored schema is decoded: tuples of columns pass as they are.
        sides = {"key": self.key, "value": self.value}
        models = {what: side for what, side in sides.items() if is_model(side)}
        for what, side in sides.items():
            force_setattr(self, what, _columns(side, what))
        for name in CONSTRAINTS:
            force_setattr(self, name, parse_flag(getattr(self, name), name))
        if models:
            self.__dict__["models"] = (models.get("key"), models.get("value"))
        _check(self)

    @classmethod
    def json(cls, times: Unit | None = None, *, unique: bool = False, non_negative: bool = False) -> Schema:
        """Any JSON values, one key and one value column of canonical JSON text: sorted names, no spaces, no NaN.

        Numbers are integers of any size, or have a point, and Python reads them as floats then; 1 and 1.0 are different
        values. For documents in some columns of a table there is the column type `json`.
        """
        return cls(*_FIXED_COLUMNS["json"], codec="json", times=times, unique=unique, non_negative=non_negative)

    @classmethod
    def bytes(cls, times: Unit | None = None, *, unique: bool = False, non_negative: bool = False) -> Schema:
        """Opaque bytes, encoded by the caller. The value may be missing (null), which is not b""."""
        return cls(*_FIXED_COLUMNS["bytes"], codec="bytes", times=times, unique=unique, non_negative=non_negative)

    @cached_property
    def models(self) -> tuple[Model | None, Model | None]:
        """The pydantic models of key and value, where the schema was made from some."""
        return None, None

    @cached_property
    def constraints(self) -> tuple[str, ...]:
        """The names of its constraints: none, `unique`, `non_negative`, or both."""
        return tuple(name for name in CONSTRAINTS if getattr(self, name))

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Key columns, then value columns."""
        return self.key + self.value

    @cached_property
    def names(self) -> list[str]:
        """The names of `columns`."""
        return [column.name for column in self.columns]

    @cached_property
    def key_names(self) -> list[str]:
        """The names of the key columns."""
        return [column.name for column in self.key]

    @cached_property
    def data(self) -> pa.Schema:
        """The user's columns in Arrow."""
        return pa.schema([column.field for column in self.columns])

    @cached_property
    def updates(self) -> pa.Schema:
        """The user's columns, then `_time` and `_diff` as integers: what is stored."""
        return pa.schema([*self.data, TIME_FIELD, DIFF_FIELD])

    @cached_property
    def changes(self) -> pa.Schema:
        """The same as `listen` yields it: where times are a clock, `_time` is `timestamp[ms, UTC]` (or us)."""
        return pa.schema([*self.data, self.time_field, DIFF_FIELD])

    @cached_property
    def time_field(self) -> pa.Field:
        """The column `_time` as `listen` yields it."""
        return TIME_FIELD if self.times is None else pa.field(TIME, pa.timestamp(self.times, "UTC"), nullable=False)

    @cached_property
    def contents(self) -> pa.Schema:
        """The user's columns, then `_diff`: what a snapshot yields."""
        return pa.schema([*self.data, DIFF_FIELD])

    def show(self, time: int | Antichain) -> str:
        """A time or frontier of the shard as text: `2026-11-22T12:00:00Z` where times are a clock, else the integer."""
        if isinstance(time, Antichain):
            return show_frontier(time, self.times)
        return show_time(parse_time(time, "time"), self.times)

    def show_as_of(self, time: int) -> str:
        """The time of contents as text. They have -1 where no time is complete yet."""
        return "no time" if type(native(time)) is int and time == -1 else self.show(time)

    def moment(self, time: int | Antichain) -> dt.datetime | None:
        """A time or frontier of the shard as a datetime in UTC; None for the empty frontier.

        Raises InvalidUsage where times are plain integers, and for a time after the year 9999.
        """
        if self.times is None:
            raise InvalidUsage(f"the times of {self} are plain integers, not a clock", schema=self)
        found = time.time if isinstance(time, Antichain) else parse_time(time, "time")
        return None if found is None else moment(found, self.times)

    @cached_property
    def all_plain(self) -> bool:
        """Whether no column was ever renamed, widened, dropped or reordered, and none has a default."""
        return all(column.is_plain for column in self.columns)

    @cached_property
    def fills(self) -> dict[str, Column]:
        """The columns that writers fill, by their names."""
        return {column.name: column for column in self.columns if column.fill}

    @cached_property
    def shown(self) -> Schema:
        """The schema as it is to who reads and writes rows: without dropped columns, and in the order last asked for.

        Rows are stored, compared and fingerprinted in the order of `whole`.
        """
        value = [column for column in self.value if not column.is_dropped]
        value.sort(key=lambda column: (not column.rank, column.rank))
        if tuple(value) == self.value:
            return self
        shown = msgspec.structs.replace(self, value=tuple(value))
        shown.__dict__.update(models=self.models, whole=self, by_id=self.by_id)
        return shown

    @cached_property
    def whole(self) -> Schema:
        """The schema as it is stored: with its dropped columns, as far as this one knows of some, in stored order."""
        return self

    @cached_property
    def by_id(self) -> frozenset[str]:
        """The ids of columns that are known by these, and not by their names: of a shard or the catalog, or touched."""
        return frozenset()

    def add(self, columns: Side, defaults: Mapping[str, Any] | None = None) -> Schema:
        """The schema with more value columns, at the end. Each may be null, or has a default, as older rows lack it."""
        return _evolution().added(self.whole, columns, defaults).shown

    def rename(self, names: Mapping[str, str]) -> Schema:
        """The schema with other names for some columns, `{old: new}`, of the key as well. They keep their data."""
        return _evolution().renamed(self.whole, names).shown

    def widen(self, types: Mapping[str, Any]) -> Schema:
        """The schema with wider types for some value columns, `{name: type}`.

        Integers become wider ones, float32 becomes float64, decimals get more digits before the point, and dates become
        timestamps without a zone. The same holds within nested types, where structs also get fields at their end, which
        are null in older rows: `{"at": "struct<city: string, country: string>"}`. Raises InvalidUsage for any other
        change.
        """
        return _evolution().widened(self.whole, types).shown

    def drop(self, names: str | Iterable[str]) -> Schema:
        """The schema without some value columns. Their names can be used again, by columns without their data."""
        return _evolution().dropped(self.whole, names).shown

    def reorder(self, names: str | Iterable[str], after: str | None = None) -> Schema:
        """The schema with these value columns, in this order, before all others, or right behind the column `after`.

        Only what is shown changes, and no stored row. Columns that are added later come at the end. Key columns come
        first, in their order.
        """
        return _evolution().reordered(self.whole, names, after).shown

    def relax(self, names: str | Iterable[str]) -> Schema:
        """The schema with null allowed in some value columns."""
        return _evolution().relaxed(self.whole, names).shown

    def check_additive(self, newer: Schema) -> None:
        """Raise SchemaMismatch unless `newer` may follow: what `add`, `rename`, `drop` and others make of it."""
        _evolution().check_evolution(self.whole, check_schema(newer).whole)

    def __str__(self) -> str:
        text = f"({column_texts(self.key)}) -> ({column_texts(self.shown.value)})"
        text = text if self.codec == "columns" else f"{self.codec}: {text}"
        text = text if self.times is None else f"{text}, times={self.times}"
        return ", ".join([text, *self.constraints])

    def __copy__(self) -> Schema:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The models are no field, and still have to come along, as splits are read in other processes.
        return _unpickled, (msgspec.structs.astuple(self), self.models)


def _unpickled(fields: tuple[Any, ...], models: tuple[Model | None, Model | None]) -> Schema:
    made = Schema(**dict(zip(Schema.__struct_fields__, fields, strict=True)))
    made.__dict__["models"] = models
    return made


def by_ids(schema: Schema) -> Schema:
    """The schema, all of whose columns are known by their ids."""
    schema.__dict__["by_id"] = frozenset(column.id for column in schema.columns)
    return schema


def _evolution() -> Any:
    from persist_lib.schema import evolution  # noqa: PLC0415 - it is of schemas

    return evolution


def stored_form(schema: object) -> object:
    """Its fields as they are stored: later ones only up to the last one that is set, as older formats have none."""
    if not isinstance(schema, Schema):  # the encoder, or the decoder that proves its work, refuses it
        return schema
    key, value, *rest = msgspec.structs.astuple(schema)
    return _cut((tuple(map(_stored_column, key)), tuple(map(_stored_column, value)), *rest), Schema)


def _stored_column(column: object) -> object:
    return _cut(msgspec.structs.astuple(column), Column) if isinstance(column, Column) else column


def _cut(fields: tuple[object, ...], of: type[msgspec.Struct]) -> tuple[object, ...]:
    defaults = of.__struct_defaults__
    while len(fields) > PLAIN_FIELDS and fields[-1] == defaults[len(fields) - len(of.__struct_fields__) - 1]:
        fields = fields[:-1]
    return fields


def with_times(schema: Schema, times: Unit | None) -> Schema:
    """The schema with these times, if it does not say which it has. It keeps its models."""
    if schema.times is not None or times is None:
        return schema
    return _like(msgspec.structs.replace(schema, times=times), schema, schema.models)


@lru_cache(maxsize=256)
def bounded(schema: Schema) -> tuple[int, ...]:
    """The places of the columns whose least and greatest values parts say: times first, BOUNDED_MOST at most.

    Not the first key column: the bounds of keys say it.
    """
    columns = list(enumerate(schema.columns))[1:]
    places = [at for at, column in columns if not column.is_dropped and has_bounds(column.type)]
    places.sort(key=lambda at: not schema.columns[at].type.startswith(("timestamp", "date32")))
    return tuple(sorted(places[:BOUNDED_MOST]))


def with_models(schema: Schema, other: Schema) -> Schema:
    """The schema with the models of another one."""
    if schema.models == other.models:
        return schema
    return _like(msgspec.structs.replace(schema), schema, other.models)


def _like(made: Schema, schema: Schema, models: tuple[Model | None, Model | None]) -> Schema:
    """The same fields, with what a program knows of them."""
    made.__dict__.update(models=models, by_id=schema.by_id)
    if schema.whole is not schema:
        made.__dict__["whole"] = schema.whole
    return made


def comes_before(older: Schema, newer: Schema) -> bool:
    """Whether one schema is the other, or what that was before it evolved, by any number of steps."""
    return bool(_evolution().comes_before(older.whole, newer.whole))


def check_schema(schema: object) -> Schema:
    """The schema, which must be one."""
    if isinstance(schema, Schema):
        if (reason := no_key(schema)) is not None:
            raise InvalidUsage(reason, problem="unsupported type", schema=schema)
        return schema
    example = shown(schema) if isinstance(schema, Mapping) and schema else '{"id": "int64"}'
    raise InvalidUsage(
        f"schema must be a persist.Schema: got {shown(schema)}. Write "
        f'persist.Schema(key={example}, value={{"name": "string"}}), with the columns that tell rows apart as the key',
        schema=schema,
    )


def no_key(schema: object) -> str | None:
    """Why a schema's key can be none of a shard; None if it can. Projections are ordered by any columns."""
    for one in schema.key if isinstance(schema, Schema) else ():
        if is_nested(one.type):
            return f"a key has plain columns, and ({one}) is nested: make it a value column, or its parts key columns"
        if one.type == JSON:
            return (
                f"a key says the order of rows, and documents ({one}) have none: make it a value column, and what "
                "identifies a row in it a key column"
            )
        if one.default is not None or one.first_type or one.is_dropped or one.rank:
            return f"each row says its key, and key column ({one}) has a default: give it to value columns alone"
    return None


def _check(schema: Schema) -> None:
    codec, codecs = schema.codec, get_args(Codec)
    if not isinstance(codec, str) or codec not in codecs:
        raise InvalidUsage(f"a codec is one of {codecs}, got {shown(codec)}", problem="codec", codec=codec)
    parse_unit(schema.times)
    if not schema.key:
        raise InvalidUsage("a schema needs at least one key column", problem="no key")
    names = [column.name for column in schema.key + schema.value]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidName(
            f"column names must differ, also between key and value; {twice} occur more than once in {names}",
            problem="duplicate column", name=twice[0], names=names,
        )  # fmt: skip
    for nested in (column.name for column in schema.key + schema.value if is_nested(column.type)):
        if within := [name for name in names if name.startswith(f"{nested}.")]:
            raise InvalidName(
                f"a column {within[0]!r} beside the nested {nested!r} reads like a field of it: rename one of them",
                problem="column name", name=within[0], names=names,
            )  # fmt: skip
    if codec in _FIXED_COLUMNS and (schema.key, schema.value) != _FIXED_COLUMNS[codec]:
        raise InvalidUsage(
            f"the columns of codec {codec!r} are fixed; use Schema.{codec}(), got {schema}",
            problem="codec", codec=codec,
        )  # fmt: skip


def _check_name(name: object) -> None:
    problem = None
    if not isinstance(name, str):
        problem = "must be a string"
    elif not name:
        problem = "must not be empty"
    elif name in RESERVED:
        problem = f"must not be {' or '.join(RESERVED)}, which every shard has anyway"
    elif "\0" in name or not name.isprintable():
        problem = "must consist of printable characters"
    if problem:
        raise InvalidName(f"a column's name {problem}; got {shown(name)}", problem="column name", name=name)


def _columns(side: object, what: str) -> tuple[Column, ...]:
    if isinstance(side, tuple) and all(type(column) is Column for column in side):
        return side
    if isinstance(side, pa.Schema):
        return tuple(_column(field.name, field.type, nullable=field.nullable) for field in side)
    if is_model(side):
        return tuple(_column(name, kind, nullable=nullable) for name, kind, nullable in model_fields(side))
    if isinstance(side, Mapping):
        return tuple(_column(name, *read_default(type_)) for name, type_ in side.items())
    if isinstance(side, Iterable) and not isinstance(side, (str, bytes)):
        columns = tuple(side)
        if all(isinstance(column, Column) for column in columns):
            return columns
    raise InvalidUsage(
        f"the {what} must map column names to types, or be an Arrow schema or a pydantic model; got {shown(side)}",
        problem="columns", side=what,
    )  # fmt: skip


def _column(
    name: object, type_: object, default: str | None = None, fill: str = "", *, nullable: bool = True
) -> Column:
    _check_name(name)
    try:
        text, nullable = _parse(type_, nullable)
        check_zone(parse_type(text))
    except InvalidUsage as error:
        raise InvalidUsage(f"column {shown(name)}: {error.message}", **{**error.fields, "column": name}) from error
    return Column(str(name), text, nullable, default, fill=fill)


def _canonical(type_: object) -> str:
    if not isinstance(type_, str):
        raise _no_type(type_)
    return canonical_type(type_)


def _parse(type_: object, nullable: bool) -> tuple[str, bool]:
    """The canonical text of a column's type, and whether it is nullable."""
    if isinstance(type_, pa.DataType):
        return format_type(type_), nullable
    if not isinstance(type_, str):
        raise _no_type(type_)
    text = type_.strip()
    if text.endswith(NOT_NULL):
        text, nullable = text.removesuffix(NOT_NULL).rstrip(), False
    return canonical_type(text), nullable


def _no_type(type_: object) -> InvalidUsage:
    return InvalidUsage(
        f"a column's type must be text or an Arrow type, got {shown(type_)}", problem="type", type=type_
    )


def column_texts(columns: tuple[Column, ...]) -> str:
    """What says each of these columns, in a row."""
    return ", ".join(map(str, columns))


_FIXED_COLUMNS = {
    "json": ((Column("key", "string", False),), (Column("value", "string", False),)),
    "bytes": ((Column("key", "binary", False),), (Column("value", "binary", True),)),
}
