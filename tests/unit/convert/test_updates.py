"""The border: what users pass becomes exactly the schema's updates, or an error that says which value of which row."""

# ruff: noqa: DTZ001 - times without a zone are among what is tested

from __future__ import annotations

import datetime as dt
import enum
import math
import subprocess
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from persist_lib.convert import casts
from persist_lib.convert import rows as sources
from persist_lib.convert.updates import Update, check_times, iter_updates
from persist_lib.errors import InvalidUsage, SchemaMismatch
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import parse_type

ORDERS = Schema(key={"order_id": "int64 not null"}, value={"state": "string", "cents": "int64"})
ROW = {"order_id": 1, "state": "new", "cents": 5, "_time": 3, "_diff": 1}
UTC = dt.UTC


def read(schema: Schema, data: object, **defaults: Any) -> pa.Table:
    """All of it as one table; each table must have exactly the schema's columns."""
    tables = list(iter_updates(schema, data, **defaults))
    for table in tables:
        assert table.schema.equals(schema.updates, check_metadata=True)
        assert table.num_rows > 0
        table.validate(full=True)
    return pa.concat_tables(tables) if tables else schema.updates.empty_table()


def column(type_: str, values: Iterable[object]) -> list[Any]:
    """What becomes of one column's values, given as an Arrow array or Python values."""
    schema = Schema(key={"k": type_})
    rows = pa.table({"k": values}) if isinstance(values, pa.Array) else [{"k": value} for value in values]
    return read(schema, rows, time=0).column("k").to_pylist()


def refusal(schema: Schema, data: object, **defaults: Any) -> InvalidUsage:
    with pytest.raises(InvalidUsage) as caught:
        read(schema, data, **defaults)
    return caught.value


# --- every kind of input ---------------------------------------------------------------------------------------------

ROWS = [ROW, {**ROW, "order_id": 2, "state": None, "_diff": -1}]
TABLE = pa.Table.from_pylist(ROWS, schema=ORDERS.updates)


def a_generator() -> Iterator[object]:
    yield ROWS[0]
    yield [ROWS[1]]
    yield TABLE
    yield pd.DataFrame(ROWS)
    yield iter(ROWS)


@pytest.mark.parametrize(
    ("data", "times"),
    [
        (TABLE, 1), (TABLE.to_batches()[0], 1), (TABLE.to_reader(), 1), (TABLE.select(TABLE.column_names[::-1]), 1),
        (TABLE.to_pandas(), 1), (TABLE.to_pandas().set_index(pd.Index([7, 7])), 1),
        (TABLE.to_pandas(types_mapper=pd.ArrowDtype), 1), (TABLE.to_pandas().convert_dtypes(), 1),
        (pl.from_arrow(TABLE), 1), (pl.DataFrame(ROWS).to_struct(), 1), (pl.Series(ROWS), 1),
        (TABLE.to_struct_array().chunk(0), 1), (TABLE.to_struct_array(), 1),
        (ROWS, 1), (tuple(ROWS), 1), (iter(ROWS), 1), ([ROWS, TABLE], 2), (a_generator(), 4),
        (np.array(ROWS, dtype=object), 1),
    ],
)  # fmt: skip
def test_every_kind_of_input_gives_the_same_updates(data, times):
    assert read(ORDERS, data).equals(pa.concat_tables([TABLE] * times))


@pytest.mark.parametrize(
    "data", [[], (), iter(()), {}.values(), TABLE.slice(0, 0), TABLE.to_pandas().iloc[:0],
             pl.from_arrow(TABLE.slice(0, 0)),
             [[], [TABLE.slice(0, 0)]], pd.DataFrame(columns=TABLE.column_names)],
)  # fmt: skip
def test_no_updates_give_no_tables(data):
    assert list(iter_updates(ORDERS, data)) == []


@pytest.mark.parametrize("data", [None, 7, "rows", b"rows", ROW, {"order_id": [1]}, [1], ["x"], [[None]], object(),
                                  pl.DataFrame(ROWS).lazy(), Update({"order_id": 1}), pl.Series([1]),
                                  pl.Series([ROW, None]), pa.array([ROW, None]), pa.array([1]), pa.array(["a"]),
                                  pd.Series([1, 2])])  # fmt: skip
