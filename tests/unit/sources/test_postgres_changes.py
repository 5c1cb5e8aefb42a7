"""Changes of a table as updates: beside a plain loop, however they are cut into windows."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, SchemaChanged
from persist_lib.kernel.columns import array_of, packed
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.postgres.columns import Column, Header, arrow_type, fits
from persist_lib.sources.postgres.snapshot import Beginning, Snapshot, copied_messages
from persist_lib.sources.postgres.tuples import typed
from tests.unit.sources.messages import applied

SCHEMA = persist.Schema(key={"id": "int32 not null"}, value={"word": "string", "count": "int64"}, times="ms")
WHOLE = persist.Schema(key={"id": "int32", "word": "string", "count": "int64"}, times="ms")
INT4, INT8, TEXT = 23, 20, 25
COLUMNS = (Column("id", INT4, -1, True), Column("word", TEXT, -1, False), Column("count", INT8, -1, False))
HEADER = Header(COLUMNS)
KEYLESS = Header(tuple(column._replace(is_key=True) for column in COLUMNS))
UNCHANGED = object()
Values = Sequence[object]
Message = tuple[bytes, bool]


def row_bytes(values: Values) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is UNCHANGED:
            parts.append(b"u")
        elif value is None:
            parts.append(b"n")
        else:
            text = str(value).encode()
            parts.append(b"t" + struct.pack(">I", len(text)) + text)
    return b"".join(parts)


def insert(*values: object) -> bytes:
    return b"I" + struct.pack(">I", 7) + b"N" + row_bytes(values)


def update(*values: object, key: object = None, whole: Values | None = None) -> bytes:
    old = b""
    if whole is not None:
        old = b"O" + row_bytes(whole)
    elif key is not None:
        old = b"K" + row_bytes([key, None, None])
    return b"U" + struct.pack(">I", 7) + old + b"N" + row_bytes(values)


def delete(key: object) -> bytes:
    return b"D" + struct.pack(">I", 7) + b"K" + row_bytes([key, None, None])


TRUNCATE = b"T" + struct.pack(">IBI", 1, 0, 7)


def messages(values: Sequence[bytes], times: Sequence[int], headers: Sequence[Header] | None = None) -> pa.Table:
    texts = [header.text() for header in headers or [HEADER] * len(values)]
    return pa.table({
        "address": array_of(np.arange(len(values), dtype=np.uint64) + 100),
        "value": pa.array(values, pa.binary()),
        "header": pa.array(texts).dictionary_encode(),
        "partition": pa.array(["t"] * len(values)).dictionary_encode(),
        "_time": pa.array(times, pa.uint64()),
    })  # fmt: skip


class Output:
    """What an output has, window after window."""

    def __init__(self, *, keyless: bool = False, **options: Any) -> None:
        decoding = Decoding(decoder="pgoutput", **{"extra": "ignore", **options})
        schema, self.keyless = WHOLE if keyless else SCHEMA, keyless
        self.pipeline = Pipeline(decoding, Meaning(envelope="changes"), schema, keyless=keyless)
        self.rows: Counter[tuple[object, ...]] = Counter()
        self.history: list[tuple[int, tuple[object, ...], int]] = []
        self.errors: list[tuple[int, str]] = []

    def lookup(self, keys: pa.Table | None) -> pa.Table:
        wanted = None if keys is None else set(keys.column("id").to_pylist())
        assert self.keyless or min(self.rows.values(), default=1) == 1
        rows = [row for row in self.rows.elements() if wanted is None or row[0] in wanted]
        columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(SCHEMA.data)]
        return pa.table([*columns, pa.array([1] * len(rows), pa.int64())], names=[*SCHEMA.names, "_diff"])

    def apply(self, table: pa.Table) -> None:
        made = applied(self.pipeline, table, self.lookup)
        for one in made.output.to_pylist():
            row = (one["id"], one["word"], one["count"])
            self.history.append((int(one["_time"]), row, one["_diff"]))
            self.rows[row] += one["_diff"]
        self.rows = +self.rows
        self.errors += [(one["address"], one["reason"]) for one in made.errors.to_pylist()]


def plain(values: Mapping[object, tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    return Counter(values.values())


class Table:
    """A table that writes the log of what is done to it."""

    def __init__(self, dice: random.Random, *, full: bool) -> None:
        self.dice, self.full = dice, full
        self.rows: dict[object, tuple[object, ...]] = {}
        self.log: list[bytes] = []

    def act(self) -> None:
        dice, id_ = self.dice, self.dice.randrange(6)
        what = dice.random()
        if what < 0.03:
            self.rows.clear()
            self.log.append(TRUNCATE)
        elif id_ not in self.rows:
            self.rows[id_] = (id_, dice.choice(["a", "", None, "ü\n"]), dice.choice([None, 1, -(2**63)]))
            self.log.append(insert(*self.rows[id_]))
        elif what < 0.3:
            gone = self.rows.pop(id_)
            self.log.append(b"D" + struct.pack(">I", 7) + b"O" + row_bytes(gone) if self.full else delete(id_))
        else:
            old = self.rows.pop(id_)
            new_id = id_ if what < 0.7 else next(n for n in range(7) if n not in self.rows)
            sent = (UNCHANGED if old[1] is not None and dice.random() < 0.5 else "w", dice.randrange(9))
            new = (new_id, old[1] if sent[0] is UNCHANGED else sent[0], sent[1])
            self.rows[new_id] = new
            key = id_ if new_id != id_ else None
            self.log.append(update(new_id, *sent, whole=old) if self.full else update(new_id, *sent, key=key))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_changes_make_the_table_at_every_time_however_they_are_cut(seed: int, full: bool) -> None:
    dice = random.Random(seed)
    table, times, truth = Table(dice, full=full), list[int](), dict[int, Counter[tuple[object, ...]]]()
    time = 1000
    for _ in range(60):
        table.act()
        times.append(time)
        truth[time] = plain(table.rows)
        time += dice.random() < 0.4
    whole, cut = Output(), Output()
    every = messages(table.log, times)
    whole.apply(every)
    bounds = sorted(
        {0, len(times), *(n for n in range(1, len(times)) if times[n] != times[n - 1] and dice.random() < 0.3)}
    )
    for start, end in pairwise(bounds):
        cut.apply(every.slice(start, end - start))
    assert whole.errors == cut.errors == []
    assert sorted(whole.history, key=repr) == sorted(cut.history, key=repr)
    for at, rows in truth.items():
        found: Counter[tuple[object, ...]] = Counter()
        for when, row, diff in whole.history:
            if when <= at:
                found[row] += diff
        assert +found == rows
        assert min(found.values(), default=0) >= 0


def deleted(*values: object) -> bytes:
    return b"D" + struct.pack(">I", 7) + b"O" + row_bytes(values)


class Bag:
    """A table without a primary key that writes the log of what is done to it."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.rows: list[tuple[object, ...]] = []
        self.log: list[bytes] = []

    def row(self) -> tuple[object, ...]:
        dice = self.dice
        return dice.choice([None, 1, 2]), dice.choice(["a", None]), dice.choice([None, 5])

    def act(self) -> None:
        what = self.dice.random()
        if what < 0.04:
            self.rows.clear()
            self.log.append(TRUNCATE)
        elif what < 0.5 or not self.rows:
            self.rows.append(self.row())
            self.log.append(insert(*self.rows[-1]))
        elif what < 0.75:
            self.log.append(deleted(*self.rows.pop(self.dice.randrange(len(self.rows)))))
        else:
            place, new = self.dice.randrange(len(self.rows)), self.row()
            old, sent = self.rows[place], list(new)
            if new[1] == old[1] is not None:
                sent[1] = UNCHANGED
            self.rows[place] = new
            self.log.append(update(*sent, whole=old))


