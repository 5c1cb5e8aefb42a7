"""`persist source` and `persist ingest`: a life of a source at a shell, and real processes that are killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fastavro
import psycopg
import pytest

from tests import servers
from tests.integration.test_cli import Shell
from tests.kafka import Topic

COLUMNS = ("--key", "id:int64 not null", "--value", "word:string")


class Fed(Shell):
    """A shell with a folder of files."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path / "data")
        self.folder = tmp_path / "in"
        self.folder.mkdir()

    def write(self, name: str, *rows: object) -> None:
        with (self.folder / name).open("a") as file:
            for row in rows:
                file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")

    def create(self, *words: object) -> str:
        return self("source", "create", "orders", "--from", self.folder, "--format", "jsonl", *COLUMNS, *words)

    def declare(self, more: str) -> Path:
        """A file that declares a source of the folder."""
        file = self.folder.parent / "orders.toml"
        top, _, rest = more.partition("[")
        schema = '[schema.key]\nid = "int64 not null"\n[schema.value]\nword = "string"\n'
        reader = f'[reader]\ntype = "files"\nplace = "{self.folder}"\nformat = "jsonl"\n'
        file.write_text(f"{top}{reader}{schema}{f'[{rest}' if rest else ''}")
        return file

    def check_same(self, name: str) -> None:
        """What `show` prints as a file declares the same source."""
        file = self.folder.parent / f"{name}-again.toml"
        file.write_text(self("source", "show", name, "--toml"))
        shown, again = self.json("source", "show", name), self.json("source", "create", "x", "-f", file, "--dry-run")
        shown["decoding"].pop("added", None)  # which the source notes itself
        parts = ("reader", "decoding", "meaning", "schema", "tables")
        assert [shown.get(what) for what in parts] == [again.get(what) for what in parts]

    def contents(self, name: str = "orders") -> list[dict[str, object]]:
        found: list[dict[str, object]] = self.json("read", name)["rows"]
        return found


@pytest.fixture
def sh(tmp_path: Path) -> Fed:
    return Fed(tmp_path)


def row(id_: int, word: str) -> dict[str, object]:
    return {"id": id_, "word": word}


def test_a_life_of_a_source(sh: Fed):
    sh.write("a.jsonl", row(1, "a"), row(1, "b"), "bad")
    said = sh.create("--envelope", "upsert", "--keep-raw", "--command", "c1")
    assert said.startswith("created orders from ")
    assert sh.create("--envelope", "upsert", "--keep-raw", "--command", "c1") == said
    assert "already" in sh.fails(1, "source", "create", "orders", "--from", sh.folder, "--format", "csv", *COLUMNS)
    done = sh.json("ingest", "orders", "--once")
    assert (done["messages"], done["errors"]) == (3, 1)
    assert [(one["id"], one["word"]) for one in sh.contents()] == [(1, "b")]
    assert len(sh.contents("orders/errors")) == 1
    found = sh.json("source", "show", "orders")
    assert found["durable"] == found["bound"] == {"a.jsonl": (sh.folder / "a.jsonl").stat().st_size}
    assert found["state"] == "running"
    assert [one["state"] for one in found["instances"]] == ["stopped"]
    assert "a.jsonl" in sh("source", "show", "orders")
    assert "1 source" in sh("source", "show")
    sh("source", "pause", "orders", "--why", "a rest")
    sh.write("a.jsonl", row(2, "c"))
    assert "paused" in sh("ingest", "orders", "--once")
    assert len(sh.contents()) == 1
    sh("source", "pause", "orders", "--resume")
    sh("ingest", "orders", "--once")
    assert len(sh.contents()) == 2
    (sh.folder / "a.jsonl").write_text("")
    assert "Diverged" in sh.fails(4, "ingest", "orders", "--once")
    sh.write("b.jsonl", row(9, "z"))
    sh("source", "reset", "orders", "--yes")
    sh("ingest", "orders", "--once")
    assert [one["id"] for one in sh.contents()] == [9]
    sh("source", "drop", "orders", "--yes")
    assert sh.json("source", "show")["sources"] == []
    assert "no source 'orders'" in sh.fails(1, "source", "show", "orders")


