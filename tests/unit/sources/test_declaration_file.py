"""A file that declares a source: it is what is declared, whatever the kind, and a mistake is named in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.arguments import within
from persist_lib.errors import InvalidUsage, NotAllowed, SchemaMismatch
from persist_lib.sources import Collection, Custom, Decoding, Files, Kafka, Meaning, Postgres, Registry, Transactions
from persist_lib.sources.declaration_file import parse, read, written
from persist_lib.sources.kinds import KINDS
from persist_lib.sources.records import Declaration, Kind

SCHEMA = persist.Schema(
    key={"id": "int64 not null"}, value={"a b": "decimal128(10, 2)", "d": "string not null default 'x'"}, unique=True
)
ALL: list[tuple[Kind, Decoding | None, Meaning | None]] = [
    (Files(place='/"in" \\ é', format="csv", suffixes=(".tsv",), header=False), None, None),
    (
        Files(place="in", format="jsonl"),
        Decoding(key="avro", avro="{}", registry=Registry(place="/r", unknown="error"), nulls=("", "-")),
        Meaning(
            envelope="debezium", most_errors=0, keep_raw=True,
            transactions=Transactions(topic="t", collections=("c",), in_order=True),
        ),
    ),
    (
        Kafka(brokers="b:9092", topics=("t", "u"), options={"sasl.password": "env:P"}),
        Decoding(decoder="csv", columns={"id": "ID"}, epochs={"id": "ms"}),
        Meaning(envelope="upsert", deletes="gone", include={"id": "address"}, transform="os.path:join"),
    ),
    (Postgres(url="postgresql://h/d", table="t", publication="p", most_retained=5), None, None),
    (Postgres(url="postgresql://h/d", table="t"), Decoding(decoder="pgoutput", extra="add"), None),
    (Collection("orders"), Decoding(decoder="rows", extra="ignore"), None),
    (Custom(factory="a.b:c", options={"n": "\x7f", "is": True, "deep": {"x.y": [{"z": 1.5}]}}), Decoding(), Meaning()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "decoding", "meaning"), ALL)
@pytest.mark.parametrize("more", [{}, {"decoded": SCHEMA, "shards": 3, "retention": 9}])
def test_what_is_written_declares_the_same(
    kind: Kind, decoding: Decoding | None, meaning: Meaning | None, more: dict[str, object]
) -> None:
    declared = Declaration(
        reader=kind, decoding=decoding or kind.default_decoding(), meaning=meaning or kind.default_meaning(),
        schema=SCHEMA, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    reader, schema, terms = parse(tomllib.loads(written(declared)))
    assert Declaration(reader=reader, schema=schema, **terms) == declared  # type: ignore[arg-type]


def test_the_columns_of_several_tables_are_written_instead_of_those_of_one() -> None:
    kind = Postgres(url="postgresql://h/d", tables=("a.t", 'a."U"'))
    tables = {"a.t": SCHEMA, 'a."U"': SCHEMA.add({"more": "string"})}
    declared = Declaration(
        reader=kind, decoding=kind.default_decoding(), meaning=kind.default_meaning(), schema=SCHEMA, tables=tables
    )
    reader, schema, terms = parse(tomllib.loads(written(declared)))
    assert (reader, schema, terms["tables"]) == (kind, None, tables)


def test_each_kind_is_written() -> None:
    assert {type(kind) for kind, _, _ in ALL} == set(KINDS.values())


def test_what_is_left_out_is_as_the_kind_has_it() -> None:
    given = parse({"reader": {"type": "postgres", "url": "postgresql://h/d", "table": "t"}, "meaning": {}})
    assert given.schema is None
    assert given.terms == {
        "decoding": Decoding(decoder="pgoutput", extra="ignore"), "meaning": Meaning(envelope="changes"),
        "decoded": None, "shards": 1,
    }  # fmt: skip


def test_what_toml_has_no_word_for_is_refused() -> None:
    declared = Declaration(
        reader=Custom(factory="a:b", options={"x": None}), decoding=Decoding(), meaning=Meaning(), schema=SCHEMA
    )
    with pytest.raises(InvalidUsage, match=r"reader\.options\.x is None.*in Python"):
        written(declared)


READER = '[reader]\ntype = "files"\nplace = "in"\nformat = "jsonl"\n'
WRONG = {
    "": "reader.type is missing. It is one of 'files', 'kafka'",
    "[reader": "is no TOML",
    "reader = 3": "reader is 3, and has to be a table",
    '[reader]\ntype = "fils"': "reader.type is 'fils'. Did you mean files? It is one of 'files',",
    '[reader]\ntype = "files"\nformat = "csv"': "reader.place is missing: it is a text",
    '[reader]\ntype = "files"\nplace = ""\nformat = "csv"': "reader.place is empty: it is a text",
    '[reader]\ntype = "files"\nplace = "x"\nformat = "xml"': "reader.format is 'xml', and has to be one of 'jsonl'",
    '[reader]\ntype = "kafka"\nbrokers = "b"\ntopic = "t"': "reader: brokers are given as",
    f"shards = true\n{READER}": "shards is True, and has to be an integer",
    f"shards = '2'\n{READER}": "shards is '2', and has to be an integer",
    f"v = 1\n{READER}": "there is no key v. There are decoded, decoding, meaning,",
    f"{READER}headr = true": "there is no key reader.headr. Did you mean header? There are format, header,",
    f"{READER}header = 1": "reader.header is 1, and has to be true or false",
    f"{READER}suffixes = [1]": "reader.suffixes is [1], and has to be a list, each a text",
    f"{READER}[meaning]\nenvelope = 'up'": "meaning: envelope must be one of ('none', 'upsert',",
    f"{READER}[meaning.include]\nid = 'line'": "and has to be a table, each one of 'partition', 'address',",
    f"{READER}[decoding]\nregistry = 'http://r'": "decoding.registry is 'http://r', and has to be a table",
    f"{READER}[decoding.registry]\nplac = 'x'": "there is no key decoding.registry.plac. Did you mean place?",
    f"{READER}[schema]\nvalue = {{a = 'int64'}}": "schema.key is missing: the columns that tell rows apart",
    f"{READER}[schema]\nkey = {{a = 1}}": "schema.key is {'a': 1}, and has to be a table, each a text",
    f"{READER}[schema]\nkey = {{a = 'int65'}}": "schema: ",
    f"{READER}[schema]\ntimes = 'ms'": "there is no key schema.times.",
    f"{READER}[tables]\n'a.t' = 3": 'tables."a.t" is 3, and has to be a table',
    f"{READER}[tables.'a.t'.value]\na = 'int64'": 'tables."a.t".key is missing',
}


@pytest.mark.parametrize(("text", "said"), WRONG.items())
def test_a_mistake_names_the_file_the_key_and_what_is_possible(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "source.toml"
    file.write_text(text)
    with pytest.raises(InvalidUsage) as raised:
        read(file)
    assert raised.value.message.startswith(str(file))
    assert said in raised.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"no\.toml cannot be read: No such file"):
        read(tmp_path / "no.toml")


def test_what_is_refused_because_of_a_file_keeps_its_kind_and_its_fields() -> None:
    with pytest.raises(SchemaMismatch) as told, within("a.toml", path="a.toml"):
        raise SchemaMismatch("other columns", shard="s")
    assert (told.value.message, told.value.fields) == ("a.toml: other columns", {"shard": "s", "path": "a.toml"})
    with pytest.raises(NotAllowed, match=r"^no right"), within("a.toml"):
        raise NotAllowed("no right")


def test_what_a_source_notes_itself_is_not_written() -> None:
    decoding = Decoding(decoder="pgoutput", extra="add", added={"d": 7})
    kind = Postgres(url="postgresql://h/d", table="t")
    declared = Declaration(reader=kind, decoding=decoding, meaning=kind.default_meaning(), schema=SCHEMA)
    _, _, terms = parse(tomllib.loads(written(declared)))
    assert terms["decoding"] == Decoding(decoder="pgoutput", extra="add")
