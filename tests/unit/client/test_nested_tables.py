"""A table with nested columns is as any other: the same verbs, times and columns added later, on every carrier."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import SCHEMAS_SAY_MORE, WIDE_TYPES
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.ids import SeqNo
from tests.unit.relation.carriers import Carrier, over_all
from tests.worlds import World

PLAIN = persist.Schema({"id": "int64 not null"}, {"tags": "list<string>"}, unique=True, times="ms")
VALUE = {"tags": "list<string>", "at": "struct<x: float64, m: map<string, list<int64>>>", "v": "list<float32>[2]"}
WIDER = persist.Schema({"id": "int64 not null"}, VALUE, unique=True, times="ms")


def row(id_: int, n: int = 0) -> dict[str, Any]:
    """What one has to have in the end, as Python's."""
    at = None if id_ % 3 == 0 else {"x": n / 7, "m": {"a": [n, None], "b": None} if n % 2 else {}}
    return {"id": id_, "tags": [f"t{n}", None][: id_ % 3], "at": at, "v": [float(n), None] if id_ % 2 else None}


def in_order(found: Any) -> list[dict[str, Any]]:
    return sorted(found.to_pylist(), key=lambda one: int(one["id"]))


@over_all
def test_nested_rows_are_changed_read_and_kept_as_others(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), PLAIN)
    with world.client().table("c") as table:
        table.append([{"id": 0, "tags": ["old"]}, {"id": 1, "tags": None}])
        first = table.read().as_of
        table.evolve(WIDER)
    model: dict[int, dict[str, Any]] = {0: {"id": 0, "tags": ["old"], "at": None, "v": None}}
    model[1] = {"id": 1, "tags": None, "at": None, "v": None}
    with world.client().table("c") as table:
        assert in_order(table.read()) == list(model.values())
        table.append([row(id_) for id_ in range(2, 40)])
        model |= {id_: row(id_) for id_ in range(2, 40)}
        table.upsert([row(id_, id_) for id_ in range(0, 40, 4)])
        model |= {id_: row(id_, id_) for id_ in range(0, 40, 4)}
        same = table.upsert([row(id_, id_) for id_ in range(0, 40, 4)])
        assert (same.unchanged, same.inserted, same.updated) == (10, 0, 0), "they are equal, whatever holds them"
        table.delete([{"id": 7}])
        del model[7]
        table.update({"tags": ["new"]}, filter=pc.field("id") >= 38)
        model |= {id_: model[id_] | {"tags": ["new"]} for id_ in (38, 39)}
        assert in_order(table.read()) == [model[id_] for id_ in sorted(model)]
        some = table.read(filter=pc.field("at", "x") > 4, columns=["id", "at"])
        wanted = [id_ for id_, one in model.items() if one["at"] and one["at"]["x"] > 4]
        assert in_order(some) == [{"id": id_, "at": model[id_]["at"]} for id_ in sorted(wanted)]
        assert in_order(table.read(as_of=first)) == [
            {"id": 0, "tags": ["old"], "at": None, "v": None}, {"id": 1, "tags": None, "at": None, "v": None},
        ]  # fmt: skip
        table.restore(first)
        assert len(in_order(table.read())) == 2
        table.maintain()
        assert in_order(table.read())[0]["tags"] == ["old"]


def test_older_programs_refuse_what_they_do_not_know() -> None:
    """By the format, in the state machine: a nested column comes only with it."""
    made = apply(State(), SeqNo(1), c.Create(PLAIN, SCHEMAS_SAY_MORE))
    assert isinstance(made, r.Malformed)
    plain = persist.Schema({"id": "int64"}, {"n": "int64"})
    older = apply(State(), SeqNo(1), c.Create(plain, SCHEMAS_SAY_MORE))
    assert isinstance(older, State)
    nested = persist.Schema({"id": "int64"}, {"n": "int64", "l": "list<int64>"})
    assert isinstance(apply(older, SeqNo(2), c.EvolveSchema(0, nested)), r.Malformed)
    newer = apply(older, SeqNo(2), c.Upgrade(WIDE_TYPES))
    assert isinstance(newer, State)
    assert isinstance(apply(newer, SeqNo(3), c.EvolveSchema(0, nested)), State)
    wide = persist.Schema({"id": "decimal256(40, 0)"})
    assert isinstance(apply(State(), SeqNo(1), c.Create(wide, SCHEMAS_SAY_MORE)), r.Malformed)
    odd = persist.Schema({"id": "list<int64>"})
    assert isinstance(apply(State(), SeqNo(1), c.Create(odd, WIDE_TYPES)), r.Malformed)


def test_shards_are_made_in_the_format_that_their_columns_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist_lib.core.formats.CREATED", SCHEMAS_SAY_MORE)
    with persist.open("memory:") as client:
        client.open_writer("plain", persist.Schema({"id": "int64"})).close()
        client.open_writer("nested", PLAIN).close()
        client.evolve_schema("plain", persist.Schema({"id": "int64"}, {"l": "list<int64>"}))
        formats = {name: client.inspect(name).state.format for name in ("plain", "nested")}
        assert formats == {"plain": WIDE_TYPES, "nested": WIDE_TYPES}
    with (
        persist.open("memory:", config=persist.Config(format=SCHEMAS_SAY_MORE)) as client,
        pytest.raises(persist.InvalidUsage, match=f"needs format {WIDE_TYPES}"),
    ):
        client.open_writer("nested", PLAIN)
