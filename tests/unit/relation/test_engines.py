"""What polars wants of a lazy scan becomes an Arrow expression that is as narrow, for constants of each type."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime

import polars as pl
import pyarrow as pa
import pytest
from polars.io.plugins import register_io_source

from persist_lib.relation.engines import pushed_down

ROWS = pa.table(
    {
        "small": pa.array([1, 2, 3, None], pa.int8()),
        "large": pa.array([-(2**62), 0, 2**62, None], pa.int64()),
        "unsigned": pa.array([0, 1, 2**63, None], pa.uint64()),
        "word": pa.array(["a", "b", "c", None]),
        "day": pa.array([date(2026, 1, n) for n in (1, 2, 3)] + [None], pa.date32()),
        "at": pa.array([datetime(2026, 1, n, tzinfo=UTC) for n in (1, 2, 3)] + [None], pa.timestamp("us", "UTC")),
    }
)


@pytest.mark.parametrize(
    "predicate",
    [
        pl.col("small") > 1,
        pl.lit(2) >= pl.col("small"),
        pl.col("large") == 2**62,
        pl.col("unsigned") < 2**63,
        pl.col("word") == "b",
        pl.col("day") > date(2026, 1, 1),
        pl.col("at") <= datetime(2026, 1, 2, tzinfo=UTC),
        pl.col("small").is_null(),
        (pl.col("small") > 1) & (pl.col("word") == "c"),
        (pl.col("small") == 1) | (pl.col("word") == "c"),
        pl.col("small").is_between(2, 3),
    ],
    ids=str,
)
def test_a_predicate_that_arrow_can_say_is_pushed_down_whole(predicate: pl.Expr) -> None:
    asked: list[pl.Expr | None] = []
    rows = pl.DataFrame(ROWS)

    def source(_columns: object, wanted: pl.Expr | None, _rows: object, _size: object) -> Iterator[pl.DataFrame]:
        asked.append(wanted)
        yield rows

    register_io_source(source, schema=rows.schema).filter(predicate).collect()
    pushed = pushed_down(asked[0], ROWS.schema)
    assert pushed is not None
    assert ROWS.filter(pushed)["large"].to_pylist() == rows.filter(predicate)["large"].to_list()
