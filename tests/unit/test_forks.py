"""What a fork renews: in which order, whatever fails, and that no lock of another thread is held in the child."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest

from persist_lib.runtime.forks import Stage, enrol

WITHIN_S = 20
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def forked(call: Callable[[], object]) -> str:
    """What `call` answers in a forked child, as text; what it raised; or that it never came back."""
    answer, told = os.pipe()
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WITHIN_S)  # a lock that nobody gives back
        try:
            said = repr(call())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = repr(error)
        os.write(told, said.encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(answer) as file:
        text = file.read()
    return text if os.waitpid(child, 0)[1] == 0 else "it never came back"


class Renewed:
    def __init__(self, name: str, said: list[str], stage: Stage, fails: str = "") -> None:
        self.name, self.said, self.fails = name, said, fails
        enrol(self, stage)

    def say(self, what: str) -> None:
        self.said.append(f"{what} {self.name}")
        if what == self.fails:
            raise ValueError(what)

    def after_fork_in_child(self) -> None:
        self.say("child")


class Paused(Renewed):
    def before_fork(self) -> None:
        self.say("before")

    def after_fork_in_parent(self) -> None:
        self.say("parent")


def test_before_a_fork_the_top_comes_first_and_after_it_the_bottom() -> None:
    said: list[str] = []
    kept = [
        Paused("shard", said, Stage.SHARDS),
        Paused("first store", said, Stage.STORES),
        Renewed("handle", said, Stage.HANDLES),
        Paused("second store", said, Stage.STORES),
    ]
    before = ["before shard", "before second store", "before first store"]
    child = forked(said.copy)
    assert child == repr([*before, "child first store", "child second store", "child shard", "child handle"])
    assert said == [*before, "parent first store", "parent second store", "parent shard"]
    del kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fails", ["before", "child", "parent"])
def test_one_that_fails_keeps_no_other_from_being_told(fails: str) -> None:
    said: list[str] = []
    kept = [Paused(name, said, Stage.STORES, fails) for name in "ab"]
    assert forked(said.copy) == repr(["before b", "before a", "child a", "child b"])
    assert said == ["before b", "before a", "parent a", "parent b"]
    Paused("later", [], Stage.STORES)  # the registry is open again
    del kept


def test_the_registry_keeps_nobody() -> None:
    said: list[str] = []
    Renewed("dropped", said, Stage.STORES)
    gc.collect()
    assert forked(said.copy) == "[]"


def test_what_another_thread_makes_during_a_fork_enrols_after_it() -> None:
    said: list[str] = []
    made: list[Renewed] = []
    begun = threading.Event()

    def make() -> None:
        begun.set()
        made.append(Paused("late", said, Stage.STORES))

    class Slow(Paused):
        def before_fork(self) -> None:
            thread.start()
            begun.wait()
            super().before_fork()

    thread = threading.Thread(target=make)
    slow = Slow("slow", said, Stage.STORES)
    assert forked(said.copy) == repr(["before slow", "child slow"])
    thread.join()
    assert said == ["before slow", "parent slow"]
    assert [one.name for one in made] == ["late"]
    del slow
