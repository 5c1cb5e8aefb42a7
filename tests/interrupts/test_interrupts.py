"""Ctrl-C anywhere in any call leaves handle and client usable, or closed with a reason."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.interrupts import scenes, ways_in
from tests.interrupts.points import Interrupter, only_on_cpython_3_11
from tests.interrupts.scenes import Call, Scene, check_closed, check_usable, promptly

pytestmark = [
    only_on_cpython_3_11,
    # Arrow's writer has a finalizer in Python. What is raised in there CPython reports, and goes on uninterrupted.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*ParquetWriter.__del__:pytest.PytestUnraisableExceptionWarning"
    ),
    # Between the call and its `with` block nobody has an open file or directory but the collector, which closes it.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*Scandir:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO.*'rb':pytest.PytestUnraisableExceptionWarning"),
]
CALLS = {**scenes.CALLS, **ways_in.CALLS}
EVERYWHERE = os.environ.get("PERSIST_INTERRUPTS", "") == "all"
"""Every place, which takes minutes. Otherwise some, always the same."""
PLACES, SIGNALS = 5, 1


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{tmp_path}/data"


def interrupt(url: str, call: Call, at: int | _Signal | None) -> Any:
    """One run of the call that is interrupted there, and everything that must hold after it."""
    scene = Scene(url, call.config, **call.options)
    call.prepare(scene)
    interrupter: Any = at if isinstance(at, _Signal) else Interrupter(at)
    try:
        with promptly("the call"):
            try:
                with interrupter:
                    call.act(scene)
            except KeyboardInterrupt:
                assert interrupter.has_struck
        call.check(scene)
        if not call.is_closing:
            check_usable(scene, call)
        check_closed(scene, call)
    except BaseException as error:
        error.add_note(f"interrupted {interrupter.where} (place {at})")
        raise
    scene.close()
    return interrupter


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_leaves_all_usable(name: str, url: str) -> None:
    call = CALLS[name]
    count = interrupt(url, call, None).count
    step = 1 if EVERYWHERE else count // PLACES + 1
    for at in range(random.Random(name).randrange(step), count, step):
        interrupt(url, call, at)


class _Signal:
    """Ctrl-C itself, after a while: sent by another thread, wherever the block is by then, also in the middle of C."""

    def __init__(self, after_s: float) -> None:
        self._is_armed = True
        self.where: str | None = None
        self._timer = threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGINT))

    @property
    def has_struck(self) -> bool:
        return self.where is not None

    def __enter__(self) -> None:
        self._former = signal.signal(signal.SIGINT, self._strike)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._is_armed = False
        self._timer.join()
        signal.signal(signal.SIGINT, self._former)

    def _strike(self, _: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.where = f"{frame and frame.f_code.co_qualname}:{frame and frame.f_lineno}"
            raise KeyboardInterrupt(self.where)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_at_any_moment_leaves_all_usable(name: str, url: str) -> None:
    call, rng = CALLS[name], random.Random(name)
    started = time.monotonic()
    interrupt(url, call, None)
    took_s = max(0.002, (time.monotonic() - started) / 10)  # most of the run is what surrounds the call
    for _ in range(SIGNALS * (20 if EVERYWHERE else 1)):
        interrupt(url, call, _Signal(rng.uniform(0, took_s)))
