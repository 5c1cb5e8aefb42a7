"""Bounds of values in the state: a filter leaves out whole parts by them, without a request, and never a row."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import VALUE_BOUNDS
from persist_lib.core.state import Part, ValueBounds
from persist_lib.core.trace import batch_problems
from persist_lib.core.transitions import apply
from persist_lib.format import value_bounds
from persist_lib.ids import SeqNo
from persist_lib.schema.schema import BOUNDED_MOST
from persist_lib.schema.schema import bounded as bounded_of
from persist_lib.testing import check_world
from tests.worlds import World

N = 12
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)
LOG = persist.Schema(
    {"id": "string"},
    {"made": "timestamp[us, UTC]", "n": "int32", "share": "float64", "paid": "bool", "late": "duration[s]"},
)
BOUNDED = persist.Config(inline_bytes=0)


def entry(at: int, place: int) -> dict[str, Any]:
    """A row of the hour `at`: its key says nothing of it."""
    return {
        "id": f"{place:02}-{at}", "made": START + at * HOUR + place * dt.timedelta(minutes=1), "n": at * 10 + place,
        "share": None if place == 0 else at / 2, "paid": at % 2 == 0, "late": dt.timedelta(seconds=at),
    }  # fmt: skip


def logged(client: persist.Client) -> persist.ReadHandle:
    """A shard of N appends, an object each."""
    write, read = client.open_shard("s", LOG)
    for at in range(N):
        write.compare_and_append([entry(at, place) for place in range(5)], at, at + 1)
    return read


def parts_of(client: persist.Client, shard: str = "s") -> list[Part]:
    return [part for batch in client.inspect(shard).state.trace for part in batch.parts]


FILTERS = [
    (pc.field("made") >= START + (N - 2) * HOUR, 2),
    ((pc.field("made") >= START + 3 * HOUR) & (pc.field("made") < START + 4 * HOUR), 1),
    (pc.field("n") == 53, 1),
    (pc.field("n") == 57, 0),
    (pc.field("made") == START + HOUR // 120, 1),  # within the bounds of one part, which does not have it
    (pc.field("n").isin([3, 111]), 2),
    (pc.field("n") > 1000, 0),
    (pc.field("n").is_null(), 0),
    (pc.field("share").is_null(), N),
    (pc.field("share") > 5.0, 1),
    (pc.field("late") <= pa.scalar(dt.timedelta(seconds=1), pa.duration("s")), 2),
    (pc.field("paid") == pa.scalar(False), N // 2),
    ((pc.field("n") < 10) | (pc.field("made") >= START + (N - 1) * HOUR), 2),
]


@pytest.mark.parametrize(("wanted", "opened"), FILTERS)
def test_a_filter_on_a_value_column_opens_the_parts_that_can_hold_its_rows(
    world: World, wanted: pc.Expression, opened: int
) -> None:
    client = world.client(BOUNDED)
    read = logged(client)
    whole = read.snapshot(N - 1).to_arrow()
    world.requests.clear()
    some = read.snapshot(N - 1, filter=wanted)
    table = some.to_arrow()
    assert table.sort_by("id").equals(whole.filter(wanted).sort_by("id"))
    assert (world.count("get", "get_range"), some.cost.gets) == (opened, opened)
    world.requests.clear()
    assert sum(piece.num_rows for piece in read.snapshot(N - 1, filter=wanted).batches()) == table.num_rows
    assert world.count("get", "get_range") == opened
    splits = read.snapshot(N - 1, filter=wanted).splits(1)
    assert [len(run.parts) for split in splits for run in split.inputs] == [1] * opened


def test_the_first_key_column_is_told_by_the_bounds_of_keys_in_any_format(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=0))
    write, read = client.open_shard("s", persist.Schema({"day": "date32", "id": "int64"}, {"n": "int64"}))
    days = [dt.date(2026, 1, 1) + dt.timedelta(days=day) for day in range(N)]
    for at, day in enumerate([None, *days]):
        write.compare_and_append([{"day": day, "id": at, "n": 0}, {"day": day, "id": at + 1, "n": 0}], at, at + 1)
    day = pc.field("day")
    for wanted, opened in ((day == days[3], 1), (day >= days[-2], 2), (day.is_null(), 1), (day != days[0], N - 1)):
        world.requests.clear()
        assert read.snapshot(N, filter=wanted).to_arrow().num_rows == 2 * opened
        assert world.count("get", "get_range") == opened + (wanted.equals(day != days[0]))


@pytest.mark.parametrize("format_", [3, VALUE_BOUNDS - 1])
def test_older_formats_say_no_bounds_and_inline_parts_have_none(world: World, format_: int) -> None:
    client = world.client(persist.Config(inline_bytes=0, format=format_))
    read = logged(client)
    assert not any(part.values for part in parts_of(client))
    assert read.snapshot(N - 1, filter=pc.field("n") == 57).to_arrow().num_rows == 0
    client.upgrade("s")
    write = client.open_writer("s", LOG)
    write.compare_and_append([entry(N, 1)], N, N + 1)
    assert [bool(part.values) for part in parts_of(client)] == [False] * N + [True]
    world.requests.clear()
    read.snapshot(N, filter=pc.field("n") == 57).to_arrow()
    assert world.count("get", "get_range") == N, "what older programs wrote is opened"
    inline = world.client(persist.Config(format=VALUE_BOUNDS))
    with inline.open_writer("t", LOG) as small:
        small.compare_and_append([entry(0, 1)], 0, 1)
    assert [(part.inline is None, part.values) for part in parts_of(inline, "t")] == [(False, ())]


def test_compaction_writes_bounds_and_changes_and_statements_use_them(world: World) -> None:
    client = world.client(BOUNDED)
    read = logged(client)
    client.maintain("s")
    check_world(client, "s")
    (part,) = parts_of(client)
    made, n, share, paid, late = part.values
    hour = 3_600_000_000
    first = int(START.timestamp()) * 1_000_000
    assert made == ValueBounds(1, first, first + (N - 1) * hour + 240_000_000)
    assert (n, paid, late) == (ValueBounds(2, 0, 114), ValueBounds(4, 0, 1), ValueBounds(5, 0, N - 1))
    assert share == ValueBounds(3, 0.0, (N - 1) / 2, has_null=True)
    write = client.open_writer("s", LOG)
    write.compare_and_append([entry(N, 0)], N, N + 1)
    world.requests.clear()
    assert read.snapshot(N, filter=pc.field("n") == 120).to_arrow().num_rows == 1
    assert world.count("get", "get_range") == 1
    table = client.table("s")
    world.requests.clear()
    assert table.delete(filter=pc.field("n") > 119).deleted == 1
    assert world.count("get", "get_range") == 1


def test_columns_that_evolved_are_told_apart(world: World) -> None:
    """Renamed, widened, dropped and used again, and added with a default: each by its id, in the reader's type."""
    client = world.client(BOUNDED)
    table = client.table("t", persist.Schema({"id": "int64"}, {"a": "int8", "b": "int64", "d": "date32"}, times="ms"))
    table.append([{"id": 1, "a": 5, "b": 50, "d": dt.date(2026, 1, 1)}])
    now = table.describe().schema
    now = now.rename({"a": "c"}).widen({"c": "int32", "d": "timestamp[us]"}).drop("b")
    now = now.add({"b": "int64", "e": "int64 not null", "f": "string"}, {"e": 7})
    table.evolve(now)
    table.append([{"id": 2, "c": 1000, "b": -1, "d": dt.datetime.fromisoformat("2026-01-02"), "e": 8, "f": "x"}])
    field, new_year = pc.field, dt.datetime.fromisoformat("2026-01-01")
    for wanted, ids, opened in (
        (field("c") == 5, [1], 1), (field("c") > 127, [2], 1), (field("b") == 50, [], 0),
        (field("b").is_null(), [1], 1), (field("d") == new_year, [1], 1), (field("d") > new_year, [2], 1),
        (field("e") == 7, [1], 1),
        (field("e") > 7, [2], 1), (field("f").is_null(), [1], 2), (field("f") == "x", [2], 1),
    ):  # fmt: skip
        world.requests.clear()
        assert [row["id"] for row in table.read(filter=wanted).to_pylist()] == ids, wanted
        assert world.count("get", "get_range") == opened, wanted
    client.compact("t")
    check_world(client, "t")


