"""Pipelines are what a plain loop over messages would make, and the same however many times are given at once."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import fastavro
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.sources.bindings import Bound, Step, Window, in_order, windows
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Made, Pipeline, made_of
from persist_lib.sources.protocol import Mark
from tests.unit.sources.messages import applied, messages

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")
Message = tuple[int, bytes | None]
"""A time and a value."""


def messages_of(found: Sequence[Message], **more: list[Any]) -> pa.Table:
    return messages([time for time, _ in found], [value for _, value in found], **more)


def nothing(_keys: pa.Table) -> pa.Table:
    return SCHEMA.contents.empty_table()


def apply(pipeline: Pipeline, found: Sequence[Message], **more: list[Any]) -> Made:
    return applied(pipeline, messages_of(found, **more), nothing)


def line(id_: object, word: object = "a", **more: object) -> bytes:
    return json.dumps({"id": id_, "word": word, **more}).encode()


GOOD = st.builds(line, st.integers(0, 4), st.sampled_from(["a", "b", None]))
BAD = st.sampled_from(
    [b"", b"{", b"[]", b"null", b'{"id": null, "word": "a"}', b'{"id": "x"}', b"\xff", b'{"id":1}{"id":2}']
)
TIMES = st.lists(st.integers(1, 5), max_size=25).map(sorted)


@st.composite
def histories(draw: st.DrawFn, deletes: bool = False) -> list[Message]:
    good = GOOD if not deletes else st.builds(
        lambda id_, word, gone: line(id_, word, gone=gone), st.integers(0, 4), st.sampled_from("ab"), st.booleans()
    )  # fmt: skip
    return [(time, draw(st.one_of(good, good, good, BAD))) for time in draw(TIMES)]


def parsed(value: bytes | None) -> dict[str, Any] | None:
    """The row of a good message, by the standard library."""
    try:
        row = json.loads(value or b"")
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("id"), int) else None


def plain_fold(found: list[Message]) -> Counter[tuple[Any, ...]]:
    """What an upsert makes of messages, one after the other."""
    now: dict[int, Any] = {}
    updates: Counter[tuple[Any, ...]] = Counter()
    for time, value in found:
        if (row := parsed(value)) is None:
            continue
        if row["id"] in now:
            updates[row["id"], now.pop(row["id"]), time] -= 1
        if not row.get("gone"):
            now[row["id"]] = row.get("word")
            updates[row["id"], row.get("word"), time] += 1
    return Counter({update: diff for update, diff in updates.items() if diff})


def as_counter(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter({(row["id"], row["word"], row["_time"]): row["_diff"] for row in table.to_pylist()})


def errors_of(made: Made) -> list[tuple[int, bytes]]:
    return sorted((row["address"], row["raw"]) for row in made.errors.to_pylist())


def expected_errors(found: list[Message]) -> list[tuple[int, bytes]]:
    return [(n, value or b"") for n, (_, value) in enumerate(found) if value != b"" and parsed(value) is None]


@given(histories())
@settings(max_examples=60, deadline=None)
def test_without_an_envelope_each_good_message_is_a_row_and_each_other_one_an_error(found: list[Message]) -> None:
    made = apply(Pipeline(Decoding(), Meaning(), SCHEMA), found)
    rows = [(row["id"], row.get("word"), time) for time, value in found if (row := parsed(value)) is not None]
    assert as_counter(made.output) == Counter(rows)
    assert errors_of(made) == expected_errors(found)


@given(histories(deletes=True))
@settings(max_examples=80, deadline=None)
def test_an_upsert_is_a_plain_fold(found: list[Message]) -> None:
    pipeline = Pipeline(Decoding(), Meaning(envelope="upsert", deletes="gone"), SCHEMA)
    made = apply(pipeline, found)
    assert as_counter(made.output) == plain_fold(found)
    assert errors_of(made) == expected_errors(found)


@given(histories(deletes=True), st.data())
@settings(max_examples=60, deadline=None)
def test_times_together_are_times_one_by_one(found: list[Message], data: st.DataObject) -> None:
    """However a history is cut into windows of whole times, with the output before each as the state."""
    pipeline = Pipeline(Decoding(), Meaning(envelope="upsert", deletes="gone"), SCHEMA)
    whole = applied(pipeline, messages_of(found), nothing)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 5)))), 10]
    outputs: list[pa.Table] = [SCHEMA.updates.empty_table()]
    errors: list[pa.Table] = []
    table = messages_of(found)
    for low, high in pairwise(cuts):

        def lookup(keys: pa.Table, low: int = low) -> pa.Table:
            before = pa.concat_tables(outputs).filter(pc.field("_time") < low)
            summed = before.group_by(["id", "word"]).aggregate([("_diff", "sum")]).filter(pc.field("_diff_sum") != 0)
            summed = summed.filter(pc.is_in(summed["id"], value_set=keys["id"].combine_chunks()))
            return summed.rename_columns([*SCHEMA.names, "_diff"]).cast(SCHEMA.contents)

        part = table.filter((pc.field("_time") >= low) & (pc.field("_time") < high))
        made = applied(pipeline, part, lookup)
        outputs.append(made.output)
        errors.append(made.errors)
    assert as_counter(pa.concat_tables(outputs)) == as_counter(whole.output)
    assert sum(table.num_rows for table in errors) == whole.errors.num_rows


PLACED = st.tuples(st.integers(1, 5), st.sampled_from(["a/0", "a/1", "b/0"]), st.one_of(GOOD, GOOD, BAD))
AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "word", "type": "string"}]}


def as_avro(value: bytes) -> bytes:
    """The same row as Avro; what is not a row stays."""
    stream = io.BytesIO()
    try:
        fastavro.schemaless_writer(stream, AVRO, json.loads(value))
    except (ValueError, TypeError, AttributeError):
        return value
    return stream.getvalue()


@given(st.lists(PLACED, max_size=25).map(lambda found: sorted(found, key=itemgetter(0, 1))), st.booleans())
@settings(max_examples=80, deadline=None)
def test_each_output_is_what_the_messages_of_its_topic_make_alone(
    found: list[tuple[int, str, bytes]], is_avro: bool
) -> None:
    """And errors and raw messages are those of all, with the bytes that came."""
    decoding = Decoding(decoder="avro", avro=json.dumps(AVRO)) if is_avro else Decoding()
    meaning = Meaning(envelope="upsert", keep_raw=True)
    narrow = persist.Schema(key={"word": "string"}, value={"id": "int8"}, times="ms")
    pipelines = {name: Pipeline(decoding, meaning, schema) for name, schema in (("a", SCHEMA), ("b", narrow))}
    values = [as_avro(value) if is_avro else value for _, _, value in found]
    table = messages([time for time, _, _ in found], values, [partition for _, partition, _ in found])

    def lookup(role: str, _keys: pa.Table | None) -> pa.Table:
        return pipelines[role].schema.contents.empty_table()

    made = made_of(pipelines, lambda partition: partition[0], table, lookup)
    errors, raw = [], []
    for role, pipeline in pipelines.items():
        its = table.filter(pc.starts_with(table.column("partition"), role))
        alone = applied(pipeline, its, partial(lookup, role))
        assert made[role].equals(alone.output)
        errors += alone.errors.to_pylist()
        raw += alone.raw.to_pylist()
    assert sorted(made["errors"].to_pylist(), key=repr) == sorted(errors, key=repr)
    assert sorted(made["raw"].to_pylist(), key=repr) == sorted(raw, key=repr)
    assert {(row["address"], row["raw"]) for row in errors} <= set(enumerate(values))


def test_each_output_decodes_as_it_is_declared() -> None:
    """As a table of PostgreSQL does that got columns which another one of its source does not have."""
    pipelines = {
        "a": Pipeline(Decoding(extra="ignore"), Meaning(), SCHEMA),
        "b": Pipeline(Decoding(extra="refuse"), Meaning(), SCHEMA),
    }
    table = messages_of([(1, line(1, more=2)), (1, line(2, more=2))], partition=["a", "b"])
    made = made_of(pipelines, str, table, lambda _role, keys: nothing(keys))
    assert [made[role].num_rows for role in pipelines] == [1, 0]
    assert made["errors"].column("partition").to_pylist() == ["b"]


def change(op: str, before: object = None, after: object = None, **more: object) -> bytes:
    return json.dumps({"op": op, "before": before, "after": after, **more}).encode()


def test_changes_of_debezium_are_applied_by_key() -> None:
    rows = [{"id": n, "word": f"w{n}"} for n in range(3)]
    found = [
        (1, change("r", None, rows[0])), (1, change("c", None, rows[1])),
        (2, b'{"schema": {}, "payload": ' + change("u", None, {"id": 0, "word": "new"}) + b"}"),
        (2, change("d", {"id": 1, "word": None})), (3, b"null"), (3, None), (3, change("c", None, rows[2])),
        (3, change("c", None, rows[2])), (4, change("u", None, None)), (4, change("t")), (4, b"{"),
        (4, change("d", {"id": 0, "word": "whatever"})),
    ]  # fmt: skip
    made = apply(Pipeline(Decoding(), Meaning(envelope="debezium"), SCHEMA), found)
    assert as_counter(made.output) == Counter(
        {
            (0, "w0", 1): 1, (1, "w1", 1): 1, (0, "w0", 2): -1, (0, "new", 2): 1, (1, "w1", 2): -1, (2, "w2", 3): 1,
            (0, "new", 4): -1,
        }
    )  # fmt: skip
    assert [row["address"] for row in made.errors.to_pylist()] == [8, 9, 10]
    assert "emptied" in made.errors.to_pylist()[1]["reason"]


def test_csv_by_the_header_of_each_file() -> None:
    found = [(1, b"1,a"), (1, b"b,2\r"), (1, b"x,c"), (1, b"3"), (2, b'4,"q""q"'), (2, b'5,"open'), (2, b"6,z")]
    headers = ["id,word", "word,id", "id,word", "id,word", "id,word", "id,word", "id,other"]
    made = apply(Pipeline(Decoding(decoder="csv"), Meaning(), SCHEMA), found, header=headers)
    assert as_counter(made.output) == Counter({(1, "a", 1): 1, (2, "b", 1): 1, (4, 'q"q', 2): 1})
    assert [row["address"] for row in made.errors.to_pylist()] == [2, 3, 5, 6]


def test_text_and_bytes_fill_the_column_that_places_leave() -> None:
    schema = persist.Schema(
        key={"file": "string not null", "at": "uint64 not null"},
        value={"line": "string", "when": "timestamp[ms, UTC]"}, times="ms",
    )  # fmt: skip
    meaning = Meaning(include={"file": "partition", "at": "address", "when": "time"})
    found = [(1000, b"one\r"), (1000, b""), (2000, b"\xff"), (3000, None)]
    made = applied(Pipeline(Decoding(decoder="text"), meaning, schema), messages_of(found), nothing)
    rows = [(row["file"], row["at"], row["line"], row["when"].timestamp()) for row in made.output.to_pylist()]
    assert rows == [("p", 0, "one", 1.0), ("p", 1, "", 1.0)]
    assert [(row["address"], row["reason"]) for row in made.errors.to_pylist()] == [
        (2, "this is not UTF-8"), (3, "there is no value"),
    ]  # fmt: skip
    only = persist.Schema(key={"at": "uint64 not null"}, value={"data": "binary"}, times="ms")
    made = applied(
        Pipeline(Decoding(decoder="bytes"), Meaning(include={"at": "address"}), only), messages_of(found), nothing
    )
    assert [row["data"] for row in made.output.to_pylist()] == [b"one\r", b"", b"\xff"]


def test_rows_of_parquet_are_cast_and_those_that_do_not_fit_are_errors() -> None:
    values = pa.array([{"id": id_, "word": word} for id_, word in ((1.0, "a"), (1.5, "b"), (None, "c"), (2.0, None))])
    rows = messages_of([(1, None)] * 4).set_column(2, "value", values)
    made = applied(Pipeline(Decoding(decoder="rows"), Meaning(), SCHEMA), rows, nothing)
    assert as_counter(made.output) == Counter({(1, "a", 1): 1, (2, None, 1): 1})
    assert [row["address"] for row in made.errors.to_pylist()] == [1, 2]
    assert json.loads(made.errors.to_pylist()[0]["raw"]) == {"id": 1.5, "word": "b"}


def test_json_over_several_lines_is_one_message() -> None:
    found = [(1, b'{\n "id": 1,\n "word": "a"\n}'), (1, b'{"id": 2, "word": "a\nb"}'), (1, line(3))]
    made = apply(Pipeline(Decoding(), Meaning(), SCHEMA), found)
    assert as_counter(made.output) == Counter({(1, "a", 1): 1, (3, "a", 1): 1})
    assert [row["address"] for row in made.errors.to_pylist()] == [1]


def test_what_a_reader_could_not_give_is_an_error_with_its_reason() -> None:
    found = [(1, line(1)), (1, line(2))]
    made = apply(Pipeline(Decoding(), Meaning(keep_raw=True), SCHEMA), found, problem=[None, "too long"])
    assert as_counter(made.output) == Counter({(1, "a", 1): 1})
    assert [row["reason"] for row in made.errors.to_pylist()] == ["too long"]
    assert [row["value"] for row in made.raw.to_pylist()] == [line(1), line(2)]


def doubled(rows: pa.Table) -> pa.Table:
    """A user's function: the word twice, for even ids only."""
    rows = rows.filter(pc.equal(pc.bit_wise_and(rows["n"], 1), 0))
    words = pc.binary_join_element_wise(rows["word"], rows["word"], "-")
    return pa.table({"id": rows["n"], "word": words, "_time": rows["_time"]})