@pytest.mark.parametrize("seed", range(40))
def test_rows_without_a_key_are_counted_at_every_time_however_changes_are_cut(seed: int) -> None:
    dice = random.Random(seed)
    bag, times, truth = Bag(dice), list[int](), dict[int, Counter[tuple[object, ...]]]()
    time = 1000
    for _ in range(60):
        bag.act()
        times.append(time)
        truth[time] = Counter(bag.rows)
        time += dice.random() < 0.4
    whole, cut = Output(keyless=True), Output(keyless=True)
    every = messages(bag.log, times, [KEYLESS] * len(times))
    whole.apply(every)
    for start in range(len(times)):
        if start == 0 or times[start] != times[start - 1]:
            cut.apply(every.slice(start, times.count(times[start])))
    assert whole.errors == cut.errors == []
    assert sorted(whole.history, key=repr) == sorted(cut.history, key=repr)
    for at, rows in truth.items():
        found: Counter[tuple[object, ...]] = Counter()
        for when, row, diff in whole.history:
            if when <= at:
                found[row] += diff
        assert +found == rows
        assert min(found.values(), default=0) >= 0


def test_a_bad_row_without_a_key_is_an_error_when_it_comes_and_nothing_when_it_goes() -> None:
    log = [
        insert(1, "a", "oops"),
        update(1, UNCHANGED, 5, whole=(1, "a", "oops")),
        update(1, "b", "no", whole=(1, "a", 5)),
    ]
    output = Output(keyless=True)
    output.apply(messages([*log, deleted(1, "b", "no")], [10, 20, 30, 40], [KEYLESS] * 4))
    assert [address for address, _ in output.errors] == [100, 102]
    assert output.history == [(20, (1, "a", 5), 1), (30, (1, "a", 5), -1)]