def test_what_is_declared_wrong_by_options_is_refused(sh: Fed):
    for words, said in {("--include", "address"): "--include takes", ("--include", "id=offset"): "include"}.items():
        assert said in sh.fails(2, "source", "create", "o", "--from", sh.folder, "--format", "jsonl", *COLUMNS, *words)
    assert "-f FILE, or --from PLACE" in sh.fails(2, "source", "create", "o", *COLUMNS)
    file = sh.declare("")
    assert "no other options with -f" in sh.fails(2, "source", "create", "o", "-f", file, "--keep-raw")


def test_a_file_declares_a_source_and_show_prints_one_that_makes_it_again(sh: Fed):
    file = sh.declare('[decoding.columns]\nword = "wrd"\n[meaning]\nkeep_raw = true\nmost_errors = 3')
    said = sh("source", "create", "orders", "-f", file, "--dry-run")
    assert said.startswith(f"would create orders from {file} in file:")
    assert not sh.root.exists()
    assert sh("source", "create", "orders", "-f", file).startswith("created orders from ")
    assert "already" in sh.fails(1, "source", "create", "orders", "-f", file, "--dry-run")
    assert sh.json("source", "create", "more", "-f", file, "--dry-run")["dry_run"]
    assert sh.json("source", "show")["sources"][0]["source"] == "orders", "a dry run makes nothing"
    sh.check_same("orders")


def test_a_mistake_in_a_file_names_the_file_and_the_key(sh: Fed):
    file = sh.declare("[meaning]\nmost_errors = 'many'")
    for more in ((), ("--dry-run",)):
        text = " ".join(sh.fails(2, "source", "create", "o", "-f", file, *more).split())
        assert f"{file.name}: meaning.most_errors is 'many', and has to be an integer" in text
    sh.declare('[meaning.include]\nwhere = "address"')
    text = " ".join(sh.fails(2, "source", "create", "o", "-f", file).split())
    assert f"{file.name}: include: the output has no column 'where'" in text
    text = " ".join(sh.fails(2, "source", "create", "a//b", "-f", file).split())
    assert file.name not in text, "the name is not said by the file"


def test_how_to_decode_again_can_be_said_in_the_file(sh: Fed):
    raw = "[meaning]\nkeep_raw = true\nenvelope = 'upsert'\n[decoding]\nextra = 'ignore'\n"
    file = sh.declare(f"{raw}[decoding.columns]\nword = 'wrd'")
    sh("source", "create", "orders", "-f", file)
    sh.write("a.jsonl", row(1, "a"))
    sh("ingest", "orders", "--once")
    assert "no other options with -f" in sh.fails(2, "source", "mend", "orders", "-f", file, "--extra", "ignore")
    assert "decoded so already" in sh.fails(2, "source", "mend", "orders", "-f", file)
    file = sh.declare(f"shards = 2\n{raw}")
    assert "have to be those of 'orders'" in " ".join(sh.fails(2, "source", "mend", "orders", "-f", file).split())
    assert "1 row" in sh("source", "mend", "orders", "-f", sh.declare(raw))
    sh("source", "mend", "orders", "--hand-over")
    assert [(one["id"], one["word"]) for one in sh.contents()] == [(1, "a")]


