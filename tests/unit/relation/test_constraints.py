"""Constraints of a schema hold at every time and at every door; an append that would break one writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import ConstraintViolated, InvalidUsage, NotSent, Refused, SchemaMismatch, UpperMismatch
from persist_lib.format.log import decode_row
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import find_violation
from persist_lib.testing import contents_of
from tests.worlds import SMALL, World, row

KEY, VALUE = {"id": "int64 not null"}, {"word": "string"}
UNIQUE = persist.Schema(KEY, VALUE, unique=True)
SIGNED = persist.Schema(KEY, VALUE, non_negative=True)
BOTH = persist.Schema(KEY, VALUE, unique=True, non_negative=True)
DOORS: dict[str, Callable[[persist.Client, persist.WriteHandle, list[dict[str, Any]]], object]] = {
    "compare_and_append": lambda _, write, rows: write.compare_and_append(rows, 1, 2),
    "append": lambda _, write, rows: write.append(rows, 1, 2),
    "append of what is there too": lambda _, write, rows: write.append([row(1, "a", 0), *rows], 0, 2),
    "append_async": lambda _, write, rows: write.append_async(rows, 1, 2).result(),
    "append_now": lambda _, write, rows: write.append_now([{k: v for k, v in r.items() if k != "_time"} for r in rows]),
    "compare_and_append_many": lambda client, write, rows: client.compare_and_append_many(
        [persist.Append(write, rows, 1, 2), persist.Append(client.open_writer("other", UNIQUE), [row(1)], 0, 1)]
    ),
}


def contents(world: World) -> dict[tuple[Any, ...], int]:
    with world.client().open_reader("s") as read:
        return dict(contents_of(read.snapshot(diff=True).to_arrow()))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("config", [persist.Config(), SMALL], ids=["inline", "objects"])
def test_a_second_row_of_a_key_is_refused_at_every_door(world: World, door: str, config: persist.Config) -> None:
    client = world.client(config)
    write = client.open_writer("s", UNIQUE)
    write.compare_and_append([row(1, "a"), row(2, "b")], 0, 1)
    before = world.bytes("s")
    with pytest.raises(ConstraintViolated, match=r"unique.*1 keys.*time 1.*Nothing was written") as told:
        DOORS[door](client, write, [row(3, "new", 1), row(1, "second", 1)])
    error = told.value
    assert isinstance(error, Refused)
    assert (error.constraint, error.time, error.count, error.shard) == ("unique", 1, 1, "s")
    assert error.rows == [{"id": 1, "word": "a", "_diff": 1}, {"id": 1, "word": "second", "_diff": 1}]
    assert world.bytes("s") == before
    assert world.count("list") == 0 or "other" not in client.shards() or client.inspect("other").state.upper.time == 0
    DOORS[door](client, write, [row(3, "new", 1), row(1, "a", 1, -1), row(1, "second", 1)])
    assert contents(world) == {(1, "second"): 1, (2, "b"): 1, (3, "new"): 1}


def test_of_a_clock_the_moment_is_told(world: World) -> None:
    write = world.client().open_writer("s", persist.Schema(KEY, VALUE, unique=True, times="ms"))
    with pytest.raises(ConstraintViolated, match=r"break that at time 1970-01-01T00:00:00.005Z, first") as told:
        write.compare_and_append([row(1, "a", 5), row(1, "b", 5)], 0, 6)
    assert told.value.time == 5


def test_a_multiplicity_below_zero_is_refused(world: World) -> None:
    write = world.client().open_writer("s", SIGNED)
    write.compare_and_append([row(1, "a", diff=2), row(1, "b")], 0, 1)
    with pytest.raises(ConstraintViolated, match="non_negative") as told:
        write.compare_and_append([row(1, "a", 1, -3), row(5, "x", 1, -1)], 1, 2)
    assert told.value.count == 2
    assert told.value.rows == [{"id": 1, "word": "a", "_diff": -1}, {"id": 5, "word": "x", "_diff": -1}]
    write.compare_and_append([row(1, "a", 1, -2)], 1, 2)
    assert contents(world) == {(1, "b"): 1}


@pytest.mark.parametrize("schema", [UNIQUE, BOTH, SIGNED], ids=str)
def test_a_constraint_holds_at_every_time_and_not_only_at_the_end(world: World, schema: persist.Schema) -> None:
    write = world.client().open_writer("s", schema)
    write.compare_and_append([row(1, "a")], 0, 1)
    undone = (
        [row(1, "a", 3, -1), row(1, "a", 5, 1), row(1, "a", 4, -1), row(1, "a", 6, 1)]
        if schema.non_negative
        else [row(1, "b", 4), row(1, "b", 6, -1)]
    )
    with pytest.raises(ConstraintViolated) as told:
        write.compare_and_append(undone, 1, 9)
    assert told.value.time == 4
    if schema.unique:
        with pytest.raises(ConstraintViolated) as told:  # the new row is there before the old one is gone
            write.compare_and_append([row(1, "b", 2), row(1, "a", 3, -1)], 1, 9)
        assert told.value.time == 2
    write.compare_and_append([row(1, "a", 3, -1), row(1, "b", 3), row(1, "b", 5, -1), row(1, "c", 7)], 1, 9)
    assert contents(world) == {(1, "c"): 1}


def test_only_touched_keys_are_looked_up(world: World) -> None:
    write = world.client(SMALL).open_writer("s", BOTH)
    write.compare_and_append([row(n) for n in range(100)], 0, 1)
    assert write.compare_and_append([row(100, time=1)], 1, 2).cost.gets == 0
    assert write.compare_and_append([row(50, "w", 2, -1)], 2, 3).cost.gets == 1
    signed = world.client(SMALL).open_writer("t", SIGNED)
    signed.compare_and_append([row(n) for n in range(100)], 0, 1)
    assert signed.compare_and_append([row(50, time=1)], 1, 2).cost.gets == 0  # adding takes nothing below zero
    assert signed.compare_and_append([row(50, "w", 2, -2)], 2, 3).cost.gets == 2
    many = [row(n, time=3) for n in range(200, 230)] + [row(n, time=3) for n in range(30)]
    with pytest.raises(ConstraintViolated, match="30 keys") as told:
        write.compare_and_append(many, 3, 4)
    assert (told.value.count, len(told.value.rows)) == (30, 10)


@pytest.mark.parametrize("door", ["append", "append_now", "compare_and_append"])
def test_a_rival_between_the_check_and_the_commit_is_seen(world: World, door: str) -> None:
    ours = world.client(rival=world.rival).open_writer("s", UNIQUE)
    theirs = world.client().open_writer("s", UNIQUE)
    ours.compare_and_append([row(1, "a")], 0, 1)
    world.rival.before_next(lambda: theirs.append_now([{"id": 7, "word": "theirs"}]))
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: ours.append([row(7, "ours", 2)], 1, 4),
        "append_now": lambda: ours.append_now([{"id": 7, "word": "ours"}]),
        "compare_and_append": lambda: ours.compare_and_append([row(7, "ours", 2)], 1, 4),
    }
    with pytest.raises(UpperMismatch if door == "compare_and_append" else ConstraintViolated):
        calls[door]()
    assert world.rival.waiting == 0
    assert contents(world) == {(1, "a"): 1, (7, "theirs"): 1}


def test_a_gap_is_refused_before_a_rival_can_close_it(world: World) -> None:
    ours = world.client(rival=world.rival).open_writer("s", UNIQUE)
    theirs = world.client().open_writer("s", UNIQUE)
    theirs.compare_and_append([row(1, "a")], 0, 1)
    ours.fetch_upper()
    world.rival.before_next(lambda: theirs.advance_upper(5))
    for call in (ours.compare_and_append, ours.append):
        with pytest.raises(UpperMismatch):
            call([row(1, "b", 5)], 5, 6)
    assert contents(world) == {(1, "a"): 1}


def test_of_appends_in_one_commit_those_before_the_one_that_breaks_are_made(make: Callable[..., Any]) -> None:
    threaded = make()
    write = threaded.client.open_writer("u", UNIQUE)
    write.compare_and_append([row(1, "a")], 0, 1)
    threaded.gate.shut()
    first = write.append_async([row(2, "b", 1)], 1, 2)
    assert threaded.gate.waiting.wait(10)
    rest = [
        write.append_async([row(id_, "c", time)], time, time + 1) for time, id_ in enumerate([10, 11, 2, 12, 13], 2)
    ]
    threaded.gate.open.set()
    assert first.result(10).count == 1
    assert [future.result(10).upper for future in rest[:2]] == [persist.at(3), persist.at(4)]
    assert isinstance(rest[2].exception(10), ConstraintViolated)
    assert [type(future.exception(10)) for future in rest[3:]] == [NotSent, NotSent]
    assert write.fetch_upper() == persist.at(4)
    write.append_async([row(20, "d", 4)], 4, 5).result(10)


def test_a_repeated_append_answers_as_it_did_though_it_would_break_a_constraint_now(world: World) -> None:
    write = world.client().open_writer("s", UNIQUE)
    first = write.compare_and_append([row(1, "a")], 0, 1, token=b"mine")
    assert write.compare_and_append([row(1, "a")], 0, 1, token=b"mine").seqno == first.seqno
    also = write.append([row(2, "a", 1)], 1, 2, token=b"also")
    write.upsert([{"id": 3, "word": "x"}])
    assert write.append([row(2, "a", 1)], 1, 2, token=b"also").seqno == also.seqno


def test_constraints_are_part_of_the_schema_and_stay(world: World) -> None:
    client = world.client()
    client.open_writer("s", UNIQUE)
    with pytest.raises(SchemaMismatch, match="unique"):
        client.open_writer("s", persist.Schema(KEY, VALUE))
    wider = persist.Schema(KEY, {**VALUE, "more": "int64"}, unique=True)
    with pytest.raises(SchemaMismatch, match="constraints are unique, and cannot become none"):
        client.evolve_schema("s", persist.Schema(KEY, {**VALUE, "more": "int64"}))
    client.evolve_schema("s", wider)
    newer, older = client.open_writer("s", wider), client.open_writer("s", UNIQUE)
    newer.compare_and_append([{**row(1), "more": 3}], 0, 1)
    with pytest.raises(ConstraintViolated):
        older.compare_and_append([row(1, "x", 1)], 1, 2)
    older.compare_and_append([row(2, "x", 1)], 1, 2)
    assert world.client().open_reader("s").schema == wider


def test_a_format_without_constraints_refuses_them_and_a_row_says_which_it_needs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for format_ in (1, 2):
        client = world.client(persist.Config(format=format_))
        with pytest.raises(InvalidUsage, match=rf"a schema that needs format 3 .* in format {format_}"):
            client.open_writer(f"s{format_}", UNIQUE)
        assert client.shards() == []
    monkeypatch.setattr("persist_lib.core.formats.CREATED", 1)
    client = world.client()
    client.open_writer("s", UNIQUE)
    [first] = client.consensus.scan("s", 0, 1)  # type: ignore[arg-type]
    assert first.data[4] == 3  # the format, which a program that knows less refuses
    assert decode_row(first.data, "row").diff.schemas == (UNIQUE,)


def test_sums_beyond_64_bits_are_checked_exactly() -> None:
    most = 2**63 - 1
    schema = SIGNED
    old = pa.table({"id": [1], "word": ["a"], "_diff": [most]}).cast(schema.contents)
    rows = [(most, 5), (-most, 6), (-most, 7), (-1, 8)]
    updates = pa.table(
        {
            "id": [1] * 4,
            "word": ["a"] * 4,
            "_time": np.array([t for _, t in rows], np.uint64),
            "_diff": [d for d, _ in rows],
        }
    ).cast(schema.updates)
    found = find_violation(schema, old, consolidate(schema, updates))
    assert found is not None
    assert (found.constraint, found.time, found.rows) == ("non_negative", 8, [{"id": 1, "word": "a", "_diff": -1}])


@pytest.mark.parametrize("config", [persist.Config(), SMALL], ids=["inline", "objects"])
def test_the_exact_repeat_of_an_append_is_there_already_and_breaks_nothing(
    world: World, config: persist.Config
) -> None:
    """Its rows are in the shard: to check them against themselves would find each key twice."""
    one, other = (world.client(config).open_writer("s", UNIQUE) for _ in range(2))
    rows = [row(1, "a"), row(2, "b", 1)]
    one.append(rows, 0, 2)
    for write, lower, upper in ((one, 0, 2), (other, 0, 2), (other, 0, 1), (other, 1, 2)):
        again = write.append([r for r in rows if lower <= r["_time"] < upper], lower, upper)
        assert (again.upper, again.count) == (persist.at(2), 0)
    assert contents(world) == {(1, "a"): 1, (2, "b"): 1}
