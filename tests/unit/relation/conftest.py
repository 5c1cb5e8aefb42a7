"""What tests of writing share: a world, and clients whose commits wait at a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import (
    Determinate,
    LeaseExpired,
    NotSent,
    UpperMismatch,
)
from tests.gated import Threaded


@pytest.fixture
def make() -> Iterator[Callable[..., Threaded]]:
    made: list[Threaded] = []

    def begin(config: persist.Config | None = None, **options: Any) -> Threaded:
        made.append(Threaded("memory:", config or persist.Config(), **options))
        return made[-1]

    yield begin
    for threaded in made:
        try:
            threaded.close()
        except (NotSent, UpperMismatch, Determinate, LeaseExpired):
            continue
