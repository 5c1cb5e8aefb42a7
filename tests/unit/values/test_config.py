"""Settings are refused where they make no sense; deadlines end; a seeded runtime repeats itself."""

from __future__ import annotations

from random import Random

import pytest
from pydantic import ValidationError

from persist_lib.config import MIB, Config
from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import ManualClock


def test_the_defaults_are_valid_and_frozen():
    config = Config()
    assert config.part_bytes == 128 * MIB
    with pytest.raises(ValidationError):
        config.part_bytes = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [{"inline_bytes": -1}, {"inline_bytes": 2**30}, {"part_bytes": 1}, {"lease_ms": 0}, {"rollup_every": 0},
     {"timeout_s": 0}, {"timeout_s": -1}, {"poll_s": 0}, {"read_threads": 0}, {"lease_sm": 5}, {"timeout_s": "soon"}],
)  # fmt: skip
def test_a_setting_out_of_bounds_or_unknown_is_refused_by_name(wrong):
    with pytest.raises(InvalidUsage, match=next(iter(wrong))):
        Config(**wrong)


def test_a_deadline_ends_when_its_time_is_over_and_not_before():
    clock = ManualClock()
    deadline = clock.runtime().deadline(2.0)
    assert deadline.remaining_s() == pytest.approx(2.0)
    clock.advance(1.5)
    assert not deadline.has_passed()
    clock.advance(1.0)
    assert deadline.has_passed()
    assert deadline.remaining_s() == 0.0


def test_a_pause_is_jittered_and_never_goes_beyond_the_deadline():
    slept: list[float] = []
    clock = ManualClock()
    runtime = Runtime(monotonic=clock.monotonic, sleep=slept.append, random=Random(1))
    deadline = runtime.deadline(1.0)
    for _ in range(100):
        deadline.pause(0.1)
    assert all(0.05 <= seconds <= 0.15 for seconds in slept)
    assert len(set(slept)) > 50
    deadline.pause(100)
    assert slept[-1] <= 1.0
    clock.advance(5)
    deadline.pause(1)
    assert slept[-1] == 0.0


def test_entropy_is_64_bits_and_repeats_with_its_seed():
    clock = ManualClock()
    first, second, other = (clock.runtime(seed).entropy() for seed in (1, 1, 2))
    assert first == second != other
    assert 0 <= Runtime().entropy() < 2**64
    assert Runtime().entropy() != Runtime().entropy()
