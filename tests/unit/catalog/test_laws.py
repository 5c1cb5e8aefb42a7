"""Each law of handovers holds, and fails where the rule that it is about is missing."""

from __future__ import annotations

import pytest

from tests.unit.catalog.laws import LAWS, Law, Plant
from tests.worlds import World

NAMES = [f"{law.__name__}-{plant.__name__}" for law, plant in LAWS]


@pytest.mark.parametrize("law", [law for law, _ in LAWS], ids=NAMES)
def test_a_law_holds(world: World, law: Law) -> None:
    law(world)


@pytest.mark.parametrize(("law", "plant"), LAWS, ids=NAMES)
def test_a_law_finds_its_mutant(world: World, law: Law, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:  # each mutant breaks something else
        law(world)
    print(type(found.value).__name__, found.value)