def test_what_is_no_updates_is_refused(data):
    assert refusal(ORDERS, data).problem == "updates"


def test_empty_tables_are_checked_too():
    assert refusal(ORDERS, pl.DataFrame({"x": []})).problem == "extra column"
    assert refusal(ORDERS, pa.table({"order_id": pa.array([], pa.string())}), time=1).problem == "missing column"


def test_an_endless_iterator_is_read_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(sources, "ROWS", 10)
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield ROW

    tables = iter_updates(ORDERS, endless())
    assert [next(tables).num_rows for _ in range(3)] == [10, 10, 10]
    assert len(taken) == 30


def test_rows_are_counted_over_the_whole_input(monkeypatch):
    monkeypatch.setattr(sources, "ROWS", 4)
    assert refusal(ORDERS, [*[ROW] * 9, {**ROW, "cents": "x"}]).row == 9
    assert refusal(ORDERS, [TABLE, TABLE, [{**ROW, "_diff": 0}]]).row == 4


@pytest.mark.slow
def test_rows_need_neither_pandas_nor_polars():
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('pandas', 'polars'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from persist_lib.schema.schema import Schema; from persist_lib.convert.updates import iter_updates\n"
        "schema = Schema(key={'a': 'int64', 'b': 'timestamp'})\n"
        "assert list(iter_updates(schema, [{'a': 1, 'b': None}, {'a': 1.0, 'b': None}], time=0))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- columns, times and diffs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pa.Table.from_pylist, pd.DataFrame, pl.DataFrame, list])
def test_missing_and_extra_columns_are_named(make: Callable[[list[dict[str, object]]], object]):
    missing = refusal(ORDERS, make([{"order_id": 1, "state": "new", "_time": 3}]))
    assert (type(missing), missing.problem, missing.column) == (SchemaMismatch, "missing column", "cents")
    extra = refusal(ORDERS, make([{**ROW, "note": "x"}]))
    assert (type(extra), extra.problem, extra.column) == (SchemaMismatch, "extra column", "note")
    instead = refusal(ORDERS, make([{"order_id": 1, "state": "new", "Cents": 5, "_time": 3, "_diff": 1}]))
    assert (instead.problem, instead.column) == ("extra column", "Cents")


def test_a_column_that_occurs_twice_is_refused():
    arrow = pa.table([*TABLE.columns, TABLE.column(0)], names=[*TABLE.column_names, "order_id"])
    frame = pd.DataFrame([[1, "x", 5, 3, 1, 2]], columns=[*TABLE.column_names, "order_id"])
    for data in (arrow, frame):
        found = refusal(ORDERS, data)
        assert (found.problem, found.column) == ("duplicate column", "order_id")


def test_rows_are_read_while_another_thread_imports_pandas(monkeypatch):
    half = types.ModuleType("pandas")  # what `sys.modules` has until the import is done
    monkeypatch.setitem(sys.modules, "pandas", half)
    table = pa.concat_tables(iter_updates(ORDERS, [TABLE]))
    assert table.num_rows == TABLE.num_rows


def test_a_pandas_column_that_is_not_named_by_text_is_refused():
    assert refusal(ORDERS, pd.DataFrame([[1, 2]], columns=[0, 1])).problem == "extra column"


@pytest.mark.parametrize("make", [pa.Table.from_pylist, pd.DataFrame, pl.DataFrame, list])
def test_without_diff_all_are_plus_one_and_without_time_the_appends_only_time_is_taken(make):
    rows = make([{"order_id": n, "state": "new", "cents": 5} for n in range(3)])
    table = read(ORDERS, rows, time=2**64 - 1)
    assert table.column("_time").to_pylist() == [2**64 - 1] * 3
    assert table.column("_diff").to_pylist() == [1] * 3
    found = refusal(ORDERS, rows)
    assert (found.problem, found.column) == ("missing time", "_time")


def test_times_that_are_given_win_over_the_default():
    assert read(ORDERS, [ROW], time=9).column("_time").to_pylist() == [3]
    assert read(ORDERS, TABLE, time=9).column("_time").to_pylist() == [3, 3]


@pytest.mark.parametrize("bad", [{"time": -1}, {"time": 2**64}, {"time": True}, {"time": 1.0}])
def test_impossible_defaults_are_refused_before_anything_is_read(bad):
    with pytest.raises(InvalidUsage):
        iter_updates(ORDERS, [ROW], **bad)


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.Table.from_pylist, list])
@pytest.mark.parametrize(
    ("name", "values", "problem", "row"),
    [
        ("_diff", [1, 0], "zero diff", 1), ("_diff", [1, None], "null", 1), ("_diff", [1.0, 1.5], "value", 1),
        ("_diff", ["1", "2"], "type", 0), ("_diff", [True, False], "type", 0),
        ("_time", [0, None], "null", 1), ("_time", [0, -1], "value", 1), ("_time", [0.0, 0.5], "value", 1),
        ("_time", [dt.datetime(2020, 1, 1)] * 2, "type", 0),
        ("order_id", [1, None], "null", 1), ("order_id", ["a", "b"], "type", 0), ("order_id", [1.0, 2.5], "value", 1),
        ("order_id", [True, True], "type", 0), ("state", [1, 2], "type", 0), ("state", [b"a", b"b"], "type", 0),
        ("order_id", [2.0**60, 1.0], "value", 0), ("order_id", [math.inf, 1.0], "value", 0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_column_and_row(make, name, values, problem, row):
    data = make([{**ROW, name: value} for value in values])
    found = refusal(ORDERS, data)
    assert (found.problem, found.column, found.row) == (problem, name, row), found
    assert isinstance(found, SchemaMismatch) == (problem == "type")
    assert repr(name) in found.message
    if problem in ("value", "type"):
        assert found.value == values[row]
        assert found.expected


def test_a_diff_beyond_64_bits_is_refused():
    data = TABLE.set_column(4, "_diff", pa.array([1, 2**63], pa.uint64()))
    for there in (data, data.to_pylist(), data.to_pandas(), pl.from_arrow(data)):
        found = refusal(ORDERS, there)
        assert (found.problem, found.column, found.row, found.value) == ("value", "_diff", 1, 2**63)


@pytest.mark.parametrize(
    ("lower", "upper", "row"),
    [(at(0), at(10), None), (at(3), at(9), None), (at(3), TOP, None), (at(4), at(10), 0), (at(0), at(8), 1),
    (TOP, TOP, 0),
     (at(9), at(10), 0)],
)  # fmt: skip
@pytest.mark.parametrize("repeat", [1, 100])
def test_times_must_be_in_the_bounds_of_the_append(lower: Antichain, upper: Antichain, row: int | None, repeat: int):
    table = read(ORDERS, [{**ROW, "_time": time} for time in [3, 8, 5] * repeat])
    if row is None:
        check_times(table, lower, upper)
        return
    with pytest.raises(InvalidUsage) as caught:
        check_times(table, lower, upper)
    found = caught.value
    assert (found.least, found.most, found.lower, found.upper, found.row) == (3, 8, lower, upper, row)
    assert found.value == [3, 8, 5][row]


def test_no_times_are_in_any_bounds():
    check_times(ORDERS.updates.empty_table(), TOP, TOP)
    check_times(TABLE.slice(0, 0), at(10), at(20))


# --- conversions -----------------------------------------------------------------------------------------------------

BIG = 2**53
SECOND = dt.datetime(2020, 1, 1, 0, 0, 1)
AWARE = SECOND.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("string", pa.array(["a", None], pa.large_string())), ("string", pa.array(["a", None], pa.string_view())),
        ("string", pa.array(["a", None, "a"]).dictionary_encode()),
        ("string", pa.array(["a", "a"], pa.large_string()).dictionary_encode()),
        ("string", pc.run_end_encode(pa.array(["a", "a", "b"]))),
        ("binary", pa.array([b"a", None], pa.large_binary())), ("binary", pa.array([b"abc"], pa.binary(3))),
        ("fixed_size_binary[3]", pa.array([b"abc", None])),
        ("fixed_size_binary[3]", pa.array([b"abc"], pa.binary_view())),
        ("int8", pa.array([-128, 127, None])), ("uint64", pa.array([0, 1], pa.int8())),
        ("int64", pa.array([1.0, None, -BIG])),
        ("int64", pa.array([Decimal(7)])), ("int16", pa.array([1.0], pa.float32())),
        ("uint64", pa.array([BIG], pa.float64())),
        ("float64", pa.array([0.5], pa.float16())), ("float64", pa.array([BIG, -1])),
        ("float32", pa.array([0.5, None, -0.0])),
        ("float32", pa.array([1 << 24])), ("decimal128(5, 2)", pa.array([999, -1])),
        ("decimal128(5, 2)", pa.array([Decimal("1.5")], pa.decimal256(50, 3))),
        ("decimal128(20, 0)", pa.array([2**64 - 1], pa.uint64())),
        ("timestamp[s]", pa.array([SECOND], pa.timestamp("us"))),
        ("timestamp[ns]", pa.array([SECOND], pa.timestamp("s"))),
        ("timestamp[us, UTC]", pa.array([AWARE], pa.timestamp("s", "Europe/Berlin"))),
        ("date32", pa.array([dt.date(2020, 1, 1)], pa.date64())),
        ("time64[us]", pa.array([dt.time(1)], pa.time32("s"))), ("time64[us]", pa.array([dt.time(1)], pa.time64("ns"))),
        ("duration[s]", pa.array([dt.timedelta(1)], pa.duration("us"))), ("int64", pa.nulls(2)),
        ("date32", pa.nulls(2)),
    ],
)  # fmt: skip
def test_arrow_columns_of_other_types_become_the_same_values(type_, values):
    assert column(type_, values) == values.to_pylist()


def test_nanoseconds_and_midnights_are_converted_where_exact():
    assert column("date32", pa.array([dt.datetime(2020, 1, 1), None])) == [dt.date(2020, 1, 1), None]
    assert column("date32", [dt.datetime(2020, 1, 1), np.datetime64("2020-01-01"), pd.NaT]) == [
        dt.date(2020, 1, 1)
    ] * 2 + [None]


@pytest.mark.parametrize(
    ("type_", "values", "row"),
    [
        ("int8", pa.array([0, 128]), 1), ("uint8", pa.array([0, 0, -1]), 2),
        ("int64", pa.array([2**63], pa.uint64()), 0),
        ("int64", pa.array([0.0, 0.5]), 1), ("int64", pa.array([BIG * 2.0]), 0), ("int64", pa.array([math.nan]), 0),
        ("int64", pa.array([2.0**25], pa.float32()), 0), ("int64", pa.array([Decimal("1.5")]), 0),
        ("float64", pa.array([BIG + 1]), 0), ("float32", pa.array([0.5, 0.1]), 1), ("float32", pa.array([1e300]), 0),
        ("float32", pa.array([(1 << 24) + 1]), 0), ("decimal128(5, 2)", pa.array([999, 1000]), 1),
        ("decimal128(5, 2)", pa.array([Decimal("1.001")]), 0),
        ("timestamp[s]", pa.array([0, 1], pa.timestamp("us")), 1),
        ("timestamp[ns]", pa.array([2**62], pa.timestamp("s")), 0),
        ("timestamp[us]", pa.array([1000, 1], pa.timestamp("ns")), 1),
        ("date32", pa.array([0, 1], pa.timestamp("s")), 1),
        ("duration[s]", pa.array([1], pa.duration("ms")), 0), ("fixed_size_binary[3]", pa.array([b"abc", b"ab"]), 1),
        ("fixed_size_binary[3]", pa.array([b"abcd"], pa.binary(4)), 0),
        ("time64[us]", pa.array([1], pa.time64("ns")), 0),
    ],
)  # fmt: skip
def test_an_arrow_value_that_does_not_fit_exactly_is_refused_by_row(type_, values, row):
    schema = Schema(key={"k": type_})
    for chunked in (pa.chunked_array([values]), pa.chunked_array([values.slice(0, 1), values.slice(1)])):
        found = refusal(schema, pa.table({"k": chunked}), time=0)
        assert (found.problem, found.column, found.row) == ("value", "k", row)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("int64", pa.array([True])), ("bool", pa.array([1])), ("int64", pa.array(["1"])), ("string", pa.array([1])),
        ("string", pa.array([b"a"])), ("binary", pa.array(["a"])), ("timestamp[us, UTC]", pa.array([SECOND])),
        ("timestamp[us]", pa.array([AWARE])), ("timestamp[us]", pa.array(["2020-01-01"])),
        ("timestamp[us]", pa.array([1])),
        ("int64", pa.array([SECOND])), ("date32", pa.array([AWARE])),
        ("timestamp[us]", pa.array([dt.date(2020, 1, 1)])),
        ("duration[s]", pa.array([1])), ("decimal128(5, 2)", pa.array([0.5])), ("float64", pa.array([Decimal(1)])),
        ("string", pa.array([["a"]])), ("string", pa.array([{"a": 1}])), ("float64", pa.array([True])),
        ("fixed_size_binary[1]", pa.array(["a"])),
        ("string", pa.array(["a"]).cast(pa.large_string()).cast(pa.large_binary())),
    ],
)  # fmt: skip
def test_an_arrow_column_of_another_kind_is_refused(type_, values):
    found = refusal(Schema(key={"k": type_}), pa.table({"k": values}), time=0)
    assert (type(found), found.problem, found.column, found.row) == (SchemaMismatch, "type", "k", 0)
    assert found.expected == str(parse_type(type_))


