"""What used to surface as an error of Python's or of another library is Persist's own, or simply works."""

from __future__ import annotations

import copy
import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

import persist_lib as persist
from persist_lib.arguments import LONGEST_SHOWN, shown
from persist_lib.testing import ManualClock
from tests.unit.client.public_calls import Unshowable as Bad
from tests.unit.client.public_calls import nested

QUIET = persist.Runtime(background=False)
SCHEMA = persist.Schema(key={"id": "int64"}, value={"word": "string"})
WORDS = ["b", "a", None, "b"]


@pytest.fixture
def client():
    with persist.open("memory:", runtime=QUIET) as opened:
        yield opened


# --- categories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pl.Series(WORDS, dtype=pl.Categorical),
        pl.Series(WORDS, dtype=pl.Enum(["a", "b", "unused"])),
        pd.Series(pd.Categorical(WORDS)),
        pd.Series(pd.Categorical(WORDS, categories=["b", "a"], ordered=True)),
        pd.Series(pd.Categorical(WORDS, categories=["a", "b", 5])),
        pa.array(WORDS, pa.string_view()).cast(pa.string()).dictionary_encode(),
    ],
    ids=["polars Categorical", "polars Enum", "pandas", "pandas ordered", "pandas mixed", "Arrow"],
)
def test_categories_are_appended_as_the_text_they_stand_for(client: persist.Client, words: Any) -> None:
    ids = list(range(len(WORDS)))
    if isinstance(words, pl.Series):
        frame: Any = pl.DataFrame({"id": ids, "word": words})
    elif isinstance(words, pd.Series):
        frame = pd.DataFrame({"id": ids, "word": words})
    else:
        frame = pa.table({"id": ids, "word": words})
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append(frame, 0, 1)
    write.append_async(frame, 1, 2).result()
    write.compare_and_append(frame[:0], 2, 3)
    write.compare_and_append([frame[:2], frame[2:]], 3, 4)
    found = [(row["id"], row["word"], row["_diff"]) for row in read.snapshot(3, diff=True).to_pylist()]
    assert found == [(n, word, 3) for n, word in enumerate(WORDS)]


def test_categories_of_something_else_are_refused_with_the_value(client: persist.Client) -> None:
    write = client.open_writer("s", SCHEMA)
    for frame in (
        pd.DataFrame({"id": [1], "word": pd.Categorical([7])}),
        pd.DataFrame({"id": [1, 2], "word": pd.Categorical(["a", 7])}),
        pl.DataFrame({"id": pl.Series(["x"], dtype=pl.Categorical), "word": ["a"]}),
    ):
        with pytest.raises(persist.SchemaMismatch, match="takes no"):
            write.compare_and_append(frame, 0, 1)


# --- values that cannot be shown -------------------------------------------------------------------------------------


class Wordy:
    def __repr__(self) -> str:
        return "x" * 10_000_000


