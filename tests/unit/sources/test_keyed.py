"""Messages with keys: the key columns come from the key, deletions are messages without a value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

import persist_lib as persist
from persist_lib.sources.decoding import Decoding, KeyDecoder
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.pipeline import Made, Pipeline
from tests.unit.sources.messages import applied, messages

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string not null"}, times="ms")
TEXT = persist.Schema(key={"name": "string not null"}, value={"line": "string"}, times="ms")
UPSERT = Meaning(envelope="upsert")
Keyed = tuple[int, bytes | None, bytes | None]
"""A time, a key and a value."""


def messages_of(found: Sequence[Keyed], **more: pa.Array) -> pa.Table:
    keys = pa.array([key for _, key, _ in found], pa.binary())
    return messages([time for time, _, _ in found], [value for _, _, value in found], "t/0", key=keys, **more)


def apply(pipeline: Pipeline, found: Sequence[Keyed], old: Sequence[dict[str, Any]] = (), **more: pa.Array) -> Made:
    def lookup(keys: pa.Table) -> pa.Table:
        wanted = {tuple(row.values()) for row in keys.to_pylist()}
        rows = [row for row in old if tuple(row[name] for name in pipeline.schema.key_names) in wanted]
        return pa.Table.from_pylist([{**row, "_diff": 1} for row in rows], schema=pipeline.schema.contents)

    return applied(pipeline, messages_of(found, **more), lookup)


def updates(made: Made) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in made.output.to_pylist())


KEYS = st.sampled_from([b"1", b"2", b'{"id": 1}', b' {"id": 2}', b'{"id": 3}', b"x", b"", b'"1"', b"{}", None])
VALUES = st.sampled_from([b'{"word": "a"}', b'{"word": "b", "id": 9}', b'{"word": null}', b"bad", b"", None])


@given(
    st.lists(st.tuples(st.integers(1, 4), KEYS, VALUES), max_size=20).map(
        lambda them: sorted(them, key=lambda it: it[0])
    )
)
@settings(max_examples=150, deadline=None)
def test_keyed_messages_are_a_plain_fold(found: list[Keyed]) -> None:
    made = apply(Pipeline(Decoding(key="json"), UPSERT, SCHEMA), found)
    now: dict[int, str] = {}
    at: dict[int, dict[int, str]] = {}
    bad = []
    for number, (time, key, value) in enumerate(found):
        try:
            parsed = json.loads(key or b"")
            id_ = parsed["id"] if isinstance(parsed, dict) else parsed
            assert isinstance(id_, int)
            # JSON with a space before it is taken for the value of the column.
            assert key is not None
            assert not key.startswith(b" ")
            word = None if value is None else json.loads(value)["word"] if value else ""
            assert value is None or word is not None
        except (ValueError, KeyError, TypeError, AssertionError):
            if value != b"" or not key or key in {b"x", b'"1"', b"{}", b' {"id": 2}'}:
                bad.append(number)
            continue
        if value == b"":
            continue
        if word is None:
            now.pop(id_, None)
        else:
            now[id_] = word
        at[time] = dict(now)
    contents: dict[int, str] = {}
    everything = made.output.to_pylist()
    for time in range(1, 5):
        for row in [row for row in everything if row["_time"] == time and row["_diff"] < 0]:
            assert contents.pop(row["id"]) == row["word"]
        for row in [row for row in everything if row["_time"] == time and row["_diff"] > 0]:
            contents[row["id"]] = row["word"]
        if time in at:
            assert contents == at[time]
    assert sorted(row["address"] for row in made.errors.to_pylist()) == bad


def test_a_message_without_a_value_takes_its_keys_row_away() -> None:
    pipeline = Pipeline(Decoding(key="json"), UPSERT, SCHEMA)
    made = apply(pipeline, [(5, b"1", None), (5, b"2", None)], [{"id": 1, "word": "old"}])
    assert updates(made) == [(1, "old", 5, -1)]
    assert made.errors.num_rows == 0


def test_without_an_upsert_a_message_without_a_value_is_bad() -> None:
    made = apply(Pipeline(Decoding(key="json"), Meaning(), SCHEMA), [(5, b"1", None), (5, b"1", b'{"word": "a"}')])
    assert updates(made) == [(1, "a", 5, 1)]
    assert [row["reason"] for row in made.errors.to_pylist()] == ["there is no value"]


@pytest.mark.parametrize(("key", "kind"), [("text", "string"), ("bytes", "binary")])
def test_keys_and_values_may_be_texts_and_bytes(key: KeyDecoder, kind: str) -> None:
    schema = persist.Schema(key={"name": f"{kind} not null"}, value={"line": "string"}, times="ms")
    pipeline = Pipeline(Decoding(decoder="text", key=key), UPSERT, schema)
    made = apply(pipeline, [(1, b"a", b"one"), (1, b"b", b"two"), (2, b"a", None), (2, None, b"x")])
    name = (lambda it: it) if key == "text" else str.encode
    assert updates(made) == sorted(
        [(name("a"), "one", 1, 1), (name("b"), "two", 1, 1), (name("a"), "one", 2, -1)]
    )  # fmt: skip
    assert [row["reason"] for row in made.errors.to_pylist()] == ["there is no key"]


def test_an_empty_key_is_bad_and_not_silent() -> None:
    schema = persist.Schema(key={"a": "int64", "b": "int64"}, value={"word": "string"}, times="ms")
    found = [(1, b"", b'{"word": "x"}'), (1, b'{"a": 1, "b": 2}', b'{"word": "y"}')]
    made = apply(Pipeline(Decoding(key="json"), UPSERT, schema), found)
    assert updates(made) == [(1, 2, "y", 1, 1)]
    assert [(row["address"], row["reason"]) for row in made.errors.to_pylist()] == [(0, "the key is empty")]


def test_columns_may_hold_what_came_beside() -> None:
    schema = persist.Schema(
        key={"at": "uint64 not null"},
        value={"word": "string", "k": "binary", "h": "string", "w": "timestamp[ms, UTC]"},
        times="ms",
    )
    meaning = Meaning(include={"at": "address", "k": "key", "h": "headers", "w": "timestamp"}, keep_raw=True)
    beside = {"headers": pa.array(['[["a","1"]]']), "timestamp": pa.array([7], pa.timestamp("ms", "UTC"))}
    made = apply(Pipeline(Decoding(), meaning, schema), [(1, b"key", b'{"word": "a"}')], **beside)
    (row,) = made.output.to_pylist()
    assert (row["k"], row["h"], row["w"].timestamp()) == (b"key", '[["a","1"]]', 0.007)
    assert made.raw.to_pylist()[0]["headers"] == '[["a","1"]]'
    files = messages_of([(1, None, b'{"word": "a"}')]).drop_columns(["key"])
    (row,) = applied(Pipeline(Decoding(), meaning, schema), files, lambda keys: keys).output.to_pylist()
    assert (row["k"], row["h"], row["w"]) == (None, None, None)
