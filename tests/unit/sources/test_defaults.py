"""A column that a message does not say has its default, and one that it says is null is null, however it is written."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import array_of
from persist_lib.sources import Decoding, Files, Meaning
from persist_lib.sources.decoding import decode
from tests.sourced import Sourced

SCHEMA = persist.Schema(
    key={"id": "int64 not null"}, value={"n": "int64 default 9", "w o": "string not null default 'é\"'", "x": "int64"},
    times="ms",
)  # fmt: skip
LACKS = {"n": 9, "w o": 'é"', "x": None}
ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(0, 9)},
        optional={
            "n": st.sampled_from([None, 1]), "w o": st.sampled_from(["", '"n"', "n", "\\u006e"]),
            "x": st.sampled_from([None, 3]),
        },
    ),
    min_size=1, max_size=8,
)  # fmt: skip


def messages(lines: list[bytes], header: str | None = None) -> pa.Table:
    found = {
        "address": array_of(np.arange(len(lines), dtype=np.uint64)), "value": pa.array(lines, pa.binary()),
        "partition": pa.array(["t"] * len(lines)),
    }  # fmt: skip
    return pa.table(found if header is None else {**found, "header": pa.array([header] * len(lines))})


@given(ROWS, st.booleans())
def test_a_field_of_json_that_is_not_there_has_the_default(rows: list[dict[str, Any]], escaped: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=escaped).encode() for row in rows]
    if escaped:  # names, too
        lines = [line.replace(b'"n":', b'"\\u006e":').replace(b'"w o":', b'"w\\u0020o":') for line in lines]
    found = decode(Decoding(), SCHEMA, messages(lines))
    assert found.bad == {}
    assert found.table.to_pylist() == [{"id": row["id"], **LACKS, **row} for row in rows]


def test_a_column_that_a_file_of_csv_or_parquet_does_not_have_has_the_default() -> None:
    found = decode(Decoding(decoder="csv", missing="null"), SCHEMA, messages([b"1,2", b"3,"], "id,n"))
    assert found.table.to_pylist() == [{"id": 1, **LACKS, "n": 2}, {"id": 3, **LACKS, "n": None}]
    structs = pa.array([{"id": 1, "n": None}, {"id": 2, "n": 5}], pa.struct([("id", pa.int64()), ("n", pa.int64())]))
    table = messages([b"", b""]).set_column(1, "value", structs)
    found = decode(Decoding(decoder="rows", missing="null"), SCHEMA, table)
    assert found.table.to_pylist() == [{"id": 1, **LACKS, "n": None}, {"id": 2, **LACKS, "n": 5}]


def test_a_source_fills_in_plain_defaults_and_none_that_each_instance_would_fill_in_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": 2, "n": null, "w o": "a", "x": 1}\n')
    place, meaning = Files(place=str(tmp_path), format="jsonl"), Meaning(envelope="upsert")
    with closing(Sourced()) as world:
        world.sources.create("s", place, SCHEMA, meaning=meaning)
        world.catch_up()
        rows = [{name: row[name] for name in SCHEMA.names} for row in world.contents()]
        assert sorted(rows, key=lambda row: row["id"]) == [
            {"id": 1, **LACKS}, {"id": 2, "n": None, "w o": "a", "x": 1},
        ]  # fmt: skip
        for default, type_ in (("now()", "timestamp[ms, UTC]"), ("uuid()", "uuid")):
            schema = persist.Schema({"id": "int64 not null"}, {"at": f"{type_} default {default}"}, times="ms")
            with pytest.raises(InvalidUsage, match="each instance of a source would fill in another"):
                world.sources.create("t", place, schema)
        assert world.sources.list() == ["s"]
