"""`persist create` and `persist evolve`: declared columns, dry runs, and the same thing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from persist_lib.cli.schema_commands import build_schema, parse_columns, python_of
from persist_lib.errors import InvalidUsage
from tests.commands import invoke

COLUMNS = ("--key", "id:int64", "--value", "name:string", "--value", "price:decimal(10,2)?")
PLAIN = persist.Schema(key={"id": "int64"}, value={"name": "string", "price": "decimal128(10, 2)"})
SCHEMA = persist.Schema(key=PLAIN.key, value=PLAIN.value, times="ms")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*words: str) -> Any:
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fails(code: int, *words: str) -> str:
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def version(name: str = "items") -> Any:
    with persist.open("file:./data", read_only=True) as client:
        return client.inspect(name)


def test_a_shard_has_the_columns_that_were_declared_and_python_opens_it_with_the_same_words() -> None:
    shown = invoke("create", "items", *COLUMNS)
    assert shown.stdout.startswith("created items in file:/")
    assert version().state.schemas == (SCHEMA,)
    said = shown.stderr.split("in Python: ")[1]
    assert eval(said, {"persist": persist}) == SCHEMA
    with persist.open("file:./data") as client:
        client.open_shard("items", SCHEMA)


def test_times_are_those_of_a_table_in_python_unless_they_are_to_be_integers() -> None:
    words: tuple[tuple[str, ...], ...]
    words = (("--shards", "2"), ("--mode", "compare_and_append"), ("--timeline", "bank"), ())
    for number, more in enumerate(words):
        assert done("create", f"t{number}", *COLUMNS, *more)["schema"]["times"] == "ms"
    with persist.open("file:./data") as client:
        client.table("python", PLAIN)
        found = {name: client.table(name, PLAIN).schema for name in client.tables()}
    assert found == dict.fromkeys(("python", "t0", "t1", "t2", "t3"), SCHEMA)
    for name, more in (("n0", ()), ("n1", ("--shards", "2"))):
        assert "times" not in done("create", name, *COLUMNS, *more, "--times", "none")["schema"]
    assert done("create", "n0", *COLUMNS)["created"] is False, "what is there is not said to have other times"
    assert fails(2, "create", "n0", *COLUMNS, "--times", "ms").startswith("SchemaMismatch")
    assert fails(2, "create", "t3", *COLUMNS, "--times", "none").startswith("SchemaMismatch")
    assert "leave out --times" in fails(2, "create", "x", *COLUMNS, "--timeline", "bank", "--times", "none")
    Path("rows.csv").write_text("id\n1\n")
    for name, more, times in (("a", (), "ms"), ("b", ("--times", "none"), None)):
        done("append", name, "rows.csv", "--create", "--key", "id", *more)
        assert done("describe", name)["schema"].get("times") == times


def test_creating_the_same_again_changes_nothing_and_another_is_refused() -> None:
    assert done("create", "items", *COLUMNS)["created"] is True
    before = version()
    assert done("create", "items", *COLUMNS)["created"] is False
    assert "exists already" in invoke("create", "items", *COLUMNS).stdout
    for other in (COLUMNS[:-2], ("--key", "id:string"), (*COLUMNS, "--value", "more:bool")):
        said = fails(2, "create", "items", *other)
        assert "SchemaMismatch: table items exists already, with the schema (id: int64) ->" in said
        assert "persist evolve" in said
    assert version() == before


def test_a_dry_run_makes_neither_a_shard_nor_a_location(here: Path) -> None:
    assert "would create items in file:./data: (id: int64)" in invoke("create", "items", *COLUMNS, "--dry-run").stdout
    assert list(here.iterdir()) == []
    invoke("create", "other", *COLUMNS)
    assert done("create", "items", *COLUMNS, "--dry-run")["schema"]["value"]["price"] == "decimal128(10, 2)"
    with persist.open("file:./data", read_only=True) as client:
        assert client.shards() == ["other"]


def test_a_dropped_name_is_used_again_for_other_columns() -> None:
    invoke("create", "items", *COLUMNS)
    invoke("drop", "items", "--yes")
    assert fails(1, "evolve", "items", "--add", "x:int64").startswith("NotFound")
    others = ("--key", "sku:string", "--value", "price:int64")
    assert "would create items" in invoke("create", "items", *others, "--dry-run").stdout
    assert done("create", "items", *others)["created"] is True
    assert done("create", "items", *others)["created"] is False
    assert done("describe", "items")["schema"]["key"] == {"sku": "string"}
    assert fails(2, "create", "items", *COLUMNS).startswith("SchemaMismatch")
    Path("rows.csv").write_text("code,price\na,1\n")
    invoke("create", "others", *COLUMNS)
    invoke("drop", "others", "--yes")
    assert done("append", "others", "rows.csv", "--create", "--key", "code")["updates"] == 1
    assert done("describe", "others")["carrier"] == "collection"


def test_columns_are_added_once_and_only_when_it_is_no_dry_run() -> None:
    invoke("create", "items", *COLUMNS)
    before = version()
    assert "would add note: string" in invoke("evolve", "items", "--add", "note:string", "--dry-run").stdout
    assert version() == before
    assert done("evolve", "items", "--add", "note:string", "--add", "seen:date")["added"] == [
        "note: string",
        "seen: date32",
    ]
    after = version()
    assert [column.name for column in after.state.schemas[-1].value] == ["name", "price", "note", "seen"]
    assert done("evolve", "items", "--add", "note:string")["added"] == []
    assert done("evolve", "items", "--add", "note:string", "--add", "note:string")["added"] == []
    assert done("create", "items", *COLUMNS)["created"] is False, "the schema that it was created with is still its own"
    assert version() == after


@pytest.mark.parametrize(("added", "said"), [
    ("note:strng", "column type 'strng' is not supported. Did you mean string"),
    ("name:binary", "has a column (name: string) already, which cannot become (name: binary)"),
    ("id:string", "has a column (id: int64) already"),
    ("m:int64 not null", "must be nullable or have a default, as older updates have no value for it"),
    ("_time:int64", "must not be _time or _diff"),
    ("note", "a column is a name and a type"), (":int64", "a column is a name and a type"), ("", "a name and a type"),
    ("note:", "a column is a name and a type"), ("note:?", "a column is a name and a type"),
    ("a:timestamp[us, Mars]", "time zone 'Mars' is not known"), ("a:int64 not null?", "use only one of them"),
])  # fmt: skip
def test_what_cannot_be_added_is_refused_in_words_and_nothing_is_changed(added: str, said: str) -> None:
    invoke("create", "items", *COLUMNS)
    before = version()
    for dry in ((), ("--dry-run",)):
        assert said in fails(2, "evolve", "items", "--add", added, *dry)
    assert version() == before


def test_columns_are_renamed_widened_and_dropped_and_a_dry_run_says_who_stays_in_the_present_ones() -> None:
    invoke("create", "items", *COLUMNS)
    words = (
        "evolve", "items", "--rename", "name=title", "--widen", "price:decimal(12,2)", "--allow-null", "title",
        "--add", "via:string not null", "--default", "via=web",
    )  # fmt: skip
    before = version()
    with persist.open("file:./data") as client, client.open_writer("items", before.state.schemas[-1], owner="me") as w:
        w.advance_upper(5)
        dry = done(*words, "--dry-run")
    assert [one.endswith("(me)") for one in dry["stay"]] == [True]
    said = ["name renamed to title", "price widened to decimal128(12, 2)", "via"]
    assert dry["changes"] == said
    assert [str(one) for one in version().state.schemas[-1].value] == [
        str(one) for one in before.state.schemas[-1].value
    ]
    changed = done(*words)
    assert (changed["changes"], changed["added"]) == (said, ["via: string not null default 'web'"])
    assert changed["schema"]["value"] == {"title": "string", "price": "decimal128(12, 2)", "via": "string not null"}
    assert changed["schema"]["defaults"] == {"via": "web"}
    assert "no column 'name'" in fails(2, *words)
    assert done("evolve", "items", "--drop", "price")["changes"] == ["price dropped"]
    done("evolve", "items", "--add", "at:struct<city: string, zip: int32>")
    wide = "struct<city: string, zip: int64, country: string>"
    assert done("evolve", "items", "--widen", f"at:{wide}")["changes"] == [f"at widened to {wide}"]
    assert done("evolve", "items", "--reorder", "at", "--dry-run")["changes"] == ["reordered to id, at, title, via"]
    moved = done("evolve", "items", "--add", "note:string", "--reorder", "via", "--reorder", "note", "--after", "title")
    assert moved["changes"] == ["reordered to id, title, via, note, at", "note"]
    assert list(moved["schema"]["value"]) == ["title", "via", "note", "at"]
    assert "Fields come at the end" in fails(2, "evolve", "items", "--widen", "at:struct<zip: int64, city: string>")
    for wrong, said_of_it in (
        (("--rename", "title"), "takes a name, = and"), (("--default", "x=1"), "add 'x' by --add"),
        (("--drop", "id"), "key column"), (("--widen", "via:int64"), "not every"),
        (("--after", "via"), "name them by --reorder"), (("--reorder", "id"), "key column"),
    ):  # fmt: skip
        assert said_of_it in fails(2, "evolve", "items", *wrong)


def test_evolving_needs_a_column_and_a_shard() -> None:
    invoke("create", "items", *COLUMNS)
    assert "name a column to add" in fails(2, "evolve", "items")
    assert "Did you mean items?" in fails(1, "evolve", "itms", "--add", "x:int64")
    assert "must differ" in fails(2, "evolve", "items", "--add", "x:int64", "--add", "x:string")


@pytest.mark.parametrize("words", [
    ("create", "items"), ("create", "items", "--value", "a:int64"), ("create", "items", "--key", "id"),
    ("create", "items", "--key", ""), ("create", "", "--key", "id:int64"), ("create", "a/b", "--key", "id:int64"),
    ("create", "items", "--key", "id:int64", "--value", "id:int64"), ("create", "items", "--key", "id:decimal(99,1)"),
    ("create", "items", "--like", "no.csv", "--key", "id"), ("create", "items", "--like", "x.csv"),
    ("create", "items", "--like", "x.csv", "--key", "di"), ("create", "items", "--like", "x.txt", "--key", "id"),
    ("create", "items", "--like", "empty.csv", "--key", "id"),
    ("create", "items", "--location", "", "--key", "id:int64"),
])  # fmt: skip
def test_a_wrong_call_makes_nothing(here: Path, words: tuple[str, ...]) -> None:
    (here / "x.csv").write_text("id,name\n1,a\n")
    (here / "x.txt").write_text("id,name\n1,a\n")
    (here / "empty.csv").write_text("")
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert not (here / "data").exists()


def test_a_file_gives_its_types_for_all_columns_or_for_some(here: Path) -> None:
    table = pa.table({"id": pa.array([1], pa.uint8()), "b": ["x"], "c": [1.5], "_time": [3], "_diff": [1]})
    pq.write_table(table, here / "like.parquet")
    assert build_schema(["id"], [], here / "like.parquet") == persist.Schema(
        key={"id": "uint8"}, value={"b": "string", "c": "float64"}
    )
    assert build_schema(["b,id"], ["c"], here / "like.parquet") == persist.Schema(
        key={"b": "string", "id": "uint8"}, value={"c": "float64"}
    )
    assert build_schema(["id:int64"], ["c:float32 not null"], here / "like.parquet") == persist.Schema(
        key={"id": "int64"}, value={"c": "float32 not null"}
    )
    with pytest.raises(InvalidUsage, match=r"no column 'bb'\. Did you mean b\?"):
        build_schema(["id"], ["bb"], here / "like.parquet")
    (here / "like.csv").write_text("id,day\n1,2026-01-02\n")
    assert done("create", "items", "--like", "like.csv", "--key", "id")["schema"] == {
        "key": {"id": "int64"}, "value": {"day": "date32"}, "times": "ms",
    }  # fmt: skip
    (here / "like.jsonl").write_text('{"id": 1, "name": "x"}\n')
    assert done("create", "lines", "--like", "like.jsonl", "--key", "id")["schema"]["value"] == {"name": "string"}


@pytest.mark.parametrize("text", [
    "bool", "int8", "uint64", "float32", "string", "binary", "date32", "time64[us]", "timestamp[us]", "timestamp[ns]",
    "timestamp[us, UTC]", "timestamp[us, +02:00]", "duration[ms]", "decimal128(18, 2)", "fixed_size_binary[16]",
])  # fmt: skip
def test_every_type_that_the_help_lists_is_taken_with_null_and_without(text: str) -> None:
    [plain], [asked], [without] = (parse_columns([f"a:{text}{end}"]) for end in ("", "?", " not null"))
    assert plain == asked == persist.Schema(key={"a": text}).key[0]
    assert (plain.nullable, without.nullable, without.type) == (True, False, plain.type)
    assert eval(python_of(persist.Schema(key=(without,))), {"persist": persist}).key == (without,)


def test_a_clock_and_constraints_are_declared_and_said(here: Path) -> None:
    words = (
        "create",
        "c",
        "--key",
        "id:int64",
        "--value",
        "name:string",
        "--times",
        "ms",
        "--unique",
        "--non-negative",
    )
    answer = done(*words)
    assert answer["schema"] == {
        "key": {"id": "int64"}, "value": {"name": "string"}, "times": "ms", "unique": True, "non_negative": True,
    }  # fmt: skip
    assert done(*words)["created"] is False
    schema = persist.Schema({"id": "int64"}, {"name": "string"}, times="ms", unique=True, non_negative=True)
    assert eval(python_of(schema), {"persist": persist}) == schema
    with persist.open(f"file:{here}/data") as client:
        assert client.inspect("c").state.schemas[-1] == schema
    refused = invoke(*words[:6])
    assert refused.exit_code == 2
    assert "times=ms, unique, non_negative" in refused.output.replace("\n", " ")


@pytest.mark.parametrize("kind", ["shard", "collection", "wal"])
def test_a_dry_run_says_what_is_published_of_whatever_carries_the_table(here: Path, kind: str) -> None:
    with persist.open("file:./data") as client:
        if kind == "collection":
            client.controller().create("items", SCHEMA, shards=2, mode="compare_and_append")
        elif kind == "wal":
            client.controller().tables().create("items", SCHEMA, mode="wal", shards=2)
        else:
            client.open_writer("items", SCHEMA).close()
        with client.table("items") as table:
            table.append([{"id": 1, "name": "a", "price": None}])
            table.publish("iceberg")
    found = done("evolve", "items", "--rename", "name=title", "--dry-run")
    assert found["published"] == ["iceberg"]
