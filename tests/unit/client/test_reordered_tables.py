"""Tables whose value columns are shown in another order than that in which they are stored."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.core.formats import EVOLVED, REORDERED
from persist_lib.kernel.order import is_sorted
from persist_lib.testing import check_world
from tests.carriers import ALL, Carrier
from tests.worlds import World

FIRST = persist.Schema(
    {"id": "int64"}, {"a": "string", "gone": "int64", "b": "int64", "c": "float64"}, times="ms"
)  # fmt: skip
NOW = FIRST.drop("gone").reorder("c").add({"d": "bool"})
"""Stored as a, gone, b, c, d; shown as c, a, b, d."""
ROWS = [{"id": n % 7, "a": "xyz"[n % 3], "gone": n % 2, "b": n % 5, "c": n / 4} for n in range(40)]
NAMES = ["id", "c", "a", "b", "d"]


@pytest.fixture(params=[{}, {"inline_bytes": 0}], ids=["inline", "objects"])
def client(world: World, request: pytest.FixtureRequest) -> persist.Client:
    return world.client(persist.Config(**request.param))


def reordered(client: persist.Client, carrier: Carrier = ALL[0]) -> persist.Table:
    carrier.make_table(client, "t", FIRST)
    table = client.table("t")
    table.append(ROWS)
    table.evolve(NOW)
    table.append(pa.table({"b": [1], "d": [True], "id": [9], "a": ["z"], "c": [0.5]}))
    return table


def expected() -> list[list[Any]]:
    shown = [[row["id"], row["c"], row["a"], row["b"], None] for row in ROWS]
    return sorted([*shown, [9, 0.5, "z", 1, True]], key=repr)


def lists(table: pa.Table) -> list[list[Any]]:
    """The rows, cell by cell: dicts that are compared do not tell the order of columns."""
    return sorted(([cell for name, cell in row.items() if name != "_diff"] for row in table.to_pylist()), key=repr)


@pytest.mark.parametrize("carrier", ALL, ids=[one.name for one in ALL])
def test_all_that_reads_has_the_columns_in_the_order_that_was_asked_for(
    client: persist.Client, carrier: Carrier
) -> None:
    table = reordered(client, carrier)
    assert table.schema.names == table.describe().schema.names == client.table("t").schema.names == NAMES
    read = table.read()
    assert read.to_arrow().column_names == NAMES
    assert lists(read.to_arrow()) == expected()
    assert read.to_polars().columns == read.to_pandas().columns.tolist() == NAMES
    assert read.to_duckdb().columns == NAMES
    assert sorted(map(list, read.to_duckdb().fetchall()), key=repr) == expected()
    assert table.read(columns=["b", "c", "id"]).to_arrow().column_names == ["id", "c", "b"]
    assert lists(table.read(filter=pc.field("d")).to_arrow()) == [[9, 0.5, "z", 1, True]]
    assert lists(table.read(key=(9,)).to_arrow()) == lists(table.read(keys=[9]).to_arrow())
    assert lists(table.read(keys=[9]).to_arrow()) == [[9, 0.5, "z", 1, True]]
    assert table.changes(None).to_arrow().column_names == [*NAMES, "_time", "_diff"]
    table.upsert([{"id": 9, "a": "y"}])
    table.delete(list(range(7)))
    assert lists(table.read().to_arrow()) == [[9, 0.5, "y", 1, True]]
    with client.table("t", FIRST) as old:
        assert old.read().to_arrow().column_names == FIRST.names


def test_columns_lie_in_the_reader_s_order_and_so_do_rows(client: persist.Client) -> None:
    reordered(client)
    client.maintain("t")
    with client.open_reader("t") as read:
        snapshot = read.snapshot(diff=True)
        assert is_sorted(read.schema, snapshot.to_arrow())
        assert is_sorted(read.schema, pa.concat_tables(snapshot.batches()))
        assert is_sorted(read.schema, pa.concat_tables(table for table in read.changes(None).batches()))
        pieces = [pickle.loads(pickle.dumps(one)).to_arrow(client.blob) for one in read.snapshot().splits(3)]
        assert lists(pa.concat_tables(pieces)) == expected()
        heard = [one.table for one in read.listen(0, until=read.fetch_upper()) if isinstance(one, persist.Updates)]
        assert {tuple(one.column_names) for one in heard} <= {(*NAMES, "_time", "_diff")}
    check_world(client, "t")


def test_rows_of_one_key_that_span_pieces_are_in_order_and_added_up(client: persist.Client) -> None:
    schema = persist.Schema({"id": "int64"}, {"a": "int64", "b": "int64"})
    with client.open_writer("s", schema) as write:
        for time in range(3):
            rows = {"id": [1] * 3000, "a": [n % 50 for n in range(3000)], "b": [n // 2 for n in range(3000)]}
            write.compare_and_append(pa.table(rows), time, time + 1)
    client.evolve_schema("s", schema.reorder("b"))
    with client.open_reader("s") as read:
        for table in (
            pa.concat_tables(read.snapshot(diff=True).batches()), pa.concat_tables(read.changes(None).batches()),
        ):  # fmt: skip
            assert is_sorted(read.schema, table)
            assert pc.sum(table.column("_diff")).as_py() == 9000


def test_nothing_that_is_stored_changes_and_the_format_comes_only_with_it(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist_lib.core.formats.CREATED", EVOLVED)
    table = client.table("t", FIRST)
    table.append(ROWS)
    before = client.inspect("t").state
    assert before.format == EVOLVED
    assert table.evolve(FIRST.reorder("c"), dry_run=True) == ("reordered to id, c, a, gone, b",)
    assert client.inspect("t").state == before
    table.evolve(FIRST.reorder("c"))
    after = client.inspect("t").state
    assert after.format == REORDERED
    assert after.trace == before.trace
    assert [one.name for one in after.schemas[-1].value] == [one.name for one in FIRST.value]
    client.maintain("t")
    check_world(client, "t")  # every fingerprint, and the order of every batch


def test_a_program_with_the_older_order_continues_and_one_that_declares_what_is_shown_opens(
    client: persist.Client,
) -> None:
    old = client.table("t", FIRST)
    old.append(ROWS)
    old_reader, old_writer = client.open_reader("t", FIRST), client.open_writer("t", FIRST)
    client.table("t").evolve(FIRST.reorder(["c", "b"]))
    declared = persist.Schema(
        {"id": "int64"}, {"c": "float64", "b": "int64", "a": "string", "gone": "int64"}, times="ms"
    )  # fmt: skip
    old_writer.upsert([{"id": 8, "a": "old", "gone": 1, "b": 2, "c": 3.0}])
    client.table("t", declared).append([{"id": 9, "c": 1.0, "b": 2, "a": "new", "gone": 3}])
    assert old_reader.snapshot().to_arrow().column_names == FIRST.names
    assert lists(client.table("t", declared).read(keys=[8, 9]).to_arrow()) == [
        [8, 3.0, 2, "old", 1], [9, 1.0, 2, "new", 3],
    ]  # fmt: skip
    assert lists(old.read(keys=[8, 9]).to_arrow()) == [[8, "old", 1, 2, 3.0], [9, "new", 3, 2, 1.0]]
    strange = persist.Schema({"id": "int64"}, dict(list(FIRST_TYPES.items())[::-1]), times="ms")
    with pytest.raises(persist.SchemaMismatch):
        client.open_reader("t", strange)


FIRST_TYPES = {one.name: one.type for one in FIRST.value}


def test_only_the_verb_reorders(client: persist.Client) -> None:
    table = client.table("t", FIRST)
    other = persist.Schema({"id": "int64"}, dict(list(FIRST_TYPES.items())[::-1]), times="ms")
    with pytest.raises(persist.SchemaMismatch, match=r"another order.*say schema\.reorder"):
        table.evolve(other)
    assert table.evolve(FIRST.reorder([one.name for one in other.value])) == ("reordered to id, c, b, gone, a",)
    assert table.evolve(other) == (), "what is shown by now"
    assert table.evolve(other.reorder(["c", "b"])) == (), "in the same order"
    with pytest.raises(persist.SchemaMismatch, match="another order"):
        table.evolve(FIRST.add({"d": "int64"}))  # an older program does not undo it by adding a column
    assert table.evolve(other.add({"d": "int64"})) == ("d",)
    assert table.describe().schema.names == ["id", "c", "b", "gone", "a", "d"]
    now = table.describe().schema
    assert table.evolve(now.add({"e": "int64"}).reorder("e", after="b").drop("gone")) == (
        "gone dropped", "reordered to id, c, b, e, a, d", "e",
    )  # fmt: skip
    assert table.evolve(FIRST.drop("gone").reorder(["a", "b", "c"]).add({"d": "int64", "e": "int64"})) == (
        "reordered to id, a, b, c, d, e",
    )  # fmt: skip


SOME = FIRST.reorder(["c", "b"])


@pytest.mark.parametrize(("names", "after", "shown"), [
    ("c", None, "c a gone b"), (["c", "b", "gone", "a"], None, "c b gone a"), ("a", "b", "gone b a c"),
    (["c", "a"], "b", "gone b c a"), (["b"], "c", "a gone c b"),
])  # fmt: skip
def test_first_after_and_a_full_list_are_one_verb(names: Any, after: str | None, shown: str) -> None:
    assert [one.name for one in FIRST.reorder(names, after).value] == shown.split()
    assert [one.name for one in SOME.reorder(names, after).reorder("a").reorder("b", "a").value][:2] == ["a", "b"]
    assert FIRST.reorder(names, after).whole.names == FIRST.names


@pytest.mark.parametrize(("make", "said"), [
    (lambda: FIRST.reorder("id"), "key column"), (lambda: FIRST.reorder("a", "id"), "need no `after`"),
    (lambda: FIRST.reorder("x"), "no column"), (lambda: FIRST.reorder("a", "x"), "no column"),
    (lambda: FIRST.reorder(["a", "a"]), "named twice"), (lambda: FIRST.reorder("a", "a"), "named twice"),
    (lambda: FIRST.drop("a").reorder("a"), "no column"), (lambda: FIRST.reorder(["a", 1]), "named by text"),  # type: ignore[list-item]
])  # fmt: skip
def test_what_has_no_place_is_refused_in_words(make: Callable[[], object], said: str) -> None:
    with pytest.raises(persist.InvalidUsage, match=said):
        make()


def test_a_table_is_restored_to_a_time_before_it_was_reordered(client: persist.Client) -> None:
    for carrier in (ALL[0], ALL[-1]):
        name = carrier.name.replace(" ", "-")
        carrier.make_table(client, name, FIRST)
        table = client.table(name)
        past = table.append(ROWS).time or 0
        table.evolve(FIRST.reorder("c"))
        table.delete([1, 2])
        table.append([{"id": 1, "c": 9.0, "a": "n", "gone": 1, "b": 1}])
        table.restore(past)
        assert lists(table.read().to_arrow()) == lists(table.read(past).to_arrow())
        assert table.read().to_arrow().num_rows == len(ROWS)


def test_a_copy_has_the_columns_as_they_are_shown(client: persist.Client) -> None:
    table = reordered(client, ALL[3])
    with client.controller() as controller:
        controller.make_rendition("t", copy=True, shards=2)
        controller.copy_rendition("t", 2)
        assert controller.compare("t", 2).is_equal
        controller.hand_over("t", 2, advance=True)
    assert lists(table.read().to_arrow()) == expected()
    assert client.table("t").schema.names == NAMES


def test_constraints_and_tables_that_only_gain_columns(client: persist.Client) -> None:
    schema = persist.Schema({"id": "int64"}, {"a": "string", "b": "int64"}, unique=True, times="ms")
    table = client.table("u", schema)
    table.append([{"id": 1, "a": "x", "b": 1}])
    table.evolve(schema.reorder("b"))
    with pytest.raises(persist.ConstraintViolated):
        table.append([{"id": 1, "b": 2, "a": "y"}])
    table.upsert([{"id": 1, "b": 2, "a": "y"}])
    assert lists(table.read().to_arrow()) == [[1, 2, "y"]]
    plain = client.table("p", schema)
    plain.append([{"id": 1, "a": "x", "b": 1}])
    plain.publish("delta")
    for dry_run in (True, False):
        with pytest.raises(persist.SchemaMismatch, match="published as delta"):
            plain.evolve(schema.reorder("b"), dry_run=dry_run)
    with pytest.raises(persist.Unpublishable, match="reordered"):
        table.publish("delta")