@pytest.mark.parametrize("message", [update(1, "a", 5), update(1, "a", 5, key=2), delete(1)])
def test_a_change_without_the_whole_row_that_goes_stops_a_source_of_a_table_without_a_key(message: bytes) -> None:
    output = Output(keyless=True)
    with pytest.raises(SchemaChanged, match="t at 101 on its rows are not whole in the log"):
        output.apply(messages([insert(1, "a", 5), message], [10, 20], [KEYLESS] * 2))
    with pytest.raises(SchemaChanged, match="told apart by"):
        output.apply(messages([insert(1, "a", 5)], [10]))
    assert not output.rows


@pytest.mark.parametrize("cut", [False, True])
def test_a_row_that_is_bad_is_an_error_and_not_in_the_output_until_it_is_whole_again(cut: bool) -> None:
    log = [
        insert(1, "a", 5), update(1, "b", "oops"), update(1, UNCHANGED, 6), update(1, UNCHANGED, 7),
        update(1, "c", 8), update(1, UNCHANGED, 9), update(2, UNCHANGED, 10, key=1),
    ]  # fmt: skip
    table = messages(log, [10, 20, 30, 40, 50, 60, 70])
    output = Output()
    for start in range(0, len(log), 1 if cut else len(log)):
        output.apply(table.slice(start, 1 if cut else len(log)))
    assert [address for address, _ in output.errors] == [101, 102, 103]
    assert "'oops' is no int64" in output.errors[0][1]
    assert "not known" in output.errors[1][1]
    assert output.rows == {(2, "c", 10): 1}
    assert [when for when, _, diff in output.history if diff == -1] == [20, 60, 70]


def test_a_copy_is_read_exactly() -> None:
    header = Header(COLUMNS, copied=True)
    lines = [b'"1","a ""b"",\n\\N",\n', b'"2","","-5"\n', b'"3",,"7"\n', b'"4","\r\n",\n', b'"5","\xc3\xbc",\n']
    output = Output()
    output.apply(messages(lines, [1] * 5, [header] * 5))
    rows = [(1, 'a "b",\n\\N', None), (2, "", -5), (3, None, 7), (4, "\r\n", None), (5, "ü", None)]
    assert output.rows == Counter(rows)
    assert not output.errors


