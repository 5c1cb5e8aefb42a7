"""The `persist` command on a real location: every command, every kind of failure, dry runs that change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
from click.testing import CliRunner as ClickRunner
from typer.testing import Result

import persist_lib as persist
from persist_lib.cli import root
from persist_lib.cli.app import app
from persist_lib.core import duties
from persist_lib.relation.held import kept_of
from tests.commands import invoke

SCHEMA = persist.Schema(key={"order_id": "int64"}, value={"state": "string"})
SMALL = persist.Config(inline_bytes=0)
"""Every append an object, so that there is garbage."""
BATCHES = 12
DUTIES = [(), *(("--only", duty.name) for duty in duties.DUTIES if duty.is_upkeep)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A location with a shard in debt and one that is tidy; copied for each test."""
    root = tmp_path_factory.mktemp("made") / "data"
    with persist.open(f"file:{root}", config=SMALL) as client:
        orders = client.open_writer("orders", SCHEMA)
        for at in range(BATCHES):
            rows = [{"order_id": at, "state": "placed", "_time": at, "_diff": 1}]
            if at:
                rows.append({"order_id": at - 1, "state": "placed", "_time": at, "_diff": -1})
            orders.compare_and_append(rows, at, at + 1)
        client.open_writer("tidy", SCHEMA).compare_and_append([{"order_id": 1, "state": "new"}], 0, 1)
    return root


