"""The command with a shard whose times are a clock: appended to, read, held and kept by moments, and shown so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import persist_lib as persist
from tests.integration.test_cli import Shell

T = 1_795_348_800_000
"""2026-11-22T12:00:00Z in ms."""
ISO = ("2026-11-22T12:00:00Z", "2026-11-22 14:00+01:00", "2026-11-22T14:00:00.250Z")


def csv(path: Path, *times: object) -> Path:
    path.write_text("id,state,_time\n" + "".join(f"{n},s{n},{time}\n" for n, time in enumerate(times)))
    return path


def jsonl(path: Path, *times: object) -> Path:
    path.write_text(
        "".join(json.dumps({"id": n, "state": f"s{n}", "_time": time}) + "\n" for n, time in enumerate(times))
    )
    return path


CREATE = ("--create", "--key", "id", "--times", "ms")


@pytest.fixture
def made(sh: Shell, tmp_path: Path) -> Shell:
    said = sh("append", "orders", csv(tmp_path / "in.csv", *ISO), "--lower", 0, "--upper", "2026-11-22T15:00Z", *CREATE)
    assert said == "orders v3: 3 updates, upper is [2026-11-22T15:00:00Z]\n"
    return sh


@pytest.mark.parametrize("write", [csv, jsonl])
@pytest.mark.parametrize("times", [ISO, (T, T + 3_600_000, T + 7_200_250)], ids=["ISO", "integers"])
def test_a_file_may_have_moments_or_integers(write, times, sh: Shell, tmp_path: Path):
    name = "in.csv" if write is csv else "in.jsonl"
    sh("append", "orders", write(tmp_path / name, *times), "--lower", 0, "--upper", "2026-11-23", *CREATE)
    lines = sh("listen", "orders", "--as-of", 0, "--no-wait").splitlines()
    assert [line.split()[0] for line in lines[:3]] == [
        "[2026-11-22T12:00:00Z]", "[2026-11-22T13:00:00Z]", "[2026-11-22T14:00:00.250Z]",
    ]  # fmt: skip
    assert lines[-1] == "progress [2026-11-23T00:00:00Z]"


def test_what_listen_prints_as_json_goes_in_again(made: Shell, tmp_path: Path):
    events = [json.loads(line) for line in made("listen", "orders", "--as-of", 0, "--no-wait", "--json").splitlines()]
    rows = [row for event in events for row in event.get("updates", [])]
    assert rows[0]["_time"] == "2026-11-22T12:00:00Z"
    assert events[-1] == {"progress": [T + 3 * 3_600_000], "as_of": T + 3 * 3_600_000 - 1}, "metadata are integers"
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made("append", "copy", again, "--lower", 0, "--upper", T + 3 * 3_600_000, *CREATE)
    with made.client() as client:
        assert client.inspect("copy").state.fingerprint == client.inspect("orders").state.fingerprint


@pytest.mark.parametrize(
    ("as_of", "count"),
    [
        ("2026-11-22T12:00Z", 1), ("2026-11-22T13:00:00+01:00", 1), ("2026-11-22T13:59:59.9999Z", 2),
        (str(T + 7_200_250), 3), ("2026-11-22", 0), ("1_795_348_800_000", 1),
    ],
)  # fmt: skip
def test_contents_are_read_as_of_a_moment(as_of: str, count: int, made: Shell):
    done = made.run("read", "orders", "--as-of", as_of)
    assert done.exit_code == 0, done.output
    assert f"{count} row" in done.stderr
    assert re.search(r"orders as of 2026-11-22T\d\d:\d\d:\d\d", done.stderr)
    found = made.json("read", "orders", "--as-of", as_of)
    assert len(found["rows"]) == count
    assert isinstance(found["as_of"], int)
    assert found["times"] == "ms"


def test_ago_is_reckoned_from_now(sh: Shell):
    with persist.open(f"file:{sh.root}") as client:
        write = client.open_writer("orders", persist.Schema({"id": "int64"}, times="us"))
        rows = [{"id": 1, "_time": "2 hours ago"}, {"id": 2, "_time": "30 minutes ago"}]
        write.compare_and_append(rows, 0, "now")
    assert [row["id"] for row in sh.json("read", "orders", "--as-of", "1 hour ago")["rows"]] == [1]
    assert [row["id"] for row in sh.json("read", "orders", "--as-of", "5 min ago")["rows"]] == [1, 2]
    assert "NotComplete" in sh.fails(1, "read", "orders", "--as-of", "now")
    sh("hold", "set", "--give-up", "orders", "audit", "--since", "90 minutes ago", "--yes")
    sh("set-retention", "orders", "1 hour")
    sh("maintain", "orders")
    assert "SinceViolation" in sh.fails(1, "read", "orders", "--as-of", "2 hours ago")
    assert len(sh.json("read", "orders", "--as-of", "80 minutes ago")["rows"]) == 1


def test_sql_completes_a_time_that_the_clock_has_passed_as_read_does(sh: Shell):
    with persist.open(f"file:{sh.root}") as client:
        client.table("orders", persist.Schema({"id": "int64"})).append([{"id": 1}])
    asked = "select count(*) as n from orders as of '1 ms ago'"
    assert sh.json("sql", asked)["rows"] == [{"n": 1}]


TABLES = (
    "shard list", "shard show orders", "shard show orders --batches", "shard list orders --long", "describe orders",
    "shard log orders", "maintain orders", "maintain orders --only retention",
    "maintain orders --only compaction --dry-run", "shard log orders 1", "shard list orders --watch --count 1",
    "describe orders --who",
)  # fmt: skip


def test_every_table_shows_moments_and_json_has_integers_and_says_the_clock(made: Shell):
    made("hold", "set", "--give-up", "orders", "audit", "--since", "2026-11-22T12:30Z", "--yes")
    said = made("set-retention", "orders", "7 days")
    assert said.startswith("orders keeps history for 7 days behind upper; since is ")
    assert made("set-retention", "orders") == "orders keeps history for 7 days behind upper\n"
    shown = {command: made(*command.split()) for command in TABLES}
    for command, text in shown.items():
        assert not re.search(r"\b17953\d{8}\b|604,?800,?000", text), command
        if command != "maintain orders --only compaction --dry-run":
            assert "2026-11-22T1" in text, command
    assert "(can be read as of" in shown["shard show orders"]
    assert "7 days behind upper" in shown["shard list orders --long"]
    for command in ("shard log orders", "shard log orders 1"):
        assert "retention none → 7 days" in shown[command]
    for command in ("describe orders", "describe orders --who", "set-retention orders", "shard log orders 1"):
        assert made.json(*command.split())["times"] == "ms", command
    assert made.json("set-retention", "orders")["retention"] == 604_800_000
    (census,) = made.json("shard", "list", "--long", "orders")["shards"]
    assert (census["times"], census["upper"]) == ("ms", [T + 3 * 3_600_000])
    assert made.json("shard", "show", "orders")["state"]["schemas"][0]["times"] == "ms"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("read", "orders", "--as-of", "2026-11-22T12:00"), 2, "has no zone"),
        (("read", "orders", "--as-of", "soon"), 2, "must be a time, as in 5"),
        (("read", "orders", "--as-of", "2026-02-30"), 2, "no date and time"),
        (("read", "orders", "--as-of", "1 month ago"), 2, "no length of time"),
        (("read", "orders", "--as-of", "1795348800000000"), 2, "after the year 9999"),
        (("read", "orders", "--as-of", "1969-07-20"), 2, "clock starts at 1970"),
        (("read", "orders", "--as-of", "2026-11-23"), 1, "upper has to pass 2026-11-23T00:00:00Z"),
        (("listen", "orders", "--as-of", "soon"), 2, "must be a time, as in 5"),
        (("listen", "orders", "--as-of", "0", "--until", "soon"), 2, "must be a time, as in 5"),
        (("append", "orders", "--lower", "2026-11-22T14:00Z", "--upper", "[]"), 1, "upper is [2026-11-22T15:00:00Z]"),
        (("append", "orders", "--lower", "2026-11-22T15:00:00.0001Z", "--upper", "[]"), 2, "whole ms"),
        (("append", "orders", "--lower", "0", "--upper", "1", "--times", "ms"), 2, "--times is only for --create"),
        (("hold", "set", "orders", "audit", "--since", "soon"), 2, "must be a time, as in 5"),
        (("set-retention", "orders", "7 months"), 2, "no length of time"),
        (("set-retention", "orders", "soon"), 2, "retention is a number of times"),
        (("outcome", "orders", "00ff", "--lower", "soon", "--upper", "5"), 2, "must be a time, as in 5"),
        (("read", "plain", "--as-of", "1 hour ago"), 2, "plain integers, not a clock"),
        (("set-retention", "plain", "7 days"), 2, "plain integers, which have no days"),
        (("append", "plain", "--lower", "2026-11-22", "--upper", "[]"), 2, "plain integers, not a clock"),
        (("hold", "set", "plain", "audit", "--since", "yesterday"), 2, "plain integers, not a clock"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_and_changes_nothing(words, code: int, says: str, made: Shell):
    with made.client() as client:
        client.open_writer("plain", persist.Schema({"id": "int64"})).compare_and_append([{"id": 1}], 0, 1)
    before = made.files() if code == 2 else None
    assert says in made.fails(code, *words)
    assert before is None or {name for name in before if "sqlite" not in name} <= made.files().keys()
    assert made.json("shard", "list")["shards"][0]["upper"] == [T + 3 * 3_600_000]


def test_the_outcome_of_an_append_is_asked_by_its_moments(made: Shell, tmp_path: Path):
    added = made.json("append", "orders", "--lower", "2026-11-22T15:00Z", "--upper", "2026-11-22T16:00Z")
    assert added["times"] == "ms"
    said = made(
        "outcome", "orders", added["token"], "--lower", "2026-11-22T15:00Z", "--upper", "2026-11-22T17:00+01:00"
    )
    assert said.startswith("orders: committed: ")
    never = made("outcome", "orders", "00ff", "--lower", "2026-11-22T15:00Z", "--upper", "2026-11-22T15:30Z")
    assert "never: upper is [2026-11-22T16:00:00Z]" in never


def test_a_wrong_frontier_makes_no_location(sh: Shell, tmp_path: Path):
    assert "has no zone" in sh.fails(
        2, "append", "orders", csv(tmp_path / "in.csv", T), "--lower", "0", "--upper", "2026-11-23T00:00", *CREATE
    )
    assert not sh.root.exists()


def test_calls_by_key_changes_and_restores_show_moments_and_say_the_clock(sh: Shell, tmp_path: Path):
    sh("create", "orders", "--key", "id:int64", "--value", "state:string", "--times", "ms", "--unique")
    file = tmp_path / "in.csv"
    file.write_text("id,state\n1,new\n2,new\n")
    said = sh("upsert", "orders", file)
    assert re.search(r"2 inserted \(2 updates\) at time 20\S+Z\n", said), said
    assert sh("upsert", "orders", file).endswith("nothing was written\n")
    before = sh.json("changes", "orders")
    file.write_text("id,state\n1,paid\n")
    done = sh.json("upsert", "orders", file)
    (keys := tmp_path / "keys.csv").write_text("id\n2\n")
    assert re.search(r"1 deleted \(1 update\) at time 20\S+Z", sh("delete", "orders", keys))
    dry = sh.json("restore", "orders", "--to", before["to"], "--dry-run")
    assert [one["times"] for one in (before, done, dry)] == ["ms"] * 3
    table = sh("changes", "orders", "--from", before["to"]).splitlines()
    shown = {word for line in table for word in line.split() if word.startswith("20") and word.endswith("Z")}
    with sh.client() as client, client.open_reader("orders") as read:
        assert read.schema.show(done["time"]) in shown, table
        sh("restore", "orders", "--to", read.schema.show(before["to"]))
        assert {(row["id"], row["state"]) for row in read.snapshot().to_pylist()} == {(1, "new"), (2, "new")}