@pytest.mark.parametrize(
    "value",
    [nested(100_000), Bad(), [Bad()], {1: Bad()}, Wordy(), "x" * 10_000_000, b"x" * 10_000_000, list(range(1_000_000)),
     {str(n): n for n in range(100_000)}, 10**10_000, -(10**5_000), pa.table({"a": list(range(10_000))}),
     np.arange(10**6), type("list", (), {})(), [["x" * 1000] * 100] * 100],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_shown_of_a_value_is_short_and_never_fails(value: object) -> None:
    assert 0 < len(shown(value)) <= LONGEST_SHOWN


def test_what_is_short_is_shown_as_it_is_and_without_passwords() -> None:
    for value in (5, "x", b"x", None, [1, "a"], {"id": "int64"}, (1, 2), 1.5, persist.at(5)):
        assert shown(value) == repr(value)
    password = "p4ss" * 200
    for url in (f"postgresql://me:{password}@host/db", [f"postgresql://me:{password}@host/db"]):
        assert "p4ss" not in shown(url)


def test_json_that_is_a_little_deep_comes_back(client: persist.Client) -> None:
    write, read = client.open_shard("j", persist.Schema.json())
    write.compare_and_append([("k", nested(200))], 0, 1)
    assert persist.decode_rows(persist.Schema.json(), read.snapshot(0, diff=True).to_arrow())[0].value == nested(200)


@pytest.mark.parametrize("value", [nested(100_000), {"a": Bad()}, Bad(), "\ud800"])
def test_json_that_has_no_text_is_refused_whatever_its_repr_does(client: persist.Client, value: object) -> None:
    write = client.open_writer("j", persist.Schema.json())
    for rows in ([{"key": "k", "value": value}], [("k", value)], [persist.Update(value, "v")]):
        with pytest.raises(persist.InvalidUsage, match="JSON") as told:
            write.compare_and_append(rows, 0, 1)
        assert len(told.value.message) < 2000


def test_json_text_that_is_nested_too_deep_is_refused_written_or_read(client: persist.Client) -> None:
    text = "[" * 100_000 + "]" * 100_000
    write = client.open_writer("j", persist.Schema.json())
    with pytest.raises(persist.InvalidUsage, match="JSON"):
        write.compare_and_append(pa.table({"key": ["1"], "value": [text]}), 0, 1)
    with pytest.raises(persist.InvalidUsage, match="JSON"):
        persist.decode_rows(persist.Schema.json(), pa.table({"key": ["1"], "value": [text]}))


@pytest.mark.parametrize("value", [nested(100_000), Bad(), [Bad()], {"a": nested(5000)}])
@pytest.mark.parametrize("column", ["id", "word", "_time", "_diff"])
def test_such_a_value_in_any_column_is_a_typed_error(client: persist.Client, column: str, value: object) -> None:
    write = client.open_writer("s", SCHEMA)
    with pytest.raises(persist.InvalidUsage, match=column):
        write.compare_and_append([{"id": 1, "word": "w", "_time": 0, "_diff": 1, column: value}], 0, 1)
    for rows in ([value], [({"id": value}, {"word": "w"})], [(value, {"word": "w"})], [{1: 1, "a": value}]):
        with pytest.raises(persist.InvalidUsage):
            write.compare_and_append(rows, 0, 1)
    with pytest.raises(persist.InvalidUsage):
        client.open_reader("s").snapshot(key=(value,), diff=True)


def test_a_bool_is_no_number_in_a_key(client: persist.Client) -> None:
    client.open_writer("s", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    with client.open_reader("s") as read:
        with pytest.raises(persist.InvalidUsage, match="id"):
            read.snapshot(key=(True,), diff=True)
        assert read.snapshot(key=(np.int64(1),), diff=True).to_pylist() == [{"id": 1, "word": "w", "_diff": 1}]


def test_run_ends_of_views_are_appended(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    words = pa.RunEndEncodedArray.from_arrays([2, 3, 5], pa.array(["a", None, "b"]).cast(pa.string_view()))
    write.compare_and_append(pa.table({"id": range(4), "word": words[1:]}), 0, 1)
    assert [row["word"] for row in read.snapshot(0, diff=True).to_pylist()] == ["a", None, "b", "b"]


class Key(BaseModel):
    id: int


@pytest.mark.parametrize(
    "updates",
    [
        np.array(5),
        [(Key.model_construct(), {"word": "w"})],  # type: ignore[call-arg]
        [Key.model_construct()],  # type: ignore[call-arg]
        pd.DataFrame({"id": [1], "word": pd.Series([Decimal("sNaN")], dtype=object)}),
        pa.table({"id": [1], "word": pa.array([2**62], pa.timestamp("us", tz="UTC"))}),
    ],
    ids=["no dimensions", "no field in a key", "no field", "signalling NaN", "beyond Python's years"],
)
def test_what_only_looks_like_updates_is_a_typed_error(client: persist.Client, updates: Any) -> None:
    with pytest.raises(persist.InvalidUsage):
        client.open_writer("s", SCHEMA).compare_and_append(updates, 0, 1)


# --- mistakes with a clear answer ------------------------------------------------------------------------------------


def test_a_schema_that_is_none_is_told_how_to_write_one(client: persist.Client) -> None:
    for call in (
        lambda: client.open_shard("b", {"id": "int64"}),  # type: ignore[arg-type]
        lambda: client.evolve_schema("b", {"id": "int64"}),  # type: ignore[arg-type]
    ):
        with pytest.raises(persist.InvalidUsage, match=r"persist\.Schema\(key=\{'id': 'int64'\}, value="):
            call()
    with pytest.raises(persist.InvalidUsage, match=r"schema must be a persist\.Schema"):
        client.evolve_schema("b", {})  # type: ignore[arg-type]
    assert client.shards() == []


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_location_or_consensus_is_refused_by_name(empty: str, tmp_path: Path) -> None:
    with pytest.raises(persist.InvalidUsage, match=r"the location is empty.*variable that is not set"):
        persist.open(empty)
    with pytest.raises(persist.InvalidUsage, match="the consensus is empty"):
        persist.open(f"file:{tmp_path}/data", consensus=empty)
    with pytest.raises(persist.InvalidUsage, match="the consensus must be a URL"):
        persist.open(f"file:{tmp_path}/data", consensus=b"memory:")  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_frontiers_compare_with_nothing_else() -> None:
    for compare in ("__lt__", "__le__", "__gt__", "__ge__"):
        with pytest.raises(persist.InvalidUsage, match=r"persist\.at\(5\)"):
            getattr(persist.at(3), compare)(5)
    assert persist.at(3) != object()


def test_columns_may_come_from_an_iterator(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    assert read.snapshot(0, columns=iter(["word"]), diff=True).to_pylist() == [{"word": "w", "_diff": 1}]  # type: ignore[arg-type]


def test_a_listener_that_is_refused_registers_nobody(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    for wrong in ({"until": "x"}, {"timeout": "5"}, {"timeout": float("nan")}):
        with pytest.raises(persist.InvalidUsage):
            read.listen(0, **wrong)
    assert len(client.inspect("s").state.readers) == 1


def test_handles_say_what_to_pickle_instead(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    with read.snapshot(0, diff=True) as snapshot, read.listen(0) as listen:
        for thing, instead in [
            (client, "client.url"), (write, "Open one"), (read, "splits"), (snapshot, "splits"), (listen, "Listen"),
        ]:  # fmt: skip
            with pytest.raises(persist.InvalidUsage, match=instead):
                pickle.dumps(thing)
            with pytest.raises(persist.InvalidUsage, match="cannot be pickled"):
                copy.copy(thing)
        assert pickle.loads(pickle.dumps(snapshot.splits(1))) == snapshot.splits(1)


# --- a database in which somebody wrote ------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("data", ["text", 5, 1.5])
def test_a_row_that_is_no_blob_is_corrupt(tmp_path: Path, data: object, read_only: bool) -> None:
    url = f"file:{tmp_path}"
    with persist.open(url, runtime=ManualClock().runtime()) as client:
        client.open_writer("s", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    database = apsw.Connection(str(tmp_path / "consensus.sqlite"))
    database.execute("UPDATE consensus SET data = ? WHERE seqno = (SELECT max(seqno) FROM consensus)", (data,))
    database.close()
    with persist.open(url, read_only=read_only, runtime=QUIET) as client:
        with pytest.raises(persist.Corrupt, match="where bytes belong") as told:
            client.open_reader("s")
        assert told.value.key == "s"
        assert client.shards() == ["s"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_key_that_is_no_text_is_corrupt(tmp_path: Path, read_only: bool) -> None:
    url = f"file:{tmp_path}"
    with persist.open(url, runtime=QUIET) as client:
        client.open_writer("s", SCHEMA)
    database = apsw.Connection(str(tmp_path / "consensus.sqlite"))
    database.execute("INSERT INTO consensus VALUES (x'00ff', 1, x'00')")
    database.close()
    with (
        persist.open(url, read_only=read_only, runtime=QUIET) as client,
        pytest.raises(persist.Corrupt, match="no text"),
    ):
        client.shards()


def test_settings_are_refused_by_name_and_take_numpys_numbers() -> None:
    with pytest.raises(persist.InvalidUsage, match="memory_bytes"):
        persist.Config(cache={"memory_bytes": "much"})
    with pytest.raises(persist.InvalidUsage, match=r"lease_ms.*no bool"):
        persist.Config(lease_ms=True)
    config = persist.Config(lease_ms=np.int32(500), timeout_s=np.float32(1.5))
    assert json.loads(config.model_dump_json())["lease_ms"] == 500
    assert (type(config.lease_ms), type(config.timeout_s)) == (int, float)
