"""All targets, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import foreign, served, stored, texts
from tests.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    target.name: target for room in (stored, served, texts, foreign) for target in room.TARGETS
}
