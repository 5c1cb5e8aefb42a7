"""What callers of the controller ask for, checked before anything is decided."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any, get_args

from persist_lib.arguments import did_you_mean, parse_integer, shown
from persist_lib.catalog.copies import HOLDS
from persist_lib.catalog.records import HOLD, CommandRecord, Mode, RenditionRecord, schema_form
from persist_lib.client import Client
from persist_lib.core.plan.retention import check_own
from persist_lib.core.state import NAMED
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import parse_hold_name
from persist_lib.schema.schema import Schema
from persist_lib.schema.widening import NUMBER
from persist_lib.times import Times, is_duration

MOST_SHARDS = 1024
Retention = int | str | dt.timedelta | None


def parse_rendition(
    client: Client, schema: Schema, shards: object, mode: object, hash_columns: Sequence[str] | None
) -> RenditionRecord:
    """A rendition that is to be made, once it has a collection and a number."""
    count = parse_integer(shards, "shards", 1, MOST_SHARDS)
    check_uncounted(schema)
    if mode not in get_args(Mode):
        raise InvalidUsage(f"mode must be one of {get_args(Mode)}: got {shown(mode)}", mode=mode)
    if mode == "compare_and_append" and count > 1:
        client.consensus.compare_and_set_many({})  # raises InvalidUsage where there are no transactions
    names = tuple(schema.key_names) if hash_columns is None else _of_key(schema, parse_hash_columns(hash_columns))
    return RenditionRecord(
        collection="",
        number=1,
        shards=count,
        schema=schema_form(schema),
        hash_columns=names,
        mode=mode,  # type: ignore[arg-type]
    )


def check_uncounted(schema: Schema) -> None:
    """Raise InvalidUsage for columns that count up: each shard has numbers of its own."""
    if counted := [column.name for column in schema.columns if column.fill == NUMBER]:
        raise InvalidUsage(
            f"columns {counted} count up (identity), which only a table of one shard can, without a timeline: it has "
            "the numbers. Nothing was changed. Make them uuids with the default uuid(), or give the numbers",
            problem="identity", columns=counted,
        )  # fmt: skip


def parse_retention(value: object, schema: Schema, clock_ms: Callable[[], int]) -> int | None:
    """A retention in times of the collection. Raises InvalidUsage."""
    if value is None:
        return None
    what = "retention (times behind upper, or None)"
    check_own(value, what)
    if is_duration(value):
        return Times(schema.times, clock_ms).distance(value, what)
    return parse_integer(value, what, 0, MAX_TIME)


def parse_hash_columns(names: object) -> list[str]:
    """A list of different names. Raises InvalidUsage."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence) or not names:
        raise InvalidUsage(f"hash_columns must be a list of key columns: got {shown(names)}", hash_columns=names)
    if not all(isinstance(name, str) for name in names):
        raise InvalidUsage(f"hash_columns must be names of key columns: got {shown(names)}", hash_columns=names)
    if len(set(names)) != len(names):
        raise InvalidUsage(f"hash_columns must differ: got {shown(names)}", hash_columns=names)
    return [str(name) for name in names]


def _of_key(schema: Schema, names: list[str]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in schema.key_names]:
        raise InvalidUsage(
            f"hash_columns must be key columns, so that all rows of a key are in one shard: {shown(unknown[0])} is "
            f"none. {did_you_mean(unknown[0], schema.key_names)}The key columns are {schema.key_names}",
            hash_columns=names,
        )
    return tuple(name for name in schema.key_names if name in names)


def parse_hold(hold: object) -> str:
    """The name of a hold that is the callers' own. Raises InvalidUsage."""
    name = parse_hold_name(hold)
    if name == HOLD:
        raise InvalidUsage(
            f"the hold {HOLD!r} keeps a collection's history by its retention: change it with alter(retention=)"
        )
    if name == NAMED:
        raise InvalidUsage(
            f"the hold {NAMED!r} is for readers by the name of a shard that was promoted: choose another"
        )
    if name.startswith(HOLDS):
        raise InvalidUsage(f"holds whose names start with {HOLDS!r} are those of copies: choose another name")
    return name


def check_same(known: CommandRecord, what: str, collection: str | None, asked: dict[str, Any]) -> None:
    """Raise InvalidUsage unless a command that is known by this id is the same one."""
    same = {name: known.asked.get(name) for name in asked}
    if known.what != what or same != asked or collection not in {None, known.collection}:
        raise InvalidUsage(
            f"the command id {known.id!r} was used for another command ({known.what}): take a fresh id for each "
            "command. Nothing was changed",
            command=known.id,
        )