def test_a_table_of_postgresql_at_a_shell(sh: Fed):
    url = servers.logical_server().url
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE shell (id int PRIMARY KEY, word text)")
        sql.execute("INSERT INTO shell VALUES (1, 'a')")
        said = sh("source", "create", "orders", "--from", url, "--table", "public.shell", "--add-columns")
        assert said.startswith("created orders from public.shell: (id: int32 not null) -> (word: string)")
        sh.check_same("orders")
        assert sh.json("ingest", "orders", "--once")["messages"] == 1
        sql.execute("UPDATE shell SET word = 'b'")
        assert sh.json("ingest", "orders", "--once")["messages"] == 1
        assert [(one["id"], one["word"]) for one in sh.contents()] == [(1, "b")]
        sql.execute("ALTER TABLE shell ADD n int DEFAULT 7")
        sh("ingest", "orders", "--once")
        assert [(one["word"], one["n"]) for one in sh.contents()] == [("b", 7)]
        sh.check_same("orders")
        assert "held back" in sh("source", "show", "orders")
        assert sh.json("source", "show", "orders")["instances"][0]["held_back_bytes"] >= 0
        assert sh.json("source", "drop", "orders", "--yes")["left"] == []
        sql.execute("CREATE TABLE more (id int)")
        sql.execute("ALTER TABLE more REPLICA IDENTITY FULL")
        said = sh("source", "create", "both", "--from", url, "--table", "public.shell", "--table", "public.more")
        assert said.startswith("created both from public.shell, public.more: public.more (id: int32) -> ()")
        sh.check_same("both")
        sh("ingest", "both", "--once")
        shown = sh("source", "show", "both")
        assert "both/public.more, both/public.shell" in shown.replace("\n", " ")
        assert list(sh.json("source", "show", "both")["tables"]) == ["public.more", "public.shell"]
        sql.execute("CREATE TABLE later (id int PRIMARY KEY, n int)")
        sql.execute("INSERT INTO later VALUES (1, 1)")
        sh("ingest", "both", "--once")  # it has used its first snapshot then
        said = sh("source", "add-table", "both", "public.later")
        assert said.startswith("both takes public.later: (id: int32 not null) -> (n: int32), times=ms")
        sh("ingest", "both", "--once")
        assert sh.json("source", "show", "both")["bound"]["public.later"] > 0
        assert [(row["id"], row["n"]) for row in sh.contents("both/public.later")] == [(1, 1)]
        sh("source", "drop", "both", "--yes")
        assert sql.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
        sql.execute("DROP TABLE shell, more, later")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "postgresql://h/db"), "--table"),
        (("--from", "postgresql://h/db", "--table", "t", "--format", "csv"), "--format is for files"),
        (("--from", "postgresql://u:secret@h/db", "--table", "t"), "url has a password"),
        (("--from", "postgresql://h/db", "--table", "a.t", "--table", "a.t"), "named twice"),
        (
            ("--from", "postgresql://h/db", "--table", "a.t", "--table", "a.u", "--key", "id:int64"),
            "--key and --value are for one table",
        ),
        (("--from", "in", "--table", "t"), "--format"),
        (
            ("--from", "in", "--format", "csv", "--key", "id:int64", "--add-columns"),
            "tables of PostgreSQL and for Avro",
        ),
        (
            ("--from", "postgresql://h/db", "--table", "t", "--add-columns", "--ignore-extra"),
            "leaves out what --add-columns takes",
        ),
    ],
)
def test_what_is_said_of_a_table_wrong_is_refused(sh: Fed, words: tuple[str, ...], said: str):
    text = sh.fails(2, "source", "create", "o", *words)
    assert said in text
    assert "secret" not in text


