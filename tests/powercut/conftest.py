"""What power cuts share: their randomness, of which the seed is printed."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)
