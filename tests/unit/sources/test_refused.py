"""What is declared wrong is refused where it is said, before anything is looked at or made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.sources import Custom, Decoding, Files, Kafka, Meaning, Postgres, Registry, Transactions
from persist_lib.sources.pipeline import Pipeline

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
TEXT = persist.Schema(key={"name": "string not null"}, value={"line": "string"}, times="ms")
WIDE = persist.Schema(key={"id": "int64"}, value={"a": "string", "b": "string"})
Fields = dict[str, Any]
FILES: list[Fields] = [{"place": ""}, {"format": "xml"}, {"identity": "inode"}, {"suffixes": "x"}, {"header": 1}]
KAFKA: list[Fields] = [
    {"brokers": ""}, {"brokers": "host"}, {"brokers": "host:x"}, {"brokers": "a:1,,b:2"}, {"brokers": "u:p@h:1"},
    {"brokers": 9092}, {"topic": None}, {"topic": "t", "topics": ("u",)}, {"topic": ""}, {"topic": "a/b"},
    {"topic": "."}, {"topic": None, "topics": ("a", "a")}, {"topic": None, "topics": ["a"]},
    {"topic": None, "topics": (1,)}, {"group": ""}, {"isolation": "serializable"}, {"options": ["a"]},
    {"options": {"a": 1}}, {"options": {"": "a"}}, {"options": {"group.id": "g"}}, {"options": {"error_cb": "x"}},
    {"options": {"auto.offset.reset": "latest"}}, {"options": {"a": "env:"}}, {"options": {"a": "env:a b"}},
]  # fmt: skip
REGISTRY: list[Fields] = [
    {"place": ""}, {"place": "http://u:p@host"}, {"place": "http://"}, {"user": "u"}, {"unknown": "skip"},
    {"user": "u", "password": "p"}, {"user": "u", "password": "env:"},
]  # fmt: skip
TRANSACTIONS: list[Fields] = [{"topic": ""}, {"collections": ["a"]}, {"in_order": 1}, {"remembered": -1}]
POSTGRES: list[Fields] = [
    {"url": "mysql://x"}, {"url": ""}, {"table": ""}, {"table": 7}, {"publication": ""}, {"most_retained": 0},
    {"table": None}, {"tables": ("a.u",)}, {"table": None, "tables": ["a.u"]}, {"table": None, "tables": (1,)},
    {"table": None, "tables": ("a.u", "a.u")}, {"table": None, "tables": ("a.u", 'a."u"')},
]  # fmt: skip
APART: list[tuple[Callable[[], object], str | None]] = [
    *((partial(Files, **{"place": ".", "format": "csv", **wrong}), None) for wrong in FILES),
    *((partial(Kafka, **{"brokers": "host:9092", "topic": "t", **wrong}), None) for wrong in KAFKA),
    *((partial(Postgres, **{"url": "postgresql://h/d", "table": "public.t", **wrong}), None) for wrong in POSTGRES),
    *((partial(Registry, **{"place": "r", **wrong}), None) for wrong in REGISTRY),
    *((partial(Transactions, **{"topic": "t", **wrong}), None) for wrong in TRANSACTIONS),
    (partial(Custom, factory="x"), "package.module:function"),
    (Custom(factory="no.such:thing").open, "no function"),
    (lambda: Meaning(envelope="avro"), "envelope"),
    (lambda: Meaning(envelope="upsert", transactions=Transactions(topic="t")), "debezium"),
    (lambda: Meaning(deletes="gone"), "deletes"),
    (lambda: Meaning(transform="nothing"), "package.module:function"),
    (lambda: Meaning(include={"id": "offset"}), "include"),  # type: ignore[dict-item]
    (lambda: Meaning(most_errors=-1), "most_errors"),
    (lambda: Decoding(decoder="xml"), "decoder"),  # type: ignore[arg-type]
    (lambda: Decoding(key="xml"), "key must be"),  # type: ignore[arg-type]
    (lambda: Decoding(delimiter=";;"), "delimiter"),
    (lambda: Decoding(avro="{}"), "about Avro"),
    (lambda: Decoding(registry=Registry(place="r")), "about Avro"),
    (lambda: Decoding(key="avro"), "needs a registry"),
]
TOGETHER: list[tuple[Fields, Fields, persist.Schema, str]] = [
    ({"decoder": "text"}, {}, SCHEMA, "fills one column"),
    ({"decoder": "csv"}, {"envelope": "debezium"}, SCHEMA, "Debezium"),
    ({}, {"include": {"word": "address"}}, SCHEMA, "must be uint64"),
    ({}, {"include": {"wrod": "address"}}, SCHEMA, "word"),
    ({"key": "text"}, {}, SCHEMA, "fills a column of type string"),
    ({"key": "json"}, {"envelope": "debezium"}, SCHEMA, "brings its key itself"),
    ({"key": "json"}, {"envelope": "upsert", "deletes": "gone"}, SCHEMA, "deletes"),
    ({"key": "json"}, {"include": {"name": "address"}}, TEXT, "include"),
    ({"key": "json", "decoder": "text"}, {}, WIDE, "fills one column"),
    ({"decoder": "avro", "avro": "nonsense"}, {}, SCHEMA, "avro"),
    ({"decoder": "avro", "avro": '{"type": "record"}'}, {}, SCHEMA, "avro"),
    ({"decoder": "pgoutput"}, {}, SCHEMA, "pgoutput"),
    ({}, {"envelope": "changes"}, SCHEMA, "pgoutput"),
]


@pytest.mark.parametrize(("what", "match"), APART)
def test_what_is_declared_wrong_is_refused(what: Callable[[], object], match: str | None) -> None:
    with pytest.raises(InvalidUsage, match=match):
        what()


@pytest.mark.parametrize(("decoding", "meaning", "schema", "match"), TOGETHER)
def test_what_does_not_fit_together_is_refused(
    decoding: Fields, meaning: Fields, schema: persist.Schema, match: str
) -> None:
    with pytest.raises(InvalidUsage, match=match):
        Pipeline(Decoding(**decoding), Meaning(**meaning), schema)


def test_without_a_transform_messages_have_the_columns_of_the_output() -> None:
    with pytest.raises(InvalidUsage, match="decoded"):
        Pipeline(Decoding(), Meaning(), SCHEMA, SCHEMA)