class Shell:
    """Runs commands in this process; `--location` comes from the environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env: dict[str, str | None] = {
            "PERSIST_LOCATION": f"file:{root}",
            "PERSIST_CONSENSUS": None,
            "COLUMNS": None,
        }

    def run(self, *words: object, typed: str | None = None) -> Result:
        return invoke(*words, typed=typed, **self.env)

    def __call__(self, *words: object, typed: str | None = None) -> str:
        done = self.run(*words, typed=typed)
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *words: object) -> Any:
        lines = self(*words, "--json").splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    def rows(self, *words: object) -> list[dict[str, Any]]:
        found = self.json(*words)["rows"]
        assert isinstance(found, list)
        return found

    def fails(self, code: int, *words: object) -> str:
        done = self.run(*words)
        assert (done.exit_code, done.stdout) == (code, ""), done.output
        assert "Traceback" not in done.stderr
        return done.stderr

    def client(self) -> persist.Client:
        return persist.open(f"file:{self.root}", config=SMALL, create=False)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def sh(made: Path, tmp_path: Path) -> Shell:
    shutil.copytree(made, tmp_path / "data")
    return Shell(tmp_path / "data")


def leave_a_dead_reader(root: Path, shard: str) -> None:
    """A reader whose process was killed, and whose lease is over."""
    quiet = persist.Runtime(background=False)
    with persist.open(f"file:{root}", config=persist.Config(lease_ms=100), runtime=quiet) as client:
        reader = client.open_reader(shard)
        lease = kept_of(reader)
        client.leases.drop(lease.machine, lease.id or "")
        lease.id = None  # as if killed: nothing retires it
    time.sleep(0.15)


@pytest.fixture
def abandoned(sh: Shell) -> Iterator[Shell]:
    """With a reader whose lease lasts, a hold, and a reader whose process died long ago."""
    leave_a_dead_reader(sh.root, "tidy")
    with sh.client() as client, client.open_reader("orders", purpose="report"):
        client.set_hold("orders", "audit", 2)
        yield sh


def test_the_shards_are_listed_with_what_needs_work(sh: Shell):
    assert [line.split()[0] for line in sh("shard", "list").splitlines() if line.startswith((" orders", " tidy"))] == [
        "orders",
        "tidy",
    ]
    assert sh("shard", "list", "--names").split() == ["orders", "tidy"]
    found = sh.json("shard", "list")
    assert [(shard["shard"], shard["upper"], shard["updates"]) for shard in found["shards"]] == [
        ("orders", [BATCHES], 2 * BATCHES - 1), ("tidy", [1], 1),
    ]  # fmt: skip
    assert found["failed"] == {}


def test_the_census_is_of_the_shards_named_or_of_all(sh: Shell):
    assert [shard["shard"] for shard in sh.json("shard", "list", "--long", "tidy")["shards"]] == ["tidy"]
    assert [shard["shard"] for shard in sh.json("shard", "list", "--long")["shards"]] == ["orders", "tidy"]
    assert "fingerprint" in sh("shard", "list", "--long", "orders")


def test_show_says_who_holds_back_what(abandoned: Shell):
    abandoned("maintain", "--only", "compaction", "orders")
    text = abandoned("shard", "show", "orders")
    assert "reader report" in text
    assert "min left" in text
    assert f"since, {BATCHES} objects" in text
    assert f"waits     {BATCHES} objects" in text
    assert (
        len([line for line in abandoned("shard", "show", "tidy", "--batches").splitlines() if line.startswith(" 0..1")])
        == 1
    )
    found = abandoned.json("shard", "show", "orders")
    assert {who["kind"]: who["holds_since"] for who in found["holders"]} == {"reader": True, "hold": False}
    assert len(found["state"]["garbage"]) == BATCHES
    assert "overdue by" in abandoned("shard", "show", "tidy")


def test_the_log_tells_every_transition_newest_last(sh: Shell):
    rows = sh.json("shard", "log", "orders", "--limit", 1000)["rows"]
    assert [row["seqno"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["command"] for row in rows[:3]] == ["Create", "RegisterWriter", "CompareAndAppend"]
    assert rows[-1]["command"] == "Retire"
    assert [row["seqno"] for row in sh.json("shard", "log", "orders", "--from", 3, "--limit", 2)["rows"]] == [3, 4]
    assert "batch 0..1, times [0] to [1]: 1 update" in sh("shard", "log", "orders", "--from", 3)
    assert len(sh.json("shard", "log", "orders", "--limit", 5)["rows"]) == 5


def test_a_dry_run_of_compaction_is_its_plan_with_what_it_leaves_alone(sh: Shell):
    (planned,) = sh.json("maintain", "orders", "--only", "compaction", "--dry-run")["shards"]
    assert planned["plan"]["debt"] > 0
    assert "merge" in sh("maintain", "orders", "--only", "compaction", "--dry-run")
    assert sh.json("maintain", "orders", "--only", "compaction")["shards"][0]["plan"] == planned["plan"]
    tidy = sh("maintain", "tidy", "--only", "compaction", "--dry-run")
    assert "nothing to compact" in tidy
    assert "leave" in tidy


def test_a_snapshot_is_the_contents_at_the_time_in_every_format(sh: Shell, tmp_path: Path):
    expected = [{"order_id": 9, "state": "placed"}]
    assert sh.json("read", "orders", "--as-of", 9) == {"table": "orders", "as_of": 9, "rows": expected}
    assert json.loads(sh("read", "orders", "--as-of", 9, "-f", "jsonl")) == expected[0]
    assert sh("read", "orders", "--as-of", 9, "-f", "csv") == '"order_id","state"\n9,"placed"\n'
    with_diff = sh("read", "orders", "--as-of", 9, "--diff", "-f", "csv")
    assert with_diff == '"order_id","state","_diff"\n9,"placed",1\n'
    assert sh("read", "orders", "--as-of", 9).split()[-2:] == ["9", "placed"]
    file = tmp_path / "out.parquet"
    sh("read", "orders", "--as-of", 9, "-f", "parquet", "-o", file)
    assert pq.read_table(file).to_pylist() == expected
    sh("read", "orders", "--as-of", 9, "-o", tmp_path / "out.txt")
    assert "placed" in (tmp_path / "out.txt").read_text()


def test_a_snapshot_can_be_cut_down_to_columns_keys_and_a_limit(sh: Shell, tmp_path: Path):
    rows = pa.table({"order_id": range(100), "state": ["x"] * 100})
    pq.write_table(rows, tmp_path / "many.parquet")
    sh("append", "tidy", tmp_path / "many.parquet", "--lower", 1, "--upper", 2)
    assert sh.json("read", "tidy", "--columns", "order_id", "--key", 7)["rows"] == [{"order_id": 7}]
    ids = [row["order_id"] for row in sh.json("read", "tidy", "--key-from", 3, "--key-to", 6)["rows"]]
    assert ids == [3, 4, 5]
    cut = sh.run("read", "tidy", "--limit", 3)
    assert [line.split() for line in cut.stdout.splitlines()][-4:-1] == [["0", "x"], ["1", "new"], ["1", "x"]]
    assert "only the first 3" in cut.stderr
    assert len(sh("read", "tidy", "--limit", 0).splitlines()) > 100


def test_listening_prints_updates_at_their_times_and_then_progress(sh: Shell):
    text = sh("listen", "orders", "--as-of", BATCHES - 2, "--no-wait").splitlines()
    last = BATCHES - 1
    news = [f"[{last}] +1  order_id={last} state=placed", f"[{last}] -1  order_id={last - 1} state=placed"]
    assert sorted(text[:2]) == news
    assert text[2:] == [f"progress [{BATCHES}]"]
    lines = [json.loads(line) for line in sh("listen", "orders", "--as-of", 0, "--until", 3, "--json").splitlines()]
    assert [line["progress"] for line in lines if "progress" in line] == [[2], [3]]
    assert sum(update["_diff"] for line in lines for update in line.get("updates", [])) == 0


def test_a_line_that_does_not_say_a_column_has_its_default(sh: Shell, tmp_path: Path) -> None:
    sh("create", "filled", "--key", "id:int64", "--value", "n:int64 default 9", "--value", "x:int64")
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": 2, "n": null}\n{"id": 3, "x": 4, "n": 5}\n')
    (tmp_path / "rows.csv").write_text("id,x\n4,\n")
    for name in ("rows.jsonl", "rows.csv"):
        sh("append", "filled", tmp_path / name)
    assert sorted((row["id"], row["n"], row["x"]) for row in sh.rows("read", "filled")) == [
        (1, 9, None), (2, None, None), (3, 5, 4), (4, 9, None),
    ]  # fmt: skip


def test_rows_are_upserted_and_deleted_from_files_by_key(tmp_path: Path):
    sh = Shell(tmp_path / "data")
    file, keys = tmp_path / "rows.csv", tmp_path / "keys.jsonl"
    file.write_text("order_id,state\n1,placed\n2,placed\n")
    done = sh.json("upsert", "orders", file, "--create", "--key", "order_id", "--times", "none")
    assert (done["inserted"], done["updates"], done["time"]) == (2, 2, 0)
    file.write_text("order_id,state\n1,paid\n2,placed\n3,placed\n")
    would = sh.json("upsert", "orders", file, "--dry-run")
    assert (would["inserted"], would["updated"], would["unchanged"], would["updates"]) == (1, 1, 1, 3)
    assert (would["dry_run"], would["time"], would["token"]) == (True, None, "")
    assert "would be 1 inserted, 1 updated, 1 unchanged (3 updates); nothing was changed" in sh(
        "upsert", "orders", file, "--dry-run"
    )
    assert "1 inserted, 1 updated, 1 unchanged (3 updates) at time 1" in sh("upsert", "orders", file)
    assert "3 unchanged (0 updates); nothing was written" in sh("upsert", "orders", file)
    keys.write_text('{"order_id": 1}\n{"order_id": 9}\n')
    assert sh.json("delete", "orders", keys, "--dry-run")["deleted"] == 1
    assert "1 unchanged, 1 deleted (1 update) at time 2" in sh("delete", "orders", keys)
    found = [(row["order_id"], row["state"]) for row in sh.json("read", "orders")["rows"]]
    assert found == [(2, "placed"), (3, "placed")]
    typed = '{"order_id": 2, "state": "placed"}'
    assert "1 unchanged (0 updates)" in sh.run("upsert", "orders", "-", typed=typed).stdout
    wrong = sh.run("append", "orders", "-", typed='{"order_id": "x", "state": "placed"}')
    assert "InvalidUsage: standard input cannot be read: " in wrong.stderr
    assert "is not a file; - reads" in sh.fails(2, "upsert", "orders", tmp_path)
    for kind in ("csv", "parquet", "jsonl"):  # what a snapshot writes can be upserted again
        again = tmp_path / f"again.{kind}"
        sh("read", "orders", "-f", kind, "-o", again)
        assert sh.json("upsert", "orders", again)["unchanged"] == 2


def test_a_shard_that_an_upsert_creates_may_have_a_clock_and_one_row_a_key(sh: Shell, tmp_path: Path):
    file = tmp_path / "people.csv"
    file.write_text("id,name\n1,Ada\n")
    sh.json("upsert", "people", file, "--create", "--key", "id", "--times", "ms", "--unique")
    with persist.open(f"file:{sh.root}") as client:
        schema = client.inspect("people").state.schemas[-1]
    assert (schema.times, schema.unique) == ("ms", True)


def test_an_upsert_or_delete_that_cannot_be_done_says_why_and_changes_nothing(tmp_path: Path):
    sh = Shell(tmp_path / "data")
    file = tmp_path / "rows.csv"
    file.write_text("order_id,state\n1,placed\n1,paid\n")
    assert "there is no" in sh.fails(1, "upsert", "orders", file)
    schema = persist.Schema(SCHEMA.key, SCHEMA.value, unique=True)
    with persist.open(f"file:{sh.root}") as client:
        client.open_writer("orders", schema).upsert([{"order_id": 1, "state": "new"}])
    assert "different rows for [{'order_id': 1}]" in sh.fails(2, "upsert", "orders", file)
    assert "not in the schema" in sh.fails(2, "delete", "orders", file)
    assert "--create needs --key" in sh.fails(2, "upsert", "orders", file, "--create")
    assert "only for --create" in sh.fails(2, "upsert", "orders", file, "--unique")
    assert "without --create" in sh.fails(2, "upsert", "orders", file, "--create", "--key", "order_id", "--dry-run")
    file.write_text("order_id,state\n1,placed\n")
    refused = sh.fails(1, "append", "orders", file, "--lower", 1, "--upper", 2)
    assert "the schema says unique" in refused
    told = json.loads(sh.run("append", "orders", file, "--lower", 1, "--upper", 2, "--json").stderr)
    assert "ConstraintViolated" in json.dumps(told)
    assert [row["state"] for row in sh.json("read", "orders")["rows"]] == ["new"]


def test_time_passes_without_a_file_and_a_shard_closes_at_the_end_of_all_times(sh: Shell):
    assert sh.json("append", "tidy", "--lower", "[1]", "--upper", 5)["upper"] == [5]
    assert sh.json("append", "tidy", "--lower", 5, "--upper", "[]")["upper"] == []
    assert "complete" in sh("shard", "show", "tidy")


def test_what_another_writer_covered_is_skipped_when_asked(sh: Shell, tmp_path: Path):
    file = tmp_path / "same.jsonl"
    file.write_text('{"order_id": 1, "state": "new", "_time": 0}\n{"order_id": 2, "state": "new", "_time": 1}\n')
    assert "UpperMismatch" in sh.fails(1, "append", "tidy", file, "--lower", 0, "--upper", 2)
    sh("append", "tidy", file, "--lower", 0, "--upper", 2, "--skip-covered")
    assert [row["order_id"] for row in sh.json("read", "tidy")["rows"]] == [1, 2]


def test_upkeep_does_what_it_says_and_a_second_time_finds_nothing(abandoned: Shell):
    sh = abandoned
    assert f"{BATCHES} → 1 batch" in sh("maintain", "--only", "compaction", "orders")
    assert "nothing to compact" in sh("maintain", "--only", "compaction", "orders")
    assert f"{BATCHES} objects" in sh("maintain", "--only", "garbage", "orders")
    assert "may still read" in sh("maintain", "--only", "garbage", "orders")
    assert "rolled up" in sh("maintain", "--only", "rollups", "orders")
    assert "no rollup is due" in sh("maintain", "--only", "rollups", "tidy")
    assert "rolled up" in sh("maintain", "--only", "rollups", "tidy", "--force")
    assert "retired 1 of 1" in sh("maintain", "--only", "leases", "tidy")
    assert "no lease is overdue" in sh("maintain", "--only", "leases", "tidy")
    assert "0 orphans" in sh("maintain", "--only", "orphans", "--all")
    assert "1 batch read: every digest and every sum is right" in sh("shard", "scrub", "--all")
    assert "nothing new: no batch was read; 1 were found right" in sh("shard", "scrub", "--all", "--new")


def test_maintain_tidies_up_and_prints_before_beside_after(sh: Shell):
    sh("set-retention", "orders", 3)
    text = sh("maintain", "--all")
    assert "before" in text
    assert f"{BATCHES} → 1 batch" in text
    sh("maintain", "--all")  # what the first pass made garbage may wait for a rollup of the second
    again = {shard["shard"]: shard for shard in sh.json("maintain", "--all")["shards"]}
    assert again["orders"]["compaction"]["applied"] == []
    assert again["orders"]["garbage"]["keys"] == []
    assert again["orders"]["after"]["since"] == [BATCHES - 4]
    assert again["orders"]["after"]["garbage"] == 0


def test_garbage_goes_once_nobody_can_read_it(sh: Shell):
    sh("maintain", "--only", "compaction", "orders")
    sh("maintain", "--only", "rollups", "orders")
    objects = sum(name.endswith(".parquet") for name in sh.files())
    assert f"deleted {BATCHES} objects" in sh("maintain", "--only", "garbage", "orders")
    assert sum(name.endswith(".parquet") for name in sh.files()) == objects - BATCHES
    assert len(sh.json("read", "orders", "--as-of", 9)["rows"]) == 1


def test_producers_are_listed_and_forgotten(sh: Shell):
    assert "no producers" in sh("shard", "producers", "orders")
    with sh.client() as client:
        schema = client.inspect("orders").state.schemas[-1]
        upper = client.inspect("orders").state.upper.time or 0
        client.open_writer("orders", schema).compare_and_append([], upper, upper + 1, producer=("nightly load", 7))
    assert "nightly load" in sh("shard", "producers", "orders")
    assert sh.json("shard", "producers", "orders")["producers"]["nightly load"]["sequence"] == 7
    assert "its producers: nightly load" in sh.fails(2, "shard", "producers", "orders", "--forget", "nightly")
    assert "is at 7, not at 6" in sh.fails(
        2, "shard", "producers", "orders", "--forget", "nightly load", "--expected", 6
    )
    assert "go with --forget" in sh.fails(2, "shard", "producers", "orders", "--dry-run")
    assert "would forget" in sh("shard", "producers", "orders", "--forget", "nightly load", "--dry-run")
    assert sh.json("shard", "producers", "orders", "--forget", "nightly load", "--expected", 7)["sequence"] == 7
    assert "no producers" in sh("shard", "producers", "orders")


def test_several_duties_are_each_done_and_one_that_fails_stops_none(sh: Shell):
    found = sh.json("maintain", "tidy", "--only", "leases", "--only", "garbage")
    assert (found["duty"], found["shards"][0].keys()) == ("maintain", {"shard", "leases", "garbage"})
    next((sh.root / "blob" / "orders").rglob("*.parquet")).unlink()
    words = ("maintain", "orders", "tidy", "--only", "garbage", "--only", "compaction")
    done = sh.run(*words)
    assert done.exit_code == 3
    assert re.search("compaction FAILED: orders.", done.stdout)
    assert re.search("garbage +done", done.stdout)
    assert "tidy: done" in done.stdout
    told = json.loads(sh.run(*words, "--json").stdout)
    assert ([one["shard"] for one in told["shards"]], list(told["failed"])) == (["tidy"], ["orders"])


@pytest.mark.parametrize(("words", "says"), [
    (("--only", "garbag"), "Did you mean garbage? They are collections, pending, leases,"),
    (("--only", "scrub"), "there is no duty 'scrub'"), (("orders", "--force"), "goes with --only rollups"),
    (("orders", "--all"), "names or --all, not both"),
])  # fmt: skip
def test_wrong_words_of_maintain_are_refused_before_anything_is_done(sh: Shell, words: tuple[str, ...], says: str):
    before = sh.files()
    assert says in sh.fails(2, "maintain", *words)
    assert sh.files() == before


def test_what_a_dropped_shard_leaves_is_deleted_by_its_name(sh: Shell):
    sh("maintain", "orders", "--only", "leases")
    sh("drop", "orders", "--yes")
    for _ in range(3):
        sh("maintain", "orders")
    assert not list((sh.root / "blob" / "orders").rglob("*.parquet"))


def test_holds_keep_history_until_they_are_released(sh: Shell):
    sh("hold", "set", "orders", "audit", "--new", "--fence", "a")
    assert "HoldConflict" in sh.fails(1, "hold", "set", "orders", "audit", "--new")
    assert "HoldConflict" in sh.fails(1, "hold", "release", "orders", "audit", "--expected", "b")
    assert sh.json("describe", "orders")["all_holds"] == {"audit": {"since": [0], "opaque": b"a".hex()}}
    assert re.search(r"audit +\[0\] +a +yes", sh("describe", "orders"))
    (held,) = [one for one in sh.json("describe", "orders", "--who")["capabilities"] if one["kind"] == "hold"]
    assert (held["id"], held["since"], held["shard"]) == ("audit", [0], "orders")
    assert "GivesUpHistory" in sh.fails(1, "hold", "set", "orders", "audit", "--since", 10**6)
    given = ("hold", "set", "orders", "audit", "--give-up", "--expected", "a", "--since")
    assert "GivesUpHistory" in sh.fails(1, *given, 10**6, "--dry-run")
    assert "since would move from [0] to [7], kept by hold audit" in sh(*given, 7, "--dry-run")
    assert sh.json("describe", "orders")["since"] == [0]
    assert sh.json(*given, 7, "--yes")["after"] == [7]
    sh("hold", "release", "orders", "audit")
    assert re.search("holds +none", sh("describe", "orders"))


@pytest.mark.parametrize(("words", "says"), [
    (("--give-up",), "needs --since"), (("--give-up", "--since", 3, "--fence", "b"), "without --new and --fence"),
    (("--give-up", "--since", 3, "--new"), "without --new"), (("--since", 3, "--dry-run"), "go with --give-up"),
    (("--since", 3, "--yes"), "go with --give-up"),
])  # fmt: skip
def test_options_of_giving_history_up_are_refused_without_it_and_change_nothing(
    sh: Shell, words: tuple[object, ...], says: str
):
    before = sh.files()
    assert says in sh.fails(2, "hold", "set", "orders", "audit", *words)
    assert sh.files() == before


def test_retention_is_set_shown_carried_out_and_taken_away(sh: Shell):
    assert sh.json("set-retention", "orders")["retention"] is None
    dry = sh.json("set-retention", "orders", "3", "--dry-run")
    assert (dry["before"], dry["after"], dry["retention"]) == ([0], [BATCHES - 4], None)
    assert f"since is [{BATCHES - 4}], kept by hold retention" in sh("set-retention", "orders", "3")
    assert sh.json("set-retention", "orders")["retention"] == 3
    assert f"since stays at [{BATCHES - 4}]" in sh("maintain", "--only", "retention", "orders")
    assert "SinceViolation" in sh.fails(1, "read", "orders", "--as-of", 1)
    assert sh.json("set-retention", "orders", "none")["retention"] is None


def test_a_shard_is_finished_only_by_typing_its_name(sh: Shell):
    assert "that is not 'tidy'" in sh.run("drop", "tidy", typed="orders\n").stderr
    assert sh.run("drop", "tidy", typed="").exit_code == 2
    assert "add --yes" in sh.fails(2, "drop", "tidy", "--json")
    assert sh.json("shard", "list")["shards"][1]["finished"] is False
    assert "is dropped" in sh("drop", "tidy", typed="tidy\n")
    assert "there is no table 'tidy'" in sh.fails(1, "read", "tidy")
    assert "is dropped" in sh("drop", "orders", "--yes")
    for _ in range(2):
        sh("maintain", "--all")
    assert not [name for name in sh.files() if name.endswith(".parquet")]


def test_a_shard_that_is_read_is_not_finished_and_the_dry_run_says_by_whom(abandoned: Shell):
    assert "hold audit" in abandoned("drop", "orders", "--dry-run")
    assert "StillRead" in abandoned.fails(1, "drop", "orders", "--yes")


@pytest.fixture(scope="module")
def in_debt(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A location where every duty has something to do."""
    root = tmp_path_factory.mktemp("debt") / "data"
    shutil.copytree(made, root)
    with persist.open(f"file:{root}", config=SMALL) as client:
        client.set_retention("orders", 2)
        client.compact("orders")
        client.roll_up("orders", force=True)
        client.publish("orders", follows=True)
        write = client.open_writer("orders", SCHEMA)
        for at in range(BATCHES, BATCHES + 6):
            write.compare_and_append([{"order_id": at, "state": "placed"}], at, at + 1)
    leave_a_dead_reader(root, "orders")
    orphan = root / "blob" / "orders" / "w00000000deadbeef" / "0000000000000001.parquet"
    orphan.parent.mkdir()
    orphan.write_bytes(b"never linked")
    return root


