"""What publications say of the values in a file: engines leave files out by it, and never one with a wanted row."""

from __future__ import annotations

import datetime as dt
import math
import operator
import tempfile
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyiceberg import expressions
from pyiceberg.table import StaticTable

import persist_lib as persist
from persist_lib.maintain.publish.columns import Columns
from tests.unit.maintain.test_publish import CONFIG, EVERY, evolved

EqualTo: Any = expressions.EqualTo
LessThan: Any = expressions.LessThan
GreaterThanOrEqual: Any = expressions.GreaterThanOrEqual
KINDS = {name: kind for name, kind in EVERY.items() if "<" not in kind and kind not in ("json", "uuid")}
SCHEMA = persist.Schema({"id": "int64 not null"}, KINDS)
INTEGERS = {"i8": (-128, 127), "i16": (-(2**15), 2**15 - 1), "i32": (-(2**31), 2**31 - 1), "u8": (0, 255),
            "u16": (0, 2**16 - 1), "u32": (0, 2**32 - 1)}  # fmt: skip
TEXT = st.text(st.sampled_from(["a", "b", "\x00", "ÿ", "\U0010ffff"]), max_size=40)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.sampled_from([low, -1 if low else 0, 0, 1, high]) for name, (low, high) in INTEGERS.items()},
    "f32": st.sampled_from([math.nan, -0.0, 0.0, math.inf, -1.5]),
    "f64": st.sampled_from([math.nan, -0.0, 0.0, -math.inf, 1e300]),
    "flag": st.booleans(),
    "text": TEXT,
    "raw": st.binary(max_size=20),
    "day": st.dates(dt.date(1900, 1, 1), dt.date(2300, 1, 1)),
    "t": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2300, 1, 1)),  # noqa: DTZ001
    "tz": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2300, 1, 1), timezones=st.just(dt.UTC)),  # noqa: DTZ001
    "money": st.integers(-(10**9), 10**9).map(lambda cents: Decimal(cents).scaleb(-2)),
    "uuid": st.binary(min_size=16, max_size=16),
}
ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | each for name, each in VALUES.items()}), min_size=1, max_size=4
)
COMPARED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "=": (operator.eq, EqualTo), "<": (operator.lt, LessThan), ">=": (operator.ge, GreaterThanOrEqual),
}  # fmt: skip
ORDERED = sorted(KINDS.keys() - {"f32", "f64", "flag", "raw", "uuid"})


def ids(table: Any) -> list[int]:
    return sorted(table.column("id").to_pylist())


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(batches=st.lists(ROWS, min_size=1, max_size=3), data=st.data())
def test_no_filter_leaves_out_a_file_that_has_a_wanted_row(batches: list[list[Any]], data: st.DataObject) -> None:
    every = [one for rows in batches for one in rows]
    for number, one in enumerate(every):
        one["id"] = number
    with tempfile.TemporaryDirectory() as place, persist.open(f"file:{place}", config=CONFIG) as client:
        with client.open_writer("s", SCHEMA) as write:
            for rows in batches:
                write.append_now(rows)
        known = client.publish("s", "iceberg")
        iceberg = StaticTable.from_metadata(known.place)
        delta = DeltaTable(client.publish("s", "delta").place).to_pyarrow_dataset()
        assert ids(iceberg.scan().to_arrow()) == ids(delta.to_table()) == [one["id"] for one in every]
        for name in data.draw(st.sets(st.sampled_from(ORDERED), max_size=3), "columns"):
            value = data.draw(st.sampled_from([one[name] for one in every]) | VALUES[name], name)
            how = data.draw(st.sampled_from([*COMPARED]), "how")
            if value is None:
                continue
            compare, expression = COMPARED[how]
            wanted = [one["id"] for one in every if one[name] is not None and compare(one[name], value)]
            asked = pa.scalar(value, delta.schema.field(name).type)
            assert ids(iceberg.scan(row_filter=expression(name, value)).to_arrow()) == wanted, (name, how, value)
            assert ids(delta.to_table(filter=compare(pc.field(name), asked))) == wanted, (name, how, value)
            found = (
                pl.scan_iceberg(known.version, reader_override="pyiceberg")
                .filter(compare(pl.col(name), pl.lit(value)))
                .collect()
            )
            assert ids(found.to_arrow()) == wanted, (name, how, value)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("before", ["in place", "as they are"])