def test_a_time_without_a_zone_says_what_to_do():
    assert "Say which zone" in refusal(Schema(key={"k": "timestamp"}), [{"k": SECOND}], time=0).message
    assert "Drop the zone" in refusal(Schema(key={"k": "timestamp[us]"}), [{"k": AWARE}], time=0).message


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("type_", "given_", "expected"),
    [
        ("int64", [np.int8(1), np.uint64(2), Level.LOW, 1.0, np.float64(2), pd.NA, None, pa.scalar(3)],
         [1, 2, 1, 1, 2, None, None, 3]),
        ("bool", [np.True_, False, pd.NA], [True, False, None]),
        ("string", [np.str_("a"), Word("b"), None], ["a", "b", None]),
        ("binary", [np.bytes_(b"a"), bytearray(b"b"), memoryview(b"c")], [b"a", b"b", b"c"]),
        ("float64", [np.float32(0.5), 1, np.int64(2), np.float64(0.1)], [0.5, 1.0, 2.0, 0.1]),
        ("float32", [np.float32(0.1), 0.5], [float(np.float32(0.1)), 0.5]),
        ("decimal128(5, 2)", [Decimal("1.5"), 2, np.int8(3)], [Decimal("1.50"), Decimal(2), Decimal(3)]),
        ("timestamp[us]", [SECOND, np.datetime64(SECOND), pd.Timestamp(SECOND), pd.NaT, np.datetime64("NaT")],
         [SECOND] * 3 + [None] * 2),
        ("timestamp[us, UTC]", [AWARE, AWARE.astimezone(dt.timezone(dt.timedelta(hours=5))), pd.Timestamp(AWARE)],
         [AWARE] * 3),
        ("duration[us]", [dt.timedelta(1), np.timedelta64(1, "D"), pd.Timedelta(1, "D"), pd.NaT],
         [dt.timedelta(1)] * 3 + [None]),
    ],
)  # fmt: skip
def test_python_values_in_disguise_become_plain_ones(type_, given_, expected):
    assert column(type_, given_) == expected


