"""Formats of an ingest: CSV with all its options, Parquet, and changes as Debezium writes them."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from jobs.ingesting.inputs import local_file
from jobs.ingesting.reading import read_unpacked
from jobs.ingesting.running import Ingest
from jobs.ingesting.sampling import infer_schema
from jobs.ingesting.settings import Settings
from persist_lib.convert.lines.decompression import DamagedFile
from persist_lib.errors import InvalidUsage
from tests.circles import by_day
from tests.unit.jobs.ingests import Killed, Kills, client_of, contents, run

SCHEMA = persist.Schema(
    key={"id": "int64 not null"}, value={"name": "string", "price": "decimal128(10, 2)", "at": "timestamp[us, UTC]"}
)
SMALL = persist.Schema(key={"id": "int64 not null"}, value={"name": "string"})


def ingested(
    path: Path, settings: Settings, schema: persist.Schema = SMALL, **more: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, and the bad lines."""
    with client_of("memory:") as client:
        run(client, Ingest("s", [str(path)], settings, schema, **more))
        return contents(client, "s"), contents(client, "s_bad")


def rows_of(found: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found for _ in range(row["_diff"])]


def test_csv_with_another_delimiter_encoding_nulls_names_and_epochs(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("1;'Jürgen; x';1.50;1700000000000\r\n2;\\N;\\N;\\N\r\n3;'';2;x\r\n".encode("latin-1"))
    settings = Settings(
        "csv",
        delimiter=";",
        quote="'",
        names=("nr", "name", "price", "at"),
        nulls=("\\N",),
        encoding="latin-1",
        columns={"id": "nr"},
        epochs={"at": "ms"},
    )
    rows, bad = ingested(path, settings, SCHEMA)
    at = dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)
    assert rows_of(rows, "id", "name", "price", "at") == [(1, "Jürgen; x", Decimal("1.50"), at), (2, None, None, None)]
    assert rows_of(bad, "line", "text") == [(3, "3;'';2;x")]


def test_quoted_line_ends_are_bad_lines_unless_they_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,name\n1,"two\nlines"\n2,b\n3,"never closed\n4,d\n5,"open')
    rows, bad = ingested(path, Settings("csv", chunk_bytes=5))
    assert rows_of(rows, "id", "name") == [(2, "b"), (4, "d")]
    assert rows_of(bad, "line") == [(2,), (3,), (5,), (7,)]
    path.write_text('id,name\n1,"two\nlines"\n2,b\nx,"bad\none"\n4,d\n')
    rows, bad = ingested(path, Settings("csv", chunk_bytes=5, multiline=True))
    assert rows_of(rows, "id", "name") == [(1, "two\nlines"), (2, "b"), (4, "d")]
    assert rows_of(bad, "line", "text") == [(5, 'x,"bad\none"')]


def test_headers_decide_the_order_and_wrong_ones_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffname,id\na,1\n")
    (tmp_path / "b.csv").write_text("id,name,more\n2,b,x\n")
    (tmp_path / "c.csv").write_text("")
    with client_of("memory:") as client:
        with pytest.raises(InvalidUsage, match=r"1 of 2 files.*b\.csv.*more.*--extra ignore"):
            run(client, Ingest("s", [str(tmp_path)], Settings("csv"), SMALL))
        assert client.shards() == [], "nor is a shard there, whose schema would count from then on"
    rows, _ = ingested(tmp_path, Settings("csv", extra="ignore"))
    assert rows_of(rows, "id", "name") == [(1, "a"), (2, "b")]
    (tmp_path / "b.csv").write_text("id\n2\n")
    with pytest.raises(InvalidUsage, match="--missing null"):
        ingested(tmp_path, Settings("csv"))
    rows, _ = ingested(tmp_path, Settings("csv", missing="null"))
    assert rows_of(rows, "id", "name") == [(1, "a"), (2, None)]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_damaged_file_gives_what_comes_before_the_damage_and_one_bad_line(tmp_path: Path, ending: str) -> None:
    data = b"".join(
        b'{"id": %d, "name": "%d"}\n' % (number, random.Random(number).getrandbits(200)) for number in range(20_000)
    )
    packed = gzip.compress(data) if ending == ".gz" else pa.compress(data, "zstd", asbytes=True)
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed)
    assert b"".join(read_unpacked(local_file(str(path)))) == data
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DamagedFile):
        list(read_unpacked(local_file(str(path))))
    rows, bad = ingested(path, Settings("jsonl"))
    assert 0 < len(rows) < 20_000
    assert [row["id"] for row in rows] == list(range(len(rows)))
    damage = [row for row in bad if "was not read" in row["reason"]]
    assert len(damage) == 1
    assert damage[0]["line"] in (len(rows) + 1, len(rows) + 2)


