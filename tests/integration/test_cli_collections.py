"""`persist collection`: a life of a collection at a shell, its dry runs, its failures, and what machines get."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

import persist_lib as persist
from tests.integration.test_cli import Shell

COLUMNS = ("--key", "id:int64 not null", "--value", "name:string", "--value", "cents:int64", "--times", "none")
FIXES = """
import pyarrow.compute as pc

def doubled(rows):
    return rows.set_column(rows.schema.get_field_index("cents"), "cents", pc.multiply(rows["cents"], 2))

NOT_A_FUNCTION = 3
"""


def jsonl(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def made(sh: Shell, tmp_path: Path) -> Shell:
    """A collection of three shards with ten rows."""
    sh("create", "orders", *COLUMNS, "--shards", 3, "--mode", "compare_and_append")
    rows = [{"id": n, "name": "a", "cents": 10 * n} for n in range(10)]
    sh("append", "orders", jsonl(tmp_path / "rows.jsonl", *rows))
    return sh


def contents(sh: Shell, name: str = "orders", *words: object) -> dict[int, int]:
    found = sh.json("read", name, "--diff", *words)
    assert all(row["_diff"] == 1 for row in found["rows"])
    return {row["id"]: row["cents"] for row in found["rows"]}


def test_a_collection_is_made_once_and_listed(sh: Shell):
    said = sh("create", "sales/orders", *COLUMNS, "--shards", 2, "--command", "c1")
    assert said.startswith("created sales/orders: ")
    assert sh("create", "sales/orders", *COLUMNS, "--shards", 2, "--command", "c1") == said
    again = sh.fails(1, "create", "sales/orders", *COLUMNS, "--shards", 1)
    assert "there is a collection 'sales/orders' already" in again
    assert sh("tables", "--names") == "sales/orders\n"
    assert sh.json("tables", "--names") == {"tables": ["sales/orders"]}
    found = sh.json("tables")["tables"][0]
    assert (found["name"], found["mode"], len(found["shards"]), found["upper"]) == ("sales/orders", "append", 2, [0])
    assert re.search(r"sales/orders +collection +2 +3 +\[0\] +\[0\] +append +1 +\[1\] +\n", sh("tables"))


def test_a_dry_run_of_create_makes_nothing(sh: Shell):
    assert "would create orders" in sh("create", "orders", *COLUMNS, "--shards", 1, "--dry-run")
    assert not sh.root.exists()
    assert "a collection's name must be" in sh.fails(2, "create", "/x", *COLUMNS, "--shards", 1, "--dry-run")


def test_show_tells_renditions_and_what_is_promised(made: Shell):
    made("collection", "rendition", "make", "orders", "--shards", 5, "--copy")
    text = made("describe", "orders")
    assert re.search(r"promised +\[1\]: the earliest time of the next handover", text)
    assert re.search("rendition 2 new, copies 1", made("tables"))
    for fact in (
        "id +c[0-9a-f]{16}",
        "mode +compare_and_append",
        "retention +all history",
        "used by +0 readers, 0 writers",
    ):
        assert re.search(fact, text), fact
    assert re.search(r" 1 +active +from 0 on +3 ", text)
    assert re.search(r" 2 +new, copies 1 +- +5 +\[0\] +\[0\] +the same", text)
    found = made.json("describe", "orders")
    assert found["schema"] == {"key": {"id": "int64 not null"}, "value": {"name": "string", "cents": "int64"}}
    assert [(one["number"], one["active"], one["copies"]) for one in found["renditions"]] == [
        (1, True, None), (2, False, 1),
    ]  # fmt: skip


def test_rows_come_from_files_and_from_standard_input(made: Shell, tmp_path: Path):
    done = made.run("append", "orders", "-", typed='{"id": 70, "name": "x", "cents": 7}\n')
    assert done.stdout == "orders: 1 update at time 1\n"
    row = jsonl(tmp_path / "more.jsonl", {"id": 71, "name": "x", "cents": 8, "_time": 4})
    made("append", "orders", row, "--lower", 2, "--upper", 6)
    assert contents(made)[71] == 8
    assert contents(made, "orders", "--as-of", 3).keys() == {*range(10), 70}
    assert contents(made, "orders", "--key", 71, "--columns", "id,cents") == {71: 8}
    assert "starts at [2], but upper is [6]" in made.fails(1, "append", "orders", row, "--lower", 2, "--upper", 6)
    assert made.run("append", "orders", "-", typed="").exit_code == 0


def test_a_collection_of_identical_appends_asks_for_times(sh: Shell, tmp_path: Path):
    sh("create", "events", *COLUMNS, "--shards", 2)
    rows = jsonl(tmp_path / "rows.jsonl", {"id": 1, "name": "a", "cents": 1})
    assert "add --lower and --upper" in sh.fails(2, "append", "events", rows)
    assert "go together" in sh.fails(2, "append", "events", rows, "--lower", 0)
    for _ in range(2):
        sh("append", "events", rows, "--lower", 0, "--upper", 1)
    assert contents(sh, "events") == {1: 1}
    assert "is written by appends of identical data" in sh.fails(1 + 1, "upsert", "events", rows)


def test_a_wrong_transformation_is_found_and_a_right_copy_handed_over(made: Shell, tmp_path: Path):
    fixes = tmp_path / "fixes_of_this_test.py"
    fixes.write_text(FIXES)
    made("collection", "rendition", "make", "orders", "--shards", 5, "--copy")
    made("collection", "rendition", "copy", "orders", 2, "--transform", f"{fixes}:doubled")
    text = made("collection", "compare", "orders", 2)
    assert "rendition 2 (10 rows) beside rendition 1 (10 rows), as of 0" in text
    assert re.search(r" changed +9", text)
    assert re.search(r" cents +9", text)
    assert "changed: id=1 cents: 10 → 20" in text
    found = made.json("collection", "compare", "orders", 2)
    assert (found["equal"], found["changed"], found["columns"]) == (False, 9, {"name": 0, "cents": 9})
    assert found["samples"]["changed"][0] == {"id": 1, "cents": [10, 20]}
    said = made("collection", "rendition", "drop", "orders", 2, "--dry-run")
    assert said.count("would finish") == 5
    assert len(made.json("describe", "orders")["renditions"]) == 2
    made("collection", "rendition", "drop", "orders", 2)

    made("collection", "rendition", "make", "orders", "--shards", 4, "--copy")
    made("collection", "rendition", "copy", "orders", 3)
    assert "no row differs" in made("collection", "compare", "orders", 3)
    assert made("collection", "hand-over", "orders", 3, "--dry-run") == (
        "rendition 3 of orders would be the collection from 1 on, after 1\n"
        "it is copied up to [1]\nreaders would see it once upper, now [1], has passed 1\n"
    )
    assert made.json("describe", "orders")["renditions"][0]["active"]
    assert made.json("collection", "hand-over", "orders", 3, "--command", "h")["at"] == 1
    assert made.json("collection", "hand-over", "orders", 3, "--command", "h")["at"] == 1, "the same command"
    assert "the copy is complete" in made("collection", "rendition", "copy", "orders", 3, "--to-end")
    assert "is the collection already" in made.fails(1, "collection", "hand-over", "orders", 3)
    made.run("append", "orders", "-", typed='{"id": 70, "name": "x", "cents": 7}\n')
    assert contents(made)[70] == 7
    lines = made("listen", "orders", "--as-of", 0, "--no-wait").splitlines()
    assert [line for line in lines if "id=" in line] == ["[1] +1  id=70 name=x cents=7"], "nothing else changed"
    assert made.json("changes", "orders", "--from", 0)["rows"] == [
        {"id": 70, "name": "x", "cents": 7, "_time": 1, "_diff": 1}
    ]
    assert "is the collection at times" in made.fails(1, "collection", "rendition", "drop", "orders", 3, "--dry-run")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("doubled", "FILE.py:FUNCTION"), ("nowhere_to_be_found:f", "No module named"), (":f", "FILE.py:FUNCTION"),
        ("{fixes}:NOT_A_FUNCTION", "has no function"), ("{fixes}:missing", "has no function"),
    ],
)  # fmt: skip
def test_a_transformation_that_is_none_is_refused(text: str, says: str, made: Shell, tmp_path: Path):
    fixes = tmp_path / "fixes_refused.py"
    fixes.write_text(FIXES)
    made("collection", "rendition", "make", "orders", "--copy")
    words = ("--transform", text.format(fixes=fixes))
    assert says in made.fails(2, "collection", "rendition", "copy", "orders", 2, *words)


def test_other_columns_come_with_a_rendition(made: Shell, tmp_path: Path):
    (tmp_path / "in_dollars.py").write_text(
        "import pyarrow.compute as pc\n"
        "def convert(rows):\n"
        "    at = rows.schema.get_field_index('cents')\n"
        "    return rows.set_column(at, 'dollars', pc.divide(rows['cents'].cast('double'), 100.0))\n"
    )
    new = ("--key", "id:int64 not null", "--value", "name:string", "--value", "dollars:float64")
    made("collection", "rendition", "make", "orders", *new, "--copy")
    made("collection", "rendition", "copy", "orders", 2, "--transform", f"{tmp_path}/in_dollars.py:convert")
    assert "only rendition 2 has dollars: not compared" in made("collection", "compare", "orders", 2)
    assert "go with the columns" in made.fails(2, "collection", "rendition", "make", "orders", "--unique")


def test_a_handover_in_one_call_and_what_is_said_before(made: Shell, tmp_path: Path):
    (tmp_path / "fixes.py").write_text(FIXES)
    assert "made rendition 2" in made("collection", "rendition", "make", "orders", "--shards", 2, "--copy")
    function = ("--transform", f"{tmp_path / 'fixes.py'}:doubled")
    said = made("collection", "hand-over", "orders", 2, "--dry-run")
    assert "rendition 2 of orders would be the collection from 1 on, after 1" in said
    assert "it is copied up to [0]; the rest up to 1 is copied then" in said
    assert "readers would see it once upper, now [1], has passed 1" in said
    plan = made.json("collection", "hand-over", "orders", 2, "--dry-run")
    assert (plan["at"], plan["follows"], plan["refused"], plan["dry_run"]) == (1, 1, "", True)
    done = made.run("collection", "hand-over", "orders", 1, "--dry-run", "--json")
    assert done.exit_code == 1
    assert "is the collection already" in json.loads(done.stdout)["refused"]
    assert "is for advance" in made.fails(2, "collection", "hand-over", "orders", 2, *function)
    said = made("collection", "hand-over", "orders", 2, "--advance", "--wait", *function)
    assert said.strip() == "rendition 2 of orders is the collection from 1 on"
    assert contents(made) == {n: 20 * n for n in range(10)}


def test_a_dry_run_of_giving_up_a_rendition_says_what_goes(made: Shell):
    made("collection", "rendition", "make", "orders", "--shards", 2)
    found = made.json("collection", "rendition", "drop", "orders", 2, "--dry-run")
    assert [step["action"] for step in found["steps"]] == ["finish", "finish", "forget"]
    assert "rendition 2 of orders would be dropped" in made("collection", "rendition", "drop", "orders", 2, "--dry-run")
    assert "is the collection at times" in made.fails(1, "collection", "rendition", "drop", "orders", 1, "--dry-run")
    assert len(made.json("describe", "orders")["renditions"]) == 2
    assert "rendition 2 of orders is dropped" in made("collection", "rendition", "drop", "orders", 2)


def test_columns_are_added_to_all_shards(made: Shell, tmp_path: Path):
    add = ("--add", "note:string", "--add", "seen:timestamp[us, UTC]")
    said = made("evolve", "orders", *add, "--dry-run")
    assert said.startswith("orders: would add note: string, seen: timestamp[us, UTC]; the schema would be ")
    assert len(made.json("describe", "orders")["schema"]["value"]) == 2
    done = made.json("evolve", "orders", *add)
    assert done["added"] == ["note: string", "seen: timestamp[us, UTC]"]
    assert "has these columns already" in made("evolve", "orders", *add)
    assert "has a column" in made.fails(2, "evolve", "orders", "--add", "note:int64")
    assert "name a column" in made.fails(2, "evolve", "orders")
    made(
        "upsert",
        "orders",
        jsonl(tmp_path / "n.jsonl", {"id": 3, "name": "n", "cents": 1, "note": "x", "seen": None}),
    )
    found = made.json("read", "orders")["rows"]
    assert {row["id"]: row["note"] for row in found if row["note"]} == {3: "x"}


def test_history_is_kept_by_retention_and_holds(made: Shell):
    for n in range(5):
        made.run("append", "orders", "-", typed=json.dumps({"id": 70 + n, "name": "x", "cents": 1}))
    assert "keeps history from [2] on" in made("hold", "set", "orders", "audit", "--since", 2)
    dry = made("set-retention", "orders", 0, "--dry-run")
    assert dry == "orders has no retention policy; since would be [2], kept by hold audit\n"
    assert made("set-retention", "orders", 0).startswith("orders keeps history for 0 behind upper; since is [2], kept ")
    assert re.search(r" audit +\[2\]", made("describe", "orders"))
    assert made.json("describe", "orders")["since"] == [2]
    assert made("hold", "release", "orders", "audit").startswith("orders: hold audit is released; since is [2]")
    assert "step" in made("maintain", "--only", "collections", "--dry-run")
    made.run("append", "orders", "-", typed='{"id": 80, "name": "x", "cents": 1}')
    made("maintain", "--only", "collections")
    assert made.json("describe", "orders")["since"] == [6]
    assert made("maintain", "--only", "collections") == "collections: nothing to do\n"
    assert "is before since [6]" in made.fails(1, "read", "orders", "--as-of", 2)


def test_capabilities_name_owners(made: Shell):
    with made.client() as client, client.controller() as controller:
        reader = controller.open_reader("orders", owner="nightly report")
        found = made.json("describe", "--who", "orders")["capabilities"]
        assert {(one["kind"], one["owner"]) for one in found} == {("hold", ""), ("read", "nightly report")}
        assert "nightly report" in made("describe", "--who", "orders")
        reader.close()


def test_a_name_is_typed_before_a_collection_is_dropped(made: Shell):
    before = made.json("describe", "orders")
    assert "orders would be dropped" in made("drop", "orders", "--dry-run")
    refused = made.run("drop", "orders", typed="order\n")
    assert (refused.exit_code, "Type the table's name" in refused.stderr) == (2, True)
    assert "add --yes" in made.fails(2, "drop", "orders", "--json")
    assert made.json("describe", "orders") == before
    assert "orders is dropped" in made.run("drop", "orders", typed="orders\n").stdout
    assert made("tables", "--names") == ""
    made("create", "orders", *COLUMNS, "--shards", 1)


def test_a_drop_waits_for_readers_and_says_for_whom(made: Shell):
    with made.client() as client, client.controller() as controller:
        reader = controller.open_reader("orders", owner="report")
        assert "1 shard has to wait" in made("drop", "orders", "--yes")
        reader.close()
    made("maintain", "--only", "collections")
    with made.client() as client:
        assert all(client.inspect(name).state.is_finished() for name in client.shards() if name != "_catalog")


def test_a_renamed_collection_is_found_under_its_new_name(made: Shell):
    assert made("rename", "orders", "archive/orders") == "orders is now archive/orders\n"
    assert "Did you mean archive/orders?" in made.fails(1, "describe", "archive/order")
    assert "`persist tables` lists all" in made.fails(1, "describe", "orders")


def test_maintain_takes_a_collection_by_its_name_and_without_names_all_there_is(made: Shell):
    made("create", "plain", *COLUMNS)
    made("set-retention", "orders", 1)
    with made.client() as client:
        every = set(client.shards())
        own = {name for name in every if client.controller().describe("orders").id in name}
    found = made.json("maintain", "orders")
    assert {one["shard"] for one in found["shards"]} == own
    assert len(own) == 4, "three, and the one that keeps its renditions"
    assert "steps" in found, "the collection itself is looked after, too"
    assert {one["shard"] for one in made.json("maintain", "plain")["shards"]} == {"plain"}
    found = made.json("maintain")
    assert ({one["shard"] for one in found["shards"]}, "steps" in found) == (every, True)
    assert made.json("maintain", "orders", "--only", "garbage").keys() == {
        "duty",
        "dry_run",
        "shards",
        "damaged",
        "failed",
        "cost",
    }


def test_who_takes_a_collection_for_a_shard_is_told(made: Shell):
    assert "is a collection in" in made.fails(1, "shard", "show", "orders")
    assert "persist describe orders" in made.fails(1, "shard", "show", "orders")


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "order"), ("describe", "--who", "order"), ("maintain", "order", "--only", "collections"),
        ("collection", "compare", "order", 2), ("collection", "hand-over", "order", 2),
        ("collection", "rendition", "make", "order"), ("collection", "rendition", "copy", "order", 2),
        ("collection", "rendition", "drop", "order", 2),
    ],
    ids=lambda words: " ".join(map(str, words)),
)  # fmt: skip
def test_every_command_says_that_there_is_no_such_collection(words: tuple[object, ...], made: Shell):
    said = made.run(*words).stderr
    assert re.search("there is no (collection|table) 'order'", said)
    assert "Did you mean orders?" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "orders", 7), "has no rendition 7: it has [1]"),
        (("hand-over", "orders", 7), "has no rendition 7"),
        (("hand-over", "orders", 1), "is the collection already"),
        (("rendition", "copy", "orders", 1), "is written independently"),
        (("rendition", "drop", "orders", 1), "is the collection at times"),
        (("hand-over", "orders", 1, "--at", "soon"), "must be a time"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_sentence(words: tuple[object, ...], says: str, made: Shell):
    done = made.run("collection", *words)
    assert done.exit_code in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    as_json = made.run("collection", *words, "--json")
    assert says in json.loads(as_json.stderr)["message"]


def test_tending_a_location_without_collections_is_nothing_to_do(sh: Shell):
    with persist.open(f"file:{sh.root}") as client:
        client.open_writer("shard", persist.Schema({"id": "int64"}))
    assert sh("tables").endswith("1 table\n")
    assert sh("maintain", "--only", "collections") == "collections: nothing to do\n"
    with persist.open(f"file:{sh.root}", read_only=True) as client:
        assert client.shards() == ["shard"], "no catalog was made"


def test_shards_with_minted_names_say_whose_they_are(made: Shell):
    (shard, *_) = [name for name in made.json("shard", "list", "--names")["shards"] if name.endswith(".r1.s1")]
    whose = "collection orders, rendition 1, shard 1"
    assert re.search(rf"{shard} +{whose} ", made("shard", "list"))
    found = {one["shard"]: one["owner"] for one in made.json("shard", "list")["shards"]}
    assert (found[shard], found["_catalog"]) == (whose, "the catalog")
    assert whose in made("shard", "show", shard).splitlines()[0]
    assert made.json("shard", "show", shard)["owner"] == whose
    assert whose in made("shard", "list", "--long", shard)
    made("create", "plain", "--key", "id:int64 not null")
    assert made.json("shard", "show", "plain")["owner"] == ""


def test_a_collection_that_is_damaged_is_named_and_the_other_tables_are_listed(made: Shell):
    made("create", "others", *COLUMNS, "--shards", 1)
    made("create", "plain", *COLUMNS)
    with made.client() as client:
        shard = client.controller().describe("orders").active.shards[0]
    with sqlite3.connect(made.root / "consensus.sqlite") as store:
        store.execute("UPDATE consensus SET data = ? WHERE key = ?", (b"damaged", shard))
    done = made.run("tables", "--json")
    assert done.exit_code == 3
    told = json.loads(done.stdout)
    assert ([one["table"] for one in told["tables"]], list(told["failed"])) == (["others", "plain"], ["orders"])


def test_an_error_about_a_shard_of_a_collection_says_whose_it_is(made: Shell):
    with made.client() as client:
        shard = next(name for name in client.shards() if name.endswith(".r1.s0"))
    made("maintain", "--pause", "orders", "--reason", "copying")
    said = made.fails(1, "shard", "scrub", shard)
    assert f"({shard} is collection orders, rendition 1, shard 0)" in said
    assert said.count("collection orders, rendition 1") == 1
    assert "collection orders, rendition 1, shard 0" in made.run("shard", "scrub", shard, "--json").output
    made("create", "plain", *COLUMNS)
    made("maintain", "--pause", "plain", "--reason", "copying")
    assert "(plain is" not in made.fails(1, "shard", "scrub", "plain")


def test_what_would_be_given_up_is_planned_shown_and_done_once(made: Shell):
    made("set-retention", "orders", 0)
    made("append", "orders", jsonl(made.root.parent / "more.jsonl", {"id": 11, "name": "b", "cents": 1}))
    path = made.root.parent / "plan.json"
    before = made.json("describe", "orders")["since"]
    said = made("maintain", "orders", "--plan", path, "--only", "collections")
    assert said.startswith("collections (plan): 1 step\n")
    assert re.search(r"orders +move hold [\s\S]* history of 0 times is kept", said)
    assert made.json("describe", "orders")["since"] == before
    assert made.json("maintain", "--plan", path)["collections"][0]["exactly"][:2] == ["orders", "move hold"]
    assert "nothing to give up" not in said
    done = made("maintain", "--apply", path, "orders")
    assert re.search(r"collections: \d+ steps taken, 0 to wait", done)
    assert made.json("describe", "orders")["since"] > before
    assert "PlanMoved: collection orders: it has moved" in made.fails(1, "maintain", "--apply", path, "orders")
    assert "nothing to give up" in made("maintain", "--plan", path, "--only", "collections")
    assert json.loads(path.read_text())["shards"] == []
