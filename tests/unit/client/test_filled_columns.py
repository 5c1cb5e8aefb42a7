"""What a writer fills in: the time of a call and ids of their own, once, wherever rows come from and go to."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.convert.filling import Filling
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import FILLED, FIRST
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.ids import SeqNo
from persist_lib.schema.evolution import place_of
from persist_lib.schema.schema import Column
from tests.unit.relation.carriers import Carrier, over_all
from tests.worlds import World

ID = "fixed_size_binary[16]"
SCHEMA = persist.Schema(
    {"id": f"{ID} not null default uuid()"},
    {"word": "string", "made": "timestamp[us, UTC] not null default now()", "tag": "string default uuid()"},
    unique=True, times="ms",
)  # fmt: skip
OLD = b"0" * 16


def by_word(table: Any) -> dict[str, dict[str, Any]]:
    return {row["word"]: row for row in table.read().to_pylist()}


@over_all
def test_rows_are_filled_once_by_every_verb_of_every_carrier(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), SCHEMA)
    with world.client().table("c") as table:
        table.append([{"word": "a"}, {"word": "b", "tag": None}, {"word": "c", "id": OLD, "tag": "own"}])
        first = by_word(table)
        assert len({row["id"] for row in first.values()}) == 3
        assert first["c"]["id"] == OLD
        assert (first["b"]["tag"], first["c"]["tag"]) == (None, "own"), "null is said, and so kept"
        assert len({row["made"] for row in first.values()}) == 1, "one call has one time"
        table.append(pa.table({"word": ["d", "e"]}))
        table.append(pl.DataFrame({"word": ["f"]}))
        table.append(pd.DataFrame({"word": ["g"]}))
        done = table.upsert([{"id": OLD, "word": "C"}, {"word": "h"}, {"id": b"1" * 16, "word": "i"}])
        assert (done.inserted, done.updated) == (2, 1)
        found = by_word(table)
        assert found["C"] == first["c"] | {"word": "C"}, "what is there stays"
        assert len({row["tag"] for row in found.values() if row["tag"]}) == 8
        assert all(row["made"] for row in found.values())
        same = table.apply([{"id": OLD, "word": "C"}, {"id": OLD, "word": "C"}], appends=[{"word": "j"}])
        assert (same.unchanged, same.inserted) == (1, 1), "equal rows are one, though each lacks the same"
        table.update({"word": "k"}, keys=[OLD])
        table.delete([OLD])
        assert set(by_word(table)) == set("abdefghij")
        with pytest.raises(persist.InvalidUsage, match="made"):
            table.append([{"word": "x", "made": None}])
        with pytest.raises(persist.InvalidUsage, match="id"):
            table.delete([{"word": "a"}])
        assert table.read().count() == 9, "nothing of that was written"


def test_a_call_that_is_repeated_with_its_token_is_one_append() -> None:
    with persist.open("memory:") as client:
        table = client.table("t", SCHEMA)
        done = table.append([{"word": "a"}])
        again = table.append([{"word": "a"}], token=done.token)
        assert again.time == done.time
        assert len(table.read().to_pylist()) == 1
        done = table.upsert([{"word": "b"}])
        table.upsert([{"word": "b"}], token=done.token)
        assert sorted(by_word(table)) == ["a", "b"]
        with client.open_writer("t", SCHEMA) as write:
            low = write.fetch_upper()
            assert low.time is not None
            sent = write.compare_and_append([{"word": "c"}], low, low.time + 1, token=b"one")
            assert write.compare_and_append([{"word": "c"}], low, low.time + 1, token=b"one").seqno == sent.seqno
        assert sorted(row["word"] for row in table.read().to_pylist()) == ["a", "b", "c"]


def test_what_takes_away_says_all_that_the_row_has() -> None:
    with persist.open("memory:") as client, client.open_writer("s", SCHEMA) as write:
        with pytest.raises(persist.InvalidUsage, match="taken away"):
            write.compare_and_append([{"word": "a", "_diff": -1}], 0, 1)
        whole = pa.table({"word": ["a"], "_diff": pa.array([-1], pa.int64())})
        with pytest.raises(persist.InvalidUsage, match="taken away"):
            write.compare_and_append(whole, 0, 1)
        assert write.fetch_upper() == persist.at(0)


def test_a_pending_area_fills_in_nothing_as_a_repeated_put_would_be_another_batch() -> None:
    with persist.open("memory:") as client:
        client.open_writer("plain", persist.Schema({"id": "int64"}, {"made": "timestamp default now()"})).close()
        schema = client.inspect("plain").state.schemas[0]
        from persist_lib.convert.updates import iter_updates  # noqa: PLC0415 - what is without a filling

        for rows in ([{"id": 1}], pa.table({"id": [1]})):
            with pytest.raises(persist.SchemaMismatch, match="fills in nothing"):
                list(iter_updates(schema, rows, time=0, whole=False))


def test_columns_that_are_added_are_filled_from_then_on() -> None:
    with persist.open("memory:") as client:
        plain = persist.Schema({"id": "int64"}, {"word": "string"}, times="ms")
        older = client.table("t", plain)
        older.append([{"id": 1, "word": "a"}])
        older.evolve(plain.add({"made": "timestamp default now()", "n": "int64 default 7"}))
        table = client.table("t")
        table.append([{"id": 2, "word": "b"}])
        client.table("t", plain).append([{"id": 3, "word": "c"}])
        found = {row["id"]: row for row in table.read().to_pylist()}
        assert [found[id_]["n"] for id_ in (1, 2, 3)] == [7, 7, 7]
        assert found[1]["made"] is None
        assert isinstance(found[2]["made"], dt.datetime)
        assert found[3]["made"] is None, "a program in older columns fills in nothing"
        now = table.describe().schema
        table.evolve(now.rename({"made": "at"}).drop("word"))
        table = client.table("t")
        table.append([{"id": 4}])
        assert {row["id"]: row for row in table.read().to_pylist()}[4]["at"] is not None
        now = table.describe().schema
        other = persist.Schema(now.key, [Column("at", "timestamp"), Column("n", "int64", fill="")], times="ms")
        assert table.evolve(other, dry_run=True) == (), "who does not know the fill does not undo it"


def test_a_program_need_not_say_what_is_filled_and_says_nothing_else() -> None:
    plain = persist.Schema({"id": ID}, {"made": "timestamp"})
    known = persist.Schema({"id": f"{ID} default uuid()"}, {"made": "timestamp default now()"})
    assert place_of(plain, [known]) == 0
    assert place_of(known, [plain]) is None


def test_older_programs_refuse_it_by_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist_lib.core.formats.CREATED", FIRST)
    schema = persist.Schema({"id": "int64"}, {"made": "timestamp default now()"})
    assert isinstance(apply(State(), SeqNo(1), c.Create(schema, FILLED - 1)), r.Malformed)
    assert isinstance(apply(State(), SeqNo(1), c.Create(schema, FILLED)), State)
    with persist.open("memory:") as client:
        client.open_writer("s", schema).close()
        assert client.inspect("s").state.format == FILLED


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("string default 'new'", Column("x", "string", default="new")),
        ("string default new order", Column("x", "string", default="new order")),
        ("string not null default 'uuid()'", Column("x", "string", False, "uuid()")),
        ("int32 default -7", Column("x", "int32", default="-7")),
        ("date default now()", Column("x", "date32", fill="now()")),
        ('struct<" default ": int64>', Column("x", 'struct<" default ": int64>')),
        ("timestamp[ns] not null default now()", Column("x", "timestamp[ns]", False, fill="now()")),
    ],
)
def test_a_type_says_its_default(text: str, column: Column) -> None:
    assert persist.Schema({"id": "int64"}, {"x": text}).value == (column,)


@pytest.mark.parametrize(
    "text",
    ["int64 default now()", "binary default uuid()", "string default gen()", "int8 default 1000", "string default 'x"],
)
def test_a_default_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(persist.InvalidUsage):
        persist.Schema({"id": "int64"}, {"x": text})


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 2**48 - 1), st.randoms(use_true_random=False))
def test_ids_are_of_version_7_say_their_time_and_rise(counts: list[int], now: int, chance: random.Random) -> None:
    filling = Filling(persist.Runtime(clock_ms=lambda: now, random=chance))
    column = Column("id", ID, fill="uuid()")
    ids = [id_ for count in counts for id_ in filling.values(column, count).to_pylist()]
    assert len(ids) == sum(counts)
    assert ids == sorted(set(ids))
    for id_ in ids:
        assert int.from_bytes(id_[:6], "big") == now
        assert (id_[6] >> 4, id_[8] >> 6) == (7, 2)


@given(st.integers(-(2**40), 2**47))
def test_now_is_the_same_moment_in_each_type(now: int) -> None:
    now = min(now, 253_402_300_799_999)
    now = max(now, -62_135_596_800_000)
    moment = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=now)
    filling = Filling(persist.Runtime(clock_ms=lambda: now))

    def of(kind: str) -> Any:
        return filling.values(Column("x", kind, fill="now()"), 2)[1].as_py()

    assert of("timestamp[us, UTC]") == of("timestamp[ms, Europe/Berlin]") == moment
    assert of("timestamp[s]") == moment.replace(microsecond=0, tzinfo=None)
    assert of("timestamp[us]") == moment.replace(tzinfo=None)
    assert of("date32") == moment.date()
