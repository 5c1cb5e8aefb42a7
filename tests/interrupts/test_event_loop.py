"""Ctrl-C anywhere in a call of the event loop leaves the loop usable, and every event in the log at most once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from persist_lib import events
from tests.interrupts.points import Interrupter, only_on_cpython_3_11
from tests.interrupts.scenes import PROMPT_S, elsewhere, eventually, promptly
from tests.interrupts.test_interrupts import _Signal
from tests.unit.events.programs import Counter

pytestmark = [
    only_on_cpython_3_11,
    # A file that pathlib has opened, and did not come to close, is closed when it is collected, and CPython says so. It
    # also reports what is raised in a generator that is being closed.
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
EVERYWHERE = os.environ.get("PERSIST_INTERRUPTS", "") == "all"
PLACES, SIGNALS = 5, 2


class Scene:
    """A log with two events, and a loop on it."""

    def __init__(self, specifier: str) -> None:
        self.specifier = specifier
        self.counter = Counter()
        self.loop: events.Loop[list[int]] = self.open()
        for word in (b"a", b"b"):
            self.loop.submit(word).result(PROMPT_S)

    def open(self) -> Any:
        return events.Loop(self.specifier, self.counter.program, most_events=2)

    def submit(self) -> None:
        self.loop.submit(b"c").result(PROMPT_S)

    def submit_without_room(self) -> None:
        for _ in range(5):
            self.loop.submit(b"c")

    def reopen(self) -> None:
        self.loop.stop()
        self.loop = self.open()

    def stop(self) -> None:
        self.loop.submit(b"c")
        self.loop.stop()


ACTS: dict[str, Callable[[Scene], object]] = {
    "submit": Scene.submit, "submit without room": Scene.submit_without_room, "stop": Scene.stop, "open": Scene.reopen,
}  # fmt: skip


def check(scene: Scene, name: str) -> None:
    """The loop continues, or is stopped; another one starts promptly; nothing is lost, and nothing is there twice."""
    if name in {"submit", "submit without room"}:
        with promptly("another thread"):
            elsewhere(lambda: scene.loop.submit(b"d").result(PROMPT_S))
        with promptly("the same call again"):
            scene.loop.submit(b"e").result(PROMPT_S)
        with promptly("without waiting"):
            eventually(lambda: scene.loop.submit(b"f", block=False) is not None, "there is no room")
    with promptly("stop"):
        scene.loop.stop()
    again = Counter(snapshots=False)
    with promptly("the next loop"), events.Loop(scene.specifier, again.program) as loop:
        assert loop.submit(b"last").result(PROMPT_S).event_id == loop.accepted
    with events.open_store(scene.specifier) as store, store.reader() as reader:
        log = [bytes(event.payload) for event in reader.replay()]
    assert log[:2] == [b"a", b"b"]
    assert log.count(b"c") <= 5
    assert again.computed == [*range(1, len(log) + 1)]
    told = [f"{id_}:{word.decode()}" for id_, word in enumerate(log, 1)]
    released = scene.counter.released + again.released
    assert list(dict.fromkeys(released)) == told, "each effect, in order, and none twice but where it is told again"
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("persist-loop")], "threads")


def interrupt(specifier: str, name: str, at: Any) -> Any:
    scene = Scene(specifier)
    interrupter = Interrupter(at) if at is None or isinstance(at, int) else at
    try:
        with promptly("the call"), suppress(KeyboardInterrupt), interrupter:
            ACTS[name](scene)
        check(scene, name)
    except BaseException as error:
        error.add_note(f"interrupted {interrupter.where} (place {at})")
        raise
    return interrupter


@pytest.fixture
def specifiers(tmp_path: Path) -> Iterator[str]:
    return (f"disk:{tmp_path}/{number}" for number in range(10_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_anywhere_leaves_the_loop_usable(name: str, specifiers: Iterator[str]) -> None:
    count = interrupt(next(specifiers), name, None).count
    step = 1 if EVERYWHERE else count // PLACES + 1
    for at in range(random.Random(name).randrange(step), count, step):
        interrupt(next(specifiers), name, at)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTS)
def test_a_signal_at_any_moment_leaves_the_loop_usable(name: str, specifiers: Iterator[str]) -> None:
    rng = random.Random(name)
    started = time.monotonic()
    interrupt(next(specifiers), name, None)
    took_s = max(0.002, (time.monotonic() - started) / 5)
    for _ in range(SIGNALS * (20 if EVERYWHERE else 1)):
        interrupt(next(specifiers), name, _Signal(rng.uniform(0, took_s)))