def test_nanoseconds_of_numpy_and_pandas_are_kept():
    for type_, zone in (("timestamp[ns]", None), ("timestamp[ns, UTC]", "UTC")):
        values = [pd.Timestamp(1_000_000_001, tz=zone), dt.datetime(1970, 1, 1, tzinfo=UTC if zone else None), None]
        table = read(Schema(key={"k": type_}), [{"k": value} for value in values], time=0)
        assert table.column("k").cast(pa.int64()).to_pylist() == [1_000_000_001, 0, None]
    table = read(Schema(key={"k": "duration[ns]"}), [{"k": np.timedelta64(3, "ns")}, {"k": pd.Timedelta(5)}], time=0)
    assert table.column("k").cast(pa.int64()).to_pylist() == [3, 5]
    assert refusal(Schema(key={"k": "timestamp[us]"}), [{"k": pd.Timestamp(1)}], time=0).problem == "value"


@pytest.mark.parametrize(
    ("type_", "value", "problem"),
    [
        ("int64", True, "type"), ("int64", np.True_, "type"), ("int64", "1", "type"), ("int64", 1.5, "value"),
        ("int64", math.nan, "value"), ("int64", 2**63, "value"), ("uint8", -1, "value"), ("int64", Decimal(1), "type"),
        ("bool", 1, "type"), ("bool", np.int8(1), "type"), ("float64", BIG + 1, "value"), ("float64", 2**70, "value"),
        ("float64", "1", "type"), ("float64", True, "type"), ("float32", 0.1, "value"), ("float32", 1e300, "value"),
        ("string", b"a", "type"), ("string", 1, "type"), ("string", "\ud800", "value"), ("binary", "a", "type"),
        ("string", uuid.UUID(int=1), "type"), ("string", ["a"], "type"), ("string", math.nan, "type"),
        ("fixed_size_binary[2]", b"a", "value"), ("date32", dt.datetime(2020, 1, 1, 1), "type"),
        ("date32", AWARE, "type"),
        ("date32", np.datetime64("2020-01-01T01"), "type"), ("timestamp[us]", dt.date(2020, 1, 1), "type"),
        ("timestamp[us]", AWARE, "type"), ("timestamp", SECOND, "type"), ("timestamp", np.datetime64(SECOND), "type"),
        ("timestamp[us]", 1, "type"), ("timestamp[s]", SECOND.replace(microsecond=1), "value"),
        ("timestamp[ns]", dt.datetime(3000, 1, 1), "value"), ("time64[us]", dt.time(1, tzinfo=UTC), "type"),
        ("time64[us]", SECOND, "type"), ("duration[s]", dt.timedelta(microseconds=1), "value"),
        ("duration[us]", dt.timedelta.max, "value"), ("duration[us]", 1, "type"),
        ("decimal128(5, 2)", Decimal("1.001"), "value"),
        ("decimal128(5, 2)", Decimal(1000), "value"), ("decimal128(5, 2)", Decimal("NaN"), "value"),
        ("decimal128(5, 2)", Decimal("Infinity"), "value"), ("decimal128(5, 2)", 0.5, "type"),
    ],
)  # fmt: skip
def test_a_python_value_that_does_not_fit_exactly_is_refused_by_row(type_, value, problem):
    found = refusal(Schema(key={"k": type_}), [{"k": None}, {"k": value}], time=0)
    assert (found.problem, found.column, found.row) == (problem, "k", 1), found
    assert found.value is value or found.value != found.value or found.value == value


