"""Rows that lack columns: what a row lacks stays as it is, on each carrier, and a null that is given is a null."""

from __future__ import annotations

from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.testing import Outcome
from tests.unit.relation.carriers import KINDS, Carrier, Cut, over_all
from tests.worlds import World

COLUMNS = persist.Schema(
    {"id": "int64 not null"}, {"seq": "int64", "word": "string", "n": "int64 not null"}, times="ms"
)
NEWER = pc.field("seq") > persist.old("seq")


def row(id_: int, seq: int | None = 1, word: str | None = "w", n: int = 0) -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": word, "n": n}


def table_on(world: World, carrier: Carrier, *rows: dict[str, Any]) -> persist.Table:
    carrier.make(world.client(), COLUMNS)
    table = world.client().table("c")
    table.append(list(rows))
    return table


def seen(table: persist.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(one.values()) for one in table.read().to_pylist()), key=str)


@over_all
@pytest.mark.parametrize("verb", ["upsert", "apply"])
def test_a_row_keeps_what_it_lacks_and_each_row_by_itself(world: World, carrier: Carrier, verb: str) -> None:
    table = table_on(world, carrier, row(1), row(2), row(3, None, None))
    change = getattr(table, verb)
    done = change([{"id": 1, "word": None}, {"id": 2, "seq": 5}, row(4, 7, "new", 8), {"id": 3}])
    assert (done.inserted, done.updated, done.unchanged, done.count) == (1, 2, 1, 5)
    assert seen(table) == [(1, 1, None, 0), (2, 5, "w", 0), (3, None, None, 0), (4, 7, "new", 8)]
    assert change([{"id": 1, "n": 0}, {"id": 4, "seq": 7}]).time is None, "all of it is there"
    assert change([{"id": 9, "n": 1}, {"n": 2, "id": 2}], dry_run=True).inserted == 1
    assert change([{"id": 9, "n": 1}, {"n": 2, "id": 2}]).updated == 1
    assert seen(table)[1::3] == [(2, 5, "w", 2), (9, None, None, 1)]


@over_all
def test_tables_and_frames_lack_what_is_not_among_their_columns(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, *map(row, range(6)))
    batch = pa.record_batch({"n": pa.array([1], pa.int32()), "id": [0]})
    stream = pa.RecordBatchReader.from_batches(pa.schema([("id", pa.int64()), ("seq", pa.int64())]), [])
    pandas, polars = pd.DataFrame({"id": [2, 3], "word": ["p", None]}), pl.DataFrame({"id": [4], "seq": [None]})
    done = table.apply([batch, pa.table({"id": [1], "word": ["t"]}), stream, pandas, polars, {"id": 5, "seq": 9}])
    assert (done.updated, done.unchanged) == (6, 0)
    assert seen(table) == [
        (0, 1, "w", 1), (1, 1, "t", 0), (2, 1, "p", 0), (3, 1, None, 0), (4, None, "w", 0), (5, 9, "w", 0)
    ]  # fmt: skip
    table.upsert(pd.DataFrame({"id": [5], "n": [3]}))
    assert seen(table)[-1] == (5, 9, "w", 3)


@over_all
def test_rows_that_lack_what_has_no_answer_are_refused_whole(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, row(1), row(2), row(2), row(3), row(3, 2))
    before = seen(table)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            [{"id": 1, "seq": 2}, {"id": 7, "seq": 1}],
            {},
            persist.SchemaMismatch,
            "column 'n' is missing in 1 rows of new",
        ),
        ([{"id": 1, "n": None}, {"id": 1}], {}, persist.InvalidUsage, "row 0 has null"),
        ([{"id": 2, "seq": 2}], {}, persist.InvalidUsage, "a key has several rows"),
        ([{"id": 3, "seq": 2}], {}, persist.InvalidUsage, "a key has several rows"),
        ([{"id": 1, "seq": 2}, {"id": 1, "word": "v"}], {}, persist.InvalidUsage, "different rows for"),
        ([{"id": 1, "seq": None}, {"id": 1}], {}, persist.InvalidUsage, "different rows for"),
        ([{"seq": 2}, row(1)], {}, persist.SchemaMismatch, "'id' is missing in row 0"),
        ([*map(row, range(70_000)), (1, 2, 3, 4)], {}, persist.InvalidUsage, "row 70000 is a tuple"),
        ([{"id": 1, "sequence": 2}], {}, persist.SchemaMismatch, "not in the schema"),
        (pa.table({"id": [1], "sequence": [2]}), {}, persist.SchemaMismatch, "not in the schema"),
        ([{"id": 1, "seq": 2}, {"id": 1, "n": 2}], {"order_by": "seq"}, persist.InvalidUsage, "lack the column 'seq'"),
        (
            [{"id": 1, "seq": 2, "n": 2}, {"id": 1, "seq": 3}],
            {"order_by": "seq"},
            persist.InvalidUsage,
            "would be lost",
        ),
        ([{"id": 1, "seq": 2}], {"only_if": pc.field("none") > 1}, persist.InvalidUsage, "only_if cannot be used"),
    ]
    for rows, options, kind, why in cases:
        with pytest.raises(kind, match=why):
            table.apply(rows, **options)
        assert seen(table) == before, why
    assert table.upsert([row(2)]).updated == 1, "whole rows replace several, as ever"
    assert table.apply([{"id": 1, "seq": 2}, {"id": 1, "seq": 3, "n": 3}], order_by="seq").updated == 1
    assert seen(table)[:2] == [(1, 3, "w", 3), (2, 1, "w", 0)]


