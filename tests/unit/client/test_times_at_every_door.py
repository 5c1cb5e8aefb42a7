"""A time may be written in every way at every door, and means the same; what is no time is refused at each."""

from __future__ import annotations

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from tests.unit.client import doors
from tests.unit.client.doors import COLUMNS, DOORS, FINER, KINDS, ROUNDS_DOWN, WRONG, WRONG_COLUMNS, Place, T
from tests.unit.client.public_calls import LEGAL

EVERY_DOOR = pytest.mark.parametrize("name", DOORS)


@EVERY_DOOR
def test_a_time_means_the_same_at_every_door_however_it_is_written(name):
    at, door = DOORS[name]
    for kind, value in KINDS.items():
        assert door(Place(upper=T + at), value) == T, kind


@EVERY_DOOR
def test_a_clock_in_microseconds_takes_the_same(name):
    at, door = DOORS[name]
    for kind, value in KINDS.items():
        if not isinstance(value, int) and "int" not in kind:
            assert door(Place("us", T * 1000 + at, T * 1000), value) == T * 1000, kind


@EVERY_DOOR
def test_what_is_no_time_is_refused_and_changes_nothing(name):
    at, door = DOORS[name]
    place = Place(upper=T + at)
    for kind, value in WRONG.items():
        if kind == "whole float" and name.startswith("_time"):  # what pandas makes of integers beside gaps
            continue
        if name.startswith(("judge", "snapshot", "read", "count", "changes", "history", "restore", "listen")):
            door(place, T)  # which first appends what it then reads
        before = place.client.inspect("s"), place.client.inspect("t")
        with pytest.raises(InvalidUsage) as refused:
            pytest.fail(f"{kind} was taken as {door(place, value)}")
        assert len(refused.value.message) < 1000, kind
        after = place.client.inspect("s"), place.client.inspect("t")
        assert [one.state.upper for one in after] == [one.state.upper for one in before], kind
        assert [one.state.count for one in after] == [one.state.count for one in before], kind
        assert after[0].state.holds == before[0].state.holds, kind


@EVERY_DOOR
def test_what_the_clock_cannot_tell_apart_is_refused_or_for_contents_the_time_before(name):
    at, door = DOORS[name]
    for kind, value in FINER.items():
        if name in ROUNDS_DOWN:
            assert door(Place(upper=T + at), value) == T, kind
        else:
            with pytest.raises(InvalidUsage, match=r"(?i)nothing is rounded or cut silently"):
                pytest.fail(f"{kind} was taken as {door(Place(upper=T + at), value)}")


@EVERY_DOOR
def test_a_shard_whose_times_are_integers_says_so_and_takes_integers_of_numpy(name):
    at, door = DOORS[name]
    place = Place(None, T + at)
    for kind, value in KINDS.items():
        if "int" in kind:
            assert door(Place(None, T + at), value) == T, kind
            continue
        with pytest.raises(InvalidUsage, match="plain integers, not a clock"):
            pytest.fail(f"{kind} was taken as {door(place, value)}")


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("unit", ["ms", "us"])
def test_a_column_of_times_may_have_any_type_that_says_a_moment(kind, unit):
    target = T if unit == "ms" else T * 1000
    if unit == "us" and ("int" in kind or "float" in kind):
        pytest.skip("integers count the unit")
    door = doors.appended(lambda value: value)
    assert door(Place(unit, target - 10, target), COLUMNS[kind]) == target


@pytest.mark.parametrize("kind", WRONG_COLUMNS)
def test_a_column_that_holds_no_times_is_refused_with_its_row(kind):
    place = Place(upper=T - 10)
    with pytest.raises(InvalidUsage) as refused:
        place.write.compare_and_append(WRONG_COLUMNS[kind], T - 10, T + 1)
    assert refused.value.column == "_time"
    assert refused.value.row == 0
    assert place.write.fetch_upper() == persist.at(T - 10)


def test_the_row_that_is_wrong_is_named_in_long_columns_too():
    place = Place(upper=T - 10)
    for texts, wrong in ((["2026-11-22"] * 500 + ["soon"], 500), (["2026-11-22T00:00Z"] * 70 + ["1969-12-31"], 70)):
        table = pa.table({"id": range(len(texts)), "w": ["x"] * len(texts), "_time": texts})
        with pytest.raises(InvalidUsage) as refused:
            place.write.compare_and_append([table.slice(0, 3), table.slice(3)], T - 10, T + 1)
        assert refused.value.row == wrong


TIMES = ("as_of", "until", "frontier", "since", "expected_upper", "new_upper", "lower", "upper", "from_", "to")
NO_TIMES = (
    "Client.upgrade(to)",
    "Table.rename(to)",
    "Snapshot.of_keys(lower)",
    "Snapshot.of_keys(upper)",
    "Append(expected_upper)",
    "Append(new_upper)",
    "Client.pause(until)",
)
"""A format, a name, keys; a time to come, of no table; and what compare_and_append_many does when it is called."""


def test_every_public_argument_that_is_a_time_is_among_the_doors():
    calls = {f"{what.split(' of ')[0]}({one})" for what, (_, kinds) in LEGAL.items() for one in kinds if one in TIMES}
    known = {door.replace("([", "(").replace("])", ")") for door in DOORS}
    known |= {f"{door}({one})" for door in DOORS for one in TIMES if "(" not in door}
    missing = {call for call in calls - set(NO_TIMES) if call.partition(".")[2] not in known}
    assert not missing, "enter these in tests/unit/client/doors.py"