def test_a_snapshot_of_an_earlier_release_is_read_as_that_of_its_one_table() -> None:
    beginning = b'{"lsn":9,"check":"1 1 7","header":{"columns":[["id",23,-1,true]],"copied":true}}'
    lines = packed(pa.table({"line": pa.array([b'"1"\n', b'"2"\n'])}), "zstd")
    chosen = Snapshot(msgspec.json.decode(beginning, type=Beginning), iter([lines]))
    (found,) = copied_messages(chosen, ["public.t"])
    rows = [tuple(row[name] for name in ("partition", "address", "value")) for row in found.to_pylist()]
    assert rows == [("public.t", 8, b'"1"\n'), ("public.t", 8, b'"2"\n')]
    assert msgspec.json.encode(chosen.beginning) == beginning


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ((COLUMNS[0], COLUMNS[1]), "no column 'count'"),
        ((COLUMNS[0], COLUMNS[1], Column("count", TEXT, -1, False)), "'count' is string, and int64 is declared"),
        ((COLUMNS[0], Column("word", TEXT, -1, True), COLUMNS[2]), "told apart by"),
        ((COLUMNS[0]._replace(is_key=False), *COLUMNS[1:]), "told apart by"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_any_more_stops_the_source(columns: tuple[Column, ...], said: str) -> None:
    values = ["1", "2", "3"][: len(columns)]
    table = messages([insert(9, "x", 1), insert(*values)], [10, 20], [HEADER, Header(columns)])
    output = Output()
    with pytest.raises(SchemaChanged, match=said) as raised:
        output.apply(table)
    assert "t at 101" in str(raised.value)
    assert not output.rows


def test_columns_that_came_are_left_out_or_refused_and_those_that_went_are_null_if_that_is_declared() -> None:
    wider, narrower = Header((*COLUMNS, Column("more", TEXT, -1, False))), Header(COLUMNS[:2])
    log = messages([insert(1, "a", 5), insert(2, "b", 6, "x")], [10, 20], [HEADER, wider])
    output = Output()
    output.apply(log)
    assert output.rows == {(1, "a", 5): 1, (2, "b", 6): 1}
    with pytest.raises(SchemaChanged, match=r"\['more'\]"):
        Output(extra="refuse").apply(log)
    output = Output(missing="null")
    output.apply(messages([insert(1, "a", 5), insert(2, "b")], [10, 20], [HEADER, narrower]))
    assert output.rows == {(1, "a", 5): 1, (2, "b", None): 1}


@pytest.mark.parametrize(
    "message", [b"X123456789", insert(1, "a"), insert(1, "a", 2) + b"x", update(1, "a", 2)[:-1], b"D\0\0\0\7N\0\3nnn"]
)
def test_what_is_no_message_is_not_guessed_at(message: bytes) -> None:
    with pytest.raises(Corrupt):
        Output().apply(messages([insert(5, "b", 1), message], [10, 10]))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            pa.timestamp("us", "UTC"),
            ["2024-01-01 00:00:00.12+00", "0001-01-01 00:00:00+00"],
            ["infinity", "0044-03-15 00:00:00+00 BC"],
        ),
        (pa.timestamp("us"), ["2024-01-01 00:00:00"], ["-infinity", "10000-01-01 00:00:00"]),
        (pa.date32(), ["2024-02-29"], ["infinity"]),
        (pa.decimal128(10, 2), ["1.50", "-0.01", None], ["NaN"]),
        (pa.float64(), ["NaN", "Infinity", "-Infinity", "1e-300"], []),
        (pa.bool_(), ["t", "f", None], []),
        (pa.binary(), ["\\x", "\\x00ff", None], []),
        (pa.string(), ["", "infinity"], [b"\xff"]),
        (pa.int16(), ["-32768"], ["32768"]),
    ],
)
def test_values_are_typed_and_those_that_no_type_has_are_named(
    wanted: pa.DataType, good: list[str | None], bad: list[str | bytes]
) -> None:
    texts = [one.encode() if isinstance(one, str) else one for one in (*good, *bad, *good)]
    column, wrong = typed(pa.field("c", wanted), pa.array(texts, pa.large_binary()))
    assert column.type == wanted
    assert sorted(wrong) == list(range(len(good), len(good) + len(bad)))
    assert column.null_count == len(bad) + 2 * good.count(None)
    assert all("column c" in why for why in wrong.values())


def test_types_of_columns() -> None:
    numeric = 1700
    assert arrow_type(numeric, ((10 << 16) | 2) + 4) == pa.decimal128(10, 2)
    assert arrow_type(numeric, -1) == arrow_type(numeric, ((50 << 16) | 2) + 4) == pa.string()
    assert arrow_type(numeric, ((3 << 16) | (2048 - 2)) + 4) == pa.string(), "a negative scale"
    assert fits(INT4, -1, pa.int64())
    assert not fits(INT8, -1, pa.int32())
    assert fits(INT8, -1, pa.string())
    assert not fits(TEXT, -1, pa.int64())
    assert fits(numeric, ((10 << 16) | 2) + 4, pa.decimal128(12, 4))
    assert not fits(numeric, ((10 << 16) | 4) + 4, pa.decimal128(12, 2))
