"""Many seeds of a story, within a bound of time: what was tried, what held, and which seed shows what did not."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from persist_lib.core.units import of
from persist_lib.simulate.story import Story

MakesStory = Callable[[int], Story]
"""Makes the story of a seed."""
Told = Callable[[int], None]
"""Called with the number of seeds that are done."""


class Took(msgspec.Struct, frozen=True):
    """What one story, or several together, tried and checked."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Simulated seconds."""
    operations: Counter[str] = Counter()
    """Requests to Consensus and Blob, by kind."""
    faults: Counter[str] = Counter()
    """How often each kind of fault struck."""
    crashes: int = 0
    """How many processes were replaced: they crashed, or gave up with an error of the world."""
    appends: Counter[str] = Counter()
    """Appends by outcome: acknowledged, refused, unknown."""
    did: Counter[str] = Counter()
    """What else processes got done."""
    held: Counter[str] = Counter()
    """How often each thing that must hold was checked, and held."""

    def __add__(self, other: Took) -> Took:
        return Took(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    @property
    def says(self) -> str:
        """All of it in one line."""
        appends = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.appends.items()))
        parts = [of(self.steps, "step"), of(self.operations.total(), "operation"), f"appends: {appends or 'not any'}"]
        parts += [of(self.faults.total(), "fault"), f"{self.crashes:,} processes replaced"]
        return "; ".join([*parts, of(self.held.total(), "check")])


class Failure(msgspec.Struct, frozen=True):
    """A seed in which something did not hold."""

    seed: int
    error: str
    """The type of what was raised; NotHeld and AssertionError: a check, others: what a process met."""
    says: str
    history: tuple[str, ...]
    """The end of its history: steps, simulated seconds, and what happened."""


class Simulated(msgspec.Struct, frozen=True):
    """What many seeds showed."""

    took: Took
    failed: tuple[Failure, ...]
    asked: int
    """How many seeds were asked for; `took.seeds` were run, and some of these failed."""
    stopped: str = ""
    """Why not all were run."""
    is_interrupted: bool = False
    history: tuple[str, ...] = ()
    """The history of the last seed, where it was asked for."""

    @property
    def says(self) -> str:
        """How many seeds were run, and what was tried."""
        left = f" of {self.asked:,}, {self.stopped}" if self.took.seeds < self.asked else ""
        return f"{of(self.took.seeds, 'seed')}{left}: {self.took.says}"


def took(story: Story) -> Took:
    """What a story tried and checked so far."""
    world, ledger = story.simulation, getattr(story, "ledger", None)
    appends = Counter[str]() if ledger is None else ledger.outcomes
    seconds = world.clock.monotonic() - world.began_s
    return Took(
        1, world.steps, seconds, Counter(world.operations), Counter(world.struck), world.crashes, appends,
        Counter(story.did), Counter(story.held),
    )  # fmt: skip


def simulate(
    make: MakesStory, seeds: Iterable[int], *, seconds: float | None = None, most_failures: int = 1,
    progress: Told | None = None, keep_all: bool = False, clock: Callable[[], float] = time.monotonic,
) -> Simulated:  # fmt: skip
    """Run the stories of seeds, one after the other. Touches nothing but memory.

    Ends after so many `seconds`, after `most_failures` seeds that failed, and at KeyboardInterrupt, each time with what
    was done so far. `progress` is called after each seed. With `keep_all` the answer has the history of the last seed,
    as much as its story keeps of it.
    """
    wanted, began = list(seeds), clock()
    total, failed, stopped = Took(), list[Failure](), ""
    is_interrupted, history = False, tuple[str, ...]()
    with _quiet():
        for done, seed in enumerate(wanted):
            if done and seconds is not None and clock() - began >= seconds:
                stopped = f"as {seconds:g} s were over"
                break
            story = make(seed)
            try:
                story.run()
            except KeyboardInterrupt:
                stopped, is_interrupted = "as it was interrupted", True
                total += msgspec.structs.replace(took(story), seeds=0)
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
                failed.append(Failure(seed, type(error).__name__, str(error), tuple(story.simulation.lines)))
            total += took(story)
            history = tuple(story.simulation.lines) if keep_all else ()
            if progress is not None:
                progress(done + 1)
            if len(failed) >= most_failures:
                stopped = f"as {of(len(failed), 'seed')} failed"
                break
    why = stopped if total.seeds < len(wanted) else ""
    return Simulated(total, tuple(failed), len(wanted), why, is_interrupted, history)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without handlers, Python prints warnings. Here the world fails on purpose, and the library warns of it."""
    logger, handler = logging.getLogger("persist"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
