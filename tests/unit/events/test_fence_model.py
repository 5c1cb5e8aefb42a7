"""Every interleaving of writers that only have conditional PUTs: nothing acknowledged is lost; each rule is needed."""

from __future__ import annotations

import os

import pytest

from tests.unit.events.fence_model import MUTANTS, Broken, model

# Writers, events, fragments of each, events under way.
SMALL = [(2, 2, 1, 2), (2, 2, 2, 2), (2, 3, 1, 3), (3, 2, 1, 2)]
LARGE = [(3, 2, 2, 2), (3, 3, 1, 2), (2, 3, 2, 3)]


IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"
LOSSY = [(2, 1, 2, 1)]
LOSSY_LARGE = [(2, 2, 1, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize("size", SMALL + LARGE * IS_ALL)
def test_nothing_acknowledged_is_lost_and_the_log_only_grows(size: tuple[int, int, int, int]) -> None:
    assert model(*size).explore() > 500


@pytest.mark.parametrize("size", LOSSY + LOSSY_LARGE * IS_ALL)
def test_nor_where_answers_are_lost_and_what_was_sent_arrives_twice(size: tuple[int, int, int, int]) -> None:
    assert model(*size, lossy=True).explore() > 500


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str) -> None:
    for size in (SMALL[0], SMALL[1], SMALL[3]):
        try:
            model(*size, mutant).explore()
        except Broken:
            return
    raise AssertionError(f"without the rule, nothing breaks: {mutant}")
