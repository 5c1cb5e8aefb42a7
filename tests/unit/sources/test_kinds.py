"""Kinds of sources: each is a class and a line in a table, and nothing else has to know of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, InvalidUsage
from persist_lib.sources import Collection, Custom, Decoding, Files, Kafka, Mark, Meaning, Postgres
from persist_lib.sources.conformance import check_reader
from persist_lib.sources.kinds import KINDS, decode, encode, kind_of_place
from persist_lib.sources.protocol import ADDRESS, START, VALUE
from persist_lib.sources.records import Followed, Kind, Known, Recipe, SourceRecord
from tests.sourced import Sourced

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})


class Ticks(Kind, msgspec.Struct, frozen=True, tag="ticks"):
    """A sixth kind: what is in `said`, in one partition."""

    title = "ticks"
    schemes = ("ticks",)
    said: ClassVar[list[bytes]] = []
    removed: ClassVar[list[str]] = []
    name: str

    def open(self) -> TickReader:
        return TickReader(self)

    def remove(self, _client: object, record: SourceRecord) -> list[str]:
        self.removed.append(record.name)
        return ["the clock still ticks"]


class TickReader:
    def __init__(self, declared: Ticks) -> None:
        self._name, self._said = declared.name, declared.said

    def high_watermarks(self, bound: Mapping[str, Mark], _most_bytes: int) -> Mapping[str, Mark]:
        end = len(self._said)
        return {self._name: Mark(end)} if end > bound.get(self._name, START).address else {}

    def read(self, _partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        addresses = pa.array(range(start.address, end.address), pa.uint64())
        values = pa.array(self._said[start.address : end.address], pa.binary())
        if len(values):
            yield pa.table([addresses, values], schema=pa.schema([ADDRESS, VALUE]))

    def estimate(self, _partition: str, start: int, end: int) -> int:
        return end - start

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        left = len(self._said) - marks.get(self._name, START).address
        return {self._name: left} if left else {}

    def tell(self, marks: Mapping[str, Mark]) -> None: ...
    def close(self) -> None: ...


def test_a_sixth_kind_is_a_class_and_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticks, "said", [json.dumps({"id": n, "word": f"w{n}"}).encode() for n in range(3)])
    monkeypatch.setattr(Ticks, "removed", [])
    place = Sourced()
    sources = place.sources
    with pytest.raises(InvalidUsage, match=r"reader must be Files\(…\), .* or Custom\(…\)"):
        sources.create("s", Ticks("clock"), SCHEMA)
    monkeypatch.setitem(KINDS, "ticks", Ticks)
    sources.create("s", Ticks("clock"), SCHEMA, meaning=Meaning(envelope="upsert"))
    check_reader(Ticks("clock").open, {"clock": Ticks.said})
    assert place.catch_up() is not None
    shown = sources.show("s")
    assert (shown.reader, shown.durable, shown.errors) == (Ticks("clock"), {"clock": Mark(3)}, 0)
    assert place.words() == {0: "w0", 1: "w1", 2: "w2"}
    assert kind_of_place("ticks://clock") is Ticks
    assert [kind_of_place(one) for one in ("ticks", "kafka", "s3://b/p/")] == [Files] * 3, "folders of these names"
    assert sources.drop("s") == ["the clock still ticks"]
    assert (Ticks.removed, sources.list()) == (["s"], [])
    place.close()


STORED = [
    (
        Files(place="/in", format="csv", suffixes=(".tsv",), header=False),
        '{"format":"csv","header":false,"place":"/in","suffixes":[".tsv"],"type":"files"}',
    ),
    (
        Kafka(brokers="b:9092", topics=("t", "u"), group="g", options={"sasl.password": "env:P"}),
        '{"brokers":"b:9092","group":"g","options":{"sasl.password":"env:P"},"topics":["t","u"],"type":"kafka"}',
    ),
    (
        Postgres(url="postgresql://h/d", table="public.t", publication="p"),
        '{"publication":"p","table":"public.t","type":"postgres","url":"postgresql://h/d"}',
    ),
    (Collection("orders"), '{"name":"orders","type":"collection"}'),
    (Custom(factory="a.b:c", options={"n": 1}), '{"factory":"a.b:c","options":{"n":1},"type":"custom"}'),
]


@pytest.mark.parametrize(("kind", "stored"), STORED)
def test_what_earlier_releases_stored_is_read_and_is_what_is_stored(kind: Kind, stored: str) -> None:
    """The body is one that the code made which had a form of schemas beside them."""
    schema = msgspec.structs.replace(SCHEMA, times="ms")
    record = SourceRecord(
        id="s1", name="n", reader=kind, decoding=Decoding(columns={"id": "ID"}),
        meaning=Meaning(envelope="upsert", deletes="gone", include={"at": "address"}, most_errors=3),
        schema=schema, decoded=schema, shards=3, retention=5, command="c", state="running",
        collections={"output": "c1"}, health="c2", input=Followed("c9", {"g": 2}, 7), table=Known("1.2 3.4", {"id": 1}),
        mends=2, mended=1, mending=Recipe(number=2, decoding=Decoding(), meaning=Meaning(), schema=schema),
    )  # fmt: skip
    form = '[[["id","int64",false]],[["word","string",true]],"columns","ms"]'
    body = (
        f'{{"collections":{{"output":"c1"}},"command":"c","decoded":{form},"decoding":{{"columns":{{"id":"ID"}}}},'
        '"health":"c2","id":"s1","input":{"begins":7,"form":{"g":2},"id":"c9"},"meaning":{"deletes":"gone",'
        '"envelope":"upsert","include":{"at":"address"},"most_errors":3},"mended":1,'
        f'"mending":{{"decoding":{{}},"meaning":{{}},"number":2,"schema":{form}}},"mends":2,"name":"n",'
        f'"reader":{stored},"retention":5,"schema":{form},"shards":3,"state":"running",'
        '"table":{"columns":{"id":1},"published":"1.2 3.4"}}'
    )
    assert encode(record) == body
    assert decode("n", body) == record


def test_what_is_stored_of_several_tables_is_refused_by_earlier_releases_and_read_by_this_one() -> None:
    schema = msgspec.structs.replace(SCHEMA, times="ms")
    kind = Postgres(url="postgresql://h/d", tables=("a.t", "a.u"))
    record = SourceRecord(
        v=4, id="s1", name="n", reader=kind, decoding=Decoding(), meaning=Meaning(), schema=schema,
        tables={"a.t": schema, "a.u": schema}, known={"a.t": Known("1.2 3.4", {"id": 1}, 5, {"id": 9}, keyless=True)},
    )  # fmt: skip
    form = '[[["id","int64",false]],[["word","string",true]],"columns","ms"]'
    body = (
        '{"decoding":{},"id":"s1","known":{"a.t":{"added":{"id":9},"columns":{"id":1},"file":5,"keyless":true,'
        '"published":"1.2 3.4"}},"meaning":{},"name":"n","reader":{"tables":["a.t","a.u"],"type":"postgres",'
        f'"url":"postgresql://h/d"}},"schema":{form},"tables":{{"a.t":{form},"a.u":{form}}},"v":4}}'
    )
    assert encode(record) == body
    assert decode("n", body) == record
    for known, version in ((Known("", {}), 4), (Known("", {}, keyless=True), 4), (Known("", {}, by_index=True), 5)):
        assert record.with_known({"a.t": known, "a.u": Known("", {})}).v == version


@pytest.mark.parametrize(
    ("was", "is_", "says"),
    [('"type":"collection"', '"type":"tape"', "tape"), ('"upsert"', '"upset"', "envelope must be")],
)
def test_what_this_release_does_not_know_is_refused(was: str, is_: str, says: str) -> None:
    kind, meaning = Collection("c"), Meaning(envelope="upsert")
    record = SourceRecord(id="s1", name="n", reader=kind, decoding=Decoding(), meaning=meaning, schema=SCHEMA)
    with pytest.raises(Corrupt, match=says):
        decode("n", encode(record).replace(was, is_))


@pytest.mark.parametrize("kind", [Collection("in"), Files(place=".", format="jsonl")])
def test_how_to_decode_and_what_rows_mean_have_their_types(kind: Kind) -> None:
    place = Sourced()
    place.controller.create("in", SCHEMA)
    for wrong in ({"decoding": "json"}, {"meaning": "upsert"}):
        with pytest.raises(InvalidUsage, match=f"{next(iter(wrong))} must be"):
            place.sources.create("s", kind, SCHEMA, **wrong)  # type: ignore[arg-type]
    place.close()
