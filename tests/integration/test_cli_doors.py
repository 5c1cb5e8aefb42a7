"""`persist sql`, `changes` and `restore` on a real location, with DuckDB."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from tests.integration.test_cli import Shell

SCHEMA = persist.Schema(key={"order_id": "int64"}, value={"state": "string", "cents": "int64"})
SMALL = persist.Config(inline_bytes=0)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    root = tmp_path / "data"
    with persist.open(root, config=SMALL) as client:
        write = client.open_writer("orders", SCHEMA)
        for at in range(10):
            rows = [{"order_id": at, "state": "placed", "cents": 100 * at}]
            if at % 3 == 2:
                rows.append({"order_id": at - 1, "state": "placed", "cents": 100 * (at - 1), "_diff": -1})
            write.compare_and_append(rows, at, at + 1)
        client.open_writer("late-orders", SCHEMA).compare_and_append([{"order_id": 3, "state": "x", "cents": 5}], 0, 1)
        client.open_writer("Orders", SCHEMA).compare_and_append([{"order_id": 7, "state": "big", "cents": 1}], 0, 1)
        client.open_writer("damaged", SCHEMA).compare_and_append([{"order_id": 1, "state": "d", "cents": 1}], 0, 1)
    (part,) = (root / "blob" / "damaged").rglob("*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.chmod(0o600)
    part.write_bytes(bytes(data))
    return Shell(root)


def test_a_query_reads_shards_as_of_their_times(shell: Shell) -> None:
    ids = [0, 2, 3, 5, 6]
    for query in (
        "select order_id from orders as of 6 order by 1", "select orders.order_id from orders as of '6' order by all",
        "with o as (from orders as of 6) select order_id from o order by 1",
        "select order_id from (select * from orders as of 6) order by 1",
        "with orders as (select * from orders as of 6) select order_id from orders order by 1",
    ):  # fmt: skip
        assert [row["order_id"] for row in shell.rows("sql", query)] == ids, query
    assert shell.rows("sql", "select sum(cents) s, count(*) n from orders as of 6") == [{"s": 1600, "n": 5}]
    assert shell.rows("sql", "--diff", "select sum(_diff) d from orders as of 6") == [{"d": 5}]
    joined = 'select o.order_id, l.state from orders as of 4 o join "late-orders" l using (order_id)'
    assert shell.rows("sql", joined) == [{"order_id": 3, "state": "x"}]
    gone = "select order_id from orders as of 4 anti join orders as of 5 n using (order_id)"
    assert shell.rows("sql", gone) == [{"order_id": 4}]
    assert shell.rows("sql", "select 'orders as of 3' as of, 1 as of_ from orders as of 0") == [
        {"of": "orders as of 3", "of_": 1}
    ]
    both = "select a.order_id, b.order_id from Orders as of 0 a, orders as of 0 b"
    assert shell.rows("sql", both) == [{"order_id": 7, "order_id_1": 0}]
    assert shell.rows("sql", "select 1 + 1 as two") == [{"two": 2}]
    assert [row["column_name"] for row in shell.rows("sql", "describe orders")] == SCHEMA.names


def test_only_the_shards_that_are_named_are_opened(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_reader = persist.Client.open_reader

    def spy(self: persist.Client, name: str, *rest: Any, **more: Any) -> persist.ReadHandle:
        opened.append(name)
        return open_reader(self, name, *rest, **more)

    monkeypatch.setattr(persist.Client, "open_reader", spy)
    shell("sql", "select 'from damaged' from orders o, orders as of 3 where true -- damaged as of 0\n /* damaged */")
    assert opened == ["orders"]


def test_output_comes_in_every_form(shell: Shell, tmp_path: Path) -> None:
    query = "select order_id, state, cents / 3 as third from orders as of 6 order by order_id"
    done = shell.run("sql", query)
    assert "placed" in done.stdout
    assert "5 rows; orders as of 6" in done.stderr
    assert len(list(csv.DictReader(io.StringIO(shell("sql", query, "-f", "csv"))))) == 5
    assert len(shell("sql", query, "-f", "jsonl").splitlines()) == 5
    shell("sql", query, "-f", "parquet", "-o", str(tmp_path / "x.parquet"))
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 5
    assert len(shell("sql", query, "-f", "jsonl", "--limit", "2").splitlines()) == 2
    assert shell("sql", "-", "-f", "jsonl", typed="select 1 as x") == '{"x":1}\n'
    shell.fails(2, "sql", query, "-f", "parquet")
    assert shell("sql", "select [1, 2] as x", "-f", "csv") == '"x"\n"[1,2]"\n'
    assert shell.rows("sql", "select [1, 2] as x, {'a': 1} as y, null as z, date '2020-01-01' as d") == [
        {"x": [1, 2], "y": {"a": 1}, "z": None, "d": "2020-01-01"}
    ]
    assert shell.rows("sql", "select 170141183460469231731687303715884105727::hugeint as x") is not None


@pytest.mark.parametrize(
    ("query", "code", "says"),
    [
        ("selec 1", 2, "syntax error"), ("select nope from orders", 2, "nope"), ("select 'a'::int", 2, "convert"),
        ("select * from ordrs", 1, "Did you mean"), ("select * from orders as of 10", 1, "upper"),
        ("select * from orders as of 'noon'", 2, "must be a time"), ("create table x (a int)", 2, "one SELECT"),
        ("select 1; select 2", 2, "one SELECT"), ("", 2, "one SELECT"), ("/* nothing */", 2, "one SELECT"),
        ("copy (select 1) to '/tmp/never'", 2, "one SELECT"), ("select * from a.b", 2, "double quotes"),
        ("select * from a.b as of 3", 2, "double quotes"), ("attach 'x.db'", 2, "one SELECT"),
        ("select * from orders, Orders", 2, "upper and lower case"), ("select * from damaged", 3, "digest"),
        ("select count(*) from orders o join damaged d using (order_id)", 3, "digest"),
        ("select * from 'x/y'", 1, "no table 'x/y'"), ("select error('no')", 2, "no"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_a_sentence_and_an_exit_code(shell: Shell, query: str, code: int, says: str) -> None:
    assert says in shell.fails(code, "sql", query)


def test_without_duckdb_the_extra_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "persist-lib[sql]" in shell.fails(2, "sql", "select 1")


def test_a_query_finds_no_variables_and_no_other_locations(shell: Shell, tmp_path: Path) -> None:
    assert "session" in shell.fails(1, "sql", "select * from session")
    before = sorted(tmp_path.iterdir())
    shell.fails(1, "sql", "select * from nothing", "--location", str(tmp_path / "mistyped"))
    shell.fails(2, "sql", "select 1", "--location", "C:\\data")
    assert sorted(tmp_path.iterdir()) == before, "a location that is only read is not made"


def test_changes_are_printed_with_their_times(shell: Shell) -> None:
    rows = shell.rows("changes", "orders", "--from", "7")
    assert [(row["order_id"], row["_time"], row["_diff"]) for row in rows] == [(7, 8, -1), (8, 8, 1), (9, 9, 1)]
    assert shell.rows("changes", "orders", "--from", "3", "--to", "3") == []
    assert len(shell.rows("changes", "orders")) == 13
    assert "3 changes" in shell.run("changes", "orders", "--from", "7").stderr
    for words, code in ((("--from", "9", "--to", "3"), 2), (("--from", "x"), 2), (("--from", "3", "--to", "10"), 1)):
        shell.fails(code, "changes", "orders", *words)
    shell.fails(1, "changes", "nope", "--from", "3")
    shell.fails(3, "changes", "damaged")


def test_a_restore_is_shown_and_then_done(shell: Shell) -> None:
    before = shell("read", "orders", "--json")
    assert "would be restored to 6" in shell("restore", "orders", "--to", "6", "--dry-run")
    assert shell("read", "orders", "--json") == before
    told = json.loads(shell("restore", "orders", "--to", "6", "--dry-run", "--json"))
    assert (told["to"], told["seqno"], told["rows"], len(told["sample"])) == (6, None, 2, 2)
    assert "restored to 6" in shell("restore", "orders", "--to", "6")
    assert shell.rows("read", "orders") == shell.rows("read", "orders", "--as-of", "6")
    assert "already" in shell("restore", "orders", "--to", "6")
    shell.fails(1, "restore", "orders", "--to", "99")
    shell.fails(2, "restore", "orders", "--to", "x")
    shell.fails(2, "restore", "orders")
    shell.fails(1, "restore", "nope", "--to", "1")
