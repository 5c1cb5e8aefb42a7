"""How a schema may change, and what one schema's columns are in another.

A column is the same one as long as its id is (`Column.id`): the name that it was made with. So a renamed column keeps
its data, and a name that was dropped can be used again, for a column with another id. Columns stay in the order in
which they were made, and dropped ones stay among them, as rows are stored and fingerprinted with what older rows have
there.

    newest.rename({"state": "status"}).widen({"cents": "int64"}).add({"note": "string"}).drop("seen")

`Table.evolve`, `client.evolve_schema` and `controller.evolve` take what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.schema.schema import Column, Schema, by_ids, check_schema, column_texts, with_models
from persist_lib.schema.types import format_type, is_nested, parse_type
from persist_lib.schema.widening import default_of, first_type, is_once_more, widens

_FIELDS = ". Fields come at the end of a struct, and keep their names; keys of maps keep their type"
MARK = "~"
"""What is appended to a name that is taken: to the id of a new column, and to the name of a dropped one."""


def added(schema: Schema, columns: Any, defaults: Mapping[str, Any] | None) -> Schema:
    """The schema with value columns at its end."""
    if not (defaults is None or isinstance(defaults, Mapping)):
        raise InvalidUsage(f'defaults are names with values, as in {{"note": "-"}}: got {shown(defaults)}')
    new, defaults = Schema(columns).key, dict(defaults or {})
    if unknown := [name for name in defaults if name not in {column.name for column in new}]:
        raise InvalidUsage(f"there is a default for {shown(unknown[0])}, which is not added", column=unknown[0])
    ids = {column.id for column in schema.columns}
    made = []
    for column in new:
        first = free(column.name, ids)
        default = defaults.get(column.name, column.default)
        first_name = "" if first == column.name else first
        made.append(_replaced(column, default=default, first_name=first_name))
        ids.add(first)
    return _with_value(schema, (*schema.value, *made), touched={column.id for column in made})


def renamed(schema: Schema, names: Mapping[str, str]) -> Schema:
    """The schema with other names for some columns: old to new, all at once."""
    if not isinstance(names, Mapping):
        raise InvalidUsage(f'rename takes old names with new ones, as in {{"state": "status"}}: got {shown(names)}')
    _known(schema, list(names))

    def of(column: Column) -> Column:
        if column.is_dropped or column.name not in names:
            return column
        return _named(column, names[column.name])

    touched = {column.id for column in schema.columns if column.name in names and not column.is_dropped}
    return _with_value(schema, map(of, schema.value), tuple(map(of, schema.key)), touched)


def dropped(schema: Schema, names: str | Iterable[str]) -> Schema:
    """The schema without some value columns."""
    names = _known_value(
        schema, names, "which tells rows apart and cannot be dropped. Copy the table into one with another key "
        "(copy_rendition of a collection)",
    )  # fmt: skip
    return _each(schema, names, lambda one: _replaced(one, nullable=True, is_dropped=True, fill=""))


def widened(schema: Schema, types: Mapping[str, Any]) -> Schema:
    """The schema with wider types for some value columns; `widens` says which these are."""
    if not isinstance(types, Mapping):
        raise InvalidUsage(f'widen takes names with types, as in {{"cents": "int64"}}: got {shown(types)}')

    def of(column: Column) -> Column:
        given = types[column.name]
        wide = format_type(parse_type(given) if isinstance(given, str) else given)
        if wide != column.type and not _widens(column, wide):
            raise InvalidUsage(
                f"column ({column}) cannot become {wide}: not every {column.type} is one"
                f"{_FIELDS if is_nested(wide) else ''}. Add a column with another name, or copy the table into another "
                "one",
                column=column.name, type=wide,
            )  # fmt: skip
        return _replaced(column, type=wide, first_type=_first_type(column, wide))

    return _each(schema, _known_value(schema, list(types), "whose type is decided for good"), of)


def relaxed(schema: Schema, names: str | Iterable[str]) -> Schema:
    """The schema with null allowed in some value columns."""
    names = _known_value(schema, names, "whose nulls are decided for good")
    return _each(schema, names, lambda one: _replaced(one, nullable=True))


def reordered(schema: Schema, names: str | Iterable[str], after: str | None) -> Schema:
    """The schema, shown with some value columns before the others, or behind `after`."""
    names = _known(schema, names)
    if not (after is None or isinstance(after, str)):
        raise InvalidUsage(f"after is the name of a column, or None: got {shown(after)}", argument="after")
    behind = [] if after is None else _known(schema, after)
    _known_value(
        schema, [*names, *behind], "and these come before all value columns, in their order. Name value columns alone; "
        "those that are to be first need no `after`",
    )  # fmt: skip
    if twice := [name for name in names if [*names, *behind].count(name) > 1]:
        raise InvalidUsage(f"column {twice[0]!r} has one place, and is named twice", column=twice[0])
    rest = [one.name for one in schema.shown.value if one.name not in names]
    place = rest.index(behind[0]) + 1 if behind else 0
    return _ranked(schema, [*rest[:place], *names, *rest[place:]])


def _ranked(schema: Schema, names: list[str]) -> Schema:
    ranks = {name: rank for rank, name in enumerate(names, 1)}
    return _each(schema, ranks, lambda one: _replaced(one, rank=ranks[one.name]))


def adopted(newest: Schema, asked: Schema) -> Schema:
    """What was asked for, as the schema after `newest`: with the ids of its columns, and with its dropped ones.

    A program that declares columns knows nothing of their ids, so they are those of the same names, but for those that
    it renamed. Nor does it reorder any by declaring them in another order, but by `Schema.reorder` alone. Raises
    SchemaMismatch where it cannot follow.
    """
    newest, made = newest.whole, _adopted(newest.whole, check_schema(asked))
    check_evolution(newest, made)
    return by_ids(made)


def _adopted(newest: Schema, asked: Schema) -> Schema:
    by_name = {column.name: column for column in newest.columns if not column.is_dropped}
    by_id = {column.id: column for column in newest.columns}
    ids, asked = set(by_id), asked.whole

    def of(column: Column) -> Column:
        is_by_id = column.first_name or column.is_dropped or column.id in asked.by_id
        known = by_id.get(column.id) if is_by_id else by_name.get(column.name)
        if known is None:
            first = free(column.id, ids)
            ids.add(first)
            return _replaced(column, first_name="" if first == column.name else first, first_type="")
        return _replaced(
            column, default=known.default if column.default is None else column.default, fill=column.fill or known.fill,
            first_name="" if known.id == column.name else known.id, first_type=_first_type(known, column.type),
        )  # fmt: skip

    found = {one.id: one for one in map(of, asked.value)}
    there = [found.pop(one.id, one if one.is_dropped else None) for one in newest.value]
    value = (*(one for one in there if one is not None), *found.values())
    made = _with_value(asked, value, tuple(map(of, asked.key)))
    ranks = {one.id: one.rank for one in newest.value}
    stays = _with_value(made, (_replaced(one, rank=ranks.get(one.id, 0)) for one in made.value))
    if (names := stays.shown.names) == asked.shown.names or set(names) != set(asked.shown.names):
        return stays
    if any(column.rank for column in made.value):
        return _ranked(made, [column.name for column in asked.shown.value])
    raise _refused(
        newest, asked, f"the columns would be in another order; new ones come at the end: {names}. To have them in "
        "another one, say schema.reorder(…)",
    )  # fmt: skip


def fresh(schema: Schema) -> Schema:
    """The columns as those of something new, which were never others."""
    if schema.all_plain:
        return schema

    def of(column: Column) -> Column:
        return Column(column.name, column.type, column.nullable, column.default, fill=column.fill)

    return with_models(
        _rebuilt(schema.shown, key=tuple(map(of, schema.key)), value=tuple(map(of, schema.shown.value))), schema
    )


def check_evolution(older: Schema, newer: Schema) -> None:
    """Raise SchemaMismatch unless one schema may follow the other."""
    if newer.codec != older.codec:
        raise _refused(older, newer, f"the codec is {older.codec}, and cannot become {newer.codec}")
    if newer.times != older.times:
        clock = "plain integers" if older.times is None else f"a clock in {older.times}"
        raise _refused(older, newer, f"the times are {clock}, and that cannot be changed to {newer.times!r}")
    if newer.constraints != older.constraints:
        reason = f"the constraints are {_flags(older)}, and cannot become {_flags(newer)}"
        raise _refused(older, newer, reason)
    if [one.id for one in newer.key] != [one.id for one in older.key]:
        raise _refused(
            older, newer, f"the key changes: ({column_texts(older.key)}) would be ({column_texts(newer.key)})"
        )
    ids = [column.id for column in newer.columns]
    if len(set(ids)) != len(ids):
        raise _refused(older, newer, "two columns have the same id")
    for was, is_ in zip(older.columns, (*newer.key, *newer.value[: len(older.value)]), strict=False):
        if reason := _change_refused(was, is_, in_key=was in older.key):
            raise _refused(older, newer, reason)
    if len(newer.value) < len(older.value):
        raise _refused(older, newer, f"({older.value[len(newer.value)]}) is missing; say schema.drop(…) to drop it")
    for column in newer.value[len(older.value) :]:
        if not column.may_lack:
            reason = (
                f"the new column ({column}) must be nullable or have a default, as older updates have no value for it"
            )
            raise _refused(older, newer, reason)
        if column.first_type:
            raise _refused(older, newer, f"the new column ({column}) was never of another type")


def comes_before(older: Schema, newer: Schema) -> bool:
    """Whether any number of evolutions may have led from one schema to the other. Of one step, `check_evolution` says.

    A step says as what values are hashed by what it found, so two steps do not say what one would have said.
    """
    if (older.codec, older.times, older.constraints) != (newer.codec, newer.times, newer.constraints):
        return False
    if len(newer.value) < len(older.value) or len(newer.key) != len(older.key):
        return False

    def is_from(was: Column, is_: Column) -> bool:
        wider = is_.type == was.type or widens(was.type, is_.type)
        return was.id == is_.id and wider and is_.nullable >= was.nullable and is_.is_dropped >= was.is_dropped

    pairs = zip(older.columns, (*newer.key, *newer.value[: len(older.value)]), strict=True)
    return all(is_from(*pair) for pair in pairs) and all(one.may_lack for one in newer.value[len(older.value) :])


def _change_refused(was: Column, is_: Column, *, in_key: bool) -> str:
    """Why a column may not become another one; empty if it may."""
    if was.id != is_.id:
        return f"column ({was}) is missing or not in its place, where ({is_}) is; say schema.drop(…) to drop it"
    if was.default != is_.default and not (was.default and is_.default and is_.type != was.type):
        return f"the default of ({was}) is what older rows have, and cannot become that of ({is_})"
    if was.fill != is_.fill and not is_.is_dropped:
        return f"what writers fill in ({was}) is said when it is added, and cannot become that of ({is_})"
    if in_key:
        return "" if (was.type, was.nullable, is_.is_dropped) == (is_.type, is_.nullable, False) else (
            f"the key changes: ({was}) would be ({is_})"
        )  # fmt: skip
    if was.is_dropped and not is_.is_dropped:
        return f"column ({was}) was dropped, and cannot come back; add one"
    if is_.type != was.type and not _widens(was, is_.type):
        return f"({was}) cannot become ({is_}), as not every {was.type} is one"
    if is_.first_type != _first_type(was, is_.type):
        return f"({is_}) does not say as what type its values are hashed"
    if was.nullable and not is_.nullable:
        return f"({was}) may hold nulls, and cannot become ({is_})"
    return ""


def _widens(column: Column, wide: str) -> bool:
    """Whether a column may get a wider type.

    SUBTLE: a date or timestamp once, at each place. Values are hashed as the first type or as the present one, and what
    came in between would be hashed as neither.
    """
    made = column.first_type or column.type
    return widens(column.type, wide) and not is_once_more(made, column.type, wide)


def _first_type(column: Column, wide: str) -> str:
    """As what type the values of a column are hashed once it has a wider one; empty if as that."""
    if wide == column.type:
        return column.first_type
    return first_type(column.first_type or column.type, wide)


def changes_between(older: Schema, newer: Schema) -> tuple[str, ...]:
    """What was changed, column by column, and their order; of a new column its name alone."""
    found = []
    for was, is_ in zip(older.columns, newer.columns, strict=False):
        if is_.is_dropped:
            found += [] if was.is_dropped else [f"{was.name} dropped"]
            continue
        found += [f"{was.name} renamed to {is_.name}"] if was.name != is_.name else []
        found += [f"{is_.name} widened to {is_.type}"] if was.type != is_.type else []
        found += [f"{is_.name} may be null"] if is_.nullable and not was.nullable else []
    new = [column.name for column in newer.columns[len(older.columns) :]]
    there, named = {one.id: one.name for one in newer.value if not one.is_dropped}, newer.shown.names
    if named != [*newer.key_names, *(there[one.id] for one in older.shown.value if one.id in there), *new]:
        found.append(f"reordered to {', '.join(named)}")
    return (*found, *new)


def is_prefix(few: Schema, many: Schema) -> bool:
    """Whether one schema has the columns of the other, and then others that may be null and have no default."""
    count = len(few.value)
    return few.key == many.key and many.value[:count] == few.value and all(one.is_plain for one in many.value[count:])


def evolved(schemas: Sequence[Schema]) -> tuple[str, ...]:
    """The columns of the newest schema that have defaults, or were others in a former one; () if none does or was."""
    first: dict[str, Column] = {}
    changed = {one.id for schema in schemas for one in schema.columns if first.setdefault(one.id, one) != one}
    return tuple(one.name for one in schemas[-1].columns if one.id in changed or not one.is_plain) if schemas else ()


def named_as(newest: Schema, mine: Schema) -> Schema:
    """The newest schema of a shard with the names and types of one that has some of its columns.

    Rows are read in it, in the one order that all parts have, and then narrowed to the columns of `mine`.
    """
    if is_prefix(mine, newest):
        return newest
    known = {column.id: column for column in mine.columns}
    taken = {column.name for column in mine.columns}

    def of(column: Column) -> Column:
        if (own := known.get(column.id)) is not None:
            return own
        name = free(column.name, taken)
        taken.add(name)
        return _named(column, name)

    return _rebuilt(newest, key=tuple(map(of, newest.key)), value=tuple(map(of, newest.value)))


def place_of(schema: Schema, schemas: Sequence[Schema]) -> int | None:
    """Which of a shard's schemas this is: exactly, or as it is shown, or as a program declares it that knows no ids.

    The newest of those that will do; None if it is not one.
    """
    ways: tuple[Callable[[Schema], object], ...] = (lambda one: one, lambda one: one.shown, _declared)
    for looks in ways:
        wanted = looks(schema)
        for index in reversed(range(len(schemas))):
            if looks(schemas[index]) == wanted and _is_filled_alike(schema, schemas[index]):
                return index
    return None


def number_of(schema: Schema, schemas: Sequence[Schema]) -> int:
    """The same of a schema that is one of the shard's. Raises ValueError if it is not."""
    if (place := place_of(schema, schemas)) is None:
        raise ValueError(f"{schema} is not a schema of the shard, which has {', '.join(map(str, schemas))}")
    return place


