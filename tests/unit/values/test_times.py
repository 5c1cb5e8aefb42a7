"""Times of a clock: exact both ways, in any zone, and the same in every process; durations; the next time."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from persist_lib.convert.times import read_column, shown_times
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME, TOP, at
from persist_lib.schema.schema import Schema
from persist_lib.times import END_S, PER_SECOND, UNITS, Times, moment, once, show_duration, show_time

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
NOW_MS = 1_795_305_600_123
ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Pacific/Apia", "Australia/Lord_Howe"]
)
UNIT = st.sampled_from(UNITS)
MOMENTS = st.datetimes(dt.datetime(1970, 1, 3), dt.datetime(9999, 12, 29), timezones=ZONES.map(ZoneInfo))  # noqa: DTZ001


def times(unit="ms", now_ms=NOW_MS):
    return Times(unit, lambda: now_ms)


def whole(found, unit):
    return found.replace(microsecond=found.microsecond // 1000 * 1000) if unit == "ms" else found


@drawn(found=MOMENTS, unit=UNIT)
def test_a_datetime_becomes_an_integer_and_is_shown_and_read_as_the_same_again(found, unit):
    found = whole(found, unit)
    time = times(unit).parse(found, "t")
    assert EPOCH + time * dt.timedelta(microseconds=1_000_000 // PER_SECOND[unit]) == found.astimezone(dt.UTC)
    shown = show_time(time, unit)
    assert shown.endswith("Z")
    assert times(unit).parse(shown, "t") == time
    assert moment(time, unit) == found.astimezone(dt.UTC)  # SUBTLE: Python's zones are never equal in a folded hour
    for written in (
        found.isoformat(), found.isoformat(" "), found.astimezone(dt.UTC).isoformat(timespec="microseconds"),
        np.datetime64(found.astimezone(dt.UTC).replace(tzinfo=None)), pd.Timestamp(found), pa.scalar(found),
    ):  # fmt: skip
        if isinstance(written, str) and found.utcoffset().seconds % 60:  # before zones had whole minutes
            continue
        assert times(unit).parse(written, "t") == time, repr(written)


@drawn(time=st.integers(0, END_S * 1_000_000 - 1), unit=UNIT)
def test_every_time_of_a_clock_is_shown_so_that_it_reads_back(time, unit):
    time = min(time, END_S * PER_SECOND[unit] - 1)
    assert times(unit).parse(show_time(time, unit), "t") == time
    assert times(unit).parse(moment(time, unit), "t") == time
    assert (
        times(unit).frontier(at(time), "t") == at(time) == times(unit).frontier(times(unit).show(at(time))[1:-1], "t")
    )


@drawn(found=MOMENTS, unit=UNIT)
def test_a_column_of_arrow_says_the_same_as_each_value_by_itself_and_comes_out_as_it_went_in(found, unit):
    found, schema = whole(found, unit), Schema(key={"k": "int64"}, times=unit)
    column = pa.chunked_array([pa.array([found], pa.timestamp("us", str(found.tzinfo)))])
    read = read_column(column, times(unit), 0)
    assert read.type == pa.uint64()
    assert read.to_pylist() == [times(unit).parse(found, "t")]
    table = pa.table([pa.array([1]), read.chunk(0), pa.array([1])], schema=schema.updates)
    shown = shown_times(schema, table)
    assert shown.schema == schema.changes
    assert read_column(shown["_time"], times(unit), 0) == read
    assert shown["_time"].to_pylist() == [found.astimezone(dt.UTC)]
    texts = pa.chunked_array([[show_time(read[0].as_py(), unit)] * 2])
    assert read_column(texts, times(unit), 0).to_pylist() == [read[0].as_py()] * 2


def test_the_hour_that_a_zone_has_twice_is_two_hours():
    berlin, unit = ZoneInfo("Europe/Berlin"), times()
    first, second = (dt.datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=fold) for fold in (0, 1))
    assert unit.parse(second, "t") - unit.parse(first, "t") == 3_600_000
    assert unit.parse(first, "t") == unit.parse("2026-10-25T02:30+02:00", "t")
    assert unit.parse(pd.Timestamp(second), "t") == unit.parse("2026-10-25T02:30+01:00", "t")


def test_an_update_before_1970_and_one_after_9999_have_no_time():
    for value in (
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=dt.UTC), "1969-12-31T23:59Z", -1, dt.date(1969, 12, 31),
        np.datetime64("1969-12-31"), np.datetime64(-1, "ms"), np.datetime64(-5, "Y"),
    ):  # fmt: skip
        with pytest.raises(InvalidUsage, match="clock starts at 1970"):
            times().parse(value, "t")
    for value in (END_S * 1000, MAX_TIME, np.datetime64(8030, "Y"), np.datetime64(10**18, "s")):
        with pytest.raises(InvalidUsage, match="after the year 9999"):
            times().parse(value, "t")
    assert times().frontier(END_S * 1000, "t") == at(END_S * 1000), "an upper may be at the end"
    assert times().show(at(END_S * 1000)) == f"[{END_S * 1000}]"
    with pytest.raises(InvalidUsage):
        times().frontier(at(END_S * 1000 + 1), "t")
    assert times().frontier([], "t") == times().frontier(TOP, "t") == TOP


@pytest.mark.parametrize(
    ("text", "ago_ms"),
    [
        ("now", 0),
        ("1 hour ago", 3_600_000),
        ("90 s ago", 90_000),
        ("1.5 hours ago", 5_400_000),
        ("2 weeks ago", 14 * 86_400_000),
        ("1 day 2 h 3 min 4 s 5 ms ago", 93_784_005),
        ("1 hour and 30 minutes ago", 5_400_000),
        ("  1 HOUR AGO ", 3_600_000),
        ("1h30min ago", 5_400_000),
        ("today", NOW_MS % 86_400_000),
        ("yesterday", NOW_MS % 86_400_000 + 86_400_000),
    ],
)
def test_relative_texts_are_exact(text, ago_ms):
    assert times().parse(text, "t") == NOW_MS - ago_ms
    assert times("us").parse(text, "t") == (NOW_MS - ago_ms) * 1000


@pytest.mark.parametrize(
    "text",
    [
        "ago",
        "hour ago",
        "1 ago",
        "an hour ago",
        "1 month ago",
        "1 m ago",
        "1 year ago",
        "- 1 hour ago",
        "1 hour",
        "in 1 hour",
        "tomorrow",
        "20261122",
        "2026-W47-7",
        "2026-11-22T12",
        "12:00",
        "2026-11-22x12:00Z",
        "1 hour ago ago",
        "1,5 h ago",
        "1 hour 2 ago",
        "now Z",
        "202\u0666-11-22",
        "\u0661 hour ago",
    ],
)
def test_what_is_not_exact_or_no_time_is_refused(text):
    with pytest.raises(InvalidUsage, match=r"^t "):
        times().parse(text, "t")


def test_the_clock_is_read_once_in_a_call_and_only_for_relative_texts():
    asked: list[int] = []

    def read() -> int:
        asked.append(1)
        return NOW_MS + len(asked)

    clock = once(read)
    found = Times("ms", clock)
    assert found.parse("2026-11-22T00:00Z", "t")
    assert asked == []
    assert found.parse("now", "t") == found.parse("now", "t") == Times("us", clock).parse("now", "t") // 1000
    assert asked == [1]


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("7 days", 604_800_000),
        ("1 hour", 3_600_000),
        ("90 s", 90_000),
        (dt.timedelta(days=7), 604_800_000),
        (5, 5),
        (np.int64(5), 5),
        (np.timedelta64(2, "h"), 7_200_000),
        (pd.Timedelta("1 day"), 86_400_000),
        ("1 day 12 h", 129_600_000),
        (0, 0),
        (dt.timedelta(0), 0),
    ],
)
def test_durations_are_numbers_of_the_unit(given, ms):
    assert times().distance(given, "d") == ms
    assert times().distance(show_duration(ms, "ms"), "d") == ms


@drawn(distance=st.integers(0, MAX_TIME), unit=UNIT)
def test_a_duration_is_shown_so_that_it_reads_back(distance, unit):
    assert times(unit).distance(show_duration(distance, unit), "d") == distance


@pytest.mark.parametrize(
    "given",
    [
        None,
        True,
        1.5,
        "",
        "7 months",
        "7",
        "days",
        "1 us",
        dt.timedelta(microseconds=1),
        dt.timedelta(-1),
        pd.NaT,
        np.timedelta64("NaT"),
        pd.Timedelta(1, "ns"),
        np.timedelta64(1, "M"),
        -1,
        2**70,
        "9" * 90 + " days",
        [7],
        dt.time(7),
    ],
)
def test_what_is_no_duration_is_refused(given):
    with pytest.raises(InvalidUsage):
        times().distance(given, "d")


def test_a_shard_of_integers_knows_no_durations():
    for given in ("7 days", dt.timedelta(days=7), np.timedelta64(7, "D")):
        with pytest.raises(InvalidUsage, match="plain integers, which have no days"):
            times(None).distance(given, "d")
    assert times(None).distance(np.uint64(7), "d") == 7
    assert times(None).show_distance(1_000) == "1,000"


def test_processes_in_different_zones_agree():
    program = """
import datetime as dt
from persist_lib.times import Times
times = Times("ms", lambda: 1_795_305_600_123)
values = ["2026-11-22", dt.date(2026, 11, 22), "2026-11-22T12:00+02:00", "today", "yesterday", "1 hour ago",
          dt.datetime(2026, 11, 22, tzinfo=dt.UTC), dt.datetime.fromtimestamp(1_795_305_600).astimezone()]
print([times.parse(value, "t") for value in values], times.show(1_795_305_600_123))
"""
    zones = ("UTC", "America/New_York", "Asia/Kathmandu")
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "TZ": zone}, capture_output=True, text=True, check=True
        ).stdout
        for zone in zones
    }
    assert len(found) == 1
    assert "2026-11-22T00:00:00.123Z" in found.pop()