def test_parquet_is_read_by_row_groups_and_rows_that_do_not_fit_are_bad(tmp_path: Path) -> None:
    ids = list(range(1000))
    table = pa.table(
        {
            "id": pa.array([None if n == 500 else n for n in ids], pa.int32()),
            "name": [f"n{n}" for n in ids],
            "price": [2.5 if n != 7 else 0.1 for n in ids],
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=100)
    schema = persist.Schema(key={"id": "int64 not null"}, value={"name": "string", "price": "float32"})
    rows, bad = ingested(path, Settings("parquet", chunk_bytes=2000), schema)
    assert rows_of(rows, "id") == [(n,) for n in ids if n not in (7, 500)]
    assert rows_of(bad, "line") == [(8,), (501,)]
    narrow = persist.Schema(key={"id": "int8 not null"}, value={"name": "string"})
    rows, bad = ingested(path, Settings("parquet", chunk_bytes=2000, extra="ignore"), narrow)
    assert rows_of(rows, "id") == [(n,) for n in range(128)]
    assert len(bad) == 872
    path.write_bytes(b"PAR1 no")
    rows, bad = ingested(path, Settings("parquet"), schema)
    assert (rows, len(bad)) == ([], 1)


def test_rows_have_times_of_their_own_in_one_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"id": n, "at": f"2026-01-0{n}T00:00:00Z"} for n in range(1, 6)] + [
        {"id": 9, "at": None},
        {"id": 8, "at": "2026-01-01T00:00:00.0001Z"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    schema = persist.Schema(key={"id": "int64 not null"}, value={"at": "timestamp[us, UTC]"}, times="ms")
    until = int(dt.datetime(2026, 1, 5, tzinfo=dt.UTC).timestamp() * 1000)
    with client_of("memory:") as client:
        asked = Ingest(
            "s", [str(path)], Settings("jsonl", time_column="at", chunk_bytes=50), schema, bounds=(None, until)
        )
        run(client, asked)
        with client.open_reader("s") as read:
            assert read.fetch_upper().time == until
            assert [row["id"] for row in read.snapshot("2026-01-02T12:00:00Z", diff=True).to_pylist()] == [1, 2]
        assert len(contents(client, "s_bad")) == 3
        path.with_name("b.jsonl").write_text('{"id": 7, "at": "2026-02-01T00:00:00Z"}')
        with pytest.raises(InvalidUsage, match="complete up to"):
            run(client, Ingest("s", [str(tmp_path)], asked.settings, schema, bounds=(None, until)))


# Changes: a small table, and what a connector says of it.


def changes_of(seed: int, count: int, identity: str) -> tuple[list[str], dict[int, str]]:
    """Lines of changes in their order, and the table after them. `identity` is what `before` has: all, key or none."""
    rng = random.Random(seed)
    table: dict[int, str] = {}
    lines = []
    for number in range(count):
        key = rng.randrange(20)
        before = {"id": key, "name": table.get(key)} if identity == "all" else {"id": key}
        source = {"lsn": number, "txId": number // 3}
        if key not in table:
            change: Any = {
                "op": rng.choice("cr"),
                "before": None,
                "after": {"id": key, "name": f"v{number}"},
                "source": source,
            }
            table[key] = f"v{number}"
        elif rng.random() < 0.3:
            change = {"op": "d", "before": before, "after": None, "source": source}
            del table[key]
        else:
            change = {
                "op": "u",
                "before": before if identity == "all" else None,
                "after": {"id": key, "name": f"v{number}"},
                "source": source,
            }
            table[key] = f"v{number}"
        lines.append(json.dumps({"schema": {"type": "struct"}, "payload": change} if rng.random() < 0.3 else change))
        if change["op"] == "d":
            lines.append("null")
    return lines, table


def write_changes(folder: Path, lines: list[str], files: int) -> None:
    folder.mkdir()
    size = len(lines) // files + 1
    for number, start in enumerate(range(0, len(lines), size)):
        (folder / f"{number:03}.json").write_text("\n".join(lines[start : start + size]) + "\n")


@pytest.mark.parametrize(("kind", "identity"), [("by-key", "all"), ("by-key", "key"), ("before", "all")])
@pytest.mark.parametrize("seed", [1, 2])
def test_changes_make_the_table_that_they_came_from(tmp_path: Path, kind: Any, identity: str, seed: int) -> None:
    lines, table = changes_of(seed, 400, identity)
    write_changes(tmp_path / "in", lines, 8)
    with client_of("memory:") as client:
        outcome = run(
            client,
            Ingest(
                "s",
                [str(tmp_path / "in")],
                Settings("debezium", changes=kind, chunk_bytes=700, group_bytes=9000),
                SMALL,
            ),
        )
        assert {row["id"]: row["name"] for row in contents(client, "s")} == table
        assert {row["_diff"] for row in contents(client, "s")} == {1}
        assert outcome.groups > 2
        assert contents(client, "s_bad") == []


def test_changes_by_key_that_come_twice_make_the_same_table(tmp_path: Path) -> None:
    lines, table = changes_of(3, 200, "key")
    write_changes(tmp_path / "in", [*lines[:150], *lines[100:]], 5)
    with client_of("memory:") as client:
        run(client, Ingest("s", [str(tmp_path / "in")], Settings("debezium", chunk_bytes=700, group_bytes=4000), SMALL))
        assert {row["id"]: row["name"] for row in contents(client, "s")} == table


@pytest.mark.parametrize("happens", [False, True])
def test_changes_by_key_are_applied_once_however_often_it_is_killed(tmp_path: Path, happens: bool) -> None:
    lines, table = changes_of(4, 120, "key")
    write_changes(tmp_path / "in", lines, 4)
    asked = Ingest("s", [str(tmp_path / "in")], Settings("debezium", chunk_bytes=700, group_bytes=2000), SMALL)
    for at in by_day(range(1, 1 << 20), 4):
        url = f"memory:changes-{tmp_path.name}-{happens}-{at}"
        client = client_of(url, Kills(at, happens=happens))
        try:
            run(client, asked)
        except Killed:
            with client_of(url) as again:
                run(again, asked)
                assert {row["id"]: row["name"] for row in contents(again, "s")} == table
        else:
            break
    assert at > 10


def test_a_transaction_is_whole_at_each_time(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(12):  # transaction n is in files n and n + 1
        rows = [
            {"op": "c", "after": {"id": 2 * number + at, "name": str(number + at)}, "source": {"txId": number + at}}
            for at in (0, 1)
        ]
        packed = "\n".join(map(json.dumps, rows)).encode()
        path = tmp_path / f"in/{number:03}.json"
        path.write_bytes(packed) if number % 4 else path.with_suffix(".json.gz").write_bytes(gzip.compress(packed))
    rows = [{"op": "c", "after": {"id": 100, "name": "last"}, "source": {"txId": 99}}]
    (tmp_path / "in/900.json").write_text("\n".join(map(json.dumps, rows)))
    with client_of("memory:") as client:
        outcome = run(client, Ingest("s", [str(tmp_path / "in")], Settings("debezium", group_bytes=1), SMALL))
        assert outcome.groups == 2
        with client.open_reader("s") as read:
            assert len(read.snapshot(0, diff=True).to_pylist()) == 24


def test_changes_that_cannot_be_applied_are_bad_lines_and_a_truncation_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '{"op": "u", "before": null, "after": {"id": 1, "name": "x"}}\n'
        '{"op": "d", "before": null}\n{"op": "z"}\n{"id": 1}\n[]\n'
    )
    rows, bad = ingested(path, Settings("debezium", changes="before"))
    assert rows == []
    assert rows_of(bad, "line") == [(1,), (2,), (3,), (4,), (5,)]
    assert "--changes by-key" in bad[0]["reason"]
    path.write_text('{"op": "c", "after": {"id": 1, "name": "x"}}\n{"op": "t"}\n')
    with client_of("memory:") as client:
        with pytest.raises(InvalidUsage, match="op t"):
            run(client, Ingest("s", [str(path)], Settings("debezium"), SMALL))
        assert contents(client, "s") == []


def test_constraints_hold_for_changes_by_key_and_are_refused_elsewhere(tmp_path: Path) -> None:
    lines, table = changes_of(5, 100, "key")
    write_changes(tmp_path / "in", lines, 2)
    unique = persist.Schema(key={"id": "int64 not null"}, value={"name": "string"}, unique=True)
    with client_of("memory:") as client:
        run(client, Ingest("s", [str(tmp_path / "in")], Settings("debezium"), unique))
        assert {row["id"]: row["name"] for row in contents(client, "s")} == table
        with pytest.raises(InvalidUsage, match="constraint unique"):
            run(client, Ingest("s", [str(tmp_path / "in")], Settings("jsonl"), unique))


def test_schemas_are_inferred_from_the_first_lines(tmp_path: Path) -> None:
    csv_, json_ = tmp_path / "a.csv", tmp_path / "a.jsonl"
    csv_.write_text("id,name,price,at,day\n1,a,1.5,2026-01-01T00:00:00Z,2026-01-01\n2,,,,\n")
    json_.write_text('{"id": 1, "name": "a", "price": 1.5, "at": "2026-01-01T00:00:00Z", "gone": null}\nnull\n')
    for path, form, value in (
        (csv_, "csv", {"name": "string", "price": "float64", "at": "timestamp[us, UTC]", "day": "date32"}),
        (json_, "jsonl", {"name": "string", "price": "float64", "at": "timestamp[us, UTC]", "gone": "string"}),
    ):
        schema = infer_schema(local_file(str(path)), Settings(form), ["id"])  # type: ignore[arg-type]
        assert schema == persist.Schema(key={"id": "int64 not null"}, value=value)
    with pytest.raises(InvalidUsage, match="no such column"):
        infer_schema(local_file(str(csv_)), Settings("csv"), ["idd"])
    json_.write_text('{"id": 1, "tags": [1]}\n')
    with pytest.raises(InvalidUsage, match="tags"):
        infer_schema(local_file(str(json_)), Settings("jsonl"), ["id"])
