"""What a fork renews: in which order, whatever fails, and that no lock of another thread is held in the child."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.location.wrap.spending import Tally
from persist_lib.relation.held import kept_of
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import aside
from tests.worlds import SCHEMA, row

WITHIN_S = 20
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def forked(call: Callable[[], object]) -> str:
    """What `call` answers in a forked child, as text; what it raised; or that it never came back."""
    answer, told = os.pipe()
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)  # where it waits
        signal.alarm(WITHIN_S)  # a lock that is never given back
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


def test_the_registry_keeps_no_object_alive() -> None:
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


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[dict[str, Any]]:
    config = persist.Config(inline_bytes=0, cache=persist.CacheConfig())
    with persist.open(f"file:{tmp_path}/data", config=config) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        yield {"client": client, "write": write, "read": read, "blob": client.location.blob}


LOCKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "counts": lambda _: Tally.lock,
    "cache": lambda o: o["client"]._cache._memory.lock,
    "directories": lambda o: o["blob"]._directories._lock,
    "staging": lambda o: o["blob"]._staging._guard,
    "machine": lambda o: o["write"].machine.turn,
    "leases": lambda o: o["client"].leases._lock,
    "write handle": lambda o: o["write"]._lock,
    "write handle's queue": lambda o: o["write"]._beginning,
    "read handle": lambda o: kept_of(o["read"])._lock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_child_works_whatever_lock_another_thread_held_during_the_fork(name: str, opened: dict[str, Any]) -> None:
    client, write, read = opened["client"], opened["write"], opened["read"]
    lock, is_held, is_over = LOCKS[name](opened), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait()

    def work() -> int:
        write.compare_and_append([row(2, time=1)], 1, 2)
        write.append_async([row(3, time=2)], 2, 3).result()
        with read.snapshot(2) as snapshot:
            rows: int = snapshot.to_arrow().num_rows
        client.metrics()
        client.open_reader("s")
        assert aside(lambda: 1) == 1
        return rows

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert forked(work) == "3"
    finally:
        is_over.set()
        thread.join()