def test_text_that_is_no_utf8_is_refused():
    offsets, data = pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")
    bad = pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])
    for array in (bad, pa.DictionaryArray.from_arrays(pa.array([0]), bad)):
        found = refusal(Schema(key={"k": "string"}), pa.table({"k": array}), time=0)
        assert (found.problem, found.column) == ("unsound", "k")


def test_large_text_becomes_pieces_that_fit_32_bit_offsets(monkeypatch):
    monkeypatch.setattr(casts, "PIECE_BYTES", 200)
    texts = [f"text number {n}" for n in range(100)]
    for array in (pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode()):
        table = read(Schema(key={"k": "string"}), pa.table({"k": array}), time=0)
        assert table.column("k").to_pylist() == texts
        assert max(chunk.nbytes for chunk in table.column("k").chunks) < 400


def test_a_table_of_exactly_the_schema_is_not_copied():
    # Row for row the same buffers: only checks are paid for.
    (table,) = iter_updates(ORDERS, TABLE)
    for name in TABLE.column_names:
        ours, theirs = table.column(name).chunk(0).buffers(), TABLE.column(name).chunk(0).buffers()
        assert [b and b.address for b in ours] == [b and b.address for b in theirs]


def test_metadata_of_the_input_is_left_behind():
    assert read(ORDERS, TABLE.replace_schema_metadata({"a": "b"})).schema.metadata is None