def shuffled(rows: pa.Table) -> pa.Table:
    return rows.sort_by([("_time", "descending")])


def test_a_function_in_the_middle() -> None:
    decoded = persist.Schema(key={"n": "int64 not null"}, value={"word": "string"})
    name = f"{__name__}:doubled"
    found = [(1, b'{"n": 1, "word": "a"}'), (2, b'{"n": 2, "word": "b"}')]
    made = apply(Pipeline(Decoding(), Meaning(transform=name), SCHEMA, decoded), found)
    assert as_counter(made.output) == Counter({(2, "b-b", 2): 1})
    with pytest.raises(InvalidUsage, match="doubled failed: KeyError"):
        apply(Pipeline(Decoding(), Meaning(transform=name), SCHEMA), [(1, line(1))])
    wrong = Pipeline(Decoding(), Meaning(transform=f"{__name__}:shuffled", envelope="upsert"), SCHEMA)
    with pytest.raises(InvalidUsage, match="order of _time"):
        apply(wrong, [(1, line(1)), (2, line(2))])


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(1, 9), max_size=2), max_size=8), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_message_belongs_to_the_first_time_that_covers_it(grown: list[dict[str, int]], most: int) -> None:
    at = {"a": 0, "b": 0}
    steps: list[Step] = []
    expected: dict[tuple[str, int], int] = {}
    for number, more in enumerate(grown):
        time = 10 + 3 * number
        for partition, count in more.items():
            expected |= {(partition, address): time for address in range(at[partition], at[partition] + count)}
            at[partition] += count
        if more:
            steps.append(Step(time, {partition: Mark(at[partition]) for partition in more}))
    bound = Bound({}, tuple(steps), 100)
    found: dict[tuple[str, int], int] = {}
    end = 5
    for window in windows(bound, 5, most, lambda _, low, high: high - low):
        assert window.start == end
        end = window.end
        times = []
        places: list[tuple[str, int]] = []
        for partition, (low, high) in window.ranges().items():
            addresses = np.arange(low.address, high.address, dtype=np.uint64)
            times.append(window.times_of(partition, addresses))
            places += [(partition, address) for address in addresses.tolist()]
            assert all(window.start <= time < window.end for time in times[-1].tolist())
        if times:
            flat = np.concatenate(times)
            order = in_order(times)
            assert sorted(range(len(places)), key=lambda n: (flat[n], places[n])) == order.tolist()
            found |= dict(zip(places, flat.tolist(), strict=True))
        assert len(window.steps) == 1 or sum(h.address - l.address for l, h in window.ranges().values()) <= most  # noqa: E741
    assert end == 100
    assert found == expected


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9, unique=True).map(sorted))
@settings(max_examples=40, deadline=None)
def test_the_halves_of_a_window_give_the_times_that_it_gives(times: list[int]) -> None:
    steps = tuple(Step(time, {"p": Mark(n + 1), f"q{n % 2}": Mark(n + 1)}) for n, time in enumerate(times))
    window = Window(1, 12, {"p": Mark(0)}, steps)
    first, second = window.halves()
    assert (first.start, first.end, second.end) == (1, second.start, 12)
    assert first.steps + second.steps == steps
    assert first.ranges()["p"][1] == second.ranges()["p"][0]
    assert second.ranges()["p"][1] == window.ranges()["p"][1]
    addresses = np.arange(len(times), dtype=np.uint64)
    low = first.ranges()["p"][1].address
    found = [*first.times_of("p", addresses[:low]), *second.times_of("p", addresses[low:])]
    assert found == list(window.times_of("p", addresses)) == times


@pytest.mark.parametrize("most", [1, 1000])
def test_a_table_that_joins_has_a_window_of_its_own_that_starts_just_there(most: int) -> None:
    steps = tuple(
        Step(time, {"t" if time in {10, 30} else "log": Mark(time), **({"u": Mark(1)} if time == 31 else {})})
        for time in (10, 12, 14, 30, 31, 40)
    )
    found = list(windows(Bound({}, steps, 50), 5, most, lambda _p, low, high: high - low, ("t", "u")))
    assert [(one.start, one.end) for one in found[:2]] == [(5, 10), (10, 12)]
    alone = {one.start: one for one in found if any(set(step.marks) & {"t", "u"} for step in one.steps)}
    assert sorted(alone) == [10, 30, 31]
    assert all(len(one.steps) == 1 for one in alone.values())
    assert [step for one in found for step in one.steps] == [*steps]
    assert [one.end for one in found] == [*(one.start for one in found[1:]), 50]
