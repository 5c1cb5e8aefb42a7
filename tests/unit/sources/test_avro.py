"""Avro: files of it, messages by a schema, and what becomes of bytes that are not Avro."""

from __future__ import annotations

import datetime as dt
import io
import json
import zlib
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

import persist_lib as persist
from persist_lib.sources import Files, Mark
from persist_lib.sources.conformance import check_many, check_reader, read_all
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files import avro as container
from persist_lib.sources.pipeline import Made, Pipeline
from persist_lib.sources.protocol import START
from persist_lib.sources.schema_registry import Registry, Written
from tests.unit.sources.messages import applied, messages

ROW = {
    "type": "record", "name": "Row",
    "fields": [{"name": "id", "type": "long"}, {"name": "word", "type": ["null", "string"], "default": None}],
}  # fmt: skip
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
ROWS = [{"id": n, "word": None if n % 5 == 0 else "w" * (n % 50)} for n in range(1000)]


def datum(row: Any, schema: Any = ROW) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


def packed(rows: list[dict[str, Any]], codec: str = "null", schema: Any = ROW, interval: int = 1000) -> bytes:
    stream = io.BytesIO()
    fastavro.writer(
        stream,
        fastavro.parse_schema(schema),
        rows,
        codec=codec,
        sync_interval=interval,
        sync_marker=b"0123456789abcdef",
    )
    return stream.getvalue()


def folder_of(place: Path, **more: Any) -> Files:
    return Files(place=str(place), format="avro", **more)


def apply(
    values: Sequence[bytes | None], decoding: Decoding, schema: persist.Schema = SCHEMA, meaning: Meaning | None = None,
    schemas: dict[int, Written] | None = None, keys: list[bytes | None] | None = None,
) -> Made:  # fmt: skip
    count = len(values)
    table = messages([1] * count, values, key=pa.array(keys or [None] * count, pa.binary()))
    pipeline = Pipeline(decoding, meaning or Meaning(), schema)
    return applied(pipeline, table, lambda _: schema.contents.empty_table(), schemas or {})


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz", "zstandard", "snappy"])
def test_the_conformance_suite_on_files(tmp_path: Path, codec: str) -> None:
    values = [datum(row) for row in ROWS]
    data = packed(ROWS, codec) if codec not in {"snappy", "zstandard"} else repacked(codec)
    (tmp_path / "a.avro").write_bytes(data)
    (tmp_path / "empty.avro").write_bytes(b"")
    (tmp_path / "none.avro").write_bytes(packed([]))
    (tmp_path / "b.txt").write_bytes(b"1\n")
    files = folder_of(tmp_path)
    check_reader(files.open, {"a.avro": values, "none.avro": [], "empty.avro": []})
    reader = files.open()
    end = reader.high_watermarks({}, 1 << 30)["a.avro"]
    table = read_all(reader, "a.avro", START, end)
    assert len(set(table.column("address").to_pylist())) > 3
    assert json.loads(table.column("header")[0].as_py())["name"] == "Row"


def repacked(codec: str) -> bytes:
    """As fastavro writes it with a package for that: each block of snappy has a checksum."""
    plain = packed(ROWS)
    data = container.Bytes(Whole(plain))  # type: ignore[arg-type]
    head = container.head_of(data)
    found = plain[: head.end].replace(b"\x08null", number(len(codec)) + codec.encode())
    at = head.end
    while not data.is_end(at):
        block = container.block_at(data, head, at)
        payload = plain[block.start : block.end]
        checksum = zlib.crc32(payload).to_bytes(4) if codec == "snappy" else b""
        payload = pa.compress(payload, "snappy" if checksum else "zstd", asbytes=True) + checksum
        found += number(block.records) + number(len(payload)) + payload + head.sync
        at = block.next
    return found


