"""The past at a shell: of what is new, quiet or was given other columns."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from tests.integration.test_cli import Shell

OLD = persist.Schema({"id": "int64 not null"}, {"cents": "int64"}, times="ms")
NEW = persist.Schema({"id": "int64 not null"}, {"amount": "int64"}, times="ms")


def renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["amount" if name == "cents" else name for name in table.column_names])


def test_after_a_rename_by_handover_the_past_is_read_in_the_columns_that_it_had(sh: Shell) -> None:
    with persist.open(sh.root, runtime=persist.Runtime(background=False)) as client:
        controller = client.controller()
        tables = controller.tables()
        controller.create("c", OLD, mode="compare_and_append")
        tables.create("t", OLD)
        with controller.open_writer("c") as write:
            before = {"c": (write.append_now([{"id": 1, "cents": 5}]).upper.time or 0) - 1}
        before["t"] = tables.insert("t", [{"id": 1, "cents": 5}]).time or 0
        for name in before:
            controller.make_rendition(name, schema=NEW, copy=True)
            controller.copy_rendition(name, 2, transform=renamed)
            controller.hand_over(name, 2)
            controller.copy_rendition(name, 2, transform=renamed, to_end=True)
        with controller.open_writer("c") as write:
            write.append_now([{"id": 2, "amount": 7}])
        tables.insert("t", [{"id": 2, "amount": 7}])
        then, now = [{"id": 1, "cents": 5}], [{"id": 1, "amount": 5}, {"id": 2, "amount": 7}]
        with controller.open_reader("c") as reader:
            assert reader.snapshot(before["c"]).to_pylist() == then
            assert reader.snapshot(before["c"], columns=["cents"]).to_pylist() == [{"cents": 5}]
            assert sorted(reader.snapshot().to_arrow().column("amount").to_pylist()) == [5, 7]
        with controller.open_reader("c", NEW) as reader, pytest.raises(persist.SchemaChanged):
            reader.snapshot(before["c"])
        assert tables.read("t", before["t"]).to_pylist() == then
    for name in ("c", "t"):
        assert sh.rows("read", name, "--as-of", str(before[name])) == then
        assert sh.rows("sql", f"select * from {name} as of {before[name]}") == then
        assert sh.rows("sql", f"select id, amount from {name} order by id") == now
    assert [row["cents"] for row in sh.rows("changes", "c", "--to", str(before["c"]))] == [5]


def test_what_is_new_is_empty_at_every_door(sh: Shell) -> None:
    with persist.open(sh.root) as client:
        client.open_writer("s", OLD).close()
        client.controller().create("c", OLD)
        client.controller().tables().create("t", OLD)
        client.controller().tables().create("w", OLD, timeline="wal", mode="wal")
    reads: list[tuple[str, ...]] = [
        ("read", "s"), ("read", "c"), ("read", "t"), ("read", "w"),
        *[("sql", f"select * from {name}") for name in "sctw"],
        ("changes", "c"), ("changes", "t"), ("changes", "s"),
    ]  # fmt: skip
    for words in reads:
        assert sh.rows(*words) == [], words
    for words in reads[-5:]:
        assert sh(*words), "for people, too: no time is complete yet"
    assert sh.rows("sql", "select count(*) as n from s, c, t, w") == [{"n": 0}]


def test_a_quiet_table_is_read_as_of_a_minute_ago_by_who_may_complete_that_time(sh: Shell) -> None:
    with persist.open(sh.root, runtime=persist.Runtime(background=False)) as client:
        tables = client.controller().tables()
        tables.create("t", OLD)
        tables.insert("t", [{"id": 1, "cents": 5}])
        told = sh.fails(1, "read", "t", "--as-of", "2100-01-01T00:00Z")
        assert "NotComplete" in told
        assert "--newest" in told
        (row,) = sh.rows("read", "t", "--as-of", "2100-01-01T00:00Z", "--newest")
        assert row == {"id": 1, "cents": 5}
        assert sh.rows("read", "t", "--as-of", "now") == [row], "as a program does, the command completes that time"
        assert len(sh.rows("changes", "t", "--from", "1 hour ago", "--to", "now")) == 1
        assert len(sh.rows("history", "t", "--to", "now")) == 1
        done: Any = tables.read("t", "now")
        assert sh.rows("read", "t", "--as-of", str(done.as_of)) == [row]
        assert json.loads(sh("read", "t", "--json"))["as_of"] >= done.as_of