def test_nan_lies_between_no_two_values_and_zeros_are_equal(world: World) -> None:
    client = world.client(BOUNDED)
    write, read = client.open_shard("s", persist.Schema({"id": "int64"}, {"x": "float64"}))
    given: list[list[float | None]] = [[1.0, float("nan")], [-0.0], [0.0, None], [float("-inf"), float("inf")], [None]]
    for at, values in enumerate(given):
        write.compare_and_append([{"id": place, "x": x} for place, x in enumerate(values)], at, at + 1)
    assert [len(part.values) for part in parts_of(client)] == [0, 1, 1, 1, 1]
    whole, x = read.snapshot(4, diff=True).to_arrow(), pc.field("x")
    for wanted in (~(x <= 5.0), x == 0.0, x.isin([0.0]), x.isin([-0.0]), x > 0.0, x.is_null(), pc.is_nan(x), x != 0.0):
        found = read.snapshot(4, filter=wanted, diff=True).to_arrow()
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, whole.filter(wanted).to_pylist())), wanted
    check_world(client, "s")


def test_so_many_columns_have_bounds_times_first() -> None:
    names = {f"c{place}": "int64" for place in range(12)} | {"at": "timestamp", "text": "string", "day": "date32"}
    schema = persist.Schema({"id": "int64", "more": "int64"}, names)
    named = [schema.names[place] for place in bounded_of(schema)]
    assert named == ["more", "c0", "c1", "c2", "c3", "c4", "at", "day"]
    assert len(named) == BOUNDED_MOST
    assert (
        bounded_of(persist.Schema({"id": "int64"}, {"n": "string", "p": "decimal128(9, 2)", "l": "list<int64>"})) == ()
    )
    assert bounded_of(schema.drop("at").whole) == (1, 2, 3, 4, 5, 6, 7, 16), "a dropped column has none"


