"""Snapshots of many keys at once: what they hold, what they read, and what they refuse."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

import persist_lib as persist
from persist_lib.format import parquet
from persist_lib.kernel.keys import encode_row
from persist_lib.testing import contents_of

SCHEMA = persist.Schema({"id": "int64"}, {"word": "string"})
PAIRS = persist.Schema({"a": "string", "b": "double"}, {"n": "int64"})
QUIET = persist.Runtime(background=False)
PARTS = persist.Config(inline_bytes=0, part_bytes=64 * 1024)


@pytest.fixture
def client() -> Iterator[persist.Client]:
    with persist.open("memory:", runtime=QUIET) as opened:
        yield opened


def filled(client: persist.Client, rows: int = 10) -> persist.ReadHandle:
    write, read = client.open_shard("s", SCHEMA)
    ids = np.arange(rows)
    write.compare_and_append(pa.table({"id": ids * 2, "word": [f"w{n}" for n in ids]}), 0, 1)
    write.compare_and_append([{"id": 4, "word": "w2", "_diff": -1}, {"id": 4, "word": "new"}], 1, 2)
    return read


@pytest.mark.parametrize(
    "keys",
    [
        [4, 6, 5, 4], (6, 4), {4, 6}, range(4, 7), (n for n in [4, 6]), [(4,), (6,)], [{"id": 4}, {"id": 6}],
        [np.int64(4), np.uint8(6)], np.array([6, 4, 5]), pa.array([4, 6]), pa.chunked_array([[4], [6]]),
        pa.table({"id": [6, 4]}), pa.record_batch({"id": pa.array([4, 6], pa.int32())}), pd.DataFrame({"id": [4, 6]}),
        pd.Series([4, 6]), pd.Index([4, 6]), pl.DataFrame({"id": [4, 6]}), pl.Series([4, 6]),
        pa.table({"id": [4, 6], "_diff": [1, 1]}),
        [pa.table({"id": [4]}), 5, pl.DataFrame({"id": [6]})],
    ],
    ids=lambda keys: type(keys).__name__,
)  # fmt: skip
def test_keys_come_in_many_shapes(client: persist.Client, keys: Any) -> None:
    found = filled(client).snapshot(keys=keys, diff=True).to_pylist()
    assert found == [{"id": 4, "word": "new", "_diff": 1}, {"id": 6, "word": "w3", "_diff": 1}]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (4, "Put a single key into a list"), ("4", "Put a single key"), ({"id": 4}, "Put a single key"),
        (b"4", "Put a single key"), (..., "keys are a table"), (np.array(4), "keys are a table"),
        (["x"], "takes no str"), ([1.5], "exactly"), ([True], "bool"), ([[1]], "takes no list"),
        ([{"no": 1}], "are not in the schema"), ([{}], "missing"), ([{"id": 1, "word": "x"}], "are not in the schema"),
        (pa.table({"id": [1], "word": ["x"]}), "are not in the schema"), (pa.table({"id": ["x"]}), "takes no string"),
        (pa.table({"id": [1], "_diff": [2]}), "no _diff other than 1"), ([{"id": 1, "_time": 3}], "no _time"),
        ([2**64], "int64"), (pd.DataFrame({"x": [1]}), "not in"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_key_is_a_typed_error(client: persist.Client, keys: Any, says: str) -> None:
    with pytest.raises(persist.InvalidUsage, match=says):
        filled(client).snapshot(keys=keys, diff=True)


def test_null_is_a_key_where_the_column_allows_it_and_an_error_where_not(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([{"id": None, "word": "null"}, {"id": 0, "word": "zero"}], 0, 1)
    assert [row["word"] for row in read.snapshot(keys=[None], diff=True).to_pylist()] == ["null"]
    strict = client.open_shard("t", persist.Schema({"id": "int64 not null"}))[1]
    client.open_writer("t", strict.schema).advance_upper(1)
    with pytest.raises(persist.InvalidUsage, match="not null"):
        strict.snapshot(keys=[1, None], diff=True)


def test_keys_are_read_with_nothing_else_than_columns_and_a_time(client: persist.Client) -> None:
    read = filled(client)
    for more in ({"key": (4,)}, {"key_from": (4,)}, {"key_to": (4,)}):
        with pytest.raises(persist.InvalidUsage, match="either keys"):
            read.snapshot(keys=[4], **more, diff=True)  # type: ignore[arg-type]
    assert read.snapshot(0, keys=[4], diff=True).to_pylist() == [{"id": 4, "word": "w2", "_diff": 1}]
    assert read.snapshot(0, keys=[4], columns=["word"], diff=True).to_pylist() == [{"word": "w2", "_diff": 1}]
    assert read.snapshot(1, keys=[4], columns=["word"], diff=True).to_pylist() == [{"word": "new", "_diff": 1}]
    assert read.snapshot(1, keys=[4], columns=["id"], diff=True).to_pylist() == [{"id": 4, "_diff": 1}]
    empty = read.snapshot(keys=[], diff=True)
    assert empty.to_arrow().schema == empty.schema
    assert (empty.to_pylist(), list(empty.batches()), empty.size) == ([], [], 0)


def test_every_face_of_the_snapshot_has_the_same_rows(client: persist.Client) -> None:
    with persist.open("memory:", config=PARTS, runtime=QUIET) as other:
        read = filled(other, 30_000)
        keys = [*range(0, 60_000, 999), 5]
        with read.snapshot(keys=keys, diff=True) as snapshot, read.snapshot(diff=True) as whole:
            expected = {row: n for row, n in contents_of(whole.to_arrow()).items() if row[0] in keys}
            assert contents_of(snapshot.to_arrow()) == expected
            assert contents_of(pa.concat_tables(snapshot.batches())) == expected
            assert snapshot.to_pandas().shape == (len(expected), 3)
            splits = pickle.loads(pickle.dumps(snapshot.splits(5)))
            found = [split.to_arrow(other.blob) for split in splits]
            assert len(found) > 1
            assert contents_of(pa.concat_tables(found)) == expected
            assert hash(splits[0]) == hash(snapshot.splits(5)[0])
            low = snapshot.of_keys(None, splits[0].key_upper).to_arrow(other.blob)
            assert contents_of(low) == contents_of(found[0])


def test_compound_keys_and_models_and_json(client: persist.Client) -> None:
    write, read = client.open_shard("p", PAIRS)
    rows = [("a", math.nan, 1), ("a", 0.0, 2), ("a", -0.0, 3), ("a\0", 0.0, 4), (None, 0.0, 5)]
    write.compare_and_append([{"a": a, "b": b, "n": n} for a, b, n in rows], 0, 1)
    assert [row["n"] for row in read.snapshot(keys=[("a", -0.0), ("a", math.nan)], diff=True).to_pylist()] == [3, 1]
    assert [row["n"] for row in read.snapshot(keys=[{"b": 0.0, "a": None}], diff=True).to_pylist()] == [5]
    for wrong in ([("a",)], ["a"], [("a", 0.0, 1)]):
        with pytest.raises(persist.InvalidUsage, match="a tuple of 2 values"):
            read.snapshot(keys=wrong, diff=True)

    class Key(BaseModel):
        a: str | None
        b: float | None

    assert [row["n"] for row in read.snapshot(keys=[Key(a="a", b=0.0)], diff=True).to_pylist()] == [2]
    write, read = client.open_shard("j", persist.Schema.json())
    write.compare_and_append([("k", 1), ({"x": [1, 2]}, 2), ([1], 3)], 0, 1)
    for keys, values in ((["k"], ["1"]), ([{"x": [1, 2]}], ["2"]), ([[1], "no"], ["3"]), ([{"key": "k"}], ["1"])):
        assert [row["value"] for row in read.snapshot(keys=keys, diff=True).to_pylist()] == values
    assert read.snapshot(keys=pa.table({"key": [' "k"']}), diff=True).to_pylist()[0]["value"] == "1"


def test_only_the_parts_that_can_hold_a_key_are_read() -> None:
    with persist.open("memory:", config=PARTS, runtime=QUIET) as client:
        read = filled(client, 30_000)
        parts = [part for batch in client.inspect("s").state.trace for part in batch.parts]
        assert len(parts) > 10
        last = max(parts, key=lambda part: part.key_upper)
        snapshot = read.snapshot(keys=[59_998, 59_998, 70_000], diff=True)
        found_by = snapshot.cost.bytes_read
        assert len(snapshot.to_arrow()) == 1
        assert (snapshot.cost.gets, snapshot.cost.bytes_read - found_by, snapshot.size) == (1, last.size, last.size)
        nothing = read.snapshot(keys=[-5, 70_000], diff=True)
        assert (len(nothing.to_arrow()), nothing.cost.gets, nothing.size) == (0, 0, 0)


def test_only_the_chunks_of_the_row_groups_that_can_hold_a_key_are_read(tmp_path: Path) -> None:
    rows = 1_500_000
    schema = persist.Schema({"id": "int64"}, {"x": "int64", "y": "int64"})
    with persist.open(f"file:{tmp_path}/data", runtime=QUIET) as client:
        write, read = client.open_shard("s", schema)
        random = np.random.default_rng(1).integers(0, 2**62, (2, rows))
        write.compare_and_append(pa.table({"id": np.arange(rows) * 2, "x": random[0], "y": random[1]}), 0, 1)
        [part] = [part for batch in client.inspect("s").state.trace for part in batch.parts]
        chunk = 8 << 20
        assert 2 * chunk < part.size < 3 * chunk
        first = read.snapshot(keys=[0, 2, 4], diff=True)
        found_by = first.cost.bytes_read
        assert first.to_arrow().column("x").to_pylist() == random[0, :3].tolist()
        # The last chunk, which has the footer, and the one with the first row group.
        assert (first.cost.gets, first.cost.bytes_read - found_by) == (2, chunk + part.size % chunk)
        absent = read.snapshot(keys=[1], diff=True)
        assert len(absent.to_arrow()) == 0
        assert absent.cost.gets == 2
        beyond = read.snapshot(keys=[rows * 2], diff=True)
        assert (len(beyond.to_arrow()), beyond.cost.gets) == (0, 0)


@pytest.mark.parametrize("config", [persist.Config(), persist.Config(inline_bytes=0), PARTS], ids=["inline", "1", "n"])
@pytest.mark.parametrize("weight", [0.5, 1e9], ids=["levels", "one batch"])
def test_as_of_every_time_they_are_those_of_the_whole(config: persist.Config, weight: float) -> None:
    """Also where a compaction keeps history, so that a part has updates from before and after the time."""
    random = np.random.default_rng(7)
    with persist.open("memory:", config=config, runtime=QUIET) as client:
        write, read = client.open_shard("s", SCHEMA)
        for time in range(12):
            ids = random.integers(0, 40, 30 if time else 3_000)
            words, diffs = random.choice(["a", "b"], len(ids)), random.choice([-1, 1, 2], len(ids))
            write.compare_and_append(pa.table({"id": ids, "word": words.tolist(), "_diff": diffs}), time, time + 1)
            if time % 5 == 4:
                client.compact("s", policy=persist.Policy(weight=weight))
        for as_of in range(12):
            keys = random.integers(-3, 43, 9).tolist()
            expected = {
                row: n for row, n in contents_of(read.snapshot(as_of, diff=True).to_arrow()).items() if row[0] in keys
            }
            assert contents_of(read.snapshot(as_of, keys=keys, diff=True).to_arrow()) == expected
            words = read.snapshot(as_of, keys=keys, columns=["word"], diff=True).to_arrow()
            assert words.schema.names == ["word", "_diff"]
            assert sum(words.column("_diff").to_pylist()) == sum(expected.values())


def test_history_and_older_schemas_are_read_as_ever(client: persist.Client) -> None:
    wider = persist.Schema(SCHEMA.key, {"word": "string", "more": "int64"})
    read = filled(client)
    client.evolve_schema("s", wider)
    with client.open_writer("s", wider) as write:
        write.compare_and_append([{"id": 4, "word": "new", "more": 7}, {"id": 4, "word": "new", "more": None}], 2, 3)
    assert read.snapshot(keys=[4], diff=True).to_pylist() == [{"id": 4, "word": "new", "_diff": 3}]
    newer = client.open_reader("s").snapshot(keys=[4], diff=True).to_pylist()
    assert newer == [{"id": 4, "word": "new", "more": more, "_diff": n} for more, n in ((None, 2), (7, 1))]


def test_a_sum_that_does_not_fit_is_an_error_of_its_key_alone(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    most = 2**63 - 1
    write.compare_and_append([{"id": 1, "word": "x", "_diff": most}, {"id": 2, "word": "x"}], 0, 1)
    write.compare_and_append([{"id": 1, "word": "x", "_diff": most}], 1, 2)
    assert read.snapshot(keys=[2], diff=True).to_pylist() == [{"id": 2, "word": "x", "_diff": 1}]
    with pytest.raises(persist.DiffOverflow):
        read.snapshot(keys=[1], diff=True).to_arrow()


@pytest.mark.slow
def test_keys_are_found_as_their_bytes_say() -> None:
    from persist_lib.kernel.keyset import Keys  # noqa: PLC0415
    from persist_lib.kernel.order import sort_updates  # noqa: PLC0415

    random = np.random.default_rng(3)
    texts = np.array([None, "", "a", "a\0", "ab", "x" * 300, "x" * 300 + "y", "é"], object)
    floats = np.array([None, math.nan, 0.0, -0.0, 1.5, -1.5, math.inf], object)
    for _ in range(200):
        rows, wanted = int(random.integers(0, 60)), int(random.integers(0, 20))

        def some(count: int) -> dict[str, pa.Array]:
            return {
                "a": pa.array(random.choice(texts, count).tolist(), pa.string()),
                "b": pa.array(random.choice(floats, count).tolist(), pa.float64()),
            }

        table = pa.table({**some(rows), "n": pa.array(range(rows), pa.int64()), "_diff": pa.array([1] * rows)})
        table = sort_updates(PAIRS, table)
        asked = pa.table(some(wanted))
        keys = Keys.of(PAIRS, asked)
        names = {encode_row(PAIRS, asked, row) for row in range(wanted)}
        assert [encode_row(PAIRS, keys.table, row) for row in range(len(keys))] == sorted(names)
        found = [row for row in range(rows) if encode_row(PAIRS, table, row) in names]
        assert keys.find(table).tolist() == found
        there = {encode_row(PAIRS, table, row) for row in range(rows)}
        assert keys.found_in(table).tolist() == [name in there for name in sorted(names)]


def test_the_keys_of_one_snapshot_are_read_from_another(client: persist.Client) -> None:
    schema = persist.Schema({"id": "int64"}, {"word": "string"})
    orders, _ = client.open_shard("late", schema)
    orders.append_now([{"id": 2, "word": "late"}, {"id": 9, "word": "late"}])
    write, read = client.open_shard("all", schema)
    write.append_now([{"id": id_, "word": "w"} for id_ in range(5)])
    late = client.open_reader("late").snapshot(columns=["id"], diff=True)
    assert read.snapshot(keys=late, diff=True).to_pylist() == [{"id": 2, "word": "w", "_diff": 1}]
    assert write.delete(late).deleted == 1
    with pytest.raises(persist.PersistError, match="word"):
        read.snapshot(keys=client.open_reader("late").snapshot(diff=True), diff=True)


@pytest.mark.parametrize("is_newer", [False, True])
def test_rows_of_text_that_repeats_are_found_as_they_are(client: persist.Client, is_newer: bool) -> None:
    """Stored with dictionaries, which are others in each row group, and read by a schema with one more column."""
    schema = persist.Schema({"id": "int64"}, {"word": "string", "n": "int64"})
    write, read = client.open_shard("s", schema)
    ids = np.arange(20_000)
    words = [None if n % 7 == 0 else f"{n // 10_000} word {n % 5}" for n in ids.tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_ROWS", 5_000)
        write.compare_and_append(pa.table({"id": ids, "word": words, "n": ids}), 0, 1)
    if is_newer:
        newer = persist.Schema(schema.key, (*schema.value, *persist.Schema({"k": "bool"}, {"more": "string"}).value))
        client.evolve_schema("s", newer)
        read = client.open_reader("s")
    found = read.snapshot(keys=[3, 7, 9_999, 10_001, 19_998], diff=True).to_arrow()
    assert found.schema.field("word").type == pa.string()
    assert found.column("id").to_pylist() == [3, 7, 9_999, 10_001, 19_998]
    assert found.column("word").to_pylist() == [words[n] for n in (3, 7, 9_999, 10_001, 19_998)]
