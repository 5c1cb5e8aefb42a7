"""Carries out traces of a model on the real code, step by step, and compares their states after each.

A process of the model is a thread that runs real calls of a client of its own. It stops before each request to the
location, so that a step of the model is one request that changes something, with the reads before it. What becomes of
a compare-and-set is planned by `persist_lib.testing.faults`. After each step, what there is has to be what the model
says. There is a `Replay` for each model: `replay_shard`, `replay_wal`, `replay_sources`, `replay_groups`.
"""

from __future__ import annotations

import re
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import ClassVar

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.location import open_location
from persist_lib.location.api import Consensus
from persist_lib.testing import ManualClock
from persist_lib.testing.faults import START_NS
from tests.models.check import HERE, Unsound, check_tools, defined
from tests.models.processes import LEASE_MS, WRITES, Mismatch, Process
from tests.models.scenes import Bounds

STEPS_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a trace: which process did what, and the model's state after it."""

    who: str
    number: int
    what: str
    argument: int
    state: dict[str, str]

    def __str__(self) -> str:
        return f"{self.who} {self.number}: {self.what} {self.argument}"

    def numbers(self, name: str) -> list[int]:
        """The numbers of one variable of the model."""
        return [int(n) for n in re.findall(r"\d+", self.state[name])]

    def number_of(self, name: str) -> int:
        """The one number of a variable."""
        return self.numbers(name)[0]


INLINE = persist.Config(lease_ms=LEASE_MS, rollup_every=1_000_000, cache=persist.CacheConfig(memory_bytes=0))
"""Of processes whose rows may stay in the log."""


class Replay(ABC):
    """A location in memory, and the processes that the steps of one trace need."""

    file: ClassVar[str]
    profiles: ClassVar[Sequence[Bounds]]
    """Bounds of traces: larger than what can be explored whole. A trace's seed says which."""
    most_statements: ClassVar[int] = 20_000
    """Of Promela, of a trace: some dozens are a step."""
    mistaken: ClassVar[frozenset[str]] = frozenset()
    """Steps that only a model with a mistake takes."""
    start_ns: ClassVar[int] = START_NS
    config = persist.Config(
        inline_bytes=0, part_bytes=64 * 1024, lease_ms=LEASE_MS, rollup_every=1_000_000,
        cache=persist.CacheConfig(memory_bytes=0),
    )  # fmt: skip
    """Of the processes."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.clock = ManualClock(self.start_ns)
        self.inner = open_location("memory:", create=True, clock=self.clock)
        self.url = self.inner.url
        self.processes: dict[str, Process] = {}

    def observing(self, config: persist.Config | None = None) -> persist.Client:
        """A client beside the processes, which no step stops."""
        location = open_location(self.url, clock=self.clock)
        return persist.open(location, config=config, runtime=self.clock.runtime(99))

    def run(self) -> Counter[str]:
        """Carry out all steps. What was done, counted. Raises Mismatch."""
        done: Counter[str] = Counter()
        try:
            for at, step in enumerate(self.steps):
                try:
                    self.carry_out(at, step)
                    self.compare(step)
                except (AssertionError, PersistError) as error:
                    history = "\n".join(f"    {one}" for one in self.steps[max(0, at - STEPS_SHOWN) : at + 1])
                    raise Mismatch(f"step {at}, {step}: {error}\n  after\n{history}") from error
                done[f"{step.who} {step.what}"] += 1
            self.end()
            self.rest()
        finally:
            self.end()
            self.close()
            self.inner.close()
        return done

    def process(self, name: str) -> Process:
        """The process of this name, which begins when it is first asked for."""
        if name not in self.processes:
            self.processes[name] = Process(name, self)
        return self.processes[name]

    def commits_if(self, process: Process, *, is_new: bool) -> None:
        """A process commits what changes the model, unless others were first with the same."""
        if is_new:
            process.commits()
        else:
            process.lost()

    def end(self) -> None:
        """Every process stops where it is, for ever."""
        for process in self.processes.values():
            process.kill()
        self.processes.clear()

    def counts(self, process: Process) -> bool:
        """Whether the request before which a process waits changes something that the model has."""
        return process.waits_for in WRITES

    def wrapped(self, process: Process, consensus: Consensus) -> Consensus:
        """The Consensus of a process, with more around it."""
        return consensus

    def compare(self, step: Step) -> None:
        """Raise Mismatch unless all is as in the model's state, AssertionError if what must always hold does not."""
        model, real = self.modelled(step), self.there()
        if model != real:
            lines = [
                f"  {name}: the model has {model[name]}, and there is {real[name]}"
                for name in model
                if model[name] != real[name]
            ]
            raise Mismatch("the states differ\n" + "\n".join(lines) + f"\n  model: {model}\n  real:  {real}")
        self.check(step)

    @abstractmethod
    def carry_out(self, at: int, step: Step) -> None:
        """Take a step, the `at`-th of all."""

    @abstractmethod
    def modelled(self, step: Step) -> dict[str, object]:
        """A state of the model, in the names of the real world."""

    @abstractmethod
    def there(self) -> dict[str, object]:
        """What there is in the real world, by the same names."""

    @abstractmethod
    def check(self, step: Step) -> None:
        """Check what must hold beyond the model's state."""

    @abstractmethod
    def rest(self) -> None:
        """Every process is gone: do what upkeep does then, and check what it leaves."""

    @abstractmethod
    def close(self) -> None:
        """Close what looks at the real world."""


def bits(number: int) -> list[int]:
    """The bits that are set."""
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


def trace(replay: type[Replay], seed: int, mutant: str = "") -> list[Step]:
    """A random trace of a model, or of one with a mistake: up to where that breaks a claim."""
    check_tools()
    mistake = {f"MUTANT_{mutant}": 1} if mutant else {}
    bounds = {**replay.profiles[seed % len(replay.profiles)], **mistake, "SHOW": 1}
    words = ["spin", "-T", f"-n{seed}", f"-u{replay.most_statements}", *defined(bounds), str(HERE / replay.file)]
    with TemporaryDirectory() as folder:  # spin leaves `pan.pre` where it runs, and others run at the same time
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if not mutant and ("Error" in done.stdout or done.returncode):
        raise Unsound(f"{' '.join(words)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("@ ")]
    return [_step(line) for line in (lines[:-1] if "depth-limit" in done.stdout else lines)]  # that cuts a line off


def _step(line: str) -> Step:
    what, _, state = line.partition(" | ")
    _, who, number, name, argument = what.split()
    return Step(who, int(number), name, int(argument), dict(re.findall(r"(\w+)=(\S+)", state)))


def replayed(replay: type[Replay], seeds: Iterable[int]) -> Counter[str]:
    """Carry out random traces. Returns what was done, counted. Raises Mismatch, which names the trace."""
    done: Counter[str] = Counter()
    for seed in seeds:
        try:
            done += replay(trace(replay, seed)).run()
        except Mismatch as mismatch:
            raise Mismatch(f"trace {seed} of {replay.file}: {mismatch}") from mismatch
    return done


def events(replay: type[Replay]) -> set[str]:
    """What steps a model has, of processes that make no mistake."""
    found = re.findall(r"STEP\((\w+), \w+, (\w+),", (HERE / replay.file).read_text())
    return {f"{who} {what}" for who, what in found} - {"who what"} - replay.mistaken
