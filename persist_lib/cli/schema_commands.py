"""Declared columns: the schema of a new table, the shard that is made of it, and `persist evolve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persist_lib.cli import shared_options as opt
from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage, NotFound, SchemaMismatch
from persist_lib.ids import parse_shard_id

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    import pyarrow as pa

    from persist_lib.client import Client
    from persist_lib.schema.schema import Column, Schema
    from persist_lib.times import Unit


class Declared(NamedTuple):
    """The columns and constraints of something new."""

    key: opt.KeyColumns = None
    value: opt.ValueColumns = None
    like: opt.Like = None
    unique: opt.Unique = False
    non_negative: opt.NonNegative = False

    def schema(self, times: Unit | None) -> Schema:
        """The schema with times of this clock."""
        terms = {"times": times, "unique": self.unique, "non_negative": self.non_negative}
        return build_schema(self.key or [], self.value or [], self.like, **terms)


def make_shard(session: Session, shard: str, schema: Schema, *, may_be_plain: bool, dry_run: bool) -> None:
    """Create a shard, or find that it is there with this schema; if it `may_be_plain`, also with times of no clock."""
    name = parse_shard_id(shard)
    before = _existing(session, shard)
    if before:
        from persist_lib.schema.evolution import place_of

        plain = msgspec.structs.replace(schema, times=None)
        schema = plain if may_be_plain and place_of(plain, before) is not None else schema
        is_older = _check_same(shard, before, schema)
        said = f"{shard} exists already, with this schema{' and columns that were added since' if is_older else ''}"
        session.answer(_value(shard, before[-1], dry_run, created=False), f"{said}: {before[-1]}")
        return
    if dry_run:
        said = f"would create {shard} in {session.location}: {schema}"
        session.answer(_value(shard, schema, dry_run, created=False), said)
        return
    from persist_lib.table.opening import make_table

    with session.open(read_only=False, create=True) as client:
        make_table(client, name, schema)
        _check_same(shard, _schemas_of(client, shard), schema)  # another process may have been first
        url = client.url
    session.answer(_value(shard, schema, dry_run, created=True), f"created {shard} in {url}: {schema}")
    session.note(f"in Python: {python_of(schema)}")


class Changes(NamedTuple):
    """What changes in the columns of a table."""

    add: opt.Added = None
    default: opt.Defaults = None
    rename: opt.Renamed = None
    widen: opt.Widened = None
    drop: opt.DroppedColumns = None
    allow_null: opt.Relaxed = None
    reorder: opt.Reordered = None
    after: opt.ReorderedAfter = None


def evolve(session: Session, name: opt.AnyTable, changes: Changes = Changes(), dry_run: opt.DryRun = False) -> None:  # noqa: B008
    """Change the columns of a table: add some, rename, widen, drop or reorder those that it has.

    Nothing is rewritten. Added columns come at the end; rows that lack them have their default, or null. Fields are
    added to a struct by a wider type of its column, at the struct's end; rows that lack them have null. A renamed
    column keeps its data. A dropped one is not shown any more, and its name can be used again. Key columns are shown
    first, in their order. To add what is there changes nothing; to rename or drop what is not there is refused.
    Programs with the older columns still append and read, as long as these hold what is there; their changes of rows
    that have something in newer columns are refused. A copy of a collection that is under way has to be handed over to
    and finished first, or dropped. Tables that keep deleted keys gain columns that may be null, and nothing else.

    Types are those of `persist create --help`.

    \b
    persist evolve orders --add note:string --dry-run
    persist evolve orders --add 'channel:string not null' --default channel=web
    persist evolve orders --rename state=status --widen cents:int64 --drop seen
    persist evolve orders --widen 'items:list<struct<sku: string, count: int32, note: string>>'
    persist evolve orders --reorder note --reorder cents --after status
    """
    if not any(changes):
        raise InvalidUsage("name a column to add, as in --add note:string, or what else is to change: see --help")
    from persist_lib.cli.table_commands import people_of
    from persist_lib.core.pins import format_of

    with session.open(read_only=dry_run) as client, client.table(name) as table:
        newest = table.describe().schema
        new = new_columns(name, newest, _added(changes))
        evolved = _evolved(newest, new, changes)
        done = table.evolve(evolved, dry_run=dry_run)
        state = client.inspect(table.kept_by()).state
        people = people_of(client, table, state) if dry_run and done else []
        pins = (client.inspect(shard).state.pins for shard in (table.describe().shards if done else ()))
        published = sorted({format_of(pin) for each in pins for pin in each})
    stay = [f"{one.id} ({one.owner})" if one.owner else one.id for one in people if one.kind in ("read", "write")]
    value = {
        "table": name, "dry_run": dry_run, "added": [str(one) for one in new], "changes": list(done),
        "schema": schema_value(evolved), "stay": stay, "published": published,
    }  # fmt: skip
    texts = [str(next((column for column in new if column.name == one), one)) for one in done]
    said = f"{'would be' if dry_run else 'is'} changed: {', '.join(texts)}" if done else "has these columns already"
    if done and len(done) == len(new):
        said = f"{'would add' if dry_run else 'added'} {', '.join(texts)}"
    session.answer(value, f"{name}: {said}; the schema {'would be' if dry_run and done else 'is'} {evolved}")
    if stay:
        session.note(f"in the present columns stay {', '.join(stay)}")
    for format_ in published:
        session.note(f"published as {format_}: new columns are there when it is published next")


def _evolved(newest: Schema, new: tuple[Column, ...], changes: Changes) -> Schema:
    """The schema with all changes. Renamed columns are called by their new names in the others, and new ones move."""
    evolved = newest
    if changes.rename:
        evolved = evolved.rename(_pairs(changes.rename, "--rename", "state=status"))
    if changes.widen:
        evolved = evolved.widen({one.name: one.type for one in parse_columns(changes.widen)})
    if changes.allow_null:
        evolved = evolved.relax(changes.allow_null)
    if changes.drop:
        evolved = evolved.drop(changes.drop)
    evolved = evolved.add(new) if new else evolved
    if changes.after is not None and not changes.reorder:
        raise InvalidUsage(f"--after {changes.after} says where columns come: name them by --reorder, too")
    return evolved.reorder(changes.reorder, changes.after) if changes.reorder else evolved


def _added(changes: Changes) -> tuple[Column, ...]:
    columns, defaults = parse_columns(changes.add or []), _pairs(changes.default or [], "--default", "channel=web")
    if unknown := set(defaults) - {column.name for column in columns}:
        raise InvalidUsage(f"--default says what a new column has: add {unknown.pop()!r} by --add, too")
    replace = msgspec.structs.replace
    return tuple(replace(one, default=defaults.get(one.name, one.default)) for one in columns)


def _pairs(texts: list[str], option: str, example: str) -> dict[str, str]:
    parts = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, sign, _) in zip(texts, parts, strict=True) if not (name and sign)]:
        raise InvalidUsage(f"{option} takes a name, = and what it is, as in {option} {example}: got {wrong[0]!r}")
    return {name: value for name, _, value in parts}


def build_schema(key: list[str], value: list[str], like: Path | None = None, **terms: Any) -> Schema:
    """The schema of declared columns, `name:type` each, or of those of a file. `terms` go to `persist.Schema` as is.

    Raises InvalidUsage for what is no column, for a type that is not supported, and for a name that the file lacks.
    """
    from persist_lib.schema.schema import Schema

    types = _types_of(like) if like else {}
    if not key:
        example = f"--key {next(iter(types), 'order_id')}" if like else "--key order_id:int64"
        raise InvalidUsage(f"name the key: the columns that tell rows apart, as in {example}")
    keys = parse_columns(key, types)
    names = {column.name for column in keys}
    rest = parse_columns(value, types) if value else ()
    if like and not value:
        rest = parse_columns([name for name in types if name not in names], types)
    return Schema(key=keys, value=rest, **terms)


def parse_columns(texts: list[str], types: dict[str, pa.DataType] | None = None) -> tuple[Column, ...]:
    """Columns as `name:type`; where there are `types` of a file, also names alone, which may be joined by commas.

    A type may end in `?` (null is allowed, as without it) or in ` not null`.
    """
    from persist_lib.schema.schema import Schema

    found: list[Column] = []
    for text in texts:
        for one in text.split(",") if types and ":" not in text else [text]:
            name, colon, type_ = (part.strip() for part in one.partition(":"))
            declared: Any = type_.removesuffix("?").strip()
            if not colon and types:
                declared = _type_in_file(name, types)
            elif not name or not declared:
                raise InvalidUsage(
                    f"a column is a name and a type, as in order_id:int64 or 'note:string not null': got {one!r}"
                )
            if type_.endswith("?") and declared.endswith(" not null"):
                raise InvalidUsage(f"column {one!r}: `?` allows null, and `not null` does not; use only one of them")
            found.extend(Schema(key={name: declared}).key)
    return tuple(found)


def _type_in_file(name: str, types: dict[str, pa.DataType]) -> pa.DataType:
    from persist_lib.arguments import did_you_mean

    if name not in types:
        meant = did_you_mean(name, types)
        raise InvalidUsage(f"the file has no column {name!r}. {meant}It has {', '.join(types)}", column=name)
    return types[name]


def _types_of(like: Path) -> dict[str, pa.DataType]:
    """The columns of a file, without `_time` and `_diff`. Those of .csv and .jsonl are those of its first rows."""
    from persist_lib.cli.input_files import first_rows
    from persist_lib.schema.schema import RESERVED

    return {field.name: field.type for field in first_rows(like).schema if field.name not in RESERVED}


def new_columns(shard: str, newest: Schema, asked: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns that the shard does not have. Raises SchemaMismatch for one that it has otherwise."""
    there = {column.name: column for column in newest.columns}
    for column in asked:
        found = there.get(column.name, column)
        if _said(found) != _said(column):
            raise SchemaMismatch(
                f"{shard} has a column ({found}) already, which cannot become ({column}). "
                "Add a column with another name",
                shard=shard, actual=newest,
            )  # fmt: skip
    return tuple(dict.fromkeys(column for column in asked if column.name not in there))


