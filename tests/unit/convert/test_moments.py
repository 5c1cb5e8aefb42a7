"""Moments that Arrow holds and no Python value does: refused where they come in, as no read would get past them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.convert.casts import FIRST_S, cast_column, unreadable
from persist_lib.convert.lines.file_columns import Sifted, without_nulls
from persist_lib.convert.updates import iter_updates
from persist_lib.times import END_S

SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}
KINDS = [*[pa.timestamp(unit) for unit in SECOND], *[pa.timestamp(unit, "UTC") for unit in SECOND], pa.date32()]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def schema_of(kind: pa.DataType) -> persist.Schema:
    return persist.Schema({"id": "int64 not null"}, {"t": str(kind).replace("tz=", "").replace("[day]", "")})


def moments(kind: pa.DataType, *seconds: int | None) -> pa.Array:
    scale = 1 if pa.types.is_date32(kind) else SECOND[kind.unit]
    over = 86_400 if pa.types.is_date32(kind) else 1
    numbers = [None if value is None else value * scale // over for value in seconds]
    return pa.array(numbers, pa.int32() if pa.types.is_date32(kind) else pa.int64()).view(kind)


def table_of(kind: pa.DataType, *seconds: int | None) -> pa.Table:
    return pa.table({"id": list(range(len(seconds))), "t": moments(kind, *seconds)})


@by_kind
def test_what_is_taken_can_be_read_to_the_last_moment(kind: pa.DataType) -> None:
    taken = table_of(kind, FIRST_S, None, 0, END_S - 1)
    (found,) = iter_updates(schema_of(kind), taken, time=1)
    assert [value is None for value in found.column("t").to_pylist()] == [False, True, False, False]


@by_kind
@pytest.mark.parametrize("wrong", [FIRST_S - 1, FIRST_S - 366 * 86_400, END_S], ids=["year 0", "years before", "10000"])
def test_what_no_python_value_is_is_refused_with_its_row(kind: pa.DataType, wrong: int) -> None:
    given = table_of(kind, 0, None, wrong, 5)
    with pytest.raises(persist.InvalidUsage, match=r"row 12 .* outside of the years 1 to 9999") as told:
        list(iter_updates(schema_of(kind), [table_of(kind, *range(10)), given], time=1))
    assert (told.value.column, told.value.row, told.value.problem) == ("t", 12, "value")
    with pytest.raises((OverflowError, ValueError)):
        given.to_pylist()


@pytest.mark.parametrize(
    "value",
    [
        dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=1))),
        dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.timezone(dt.timedelta(hours=-1))),
        np.datetime64("0000-01-01"),
    ],
    ids=str,
)
def test_python_values_that_are_not_readable_in_utc_are_refused(value: Any) -> None:
    for data in ([{"id": 1, "t": value}], pd.DataFrame({"id": [1], "t": pd.Series([value], dtype=object)})):
        with pytest.raises(persist.InvalidUsage):
            list(iter_updates(schema_of(pa.timestamp("us", "UTC")), data, time=1))


def test_times_of_a_day_and_moments_near_the_ends_of_a_zone() -> None:
    day = pa.chunked_array([pa.array([86_400_000_000], pa.int64()).view(pa.time64("us"))])
    with pytest.raises(persist.InvalidUsage, match="no time of a day"):
        cast_column(day, pa.field("t", pa.time64("us")))
    zone = pa.timestamp("us", "Asia/Tokyo")
    near = pa.chunked_array([pa.array([(END_S - 3_600) * 1_000_000], pa.int64()).view(zone)])
    assert unreadable(near) is not None
    assert unreadable(pa.chunked_array([pa.array([0, None], pa.int64()).view(zone)])) is None
    assert unreadable(pa.chunked_array([pa.array([-(2**63) + 1], pa.int64()).view(pa.timestamp("ns"))])) is None


def test_a_line_with_such_a_moment_is_bad_and_the_others_are_good() -> None:
    schema = schema_of(pa.timestamp("us"))
    found = without_nulls(
        schema, Sifted(table_of(pa.timestamp("us"), 0, FIRST_S - 1, None), np.array([3, 5, 8]), {4: "it is torn"})
    )
    assert found.lines.tolist() == [3, 8]
    assert found.bad == {
        4: "it is torn",
        5: "column t: the value is no time of a day, or outside of the years 1 to 9999",
    }
    assert found.table.column("id").to_pylist() == [0, 2]


def test_no_door_of_a_shard_or_table_takes_them() -> None:
    schema, rows = schema_of(pa.timestamp("ms")), table_of(pa.timestamp("ms"), FIRST_S - 1)
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        tables = client.controller().tables()
        tables.create("t", schema)
        with client.open_writer("s", schema) as write, write.stage() as stage:
            for call in (write.append_now, write.upsert, stage.local.write, lambda rows: tables.insert("t", rows)):
                with pytest.raises(persist.InvalidUsage, match="outside of the years 1 to 9999"):
                    call(rows)
        assert client.open_reader("s").snapshot().to_pylist() == tables.read("t").to_pylist() == []