def has_ids_of(schema: Schema, schemas: Sequence[Schema]) -> bool:
    """Whether it is one of these by its ids too, and not the columns of a newer one with older names (`named_as`)."""
    place = place_of(schema, schemas)
    there = () if place is None else {(one.id, one.name) for one in schemas[place].columns}
    return place is not None and all((one.id, one.name) in there for one in schema.columns)


def known_among(schema: Schema, schemas: Sequence[Schema]) -> Schema | None:
    """What a shard knows of a schema, as it is shown and with its models; None if the shard does not have it."""
    place = place_of(schema, schemas)
    return None if place is None else with_models(schemas[place], schema).shown


def _declared(schema: Schema) -> object:
    """What a program can know of a schema that it declares: no ids, and no defaults."""
    sides = ([(one.name, one.type, one.nullable) for one in side] for side in (schema.shown.key, schema.shown.value))
    return *sides, schema.codec, schema.times, schema.constraints


def _is_filled_alike(schema: Schema, known: Schema) -> bool:
    """Whether what a schema says that writers fill in is what the other one says. It need not say it."""
    columns = zip(schema.shown.columns, known.shown.columns, strict=False)
    return all(mine.fill in {"", theirs.fill} for mine, theirs in columns)


def column_of(schema: Schema, name: str) -> Column | None:
    """The column of this name; None if the schema lacks it."""
    return next((column for column in schema.columns if column.name == name), None)