def test_files_with_unsigned_numbers_are_copied_for_iceberg(
    folder: persist.Client, monkeypatch: pytest.MonkeyPatch, kind: str, before: str
) -> None:
    """pyiceberg takes an unsigned number in a file for a signed one where it filters rows, and polars asks it to."""
    most = 2 ** int(kind.removeprefix("uint")) - 1
    values = (0, most // 2, most // 2 + 1, most)
    with folder.open_writer("s", persist.Schema({"id": "int64 not null"}, {"n": kind})) as write:
        write.append_now([{"id": at, "n": n} for at, n in enumerate(values)])
        with monkeypatch.context() as earlier:  # as earlier releases published them
            earlier.setattr(Columns, "copied", property(lambda columns: columns.schemas[-1].shown.data))
            if before == "in place":
                earlier.setattr("persist_lib.maintain.publish.columns._reads", lambda *_: True)
            assert bool(folder.publish("s", "iceberg").copied) == (before != "in place")
        write.append_now([{"id": 4, "n": None}])
    known = folder.publish("s", "iceberg")
    assert (known.rows, known.files, known.shared) == (5, 2, 0), "also what was published before"
    assert known.copied
    iceberg = StaticTable.from_metadata(known.place)
    check_filters(iceberg, pl.scan_iceberg(known.version, reader_override="pyiceberg"), values)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_files_with_unsigned_numbers_are_not_copied_for_delta(folder: persist.Client, kind: str) -> None:
    most = 2 ** int(kind.removeprefix("uint")) - 1
    values = (0, most // 2, most // 2 + 1, most)
    with folder.open_writer("s", persist.Schema({"id": "int64 not null"}, {"n": kind})) as write:
        write.append_now([{"id": 4, "n": None}])
        folder.publish("s", "delta")
        write.append_now([{"id": at, "n": n} for at, n in enumerate(values)])
    known = folder.publish("s", "delta")
    assert (known.rows, known.copied) == (5, 0)
    check_filters(DeltaTable(known.place).to_pyarrow_dataset(), pl.scan_delta(known.place), values)


def check_filters(table: Any, frame: pl.LazyFrame, values: Sequence[int]) -> None:
    """Every filter finds the rows that have such a value, which are called by their places."""
    for value in values[1:]:
        for name, (compare, expression) in COMPARED.items():
            wanted = [at for at, n in enumerate(values) if compare(n, value)]
            if isinstance(table, StaticTable):
                found = table.scan(row_filter=expression("n", value)).to_arrow()
            else:
                found = table.to_table(filter=compare(pc.field("n"), value))
            assert ids(found) == wanted, (name, value)
            assert ids(frame.filter(compare(pl.col("n"), value)).collect().to_arrow()) == wanted, (name, value)


@pytest.mark.parametrize("name", ["id", "word", "n"])
def test_files_are_left_out_without_being_opened(folder: persist.Client, name: str) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string", "n": "int64", "f": "float64"}, unique=True)
    with folder.open_writer("s", schema) as write:
        for step in range(4):
            at = [step * 10 + each for each in range(10)]
            write.append_now([{"id": one, "word": f"{one:02}", "n": one, "f": math.nan} for one in at])
    iceberg = StaticTable.from_metadata(folder.publish("s", "iceberg").place)
    value = "25" if name == "word" else 25
    assert len([*iceberg.scan().plan_files()]) == 4
    assert len([*iceberg.scan(row_filter=EqualTo(name, value)).plan_files()]) == 1
    assert len([*iceberg.scan(row_filter=LessThan("f", 3.0)).plan_files()]) == 4, "NaN is ordered by each engine itself"
    assert [*iceberg.scan(row_filter=EqualTo(name, "99" if name == "word" else 99)).plan_files()] == []


def test_copies_have_no_bounds_of_floats_either(folder: persist.Client) -> None:
    with folder.open_writer("s", persist.Schema({"id": "int64 not null"}, {"f": "float64"})) as write:
        write.append_now([{"id": 1, "f": math.nan}, {"id": 1, "f": math.nan}, {"id": 2, "f": 5.0}])
    known = folder.publish("s", "iceberg")
    assert known.copied
    iceberg = StaticTable.from_metadata(known.place)
    assert len([*iceberg.scan(row_filter=LessThan("f", 3.0)).plan_files()]) == 1
    assert [*iceberg.scan(row_filter=EqualTo("id", 3)).plan_files()] == []


def test_bounds_are_those_of_all_row_groups_of_which_some_have_only_nulls(folder: persist.Client) -> None:
    count = 400_000
    numbers = pa.array([None if at < count // 8 * 3 else at for at in range(count)], pa.int64())
    rows = pa.table({"id": pa.array(range(count), pa.int64()), "n": numbers})
    with persist.open(folder.url, config=CONFIG.model_copy(update={"part_bytes": 2**26})) as client:
        client.open_writer("s", persist.Schema({"id": "int64 not null"}, {"n": "int64"})).append_now(rows)
        iceberg = StaticTable.from_metadata(client.publish("s", "iceberg").place)
    (file,) = (task.file for task in iceberg.scan().plan_files())
    assert pq.read_metadata(file.file_path.removeprefix("file://")).num_row_groups > 2
    ranges = [
        tuple(int.from_bytes(each[at], "little") for each in (file.lower_bounds, file.upper_bounds)) for at in (1, 2)
    ]
    assert ranges == [(0, count - 1), (count // 8 * 3, count - 1)]


def test_long_texts_have_bounds_that_are_cut_and_no_less(folder: persist.Client) -> None:
    least, most = "a" * 40, "b" * 15 + "\U0010ffff" * 3
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string", "top": "string", "f": "fixed_size_binary[20]"})
    fixed = bytes(range(20))
    with folder.open_writer("s", schema) as write:
        tops = {least: "\U0010ffff" * 20, most: "x"}
        write.append_now([{"id": len(word), "word": word, "top": top, "f": fixed} for word, top in tops.items()])
    iceberg = StaticTable.from_metadata(folder.publish("s", "iceberg").place)
    (file,) = (task.file for task in iceberg.scan().plan_files())
    word, top, f = (iceberg.schema().find_field(name).field_id for name in ("word", "top", "f"))
    assert file.lower_bounds[f] == file.upper_bounds[f] == fixed, "of a fixed length, also as a bound"
    assert file.lower_bounds[word] == b"a" * 16
    assert most.encode() < file.upper_bounds[word] < b"b" * 14 + b"d"
    assert top not in file.upper_bounds, "nothing is greater than it"
    for name, value in (("word", most), ("word", least), ("top", "\U0010ffff" * 20)):
        assert len(iceberg.scan(row_filter=EqualTo(name, value)).to_arrow()) == 1


def test_columns_that_changed_their_names_keep_the_bounds_of_their_values(folder: persist.Client) -> None:
    *_, (_, published) = evolved(folder)
    table = StaticTable.from_metadata(published.place)
    whole = table.scan().to_arrow()
    for name in ("id", "text", "n", "seen", "more"):
        for value in {*whole.column(name).to_pylist()} - {None}:
            wanted = [one["id"] for one in whole.to_pylist() if one[name] == value]
            assert ids(table.scan(row_filter=EqualTo(name, value)).to_arrow()) == sorted(wanted), (name, value)
    assert len([*table.scan(row_filter=EqualTo("id", 1_000)).plan_files()]) == 0
