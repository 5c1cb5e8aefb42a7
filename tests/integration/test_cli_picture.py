"""The picture of a trace: what it draws is what the state says, and the file is a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import persist_lib as persist
from examples.picture import boxes, draw_moments, draw_traces, fetch_states, main

SCHEMA = persist.Schema(key={"k": "int64"})


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file:{tmp_path / 'data'}"
    with persist.open(url) as client:
        write = client.open_writer("events", SCHEMA)
        for at in range(12):
            write.compare_and_append([{"k": k} for k in range(at % 4)], at, at + 1)
        client.open_writer("untouched", SCHEMA)
        closed = client.open_writer("closed", SCHEMA)
        closed.compare_and_append([{"k": 1, "_time": 3}], 0, persist.TOP)
    return url


def test_boxes_stand_side_by_side_over_all_times_as_high_as_their_updates(url: str):
    state = fetch_states(url, ["events"])["events"]
    left, right, height = boxes(state.trace, 99).T
    assert left[0] == 0
    assert right[-1] == 12
    np.testing.assert_array_equal(right[:-1], left[1:])
    assert height.sum() == state.count == 18


def test_before_and_after_are_drawn_into_one_png(url: str, tmp_path: Path):
    before = fetch_states(url, ["events", "untouched", "closed"])
    with persist.open(url) as client:
        client.maintain("events")
    after = fetch_states(url, ["events", "untouched", "closed"])
    draw_moments([("before", before), ("after", after)], tmp_path / "both.png")
    draw_traces(url, ["events"], tmp_path / "one.png", "now")
    both, one = imread(tmp_path / "both.png"), imread(tmp_path / "one.png")
    assert both.shape[1] > 1.5 * one.shape[1]
    assert both.std() > 0.05


def test_a_shard_that_is_not_there_is_a_sentence(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["nothing", "--location", url, "--output", str(tmp_path / "no.png")]) == 1
    assert "NotFound" in capsys.readouterr().err
    assert not (tmp_path / "no.png").exists()
