"""Writes from Spark without a JVM: the writers are made, pickled, given batches and asked to commit, as Spark does."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

import persist_lib as persist
from persist_lib.relation.stage import LEASE_S
from persist_lib.spark import options as spark_options
from persist_lib.spark import sink, write_plan
from persist_lib.spark.sink import Answer, BatchWriter, StreamWriter
from persist_lib.spark.types import arrow_schema, spark_schema
from tests.torture.roles import open_ahead

FRAME = t.StructType([t.StructField("id", t.LongType(), False), t.StructField("word", t.StringType())])
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
Rows = list[dict[str, Any]]


class Driver:
    """What Spark does around the writers of one query."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.options = {"location": str(folder), "table": "s", "key": "id", "times": "none", **options}
        self.query: str | None = "11111111-2222"

    def batch(
        self, tasks: Iterable[Rows], frame: t.StructType = FRAME, *, overwrite: bool = False, times: int = 1,
        commits: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        """A batch write. Each task runs `times` times; the last attempt counts. The step that commits may run again."""
        planned = BatchWriter({**self.options, **options}, frame, overwrite)
        writer = pickle.loads(pickle.dumps(planned))
        answers = [[self.run(writer, rows, frame) for _ in range(times)][-1] for rows in tasks]
        committing = pickle.loads(pickle.dumps(planned))
        try:
            for _ in range(commits):
                committing.commit(answers)
        except Exception:
            committing.abort(answers)
            raise

    def epoch(
        self, number: int, tasks: Iterable[Rows], frame: t.StructType = FRAME, *, overwrite: bool = False,
        commits: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        """An epoch of a stream."""
        given_ = {"checkpointLocation": "/checkpoints/s", **self.options, **options}
        writer = pickle.loads(pickle.dumps(StreamWriter(given_, frame, overwrite)))
        answers = [self.run(writer, rows, frame) for rows in tasks]
        for _ in range(commits):
            StreamWriter(given_, frame, overwrite).commit(answers, number)

    def run(self, writer: Any, rows: Rows, frame: t.StructType) -> Answer:
        batches = pa.Table.from_pylist(rows, schema=arrow_schema(frame)).to_batches(max_chunksize=2)
        found: Answer = pickle.loads(pickle.dumps(writer.write(iter(batches))))
        found.query = self.query if isinstance(writer, StreamWriter) else None
        return found


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    for found in write_plan._open.values():  # a process keeps them; tests after this one would renew their leases
        with suppress(persist.PersistError):
            found.controller.client.close()
    spark_options._client.cache_clear()
    write_plan._open.clear()
    sink._stages.clear()


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "data")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(tmp_path / "data") as opened:
        yield opened


def rows(*pairs: tuple[int, str | None]) -> Rows:
    return [{"id": id_, "word": word} for id_, word in pairs]


def contents(client: persist.Client, shard: str = "s") -> list[tuple[Any, ...]]:
    with client.open_reader(shard) as read:
        return sorted((tuple(row.values()) for row in read.snapshot(diff=True).to_arrow().to_pylist()), key=repr)


def test_a_batch_creates_the_shard_and_is_one_append(driver: Driver, client: persist.Client) -> None:
    driver.batch([rows((1, "a"), (2, None), (3, "c")), [], rows((1, "a"))], times=2)
    assert contents(client) == [(1, "a", 2), (2, None, 1), (3, "c", 1)]
    state = client.machine("s").fetch().state
    assert state.schemas[-1] == SCHEMA
    assert (state.upper, len(state.trace), dict(state.writers)) == (persist.at(1), 1, {})


@pytest.mark.parametrize("mode", [{}, {"upsert": "true"}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("count", [3, 9_000], ids=["inline", "objects"])
def test_a_step_that_commits_again_writes_once(
    driver: Driver, client: persist.Client, mode: dict[str, Any], count: int
) -> None:
    driver.batch([rows((0, "there"))])
    driver.batch([rows(*((id_, "a") for id_ in range(1, count))), rows((count, "a"))], commits=3, **mode)
    assert len(contents(client)) == count + ("overwrite" not in mode)
    assert {diff for *_, diff in contents(client)} == {1}


def test_changes_and_times_of_their_own(driver: Driver, client: persist.Client) -> None:
    changes = t.StructType([*FRAME, t.StructField("_diff", t.LongType(), False)])
    driver.batch([[{"id": 1, "word": "a", "_diff": 3}], [{"id": 1, "word": "a", "_diff": -1}]], changes)
    assert contents(client) == [(1, "a", 2)]
    timed = t.StructType([*changes, t.StructField("_time", t.LongType(), False)])
    driver.batch(
        [[{"id": 1, "word": "a", "_diff": -2, "_time": 5}, {"id": 2, "word": "b", "_diff": 1, "_time": 8}]],
        timed, lower="1", upper="10",
    )  # fmt: skip
    assert client.machine("s").fetch().state.upper == persist.at(10)
    with client.open_reader("s") as read:
        assert [read.snapshot(time, diff=True).to_arrow().num_rows for time in (4, 5, 8)] == [1, 0, 1]
    driver.batch([rows((7, "at"))], at="20")
    assert client.machine("s").fetch().state.upper == persist.at(21)


def test_columns_go_by_name_and_those_that_are_missing_are_null(driver: Driver, client: persist.Client) -> None:
    driver.batch([rows((1, "a"))])
    swapped = t.StructType([FRAME["word"], FRAME["id"]])
    driver.batch([[{"word": "b", "id": 2}]], swapped)
    driver.batch([[{"id": 3}]], t.StructType([FRAME["id"]]))
    narrow = t.StructType([t.StructField("id", t.IntegerType())])
    driver.batch([[{"id": 4}]], narrow)
    assert contents(client) == [(1, "a", 1), (2, "b", 1), (3, None, 1), (4, None, 1)]


def test_columns_with_defaults_that_are_missing_have_them(driver: Driver, client: persist.Client) -> None:
    schema = persist.Schema(
        {"id": "fixed_size_binary[16] not null default uuid()"},
        {"word": "string", "n": "int64 not null default 7", "made": "timestamp not null default now()"},
    )
    client.open_writer("s", schema).close()
    del driver.options["key"]
    driver.batch([[{"word": "a"}, {"word": "b"}], [{"word": "c"}]], t.StructType([FRAME["word"]]), times=2)
    found = contents(client)
    assert len({row[0] for row in found}) == 3
    assert sorted(row[1:3] for row in found) == [("a", 7), ("b", 7), ("c", 7)]
    assert all(isinstance(row[3], dt.datetime) for row in found)


WRONG: list[tuple[dict[str, str], t.StructType, bool, str]] = [
    ({"table": "other", "key": ""}, FRAME, False, "key"),
    ({"key": "idd", "table": "fresh"}, FRAME, False, "Did you mean"),
    ({"upsrt": "true"}, FRAME, False, "Did you mean"),
    ({"upsert": "yes"}, FRAME, False, "true or false"),
    ({"upsert": "true"}, FRAME, True, "append"),
    ({"deletes": "gone"}, FRAME, False, "upsert"),
    ({"deletes": "word", "upsert": "true"}, FRAME, False, "boolean"),
    ({"lower": "3"}, FRAME, False, "together"),
    ({"lower": "3", "upper": "5"}, FRAME, False, "_time"),
    ({"lease_s": "0"}, FRAME, False, "lease_s"),
    ({"at": "soon"}, FRAME, False, "soon"),
    ({"epoch": "3"}, FRAME, False, "query"),
    ({"query": "q", "epoch": "-3"}, FRAME, False, "epoch"),
    ({"query": "q@x", "epoch": "3"}, FRAME, False, "query"),
    ({"location": "memory:"}, FRAME, False, "memory"),
    ({}, t.StructType([FRAME["word"]]), False, "lacks"),
    ({}, t.StructType([*FRAME, t.StructField("worde", t.StringType())]), False, "Did you mean"),
    ({}, t.StructType([FRAME["id"], t.StructField("word", t.LongType())]), False, "takes no bigint"),
    ({}, t.StructType([*FRAME, t.StructField("_time", t.LongType())]), False, "lower"),
    ({}, t.StructType([*FRAME, FRAME["id"]]), False, "two columns"),
    ({"upsert": "true"}, t.StructType([*FRAME, t.StructField("_diff", t.LongType())]), False, "changes"),
    ({"key": "word"}, FRAME, False, "there already"),
    ({"unique": "true"}, FRAME, False, "there already"),
    ({"times": "ms"}, FRAME, False, "there already"),
    ({"times": "hours"}, FRAME, False, "ms"),
]


@pytest.mark.parametrize(("options", "frame", "overwrite", "message"), WRONG)
def test_what_is_wrong_is_refused_where_it_is_planned(
    driver: Driver, client: persist.Client, options: dict[str, str], frame: t.StructType, overwrite: bool, message: str
) -> None:
    driver.batch([rows((1, "a"))])
    before = client.machine("s").fetch().seqno
    with pytest.raises(persist.PersistError, match=message):
        BatchWriter({**driver.options, **options}, frame, overwrite)
    assert client.machine("s").fetch().seqno == before
    assert client.shards() == ["s"]


def test_a_shard_that_is_not_there_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(persist.NotFound, match="key"):
        BatchWriter({"location": str(tmp_path), "table": "s"}, FRAME, False)


def test_a_row_that_no_task_can_write_fails_the_write_once_and_writes_nothing(
    driver: Driver, client: persist.Client
) -> None:
    driver.batch([rows((1, "a"))])
    loose = t.StructType([t.StructField("id", t.LongType()), FRAME["word"]])
    with pytest.raises(persist.InvalidUsage, match=r"row 1 has null.*Nothing of this DataFrame was written"):
        driver.batch([rows((2, "b")), [{"id": 3, "word": "c"}, {"id": None, "word": "d"}]], loose)
    gone = t.StructType([*FRAME, t.StructField("gone", t.BooleanType())])
    with pytest.raises(persist.InvalidUsage, match="null in 1 rows"):
        driver.batch([[{"id": 1, "word": "a", "gone": None}]], gone, upsert="true", deletes="gone")
    assert contents(client) == [(1, "a", 1)]
    assert not client.machine("s").fetch().state.writers


def test_a_batch_with_a_query_and_an_epoch_is_written_once(driver: Driver, client: persist.Client) -> None:
    for _ in range(3):
        driver.batch([rows((1, "a"))], query="load", epoch="4")
    driver.batch([rows((9, "late"))], query="load", epoch="3")
    assert contents(client) == [(1, "a", 1)]
    driver.batch([rows((2, "b"))], query="load", epoch="5")
    assert contents(client) == [(1, "a", 1), (2, "b", 1)]


def test_each_epoch_of_a_stream_is_one_transition_and_made_once(driver: Driver, client: persist.Client) -> None:
    driver.epoch(0, [rows((0, "a"))])
    seqno = client.machine("s").fetch().seqno
    for number in range(1, 6):
        driver.epoch(number, [rows((number, "a")), []], commits=2)
        driver.epoch(number, [rows((number, "a"))])  # as after a restart
    assert client.machine("s").fetch().seqno == seqno + 5
    driver.epoch(6, [[], []])
    driver.epoch(7, [])
    assert client.machine("s").fetch().seqno == seqno + 5
    driver.epoch(8, [rows((8, "a"))])
    assert [row[0] for row in contents(client)] == [0, 1, 2, 3, 4, 5, 8]
    assert len(client.machine("s").fetch().state.writers) == 1


def test_a_stream_can_upsert_and_overwrite(driver: Driver, client: persist.Client) -> None:
    driver.epoch(0, [rows((1, "a"), (2, "b"))], upsert="true")
    driver.epoch(1, [rows((1, "new"))], upsert="true", commits=2)
    assert contents(client) == [(1, "new", 1), (2, "b", 1)]
    driver.epoch(2, [rows((5, "all"))], overwrite=True)
    assert contents(client) == [(5, "all", 1)]
    driver.epoch(2, [rows((6, "not again"))], overwrite=True)
    assert contents(client) == [(5, "all", 1)]


def test_two_drivers_of_one_query_write_each_epoch_once(driver: Driver, client: persist.Client, tmp_path: Path) -> None:
    other = Driver(tmp_path / "data")
    for number in range(4):
        for one in (driver, other) if number % 2 else (other, driver):
            one.epoch(number, [rows((number, "a"))])
    other.epoch(1, [rows((1, "zombie"))])
    assert [row[:2] for row in contents(client)] == [(number, "a") for number in range(4)]


def test_a_query_whose_checkpoint_was_deleted_is_refused(driver: Driver, client: persist.Client) -> None:
    queries: list[dict[str, Any]] = [{}, {"query": "orders"}, {"queryName": "named"}]
    for query in queries:
        driver.query = "old-id"
        driver.epoch(0, [rows((1, "a"))], **query)
        driver.epoch(1, [rows((2, "b"))], **query)
        driver.query = "new-id"
        before = contents(client)
        with pytest.raises(persist.InvalidUsage, match=r"epoch 1 .*checkpoint was deleted.*forget_producer") as caught:
            driver.epoch(0, [rows((1, "a"))], **query)
        assert contents(client) == before
        client.forget_producer("s", caught.value.producer, expected=caught.value.last)
        driver.epoch(0, [rows((1, "again"))], **query)
    driver.query = None
    with pytest.raises(persist.InvalidUsage, match="did not tell"):
        driver.epoch(5, [rows((1, "a"))], query="nameless")


def test_a_stream_without_a_stable_name_is_refused(driver: Driver) -> None:
    with pytest.raises(persist.InvalidUsage, match="checkpointLocation"):
        StreamWriter(driver.options, FRAME, False)
    for option in ("epoch", "at", "lower", "as_of"):
        with pytest.raises(persist.InvalidUsage, match=option):
            StreamWriter({**driver.options, "checkpointLocation": "/c", option: "3"}, FRAME, False)


def test_abort_deletes_nothing_that_was_committed(driver: Driver, client: persist.Client) -> None:
    big = [{"id": number, "word": f"word {number}"} for number in range(5000)]
    writer = BatchWriter(driver.options, FRAME, False)
    answers = [driver.run(writer, big, FRAME)]
    writer.commit(answers)
    writer.abort(answers)  # as after a commit whose answer was lost
    lost = BatchWriter(driver.options, FRAME, False)
    unused = driver.run(lost, big, FRAME)
    lost.abort([unused, None])
    assert client.audit_orphans("s").size == sum(part.size for part in _staged(unused).parts) > 0
    assert len(contents(client)) == 5000
    client.scrub("s")


def test_abort_of_an_epoch_deletes_nothing_that_was_committed(driver: Driver, client: persist.Client) -> None:
    """Spark calls it too after a commit whose answer was lost."""
    big = [{"id": number, "word": f"word {number}"} for number in range(5000)]
    options = {"checkpointLocation": "/checkpoints/s", **driver.options}
    writer = pickle.loads(pickle.dumps(StreamWriter(options, FRAME, False)))
    answers = [driver.run(writer, big, FRAME)]
    for step in (StreamWriter.commit, StreamWriter.abort, StreamWriter.commit, StreamWriter.abort):
        step(StreamWriter(options, FRAME, False), answers, 0)
    assert len(contents(client)) == 5000
    client.scrub("s")


def test_a_stream_writes_under_a_live_id_and_changes_it_in_time(driver: Driver, client: persist.Client) -> None:
    """An id that ended while no epoch was written is not used again, and one that is old is retired."""
    seen: list[set[str]] = []
    for number in range(4):
        driver.epoch(number, [[{"id": number * 10_000 + row, "word": f"word {row}"} for row in range(5000)]])
        seen.append(set(client.machine("s").fetch().state.writers))
        if number == 1:
            with open_ahead(client.url, random.Random(0), 2 * LEASE_S) as later:
                later.expire("s")
            assert not client.machine("s").fetch().state.writers
        if number == 2:
            ((place, staging),) = sink._stages.items()
            sink._stages[place] = staging._replace(until_s=-1.0)
    assert [len(ids) for ids in seen] == [1, 1, 1, 1]
    assert seen[0] == seen[1]
    assert seen[1] != seen[2] != seen[3]
    assert len(contents(client)) == 20_000
    client.scrub("s")


def _staged(answer: Answer) -> Any:
    return answer.staged


EXACT = persist.Schema(
    key={"id": "int64 not null"},
    value={
        "a": "bool", "b": "int8", "c": "int16", "d": "int32", "e": "uint8", "f": "uint16", "g": "uint32", "h": "uint64",
        "i": "float32", "j": "float64", "k": "string", "l": "binary", "m": "fixed_size_binary[3]", "n": "date32",
        "o": "time64[us]", "p": "timestamp[us, UTC]", "q": "timestamp[us]", "r": "duration[us]",
        "s": "decimal128(10, 2)", "t": "timestamp[ms]", "u": "timestamp[ns, Europe/Berlin]", "v": "duration[s]",
        "w": "json",
    },
)  # fmt: skip
MOMENT = dt.datetime(2026, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
VALUES = {
    "id": 1, "a": True, "b": -128, "c": -(2**15), "d": 2**31 - 1, "e": 255, "f": 2**16 - 1, "g": 2**32 - 1,
    "h": decimal.Decimal(2**64 - 1), "i": 1.5, "j": float("inf"), "k": "\0x", "l": b"\0\1", "m": b"abc",
    "n": dt.date(1, 1, 1), "o": dt.time(23, 59, 59, 999999), "p": MOMENT, "q": MOMENT.replace(tzinfo=None),
    "r": dt.timedelta(microseconds=-1), "s": decimal.Decimal("-12345678.90"), "t": MOMENT.replace(tzinfo=None),
    "u": MOMENT, "v": dt.timedelta(seconds=5), "w": '{"b": 1, "a":1.50}',
}  # fmt: skip


def test_all_types_arrive_exactly(driver: Driver, client: persist.Client) -> None:
    frame = spark_schema(EXACT.data, None)
    with client.open_writer("s", EXACT) as write:
        assert write.id
    nulls = dict.fromkeys(VALUES) | {"id": 2}
    driver.batch([[VALUES, nulls]], frame)
    with client.open_reader("s") as read:
        first, second = read.snapshot(diff=True).to_arrow().to_pylist()
    assert {**first, "_diff": 1} == {**VALUES, "h": 2**64 - 1, "w": '{"a":1.5,"b":1}', "_diff": 1}
    assert second == {**nulls, "_diff": 1}
    with pytest.raises(persist.InvalidUsage, match="'m'"):
        driver.batch([[{**VALUES, "m": b"four"}]], frame)
    with pytest.raises(persist.InvalidUsage, match="'e'"):
        driver.batch([[{**VALUES, "e": 256}]], frame)
    with pytest.raises(persist.InvalidUsage, match="'w' holds JSON"):
        driver.batch([[{**VALUES, "w": "no JSON"}]], frame)
    with pytest.raises(persist.InvalidUsage, match="'v'"):
        driver.batch([[{**VALUES, "v": dt.timedelta(microseconds=5)}]], frame)


pairs_ = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["a", "b", None])), max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["append", "upsert", "overwrite"]), pairs_, st.integers(0, 12)), max_size=6))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_writes_leave_what_a_dictionary_of_rows_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[tuple[int, str | None]], int]]
) -> None:
    folder = tmp_path_factory.mktemp("data")
    driver = Driver(folder)
    expected: dict[tuple[int, str | None], int] = {}
    with persist.open(folder) as client:
        for mode, given_, at in steps:
            written = given_
            if mode == "upsert":
                written = list(dict(given_).items())
            tasks = [rows(*written[:at]), rows(*written[at:])]
            options: dict[str, Any] = {"upsert": "true"} if mode == "upsert" else {}
            driver.batch(tasks, overwrite=mode == "overwrite", **options)
            if mode == "overwrite":
                expected = {}
            if mode == "upsert":
                keys = dict(written)
                expected = {row: count for row, count in expected.items() if row[0] not in keys}
            for row in written:
                expected[row] = expected.get(row, 0) + 1
            assert contents_or_nothing(client) == {row: count for row, count in expected.items() if count}
    spark_options._client.cache_clear()
    write_plan._open.clear()


def contents_or_nothing(client: persist.Client) -> dict[tuple[int, str | None], int]:
    if client.machine("s").fetch().state.upper == persist.at(0):
        return {}
    return {(id_, word): diff for id_, word, diff in contents(client)}