# --- pandas' missing values ------------------------------------------------------------------------------------------


def test_pandas_nan_is_null_in_a_nullable_float_column_and_nan_in_one_that_is_not():
    frame = pd.DataFrame({"k": [1.0, math.nan]})
    assert read(Schema(key={"k": "float64"}), frame, time=0).column("k").to_pylist() == [1.0, None]
    kept = read(Schema(key={"k": "float64 not null"}), frame, time=0).column("k").to_pylist()
    assert kept[0] == 1.0
    assert math.isnan(kept[1])


def test_integers_with_gaps_in_pandas_are_integers_with_nulls():
    frame = pd.DataFrame({"k": [1, None, 3]})
    assert frame["k"].dtype == float
    assert read(Schema(key={"k": "int64"}), frame, time=0).column("k").to_pylist() == [1, None, 3]
    assert refusal(Schema(key={"k": "int64 not null"}), frame, time=0).problem == "null"
    found = refusal(Schema(key={"k": "int64"}), pd.DataFrame({"k": [BIG * 4, None]}), time=0)
    assert found.problem == "value"  # it may have been rounded before we saw it


@pytest.mark.parametrize(
    ("type_", "series", "expected"),
    [
        ("bool", pd.Series([True, math.nan, False]), [True, None, False]),
        ("string", pd.Series(["a", math.nan, None]), ["a", None, None]),
        ("string", pd.Series(["a", None], dtype="string"), ["a", None]),
        ("string", pd.Series(["a", None, "a"], dtype="category"), ["a", None, "a"]),
        ("int64", pd.Series([1, pd.NA], dtype="Int64"), [1, None]),
        ("int64", pd.Series([1, "x"], dtype=object).iloc[:1], [1]),
        ("timestamp[us]", pd.Series([SECOND, pd.NaT]), [SECOND, None]),
        ("timestamp[us, UTC]", pd.Series([AWARE, None]), [AWARE, None]),
        ("date32", pd.Series([dt.date(2020, 1, 1), None]), [dt.date(2020, 1, 1), None]),
        ("date32", pd.Series([pd.Timestamp("2020-01-01"), None]), [dt.date(2020, 1, 1), None]),
        ("duration[us]", pd.Series([dt.timedelta(1), None]), [dt.timedelta(1), None]),
        ("decimal128(5, 2)", pd.Series([Decimal("1.5"), None]), [Decimal("1.50"), None]),
        ("binary", pd.Series([b"a", None]), [b"a", None]),
        ("float64", pd.Series([1.5, pd.NA], dtype="Float64"), [1.5, None]),
        ("float64", pd.Series([1.5, None], dtype=pd.ArrowDtype(pa.float64())), [1.5, None]),
    ],
)  # fmt: skip
def test_pandas_missing_values_are_null(type_, series, expected):
    assert read(Schema(key={"k": type_}), series.to_frame("k"), time=0).column("k").to_pylist() == expected


def test_pandas_columns_that_arrow_does_not_know_are_refused_by_name():
    for series in (pd.Series(pd.period_range("2020", periods=2)), pd.Series([1 + 2j]), pd.Series([{1}, {2}])):
        found = refusal(Schema(key={"k": "string"}), series.to_frame("k"), time=0)
        assert (found.problem, found.column) == ("type", "k")


@pytest.mark.slow
def test_a_small_append_does_not_wait_for_pandas_to_be_imported() -> None:
    program = """
import sys
import persist_lib as persist

schema = persist.Schema(key={"id": "int64", "raw": "binary"}, value={"text": "string"})
with persist.open("memory:") as client, client.open_writer("s", schema) as write:
    write.compare_and_append([{"id": 1, "raw": b"", "text": "x", "_time": 0}], 0, 1)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
