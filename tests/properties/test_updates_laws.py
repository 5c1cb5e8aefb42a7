"""Laws of the border: every value of every type survives dicts, pandas, polars and Arrow, bit for bit."""

# ruff: noqa: DTZ001 - times without a zone are among what is tested

from __future__ import annotations

import datetime as dt
import struct
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from persist_lib.convert.updates import iter_updates
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema

UTC = dt.UTC
BIG = 2**53


def read(schema: Schema, data: object, **defaults: Any) -> pa.Table:
    tables = list(iter_updates(schema, data, **defaults))
    return pa.concat_tables(tables) if tables else schema.updates.empty_table()


def refusal(schema: Schema, data: object, **defaults: Any) -> InvalidUsage:
    with pytest.raises(InvalidUsage) as caught:
        read(schema, data, **defaults)
    return caught.value


INTS = {f"{sign}int{bits}": (0 if sign else -(2 ** (bits - 1)), 2 ** (bits - (not sign)) - 1)
        for sign in ("", "u") for bits in (8, 16, 32, 64)}  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
# What pandas, polars and Python hold alike: microseconds of the years that nanoseconds reach.
TIMES = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))
SECONDS = TIMES.map(lambda time: time.replace(microsecond=0))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.integers(low, high) for name, (low, high) in INTS.items()},
    "bool": st.booleans(), "string": TEXTS, "binary": st.binary(max_size=6),
    "fixed_size_binary[3]": st.binary(min_size=3, max_size=3),
    "float64": st.floats(allow_nan=False), "float32": st.floats(width=32, allow_nan=False),
    "date32": st.dates(dt.date(1700, 1, 1), dt.date(2200, 1, 1)), "time64[us]": st.times(),
    "timestamp[us]": TIMES, "timestamp[ns]": TIMES, "timestamp[ms]": SECONDS, "timestamp[s]": SECONDS,
    "timestamp[us, UTC]": TIMES.map(lambda time: time.replace(tzinfo=UTC)),
    "duration[us]": st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000)),
    "duration[s]": st.integers(-(10**9), 10**9).map(lambda seconds: dt.timedelta(seconds=seconds)),
    "decimal128(18, 2)": st.decimals(-(10**15), 10**15, places=2),
}  # fmt: skip


def tables(type_: str) -> st.SearchStrategy[tuple[Schema, pa.Table]]:
    """A schema with one column of the type, nullable or not, and some updates."""
    stamps = {"_time": st.integers(0, 2**64 - 1), "_diff": st.sampled_from([-(2**63), -1, 1, 5])}

    def of(nullable: bool) -> st.SearchStrategy[tuple[Schema, pa.Table]]:
        schema = Schema(key={"k": type_ if nullable else f"{type_} not null"})
        cell = VALUES[type_] | st.none() if nullable else VALUES[type_]
        rows = st.lists(st.fixed_dictionaries({"k": cell, **stamps}), min_size=1, max_size=5)
        return rows.map(lambda rows: (schema, pa.Table.from_pylist(rows, schema=schema.updates)))

    return st.booleans().flatmap(of)


def bits(table: pa.Table) -> list[Any]:
    """The rows, with floats by their bits."""
    return [tuple(map(bits_of, row.values())) for row in table.to_pylist()]


def bits_of(value: object) -> object:
    return struct.pack(">d", value) if isinstance(value, float) else value


LAW = settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink])


@pytest.mark.parametrize("type_", VALUES)
@LAW
@given(st.data())
def test_every_type_survives_the_way_out_and_back(type_, data):
    schema, table = data.draw(tables(type_))
    for there in (
        table, table.to_pylist(), table.to_reader(max_chunksize=1), table.to_struct_array(),
        table.to_pandas(types_mapper=pd.ArrowDtype), table.to_pandas(), table.to_pandas(integer_object_nulls=True),
    ):  # fmt: skip
        if is_rounded_by_pandas(table, there):
            assert refusal(schema, there).problem == "value"
        else:
            assert bits(read(schema, there)) == bits(table)


def is_rounded_by_pandas(table: pa.Table, frame: object) -> bool:
    """Whether pandas made floats of integers with gaps, and some are beyond what floats hold."""
    if (
        not isinstance(frame, pd.DataFrame)
        or frame["k"].dtype != float
        or not pa.types.is_integer(table.schema.field("k").type)
    ):
        return False
    return any(value is not None and abs(value) > BIG for value in table.column("k").to_pylist())


# polars has neither fixed-size bytes nor times in seconds.
POLARS = [name for name in VALUES if name not in ("timestamp[s]", "duration[s]", "fixed_size_binary[3]")]


@pytest.mark.parametrize("type_", POLARS)
@LAW
@given(st.data())
def test_every_type_survives_polars(type_, data):
    schema, table = data.draw(tables(type_))
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    for there in (frame, frame.to_struct(), frame.to_arrow(), frame.to_dicts()):
        assert bits(read(schema, there)) == bits(table)


@LAW
@given(st.lists(st.floats() | st.none()), st.sampled_from(["float64", "float32"]))
def test_nan_is_a_value_everywhere_but_in_pandas(values, type_):
    schema = Schema(key={"k": type_})
    if type_ == "float32":
        values = pa.array(values, pa.float32()).cast(pa.float64()).to_pylist()
    floats = pa.array(values, pa.float64())
    for data in (
        [{"k": value} for value in values], pa.table({"k": floats}),
        pl.DataFrame({"k": pl.Series(values, dtype=pl.Float64)}),
    ):  # fmt: skip
        assert list(map(bits_of, read(schema, data, time=0).column("k").to_pylist())) == list(map(bits_of, values))


@settings(LAW, max_examples=400)
@given(st.sampled_from(sorted(VALUES)), st.sampled_from(sorted(VALUES)), st.data())
def test_what_is_converted_at_all_can_be_converted_back(source, target, data):
    values = pa.array(
        data.draw(st.lists(VALUES[source] | st.none(), min_size=1, max_size=3)),
        Schema(key={"k": source}).data.field("k").type,
    )
    try:
        there = read(Schema(key={"k": target}), pa.table({"k": values}), time=0)
    except InvalidUsage:
        return
    back = pa.chunked_array(there.column("k").chunks)
    if pa.types.is_decimal(values.type) and pa.types.is_integer(back.type):
        back = back.cast(pa.decimal128(38, 2))  # Arrow asks for room for any integer of the type, whatever the values
    back = back.cast(values.type)
    assert back.to_pylist() == values.to_pylist()
