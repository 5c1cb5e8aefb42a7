"""What a rendition would change: rows that appear, vanish and change, by column, with samples. It changes nothing.

Both sides are read in key order, all shards of a side as one stream, and cut at the same keys. So it takes bounded
memory, and comparisons of disjoint ranges of keys add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.catalog.records import RenditionRecord
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MINIMUM
from persist_lib.kernel.columns import Flags, array_of, at_time, integers, is_same, joined
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.kernel.merge import merge_contents, pairs
from persist_lib.kernel.order import adjacent_ties, digits_of, take
from persist_lib.relation.projection import by_key
from persist_lib.relation.row_selection import widened
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    from persist_lib.catalog.reader import RenditionReader

SAMPLES = 5
"""How many rows of each kind a comparison shows."""


class Comparison(msgspec.Struct, frozen=True):
    """What leads from the rendition `old` to the rendition `new`, as of one time.

    Rows count as often as they are there. A key `appeared` if only the new side has rows of it, and `vanished` if only
    the old side has. A key whose rows differ `changed`; `columns` says for how many of those that have one row on each
    side which value column differs. `only_old` and `only_new` are value columns that the other side does not have (or
    has with another type); they are not compared. Samples have the first few keys: `appeared` and `vanished` as rows,
    `changed` as `{key…, column: [old, new]}`.
    """

    old: int = 0
    new: int = 0
    as_of: int = 0
    old_rows: int = 0
    new_rows: int = 0
    equal_keys: int = 0
    appeared: int = 0
    vanished: int = 0
    changed: int = 0
    columns: dict[str, int] = {}
    only_old: tuple[str, ...] = ()
    only_new: tuple[str, ...] = ()
    samples: dict[str, list[dict[str, Any]]] = {}

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference in the columns that both sides have."""
        return not (self.appeared or self.vanished or self.changed)

    def __add__(self, other: Comparison) -> Comparison:
        """Both together: of disjoint keys, those of `other` behind."""
        names = dict.fromkeys([*self.columns, *other.columns])
        kinds = dict.fromkeys([*self.samples, *other.samples])
        return Comparison(
            self.old or other.old, self.new or other.new, self.as_of or other.as_of,
            self.old_rows + other.old_rows, self.new_rows + other.new_rows, self.equal_keys + other.equal_keys,
            self.appeared + other.appeared, self.vanished + other.vanished, self.changed + other.changed,
            {name: self.columns.get(name, 0) + other.columns.get(name, 0) for name in names},
            other.only_old or self.only_old, other.only_new or self.only_new,
            {kind: (self.samples.get(kind, []) + other.samples.get(kind, []))[:SAMPLES] for kind in kinds},
        )  # fmt: skip


def common(old: Schema, new: Schema) -> Schema:
    """The columns in which two renditions can be compared. Raises InvalidUsage where their keys differ."""
    if old.key != new.key:
        raise InvalidUsage(
            f"rows are compared by key, and the keys differ: {old} and {new}. Nothing was compared", old=old, new=new
        )
    both = tuple(column for column in old.value if column.name in {other.name for other in new.value})
    types = {column.name: column.type for column in new.value}
    return Schema(key=old.key, value=tuple(column for column in both if types[column.name] == column.type))


def compare_renditions(
    reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, as_of: TimeLike | None, deadline: Deadline,
    progress: Callable[[int], None] | None = None,
) -> Comparison:  # fmt: skip
    """Compare two renditions of the reader's collection as of a time (default: the newest that both have)."""
    sides = [reader.shards_of(record) for record in (old, new)]
    schemas = [side[0].schema for side in sides]
    common(*schemas)
    time = time_to_compare(reader, old, new, as_of)
    with ExitStack() as held:
        runs = [
            [
                held.enter_context(handle.snapshot(time, timeout=deadline.remaining_s(), diff=True)).batches()
                for handle in side
            ]
            for side in sides
        ]
        found = compare(schemas[0], schemas[1], runs[0], runs[1], reader.client.config.merge_bytes, progress)
    return msgspec.structs.replace(found, as_of=time, old=old.number, new=new.number)


def time_to_compare(reader: RenditionReader, old: RenditionRecord, new: RenditionRecord, as_of: TimeLike | None) -> int:
    """The time as of which two renditions are compared: that asked for, or the newest that both have."""
    sides = [reader.shards_of(record) for record in (old, new)]
    if as_of is not None:
        return Times(sides[0][0].schema.times, reader.client.consensus.now).as_of(as_of)
    uppers = [min(handle.fetch_upper() for handle in side) for side in sides]
    least = min(uppers)
    if least <= MINIMUM:
        raise InvalidUsage(
            f"collection {reader.name!r}: rendition {old.number} is complete up to {uppers[0]} and rendition "
            f"{new.number} up to {uppers[1]}, so there is no time to compare them at. Write or copy them first",
            collection=reader.name,
        )
    return least.time - 1 if least.time is not None else reader.newest()


def compare(
    old: Schema, new: Schema, old_runs: Sequence[Iterator[pa.Table]], new_runs: Sequence[Iterator[pa.Table]],
    merge_bytes: int, progress: Callable[[int], None] | None = None,
) -> Comparison:  # fmt: skip
    """Compare two contents. Runs are tables of these schemas' `contents`, each run in key order.

    `progress` is called with the number of rows of both sides that are compared so far.
    """
    schema = common(old, new)
    sides = (_one(old, schema, old_runs, merge_bytes), _one(new, schema, new_runs, merge_bytes))
    total = Comparison(
        columns={column.name: 0 for column in schema.value},
        only_old=tuple(c.name for c in old.value if c.name not in schema.names),
        only_new=tuple(c.name for c in new.value if c.name not in schema.names),
        samples={"appeared": [], "vanished": [], "changed": []},
    )
    empty = empty_table(schema.updates)
    for was, is_ in pairs(*sides, schema.key_names, empty):
        total += _compared(schema, was.drop_columns([TIME]), is_.drop_columns([TIME]))
        if progress is not None:
            progress(total.old_rows + total.new_rows)
    return total


