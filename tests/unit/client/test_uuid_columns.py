"""uuids are values of their own at every door, and 16 bytes below them."""

from __future__ import annotations

import json
import uuid
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import persist_lib as persist
from persist_lib.convert.filling import uuid_texts
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import FILLED, FIRST
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.ids import SeqNo
from persist_lib.maintain.publish.columns import columns_of
from persist_lib.sources.postgres.columns import fits
from persist_lib.sources.postgres.tuples import typed
from tests.unit.relation.carriers import Carrier, over_all
from tests.worlds import World

SCHEMA = persist.Schema({"id": "uuid not null"}, {"other": "uuid", "word": "string"}, times="ms")
A, B, C = (uuid.UUID(int=n << 64 | n) for n in (1, 2, 2**63))


@over_all
def test_uuids_are_keys_and_values_of_every_carrier(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), SCHEMA)
    with world.client().table("c") as table:
        table.append([{"id": A, "other": None}, {"id": str(B).upper(), "other": A.bytes}])
        table.upsert([{"id": C, "other": str(C)}])
        table.update({"word": "w"}, keys=[A])
        rows = sorted(table.read().to_pylist(), key=lambda row: row["id"])
        assert [(row["id"], row["other"], row["word"]) for row in rows] == [(A, None, "w"), (B, A, None), (C, C, None)]
        assert table.read(keys=[str(A), C]).count() == 2
        assert table.read(key=[B]).count() == 1
        assert table.delete([B]).deleted == 1
        assert str(table.describe().schema.key[0]) == "id: uuid not null"


@given(st.lists(st.one_of(st.none(), st.uuids()), max_size=20))
def test_each_form_of_a_uuid_is_the_same_value(values: list[uuid.UUID | None]) -> None:
    whole = [None if one is None else one.bytes for one in values]
    texts = [None if one is None else str(one) for one in values]
    forms: list[Any] = [
        values, whole, texts, [text and text.upper() for text in texts], pa.array(whole, pa.binary(16)),
        pa.array(whole, pa.uuid()), pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode(),
        pa.array(texts, pa.string_view()), pl.Series(texts, dtype=pl.String), pl.Series(texts, dtype=pl.Categorical),
        pd.Series(values, dtype=object), pd.Series(pd.Categorical(texts)),
    ]  # fmt: skip
    columns = persist.Schema({"n": "int64"}, {"v": "uuid"})
    for form in forms:
        given_: Any = form
        if isinstance(form, list):
            given_ = [{"n": n, "v": one} for n, one in enumerate(form)]
        elif isinstance(form, pl.Series):
            given_ = pl.DataFrame({"n": range(len(form)), "v": form})
        elif isinstance(form, pd.Series):
            given_ = pd.DataFrame({"n": range(len(form)), "v": form})
        else:
            given_ = pa.table({"n": pa.array(range(len(form)), pa.int64()), "v": form})
        from persist_lib.convert.updates import iter_updates  # noqa: PLC0415 - beside what it is a law of

        tables = list(iter_updates(columns, given_, time=0))
        assert [one for table in tables for one in table.column("v").to_pylist()] == whole
        decoded = [row["v"] for table in tables for row in persist.decode_rows(columns, table)]
        assert decoded == values
    ids = pa.array([None, *whole], pa.binary(16)).slice(1)
    assert uuid_texts(ids).to_pylist() == texts


@pytest.mark.parametrize("wrong", ["abc", A.hex, f"{{{A}}}", 5, 1.5, "\ud800" * 36, b"short", f"{A} "])
def test_what_is_no_uuid_is_refused(wrong: object) -> None:
    with persist.open("memory:") as client, client.table("t", SCHEMA) as table:
        with pytest.raises(persist.InvalidUsage, match="id"):
            table.append([{"id": wrong}])
        if isinstance(wrong, str) and wrong.isprintable():
            with pytest.raises(persist.InvalidUsage, match="id"):
                table.append(pa.table({"id": [wrong]}))
        assert table.read().count() == 0


def test_models_and_engines_have_them() -> None:
    class Row(BaseModel):
        id: uuid.UUID
        other: uuid.UUID | None

    with persist.open("memory:") as client, client.table("t", SCHEMA) as table:
        given_: Any = duckdb.sql(f"select '{A}'::uuid as id, '{{\"a\": 1}}'::json as word")
        table.append(given_.to_arrow_table())
        found = table.read()
        assert found.to_models(Row) == [Row(id=A, other=None)]
        assert found.to_arrow().schema.field("id").type == pa.binary(16)
        assert json.loads(found.to_pylist()[0]["word"]) == {"a": 1}
        table.append([Row(id=B, other=A)])
        assert table.read(keys=[B]).to_pylist()[0]["other"] == A


def test_arrow_says_uuid_and_json_and_text_stays_the_text_that_it_is() -> None:
    schema = persist.Schema(pa.schema([("id", pa.uuid())]), {"doc": "string"})
    assert persist.Schema(pa.schema([("id", pa.uuid())]), pa.schema([("doc", pa.json_())])).value[0].type == "json"
    texts = ['{"b": 1, "a": [1.0]}', None, "null", '"x"']
    with persist.open("memory:") as client, client.table("t", schema) as table:
        given_ = {"id": pa.array([bytes(15) + bytes([n]) for n in range(4)], pa.uuid())}
        table.append(pa.table({**given_, "doc": pa.array(texts, pa.json_(pa.large_string()))}))
        assert [row["doc"] for row in sorted(table.read().to_pylist(), key=lambda row: row["id"])] == texts


def test_older_programs_refuse_them_by_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist_lib.core.formats.CREATED", FIRST)
    plain = persist.Schema({"id": "int64"}, {"n": "int64"})
    older = apply(State(), SeqNo(1), c.Create(plain, FILLED - 1))
    assert isinstance(older, State)
    assert isinstance(apply(older, SeqNo(2), c.EvolveSchema(0, plain.add({"u": "uuid"}))), r.Malformed)
    assert isinstance(apply(State(), SeqNo(1), c.Create(SCHEMA, FILLED - 1)), r.Malformed)
    with persist.open("memory:") as client, client.table("t", plain) as table:
        table.append([{"id": 1, "n": 1}])
        table.evolve(table.describe().schema.add({"u": "uuid"}))
        table.append([{"id": 2, "n": 1, "u": A}])
        assert client.inspect("t").state.format == FILLED
        assert {row["id"]: row["u"] for row in client.table("t").read().to_pylist()} == {1: None, 2: A}


@pytest.mark.parametrize(("as_", "kind"), [("delta", pa.binary()), ("iceberg", pa.binary(16))])
def test_other_engines_have_the_bytes(as_: str, kind: pa.DataType) -> None:
    assert columns_of("t", [SCHEMA], as_, {}).shown.field("id").type == kind


def test_a_column_of_postgresql_that_is_declared_so_is_one() -> None:
    assert fits(2950, -1, pa.binary(16))
    assert fits(2950, -1, pa.string())
    assert not fits(25, -1, pa.binary(16))
    found, bad = typed(pa.field("u", pa.binary(16)), pa.array([str(A).encode(), None, b"nope"], pa.large_binary()))
    assert found.to_pylist() == [A.bytes, None, None]
    assert list(bad) == [2]
