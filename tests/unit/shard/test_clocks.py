"""A shard whose times are a clock: recorded for ever, refused where it cannot be stored, kept by every evolution."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.core.formats import NEWEST
from persist_lib.core.state import RETENTION
from persist_lib.errors import InvalidUsage, NewerFormat, SchemaMismatch, SinceViolation, TimedOut, UpperMismatch
from persist_lib.ids import SeqNo, parse_shard_id
from persist_lib.location import open_location
from persist_lib.testing.faults import ManualClock

KEY, VALUE = {"id": "int64"}, {"w": "string"}
CLOCK, PLAIN = persist.Schema(KEY, VALUE, times="ms"), persist.Schema(KEY, VALUE)
DAY = 86_400_000
START = 1_795_305_600_000
"""2026-11-22T00:00:00Z, in ms."""


@pytest.fixture
def clock():
    return ManualClock(START * 1_000_000)


@pytest.fixture
def client(clock):
    with persist.open(open_location("memory:", create=True, clock=clock), runtime=clock.runtime()) as client:
        yield client


def test_any_process_reads_from_the_location_that_times_are_a_clock(tmp_path):
    url = f"file:{tmp_path}/data"
    with persist.open(url) as client:
        client.open_writer("s", CLOCK).compare_and_append([{"id": 1, "w": "a", "_time": "2026-11-22"}], 0, "2026-11-23")
        client.roll_up("s", force=True)
    with persist.open(url, read_only=True) as client, client.open_reader("s") as reader:
        assert reader.schema == CLOCK
        assert reader.snapshot("2026-11-22T00:00Z", diff=True).to_pylist() == [{"id": 1, "w": "a", "_diff": 1}]
        assert reader.schema.moment(reader.upper) == dt.datetime(2026, 11, 23, tzinfo=dt.UTC)
        assert client.census("s").times == "ms"


@pytest.mark.parametrize("format_", [1, 2])
def test_a_format_that_cannot_say_so_is_refused_before_the_shard_is_created(format_):
    with persist.open("memory:", config=persist.Config(format=format_)) as client:
        with pytest.raises(InvalidUsage, match=rf"a schema that needs format 3 .* in format {format_}"):
            client.open_writer("s", CLOCK)
        assert client.shards() == []
        client.open_writer("s", PLAIN)


def test_a_program_that_knows_no_clocks_refuses_the_shard_and_touches_nothing(tmp_path, monkeypatch):
    """As a release before format 3 does. It reads the number of the format before anything else."""
    with persist.open(f"file:{tmp_path}/data") as client:
        client.open_writer("s", CLOCK).compare_and_append([], 0, "2026-11-22")
    monkeypatch.setattr("persist_lib.format.log.NEWEST", 2)
    with persist.open(f"file:{tmp_path}/data") as older:
        rows = older.consensus.scan(parse_shard_id("s"), SeqNo(0), 100)
        for use in (
            lambda: older.open_writer("s", CLOCK),
            lambda: older.open_writer("s", PLAIN),
            lambda: older.open_reader("s"),
            lambda: older.maintain("s"),
            lambda: older.set_retention("s", 5),
            lambda: older.evolve_schema("s", PLAIN),
            lambda: older.set_hold("s", "h", 0),
            lambda: older.finish("s"),
        ):
            with pytest.raises(NewerFormat, match=f"has format {NEWEST}"):
                use()
        assert older.consensus.scan(parse_shard_id("s"), SeqNo(0), 100) == rows


@pytest.mark.parametrize(
    ("first", "second"), [(CLOCK, PLAIN), (PLAIN, CLOCK), (CLOCK, persist.Schema(KEY, VALUE, times="us"))]
)
def test_it_cannot_be_changed_later(client, first, second):
    client.open_writer("s", first)
    wider = persist.Schema(KEY, {**VALUE, "more": "string"}, times=second.times)
    for newer in (second, wider):
        with pytest.raises(SchemaMismatch, match="cannot be changed to"):
            client.evolve_schema("s", newer)
        with pytest.raises(SchemaMismatch, match="times=ms"):
            client.open_writer("s", newer)
    assert client.inspect("s").state.schemas == (first,)


def test_an_evolution_keeps_it(client):
    write = client.open_writer("s", CLOCK)
    write.compare_and_append([{"id": 1, "w": "a", "_time": "2026-11-22"}], 0, "2026-11-23")
    wider = persist.Schema(KEY, {**VALUE, "more": "string"}, times="ms")
    client.evolve_schema("s", wider)
    client.open_writer("s", wider).compare_and_append(
        [{"id": 2, "w": "b", "more": "c", "_time": "2026-11-23"}], "2026-11-23", "2026-11-24"
    )
    read = client.open_reader("s")
    assert read.schema == wider
    assert [row["id"] for row in read.snapshot("2026-11-23", diff=True).to_pylist()] == [1, 2]


def test_contents_as_of_a_moment_have_what_happened_at_it(client):
    """Uppers are exclusive, and an as_of is not: as of 12:00 means all updates at 12:00 and before."""
    write, read = client.open_shard("s", CLOCK)
    rows = [
        {"id": n, "w": "a", "_time": dt.datetime(2026, 11, 22, 12, 0, 0, n * 1000, tzinfo=dt.UTC)} for n in range(3)
    ]
    write.compare_and_append(rows, 0, "2026-11-22T12:00:00.003Z")
    assert read.snapshot("2026-11-22T12:00Z", diff=True).to_arrow().num_rows == 1
    assert read.snapshot("2026-11-22T12:00:00.0019Z", diff=True).to_arrow().num_rows == 2
    assert read.snapshot(diff=True).as_of == read.snapshot("2026-11-22T12:00:00.002Z", diff=True).as_of
    with pytest.raises(TimedOut, match=r"to pass 2026-11-22T12:00:00.003Z, and upper is \[2026-11-22T12:00:00.003Z\]"):
        read.snapshot("2026-11-22T12:00:00.003Z", timeout=0, diff=True)
    assert repr(read.snapshot("2026-11-22T12:00Z", diff=True)) == "Snapshot('s', as_of=2026-11-22T12:00:00Z)"


def test_a_wait_for_a_moment_says_how_to_tell_that_nothing_came(client):
    write, read = client.open_shard("s", CLOCK)
    with pytest.raises(TimedOut, match=r"nothing came since then, write\.advance_upper\(\"now\"\) says so"):
        read.snapshot("now", timeout=0, diff=True)
    upper = write.advance_upper("now").upper
    assert upper.time is not None
    read.snapshot(upper.time - 1, timeout=0, diff=True)
    _, plain = client.open_shard("plain", persist.Schema({"id": "int64"}))
    with pytest.raises(TimedOut, match=r"wait longer, or ask for an earlier time$"):
        plain.snapshot(5, timeout=0, diff=True)


def test_what_listen_yields_goes_into_another_shard_unchanged(client):
    write, read = client.open_shard("s", CLOCK)
    rows = [{"id": n, "w": "a", "_time": START + n} for n in range(100)]
    write.compare_and_append(rows, 0, START + 100)
    (table,) = [event.table for event in read.listen(0, until=START + 100) if isinstance(event, persist.Updates)]
    assert table.schema == CLOCK.changes
    assert table["_time"].type == pa.timestamp("ms", "UTC")
    forms = {"arrow": table, "pandas": table.to_pandas(), "rows": table.to_pylist()}
    for name, updates in {**forms, "updates": persist.decode_rows(CLOCK, table)}.items():
        other, again = client.open_shard(name, CLOCK)
        other.compare_and_append(updates, 0, START + 100)
        assert client.inspect(name).state.fingerprint == client.inspect("s").state.fingerprint, name
        assert again.snapshot(START + 50, diff=True).to_arrow() == read.snapshot(START + 50, diff=True).to_arrow()


def test_errors_show_times_as_people_have_them(client):
    write, read = client.open_shard("s", CLOCK)
    write.compare_and_append([], 0, "2026-11-22T12:00Z")
    with pytest.raises(
        UpperMismatch, match=r"starts at \[2026-11-22T11:00:00Z\], but upper is \[2026-11-22T12:00:00Z\]"
    ):
        write.compare_and_append([], "2026-11-22T11:00Z", "2026-11-22T13:00Z")
    with pytest.raises(InvalidUsage, match=r"so \[2026-11-22T12:00:00Z\] must be before \[2026-11-22T11:00:00Z\]"):
        write.compare_and_append([], "2026-11-22T12:00Z", "2026-11-22T11:00Z")
    with pytest.raises(InvalidUsage, match=r"\[2026-11-22T12:00:00Z, \[\]\); found 2026-11-22T11:00:00Z"):
        write.compare_and_append([{"id": 1, "w": "a", "_time": "2026-11-22T11:00Z"}], "2026-11-22T12:00Z", [])
    read.downgrade_since("2026-11-22T10:00Z")
    with pytest.raises(SinceViolation, match=r"as_of 2026-11-22T09:00:00Z is before since \[2026-11-22T10:00:00Z\]"):
        read.snapshot("2026-11-22T09:00Z", diff=True)
    client.set_hold("s", "audit", "2026-11-22T11:00Z")
    with pytest.raises(SinceViolation, match=r"nothing can be held at \[2026-11-22T10:30:00Z\]"):
        client.set_hold("s", "audit", "2026-11-22T10:30Z")
    write.finish()
    with pytest.raises(UpperMismatch, match=r"starts at \[2026-11-22T12:00:00Z\], but the shard is closed"):
        write.compare_and_append([], "2026-11-22T12:00Z", "2026-11-22T13:00Z")


@pytest.mark.parametrize("given", ["7 days", dt.timedelta(days=7), 7 * DAY])
def test_retention_of_seven_days_moves_with_the_clock(client, clock, given):
    write = client.open_writer("s", CLOCK)
    client.set_retention("s", given)
    for day in range(1, 12):
        clock.advance(86_400)
        write.compare_and_append([{"id": day, "w": "a", "_time": "now"}], write.upper, START + day * DAY + 1)
        client.maintain("s")
        state = client.inspect("s").state
        assert state.holds[RETENTION].since == state.since == persist.at(START + (day - 7) * DAY)
        with client.open_reader("s") as read:
            assert read.snapshot("7 days ago", diff=True).as_of == START + (day - 7) * DAY
            with pytest.raises(SinceViolation, match="is before since"):
                read.snapshot("7 days 1 ms ago", diff=True)


def test_two_appends_of_one_call_have_the_same_now():
    ticks = iter(range(START, START + 1000))
    location = open_location("memory:", create=True, clock=lambda: next(ticks) * 1_000_000)
    with persist.open(location, runtime=persist.Runtime(background=False)) as client:
        one, two = client.open_writer("one", CLOCK), client.open_writer("two", CLOCK)
        client.compare_and_append_many([persist.Append(one, [], 0, "now"), persist.Append(two, [], 0, "now")])
        assert one.upper == two.upper
