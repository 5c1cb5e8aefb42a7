"""JSON documents are values of their own at every door, and their one canonical text below them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

import persist_lib as persist
from persist_lib.convert.json_columns import Text, canonical_texts
from persist_lib.convert.updates import iter_updates
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import DOCUMENTS
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.ids import SeqNo
from persist_lib.maintain.publish.columns import columns_of
from persist_lib.schema.json_text import DEEPEST, canonical, parsed, text_of
from persist_lib.schema.types import is_json
from persist_lib.sources.decoding import Decoding, decode, decode_changes
from persist_lib.sources.postgres.tuples import typed
from persist_lib.testing import contents_of
from tests.unit.relation.carriers import Carrier, over_all
from tests.unit.sources.messages import messages
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"doc": "json", "word": "string"}, times="ms")
GOLDEN = Path(__file__).parents[2] / "golden" / "json_documents.jsonl"
FIELD = SCHEMA.data.field("doc")

WORDS = st.text(st.characters(exclude_categories=["Cs"]))
DOCUMENTS_OF = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(10**60), 10**60), WORDS,
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)  # fmt: skip


def alike(one: Any, other: Any) -> bool:
    """Equal, and of the same types at each level: 1 is not 1.0, and -0.0 is not 0.0."""
    return repr(one) == repr(other) if not isinstance(one, (dict, list)) else (
        type(one) is type(other) and len(one) == len(other) and (
            all(name in other and alike(value, other[name]) for name, value in one.items()) if isinstance(one, dict)
            else all(map(alike, one, other))
        )
    )  # fmt: skip


def shuffled(value: Any, draw: Any) -> str:
    """Another text of a document: names in any order, spaces, escapes, other forms of its numbers."""
    space = draw(st.sampled_from(["", " ", "\n\t", "  \r\n"]))
    if isinstance(value, dict):
        names = draw(st.permutations(list(value)))
        pieces = [f"{space}{shuffled(name, draw)}{space}:{shuffled(value[name], draw)}" for name in names]
        return f"{space}{{{','.join(pieces)}{space}}}{space}"
    if isinstance(value, list):
        return f"{space}[{','.join(shuffled(one, draw) for one in value)}{space}]{space}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=draw(st.booleans())).replace("/", draw(st.sampled_from(["/", "\\/"])))
    if isinstance(value, float):
        return draw(
            st.sampled_from([repr(value), f"{value!r}".upper(), f"{value:.40e}" if exact(value) else repr(value)])
        )
    return f"{space}{json.dumps(value)}{space}"


def exact(value: float) -> bool:
    """Whether 41 digits are the number that its shortest text is."""
    return float(f"{value:.40e}") == value and canonical(f"{value:.40e}") == repr(value)


@given(st.data(), DOCUMENTS_OF)
@example(None, {"b": [1, 1.0, -0.0, 10**30], "a": {"é": None, "\U0001f600": "\0", "\uffff": "\x7f"}})
def test_each_text_of_a_document_is_one_value_and_reads_back_as_json_does(data: Any, value: Any) -> None:
    text = json.dumps(value) if data is None else shuffled(value, data.draw)
    made = canonical(text)
    assert canonical(made) == made == text_of(value)
    assert alike(json.loads(made), json.loads(text))
    assert alike(parsed(text), json.loads(text))
    forms: list[Any] = [
        [{"id": 1, "doc": value}],
        pa.table({"id": [1], "doc": pa.array([text], pa.string_view())}),
        pa.table({"id": [1], "doc": pa.array([text], pa.json_(pa.large_string()))}),
        pd.DataFrame({"id": [1], "doc": [text]}), pl.DataFrame({"id": [1], "doc": [text]}),
    ]  # fmt: skip
    tables = [next(iter_updates(SCHEMA, form, time=0, whole=False)) for form in forms]
    assert all(table.equals(tables[0]) for table in tables)
    assert alike(persist.decode_rows(SCHEMA, tables[0])[0]["doc"], json.loads(text))


@given(st.one_of(st.lists(st.integers(0, 40), max_size=5), st.lists(st.integers(0, 40), min_size=40, max_size=60)))
def test_texts_are_made_canonical_once_each_and_stay_at_their_rows(numbers: list[int]) -> None:
    texts = [None if n % 7 == 0 else "null" if n % 5 == 0 else f'{{"b":{n}, "a":1e{n % 3}}}' for n in numbers]
    wanted = [None if n % 7 == 0 or n % 5 == 0 else f'{{"a":{10.0 ** (n % 3)},"b":{n}}}' for n in numbers]
    half = len(texts) // 2
    given_ = pa.chunked_array([pa.array(["5", *texts[:half]], pa.string()).slice(1), texts[half:]], pa.string())
    made = canonical_texts(given_)
    assert made.to_pylist() == wanted
    assert canonical_texts(made).equals(made)


@pytest.mark.parametrize("form", ["1e0", "1.00", "10e-1", "0.1E+1", "1.0000000000000000000000000000000"])
def test_forms_of_a_number_are_one_and_integers_are_others(form: str) -> None:
    assert canonical(form) == "1.0"
    assert canonical("1") == "1"


@pytest.mark.parametrize(
    "wrong",
    [
        "", " ", "x", "'a'", "NaN", "Infinity", "01", "1.", "+1", "[1,]", "{a:1}", '{"a":1,"a":1}',
        '{"a":1,"\\u0061":2}',
        '{"x:":1,"a":{"b":1,"b":2}}', '{"\\u003a":1,"a":1,"a":2}', '"\\ud800"', '"\t"', "1 2", "1e400", "-1e-400",
        "1" * 5000, "1e" + "9" * 5000, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "\ufeff1", "[" * 600,
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_and_named(wrong: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        canonical(wrong)
    with persist.open("memory:") as client, client.table("t", SCHEMA) as table:
        for given_ in (["1", wrong], ["1"] * 40 + [wrong]):
            with pytest.raises(
                persist.InvalidUsage, match=f"'doc' holds JSON, and .* of row {len(given_) - 1} "
            ) as refused:
                table.append(pa.table({"id": range(len(given_)), "doc": given_}))
            assert refused.value.fields["row"] == len(given_) - 1
        assert table.read().count() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        b"x",
        math.nan,
        {"a": math.inf},
        {1: 2},
        {"a": {None: 1}},
        "\ud800",
        {"a": b""},
        {1, 2},
        [10**5000],
        [-(10**4299)],
    ],
)
def test_python_values_that_json_lacks_are_refused(wrong: object) -> None:
    with persist.open("memory:") as client, client.table("t", SCHEMA) as table:
        with pytest.raises(persist.InvalidUsage, match="doc"):
            table.append([{"id": 1, "doc": "fine"}, {"id": 2, "doc": wrong}])
        with pytest.raises(persist.InvalidUsage, match="doc"):
            table.append(pa.table({"id": [1], "doc": [5]}))
        assert table.read().count() == 0


def test_the_canonical_texts_are_for_ever() -> None:
    """What was stored is compared with what comes, by any later release of what encodes it here."""
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        given_, made = json.loads(line)
        assert canonical(given_) == made
        assert canonical(made) == made


def test_a_name_that_is_there_twice_is_found_beside_an_escaped_colon() -> None:
    for text in ('{"\\u003a":1,"a":1,"a":2}', '{"a":"\\u003A","a":2}', '[":", {"a":{}, "b":{"c":1, "c":1}}]'):
        with pytest.raises(ValueError, match="a name occurs twice"):
            canonical(text)
    assert canonical('{"\\u003a" : "\\\\u003a"}') == '{":":"\\\\u003a"}'


def test_depth_counts_brackets_and_not_texts() -> None:
    deep = "[" * DEEPEST + '"' + "[" * 2000 + '\\"{"' + "]" * DEEPEST
    assert canonical(deep) == deep
    assert text_of(parsed(deep)) == deep
    with pytest.raises(ValueError, match="nested more than"):
        text_of([parsed(deep)])


@over_all
def test_documents_are_values_of_every_carrier(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), SCHEMA)
    with world.client().table("c") as table:
        table.append([{"id": 1, "doc": {"b": 1, "a": [1.5]}}, {"id": 2, "doc": "text"}, {"id": 3, "doc": None}])
        assert table.upsert(pa.table({"id": [1], "doc": ['{"a": [1.50], "b": 1}']})).unchanged == 1
        table.update({"doc": {"is": ["new"]}}, keys=[2])
        table.apply(upserts=[{"id": 4, "doc": [1, {"x": None}]}])
        rows = sorted(table.read().to_pylist(), key=lambda row: row["id"])
        assert [row["doc"] for row in rows] == [{"a": [1.5], "b": 1}, {"is": ["new"]}, None, [1, {"x": None}]]
        texts = table.read().to_arrow().sort_by("id").column("doc").to_pylist()
        assert texts == ['{"a":[1.5],"b":1}', '{"is":["new"]}', None, '[1,{"x":null}]']
        assert table.read(filter=pa.compute.field("doc") == '{"is":["new"]}').count() == 1
        assert str(table.describe().schema.value[0]) == "doc: json"


def test_equal_documents_are_one_row_and_one_fingerprint() -> None:
    ways: list[Callable[[Any], None]] = [
        lambda table: table.append([{"id": 1, "doc": {"a": 1.0, "b": 2}}]),
        lambda table: table.append(pa.table({"id": [1], "doc": ['{"b":2, "a":1e0}']})),
    ]
    prints, schema = set(), persist.Schema({"id": "int64"}, {"doc": "json"})
    for way in ways:
        with persist.open("memory:") as client, client.table("t", schema) as table:
            way(table)
            [batch] = client.inspect("t").state.trace
            prints.add(batch.fingerprint)
            table.append(pa.table({"id": [1], "doc": ['{ "a" : 1.0, "b" : 2}'], "_diff": [-1]}))
            assert contents_of(table.read(diff=True).to_arrow()) == {}
    assert len(prints) == 1


def test_models_defaults_and_engines_have_them() -> None:
    class Inner(BaseModel):
        x: int

    class Row(BaseModel):
        id: int
        doc: JsonValue
        more: dict[str, JsonValue] | None = None

    schema = persist.Schema({"id": "int64"}, {"doc": "json", "more": """json default '{"z": 1, "b": 2}'"""}, times="ms")
    assert str(schema.value[1]) == """more: json default '{"b":2,"z":1}'"""
    assert [one.type for one in persist.Schema(Row, {}).key] == ["int64", "json", "json"]
    with persist.open("memory:") as client, client.table("t", schema) as table:
        table.append([Row(id=1, doc=[1, "a"]), Row(id=2, doc={"k": None}, more={"q": [Inner(x=1).x]})])
        table.append([{"id": 3, "doc": Inner(x=5)}])
        made: Any = duckdb.sql("""select 4::bigint as id, '{"z": 1, "y": 2}'::json as doc""")
        table.append(made.to_arrow_table())
        table.append(pd.DataFrame({"id": [5], "doc": [{"in": [1]}], "more": ['"x"']}))
        found = {row["id"]: (row["doc"], row["more"]) for row in table.read().to_pylist()}
        filled = {"b": 2, "z": 1}
        assert found == {
            1: ([1, "a"], None), 2: ({"k": None}, {"q": [1]}), 3: ({"x": 5}, filled), 4: ({"y": 2, "z": 1}, filled),
            5: ({"in": [1]}, "x"),
        }  # fmt: skip
        assert table.read(keys=[2]).to_models(Row) == [Row(id=2, doc={"k": None}, more={"q": [1]})]
        again = table.read().to_pylist()
        assert table.upsert(again).unchanged == len(again)
        assert table.upsert(table.read().to_pandas()).unchanged == len(again)
        table.evolve(table.describe().schema.add({"later": "json"}, {"later": {"v": 1.0}}))
        assert table.read(keys=[1]).to_pylist()[0]["later"] == {"v": 1.0}
        with pytest.raises(persist.InvalidUsage, match="not every json"):
            table.describe().schema.widen({"doc": "string"})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: persist.open("memory:").table("t", persist.Schema({"id": "json"})), "documents .* have none"),
        (lambda: persist.Schema({"id": "int64"}, {"d": "list<json>"}), "json is the type of a column"),
        (lambda: persist.Schema({"id": "int64"}, {"d": "struct<a: json>"}), "json is the type of a column"),
        (lambda: persist.Schema({"id": "int64"}, {"d": "json default uuid()"}), "cannot have the default"),
        (lambda: persist.Schema({"id": "int64"}, {"d": "json default '{'"}), "cannot be the default"),
        (lambda: persist.Schema({"id": "int64"}, {"d": "json default 'null'"}), "it is null"),
    ],
)
def test_where_documents_cannot_be_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(persist.InvalidUsage, match=why):
        make()


def test_a_document_that_is_null_alone_is_null() -> None:
    strict = persist.Schema({"id": "int64"}, {"doc": "json not null"})
    with persist.open("memory:") as client, client.table("t", strict) as table:
        with pytest.raises(persist.InvalidUsage, match="not null"):
            table.append(pa.table({"id": [1], "doc": ["null"]}))
        table.append(pa.table({"id": [1], "doc": ["[null]"]}))


def test_older_programs_refuse_them_by_the_format() -> None:
    plain = persist.Schema({"id": "int64"}, {"n": "int64"})
    older = apply(State(), SeqNo(1), c.Create(plain, DOCUMENTS - 1))
    assert isinstance(older, State)
    assert isinstance(apply(older, SeqNo(2), c.EvolveSchema(0, plain.add({"d": "json"}))), r.Malformed)
    assert isinstance(apply(State(), SeqNo(1), c.Create(SCHEMA, DOCUMENTS - 1)), r.Malformed)


@pytest.mark.parametrize("as_", ["delta", "iceberg"])
def test_other_engines_have_the_text(as_: str) -> None:
    assert columns_of("t", [SCHEMA], as_, {}).shown.field("doc").type == pa.string()


def test_messages_have_documents_as_values_or_as_text() -> None:
    schema = persist.Schema({"id": "int64"}, {"doc": "json"}, times="ms")
    lines = [
        b'{"id":1,"doc":{"b":1,"a":[2]}}',
        b'{"id":2,"doc":"{\\"b\\": 1}"}',
        b'{"id":3}',
        b'{"id":4,"doc":{"a":1,"a":2}}',
    ]
    table = messages([1] * len(lines), lines)
    found = decode(Decoding(), schema, table)
    assert found.table.column("doc").to_pylist() == ['{"a":[2],"b":1}', r'"{\"b\": 1}"', None]
    assert list(found.bad) == [3]
    assert "a name occurs twice" in found.bad[3]
    found = decode(Decoding(json_text=True), schema, table)
    assert found.table.column("doc").to_pylist() == ['{"a":[2],"b":1}', '{"b":1}', None]
    changes = [json.dumps({"op": "c", "after": json.loads(line)}).encode() for line in lines[:2]]
    found = decode_changes(Decoding(), schema, messages([1] * 2, changes))
    assert found.table.column("doc").to_pylist() == ['{"a":[2],"b":1}', '{"b":1}'], "Debezium has their text"
    cells = [b'1,"{""b"": 1, ""a"": 2}"', b"2,oops", b"3,"]
    found = decode(Decoding(decoder="csv", names=("id", "doc")), schema, messages([1] * 3, cells))
    assert found.table.column("doc").to_pylist() == ['{"a":2,"b":1}', None]
    assert list(found.bad) == [1]


def test_a_column_of_postgresql_that_is_declared_so_is_one() -> None:
    texts = pa.array([b'{"b": 1, "a": 1.10}', None, b"nope", b"null"], pa.large_binary())
    found, bad = typed(FIELD, texts)
    assert found.to_pylist() == ['{"a":1.1,"b":1}', None, None, None]
    assert bad == {2: "column doc: 'nope' is no json; a column declared as string would hold it"}


def test_what_was_read_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with persist.open("memory:") as client, client.table("t", SCHEMA) as table:
        for n in range(20):
            table.append([{"id": m, "doc": {"n": [n, m]}} for m in range(100)])
        monkeypatch.setattr("persist_lib.convert.json_columns.canonical", None)
        monkeypatch.setattr("persist_lib.schema.json_text._exact", None)
        assert client.compact("t").batches_after == 1
        assert table.read().count() == 2000
        assert table.read().to_arrow().schema.equals(SCHEMA.data)


def test_the_field_says_it_and_the_type_is_text() -> None:
    assert is_json(FIELD)
    assert FIELD.type == pa.string()
    assert not is_json(SCHEMA.data.field("word"))
    assert type(Text("1")) is Text