SOUND = ValueBounds(2, 1, 5)


@pytest.mark.parametrize(
    "values",
    [
        (ValueBounds(2, 5, 1),), (ValueBounds(3, float("nan"), 1.0),), (ValueBounds(2, None, 5, has_null=True),),
        (ValueBounds(2, None, None),), (ValueBounds(0, 1, 5),), (ValueBounds(6, 1, 5),), (ValueBounds(-1, 1, 5),),
        (SOUND, SOUND), (ValueBounds(3, 0.0, 1.0), SOUND),
    ],
)  # fmt: skip
def test_the_state_machine_refuses_bounds_that_no_values_have(world: World, values: tuple[ValueBounds, ...]) -> None:
    client = world.client(BOUNDED)
    logged(client)
    state = client.inspect("s").state
    batch = state.trace[0]
    assert batch_problems(batch, state) == []

    def said(values: tuple[ValueBounds, ...], **other: Any) -> list[str]:
        part = msgspec.structs.replace(batch.parts[0], values=values, **other)
        return batch_problems(msgspec.structs.replace(batch, parts=(part,)), state)

    assert said((SOUND,)) == []
    assert "impossible bounds of values" in said(values)[0]
    inline = {"key": "", "inline": b"x" * batch.parts[0].size}
    assert any("impossible bounds of values" in problem for problem in said((SOUND,), **inline))


def test_who_says_them_to_an_older_format_is_told_what_it_lacks(world: World) -> None:
    client = world.client(BOUNDED)
    logged(client)
    state = client.inspect("s").state
    older = msgspec.structs.replace(state, format=VALUE_BOUNDS - 1)
    append = c.CompareAndAppend(next(iter(state.writers)), b"t", state.trace[0], 0)
    assert apply(older, SeqNo(99), append) == r.NeedsFormat("bounds of a part's values", VALUE_BOUNDS, older.format)


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bounds that leave out the largest value."""
    made = value_bounds.bounds_of

    def less(schema: persist.Schema, table: pa.Table) -> tuple[ValueBounds, ...]:
        return tuple(msgspec.structs.replace(one, upper=3) if one.column == 2 else one for one in made(schema, table))

    monkeypatch.setattr(value_bounds, "bounds_of", less)
    yield
    monkeypatch.setattr(value_bounds, "bounds_of", made)


@pytest.mark.usefixtures("lying")
def test_a_scrub_finds_bounds_that_a_row_is_not_within(world: World) -> None:
    client = world.client(BOUNDED)
    write = client.open_writer("s", LOG)
    write.compare_and_append([entry(0, place) for place in range(5)], 0, 1)
    ((_, problem),) = client.scrub("s").damaged
    assert "outside of the bounds that the state says of it" in problem
    assert client.verify("s").is_damaged


def test_a_scrub_finds_keys_and_times_beyond_the_bounds_of_a_part(world: World) -> None:
    client = world.client(BOUNDED)
    read = logged(client)
    state = client.inspect("s").state
    part = state.trace[0].parts[0]
    updates = read.snapshot(0, diff=True).to_arrow().append_column("_time", pa.array([0] * 5, pa.uint64()))

    def holds(**said: Any) -> bool:
        return value_bounds.is_within(msgspec.structs.replace(part, **said), LOG, LOG, updates)

    assert holds()
    assert not holds(key_lower=part.key_lower + b"\1")
    assert not holds(key_upper=part.key_upper[:-3])
    assert not holds(time_lower=1, time_upper=1)
    assert not holds(values=(ValueBounds(2, 0, 3),))
    assert holds(values=(ValueBounds(2, 0, 4),))