def fill(column: Column, count: int) -> pa.Array:
    """What a column has in rows that do not say it: its default, or null."""
    if column.default is None:
        return pa.nulls(count, parse_type(column.type))
    return pa.repeat(default_of(column.type, column.default), count)


def free(name: str, taken: Iterable[str]) -> str:
    """The name, or it with marks where it is taken."""
    while name in taken:
        name += MARK
    return name


def _known(schema: Schema, names: object) -> list[str]:
    """The names, which must be of columns."""
    is_one = isinstance(names, (str, bytes, bytearray, Mapping)) or not isinstance(names, Iterable)
    found: list[object] = [names] if is_one else list(names)  # type: ignore[call-overload]
    there = schema.shown.names
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise InvalidUsage(f"columns are named by text: got {shown(wrong[0])}", column=wrong[0])
    known = [str(name) for name in found]
    if unknown := [name for name in known if name not in there]:
        meant = did_you_mean(unknown[0], there)
        raise InvalidUsage(f"there is no column {shown(unknown[0])}. {meant}There are {there}", column=unknown[0])
    return known


def _known_value(schema: Schema, names: object, why: str) -> list[str]:
    """The names, which must be of value columns; `why` says what is wrong with another one."""
    found = _known(schema, names)
    if keys := [name for name in found if name in schema.key_names]:
        raise InvalidUsage(f"{keys[0]!r} is a key column, {why}", column=keys[0])
    return found


