"""`persist shard log` with two versions: the difference of any two versions, whatever happened between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.core.diff import apply_diff, compare
from persist_lib.core.state import Batch, State, Version
from persist_lib.errors import NotFound
from persist_lib.ids import SeqNo, ShardId
from persist_lib.shard.log import fetch_at
from tests.commands import invoke

SCHEMA = persist.Schema(key={"id": "int64"})
CONFIG = persist.Config(inline_bytes=0, rollup_every=8)
ORDERS = ShardId("orders")


def versions(client: persist.Client) -> dict[int, State]:
    newest = client.inspect("orders")
    found = {}
    for seqno in range(newest.seqno + 1):
        try:
            found[seqno] = fetch_at(client.blob, client.consensus, ORDERS, newest, SeqNo(seqno)).state
        except NotFound:
            continue
    return found


def a_life(client: persist.Client, steps: list[str]) -> None:
    """Appends, merges, holds, retention, new columns, rollups."""
    write = client.open_writer("orders", SCHEMA)
    upper = 0
    for place, step in enumerate(steps):
        if step == "append":
            write.compare_and_append([{"id": upper}], upper, upper + 1)
            upper += 1
        elif step == "compact":
            client.compact("orders")
        elif step == "hold":
            client.set_hold("orders", f"hold-{place % 3}", client.inspect("orders").state.since)
        elif step == "retention":
            client.set_retention("orders", place)
        elif step == "rollup":
            client.roll_up("orders", force=True)
        else:
            client.retain("orders")
    write.close()


STEPS = st.lists(
    st.sampled_from(["append", "append", "append", "compact", "hold", "retention", "rollup", "retain"]), max_size=25
)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.data())
def test_the_older_state_and_the_difference_make_the_newer_one(steps: list[str], data: st.DataObject) -> None:
    with persist.open("memory:", config=CONFIG) as client:
        a_life(client, steps)
        found = versions(client)
        assert found[max(found)] == client.inspect("orders").state
    first, last = sorted([data.draw(st.sampled_from(sorted(found))), data.draw(st.sampled_from(sorted(found)))])
    older, newer = found[first], found[last]
    comparison = compare(older, newer)
    state = apply_diff(older, comparison.terms)
    trace: tuple[Batch, ...] = older.trace
    for edit in comparison.edits:
        start = next((place for place, batch in enumerate(trace) if batch.id in edit.removed), len(trace))
        assert tuple(batch.id for batch in trace[start : start + len(edit.removed)]) == edit.removed
        trace = trace[:start] + edit.added + trace[start + len(edit.removed) :]
    assert trace == newer.trace
    for name in (
        "since",
        "schemas",
        "writers",
        "readers",
        "holds",
        "retired",
        "garbage",
        "rollups",
        "retention",
        "format",
    ):
        assert getattr(state, name) == getattr(newer, name)
    assert not compare(newer, newer).edits
    unchanged = [edit for edit in comparison.edits if edit.added and edit.removed == tuple(b.id for b in edit.added)]
    assert all(edit.added != tuple(b for b in older.trace if b.id in edit.removed) for edit in unchanged)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=CONFIG) as client:
        a_life(client, ["append"] * 6 + ["hold", "compact", "append"])
        client.evolve_schema("orders", persist.Schema(key={"id": "int64"}, value={"note": "string"}))
    return url


def run(url: str, *words: object) -> Any:
    return invoke(*words, PERSIST_LOCATION=url)


def newest(url: str) -> Version:
    with persist.open(url, read_only=True) as client:
        return client.inspect("orders")


def test_frontiers_batches_holds_and_schemas_are_told(url: str) -> None:
    text = run(url, "shard", "log", "orders", "v3").stdout
    assert f"orders from v3 to v{newest(url).seqno}" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["upper", "[1]", "[7]"] in lines
    assert ["batches", "1", "2"] in lines
    assert ["updates", "1", "7"] in lines
    assert "hold hold-0: none → [0]" in text
    assert "schema (id: int64) -> (note: string)" in text
    assert "batches 0..1 → batch 0..6, times [0] to [6]: 6 updates" in text
    assert "+ batch 6..7, times [6] to [7]: 1 update" in text
    found = json.loads(run(url, "shard", "log", "orders", 3, "--json").stdout)
    assert (found["upper"], found["updates"], found["schemas"]) == (
        [[1], [7]],
        [1, 7],
        ["(id: int64) -> (note: string)"],
    )
    assert [[one["removed"], [batch["id"] for batch in one["added"]]] for one in found["batches"]] == [
        [[[0, 1]], [[0, 6]]], [[], [[6, 7]]],
    ]  # fmt: skip


def test_the_difference_of_neighbours_is_what_the_log_says(url: str) -> None:
    last = newest(url).seqno
    rows = json.loads(run(url, "shard", "log", "orders", "--from", 1, "--limit", 1000, "--json").stdout)["rows"]
    assert len(rows) == last
    for row in rows:
        found = json.loads(run(url, "shard", "log", "orders", row["seqno"] - 1, row["seqno"], "--json").stdout)
        assert sorted(found["changes"]) == sorted(row["changes"])


def test_a_version_is_the_same_state_however_it_is_reached(url: str) -> None:
    with persist.open(url, config=CONFIG) as client:
        before = versions(client)
        client.roll_up("orders", force=True)
        after = versions(client)
    assert before.items() <= after.items()
    assert "have the same state" in run(url, "shard", "log", "orders", 5, 5).stdout


@pytest.mark.parametrize(("words", "said"), [
    (("x",), "V1 must be a version"), (("3", "y"), "V2 must be a version"), (("-1",), ""), (("9", "3"), "in order"),
    (("1", "9999"), "none above the newest"), (("",), "V1 must be a version"), (("9" * 30,), "V1 must be a version"),
    (("v",), "V1 must be a version"),
])  # fmt: skip
def test_what_is_no_version_is_wrong_usage(url: str, words: tuple[str, ...], said: str) -> None:
    done = run(url, "shard", "log", "orders", *words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr


def test_a_version_that_was_truncated_is_named_with_those_that_are_there(url: str) -> None:
    with persist.open(url, config=CONFIG) as client:
        client.release_hold("orders", "hold-0")
        for _ in range(3):
            client.roll_up("orders", force=True)
            client.collect("orders")
        oldest = min(seqno for seqno in versions(client) if seqno)
    assert oldest > 1
    done = run(url, "shard", "log", "orders", 1)
    assert done.exit_code == 1
    assert f"The versions from v{oldest} to v{newest(url).seqno} are there" in done.stderr
    assert run(url, "shard", "log", "orders", oldest).exit_code == 0
    assert "Did you mean orders?" in run(url, "shard", "log", "order", 1).stderr