@over_all
def test_a_condition_sees_the_old_value_of_what_a_row_lacks(world: World, carrier: Carrier) -> None:
    table = table_on(world, carrier, row(1, 5), row(2, 5), row(3, 5, None))
    done = table.apply(
        [{"id": 1, "seq": 4, "word": "late"}, {"id": 2, "seq": 6, "n": 6}, {"id": 3, "n": 7}], only_if=NEWER
    )
    assert (done.updated, done.unchanged) == (1, 2)
    assert seen(table) == [(1, 5, "w", 0), (2, 6, "w", 6), (3, 5, None, 0)]
    has_word = pc.field("word") == "w"
    assert table.apply([{"id": 1, "n": 1}, {"id": 3, "n": 1}], only_if=has_word).updated == 1


@over_all
def test_what_a_rival_wrote_first_is_kept(world: World, carrier: Carrier) -> None:
    carrier.make(world.client(), COLUMNS)
    theirs, ours = world.client().table("c"), world.client(rival=world.rival).table("c")
    theirs.append([row(1), row(2)])
    ours.upsert([{"id": 2, "n": 5}])
    for verb in ("upsert", "apply"):
        world.rival.before_next(lambda verb=verb: theirs.upsert([{"id": 1, "word": verb}]))  # type: ignore[misc]
        assert getattr(ours, verb)([{"id": 1, "n": len(verb)}, {"id": 2, "word": verb}]).updated == 2
        assert not world.rival.waiting
        assert seen(theirs) == [(1, 1, verb, len(verb)), (2, 1, verb, 5)]


@over_all
@pytest.mark.parametrize("happens", [True, False])
def test_a_repeated_token_answers_the_first_outcome(world: World, carrier: Carrier, happens: bool) -> None:
    cut = Cut(Outcome.HAPPENED_UNKNOWN if happens else Outcome.LOST_UNKNOWN, *KINDS)
    others = table_on(world, carrier, row(1))
    ours = world.client(persist.Config(timeout_s=1), plan=cut).table("c")
    ours.append([row(2)])
    cut.is_armed = True
    with pytest.raises(persist.Indeterminate) as told:
        ours.apply([{"id": 1, "n": 7}])
    cut.is_armed = False
    others.upsert([{"id": 1, "word": "then"} if happens else {"id": 2, "word": "then"}])
    if happens:
        others.upsert([{"id": 1, "n": 8}])
    table = ours if happens else world.client().table("c")
    assert table.apply([{"id": 1, "n": 7}], token=told.value.token).time is not None
    expected = [(1, 1, "then", 8), (2, 1, "w", 0)] if happens else [(1, 1, "w", 7), (2, 1, "then", 0)]
    assert seen(others) == expected


def test_a_transaction_sees_the_rows_that_it_completes(world: World) -> None:
    client = world.client()
    client.controller().tables().create("c", COLUMNS, mode="wal")
    client.table("c").append([row(1)])
    with client.transaction() as transaction:
        transaction.upsert("c", [{"id": 1, "word": "v"}])
        transaction.apply("c", [{"id": 1, "n": 2}])
    assert seen(client.table("c")) == [(1, 1, "v", 2)]


KEY = st.integers(0, 3)
PARTS = st.fixed_dictionaries(
    {"id": KEY}, optional={"seq": st.none() | st.integers(0, 4), "word": st.none() | st.sampled_from("ab"), "n": KEY}
)
CALLS = st.lists(
    st.tuples(
        st.lists(PARTS, max_size=4, unique_by=lambda one: one["id"]), st.lists(KEY, max_size=2),
        st.lists(KEY, max_size=1), st.sampled_from(["", "newer", "order"]),
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=40)
@given(CALLS)
@example([([], [], [1], ""), ([{"id": 1, "n": 2}], [], [], "newer"), ([{"id": 1, "seq": 3}], [0], [2], "order")])
def test_any_rows_with_any_columns_are_those_of_a_dict(calls: list[tuple[Any, ...]]) -> None:
    """A dict by key: what a row has replaces what is there, and what it lacks stays; or all of the call is refused."""
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        client.controller().create("c", COLUMNS, shards=2, mode="compare_and_append")
        client.controller().tables().create("w", COLUMNS, mode="wal")
        for table in (client.table("s", COLUMNS), client.table("c"), client.table("w")):
            model: dict[int, dict[str, Any]] = {}
            for rows, deletes, appends, how in calls:
                expected, is_refused = dict(model), False
                for one in rows:
                    old = model.get(one["id"])
                    new = {**(old or {"seq": None, "word": None}), **one}
                    is_refused |= "n" not in new or (how == "order" and "seq" not in one)
                    if how != "newer" or old is None or _is_newer(new["seq"], old["seq"]):
                        expected[one["id"]] = new
                for key in deletes:
                    expected.pop(key, None)
                fresh = [key for key in appends if key not in model]
                mentioned = [*(one["id"] for one in rows), *set(deletes), *fresh]
                is_refused |= (how == "newer" and bool(deletes)) or len(set(mentioned)) < len(mentioned)
                added = [row(key, 0, None, 9) for key in fresh]
                expected |= {one["id"]: one for one in added}
                options = {"newer": {"only_if": NEWER}, "order": {"order_by": "seq"}, "": {}}[how]
                try:
                    table.apply(rows, deletes, appends=added, **options)
                except (persist.InvalidUsage, persist.SchemaMismatch):
                    assert is_refused
                else:
                    assert not is_refused
                    model = expected
                assert seen(table) == sorted(
                    (tuple(one[name] for name in COLUMNS.names) for one in model.values()), key=str
                )


def _is_newer(new: int | None, old: int | None) -> bool:
    return new is not None and old is not None and new > old