def _with_value(
    schema: Schema, value: Iterable[Column], key: tuple[Column, ...] | None = None, touched: Iterable[str] = (),
) -> Schema:  # fmt: skip
    """The schema with these value columns; dropped ones get names that nothing else has."""
    columns, key = tuple(value), schema.key if key is None else key
    taken = {one.name for one in (*key, *columns) if not one.is_dropped}
    made = []
    for column in columns:
        if column.is_dropped:
            name = free(column.id, taken)
            taken.add(name)
            column = _named(column, name)  # noqa: PLW2901
        made.append(column)
    return _rebuilt(schema, key=key, value=tuple(made), touched=touched)


def _rebuilt(schema: Schema, key: tuple[Column, ...], value: tuple[Column, ...], touched: Iterable[str] = ()) -> Schema:
    made = msgspec.structs.replace(schema, key=key, value=value)
    if made.columns == schema.columns:
        made.__dict__["models"] = schema.models
    made.__dict__["by_id"] = schema.by_id.union(touched)
    return made


def _each(schema: Schema, names: Collection[str], change: Callable[[Column], Column]) -> Schema:
    columns = (change(one) if one.name in names and not one.is_dropped else one for one in schema.value)
    return _with_value(schema, columns)


def _replaced(column: Column, **fields: Any) -> Column:
    return msgspec.structs.replace(column, **fields)


def _named(column: Column, name: str) -> Column:
    return _replaced(column, name=name, first_name="" if name == column.id else column.id)


def _flags(schema: Schema) -> str:
    return " and ".join(schema.constraints) or "none"


def _refused(older: Schema, newer: Schema, reason: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{reason}. A schema may gain value columns that are nullable or have a default, and rename, widen, drop, "
        f"reorder and allow null in those that it has. The shard has {older}; asked was {newer}",
        problem="not additive", actual=older, expected=newer,
    )  # fmt: skip