@pytest.mark.parametrize("words", [*(("maintain", *only) for only in DUTIES), ("drop",)], ids=" ".join)
def test_a_dry_run_changes_no_byte_and_the_real_one_does(in_debt: Path, words: tuple[str, ...], tmp_path: Path):
    shutil.copytree(in_debt, tmp_path / "data")
    sh = Shell(tmp_path / "data")
    before = sh.files()
    assert "orders" in sh(*words, "orders", "--dry-run")
    assert json.loads(sh(*words, "orders", "--dry-run", "--json"))["dry_run"] is True
    assert sh.files() == before
    sh.run(*words, "orders", *(["--force"] if "rollups" in words else []))
    assert words == ("drop",) or sh.files() != before


LOOKING = [
    ("shard", "list"), ("shard", "list", "--long"), ("shard", "show", "orders"), ("shard", "log", "orders"),
    ("maintain", "orders", "--only", "compaction", "--dry-run"), ("maintain", "--dry-run"), ("describe", "orders"),
    ("describe", "orders", "--who"), ("tables",), ("shard", "log", "orders", "3"), ("shard", "producers", "orders"),
    ("shard", "list", "--watch", "--count", "1"), ("evolve", "orders", "--add", "note:string", "--dry-run"),
    ("read", "orders"), ("listen", "orders", "--as-of", "9", "--no-wait"), ("set-retention", "orders"),
]  # fmt: skip


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_looking_changes_no_byte_and_creates_no_location(sh: Shell, words: tuple[str, ...], tmp_path: Path):
    before = sh.files()
    assert sh(*words)
    assert sh.files() == before
    nowhere = Shell(tmp_path / "nowhere")
    assert "NotFound: there is no location" in nowhere.fails(1, *words)
    assert not nowhere.root.exists()


