"""What the command writes into a file it reads again: each type, at every level, to the bit."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import persist_lib as persist
from persist_lib.cli.input_files import read_file
from persist_lib.testing import contents_of
from tests.commands import invoke

UTC = dt.UTC
FINE = dt.datetime(2200, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001 - its column has no zone
PLAIN: dict[str, tuple[str, list[Any]]] = {
    "truth": ("bool", [True, False]),
    "small": ("int8", [-128, 127]),
    "large": ("uint64", [0, 2**64 - 1]),
    "single": ("float32", [math.nan, math.inf, -0.0, 1.5]),
    "double": ("float64", [math.nan, -math.inf, -0.0, 5e-324, 1e308]),
    "text": ("string", ["", "a\nb", "NaN", "Infinity", "null", '"q",;', "é\U0001f600"]),
    "fixed": ("fixed_size_binary[4]", [b"abcd"]),
    "id": ("uuid", [UUID(int=0), UUID(int=2**128 - 1)]),
    "day": ("date32", [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "clock": ("time64[us]", [dt.time(0), dt.time(23, 59, 59, 999_999)]),
    "instant": (
        "timestamp[us, UTC]",
        [dt.datetime(2024, 2, 29, 1, 2, 3, 456_789, UTC), dt.datetime(1, 1, 2, tzinfo=UTC)],
    ),
    "zoned": ("timestamp[ms, Europe/Berlin]", [dt.datetime(2024, 10, 27, 0, 30, tzinfo=UTC)]),
    "fine": ("timestamp[ns]", [FINE, FINE.replace(year=1700)]),
    "length": ("duration[ms]", [dt.timedelta(0), dt.timedelta(days=-1, milliseconds=5)]),
    "cents": ("decimal128(12, 2)", [Decimal("0.00"), Decimal("-9999999999.99")]),
    "document": ("json", [{"b": [1, 1.0, -0.0], "a": {"é": None}}, "text", "", 5, 1e300, 10**40, [], True]),
    "wide": ("decimal256(50, 3)", [Decimal("12345678901234567890123456789012345678901234567.125")]),
}
FIELDS = {name: PLAIN[name][1][0] for name in ("double", "id", "fine", "length", "clock", "cents", "day", "instant")}
NESTED: dict[str, tuple[str, list[Any]]] = {
    "words": ("list<string>", [[], [None], ["NaN", ""]]),
    "vector": ("list<float32>[3]", [[0.0, -0.0, math.nan], [math.inf, 1.5, -math.inf]]),
    "whole": (f"struct<{', '.join(f'{name}: {PLAIN[name][0]}' for name in FIELDS)}, raw: binary>", [
        {**FIELDS, "raw": b"\x00\xff"}, dict.fromkeys([*FIELDS, "raw"]),
    ]),
    "counts": ("map<string, int64>", [{}, {"a": None, "b": 2}]),
    "ids": ("map<int32, list<uuid>>", [{1: [UUID(int=1), None], -1: None}]),
    "ways": ("list<struct<x: double, d: duration[us]>>", [[{"x": -math.inf, "d": dt.timedelta(0, 0, -7)}, None]]),
}  # fmt: skip
COLUMNS = {**PLAIN, **NESTED}


def rows() -> list[dict[str, Any]]:
    """Each value beside each other's, and a row of nulls."""
    count = max(len(values) for _, values in COLUMNS.values())
    found = [{name: values[at % len(values)] for name, (_, values) in COLUMNS.items()} for at in range(count)]
    return [{"n": at, **row} for at, row in enumerate([*found, dict.fromkeys(COLUMNS)])]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_each_type_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    url, file = f"file:{tmp_path}/data", tmp_path / f"rows.{kind}"
    schema = persist.Schema({"n": "int64 not null"}, {name: type_ for name, (type_, _) in COLUMNS.items()})
    with persist.open(url) as client:
        for name in ("from", "to"):
            client.table(name, schema)
        client.table("from").upsert(rows())
    for words in (("read", "from", "--format", kind, "-o", file), ("upsert", "to", file)):
        done = invoke(*words, PERSIST_LOCATION=url)
        assert done.exit_code == 0, done.output
    with persist.open(url) as client:
        was, now = (contents_of(client.table(name).read(diff=True).to_arrow()) for name in ("from", "to"))
    assert now == was
    assert len(was) == len(rows())


def test_what_is_no_float_is_no_float_and_a_word_is_a_word(tmp_path: Path) -> None:
    url, file = f"file:{tmp_path}/data", tmp_path / "rows.jsonl"
    with persist.open(url) as client:
        client.table("t", persist.Schema({"n": "int64 not null"}, {"x": "double", "s": "string", "l": "list<double>"}))
    for text in (
        '{"n": 1, "x": "nan"}',
        '{"n": 1, "x": "NaN", "l": ["Infinite"]}',
        '{"n": 1, "x": "NaN", "l": [true]}',
    ):
        file.write_text(text)
        assert invoke("upsert", "t", file, PERSIST_LOCATION=url).exit_code == 2, text
    file.write_text('{"n": 1, "x": "-Infinity", "s": "NaN", "l": [1, "NaN"]}\n{"n": 2, "x": 3, "s": "b", "l": null}\n')
    assert invoke("upsert", "t", file, PERSIST_LOCATION=url).exit_code == 0
    with persist.open(url) as client:
        first, second = sorted(client.table("t").read().to_pylist(), key=lambda row: row["n"])
    assert (first["x"], first["s"], first["l"][0], second["x"]) == (-math.inf, "NaN", 1.0, 3.0)
    assert math.isnan(first["l"][1])


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("null.jsonl", b'{"id": 1, "word": "a"}\nnull\n', "line 2: "),
        ("two.jsonl", b'{"id": 1, "word": "a"}\n{"id": 2, "word": "b"}{"id": 3, "word": "c"}\n', "line 2: "),
        ("split.jsonl", b'{"id": 1, "word": "a"}\n{"id": 2,\n"word": "b"}\n', "line 2: "),
        ("text.jsonl", b'{"id": 1, "word": "a"}\n{"id": 2, "word": "\xff"}\n', "line 2: this is not UTF-8"),
        ("quote.csv", b'id,word\n1,a\n2,"b\n3,c\n', "a quote is open"),
    ],
)
def test_a_line_that_is_not_one_row_is_refused_and_not_made_to_one(
    tmp_path: Path, name: str, lines: bytes, says: str
) -> None:
    """Arrow takes `null` for nulls, two objects in a line for two rows, and what follows an open quote for a value."""
    (tmp_path / name).write_bytes(lines)
    with pytest.raises(persist.InvalidUsage, match=f"{name} cannot be read: {says}"):
        list(read_file(tmp_path / name, persist.Schema(key={"id": "int64"}, value={"word": "string"})))


def test_a_last_value_over_several_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    file.write_bytes(b'id,word\n1,"a\nb"\n\n')
    (table,) = read_file(file, persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    assert table.to_pylist() == [{"id": 1, "word": "a\nb"}]
