"""A source as a TOML file: the fields of `Declaration`, read with every mistake named, and written again.

    shards = 2
    [reader]
    type = "files"
    place = "in"
    format = "jsonl"
    [meaning]
    envelope = "upsert"
    [schema.key]
    id = "int64 not null"

What is left out of `decoding` and `meaning` is as the kind of source has it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from persist_lib.arguments import UNPARSED, did_you_mean, shown, within
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema
from persist_lib.sources.kinds import KINDS
from persist_lib.sources.records import Declaration, Kind, Terms

BARE = re.compile(r"[A-Za-z0-9_-]+")
TERMS: Mapping[str, object] = {"unique": False, "non_negative": False, "codec": "columns"}
"""What a schema says beside its columns and its times, which are the source's."""


class Given(NamedTuple):
    """What a file says, as `Sources.create` takes it."""

    reader: Kind
    schema: Schema | None
    terms: Terms


def read(path: Path) -> Given:
    """What a file declares. Raises InvalidUsage, which names the file, the key, what it has, and what it may have."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidUsage(f"{path} cannot be read: {error.strerror or error}", path=str(path)) from error
    except UNPARSED as error:
        raise InvalidUsage(f"{path} is no TOML: {error}", path=str(path)) from error
    with within(path, path=str(path)):
        return parse(given)


def parse(given: Mapping[str, Any]) -> Given:
    """What the tables of a file declare. Raises InvalidUsage."""
    fields = {one.name: one.type for one in msgspec.structs.fields(Declaration) if one.name != "v"}
    _check_names("", given, fields)
    sections = {name: _table(name, given.get(name, {})) for name in ("reader", "decoding", "meaning")}
    reader = _reader(sections["reader"])
    terms = Terms(
        decoding=_struct("decoding", sections["decoding"], reader.default_decoding()),
        meaning=_struct("meaning", sections["meaning"], reader.default_meaning()),
        decoded=_schema("decoded", given["decoded"]) if "decoded" in given else None,
        shards=_value("shards", given.get("shards", 1), int),
    )
    if "tables" in given:
        tables = _table("tables", given["tables"])
        terms["tables"] = {name: _schema(f"tables.{_key(name)}", one) for name, one in tables.items()}
    if "retention" in given:
        terms["retention"] = _value("retention", given["retention"], int | str)
    return Given(reader, _schema("schema", given["schema"]) if "schema" in given else None, terms)


def written(declared: Declaration) -> str:
    """The file that declares this. Raises InvalidUsage for an option of a reader that TOML has no word for."""
    reader = declared.reader
    tables: dict[str, Any] = {"shards": declared.shards} if declared.shards != 1 else {}
    if declared.retention is not None:
        tables["retention"] = declared.retention
    tables["reader"] = msgspec.to_builtins(reader)
    decoding = msgspec.structs.replace(declared.decoding, added={})
    tables["decoding"] = _differences(decoding, reader.default_decoding())
    tables["meaning"] = _differences(declared.meaning, reader.default_meaning())
    tables["schema"] = {} if declared.tables else _columns(declared.schema)
    tables["decoded"] = {} if declared.decoded is None else _columns(declared.decoded)
    tables["tables"] = {name: _columns(schema) for name, schema in declared.tables.items()}
    return "\n".join(_lines("", tables)).lstrip("\n") + "\n"


def _reader(given: Mapping[str, Any]) -> Kind:
    fields = dict(given)
    tag = fields.pop("type", None)
    if tag not in KINDS:
        has = "is missing" if tag is None else f"is {shown(tag)}"
        raise InvalidUsage(f"reader.type {has}. {did_you_mean(tag, KINDS)}It is one of {', '.join(map(repr, KINDS))}")
    kind: type[Any] = KINDS[tag]
    return _made("reader", fields, kind, {})


def _struct(where: str, given: Mapping[str, Any], default: Any) -> Any:
    """A struct with these fields, and the others as they are in `default`."""
    fields = {name: getattr(default, name) for name in default.__struct_fields__}
    return _made(where, given, type(default), fields)


def _made(where: str, given: Mapping[str, Any], kind: type[Any], default: Mapping[str, Any]) -> Any:
    fields = {one.name: one for one in msgspec.structs.fields(kind)}
    _check_names(where, given, fields)
    for one in fields.values():
        if one.required and one.name not in {*given, *default}:
            raise InvalidUsage(f"{where}.{one.name} is missing: it is {_possible(one.type)}")
    values = {name: _value(f"{where}.{name}", value, fields[name].type) for name, value in given.items()}
    with within(where):
        return kind(**{**default, **values})


def _value(where: str, given: Any, type_: Any) -> Any:
    if given == "":
        raise InvalidUsage(f"{where} is empty: it is {_possible(type_)}. Or leave it out")
    nested = next((one for one in get_args(type_) if hasattr(one, "__struct_fields__")), None)
    if nested is not None:
        return _made(where, _table(where, given), nested, {})
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as error:
        raise InvalidUsage(f"{where} is {shown(given)}, and has to be {_possible(type_)}") from error


def _schema(where: str, given: Any) -> Schema:
    _check_names(where, _table(where, given), {"key", "value", *TERMS})
    if not given.get("key"):
        raise InvalidUsage(f'{where}.key is missing: the columns that tell rows apart, as in id = "int64 not null"')
    sides = {side: _value(f"{where}.{side}", given.get(side, {}), dict[str, str]) for side in ("key", "value")}
    terms = {
        name: _value(f"{where}.{name}", given.get(name, default), type(default)) for name, default in TERMS.items()
    }
    with within(where):
        return Schema(**sides, **terms)


def _table(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidUsage(f"{where} is {shown(given)}, and has to be a table, as in [{where}]")
    return given


def _check_names(where: str, given: Mapping[str, Any], known: Mapping[str, Any] | set[str]) -> None:
    for name in given:
        if name not in known:
            key = f"{where}.{name}" if where else name
            raise InvalidUsage(
                f"there is no key {key}. {did_you_mean(name, known)}There are {', '.join(sorted(known))}"
            )


_WORDS: Mapping[object, str] = {str: "a text", int: "an integer", bool: "true or false", Any: "anything"}


def _possible(type_: Any) -> str:
    """What a value may be, in words."""
    origin, args = get_origin(type_), get_args(type_)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in {Union, UnionType}:
        return " or ".join(_possible(one) for one in args if one is not type(None))
    if origin is tuple:
        return f"a list, each {_possible(args[0])}"
    return f"a table, each {_possible(args[1])}" if args else _WORDS.get(type_, "a table")


def _differences(declared: Any, default: Any) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    names = [name for name in declared.__struct_fields__ if getattr(declared, name) != getattr(default, name)]
    return {name: msgspec.to_builtins(getattr(declared, name)) for name in names}


def _columns(schema: Schema) -> dict[str, Any]:
    sides = {side: {one.name: one.said for one in getattr(schema, side)} for side in ("key", "value")}
    return {**{name: getattr(schema, name) for name in TERMS if getattr(schema, name) != TERMS[name]}, **sides}


def _lines(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: its values, and then the tables in it."""
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if where and (len(inner) < len(table)):
        yield from ("", f"[{where}]")
    for name, value in table.items():
        if name not in inner:
            yield f"{_key(name)} = {_text(f'{where}.{name}', value)}"
    for name, value in inner.items():
        yield from _lines(f"{where}.{_key(name)}" if where else _key(name), value)


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(where: str, value: Any) -> str:
    match value:
        case str():
            return _quoted(value)
        case bool() | int():
            return json.dumps(value)
        case float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_text(where, one) for one in value)}]"
        case Mapping():
            return f"{{{', '.join(f'{_key(name)} = {_text(where, one)}' for name, one in value.items())}}}"
        case _:
            raise InvalidUsage(f"{where} is {shown(value)}, which TOML has no word for: create such a source in Python")
