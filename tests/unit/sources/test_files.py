"""Files as sources: the conformance suite on each kind, and files that grow, move, shrink and change."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist_lib.errors import Diverged, Gone, NotFound
from persist_lib.location.objects.store import objects_at
from persist_lib.sources.conformance import check_diverged, check_gone, check_many, check_reader, read_all
from persist_lib.sources.files import contents
from persist_lib.sources.files import contents as lines_module
from persist_lib.sources.files.folders import File
from persist_lib.sources.files.kind import Files
from persist_lib.sources.files.reader import LineFiles
from persist_lib.sources.protocol import START, Mark, SourceReader
from tests import servers

LINES = [f'{{"id": {n}, "word": "{"x" * (n % 40)}"}}'.encode() for n in range(300)]
DATA = b"".join(line + b"\n" for line in LINES)
POISON = [b"", b"\xff\xfe", b"{", b'{"id": 1}\r', b"\0" * 10, b"x" * 100_000, b"end"]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def values_of(reader: SourceReader, partition: str, start: Mark = START) -> tuple[list[bytes], Mark]:
    end = reader.high_watermarks({}, 1 << 30)[partition]
    return read_all(reader, partition, start, end).column("value").to_pylist(), end


@pytest.mark.parametrize("identity", ["path", "first line"])
@pytest.mark.parametrize("may_grow", [True, False])
def test_the_conformance_suite(tmp_path: Path, identity: str, may_grow: bool) -> None:
    (tmp_path / "sub").mkdir()
    torn = b"" if may_grow else b'{"id": 1'
    (tmp_path / "sub" / "a.jsonl").write_bytes(DATA + b'{"id": 1')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"gz\n" + DATA[:5000]) + gzip.compress(DATA[5000:]))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(b"zst\n" + DATA))
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(POISON) + b"\n")
    for name in ("empty.jsonl", "_hidden.jsonl", "other.csv"):
        (tmp_path / name).write_bytes(b"" if name == "empty.jsonl" else b"1\n")
    files = Files(place=str(tmp_path), format="jsonl", identity=identity, may_grow=may_grow)  # type: ignore[arg-type]
    expected = {
        "sub/a.jsonl": LINES + ([torn] if torn else []), "b.jsonl.gz": [b"gz", *LINES],
        "c.jsonl.zst": [b"zst", *LINES], "d.jsonl": POISON, "empty.jsonl": [],
    }  # fmt: skip
    if identity == "first line":
        with_ids = {}
        for partition, mark in files.open().high_watermarks({}, 1 << 30).items():
            first = read_all(files.open(), partition, START, mark).column("value")[0].as_py()
            with_ids[partition] = next(values for values in expected.values() if values and values[0] == first)
        assert len(with_ids) == 4
        expected = with_ids
    check_reader(files.open, expected)


def test_csv_has_a_header_in_each_message_and_not_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfid,word\r\n1,a\r\n2,b\n")
    files = Files(place=str(tmp_path), format="csv")
    check_reader(files.open, {"a.csv": [b"1,a\r", b"2,b"]})
    reader = files.open()
    end = reader.high_watermarks({}, 1 << 20)["a.csv"]
    table = read_all(reader, "a.csv", Mark(17), end)
    assert table.column("address").to_pylist() == [17]
    assert table.column("header").to_pylist() == ["id,word"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    check_reader(Files(place=str(tmp_path), format="jsonl").open, {"a.jsonl": [b"one", b"\xef\xbb\xbftwo"]})


def test_parquet_rows_are_structs(tmp_path: Path) -> None:
    rows = [{"id": n, "word": str(n)} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=70)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-10])  # still being written
    files = Files(place=str(tmp_path), format="parquet")
    check_reader(files.open, {"a.parquet": rows})


def stored(format_: str, ids: Sequence[int]) -> bytes:
    """A file of rows."""
    rows, out = [{"id": n, "word": "x" * (n % 40)} for n in ids], io.BytesIO()
    if format_ == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), out)
    elif format_ == "avro":
        fields = [{"name": "id", "type": "long"}, {"name": "word", "type": "string"}]
        fastavro.writer(out, {"type": "record", "name": "R", "fields": fields}, rows, sync_marker=b"0123456789abcdef")
    else:
        out.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return out.getvalue()


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "avro"])
def test_a_file_in_the_place_of_another_has_diverged_and_one_that_went_is_gone(tmp_path: Path, format_: Any) -> None:
    path, name = tmp_path / f"a.{format_}", f"a.{format_}"
    path.write_bytes(stored(format_, range(300)))
    files = Files(place=str(tmp_path), format=format_)
    reader = files.open()
    end = reader.high_watermarks({}, 1 << 30)[name]
    path.write_bytes(stored(format_, [*range(299), 7]))
    with pytest.raises(Diverged):
        files.open().high_watermarks({name: end}, 1)
    check_diverged(files.open(), name, START, end)
    path.unlink()
    assert not reader.high_watermarks({name: end}, 1)
    for one in (reader, files.open()):
        check_gone(one, name, START, end)
    assert read_all(reader, name, end, end).num_rows == 0


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_million_messages_in_bounded_memory(tmp_path: Path, packing: str) -> None:
    data = b"".join(b"%d\n" % n for n in range(1_000_000))
    pack = {"": lambda it: it, ".gz": lambda it: gzip.compress(it, 1), ".zst": zstd}[packing]
    (tmp_path / f"a.log{packing}").write_bytes(pack(data))
    most = check_many(Files(place=str(tmp_path), format="text").open, f"a.log{packing}", 1_000_000)
    assert most < 40 << 20


def test_a_torn_last_line_is_a_message_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntw")
    reader = Files(place=str(tmp_path), format="jsonl").open()
    bound = dict(reader.high_watermarks({}, 1 << 20))
    assert bound["a.jsonl"].address == 4
    assert not reader.high_watermarks(bound, 1 << 20)
    with path.open("ab") as file:
        file.write(b"o\n")
    new = dict(reader.high_watermarks(bound, 1 << 20))
    assert read_all(reader, "a.jsonl", bound["a.jsonl"], new["a.jsonl"]).column("value").to_pylist() == [b"two"]


def test_a_line_longer_than_can_be_kept_is_a_problem_wherever_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 1000)
    monkeypatch.setattr(lines_module, "PIECE", 700)
    data = b"".join(b"x" * n + b"\n" for n in (10, 999, 1000, 1001, 5000, 3, 2500))
    (tmp_path / "a.log").write_bytes(data)
    files = Files(place=str(tmp_path), format="text")
    reader = files.open()
    end = reader.high_watermarks({}, 1 << 20)["a.log"]
    whole = read_all(reader, "a.log", START, end)
    problems = [problem is not None for problem in whole.column("problem").to_pylist()]
    assert problems == [False, False, False, True, True, False, True]
    for index, address in enumerate(whole.column("address").to_pylist()):
        assert read_all(reader, "a.log", Mark(address), end).equals(whole.slice(index))


@pytest.mark.parametrize("how", ["truncated", "replaced by a longer one", "changed before the end", "emptied"])
def test_a_file_that_is_another_one_is_refused_and_named(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    files = Files(place=str(tmp_path), format="jsonl")
    reader = files.open()
    bound = dict(reader.high_watermarks({}, 1 << 30))
    path.write_bytes(
        {
            "truncated": DATA[:-5], "replaced by a longer one": b"{}\n" * 10_000,
            "changed before the end": DATA[:-20] + b"#" + DATA[-19:] + b"{}\n", "emptied": b"",
        }[how]
    )  # fmt: skip
    for one in (reader, files.open()):
        with pytest.raises(Diverged, match=r"a\.jsonl") as raised:
            one.high_watermarks(bound, 1 << 20)
        assert raised.value.partition == "a.jsonl"
        check_diverged(one, "a.jsonl", START, bound["a.jsonl"])
        check_diverged(one, "a.jsonl", bound["a.jsonl"], Mark(bound["a.jsonl"].address + 3))


@pytest.mark.parametrize("how", ["renamed", "copied and truncated", "renamed and packed"])
def test_a_rotated_log_is_the_same_partition_under_its_first_line(tmp_path: Path, how: str) -> None:
    path, old = tmp_path / "app.log", tmp_path / "app.log.1"
    path.write_bytes(b"monday 1\nmonday 2\n")
    reader = Files(place=str(tmp_path), format="text", identity="first line").open()
    bound = dict(reader.high_watermarks({}, 1 << 20))
    assert len(bound) == 1
    (monday,) = bound
    with path.open("ab") as file:
        file.write(b"monday 3\n")
    match how:
        case "renamed":
            path.rename(old)
        case "copied and truncated":
            old.write_bytes(path.read_bytes())
            os.truncate(path, 0)
        case _:
            old.with_name("app.log.1.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    path.write_bytes(b"tuesday 1\n")
    new = dict(reader.high_watermarks(bound, 1 << 20))
    assert len(new) == 2
    assert read_all(reader, monday, bound[monday], new[monday]).column("value").to_pylist() == [b"monday 3"]
    assert read_all(reader, monday, START, new[monday]).num_rows == 3
    (tuesday,) = set(new) - {monday}
    assert read_all(reader, tuesday, START, new[tuesday]).column("value").to_pylist() == [b"tuesday 1"]


@pytest.mark.parametrize("moment", ["marking", "reading"])
def test_a_log_that_is_rotated_between_a_look_and_a_read_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "app.log"
    path.write_bytes(b"monday 1\nmonday 2\n")
    reader = Files(place=str(tmp_path), format="text", identity="first line").open()
    bound = dict(reader.high_watermarks({}, 1 << 20))
    (monday,) = bound
    listed = LineFiles._listed

    def rotated(self: LineFiles) -> dict[str, File]:
        found = listed(self)
        monkeypatch.setattr(LineFiles, "_listed", listed)
        path.rename(tmp_path / "app.log.1")
        path.write_bytes(b"tuesday 1\n" * 10)
        return found

    if moment == "marking":
        with path.open("ab") as file:
            file.write(b"monday 3\n")
        monkeypatch.setattr(LineFiles, "_listed", rotated)
        assert monday not in reader.high_watermarks(bound, 1 << 20)
        bound |= reader.high_watermarks(bound, 1 << 20)
        assert bound[monday].address == 27
    else:
        rotated(reader)  # type: ignore[arg-type]
    assert read_all(reader, monday, START, bound[monday]).column("value").to_pylist()[:2] == [b"monday 1", b"monday 2"]


def test_new_files_are_new_partitions(tmp_path: Path) -> None:
    reader = Files(place=str(tmp_path), format="jsonl").open()
    bound: dict[str, Mark] = {}
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(name.encode() + b"\n")
        new = dict(reader.high_watermarks(bound, 1 << 20))
        assert list(new) == [f"{name}.jsonl"]
        bound |= new


def test_a_packed_file_is_unpacked_once_however_small_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(200_000))))
    begun = 0
    begin = contents.Packed._begin

    def counted(self: contents.Packed) -> None:
        nonlocal begun
        begun += 1
        begin(self)

    monkeypatch.setattr(contents.Packed, "_begin", counted)
    reader = Files(place=str(tmp_path), format="text").open()
    bound: dict[str, Mark] = {}
    seen = 0
    while new := dict(reader.high_watermarks(bound, 100_000)):
        seen += read_all(reader, "a.log.gz", bound.get("a.log.gz", START), new["a.log.gz"]).num_rows
        bound |= new
    assert (seen, begun) == (200_000, 1)


@pytest.mark.parametrize("scheme", [*servers.STORES])
def test_objects_of_a_cloud(scheme: str) -> None:
    servers.use_test_credentials()
    lines = LINES[:60]  # each address is begun at, and each step of the marks lists: some requests a line
    data = b"".join(line + b"\n" for line in lines)
    place = servers.store_url(scheme, name="")
    with closing(objects_at(place)) as store:
        store.overwrite("in/a.jsonl", data + b"last", "put")
        store.overwrite("in/x/b.jsonl.gz", gzip.compress(data), "put")
        store.overwrite("other/c.jsonl", data, "put")
        place = place.replace("/?", "/in/?")
        files = Files(place=place, format="jsonl")
        check_reader(files.open, {"a.jsonl": [*lines, b"last"], "x/b.jsonl.gz": lines})
        reader = files.open()
        end = reader.high_watermarks({}, 1 << 30)["a.jsonl"]
        store.overwrite("in/a.jsonl", data.replace(b"id", b"ID"), "put")
        with pytest.raises((Diverged, Gone)):
            read_all(reader, "a.jsonl", START, end)
        check_diverged(files.open(), "a.jsonl", START, end)
        store.delete_one("in/a.jsonl", "delete")
        check_gone(files.open(), "a.jsonl", START, end)


@pytest.mark.parametrize("seed", range(5))
def test_random_appends_give_each_line_once(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path / "a.log"
    path.touch()
    reader = Files(place=str(tmp_path), format="text").open()
    data = b"".join(bytes(random.integers(97, 123, random.integers(0, 30))) + b"\n" for _ in range(300))
    bound: dict[str, Mark] = {}
    got: list[bytes] = []
    at = 0
    while at < len(data) or (bound and bound["a.log"].address < len(data)):
        size = int(random.integers(0, 200))
        with path.open("ab") as file:
            file.write(data[at : at + size])
        at += size
        new = dict(reader.high_watermarks(bound, int(random.integers(1, 300))))
        for partition, mark in new.items():
            got += read_all(reader, partition, bound.get(partition, START), mark).column("value").to_pylist()
        bound |= new
    assert got == data.split(b"\n")[:-1]


def test_a_folder_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        Files(place=str(tmp_path / "nope"), format="csv").open()