def _said(column: Column) -> tuple[object, ...]:
    return column.type, column.nullable, column.default, column.fill


def _existing(session: Session, name: str) -> Sequence[Schema]:
    """The schemas that the table of this name has had, oldest first; none if there is no such table, or no location."""
    try:
        with session.open() as client:
            return _schemas_of(client, name)
    except NotFound:
        return ()


def _schemas_of(client: Client, name: str) -> Sequence[Schema]:
    return client.inspect(client.table(name).describe().shards[0]).state.schemas


def _check_same(name: str, schemas: Sequence[Schema], schema: Schema) -> bool:
    """Return whether the schema is an older one of the table. Raises SchemaMismatch if the table never had it."""
    from persist_lib.schema.evolution import place_of

    if (place := place_of(schema, schemas)) is None:
        raise SchemaMismatch(
            f"table {name} exists already, with the schema {schemas[-1]}; asked was {schema}. Use another name, "
            "or add columns with `persist evolve`",
            table=name, actual=schemas[-1], expected=schema,
        )  # fmt: skip
    return place < len(schemas) - 1


def _value(shard: str, schema: Schema, dry_run: bool, **more: object) -> dict[str, object]:
    return {"table": shard, "dry_run": dry_run, **more, "schema": schema_value(schema)}


def schema_value(schema: Schema) -> dict[str, object]:
    """A schema for machines: its columns with their types, and what else it says."""
    schema = schema.shown
    sides = {side: {column.name: _type(column) for column in getattr(schema, side)} for side in ("key", "value")}
    defaults = {column.name: column.default for column in schema.value if column.default is not None}
    return {**sides, **({"defaults": defaults} if defaults else {}), **_terms(schema)}


def _terms(schema: Schema) -> dict[str, object]:
    """What is said of the schema as a whole, if anything."""
    terms = {name: getattr(schema, name) for name in ("times", "unique", "non_negative")}
    return {name: value for name, value in terms.items() if value}


def _type(column: Column) -> str:
    return f"{column.type}{'' if column.nullable else ' not null'}{f' default {column.fill}' if column.fill else ''}"


def _declared(column: Column) -> str:
    """The type as a program declares it, with its default."""
    return _type(column) if column.fill or column.default is None else f"{_type(column)} default {column.default!r}"


def python_of(schema: Schema) -> str:
    """The schema as Python would write it."""
    import json

    key, value = (
        json.dumps({column.name: _declared(column) for column in side}, ensure_ascii=False)
        for side in (schema.key, schema.value)
    )
    terms = "".join(f", {name}={value!r}" for name, value in _terms(schema).items())
    return f"persist.Schema(key={key}, value={value}{terms})"
