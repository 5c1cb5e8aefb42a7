"""Laws of what an ingest reads: each line once, wherever files are cut, and bad or good by itself."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.ingesting.inputs import File, local_file
from jobs.ingesting.plan import Task, chunks_of
from jobs.ingesting.settings import Settings, encode_settings
from jobs.ingesting.work import Reader, Work
from persist_lib.convert.lines.csv_lines import CsvLines
from persist_lib.convert.lines.debezium import last_of_each_key
from persist_lib.convert.lines.file_columns import sift
from persist_lib.convert.lines.json_lines import JsonLines
from persist_lib.convert.lines.line_blocks import Block, cut, cut_records, split
from persist_lib.kernel.columns import unpacked
from persist_lib.schema.schema import Schema

SCHEMA = Schema(key={"id": "int64 not null"}, value={"name": "string", "price": "decimal128(10, 2)"})
NAMES = ("id", "name", "price")


def read(
    path: Path, settings: Settings, names: tuple[str, ...] = NAMES
) -> tuple[list[dict[str, Any]], dict[int, str], int]:
    """The rows, the bad lines by number (from 1) with their texts, and the count of lines that should be rows."""
    file: File = local_file(str(path))
    rows: list[dict[str, Any]] = []
    bad: dict[int, str] = {}
    count = base = 0
    for chunk in chunks_of(0, file, settings):
        reader = Reader(Work(Task((chunk,)), {0: file}, {0: names}, encode_settings(settings), SCHEMA))
        for table in reader.tables():
            rows += table.to_pylist()
        counts = reader.counts[0]
        found = unpacked(reader.bad()).to_pylist()
        assert len(found) == counts.bad
        data = path.read_bytes()
        for one in found:
            number = base + one["line"] + 1
            assert number not in bad, "a line is bad twice"
            bad[number] = one["text"]
            if path.suffix != ".gz" and one["offset"] is not None:
                assert data[: one["offset"]].count(b"\n") == number - 1, "its offset is not that of its line"
        base += counts.lines
        count += counts.read
    return rows, bad, count


VALUES = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=8)
    | st.sampled_from(['a"b', "a,b", "héé", '"', "''"])
    | st.none(),
    st.decimals(-9999, 9999, places=2, allow_nan=False) | st.none(),
)


def as_csv(row: tuple[Any, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(["" if value is None else value for value in row])
    return text.getvalue().encode()


DAMAGED_CSV = st.sampled_from(
    [
        b"1,a",
        b"1,a,1,b",
        b"x,a,1",
        b'2,"open,1',
        b"3,\xff,1",
        b"4,a,1.234",
        b",a,1",
        b"5,a,b\rc",
        b"99999999999999999999,a,1",
        b'6,a "x,"b,2',
        b"   ",
        b'"7',
    ],
)


CSV_LINES = (
    VALUES.map(lambda row: (row, as_csv(row))) | DAMAGED_CSV.map(lambda text: (None, text)) | st.just((None, b""))
)


@given(
    lines=st.lists(CSV_LINES), end=st.sampled_from([b"\n", b"\r\n"]), header=st.booleans(), last=st.booleans(),
    chunk=st.integers(1, 200), packed=st.booleans(),
)  # fmt: skip
def test_csv_has_the_good_rows_and_each_damaged_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[Any],
    end: bytes,
    header: bool,
    last: bool,
    chunk: int,
    packed: bool,
) -> None:
    # A row whose values are all null is a line of commas: it lacks its key.
    texts = [text for _, text in lines]
    if end == b"\n":
        texts = [text for text in texts if not text.endswith(b"\r")]
    data = end.join([*([b"id,name,price"] if header else []), *texts]) + (end if last else b"")
    path = tmp_path_factory.mktemp("in") / ("f.csv.gz" if packed else "f.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    settings = Settings("csv", names=None if header else NAMES, chunk_bytes=chunk)
    rows, bad, count = read(path, settings)
    expected = [dict(zip(NAMES, row, strict=True)) for row, _ in lines if row is not None]
    assert rows == expected
    first = 2 if header else 1
    assert set(bad) == {first + at for at, (row, text) in enumerate(lines) if row is None and text}
    assert count == len(rows) + len(bad)


def as_json(row: tuple[Any, ...]) -> bytes:
    number, name, price = row
    return json.dumps(
        {"id": number, "name": name, "price": None if price is None else str(price)}, ensure_ascii=False
    ).encode()


DAMAGED_JSON = st.sampled_from(
    [
        b"null", b"[1]", b"{", b"}", b'{"id":1', b'{"id":1}{"id":2}', b'{"id":"1"}', b'{"id":1,"zz":2}', b"{}",
        b'{"id":1,"name":"\xff"}', b'{"id":null}', b'{"id":1} x', b'{"id":1,"name":5}', b'{"id":1.5}', b"\x00",
        b'{"id":1,"price":"x"}', b'{"id":NaN}', b'{"id":1,"id":2}', b'{"id":1,"price":1.234}',
        b'{"id":3,"name":{"a":1}}', b'{"id":' + b"[" * 5000,
    ]
)  # fmt: skip


JSON_LINES = (
    VALUES.map(lambda row: (row, as_json(row))) | DAMAGED_JSON.map(lambda text: (None, text)) | st.just((None, b" "))
)


@given(
    lines=st.lists(JSON_LINES), end=st.sampled_from([b"\n", b"\r\n"]), last=st.booleans(), chunk=st.integers(1, 200),
    packed=st.booleans(),
)  # fmt: skip
def test_json_has_the_good_rows_and_each_damaged_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], end: bytes, last: bool, chunk: int, packed: bool
) -> None:
    data = end.join(text for _, text in lines) + (end if last else b"")
    path = tmp_path_factory.mktemp("in") / ("f.jsonl.gz" if packed else "f.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    rows, bad, count = read(path, Settings("jsonl", chunk_bytes=chunk))
    assert rows == [dict(zip(NAMES, row, strict=True)) for row, _ in lines if row is not None]
    assert set(bad) == {1 + at for at, (row, text) in enumerate(lines) if row is None and text.strip()}
    assert count == len(rows) + len(bad)


@given(
    lines=st.lists(
        st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b""))
        | DAMAGED_CSV
        | VALUES.map(as_csv),
        max_size=12,
    )
)
def test_a_line_of_csv_is_good_or_bad_whatever_is_beside_it(lines: list[bytes]) -> None:
    check_alone(CsvLines(Settings("csv", names=NAMES), SCHEMA, NAMES), [line for line in lines if line])


@given(
    lines=st.lists(
        st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"")) | DAMAGED_JSON | VALUES.map(as_json),
        max_size=12,
    )
)
def test_a_line_of_json_is_good_or_bad_whatever_is_beside_it(lines: list[bytes]) -> None:
    check_alone(JsonLines(Settings("jsonl"), SCHEMA), [line for line in lines if line.strip(b" \t\r")])


def check_alone(parser: CsvLines | JsonLines, lines: list[bytes]) -> None:
    together = sift(parser.parse, parser.suspect, lines, parser.empty)
    alone = [sift(parser.parse, parser.suspect, [line], parser.empty) for line in lines]
    assert set(together.bad) == {at for at, one in enumerate(alone) if one.bad}
    assert together.lines.tolist() == [at for at, one in enumerate(alone) if not one.bad]
    assert together.table.to_pylist() == [row for one in alone for row in one.table.to_pylist()]


@given(
    data=st.binary(max_size=200).map(lambda data: data.replace(b"a", b"\n")),
    sizes=st.lists(st.integers(1, 60), min_size=1),
    piece=st.integers(1, 40),
)
def test_each_line_is_in_exactly_one_chunk(data: bytes, sizes: list[int], piece: int) -> None:
    found = []
    start = 0
    for size in [*sizes, None]:
        end = None if size is None else start + size
        at = max(0, start - 1)
        pieces = [data[place : place + piece] for place in range(at, len(data), piece)]
        found += [line for block in cut(pieces, at, start, end) for line in split(block, None, b"")]
        start = end or 0
    expected = split(Block(data, 0, 0), None, b"")
    assert [(line.text, line.offset) for line in found] == [(line.text, line.offset) for line in expected]


@given(
    rows=st.lists(
        st.lists(st.sampled_from(["a", 'q"q', "two\nlines", "x,y", "", "\n"]), min_size=2, max_size=2), max_size=12
    ),
    piece=st.integers(1, 40),
)
def test_records_with_line_ends_are_cut_where_a_reader_of_csv_cuts_them(rows: list[list[str]], piece: int) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = text.getvalue().encode()
    pieces = [data[place : place + piece] for place in range(0, len(data), piece)]
    lines = [line for block in cut_records(pieces, ord('"')) for line in split(block, ord('"'), b"\r")]
    assert [next(csv.reader(io.StringIO(line.text.decode()))) for line in lines] == rows
    assert all(data[: line.offset].count(b"\n") == line.line for line in lines)


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.sampled_from("ab"))))
def test_the_last_change_of_each_key_is_kept_in_order(changes: list[tuple[int | None, str]]) -> None:
    schema = Schema(key={"id": "int64"}, value={"name": "string"})
    table = pa.table(
        {
            "id": pa.array([key for key, _ in changes], pa.int64()),
            "name": pa.array([name for _, name in changes], pa.string()),
        }
    )
    last = {key: (at, name) for at, (key, name) in enumerate(changes)}
    expected = [{"id": key, "name": name} for key, (_, name) in sorted(last.items(), key=lambda item: item[1][0])]
    assert last_of_each_key(schema, table).to_pylist() == expected