WRONG: dict[str, tuple[int, tuple[object, ...]]] = {
    "NotFound": (1, ("shard", "show", "nothing")),
    "InvalidName": (2, ("shard", "show", "../etc")),
    "InvalidUsage": (2, ("shard", "scrub")),
    "SchemaMismatch": (2, ("append", "tidy", "wrong.jsonl", "--lower", 1, "--upper", 2)),
    "UpperMismatch": (1, ("append", "tidy", "--lower", 5, "--upper", 6)),
    "NotComplete": (1, ("read", "tidy", "--as-of", 99)),
    "SinceViolation": (1, ("hold", "set", "moved", "late", "--since", 0)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_refusal_is_one_sentence_and_an_exit_code(
    sh: Shell, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("wrong.jsonl").write_text('{"order_id": 7, "state": "new", "more": 1}\n')
    with sh.client() as client:
        client.open_writer("moved", SCHEMA).advance_upper(5)
        client.downgrade_hold("moved", "early", 4)
    code, words = WRONG[kind]
    said = sh.fails(code, *words)
    assert said.startswith(f"{kind}: ")
    assert len(said.splitlines()) == 1
    told = json.loads(sh.fails(code, *words, "--json").splitlines()[0])
    assert told["error"] == kind
    assert "Traceback" in sh.run(*words, "-v").stderr


def every_error(kind: type[persist.PersistError] = persist.PersistError) -> list[type[persist.PersistError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_whatever_the_library_raises_ends_without_a_traceback(
    sh: Shell, kind: type[persist.PersistError], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_words: object, **_named: object) -> persist.Client:
        raise kind("planted")

    monkeypatch.setattr("persist_lib.client.open", fail)
    code = 3 if issubclass(kind, persist.Damage) else 2 if issubclass(kind, persist.InvalidUsage) else 1
    planted = sh.fails(code, "shard", "list")
    assert "planted" in planted or issubclass(kind, persist.NotFound)


def test_damage_is_found_named_and_has_its_own_exit_code(sh: Shell):
    part = next(path for path in (sh.root / "blob" / "orders").rglob("*.parquet"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    for words in (("shard", "scrub", "--all"), ("shard", "scrub", "--all", "--new")):
        scrubbed = sh.run(*words)
        assert scrubbed.exit_code == 3
        assert "orders: 1 batch DAMAGED: batch (" in scrubbed.stdout
        assert ("known since " in scrubbed.stdout) is ("--new" in words)
    assert "tidy: nothing new: no batch was read; 1 were found right by earlier scrubs" in scrubbed.stdout
    assert json.loads(sh.run("shard", "scrub", "orders", "--json").stdout)["shards"][0]["known"]
    assert part.name in sh.fails(3, "read", "orders")
    part.unlink()
    assert sh.fails(3, "maintain", "--only", "compaction", "orders").startswith("orders: Missing")


@pytest.mark.parametrize("prices", [None, "s3", "free", '{"gib_month": 1000}'])
def test_show_shards_and_census_price_alike(sh: Shell, prices: str | None):
    words = () if prices is None else ("--prices", prices)
    shards = {shard["shard"]: shard["dollars_month"] for shard in sh.json("shard", "list", *words)["shards"]}
    assert {
        shard["shard"]: shard["dollars_month"] for shard in sh.json("shard", "list", "--long", *words)["shards"]
    } == shards
    assert {name: sh.json("shard", "show", name, *words)["census"]["dollars_month"] for name in shards} == shards
    is_free = prices in {None, "free"}
    assert all((dollars == 0) is is_free for dollars in shards.values()), "a disk is free unless it is said not to be"
    done = {shard["shard"]: shard for shard in sh.json("maintain", "--all", "--dry-run", *words)["shards"]}
    assert {name: done[name]["before"]["dollars_month"] for name in shards} == shards


@pytest.mark.parametrize("only", [("--only", "compaction"), ("--only", "rollups", "--force"), ()], ids=" ".join)
def test_a_busy_shard_is_named_and_the_others_are_done(sh: Shell, only: tuple[str, ...]):
    with sh.client() as client, client.worker("orders") as worker:
        assert worker.id
        done = sh.run("maintain", *only, "--all")
        assert done.exit_code == 1
        assert f"Busy: shard orders: the worker {worker.id} is at maintenance work here" in done.stderr.replace(
            "1 of 6 duties failed, the others were done: leases, retention, rollups, garbage, orphans. compaction: ", ""
        ).replace("Busy: shard orders: Busy: ", "Busy: ")
        assert "tidy: " in done.stdout
        assert len(client.inspect("tidy").state.writers) <= 1
    assert sh.run("maintain", *only, "--all").exit_code == 0


def test_the_leases_of_commands_that_exclude_each_other_are_short(sh: Shell, monkeypatch: pytest.MonkeyPatch):
    leases: list[int] = []
    compact = persist.Client.compact

    def noting(client: persist.Client, name: str, **words: Any) -> Any:
        leases.append(client.config.lease_ms)
        assert words["alone"] is True
        return compact(client, name, **words)

    monkeypatch.setattr(persist.Client, "compact", noting)
    sh("maintain", "--only", "compaction", "orders")
    assert leases == [60_000]


def test_known_damage_is_shown_without_reading_anything_again(sh: Shell):
    assert re.search(r"damaged +not known: no scrub has looked yet", sh("shard", "show", "orders"))
    sh("shard", "scrub", "--all")
    assert re.search(r"damaged +none that a scrub found", sh("shard", "show", "orders"))
    assert [shard["damaged"] for shard in sh.json("shard", "list", "--long")["shards"]] == [0, 0]
    part = next(path for path in (sh.root / "blob" / "orders").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-1])
    assert re.search(r"damaged +none that a scrub found", sh("shard", "show", "orders")), "only a scrub looks"
    assert sh.run("shard", "scrub", "--all").exit_code == 3
    for words in (("show", "orders"), ("list", "--long")):
        done = sh.run("shard", *words)
        assert done.exit_code == 3
        shown = done.stdout
        assert re.search(r"damaged +1 batch\b", shown)
        assert f"{part.name}: " in shown
        assert "(known since 2" in shown
    shown = json.loads(sh.run("shard", "show", "orders", "--json").stdout)
    assert (shown["damaged"], len(shown["damaged_batches"])) == (1, 1)
    listed = sh.run("shard", "list", "--json")
    assert (listed.exit_code, [one["damaged"] for one in json.loads(listed.stdout)["shards"]]) == (3, [1, 0])
    for command in (("shard", "list"), ("maintain", "--dry-run"), ("maintain", "orders", "--only", "leases")):
        done = sh.run(*command)
        assert (done.exit_code, "damaged, as a scrub found: orders" in done.output) == (3, True), command
    assert sh.run("maintain", "tidy").exit_code == 0
    done = sh.run("health")
    assert (done.exit_code, "damage     table orders: 1 batch is damaged" in done.stdout) == (3, True)
    assert "persist shard scrub orders   docs/operations.md#backup-and-restore" in done.stdout
    [marks] = (sh.root / "blob" / "-scrub" / "orders").iterdir()
    marks.write_bytes(b"")
    assert "`persist shard scrub orders` reads everything again" in sh("shard", "show", "orders")
    assert sh.json("shard", "show", "orders")["damaged"] is None


def test_a_scrub_changes_no_byte_but_its_own_memory_and_creates_no_location(sh: Shell, tmp_path: Path):
    before = sh.files()
    sh("shard", "scrub", "--all")
    after = sh.files()
    assert {name for name in after if after[name] != before.get(name)} == {
        name for name in after if name.startswith("blob/-scrub/")
    }
    assert before.keys() <= after.keys()
    assert "NotFound: there is no location" in Shell(tmp_path / "nowhere").fails(1, "shard", "scrub", "--all")
    assert not (tmp_path / "nowhere").exists()


def test_a_newer_format_is_refused_and_left_alone(sh: Shell):
    (sh.root / "persist.json").write_text('{"format": 99}\n')
    before = sh.files()
    assert sh.fails(3, "maintain", "--all").startswith("NewerFormat")
    assert sh.files() == before


def test_a_shard_that_fails_does_not_keep_the_others_waiting(sh: Shell):
    done = sh.run("maintain", "--only", "compaction", "nothing", "orders", "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [shard["shard"] for shard in told["shards"]] == ["orders"]
    assert told["failed"]["nothing"]["error"] == "NotFound"


def test_a_file_that_cannot_be_read_is_a_wrong_call(sh: Shell, tmp_path: Path):
    for name, text in (("bad.parquet", "no"), ("bad.jsonl", "[1]\n"), ("bad.csv", "a,b\n1\n"), ("bad.txt", "x")):
        (tmp_path / name).write_text(text)
        assert "InvalidUsage" in sh.fails(2, "append", "tidy", tmp_path / name, "--lower", 1, "--upper", 2)
    assert sh.json("shard", "list", "--long", "tidy")["shards"][0]["upper"] == [1]


def test_a_failed_snapshot_leaves_no_file_and_keeps_the_one_there_was(sh: Shell, tmp_path: Path):
    part = next(path for path in (sh.root / "blob" / "orders").rglob("*.parquet"))
    part.write_bytes(bytes(len(part.read_bytes())))
    out = tmp_path / "out.csv"
    out.write_text("what was there")
    sh.fails(3, "read", "orders", "-f", "csv", "-o", out)
    assert out.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_options_count_before_and_after_the_command_and_those_after_it_win(sh: Shell, tmp_path: Path):
    url = f"file:{sh.root}"
    sh.env["PERSIST_LOCATION"] = f"file:{tmp_path / 'elsewhere'}"
    assert json.loads(sh("--location", url, "--json", "shard", "list"))["location"] == url
    assert (
        json.loads(sh("--location", "file:/nowhere", "shard", "list", "--location", url, "--json"))["location"] == url
    )


def run_process(root: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    program = [str(Path(sys.executable).with_name("persist")), *words]
    env = {**os.environ, "PERSIST_LOCATION": f"file:{root}"}
    env.pop("COLUMNS", None)  # some shells export it, and then lines are as long as it says
    return subprocess.run(program, env=env, text=True, timeout=60, check=False, **options)


def test_the_installed_command_works_as_a_process(sh: Shell):
    done = run_process(sh.root, "read", "orders", "--as-of", "9", "-f", "csv", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"order_id","state"\n9,"placed"\n', "")
    failed = run_process(sh.root, "shard", "show", "nothing", capture_output=True)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("NotFound: ")
    assert len(failed.stderr.splitlines()) == 1


def test_a_reader_of_our_output_may_stop_early(sh: Shell):
    done = run_process(
        sh.root, "shard", "log", "orders", "--limit", "1000", stdout=_closed_pipe(), stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (0, "")


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


BUILT = typer.main.get_command(app)  # once: to build it takes longer than to show a help


def help_of(*words: str) -> str:
    return ClickRunner(env={"COLUMNS": None}).invoke(BUILT, [*words, "--help"]).stdout  # type: ignore[arg-type]


def every_command(group: Any = BUILT, *path: str) -> Iterator[tuple[str, ...]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from every_command(found, *path, name)
        else:
            yield (*path, name)


def command_of(words: str) -> Any:
    """The command that a line begins with; None if there is no such one."""
    found: Any = BUILT
    for word in words.split():
        if not hasattr(found, "commands"):
            break
        if (found := found.commands.get(word)) is None:
            return None
    return None if hasattr(found, "commands") else found


def test_the_help_fits_one_screen_and_shows_ten_commands() -> None:
    text = help_of()
    assert len(text.strip("\n").splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80
    shown = [line[1:].split()[0] for line in text.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert shown == list(root.EVERYDAY)
    assert len(shown) == 10


def test_all_commands_are_listed(sh: Shell) -> None:
    listed = [each["command"] for each in sh.json("commands")["commands"]]
    assert listed == [f"persist {' '.join(words)}" for words in every_command()]
    assert len(listed) <= 63
    assert all(each["help"] for each in sh.json("commands")["commands"])


def test_a_report_is_text_json_and_one_file_of_html(sh: Shell, tmp_path: Path) -> None:
    told = sh("report")
    assert "2 shards" in told
    assert "no damage is known" in told
    debt = next(row for row in sh.json("report")["rows"] if row["shard"] == "orders")["debt"]
    assert debt == sh.json("shard", "list", "orders")["shards"][0]["debt"] > 0
    page = sh.json("report", "orders", "--days", "2")
    assert (page["shard"], page["days"][-1]["levels"]) == ("orders", {"0": 1, "1": BATCHES - 1})
    assert "compaction" in sh("report", "orders")
    for name in ((), ("orders",)):
        file = tmp_path / "report.html"
        assert str(file) in sh("report", *name, "--html", str(file))
        text = file.read_text()
        assert text.startswith("<!doctype html>")
        assert "data:image/png;base64," in text
        assert "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "there is no shard, table or source 'order'" in sh.fails(1, "report", "order")
    assert "days" in sh.fails(2, "report", "orders", "--days", "0")


@pytest.mark.parametrize("words", sorted(root.RENAMED))
def test_of_a_spelling_of_before_the_new_one_is_told(sh: Shell, words: str) -> None:
    said = " ".join(sh.fails(2, *words.split(), "orders").replace("│", " ").split())
    assert f"There is no command 'persist {words}': it is `persist {root.RENAMED[words]}`." in said
    assert command_of(root.RENAMED[words]), "the new spelling is one"
    assert command_of(words) is None


def test_every_command_has_help_with_an_example():
    for words in every_command():
        text = help_of(*words)
        assert f"persist {' '.join(words)}" in text.split("Usage:")[1].split("\n", 1)[1], words


def test_what_a_command_asked_of_the_location_is_said_in_a_line_and_priced_as_wished(sh: Shell):
    done = sh.run("maintain", "--only", "compaction", "orders", "--dry-run")
    assert done.stderr.rstrip().endswith("$0"), "files are free"
    assert re.search(r"\d+ requests?, .* read, .* written, \$0", done.stderr)
    sh.env["PERSIST_PRICES"] = "s3"
    assert "for <$0.0001" in sh("maintain", "--only", "compaction", "orders", "--dry-run")
    assert "for $13.00" in sh(
        "maintain", "--only", "compaction", "orders", "--dry-run", "--prices", '{"get": 1, "put": 1}'
    )
    found = sh.json("maintain", "--only", "compaction", "orders")
    assert found["cost"]["gets"] == found["shards"][0]["cost"]["gets"] == BATCHES
    assert found["cost"]["dollars"] >= found["shards"][0]["plan"]["cost"]["dollars"] > 0
    assert "prices are" in sh.fails(2, "maintain", "--only", "compaction", "--dry-run", "orders", "--prices", "gold")
    appended = sh.json("append", "tidy", "--lower", 1, "--upper", 2)
    assert appended["cost"]["commits"] > 0


def test_a_plan_is_written_shown_and_done_once(sh: Shell):
    path = sh.root.parent / "plan.json"
    before = sh.json("shard", "list")["shards"]
    planned = sh.run("maintain", "--plan", path, "orders")
    assert "small batches behind what is newer than them" in planned.stdout
    assert f"persist maintain --apply {path}" in planned.stderr
    assert sh.json("shard", "list")["shards"] == before
    assert [one["shard"] for one in json.loads(path.read_text())["shards"]] == ["orders"]
    assert "→ 1 batch" in sh("maintain", "--apply", path)
    assert "PlanMoved: shard orders: this plan was made at v" in sh.fails(1, "maintain", "--apply", path)


def test_what_does_not_go_with_a_plan_is_refused(sh: Shell):
    path = sh.root.parent / "plan.json"
    for more in (["--dry-run"], ["--only", "garbage"], ["--plan", path], ["--force"]):
        sh.fails(2, "maintain", "--apply", path, *more)
    for more in (["--dry-run"], ["--even-if-paused"]):
        sh.fails(2, "maintain", "--plan", path, *more)
    sh.fails(2, "maintain", "--apply", path)
    path.write_text("{}")
    assert "this is no plan" in sh.fails(2, "maintain", "--apply", path)
    assert sh.run("maintain", "--plan", path / "none" / "plan.json", "orders").exit_code == 2


def test_describe_says_what_is_paused_of_this_table_and_of_no_other(sh: Shell):
    assert "paused" not in sh("describe", "orders")
    sh("maintain", "--pause", "other*", "--reason", "elsewhere")
    sh("maintain", "--pause", "ord*", "--only", "compaction", "--reason", "copying")
    said = sh("describe", "orders")
    assert "compaction of ord*" in said
    assert "copying" in said
    assert "elsewhere" not in said
    assert [one["patterns"] for one in sh.json("describe", "orders")["pauses"]] == [["ord*"]]


def test_a_list_says_where_it_is_not_known_whether_a_shard_is_damaged(sh: Shell, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> object:
        raise persist.Determinate("the list was not read")

    assert "not known" not in sh("shard", "list")
    monkeypatch.setattr("persist_lib.maintain.scrub_memory.known_damage", fail)
    assert "not known of orders" in sh("shard", "list")


def test_rules_are_set_and_each_value_says_where_it_is_from(sh: Shell):
    path = sh.root.parent / "rules.toml"
    path.write_text('[[rule]]\npattern = "ord*"\nretention = 3\ncompaction_weight = 0.25\nquiet = "01:00-02:00"\n')
    assert "1 rule in force" in sh("config", "--rules", path)
    found = sh.json("config", "orders")["settings"]
    assert found["retention"] == {"value": 3, "source": "the rule 'ord*'"}
    assert found["compaction_weight"] == {"value": 0.25, "source": "the rule 'ord*'"}
    assert found["quiet"] == {"value": "01:00-02:00", "source": "the rule 'ord*'"}
    assert found["compaction_advance"]["source"] == "default"
    sh("set-retention", "orders", "4")
    assert sh.json("config", "orders")["settings"]["retention"] == {"value": "4", "source": "set-retention"}
    assert sh.json("config", "tidy")["settings"]["retention"] == {"value": None, "source": "default"}
    path.write_text('[[rule]]\npattern = "ord*"\nretain = 3\n')
    assert "a rule has no 'retain'" in sh.fails(2, "config", "--rules", path)
    sh.fails(2, "config", "--rules", path, "orders")
    path.write_text('[[rule]]\npattern = "ord*"\nbytes_day = 1\nstill = "1 hour"\n')
    sh("config", "--rules", path)
    assert sh("config", "--show-rules") == path.read_text()
    assert sh.json("config", "--show-rules")["rules"][0]["still"] == "1 hour"
    sh.fails(2, "config", "--show-rules", "orders")
    source = sh.json("config", "orders")["settings"]["bytes_day"]["source"]
    assert source == "the rule 'ord*'; 0 B of 1 B today"
    assert "bytes_day 1; still 1 hour" in sh("report")
    assert "the rule 'ord*'" in sh("report", "orders")
    path.write_text("")
    assert "0 rules in force" in sh("config", "--rules", path)
