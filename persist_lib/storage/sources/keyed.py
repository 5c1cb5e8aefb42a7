"""Messages with a key and a value become rows: the key columns come from the key, all others from the value. Pure."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.kernel.columns import Rows, array_of, joined
from persist_lib.schema.schema import Column, Schema
from persist_lib.storage.sources.declared import Decoding
from persist_lib.storage.sources.decoding import DELETES, Decoded, decode, others


def decode_keyed(decoding: Decoding, schema: Schema, messages: pa.Table, *, deletes: bool) -> Decoded:
    """Decode messages. With `deletes`, one without a value takes its key's row away, as the column `_deletes` says.

    The fields of the key may be in the value too. Then they say nothing there.
    """
    values = joined(messages.column("value"))
    is_deletion = np.asarray(pc.is_null(values)) & deletes
    if "problem" in messages.column_names:
        is_deletion &= np.asarray(pc.is_null(joined(messages.column("problem"))))
    keys = _keys(decoding, schema, messages)
    found = _values(decoding, schema, messages, np.flatnonzero(~is_deletion))
    has_key, has_rest = np.zeros(len(values), np.bool_), is_deletion.copy()
    has_key[keys.lines] = has_rest[found.lines] = True
    both = np.flatnonzero(has_key & has_rest)
    key_rows = keys.rows.take(array_of(np.searchsorted(keys.lines, both)))
    # A deletion is the row of no message: its values are null.
    at = np.searchsorted(found.lines, both)
    is_there = ~is_deletion[both]
    rows = found.rows.take(pa.array(at, mask=~is_there))
    columns = [(key_rows if name in schema.key_names else rows).column(name) for name in schema.names]
    table = pa.table([*columns, pa.array(~is_there)], names=[*schema.names, DELETES])
    return Decoded(table, both, dict(sorted({**found.bad, **keys.bad}.items())))


def _keys(decoding: Decoding, schema: Schema, messages: pa.Table) -> Decoded:
    count = messages.num_rows
    keys = joined(messages.column("key")) if "key" in messages.column_names else pa.nulls(count, pa.binary())
    of_key = [column for column in schema.columns if column.name in schema.key_names]
    if decoding.key == "json" and len(of_key) == 1:
        opening = msgspec.json.encode({decoding.source(of_key[0].name): 0}).removesuffix(b"0}")
        is_object = pc.equal(pc.binary_slice(keys, 0, 1), b"{")
        keys = pc.if_else(is_object, keys, pc.binary_join_element_wise(opening, keys, b"}", b""))
    how = msgspec.structs.replace(decoding, decoder=decoding.key or "json", key=None)
    found = decode(how, Schema(key=of_key), pa.table({"value": keys}))
    bad = {n: f"the key: {why}" if keys[n].is_valid else "there is no key" for n, why in found.bad.items()}
    if len(found.lines) + len(bad) < count:
        bad |= dict.fromkeys(others(count, [*found.lines.tolist(), *bad]).tolist(), "the key is empty")
    return Decoded(found.rows, found.lines, bad)


def _values(decoding: Decoding, schema: Schema, messages: pa.Table, places: Rows) -> Decoded:
    columns = [column for column in schema.columns if column.name not in schema.key_names]
    if decoding.decoder == "json":
        columns += [Column(one.name, one.type) for one in schema.columns if one.name in schema.key_names]
    if not columns:
        return Decoded(pa.table({}), places, {})
    how = msgspec.structs.replace(decoding, key=None)
    found = decode(how, Schema(key=columns), messages.take(array_of(places)))
    return Decoded(found.rows, places[found.lines], {int(places[n]): why for n, why in found.bad.items()})
