"""Every door by which a time comes into the library, as a function that answers which time the library understood.

A door that is new is entered here, and in the table of docs/design/0031-times-that-people-have.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

import persist_lib as persist
from persist_lib import pending_area, streams
from persist_lib.core.pending import PendingName, parse_pending_key
from persist_lib.location import open_location
from persist_lib.testing.faults import ManualClock

HOUR = 3_600_000
NOON = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
T = 1_795_305_600_000
"""The time that is meant everywhere: 2026-11-22T00:00:00Z, so that a date means it too. Now is an hour later."""
TOKEN = b"token"


class Place:
    """A shard whose upper is at `upper`, in a location of its own."""

    def __init__(self, times: Any = "ms", upper: int = T, target: int = T) -> None:
        self.clock = ManualClock((T + HOUR) * 1_000_000)
        self.target = target
        location = open_location("memory:", create=True, clock=self.clock)
        self.client = persist.open(location, runtime=self.clock.runtime(), config=persist.Config(timeout_s=5))
        self.schema = persist.Schema(key={"id": "int64"}, value={"w": "string"}, times=times)
        self.write, self.read = self.client.open_shard("s", self.schema)
        self.other = self.client.open_writer("t", self.schema)
        for write in (self.write, self.other):
            write.compare_and_append([], 0, target - 10)
            if upper > target - 10:
                write.compare_and_append([{"id": 1, "w": "a", "_time": target - 10}], target - 10, upper)

    def everything(self) -> list[object]:
        keys = self.client.consensus.list_keys()
        return [list(self.client.consensus.scan(key, 0, 10_000)) for key in sorted(keys)]  # type: ignore[arg-type]

    def since(self) -> int | None:
        return self.client.inspect("s").state.since.time


Door = Callable[[Place, Any], "int | None"]


def before(run: Callable[[Place, Any], object]) -> Door:
    """A door that moves upper of a shard that is before the time to the time."""

    def door(place: Place, value: Any) -> int | None:
        run(place, value)
        return place.write.fetch_upper().time

    return door


def exactly(run: Callable[[Place, Any], object]) -> Door:
    """A door that the library opens only for the time itself: upper is there, and would be refused anywhere else."""

    def door(place: Place, value: Any) -> int | None:
        run(place, value)
        return place.target

    return door


def judged(lower: int, upper: int, ask: Callable[[Place, Any], tuple[Any, Any]]) -> Door:
    """The outcome is known only of the append with exactly these bounds, which are relative to the time."""

    def door(place: Place, value: Any) -> int | None:
        place.write.compare_and_append([], place.target + lower, place.target + upper, token=TOKEN)
        found = place.client.judge_append("s", TOKEN, *ask(place, value))
        return place.target if found.answer == "committed" else -1

    return door


def appended(kind: Callable[[Any], Any]) -> Door:
    """A column of times; what comes out of `listen` says which time it was."""

    def door(place: Place, value: Any) -> int | None:
        place.write.compare_and_append(kind(value), place.target - 10, place.target + 1)
        place.write.flush()
        events = place.read.listen(place.target - 11, until=place.target + 1)
        tables = [event.table for event in events if isinstance(event, persist.Updates)]
        (time,) = pa.concat_tables(tables)["_time"].cast(pa.int64()).to_pylist()
        return time

    return door


def listened(place: Place, value: Any) -> int | None:
    """The first progress is the update after the time; there is one at the time itself, which must not be told."""
    place.write.append([{"id": 2, "w": "b", "_time": place.target}], place.target, place.target + 1)
    place.write.append([{"id": 3, "w": "c", "_time": place.target + 1}], place.target + 1, place.target + 2)
    events = place.read.listen(value, until=place.target + 2)
    ids = [row["id"] for event in events if isinstance(event, persist.Updates) for row in event.table.to_pylist()]
    return place.target if ids == [3] else -1


def put(place: Place, name: str, lower: Any, upper: Any, word: str = "") -> PendingName:
    """A batch of a writer of the collection u, with an update at its lower if there is a word."""
    with pending_area.Writer(place.client.url, "u", name, place.schema, runtime=place.clock.runtime()) as write:
        rows = [{"id": 1, "w": word, "_time": lower}] if word else []
        found = parse_pending_key(write.put(rows, lower, upper).key)
    assert found is not None
    return found


def chosen(place: Place, value: Any) -> int | None:
    """Writers disagree before the time and from it on: the choice is for what begins before it."""
    pending_area.create(place.client, "u", place.schema).close()
    with place.client.open_writer("u", place.schema, layer="pending") as write:
        if write.fetch_upper().time == 0:
            write.compare_and_append([], 0, place.target - 10)
    for lower in (place.target - 10, place.target):
        for name in ("a", "b"):
            put(place, name, lower, lower + 10, name)
    return pending_area.choose(place.client, "u", "a", value).upper.time


def contents(place: Place, value: Any) -> int | None:
    """The contents hold what happened at the time itself, and nothing later."""
    then_and_later(place)
    with pending_area.acquire_read_handle(place.client, "s") as read:
        assert sorted(row["id"] for row in read.contents(value).to_pylist()) == [1, 2]
    return place.target


def followed(place: Place, value: Any) -> int | None:
    """As `listened`, by the reader of a pending area."""
    then_and_later(place)
    with pending_area.acquire_read_handle(place.client, "s") as read:
        events = read.listen(value, until=place.target + 2)
        ids = [row["id"] for event in events if isinstance(event, persist.Updates) for row in event.table.to_pylist()]
    return place.target if ids == [3] else -1


def asked(ask: Callable[[Place, Any], Any], expected: list[int], time: str = "as_of") -> Door:
    """What is found has these of the rows before the time, at it and just after it, and says which time it is of."""

    def door(place: Place, value: Any) -> int | None:
        then_and_later(place)
        found = ask(place, value)
        assert ids(found) == expected
        answer: int | None = getattr(found, time)
        return answer

    return door


def then_and_later(place: Place) -> None:
    """Append an update at the time, and one just after it."""
    place.write.append(
        [{"id": 2, "w": "b", "_time": place.target}, {"id": 3, "w": "c", "_time": place.target + 1}],
        place.target, place.target + 2,
    )  # fmt: skip


def ids(found: Any) -> list[int]:
    return [row["id"] for row in found.to_pylist()]


def answered(ask: Callable[[Place, Any], Any], expected: object) -> Door:
    """The answer is that of the rows before the time and at it, or after it."""

    def door(place: Place, value: Any) -> int | None:
        then_and_later(place)
        return place.target if ask(place, value) == expected else -1

    return door


def restored(place: Place, value: Any) -> int | None:
    then_and_later(place)
    found = place.client.restore("s", value)
    assert ids(place.read.snapshot()) == [1, 2]
    return found.to


def until(place: Place, value: Any) -> int | None:
    place.write.append([], place.target, place.target + 5)
    events = list(place.read.listen(place.target - 11, until=value))
    return events[-1].frontier.time  # type: ignore[union-attr]


def held(verb: str) -> Door:
    def door(place: Place, value: Any) -> int | None:
        getattr(place.client, verb)("s", "audit", value)
        return place.client.inspect("s").state.holds["audit"].since.time

    return door


def downgraded(place: Place, value: Any) -> int | None:
    place.read.downgrade_since(value)
    return place.read.since.time


def staged(place: Place, lower: Any, upper: Any, *rows: dict[str, Any]) -> None:
    with place.write.stage(lower=lower, new_upper=upper) as stage:
        place.write.append_staged([stage.write(rows)])


def many(place: Place, lower: Any, upper: Any) -> None:
    place.client.compare_and_append_many(
        [persist.Append(place.write, [], lower, upper), persist.Append(place.other, [], lower, upper)]
    )


def streaming(place: Place) -> tuple[streams.StreamWriter, streams.StreamReader]:
    """A stream of its own with an update at the time and one just after it, both sealed."""
    runtime = streams.open(place.client, reentrance_id="doors")
    write, read = runtime.create_or_load(f"u{len(runtime.list())}", place.schema)
    rows = [{"id": 2, "w": "b", "_time": place.target}, {"id": 3, "w": "c", "_time": place.target + 1}]
    write.write(rows).result()
    return write, read


def sealed(place: Place, value: Any) -> int | None:
    return streaming(place)[0].seal(value).result().upper.time


def compacted(place: Place, value: Any) -> int | None:
    write, _ = streaming(place)
    write.seal(place.target + 2).result()
    write.allow_compaction(value).result()
    return write.since.time


def sourced(place: Place, value: Any) -> int | None:
    write, read = streaming(place)
    write.seal(place.target + 2).result()
    (contents, progress, *_) = streams.persisted_source(read, value, until=place.target + 2)
    assert [row["id"] for row in contents.table.to_pylist()] == [2]  # type: ignore[union-attr]
    return progress.frontier.time - 1  # type: ignore[union-attr,operator]


def listened_ahead(place: Place, value: Any) -> int | None:
    write, read = streaming(place)
    write.seal(place.target + 2).result()
    with read.listen(value, ahead="durable", until=place.target + 2) as events:
        found = [row["id"] for e in events if isinstance(e, persist.Updates) for row in e.table.to_pylist()]
    return place.target if found == [3] else -1


DOORS: dict[str, tuple[int, Door]] = {
    # where upper is (beside the time), and the door
    "compare_and_append(expected_upper)": (0, exactly(lambda p, v: p.write.compare_and_append([], v, p.target + 5))),
    "compare_and_append(new_upper)": (-10, before(lambda p, v: p.write.compare_and_append([], p.target - 10, v))),
    "compare_and_append([new_upper])": (-10, before(lambda p, v: p.write.compare_and_append([], p.target - 10, [v]))),
    "append_async(expected_upper)": (0, exactly(lambda p, v: p.write.append_async([], v, p.target + 5).result())),
    "append_async(new_upper)": (-10, before(lambda p, v: p.write.append_async([], p.target - 10, v).result())),
    "append(lower)": (
        0,
        exactly(lambda p, v: p.write.append([{"id": 5, "w": "x", "_time": p.target}], v, p.target + 1)),
    ),
    "append(new_upper)": (-10, before(lambda p, v: p.write.append([], p.target - 10, v))),
    "advance_upper": (-10, before(lambda p, v: p.write.advance_upper(v))),
    "finish(expected_upper)": (0, exactly(lambda p, v: p.write.finish(v))),
    "overwrite_staged(upper)": (0, exactly(lambda p, v: p.write.overwrite_staged([], upper=v))),
    "compare_and_append_many(expected_upper)": (0, exactly(lambda p, v: many(p, v, p.target + 5))),
    "compare_and_append_many(new_upper)": (-10, before(lambda p, v: many(p, p.target - 10, v))),
    "stage(lower)": (0, exactly(lambda p, v: staged(p, v, p.target + 1, {"id": 5, "w": "x", "_time": p.target}))),
    "stage(new_upper)": (-10, before(lambda p, v: staged(p, p.target - 10, v))),
    "judge_append(expected_upper)": (0, judged(0, 5, lambda p, v: (v, p.target + 5))),
    "judge_append(new_upper)": (-10, judged(-10, 0, lambda p, v: (p.target - 10, v))),
    "snapshot(as_of)": (0, asked(lambda p, v: p.read.snapshot(v), [1, 2])),
    "read(as_of)": (0, asked(lambda p, v: p.client.table("s").read(v), [1, 2])),
    "count(as_of)": (0, answered(lambda p, v: p.client.table("s").count(v), 2)),
    "changes(from_)": (0, asked(lambda p, v: p.read.changes(v), [3], "from_")),
    "changes(to)": (0, asked(lambda p, v: p.read.changes(None, v), [1, 2], "to")),
    "history(from_)": (0, answered(lambda p, v: p.client.table("s").history(v)["added"].to_pylist(), [1])),
    "history(to)": (0, answered(lambda p, v: p.client.table("s").history(None, v)["added"].to_pylist(), [1, 1])),
    "restore(to)": (0, restored),
    "listen(as_of)": (0, listened),
    "listen(until)": (0, until),
    "wait_for_upper": (0, exactly(lambda p, v: p.read.wait_for_upper(v, timeout=0))),
    "downgrade_since": (0, downgraded),
    "set_hold(since)": (1, held("set_hold")),
    "downgrade_hold(since)": (1, held("downgrade_hold")),
    "a stream's seal": (0, sealed),
    "a stream's allow_compaction": (0, compacted),
    "a stream's source": (0, sourced),
    "a stream's listen": (0, listened_ahead),
    "put(lower)": (0, lambda p, v: put(p, "a", v, p.target + 10).lower),
    "put(upper)": (0, lambda p, v: put(p, "a", p.target - 10, v).upper.time),
    "choose(through)": (0, chosen),
    "snapshot of a pending area": (0, contents),
    "listen to a pending area": (0, followed),
    "_time in dicts": (-10, appended(lambda v: [{"id": 2, "w": "b", "_time": v}])),
    "_time in tuples": (-10, appended(lambda v: [(({"id": 2}, {"w": "b"}), v, 1)])),
    "_time in Update": (-10, appended(lambda v: [persist.Update({"id": 2}, {"w": "b"}, v)])),
    "_time in pandas objects": (
        -10,
        appended(lambda v: pd.DataFrame({"id": [2], "w": ["b"], "_time": pd.Series([v], dtype=object)})),
    ),
}
ROUNDS_DOWN = (
    "snapshot(as_of)",
    "read(as_of)",
    "count(as_of)",
    "listen(as_of)",
    "changes(from_)",
    "changes(to)",
    "history(from_)",
    "history(to)",
    "restore(to)",
    "a stream's source",
    "a stream's listen",
    "snapshot of a pending area",
    "listen to a pending area",
)
"""Doors at which a time between two of the clock is the one before it: the contents are the same."""

BERLIN = ZoneInfo("Europe/Berlin")
KINDS: dict[str, Any] = {
    "int": T,
    "np.int64": np.int64(T),
    "np.uint64": np.uint64(T),
    "datetime in UTC": NOON,
    "datetime in Berlin": NOON.astimezone(BERLIN),
    "datetime with an offset": NOON.astimezone(dt.timezone(-dt.timedelta(hours=3.5))),
    "pandas": pd.Timestamp(NOON),
    "pandas in New York": pd.Timestamp(NOON).tz_convert("America/New_York"),
    "pandas in ms": pd.Timestamp(NOON).as_unit("ms"),
    "np.datetime64[D]": np.datetime64("2026-11-22"),
    "np.datetime64[ns]": np.datetime64("2026-11-22T00:00:00.000000000"),
    "np.datetime64[h]": np.datetime64("2026-11-22T00", "h"),
    "date": dt.date(2026, 11, 22),
    "ISO": "2026-11-22T00:00:00Z",
    "ISO of a day": "2026-11-22",
    "ISO in minutes": "2026-11-22 00:00Z",
    "ISO with a fraction": "2026-11-22T00:00:00.000000Z",
    "ISO with an offset": "2026-11-22T05:30:00+05:30",
    "ago": "1 hour ago",
    "ago in parts": "59 minutes 60 s ago",
    "today": "today",
    "Arrow": pa.scalar(NOON, pa.timestamp("us", "Europe/Berlin")),
    "Arrow in ns": pa.scalar(T * 10**6, pa.timestamp("ns", "UTC")),
}
WRONG: dict[str, Any] = {
    "bool": True,
    "float": 1.5,
    "whole float": float(T),
    "nan": float("nan"),
    "pd.NaT": pd.NaT,
    "np.NaT": np.datetime64("NaT"),
    "naive datetime": NOON.replace(tzinfo=None),
    "naive pandas": pd.Timestamp("2026-11-22"),
    "naive ISO": "2026-11-22T00:00:00",
    "naive Arrow": pa.scalar(NOON.replace(tzinfo=None)),
    "before 1970": dt.datetime(1969, 12, 31, 23, 59, tzinfo=dt.UTC),
    "negative": -2,
    "after 9999": 10**18,
    "us for ms": T * 1000,
    "empty text": "",
    "nonsense": "soon",
    "digits": str(T),
    "bytes": b"2026-11-22",
    "no such day": "2026-02-30",
    "no such hour": "2026-02-03T25:00Z",
    "months ago": "1 month ago",
    "minus": "-1 hour ago",
    "long ago": "999999 weeks ago",
    "timedelta": dt.timedelta(hours=1),
    "time": dt.time(12),
    "object": object(),
    "long": "x" * 10**6,
    "spaces": " " * 10**6 + "ago",
    "two": [T, T],
    "a list in a list": [[T]],
    "nothing in a list": [[]],
}
FINER: dict[str, Any] = {
    "microsecond": NOON.replace(microsecond=1),
    "nanosecond": pd.Timestamp(NOON) + pd.Timedelta(1, "ns"),
    "np ns": np.datetime64("2026-11-22T00:00:00.000000001"),
    "ISO": "2026-11-22T00:00:00.0001Z",
    "ISO beyond Python's": "2026-11-22T00:00:00.0000000001Z",
    "Arrow ns": pa.scalar(T * 10**6 + 1, pa.timestamp("ns", "UTC")),
    "ago": "3599999.9 ms ago",
}
"""Between T and the next time of a clock in milliseconds."""


def column(kind: pa.DataType, value: Any) -> pa.Table:
    return pa.table({"id": [2], "w": ["b"], "_time": pa.array([value], kind)})


COLUMNS: dict[str, Any] = {
    **{
        f"Arrow timestamp[{unit}, {zone}]": column(pa.timestamp(unit, zone), NOON)
        for unit in ("s", "ms", "us", "ns")
        for zone in ("UTC", "Europe/Berlin", "+05:30")
    },
    "Arrow date32": column(pa.date32(), dt.date(2026, 11, 22)),
    "Arrow date64": column(pa.date64(), dt.date(2026, 11, 22)),
    "Arrow int64": column(pa.int64(), T),
    "Arrow uint64": column(pa.uint64(), T),
    "Arrow float64": column(pa.float64(), float(T)),
    "Arrow text": column(pa.string(), "2026-11-22T01:00:00+01:00"),
    "Arrow large text": column(pa.large_string(), "2026-11-22T00:00Z"),
    "Arrow text of a day": column(pa.string(), "2026-11-22"),
    "Arrow relative text": column(pa.string_view(), "1 hour ago"),
    "Arrow dictionary": column(pa.timestamp("us", "UTC"), NOON).set_column(
        2, "_time", pa.array([NOON], pa.timestamp("us", "UTC")).dictionary_encode()
    ),
    "pandas": pd.DataFrame({"id": [2], "w": ["b"], "_time": [pd.Timestamp(NOON).tz_convert("Europe/Berlin")]}),
    "pandas of datetimes": pd.DataFrame({"id": [2], "w": ["b"], "_time": pd.Series([NOON], dtype=object)}),
    "pandas categories": pd.DataFrame({"id": [2], "w": ["b"], "_time": pd.Categorical([pd.Timestamp(NOON)])}),
    "pandas texts": pd.DataFrame({"id": [2], "w": ["b"], "_time": ["2026-11-22T00:00Z"]}),
    "polars": pl.DataFrame({"id": [2], "w": ["b"], "_time": [NOON]}),
    "polars texts": pl.DataFrame({"id": [2], "w": ["b"], "_time": ["2026-11-22T00:00:00.000Z"]}),
    "polars in Berlin": pl.DataFrame({"id": [2], "w": ["b"], "_time": [NOON.astimezone(BERLIN)]}),
}
WRONG_COLUMNS: dict[str, Any] = {
    "Arrow without a zone": column(pa.timestamp("us"), NOON.replace(tzinfo=None)),
    "Arrow bool": column(pa.bool_(), True),
    "Arrow finer": column(pa.timestamp("us", "UTC"), NOON.replace(microsecond=1)),
    "Arrow before 1970": column(pa.timestamp("s", "UTC"), -1),
    "Arrow after 9999": column(pa.int64(), 10**18),
    "Arrow text without a zone": column(pa.string(), "2026-11-22T00:00:00"),
    "Arrow nonsense": column(pa.string(), "soon"),
    "Arrow null": column(pa.timestamp("us", "UTC"), None),
    "Arrow fraction": column(pa.float64(), T + 0.5),
    "Arrow duration": column(pa.duration("s"), 5),
    "Arrow digits": column(pa.string(), str(T)),
    "pandas without a zone": pd.DataFrame({"id": [2], "w": ["b"], "_time": [pd.Timestamp("2026-11-22")]}),
    "pandas NaT": pd.DataFrame({"id": [2], "w": ["b"], "_time": pd.Series([pd.NaT], dtype="datetime64[ns, UTC]")}),
    "polars without a zone": pl.DataFrame({"id": [2], "w": ["b"], "_time": [NOON.replace(tzinfo=None)]}),
}
