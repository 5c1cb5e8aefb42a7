"""Changes of a table become updates of its collection: rows inserted, updated and deleted, and the table emptied.

Pure, and as if each time were processed alone, in order. The state is what the output has as of just before: from there
come values that PostgreSQL did not send because they did not change, and what a truncated table had.

A row with a value that its column cannot hold is an error, and not in the output: neither is the row that it replaces.

Of a table without a primary key the log has the rows whole, those that go as well. So such a row takes itself away, and
nothing has to be known of the state before the table is emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.convert.lines.debezium import DELETES
from persist_lib.convert.lines.file_columns import Sifted, defaults_of
from persist_lib.kernel.columns import Flags, array_of, integers, joined, mask_of
from persist_lib.kernel.keyset import distinct
from persist_lib.kernel.order import sort_order, take
from persist_lib.schema.schema import DIFF_FIELD, Schema
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.postgres.columns import changed, check_added, header_of, places_of
from persist_lib.sources.postgres.tuples import Texts, changed_texts, choose, copied_texts, flags_of, slices, typed

Rows = npt.NDArray[np.int64]
LookupAll = Callable[[pa.Table | None], pa.Table]
"""Makes of keys their rows as of just before the first time; of None, all rows."""
UNKNOWN = "a value that did not change was not sent, and is not known, as the row before this one was bad"


class Tuples(NamedTuple):
    """The messages' rows with their types. `new` has all columns of messages, `old` those of the key.

    `bad` says why a row cannot be: `bad_new` of the whole row, `bad_key` of its key, `bad_old` of the old key.
    """

    has_new: Flags
    has_old: Flags
    empties: Flags
    new: pa.Table
    unchanged: dict[str, Flags]
    old: pa.Table
    bad: dict[int, str]
    bad_new: Flags
    bad_key: Flags
    bad_old: Flags


FLAGS = ("has_new", "has_old", "empties", "bad_new", "bad_key", "bad_old")


class Events(NamedTuple):
    """What happens to keys, in order: rows are set, or taken away. `message` is the number of the message of each."""

    keys: pa.Table
    message: Rows
    deletes: Flags


def decode_table(
    decoding: Decoding, decoded: Schema, schema: Schema, messages: pa.Table, lookup: LookupAll
) -> tuple[Sifted, pa.Table]:
    """Decode messages to rows, which may delete their key's row, in the order of what happens; and the state.

    `decoded` has the columns of messages, `schema` is the output's. Raises SchemaChanged.
    """
    found = _tuples(decoding, decoded, schema, messages, keyless=False)
    events = _events(found, schema.key_names)
    if found.empties.any():
        old = lookup(None)
        events = _with_emptied(events, np.flatnonzero(found.empties), old.select(schema.key_names))
    elif events.keys.num_rows:
        old = lookup(take(events.keys, distinct([joined(column) for column in events.keys.columns])))
    else:
        old = schema.contents.empty_table()
    events, sources = _sources(events, found, old.select(schema.key_names), schema.key_names)
    columns = []
    for field in decoded.data:
        if field.name in schema.key_names:
            columns.append(joined(events.keys.column(field.name)))
            continue
        places = sources.get(field.name)
        mine = joined(found.new.column(field.name))
        if places is None:
            columns.append(mine.take(pa.array(events.message, mask=events.deletes)))
            continue
        both = pa.concat_arrays([joined(old.column(field.name)).cast(field.type), mine])
        columns.append(both.take(pa.array(places, mask=events.deletes)))
    rows = pa.table(columns, names=decoded.names).append_column(DELETES, mask_of(events.deletes))
    return Sifted(rows, events.message, dict(sorted(found.bad.items()))), old


def decode_rows(decoding: Decoding, decoded: Schema, schema: Schema, messages: pa.Table, lookup: LookupAll) -> Sifted:
    """Decode messages of a table without a primary key to rows that come and that go, as their `_diff` says.

    Raises SchemaChanged, also where the log has a row not whole.
    """
    found = _tuples(decoding, decoded, schema, messages, keyless=True)
    events = _events(found, decoded.names)
    if found.empties.any():
        before = lookup(None).select(decoded.names)
        events = _with_emptied(events, np.flatnonzero(found.empties), before, undoes=True)
    diffs = array_of(np.where(events.deletes, -1, 1))
    return Sifted(events.keys.append_column(DIFF_FIELD, diffs), events.message, dict(sorted(found.bad.items())))


def _tuples(decoding: Decoding, decoded: Schema, schema: Schema, messages: pa.Table, *, keyless: bool) -> Tuples:
    """Read the messages, in pieces that have the same header."""
    values, headers = joined(messages.column("value")), joined(messages.column("header"))
    which = np.asarray(headers.indices)
    bounds = [0, *(np.flatnonzero(which[1:] != which[:-1]) + 1).tolist(), len(values)]
    found, defaults = [], defaults_of(schema)
    for start, end in pairwise(bounds):
        header = header_of(headers[start].as_py())
        places = places_of(decoded, None if keyless else schema.key_names, decoding, header)
        if isinstance(places, str):
            raise changed(_where(messages, start), places)
        if decoding.extra == "add":
            check_added(decoding, decoded, header, partial(_beyond, messages, start, end))
        for low, high in slices(values.slice(start, end - start)):
            some = values.slice(start + low, high - low)
            texts = (copied_texts if header.copied else changed_texts)(some, len(header.columns))
            if keyless and (part := (texts.has_old | texts.is_update) & ~texts.is_whole).any():
                raise changed(_where(messages, start + low + int(np.argmax(part))), "its rows are not whole in the log")
            found.append(_typed(decoded, None if keyless else schema.key_names, defaults, texts, places, start + low))
    bad = {n: why for one in found for n, why in one.bad.items()}
    flags = {name: np.concatenate([getattr(one, name) for one in found]) for name in FLAGS}
    unchanged = {name: np.concatenate([one.unchanged[name] for one in found]) for name in decoded.names}
    new, old = (pa.concat_tables([getattr(one, name) for one in found]) for name in ("new", "old"))
    return Tuples(new=new, old=old, unchanged=unchanged, bad=bad, **flags)


def _where(messages: pa.Table, place: int) -> str:
    first = {name: messages.column(name)[place].as_py() for name in ("partition", "address")}
    return f"{first['partition']} at {first['address']}"


def _beyond(messages: pa.Table, start: int, end: int, address: int) -> str | None:
    """Where the first of these messages is that comes behind an address."""
    behind = np.flatnonzero(integers(messages.column("address").slice(start, end - start)) > address)
    return _where(messages, start + int(behind[0])) if len(behind) else None


def _typed(
    decoded: Schema, key: list[str] | None, defaults: Mapping[str, pa.Scalar], texts: Texts, places: list[int | None],
    first: int,
) -> Tuples:  # fmt: skip
    """Make values of texts. What an update does not send and the old row has is taken from there.

    Without a `key` all columns are those of the old row, and each may be null.
    """
    count = len(texts.has_new)
    bad: dict[int, str] = {}
    none, nothing = np.zeros(count, np.bool_), pa.nulls(count, pa.large_binary())
    bad_new, bad_key, bad_old = none.copy(), none.copy(), none.copy()
    new, old, unchanged = [], [], {}
    for field, place in zip(decoded.data, places, strict=True):
        is_old, is_key = key is None or field.name in key, key is not None and field.name in key
        mine, before = (nothing, nothing) if place is None else (texts.new[place], texts.old[place])
        missing = none if place is None else texts.unchanged[place]
        known = missing & (texts.has_old if is_old else texts.is_whole)
        column, wrong = typed(field, choose(known, before, mine))
        if place is None and field.name in defaults:  # older than the column
            column = pc.if_else(mask_of(texts.has_new), defaults[field.name], column)
        unchanged[field.name] = missing & ~known
        if is_key:
            absent = texts.has_new & ~unchanged[field.name] & np.asarray(pc.is_null(column)) & ~flags_of(count, wrong)
            wrong |= dict.fromkeys(np.flatnonzero(absent).tolist(), f"column {field.name}: a key cannot be null")
            unsent = np.flatnonzero(unchanged[field.name]).tolist()
            wrong |= dict.fromkeys(unsent, f"column {field.name}: no key was sent")
        if is_old:
            was, wrong_old = typed(field, before)
            if place is None and field.name in defaults:
                was = pc.if_else(mask_of(texts.has_old), defaults[field.name], was)
            bad_key |= flags_of(count, wrong)
            bad_old |= flags_of(count, wrong_old)
            wrong = wrong_old | wrong if is_key else wrong  # a row without a key that goes was bad when it came
            old.append(was)
        bad_new |= flags_of(count, wrong) & texts.has_new
        for index, why in wrong.items():
            bad.setdefault(first + index, why)
        new.append(column)
    keys = [name for name in decoded.names if key is None or name in key]
    return Tuples(
        texts.has_new, texts.has_old, texts.empties, pa.table(new, names=decoded.names), unchanged,
        pa.table(old, names=keys), bad, bad_new, bad_key, bad_old,
    )  # fmt: skip


def _events(found: Tuples, key_names: list[str]) -> Events:
    """An old key goes, then the new row comes."""
    sets, goes = np.flatnonzero(found.has_new & ~found.bad_key), np.flatnonzero(found.has_old & ~found.bad_old)
    order = np.argsort(np.concatenate([2 * goes, 2 * sets + 1]), kind="stable")
    keys = pa.concat_tables([
        found.old.select(key_names).take(pa.array(goes)), found.new.select(key_names).take(pa.array(sets)),
    ])  # fmt: skip
    deletes = np.concatenate([np.ones(len(goes), np.bool_), found.bad_new[sets]])
    return Events(keys.take(pa.array(order)), np.concatenate([goes, sets])[order], deletes[order])


def _with_emptied(events: Events, emptied: Rows, before: pa.Table, *, undoes: bool = False) -> Events:
    """Where the table was emptied, all keys go that it had or that came since.

    What `undoes` this takes away each row that came, as often as it did, and none that went.
    """
    keys, message, deletes = [], [], []
    start = 0
    for at in emptied.tolist():
        end = int(np.searchsorted(events.message, at))
        some = events.keys.slice(start, end - start)
        gone = pa.concat_tables([before.cast(some.schema), some])
        keys += [some, gone]
        message += [events.message[start:end], np.full(gone.num_rows, at)]
        came = ~events.deletes[start:end] if undoes else np.ones(end - start, np.bool_)
        deletes += [events.deletes[start:end], np.ones(before.num_rows, np.bool_), came]
        start, before = end, before.slice(0, 0)
    keys.append(events.keys.slice(start))
    return Events(
        pa.concat_tables(keys), np.concatenate([*message, events.message[start:]]),
        np.concatenate([*deletes, events.deletes[start:]]),
    )  # fmt: skip


def _sources(events: Events, found: Tuples, before: pa.Table, key_names: list[str]) -> tuple[Events, dict[str, Rows]]:
    """Where values come from that were not sent: by column, the number of a row of the state, or beyond, of a message.

    Only columns are answered of which there are such values. Those rows for which nothing is there become deletes.
    """
    count, offset = len(events.message), before.num_rows
    missing = {
        name: flags[events.message] & ~events.deletes
        for name, flags in found.unchanged.items()
        if name not in key_names and flags.any()
    }
    if not missing:
        return events, {}
    former = _former(events, before, found.has_old)
    is_needed = np.zeros(offset + count + 1, np.bool_)
    is_needed[offset:-1] = np.logical_or.reduce(list(missing.values()))
    # The last place stands for a row that is not there.
    gone = np.concatenate([np.zeros(offset, np.bool_), events.deletes, [True]])
    lost = gone[_last(is_needed, former)][offset:-1] & ~events.deletes
    for index in events.message[lost].tolist():
        found.bad.setdefault(index, UNKNOWN)
    events = events._replace(deletes=events.deletes | lost)
    rows = np.concatenate([np.arange(offset), offset + events.message, [0]])
    sources = {}
    for name, flags in missing.items():
        needs = np.concatenate([np.zeros(offset, np.bool_), flags, [False]])
        sources[name] = rows[_last(needs, former)][offset:-1]
    return events, sources


def _former(events: Events, before: pa.Table, has_old: Flags) -> Rows:
    """Of each row of the state and each event, which one was there before it under the key; the last place for none.

    A row that comes under another key follows the one that its old key had.
    """
    both = pa.concat_tables([before.cast(events.keys.schema), events.keys])
    order, ties = sort_order([joined(column) for column in both.columns])
    total = both.num_rows
    former = np.full(total + 1, total)
    places = np.flatnonzero(ties) + 1
    former[order[places]] = order[places - 1]
    # An old key goes just before its message's new row comes.
    offset = before.num_rows
    moves = np.flatnonzero((events.message[1:] == events.message[:-1]) & has_old[events.message[1:]]) + 1
    former[offset + moves] = former[offset + moves - 1]
    return former


def _last(needs: Flags, former: Rows) -> Rows:
    """Go back from each place that needs another one until one does not. Each round goes twice as far."""
    places = np.where(needs, former, np.arange(len(needs)))
    while True:
        further = places[places]
        if (further == places).all():
            return places
        places = further