def _one(found: Schema, schema: Schema, runs: Sequence[Iterator[pa.Table]], merge_bytes: int) -> Iterator[pa.Table]:
    """The runs as one stream, in the columns of `schema`, in its order."""
    narrow = [in_columns(run, found, schema) for run in runs]
    timed = [(at_time(table, 0) for table in run) for run in narrow]
    return (at_time(table, 0) for table in merge_contents(timed, schema, merge_bytes=merge_bytes // 2))


def in_columns(tables: Iterator[pa.Table], found: Schema, schema: Schema) -> Iterator[pa.Table]:
    """Contents of `found` in the columns of `schema`, with the same key, in its order, equal rows added up.

    Columns that `found` does not have are null.
    """
    if found.names == schema.names:
        yield from tables
        return
    wide = (widened(table, schema.contents) for table in tables)
    yield from (table for table in by_key(wide, schema, schema.contents, schema.key) if table.num_rows)


def _compared(schema: Schema, old: pa.Table, new: pa.Table) -> Comparison:
    """Compare the rows of the same keys, each side in order."""
    old_keys, new_keys = Keys.of(schema, old), Keys.of(schema, new)
    appeared, vanished = ~new_keys.found_in(old), ~old_keys.found_in(new)
    both = Keys(schema, take(old_keys.table, np.flatnonzero(~vanished)))
    was, is_ = take(old, both.find(old)), take(new, both.find(new))
    differs = _differing(schema, both, was, is_)
    changed = Keys(schema, take(both.table, np.flatnonzero(differs)))
    columns, samples = _by_column(schema, changed, was, is_)
    gone = Keys(schema, take(old_keys.table, np.flatnonzero(vanished)))
    come = Keys(schema, take(new_keys.table, np.flatnonzero(appeared)))
    return Comparison(
        0, 0, 0, _rows(old), _rows(new), len(both) - len(changed), len(come), len(gone), len(changed), columns,
        samples={
            "appeared": take(new, come.find(new)[:SAMPLES]).to_pylist(),
            "vanished": take(old, gone.find(old)[:SAMPLES]).to_pylist(), "changed": samples,
        },
    )  # fmt: skip


def _rows(table: pa.Table) -> int:
    return int(integers(table.column(DIFF)).sum())


def _differing(schema: Schema, keys: Keys, old: pa.Table, new: pa.Table) -> Flags:
    """For each key that both sides have whether its rows differ."""
    if is_same(old, new):
        return np.zeros(len(keys), np.bool_)
    turned = old.set_column(
        old.num_columns - 1, schema.contents.field(DIFF), array_of(np.negative(integers(old.column(DIFF))))
    )
    return keys.found_in(consolidate(schema, pa.concat_tables([turned, new])))


def _by_column(schema: Schema, keys: Keys, old: pa.Table, new: pa.Table) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How many of the changed keys differ in which column, where each side has one row; and the first few of them."""
    counts = {column.name: 0 for column in schema.value}
    was, is_ = take(old, keys.find(old)), take(new, keys.find(new))
    single = _single(schema, keys, was) & _single(schema, keys, is_)
    ones = Keys(schema, take(keys.table, np.flatnonzero(single)))
    left, right = take(was, ones.find(was)), take(is_, ones.find(is_))
    flags: dict[str, Flags] = {}
    for column in schema.value:
        flags[column.name] = _unequal(joined(left.column(column.name)), joined(right.column(column.name)))
        counts[column.name] = int(flags[column.name].sum())
    samples = []
    for index in range(min(SAMPLES, len(ones))):
        row: dict[str, Any] = ones.table.slice(index, 1).to_pylist()[0]
        pair = (left.slice(index, 1).to_pylist()[0], right.slice(index, 1).to_pylist()[0])
        row |= {name: [side[name] for side in pair] for name in flags if flags[name][index]}
        if pair[0][DIFF] != pair[1][DIFF]:
            row[DIFF] = [side[DIFF] for side in pair]
        samples.append(row)
    return counts, samples


def _single(schema: Schema, keys: Keys, table: pa.Table) -> Flags:
    """For each key whether it has exactly one row in the table, which holds rows of these keys only."""
    if not len(keys):
        return np.zeros(0, np.bool_)
    ties = adjacent_ties([joined(table.column(name)) for name in schema.key_names])
    if ties is None:
        raise AssertionError("rows out of order")
    starts = np.flatnonzero(np.concatenate([[True], ~ties]))
    return np.diff(np.append(starts, table.num_rows)) == 1


def _unequal(left: pa.Array, right: pa.Array) -> Flags:
    """Where two columns differ, by their bits: nulls are equal to nulls, NaN to NaN, and 0.0 is not -0.0."""
    if not len(left):
        return np.zeros(0, np.bool_)
    differs = np.zeros(len(left), np.bool_)
    for digit in digits_of([pa.concat_arrays([left, right])]):
        words = digit(None)
        differs |= words[: len(left)] != words[len(left) :]
    return differs
