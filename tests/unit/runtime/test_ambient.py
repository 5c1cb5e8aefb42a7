"""Background work without threads: the same answers and errors as with them."""

from __future__ import annotations

import pytest

from persist_lib.runtime.ambient import Runtime


def fails(_: int) -> int:
    raise ValueError("it failed")


@pytest.mark.parametrize("background", [True, False])
def test_what_a_task_answers_or_raises_reaches_its_caller(background: bool) -> None:
    with Runtime(background=background).pool(2, "test") as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
        with pytest.raises(ValueError, match="it failed"):
            pool.submit(fails, 1).result()
        with pytest.raises(ValueError, match="it failed"):
            list(pool.map(fails, [1]))
