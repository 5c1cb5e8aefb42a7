"""`persist table`: the life of tables at a shell, transactions from files, dry runs, failures, what machines get."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import persist_lib as persist
from tests.integration.test_cli import Shell
from tests.integration.test_cli_collections import jsonl

COLUMNS = ("--key", "id:int64 not null", "--value", "cents:int64", "--value", "note:string", "--unique")


def row(id_: int, cents: int, note: str | None = None) -> dict[str, object]:
    return {"id": id_, "cents": cents, "note": note}


@pytest.fixture
def bank(sh: Shell, tmp_path: Path) -> Shell:
    """Two tables on a timeline with a WAL, of which one has rows."""
    sh("create", "accounts", *COLUMNS, "--mode", "wal", "--shards", 2)
    sh("create", "--timeline", "default", "entries", "--key", "entry:string", "--value", "cents:decimal128(30, 2)")
    sh("append", "accounts", jsonl(tmp_path / "rows.jsonl", *(row(n, 100 * n, "x") for n in range(1, 5))))
    return sh


def read(sh: Shell, name: str = "accounts", *words: object) -> dict[object, object]:
    found = sh.json("read", name, "--diff", *words)["rows"]
    assert all(one["_diff"] == 1 for one in found)
    return {one.get("id", one.get("entry")): one["cents"] for one in found}


def test_a_table_is_made_once_listed_and_shown(sh: Shell):
    assert "would create bank/accounts" in sh("create", "--timeline", "default", "bank/accounts", *COLUMNS, "--dry-run")
    assert not sh.root.exists()
    said = sh("create", "--timeline", "default", "bank/accounts", *COLUMNS, "--mode", "wal", "--command", "c1")
    assert said.startswith("created bank/accounts on timeline default (wal): 1 shard, ")
    assert sh("create", "--timeline", "default", "bank/accounts", *COLUMNS, "--command", "c1") == said
    assert "already" in sh.fails(1, "create", "--timeline", "default", "bank/accounts", *COLUMNS)
    assert "is in wal mode" in sh.fails(2, "create", "--timeline", "default", "x", *COLUMNS, "--mode", "yolo")
    sh("create", "orders", "--key", "id:int64", "--shards", "1")
    assert sh("tables", "--names") == "bank/accounts\norders\n"
    assert re.search(r" bank/accounts +timeline 'default' +1 .* wal +1 ", sh("tables"))
    assert re.search(r"timeline +default, in wal mode", sh("describe", "bank/accounts"))
    assert "there is no table 'nowhere'" in sh.fails(1, "read", "nowhere")


@pytest.mark.parametrize(("words", "says"), [
    (("--timeline", "t", "--mode", "append"), "--mode is yolo or wal"),
    (("--mode", "wal", "--hash", "id"), "leave out --hash"),
    (("--timeline", "t", "--times", "us"), "leave out --times"),
])  # fmt: skip
def test_options_that_no_table_can_have_together_are_refused(sh: Shell, words: tuple[str, ...], says: str):
    assert says in sh.fails(2, "create", "accounts", *COLUMNS, *words)
    assert not sh.root.exists()


def test_what_carries_a_new_table_is_chosen_by_the_options(sh: Shell):
    for name, words, carrier in (
        ("a", (), "shard"), ("b", ("--shards", 1), "collection"), ("c", ("--retention", 5), "collection"),
        ("d", ("--hash", "id"), "collection"), ("e", ("--mode", "compare_and_append"), "collection"),
        ("f", ("--timeline", "t"), "timeline 't'"), ("g", ("--mode", "wal"), "timeline 'default'"),
    ):  # fmt: skip
        sh("create", name, *COLUMNS, *words)
        assert sh.json("describe", name)["carrier"] == carrier, name
    assert sh.json("describe", "c")["retention"] == 5


def test_the_outcome_of_an_append_to_a_shard_needs_its_times(sh: Shell):
    sh("create", "orders", *COLUMNS)
    assert "say --lower and --upper" in sh.fails(2, "outcome", "orders", "00" * 16)


def test_show_and_list_tell_how_far_a_table_is_behind_until_it_is_tended(bank: Shell):
    text = bank("describe", "accounts")
    assert re.search(r"behind +1 commit, .* in the WAL alone since 20\d\d-", text)
    found = bank.json("describe", "accounts")
    assert [(one["commits"], one["size"]) for one in found["behind"]] == [(1, found["wal"][0]["unapplied"])]
    assert found["wal"][0]["waits_ms"] >= 0
    assert re.search(r" accounts +timeline 'default' +2 .* wal +1 .* 1 commit, [\d.]+ (B|KiB)", bank("tables"))
    assert bank("maintain", "--only", "collections", "--dry-run").count(" apply ") == 1
    assert bank.json("describe", "accounts")["behind"] == found["behind"], "a dry run changes nothing"
    said = bank("maintain", "--only", "collections")
    assert " apply " in said
    assert "tidy" in said
    assert re.search("behind +nothing: it has all that was committed", bank("describe", "accounts"))
    assert bank.json("tables")["tables"][0]["behind"] == []
    assert "nothing to do" in bank("maintain", "--only", "collections")
    assert read(bank) == {1: 100, 2: 200, 3: 300, 4: 400}


def test_rows_are_inserted_upserted_updated_and_deleted_from_files_and_from_standard_input(bank: Shell, tmp_path: Path):
    said = bank("upsert", "accounts", jsonl(tmp_path / "u.jsonl", row(1, 1), row(2, 200, "x"), row(9, 9)))
    assert re.match(r"accounts: 1 inserted, 1 updated, 1 unchanged \(3 updates\) at time 20\d\d-", said)
    typed = '{"id": 3, "cents": 3}\n{"id": 7, "cents": 7}\n'
    said = bank.run("update", "accounts", "-", typed=typed).stdout
    assert re.match(r"accounts: 1 updated \(2 updates\) at time", said), "a key without rows is left alone"
    assert bank.json("read", "accounts", "--key", 3)["rows"] == [row(3, 3, "x")]
    said = bank("delete", "accounts", jsonl(tmp_path / "d.jsonl", {"id": 9}, {"id": 10}))
    assert said.startswith("accounts: 1 unchanged, 1 deleted (1 update) at time")
    said = bank("append", "accounts", jsonl(tmp_path / "i.jsonl", row(11, 11)))
    assert said.startswith("accounts: 1 update at time")
    assert read(bank) == {1: 1, 2: 200, 3: 3, 4: 400, 11: 11}
    found = bank.json("upsert", "accounts", jsonl(tmp_path / "u.jsonl", row(1, 1)))
    assert (found["time"], found["updates"], found["unchanged"]) == (None, 0, 1)
    assert bank.run("append", "accounts", "-", typed="").stdout.startswith("accounts: 0 updates")


@pytest.mark.parametrize("verb", ["upsert", "apply"])
def test_a_line_keeps_what_it_lacks_whatever_the_other_lines_have(bank: Shell, tmp_path: Path, verb: str):
    bank("upsert", "accounts", jsonl(tmp_path / "u.jsonl", row(1, 1, "a"), row(2, 2, "b"), row(3, 3, "c")))
    parts: list[dict[str, object]] = [row(1, 5), {"note": "x", "id": 2}, {"id": 3, "cents": 9}, {"id": 77, "cents": 7}]
    found = bank.json(verb, "accounts", jsonl(tmp_path / "p.jsonl", *parts))
    assert (found["inserted"], found["updated"]) == (1, 3)
    (tmp_path / "p.csv").write_text("id,note\n3,y\n")
    assert bank.json(verb, "accounts", tmp_path / "p.csv")["updated"] == 1
    kept = {one["id"]: one for one in bank.json("read", "accounts")["rows"]}
    assert [kept[id_] for id_ in (1, 2, 3, 77)] == [row(1, 5), row(2, 2, "x"), row(3, 9, "y"), row(77, 7)]
    said = bank.run(verb, "accounts", "-", typed='{"id": 1, "cents": 6}\n{"id": 1, "note": "z"}\n[1]\n')
    assert said.exit_code != 0
    assert "line 3 is no JSON object" in said.stderr
    wrong = bank.run(verb, "accounts", "-", typed='{"id": 1, "cents": "x"}\n{"id": 2, "note": "z"}\n')
    assert "standard input" in wrong.stderr
    assert "rows.jsonl" not in wrong.stderr


@pytest.mark.parametrize(
    ("verb", "rows", "counts"),
    [
        ("append", [row(11, 1)], {"updates": 1}),
        ("upsert", [row(1, 5), row(12, 5)], {"inserted": 1, "updated": 1, "updates": 3}),
        ("update", [{"id": 1, "note": None}], {"updated": 1, "updates": 2}),
        ("delete", [{"id": 1}, {"id": 99}], {"deleted": 1, "updates": 1}),
    ],
)
def test_a_dry_run_counts_and_changes_nothing(
    bank: Shell, tmp_path: Path, verb: str, rows: list[dict[str, object]], counts: dict[str, int]
):
    before = bank.files().keys()
    found = bank.json(verb, "accounts", jsonl(tmp_path / "r.jsonl", *rows), "--dry-run")
    assert {name: found[name] for name in ("inserted", "updated", "deleted", "updates") if found[name]} == counts
    assert (found["time"], found["token"]) == (None, "")
    assert bank.files().keys() == before
    assert read(bank) == {1: 100, 2: 200, 3: 300, 4: 400}


def test_a_constraint_that_would_break_writes_nothing(bank: Shell, tmp_path: Path):
    rows = jsonl(tmp_path / "i.jsonl", row(20, 1), row(1, 1))
    for words in ((), ("--dry-run",)):
        assert "Nothing was written" in bank.fails(1, "append", "accounts", rows, *words)
    assert read(bank) == {1: 100, 2: 200, 3: 300, 4: 400}


@pytest.mark.parametrize(
    ("verb", "lines", "says"),
    [
        ("update", ['{"id": 1, "cent": 1}'], "has no column 'cent'. Did you mean cents?"),
        ("update", ['{"id": 1}'], "some of ['cents', 'note'], which change: got ['id']"),
        ("update", ['{"cents": 1}'], "id"),
        ("update", ['{"id": 1, "cents": 1}', '{"id": 2, "note": "n"}'], "line 2 has the columns ['id', 'note']"),
        ("update", ['{"id": 1, "cents": 1}', '{"id": 1, "cents": 2}'], "id"),
        ("upsert", ['{"id": 1, "cents": "much", "note": ""}'], "cannot be read"),
        ("delete", ['{"id": 1, "cents": 1}'], "cents"),
        ("append", ["[1]"], "each line must be an object"),
    ],
)
def test_wrong_rows_are_refused_and_named(bank: Shell, tmp_path: Path, verb: str, lines: list[str], says: str):
    (tmp_path / "wrong.jsonl").write_text("\n".join(lines) + "\n")
    assert says in bank.fails(2, verb, "accounts", tmp_path / "wrong.jsonl")
    assert read(bank) == {1: 100, 2: 200, 3: 300, 4: 400}


def statement(table: str, op: str, **columns: object) -> str:
    return json.dumps({"table": table, "op": op, "row": columns})


TRANSFER = [
    statement("accounts", "update", id=1, cents=90),
    statement("accounts", "update", id=2, cents=210),
    statement("accounts", "update", id=3, note="only this"),
    '{"table": "entries", "op": "insert", "row": {"entry": "e1", "cents": 1234567890123456789012345678.25}}',
    statement("accounts", "delete", id=4),
]


def test_a_file_of_statements_is_one_transaction_over_several_tables(bank: Shell, tmp_path: Path):
    path = tmp_path / "transfer.jsonl"
    path.write_text("\n".join(TRANSFER) + "\n\n")
    found = bank.json("transact", path, "--dry-run")
    counts = {"inserted": 0, "updated": 3, "unchanged": 0, "deleted": 1, "late": 0}
    assert (found["tables"]["accounts"], found["tables"]["entries"]["inserted"], found["time"]) == (counts, 1, None)
    assert (read(bank), read(bank, "entries")) == ({1: 100, 2: 200, 3: 300, 4: 400}, {})
    found = bank.json("transact", path)
    assert found["tables"]["accounts"] == counts
    assert read(bank) == {1: 90, 2: 210, 3: 300}
    assert read(bank, "entries") == {"e1": "1234567890123456789012345678.25"}, "no digit is lost"
    assert read(bank, "entries", "--as-of", found["time"] - 1) == {}
    with bank.client() as client, client.controller().tables() as tables:
        assert tables.outcome(bytes.fromhex(found["token"])) == found["time"]
    assert "committed at 20" in bank("outcome", "accounts", found["token"])
    assert bank.json("outcome", "entries", found["token"])["time"] == found["time"], "any of its tables"
    said = bank.run("transact", "-", typed=statement("accounts", "upsert", id=1, cents=90, note="x"))
    assert said.stdout == "accounts: 1 unchanged\nnothing was changed\n"


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        ([], 2, "has no statements"),
        (["{"], 2, "line 1 is no statement"),
        ([TRANSFER[0], '{"table": "accounts", "op": "merge", "row": {}}'], 2, "line 2 is no statement"),
        ([TRANSFER[0], '{"table": "accounts", "op": "upsert", "row": [1]}'], 2, "line 2 is no statement"),
        ([TRANSFER[0], '{"table": "accounts", "row": {}}'], 2, "line 2 is no statement"),
        ([TRANSFER[0], statement("entries", "insert", entry="e", cent=1)], 2, "line 2: "),
        ([TRANSFER[0], statement("nowhere", "insert", id=1)], 1, "there is no collection 'nowhere'"),
        ([TRANSFER[0], statement("accounts", "insert", id=1, cents=1, note="")], 1, "unique"),
    ],
)
def test_a_transaction_with_a_wrong_statement_writes_nothing(
    bank: Shell, tmp_path: Path, lines: list[str], code: int, says: str
):
    path = tmp_path / "wrong.jsonl"
    path.write_text("\n".join(lines))
    assert says in bank.fails(code, "transact", path)
    assert read(bank) == {1: 100, 2: 200, 3: 300, 4: 400}


def test_a_transaction_on_a_lone_table_says_how_it_joins(bank: Shell, tmp_path: Path):
    bank("create", "notes", "--key", "id:int64 not null")
    path = tmp_path / "lone.jsonl"
    path.write_text("\n".join([TRANSFER[0], statement("notes", "insert", id=1)]))
    said = bank.fails(1, "transact", path)
    assert "'notes' is on one shard" in said
    assert "`persist promote notes`" in said


def test_on_a_timeline_in_yolo_mode_there_are_no_transactions(sh: Shell, tmp_path: Path):
    sh("create", "--timeline", "default", "accounts", *COLUMNS)
    path = tmp_path / "t.jsonl"
    path.write_text(TRANSFER[0])
    assert "is in YOLO mode" in sh.fails(2, "transact", path)
    sh("append", "accounts", jsonl(tmp_path / "i.jsonl", row(1, 1)))
    assert "behind" not in sh("describe", "accounts")
    assert read(sh) == {1: 1}


def test_changes_and_listening_give_each_update_once_applied_or_not(bank: Shell, tmp_path: Path):
    first = bank.json("read", "accounts")["as_of"]
    bank("maintain", "--only", "collections")
    second = bank.json("upsert", "accounts", jsonl(tmp_path / "u.jsonl", row(1, 1, "x")))["time"]
    third = bank.json("upsert", "accounts", jsonl(tmp_path / "u.jsonl", row(1, 2, "x")))["time"]
    found = bank.json("changes", "accounts", "--from", first)["rows"]
    assert sorted((one["cents"], one["_diff"]) for one in found) == [(1, -1), (1, 1), (2, 1), (100, -1)]
    found = bank.json("changes", "accounts", "--from", first, "--to", second)["rows"]
    assert sorted((one["cents"], one["_diff"]) for one in found) == [(1, 1), (100, -1)]
    assert bank.json("changes", "accounts", "--from", third)["rows"] == []
    assert "changes go forward" in bank.fails(2, "changes", "accounts", "--from", third, "--to", second)
    events = [
        json.loads(line) for line in bank("listen", "accounts", "--as-of", second, "--no-wait", "--json").splitlines()
    ]
    assert [one["cents"] for one in events[0]["updates"]] == [1, 2]
    assert events[-1]["progress"] == [third + 1]
    assert "cents=2" in bank("listen", "accounts", "--as-of", second, "--until", third + 1), "it ends"
    assert "cents=2" not in bank("listen", "accounts", "--as-of", second, "--until", third)


def test_sql_reads_what_is_not_applied_yet_and_all_tables_at_one_time(bank: Shell, tmp_path: Path):
    (tmp_path / "t.jsonl").write_text("\n".join(TRANSFER))
    bank("transact", tmp_path / "t.jsonl")
    found = bank.json("sql", "select count(*) n, sum(cents) c, (select count(*) from entries) e from accounts")
    assert found["rows"] == [{"n": 3, "c": 600, "e": 1}]
    assert len({one["as_of"] for one in found["tables"]}) == 1


def test_formats_are_those_of_snapshots(bank: Shell, tmp_path: Path):
    assert bank("read", "accounts", "--format", "csv", "--columns", "cents").splitlines()[:2] == [
        '"cents"', "100",
    ]  # fmt: skip
    out = tmp_path / "accounts.parquet"
    bank("read", "accounts", "--format", "parquet", "-o", out)
    bank("create", "--timeline", "default", "copy", *COLUMNS)
    bank("append", "copy", out)
    assert read(bank, "copy") == read(bank)
    assert "Parquet can only be written to a file" in bank.fails(2, "read", "accounts", "-f", "parquet")
    with persist.open(f"file:{bank.root}") as client:
        assert len(client.controller().tables().read("accounts").to_pylist()) == 4


ORDERED = ("--key", "id:int64 not null", "--value", "seq:int64", "--value", "word:string", "--unique")


def test_a_table_keeps_deleted_keys(sh: Shell, tmp_path: Path):
    sh("create", "a", *ORDERED, "--mode", "wal", "--keep-deletes", "seq:7 days")
    assert "a has no retention policy; deleted keys are remembered for 7 days, by seq (in deleted-keys/" in sh(
        "set-retention", "a"
    )
    assert "remembered for 7 days, by seq" in sh("describe", "a")
    rows = jsonl(tmp_path / "rows.jsonl", {"id": 1, "seq": 5, "word": "w"}, {"id": 2, "seq": 5, "word": "w"})
    gone = jsonl(tmp_path / "gone.jsonl", {"id": 1, "seq": 9}, {"id": 3, "seq": 9})
    assert "1 inserted, 2 unchanged" in sh("apply", "a", rows, "--deletes", gone, "--newer", "seq")
    late = sh.json("apply", "a", jsonl(tmp_path / "late.jsonl", {"id": 3, "seq": 8, "word": "late"}), "--newer", "seq")
    assert (late["late"], late["updates"], late["time"]) == (1, 0, None)
    assert [one["id"] for one in sh.json("read", "a")["rows"]] == [2]
    assert sh("tables", "--names") == "a\n"
    bare = jsonl(tmp_path / "bare.jsonl", {"id": 2})
    assert "seq" in sh.fails(2, "apply", "a", rows, "--deletes", bare)
    assert "could be kept so" in sh("set-retention", "a", "--keep-deletes", "seq:5", "--dry-run")
    assert "remembered for 2 h," in sh("set-retention", "a", "1 day", "--keep-deletes", "seq:2 hours")
    kept = sh.json("describe", "a")["keep_deletes"]
    assert (kept["column"], kept["span_ms"]) == ("seq", 7_200_000)
    assert sh("set-retention", "a", "--keep-deletes", "none").endswith("; deleted keys are not remembered\n")
    assert sh.json("set-retention", "a")["keep_deletes"] is None


def test_keeping_deleted_keys_takes_a_wal(sh: Shell):
    for words in ((), ("--shards", 1), ("--mode", "yolo")):
        assert "a timeline with a WAL" in sh.fails(2, "create", "a", *ORDERED, *words, "--keep-deletes", "seq:1 day")
    assert "a column and a duration" in sh.fails(2, "create", "a", *ORDERED, "--mode", "wal", "--keep-deletes", "seq")
    sh("create", "b", *ORDERED)
    assert "promote(timeline" in sh.fails(2, "set-retention", "b", "--keep-deletes", "seq:1 day")
    assert "not remembered" in sh("set-retention", "b", "--keep-deletes", "none")


def test_an_empty_table_is_followed_from_its_beginning_at_a_shell(sh: Shell, tmp_path: Path):
    sh("create", "empty", "--key", "id:int64", "--times", "none")
    assert sh.json("read", "empty")["as_of"] == -1
    sh("append", "empty", jsonl(tmp_path / "rows.jsonl", {"id": 1}), "--lower", 0, "--upper", 1)
    for start in ((), ("--as-of", "-1")):
        first = json.loads(sh("listen", "empty", *start, "--no-wait", "--json").splitlines()[0])
        assert [one["id"] for one in first["updates"]] == [1]
    assert [one["id"] for one in sh.json("changes", "empty", "--from", "-1")["rows"]] == [1]