def start(sh: Fed, *more: str) -> subprocess.Popen[str]:
    words = ["--location", f"file:{sh.root}", "ingest", "orders", *more, "--every", "0.05"]
    program = [sys.executable, "-m", "persist_lib.cli", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(sh: Fed, process: subprocess.Popen[str], *names: str) -> tuple[str, str]:
    """Stop a process once these sources are durable. Answers what it said and noted."""
    for _ in range(600):
        if all(sh.json("source", "show", name)["durable"] for name in names):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, notes = process.communicate(timeout=60)
    assert process.returncode == 0, notes
    return out.replace("\n", " "), notes.replace("\n", " ")


def test_an_instance_ends_cleanly_when_it_is_told_to(sh: Fed):
    sh.create()
    sh.write("a.jsonl", row(1, "a"))
    out, notes = ended(sh, start(sh), "orders")
    assert "orders: 1 message, 0 errors, durable up to" in out
    assert re.search(r"orders: 1 message, 0 errors, [0-9,]+/s, [0-9.]+ s behind", notes)
    (instance,) = sh.json("source", "show", "orders")["instances"]
    assert instance["state"] == "stopped"


def test_a_wrong_column_is_mended(sh: Fed):
    raw = "[decoding]\nextra = 'ignore'\n[decoding.columns]\nword = 'wrd'\n"
    sh("source", "create", "orders", "-f", sh.declare(f"{raw}[meaning]\nkeep_raw = true\nenvelope = 'upsert'"))
    sh.write("a.jsonl", row(1, "a"), row(2, "b"), "bad")
    sh("ingest", "orders", "--once")
    assert "not being mended" in sh.fails(1, "source", "mend", "orders", "--hand-over")
    assert "2 rows" in sh("source", "mend", "orders", "--column", "word=word")
    assert sh.json("source", "mend", "orders")["output"]["columns"] == {"word": 2}
    assert "mended in another way" in sh.fails(2, "source", "mend", "orders", "--column", "word=id")
    assert "give no other options" in sh.fails(2, "source", "mend", "orders", "--hand-over", "--extra", "ignore")
    sh("source", "mend", "orders", "--give-up")
    sh("source", "mend", "orders", "--column", "word=word")
    assert sh.json("source", "mend", "orders", "--hand-over")["at"] > 0
    sh.write("a.jsonl", row(2, "c"))
    sh("ingest", "orders", "--once")
    assert {one["id"]: one["word"] for one in sh.contents()} == {1: "a", 2: "c"}
    assert len(sh.contents("orders/errors")) == 1


def test_a_collection_at_a_shell(sh: Fed):
    sh.create("--envelope", "upsert")
    sh.write("a.jsonl", row(1, "a"), row(2, "b"))
    sh("ingest", "orders", "--once")
    said = sh(
        "source", "create", "words", "--from", "collection:orders", "--key", "id:int64 not null", "--ignore-extra"
    )
    assert said.startswith("created words from collection:orders")
    sh.check_same("words")
    sh("ingest", "words", "--once")
    assert [one["id"] for one in sh.contents("words")] == [1, 2]
    assert "--format" in sh.fails(2, "source", "create", "x", "--from", "in", *COLUMNS)
    assert "no collection 'x'" in sh.fails(1, "source", "create", "y", "--from", "collection:x", *COLUMNS)
    words = ("--from", "collection:orders", "--format", "csv", *COLUMNS)
    assert "--format is for files" in sh.fails(2, "source", "create", "y", *words)


def test_what_is_wrong_with_sources_is_an_exit_code(sh: Fed):
    sh.create()
    sh.write("a.jsonl", row(1, "a"), "bad")
    sh("ingest", "orders", "--once")
    done = sh.run("health", "orders", "--errors", "0")
    assert (done.exit_code, "source orders: 1 messages were bad, and 0 are allowed" in done.stdout) == (1, True)
    found = sh.json("health", "orders", "--instances", "0", "--behind", "86400", "--errors-share", "0.6")
    assert (found["problems"], found["looked_at"]["sources"], found["sound"]) == ([], 1, True)
    shown = sh.json("source", "show", "orders")
    assert (shown["errors"], shown["left"], shown["why"]) == (1, {}, "")
    assert shown["behind_ms"] >= 0


def test_several_sources_in_one_process_end_by_themselves(sh: Fed):
    sh.create()
    other = sh.folder.parent / "more"
    other.mkdir()
    words = ("--from", other, "--format", "jsonl", *COLUMNS)
    sh("source", "create", "bills", *words)
    file = sh.declare("[meaning]\nmost_errors = 0")
    file.write_text(file.read_text().replace(str(sh.folder), str(other)))
    sh("source", "create", "strict", "-f", file)
    sh.write("a.jsonl", row(1, "a"))
    (other / "a.jsonl").write_text('{"id": 2, "word": "b"}\nbad\n')
    assert "each source once" in sh.fails(2, "ingest", "orders", "orders", "--once")
    assert "no source 'typo'" in sh.fails(1, "ingest", "orders", "typo", "--once")
    done = sh.json("ingest", "orders", "bills", "--once")
    assert [(one["source"], one["messages"], one["errors"]) for one in done["sources"]] == [
        ("orders", 1, 0), ("bills", 2, 1),
    ]  # fmt: skip
    sh.write("a.jsonl", row(2, "b"))
    assert "strict: Refused" in sh.fails(4, "ingest", "orders", "strict", "--once")
    assert len(sh.contents()) == 2, "the others continue"


def test_several_sources_end_at_one_signal(sh: Fed):
    sh.create()
    sh("source", "create", "bills", "--from", sh.folder, "--format", "jsonl", *COLUMNS)
    sh.write("a.jsonl", row(1, "a"))
    out, notes = ended(sh, start(sh, "bills"), "orders", "bills")
    assert "orders, bills: at work" in notes
    assert "bills: 1 message, 0 errors, durable up to" in out


@pytest.mark.torture
def test_a_source_is_mended_while_two_processes_ingest_it(sh: Fed):
    """Lines come all the time, one process is killed in between, and both continue by the new decoding."""
    raw = "[decoding]\nextra = 'ignore'\n[decoding.columns]\nword = 'wrd'\n"
    sh("source", "create", "orders", "-f", sh.declare(f"{raw}[meaning]\nkeep_raw = true\nenvelope = 'upsert'"))
    expected: dict[int, str] = {}
    ends = threading.Event()

    def feed() -> None:
        number = 0
        while not ends.is_set():
            expected[number % 50] = f"w{number}"
            sh.write("a.jsonl", row(number % 50, f"w{number}"))
            number += 1
            time.sleep(0.01)

    feeding = threading.Thread(target=feed)
    processes = [start(sh), start(sh)]
    try:
        feeding.start()
        time.sleep(3)
        sh("source", "mend", "orders", "--column", "word=word")
        processes[0].kill()
        processes[0].communicate()
        at = sh.json("source", "mend", "orders", "--hand-over", "--timeout", "120")["at"]
        processes[0] = start(sh)
        time.sleep(3)
        ends.set()
        feeding.join()
        for _ in range(200):
            if {one["id"]: one["word"] for one in sh.contents()} == expected:
                break
            time.sleep(0.2)
        assert {one["id"]: one["word"] for one in sh.contents()} == expected
        before = sh.json("read", "orders", "--as-of", at - 1)["rows"]
        assert {one["word"] for one in before} == {None}
        gone = [process for process in processes if process.poll() is not None]
        assert not gone, [process.communicate()[1] for process in gone]
    finally:
        ends.set()
        for process in processes:
            process.kill()
            process.communicate()


def test_a_topic_becomes_a_collection_at_a_shell(sh: Fed):
    topic = Topic(2)
    topic.write([b'{"word": "a"}', b"bad"], 0, [b"1", b"2"])
    topic.write([b'{"word": "b"}', None], 1, [b"3", b"3"])
    place = f"kafka://{topic.kafka.brokers}/{topic.name}?group=g&fetch.wait.max.ms=5"
    assert "there is no topic" in sh.fails(
        1, "source", "create", "o", "--from", place.replace(topic.name, "nope"), *COLUMNS
    )
    assert "env:NAME" in sh.fails(2, "source", "create", "o", "--from", f"{place}&sasl.password=hunter2", *COLUMNS)
    sh("source", "create", "whole", "--from", place, *COLUMNS)
    file = sh.folder.parent / "orders.toml"
    declared = sh("source", "show", "whole", "--toml")
    file.write_text(
        declared.replace("[schema.key]", '[decoding]\nkey = "json"\n[meaning]\nenvelope = "upsert"\n[schema.key]')
    )
    sh("source", "create", "orders", "-f", file)
    done = sh.json("ingest", "orders", "--once")
    assert (done["messages"], done["errors"]) == (4, 1)
    assert [(one["id"], one["word"]) for one in sh.contents()] == [(1, "a")]
    shown = sh.json("source", "show", "orders")
    assert shown["durable"] == {f"{topic.name}/0": 2, f"{topic.name}/1": 2}
    assert shown["reader"]["topics"] == [topic.name]


def test_topics_with_columns_of_their_own_have_an_output_each_at_a_shell(sh: Fed):
    """Two tables of a database, as Debezium writes them: a transaction is in both outputs or in none."""
    orders, people, marks = Topic(name="shop.orders"), Topic(name="shop.people"), Topic(name="shop.transaction")
    told = {"id": "7", "total_order": 1}
    order = {"op": "c", "after": {"id": 1, "cents": 5}, "transaction": told}
    person = {"op": "c", "after": {"name": "ann", "spent": 5}, "transaction": {**told, "total_order": 2}}
    orders.write([json.dumps(order).encode(), b"oh no"])
    file = sh.folder.parent / "shop.toml"
    file.write_text(f"""
[reader]
type = "kafka"
brokers = "{orders.kafka.brokers}"
topics = ["shop.orders", "shop.people", "shop.transaction"]
options = {{"fetch.wait.max.ms" = "5"}}
[meaning]
envelope = "debezium"
[meaning.transactions]
topic = "shop.transaction"
[tables."shop.orders"]
key = {{id = "int64 not null"}}
value = {{cents = "int64"}}
[tables."shop.people"]
key = {{name = "string not null"}}
value = {{spent = "int64"}}
""")
    assert "int64), times=ms; shop.people (name: string not null)" in sh("source", "create", "shop", "-f", file)
    assert sh.json("ingest", "shop", "--once")["messages"] == 2
    people.write([json.dumps(person).encode()])
    marks.write([json.dumps({"status": "END", "id": "7", "event_count": 2}).encode()])
    assert sh.contents("shop/shop.orders") == sh.contents("shop/shop.people") == []
    assert sh.json("ingest", "shop", "--once")["messages"] == 2
    assert [one["cents"] for one in sh.contents("shop/shop.orders")] == [5]
    assert [one["spent"] for one in sh.contents("shop/shop.people")] == [5]
    assert [one["partition"] for one in sh.contents("shop/errors")] == ["shop.orders/0"]
    collections = sh.json("source", "show", "shop")["collections"]
    assert {collections[name] for name in ("shop.orders", "shop.people")} == {"shop/shop.orders", "shop/shop.people"}
    sh.check_same("shop")
    assert "this one reads Kafka" in sh.fails(2, "source", "add-table", "shop", "shop.more")
    assert "did not keep its messages" in sh.fails(2, "source", "mend", "shop", "--column", "cents=amount")


def test_files_of_avro_become_a_collection_at_a_shell(sh: Fed):
    fields = [{"name": "id", "type": "int"}, {"name": "word", "type": "string"}]
    written = {"type": "record", "name": "R", "fields": fields}
    with (sh.folder / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(written), [row(1, "a"), row(2, "b")])
    sh("source", "create", "orders", "--from", sh.folder, "--format", "avro", *COLUMNS)
    assert sh.json("ingest", "orders", "--once")["messages"] == 2
    assert [(one["id"], one["word"]) for one in sh.contents()] == [(1, "a"), (2, "b")]
    toml = sh.declare('[decoding.registry]\nplace = "http://registry:8081"')
    assert "about Avro" in sh.fails(2, "source", "create", "other", "-f", toml)
