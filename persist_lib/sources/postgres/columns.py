"""PostgreSQL's columns as Persist's: what type a column has, and whether it still fits what was declared. Pure.

A header says what columns messages have. It is the text that comes with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.errors import Determinate, InvalidUsage, SchemaChanged
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import format_type
from persist_lib.sources.decoding import Decoding

NUMERIC = 1700
UUID = 2950
_TYPES: dict[int, pa.DataType] = {
    16: pa.bool_(), 17: pa.binary(), 20: pa.int64(), 21: pa.int16(), 23: pa.int32(), 26: pa.int64(),
    700: pa.float32(), 701: pa.float64(), 1082: pa.date32(), 1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
}  # fmt: skip
"""By the ids of types, which are the same in every PostgreSQL. What is not here is kept as PostgreSQL's text."""
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int16(): (pa.int32(), pa.int64()), pa.int32(): (pa.int64(),), pa.float32(): (pa.float64(),),
}  # fmt: skip
WHAT_TO_DO = (
    "Nothing of it was written. Declare a source of the table under another name, which takes the columns as they are "
    "now, and drop this one once its history is not needed"
)


class Column(NamedTuple):
    """A column: its type's id and modifier are PostgreSQL's. `is_key`: it is among those that tell rows apart."""

    name: str
    type: int
    modifier: int
    is_key: bool


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What columns messages have. `copied`: they are lines of CSV, not changes.

    `moved` names two that are not in the order that they had when the source was made: they are others by that name.
    `is_unsure`: the key was that of the index of the replica identity, which is FULL, so that rows may share a key.
    """

    columns: tuple[Column, ...]
    copied: bool = False
    moved: str = ""
    is_unsure: bool = False

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


@lru_cache(maxsize=256)
def header_of(text: str) -> Header:
    """The header that a text is."""
    return msgspec.json.decode(text, type=Header)


def arrow_type(type_: int, modifier: int) -> pa.DataType:
    """The type of a column, if nothing else is declared."""
    if type_ == NUMERIC:
        precision, scale = _digits(modifier)
        return pa.decimal128(precision, scale) if precision and precision <= 38 and scale <= precision else pa.string()
    return _TYPES.get(type_, pa.string())


def _digits(modifier: int) -> tuple[int, int]:
    """Precision and scale of a numeric; zeros where they are not bounded, or not as Arrow's are."""
    if modifier < 4:
        return 0, 0
    precision, scale = (modifier - 4) >> 16, (modifier - 4) & 0x7FF
    return (0, 0) if scale >= 1024 else (precision, scale)  # a negative scale


def fits(type_: int, modifier: int, wanted: pa.DataType) -> bool:
    """Whether each value of a column is one of `wanted`, but for those that no Arrow type has, such as infinity."""
    own = arrow_type(type_, modifier)
    if wanted in {own, pa.string()} or wanted in _WIDER.get(own, ()):
        return True
    if type_ == UUID:
        return wanted == pa.binary(16)
    if type_ == NUMERIC and pa.types.is_decimal(wanted):
        precision, scale = _digits(modifier)
        return not precision or (wanted.scale >= scale and wanted.precision - wanted.scale >= precision - scale)
    return False


def derived_schema(columns: Sequence[Column], key: Sequence[str]) -> Schema:
    """The schema of a table. Columns that are no key may be null, as they may become so at any time.

    Without a primary key all columns are the key, and equal rows are counted.
    """
    types = {column.name: format_type(arrow_type(column.type, column.modifier)) for column in columns}
    if not key:
        return Schema(key=types, times="ms")
    return Schema(
        key={name: f"{types[name]} not null" for name in key},
        value={name: type_ for name, type_ in types.items() if name not in key}, times="ms",
    )  # fmt: skip


def places_of(
    schema: Schema, key: Sequence[str] | None, decoding: Decoding, header: Header
) -> list[int | None] | str:  # fmt: skip
    """Where each column of `schema` is in the header; None for one that is not there, and is null then.

    `key` are the columns of the output's key; None for a table without a primary key, of which the log must have whole
    rows. Returns a text that says what is not as it was declared.
    """
    if header.moved:
        return f"its columns {header.moved} have exchanged their names, or one is another column of that name"
    names = [column.name for column in header.columns]
    places: list[int | None] = []
    for field in schema.data:
        source = decoding.source(field.name)
        if source not in names:
            if source in decoding.added:
                places.append(None)  # not yet there, as its caller sees to
                continue
            if decoding.missing == "null" and field.name not in (key or ()):
                places.append(None)
                continue
            return f"it has no column {source!r}; it has {names}"
        place = names.index(source)
        column = header.columns[place]
        if not fits(column.type, column.modifier, field.type):
            found = format_type(arrow_type(column.type, column.modifier))
            return f"its column {source!r} is {found}, and {format_type(field.type)} is declared"
        places.append(place)
    wanted = set(names) if key is None else {decoding.source(name) for name in key}
    if header.is_unsure:
        return f"its replica identity is FULL, and no index any more, so rows may share their key {sorted(wanted)}"
    keys = {column.name for column in header.columns if column.is_key}
    # All of them: REPLICA IDENTITY FULL. A copy has whole rows, whatever the key is.
    if keys not in (wanted, set(names)) and not (key is None and header.copied):
        return f"its rows are told apart by {sorted(keys)}, and {sorted(wanted)} is declared"
    if decoding.extra == "refuse" and (more := set(names) - {decoding.source(name) for name in schema.names}):
        return f"it has the columns {sorted(more)}, which are not declared"
    return places


def check_added(decoding: Decoding, schema: Schema, header: Header, where: Callable[[int], str | None]) -> None:
    """Of a source that takes added columns, raise for messages with columns that it does not know, or not any more.

    `where` says which message is the first one beyond a place of the log; None if none is.
    """
    names = {column.name for column in header.columns}
    if more := sorted(names - {decoding.source(name) for name in schema.names}):
        raise Determinate(f"the table has new columns: {', '.join(map(repr, more))}. They are taken at the next look")
    for name, there in decoding.added.items():
        if name not in names and (first := where(there)) is not None:
            raise changed(first, f"it has no column {name!r} any more")


def check_declared(schema: Schema, decoding: Decoding, *, keyless: bool) -> None:
    """Refuse a schema that rows of a table may not fit one day."""
    if must := [c.name for c in schema.columns if not c.nullable and (keyless or c.name not in schema.key_names)]:
        raise InvalidUsage(f"column {must[0]!r} of a table may become null: leave out 'not null'")
    if decoding.epochs:
        raise InvalidUsage("epochs: PostgreSQL says its moments itself")


def changed(where: str, what: str) -> SchemaChanged:
    """The error for a table that is not any more what was declared."""
    return SchemaChanged(f"the table has changed: from {where} on {what}. {WHAT_TO_DO}", where=where)