class Whole:
    """The bytes of a file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def range(self, start: int, end: int) -> bytes:
        return self.data[start:end]


def number(value: int) -> bytes:
    return datum(value, "long")


def test_a_million_records_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "a.avro").write_bytes(packed([{"id": 1, "word": "x"}] * 300_000, interval=16_000))
    assert check_many(folder_of(tmp_path).open, "a.avro", 300_000) < 1 << 20


@pytest.mark.parametrize("may_grow", [True, False])
def test_a_file_grows_by_whole_blocks(tmp_path: Path, may_grow: bool) -> None:
    data, path = packed(ROWS), tmp_path / "a.avro"
    reader = folder_of(tmp_path, may_grow=may_grow).open()
    bound: dict[str, Mark] = {}
    got: list[bytes] = []
    for end in range(0, len(data) + 997, 997 if may_grow else len(data)):
        path.write_bytes(data[:end])
        new = dict(reader.high_watermarks(bound, 1 << 20))
        for name, mark in new.items():
            got += read_all(reader, name, bound.get(name, START), mark).column("value").to_pylist()
        bound |= new
    assert got == [datum(row) for row in ROWS]


@pytest.mark.parametrize("what", ["no sync", "no size", "cut", "no head", "no codec"])
def test_after_a_block_that_is_damaged_there_is_one_bad_message_and_no_more(tmp_path: Path, what: str) -> None:
    whole = packed(ROWS)
    data = container.Bytes(Whole(whole))  # type: ignore[arg-type]
    head = container.head_of(data)
    second = container.block_at(data, head, head.end).next
    third = container.block_at(data, head, second).next
    damaged = {
        "no sync": whole[: third - 1] + b"#" + whole[third:], "no size": whole[:second] + b"\xff" * 40 + whole[second:],
        "cut": whole[: third - 1], "no head": b"#" + whole[1:], "no codec": whole.replace(b"\x08null", b"\x08nulL"),
    }[what]  # fmt: skip
    at = 0 if what.startswith("no ") and what not in {"no sync", "no size"} else second
    (tmp_path / "a.avro").write_bytes(damaged)
    files = folder_of(tmp_path, may_grow=False)
    for step in (1, 1 << 30):
        reader, bound = files.open(), dict[str, Mark]()
        found = []
        while new := dict(reader.high_watermarks(bound, step)):
            found += read_all(reader, "a.avro", bound.get("a.avro", START), new["a.avro"]).to_pylist()
            bound |= new
        assert bound["a.avro"].address == len(damaged)
        assert [row["address"] for row in found if row["problem"]] == [at]
        assert len(found) == 1 + (0 if at == 0 else container.block_at(data, head, head.end).records)
        end = bound["a.avro"]
        assert read_all(files.open(), "a.avro", START, end).to_pylist() == found
        with (tmp_path / "a.avro").open("ab") as file:
            file.write(whole[head.end :])
        assert not files.open().high_watermarks(bound, 1 << 30)
        assert read_all(files.open(), "a.avro", START, end).to_pylist() == found
        (tmp_path / "a.avro").write_bytes(damaged)


def test_a_record_that_is_poison_takes_those_after_it_in_its_block_along(tmp_path: Path) -> None:
    payload = datum(ROWS[1]) + datum(ROWS[2]) + b"\xff" * 30
    data = packed([])
    (tmp_path / "a.avro").write_bytes(
        data + number(5) + number(len(payload)) + payload + b"0123456789abcdef" + packed(ROWS)[len(data) :]
    )
    reader = folder_of(tmp_path).open()
    rows = read_all(reader, "a.avro", START, reader.high_watermarks({}, 1 << 30)["a.avro"]).to_pylist()
    assert [row["value"] for row in rows] == [datum(ROWS[1]), datum(ROWS[2]), b"\xff" * 30, *map(datum, ROWS)]
    (problem,) = [row["problem"] for row in rows if row["problem"]]
    assert problem.startswith("record 2 of 5, and those after it")


TYPES: dict[str, tuple[Any, str, Any]] = {
    "a": ("int", "int32", 7), "b": ("long", "int64", -(2**63)), "c": ("float", "float32", 0.5),
    "d": ("double", "float64", 0.1), "e": ("boolean", "bool", True), "f": ("string", "string", "ü\n\""),
    "g": ("bytes", "binary", b"\x00\xff"), "h": ({"type": "enum", "name": "E", "symbols": ["X", "Y"]}, "string", "Y"),
    "i": ({"type": "int", "logicalType": "date"}, "date32", dt.date(2026, 2, 3)),
    "j": ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp[ms, UTC]",
          dt.datetime(2026, 1, 1, 2, 3, 4, 5000, dt.UTC)),
    "k": ({"type": "long", "logicalType": "timestamp-micros"}, "timestamp[us, UTC]",
          dt.datetime(2026, 1, 1, 2, 3, 4, 5, dt.UTC)),
    "l": ({"type": "long", "logicalType": "time-micros"}, "time64[us]", dt.time(1, 2, 3, 4)),
    "m": ({"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 3}, "decimal128(10, 3)",
          Decimal("-1.250")),
    "n": ({"type": "string", "logicalType": "uuid"}, "string", "12345678-1234-5678-1234-567812345678"),
    "o": ("int", "int64", 5), "p": ("long", "float64", 5),
    "q": ({"type": "fixed", "name": "F", "size": 3}, "binary", b"abc"),
    "r": ({"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp[us]", dt.datetime(2026, 1, 1, 2, 3)),  # noqa: DTZ001 - it has none
}  # fmt: skip


def test_each_type_comes_as_it_was_written() -> None:
    written = {"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, (t, _, _) in TYPES.items()]}
    schema = persist.Schema(key={n: t for n, (_, t, _) in TYPES.items()}, times="ms")
    row = {name: value for name, (_, _, value) in TYPES.items()}
    made = apply([datum(row, written)], Decoding(decoder="avro", avro=json.dumps(written)), schema)
    assert made.errors.to_pylist() == []
    (got,) = made.output.to_pylist()
    assert {name: got[name] for name in row} == row


@given(
    st.lists(
        st.one_of(
            st.builds(
                datum, st.fixed_dictionaries({"id": st.integers(-9, 9), "word": st.none() | st.text(max_size=3)})
            ),
            st.binary(max_size=12),
        ),
        max_size=20,
    )
)
@settings(max_examples=80, deadline=None)
def test_each_message_is_a_row_or_an_error(values: list[bytes]) -> None:
    made = apply(list(values), Decoding(decoder="avro", avro=json.dumps(ROW)))
    good, bad = [], []
    for place, value in enumerate(values):
        stream = io.BytesIO(value)
        try:
            row: Any = fastavro.schemaless_reader(stream, fastavro.parse_schema(ROW), None)
            assert stream.tell() == len(value)
            assert -(2**63) <= row["id"] < 2**63
            good.append((row["id"], row["word"]))
        except Exception:  # noqa: BLE001 - bytes fail in many ways
            bad.append(place)
    rows = [(row["id"], row["word"]) for row in made.output.to_pylist() for _ in range(row["_diff"])]
    assert sorted(rows, key=repr) == sorted(good, key=repr)
    assert sorted(row["address"] for row in made.errors.to_pylist()) == bad


def test_a_schema_to_read_by_brings_defaults_aliases_and_promotions(tmp_path: Path) -> None:
    old = {"type": "record", "name": "R", "fields": [{"name": "key", "type": "int"}, {"name": "raw", "type": "bytes"}]}
    new = {
        "type": "record", "name": "R",
        "fields": [
            {"name": "id", "type": "long", "aliases": ["key"]}, {"name": "raw", "type": "string"},
            {"name": "more", "type": "string", "default": "none"}, {"name": "ratio", "type": "double", "default": 0.5},
        ],
    }  # fmt: skip
    (tmp_path / "old.avro").write_bytes(packed([{"key": 1, "raw": b"a"}], schema=old))
    (tmp_path / "new.avro").write_bytes(packed([{"id": 2, "raw": "b", "more": "m", "ratio": 1.5}], schema=new))
    schema = persist.Schema(key={"id": "int64"}, value={"raw": "string", "more": "string", "ratio": "float64"})
    reader = folder_of(tmp_path).open()
    marks = reader.high_watermarks({}, 1 << 20)
    tables = [read_all(reader, name, START, mark) for name, mark in sorted(marks.items())]
    table = pa.concat_tables(tables).unify_dictionaries()
    table = table.append_column("partition", pa.array(["p"] * 2))
    table = table.append_column("_time", pa.array([1] * 2, pa.uint64()))
    pipeline = Pipeline(Decoding(decoder="avro", avro=json.dumps(new)), Meaning(), schema)
    made = applied(pipeline, table, lambda _: schema.contents.empty_table())
    assert [tuple(row.values())[:4] for row in made.output.to_pylist()] == [(1, "a", "none", 0.5), (2, "b", "m", 1.5)]


def test_without_one_columns_go_by_name_and_those_that_are_missing_are_null() -> None:
    schemas = {
        1: Written('{"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}'),
        2: Written(json.dumps(ROW)),
        3: Written(json.dumps({**ROW, "fields": [{"name": name, "type": "int"} for name in ("id", "x")]})),
        4: Written("syntax = 3", (), "PROTOBUF"), 5: Written("{"),
    }  # fmt: skip

    def wire(id_: int, data: bytes) -> bytes:
        return b"\0" + id_.to_bytes(4) + data

    values = [
        wire(1, b"\x02"), wire(2, datum({"id": 2, "word": "w"})), wire(3, b"\x02\x02"), wire(4, b""), wire(5, b""),
        b"\0\0\0", b"\1\0\0\0\1\2", wire(1, b"\x02\x02"),
    ]  # fmt: skip
    decoding = Decoding(decoder="avro", registry=Registry(place="r"))
    made = apply(values, decoding, schemas=schemas)
    assert [(row["id"], row["word"]) for row in made.output.to_pylist()] == [(1, None), (2, "w")]
    reasons = {row["address"]: row["reason"] for row in made.errors.to_pylist()}
    assert set(reasons) == {2, 3, 4, 5, 6, 7}
    assert "PROTOBUF" in reasons[3]
    assert "schema is wrong" in reasons[4]
    assert "1 bytes are left" in reasons[7]
    made = apply(values[2:3], Decoding(decoder="avro", registry=Registry(place="r"), extra="ignore"), schemas=schemas)
    assert made.output.num_rows == 1


def test_floats_that_json_does_not_have_are_bad_and_not_null() -> None:
    written = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": "double"}],
    }
    schema = persist.Schema(key={"id": "int64"}, value={"x": "float64"})
    values = [datum({"id": n, "x": x}, written) for n, x in enumerate([1.5, float("nan"), float("inf")])]
    made = apply(list(values), Decoding(decoder="avro", avro=json.dumps(written)), schema)
    assert made.output.num_rows == 1
    assert [row["address"] for row in made.errors.to_pylist()] == [1, 2]
    assert made.errors.to_pylist()[0]["raw"] == values[1]
