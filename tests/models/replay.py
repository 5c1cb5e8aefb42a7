"""Carries out traces of the model of a shard on the real code, step by step, and compares their states after each.

A process of the model is a thread that runs real calls of a client of its own. It stops before each request to the
location, so that a step of the model is one request that changes something, with the reads before it. What becomes of
a compare-and-set is planned by `persist_lib.testing.faults`. After each step, state, log and objects have to be those
of the model, and `check_world` has to hold. In the end every process is gone, and upkeep must leave nothing behind.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import persist_lib as persist
from persist_lib.errors import LeaseExpired, PersistError, UpperMismatch
from persist_lib.format.paths import key_of
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location import open_location
from persist_lib.maintain.compaction import Compacted
from persist_lib.maintain.worker import RolledUp
from persist_lib.testing import ManualClock, Outcome
from persist_lib.testing.checks import check_swept, check_world
from tests.models.check import HERE, Unsound, check_tools, defined
from tests.models.processes import LEASE_MS, Mismatch, Process
from tests.worlds import SCHEMA, row

SHARD = "s"
_ALL = {"T": 4, "WRITERS": 2, "APPENDS": 2, "COMPACTORS": 2, "DOUBTS": 3}
PROFILES = (
    {**_ALL, "ROLLS": 3, "COLLECTS": 4, "AUDITS": 2, "EXPIRES": 3, "TAKES": 3, "HOLD": 1},
    {**_ALL, "ROLLS": 1, "COLLECTS": 4, "AUDITS": 0, "EXPIRES": 1, "TAKES": 3, "HOLD": 1, "WRITERS": 1, "APPENDS": 4},
    {**_ALL, "ROLLS": 2, "COLLECTS": 2, "AUDITS": 1, "EXPIRES": 1, "TAKES": 0, "HOLD": 1},
)
"""Bounds of traces: larger than what can be explored whole. All processes; those that read; those that are in doubt."""
MOST_STEPS = 20_000
APART_MS = 10_000_000
"""Between the ends of two leases."""
EAGER = persist.Policy(weight=1e9, advance=1e9)
"""Merges all batches as soon as there are two, and rewrites none alone."""
READER = 8


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


def trace(seed: int, mutant: str = "") -> list[Step]:
    """A random trace of the model of a shard, or of one with a mistake: up to where that breaks a claim."""
    check_tools()
    mistake = {f"MUTANT_{mutant}": 1} if mutant else {}
    words = [
        "spin",
        "-T",
        f"-n{seed}",
        f"-u{MOST_STEPS}",
        *defined({**PROFILES[seed % len(PROFILES)], **mistake, "SHOW": 1}),
    ]
    with TemporaryDirectory() as folder:  # spin leaves `pan.pre` where it runs, and others run at the same time
        done = subprocess.run(
            [*words, str(HERE / "shard.pml")], cwd=folder, capture_output=True, text=True, check=False
        )
    if not mutant and ("Error" in done.stdout or done.returncode):
        raise Unsound(f"{' '.join(words)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return [_step(line) for line in done.stdout.splitlines() if line.startswith("@ ")]


def _step(line: str) -> Step:
    what, _, state = line.partition(" | ")
    _, who, number, name, argument = what.split()
    return Step(who, int(number), name, int(argument), dict(re.findall(r"(\w+)=(\S+)", state)))


_FIRST = frozenset({"plan", "begin"})
"""Steps after which a process may register."""


def _process(step: Step) -> str:
    return f"{step.who} {step.number}" if step.who in {"writer", "compactor"} else step.who


@dataclass
class Names:
    """What the model's numbers are in the real world."""

    objects: dict[int, str] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)


class Replay:
    """A location in memory, and the processes that the steps of one trace need."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.clock = ManualClock()
        self.inner = open_location("memory:", create=True, clock=self.clock)
        self.url = self.inner.url
        self.processes: dict[str, Process] = {}
        self.names = Names()
        self._late: dict[str, Callable[[], bool]] = {}
        self._writers: dict[int, Any] = {}
        self._handle: Any = None
        self._snapshot: Any = None
        self.observer = persist.open(open_location(self.url, clock=self.clock), runtime=self.clock.runtime(99))
        self.observer.open_writer(SHARD, SCHEMA).close()
        self.observer.set_hold(SHARD, "keep", 0)
        self.offset = self.observer.inspect(SHARD).seqno - 1
        expired = [(one.argument, at) for at, one in enumerate(steps) if one.what == "expire"]
        self._ends = {id_: rank for rank, (id_, _) in enumerate(expired, 1)}

    def run(self) -> Counter[str]:
        """Carry out all steps. What was done, counted. Raises Mismatch."""
        done: Counter[str] = Counter()
        try:
            for at, step in enumerate(self.steps):
                try:
                    self._carry_out(at, step)
                    self.compare(step)
                except (AssertionError, PersistError) as error:
                    history = "\n".join(f"    {one}" for one in self.steps[max(0, at - 30) : at + 1])
                    raise Mismatch(f"step {at}, {step}: {error}\n  after\n{history}") from error
                done[f"{step.who} {step.what}"] += 1
            self.rest()
        finally:
            for process in self.processes.values():
                process.kill()
            self.observer.close()
            self.inner.close()
        return done

    def process(self, name: str) -> Process:
        if name not in self.processes:
            self.processes[name] = Process(name, self)
        return self.processes[name]

    def _carry_out(self, at: int, step: Step) -> None:
        process = self.process(_process(step))
        following = next(
            (one for one in self.steps[at:] if _process(one) == process.name and one.what not in _FIRST), None
        )
        if following is not None and following.what in {"register", "open"}:  # how long its lease will be
            id_ = READER if following.what == "open" else following.argument
            process.ahead_ms = self._ends.get(id_, len(self._ends) + 1) * APART_MS
        if step.what == "arrive":
            if not self._late.pop(process.name)():
                raise Mismatch("a late compare-and-set lost its race")
            return
        getattr(self, f"_{step.who}")(process, step)

    # --- what each process does -------------------------------------------------------------------------------------

    def _writer(self, process: Process, step: Step) -> None:
        state, what = step.state, step.what
        if what == "begin":
            time = step.argument

            def append() -> Any:
                if step.number not in self._writers:
                    self._writers[step.number] = process.client.open_writer(SHARD, SCHEMA)
                return self._writers[step.number].compare_and_append([row(time, "w", time)], time, time + 1)

            process.start(append)
        elif what in {"append", "sent_again"}:
            process.commits()
            self._appended(process.finish(), step)
        elif what == "found":
            self._appended(process.finish(), step)
        elif what in {"mismatch", "not_found_mismatch"}:
            process.finish(UpperMismatch)
        elif what in {"expired", "not_found_expired"}:
            process.finish(LeaseExpired)
        elif not self._in_common(process, step):
            raise Mismatch(f"no such step: {what} {state}")

    def _appended(self, answer: Any, step: Step) -> None:
        if answer.seqno != step.argument + self.offset:
            raise Mismatch(f"it answered v{answer.seqno}, and not v{step.argument + self.offset}")

    def _in_common(self, process: Process, step: Step) -> bool:
        """What writers, compactors and rollers do alike. Whether it is one of these."""
        match step.what:
            case "register":
                self._registers(process, step.argument)
            case "put":
                process.does("set")
                (self.names.objects[step.argument],) = self._objects() - {*self.names.objects.values()}
            case "append_unknown" | "apply_unknown":
                process.commits_in_doubt(Outcome.HAPPENED_UNKNOWN)
            case "append_nothing" | "apply_nothing":
                process.commits_in_doubt(Outcome.LOST_UNKNOWN)
            case "append_late" | "apply_late":
                process.commits_in_doubt(Outcome.LOST_UNKNOWN)
                sent = process.sent or ("", None, b"")
                self._late[process.name] = lambda: self.inner.consensus.compare_and_set(*sent)
            case "not_found":
                process.lost()
                if process.waits_for != "compare_and_set":
                    raise Mismatch("it should try again")
            case _:
                return False
        return True

    def _registers(self, process: Process, id_: int) -> None:
        state = self.observer.machine(SHARD).fetch().state
        before = {*state.writers, *state.readers}
        process.commits()
        state = self.observer.machine(SHARD).fetch().state
        (self.names.ids[id_],) = {*state.writers, *state.readers} - before

    def _worker(self, process: Process, step: Step) -> None:
        """What compactors and rollers do alike, beyond `_in_common`."""
        match step.what:
            case "apply" | "link" | "sent_again":
                process.commits()
                process.expects = self._seqno(step.argument)
            case "found":
                process.lost()
                process.expects = self._seqno(step.argument)
            case "close" | "close_expired":
                if step.what == "close":
                    process.commits()
                process.lost()
                self._ended(process)
            case _:
                if not self._in_common(process, step):
                    process.lost()  # gone, overtaken, expired, too old, …: what follows is that it retires its id

    def _ended(self, process: Process) -> None:
        """A worker's call is over: what it answered is what it did."""
        if process.waits_for is not None:
            raise Mismatch(f"{process.name} should be done")
        error, answer, expects = process.error, process.answer, process.expects
        process.error, process.expects = None, None
        if error is not None and expects is not None:
            raise Mismatch(f"{process.name} committed v{expects}, and ended with {error!r}")
        if isinstance(answer, Compacted) and answer.applied[0].seqno != expects:
            raise Mismatch(f"{process.name} answered v{answer.applied[0].seqno}, and not v{expects}")
        if isinstance(answer, RolledUp) and (answer.key is not None) != (expects is not None):
            raise Mismatch(f"{process.name} answered {answer}")

    def _compactor(self, process: Process, step: Step) -> None:
        if step.what == "plan":
            process.start(lambda: process.client.compact(SHARD, policy=EAGER))
            process.reads()
        else:
            self._worker(process, step)

    def _roller(self, process: Process, step: Step) -> None:
        if step.what == "register":
            process.start(lambda: process.client.roll_up(SHARD, force=True))
            self._registers(process, step.argument)
        elif step.what == "read":
            process.reads()
        else:
            self._worker(process, step)

    def _collector(self, process: Process, step: Step) -> None:
        if step.what == "plan":
            process.start(lambda: process.client.collect(SHARD))
            process.reads()
        else:
            process.does({"delete": "delete_many", "forget": "compare_and_set", "truncate": "truncate"}[step.what])

    def _auditor(self, process: Process, step: Step) -> None:
        if step.what == "list":
            process.start(lambda: process.client.audit_orphans(SHARD))
            process.reads("list")
            while not process.asks.startswith(SHARD):  # it looks for pauses before
                process.step()
                process.reads("list")
            process.step()
        elif step.what == "read":
            process.reads()
        else:
            process.does({"delete": "delete_many", "forget": "compare_and_set"}[step.what])

    def _expirer(self, process: Process, step: Step) -> None:
        process.ahead_ms = self._ends[step.argument] * APART_MS + LEASE_MS + APART_MS // 2
        process.start(lambda: process.client.expire(SHARD))
        process.commits()
        process.finish()

    def _reader(self, process: Process, step: Step) -> None:
        argument = step.argument
        match step.what:
            case "open":
                process.start(lambda: process.client.open_reader(SHARD))
                self._registers(process, READER)
                self._handle = process.finish()
            case "take" | "take_expired":
                process.start(lambda: self._handle.snapshot(argument))
                if step.what == "take_expired":
                    process.finish(LeaseExpired)
                else:
                    self._snapshot = process.finish()
            case "read":
                process.start(self._snapshot.to_pylist)
                found = sorted(one["id"] for one in process.finish())
                if found != _bits(argument):
                    raise Mismatch(f"it read the rows of the times {found}, and there are {_bits(argument)}")
            case "read_expired":
                process.start(self._snapshot.to_pylist)
                process.finish(LeaseExpired)
            case "downgrade" | "downgrade_expired":
                self._snapshot.release()
                process.start(lambda: self._handle.downgrade_since(argument))
                if step.what == "downgrade":
                    process.commits()
                process.finish(*([LeaseExpired] if step.what == "downgrade_expired" else []))
            case "close":
                process.start(self._handle.close)
                process.commits()
                process.finish()
            case other:
                raise Mismatch(f"no such step: {other}")

    def _owner(self, process: Process, step: Step) -> None:
        since = step.argument
        if step.what == "move":
            process.start(lambda: process.client.downgrade_hold(SHARD, "keep", since))
        else:
            process.start(lambda: process.client.release_hold(SHARD, "keep"))
        process.commits()
        process.finish()

    # --- what there is ----------------------------------------------------------------------------------------------

    def _objects(self) -> set[str]:
        return {key_of(ShardId(SHARD), entry.key) for entry in self.inner.blob.list(f"{SHARD}/")}

    def compare(self, step: Step) -> None:
        """Raise Mismatch unless all is as in the model's state, AssertionError if what must always hold does not."""
        model, real = self._modelled(step.state), self._there()
        if model != real:
            lines = [
                f"  {name}: the model has {model[name]}, and there is {real[name]}"
                for name in model
                if model[name] != real[name]
            ]
            raise Mismatch("the states differ\n" + "\n".join(lines) + f"\n  model: {model}\n  real:  {real}")
        check_world(self.observer, SHARD)

    def _seqno(self, modelled: int | str) -> int:
        return int(modelled) + self.offset

    def _modelled(self, state: dict[str, str]) -> dict[str, object]:
        """A state of the model, in the names of the real world."""
        names, numbers = self.names, {name: [int(n) for n in re.findall(r"\d+", text)] for name, text in state.items()}
        upper = numbers["upper"][0]
        is_read, since, seqno = numbers["reader"]
        is_held, hold = numbers["hold"]
        pairs = zip(numbers["rollups"][::2], numbers["rollups"][1::2], strict=True)
        lowest = numbers["lo"][0]
        return {
            "seqno": self._seqno(numbers["seq"][0]),
            "upper": upper,
            "since": numbers["since"][0],
            "trace": [names.objects[key] for key in numbers["trace"][:upper]],
            "sinces": numbers["sinces"][:upper],
            "live": {names.ids[bit] for bit in _bits(numbers["live"][0])} | ({names.ids[READER]} if is_read else set()),
            "retired": {names.ids[bit] for bit in _bits(numbers["retired"][0])},
            "reader": (since, self._seqno(seqno)) if is_read else None,
            "hold": hold if is_held else None,
            "garbage": {names.objects[key]: self._seqno(at) for key, at in enumerate(numbers["garbage"]) if at},
            "rollups": {self._seqno(at): names.objects[key] for at, key in pairs if at},
            "objects": {names.objects[key] for key in _bits(numbers["blob"][0])},
            "oldest row": lowest if lowest == 1 else self._seqno(lowest),
        }

    def _there(self) -> dict[str, object]:
        version = self.observer.machine(SHARD).fetch()
        state = version.state
        upper = state.upper.time or 0
        batches = [
            next(one for one in state.trace if at(time) >= one.lower and one.upper.has_passed(time))
            for time in range(upper)
        ]
        reader = next(iter(state.readers.values()), None)
        hold = state.holds.get("keep")
        return {
            "seqno": version.seqno,
            "upper": upper,
            "since": state.since.time,
            "trace": [",".join(one.keys) for one in batches],
            "sinces": [one.since.time for one in batches],
            "live": {*state.writers, *state.readers},
            "retired": {*state.retired},
            "reader": None if reader is None else (reader.since.time, reader.seqno),
            "hold": None if hold is None else hold.since.time,
            "garbage": {key: one.seqno for key, one in state.garbage.items()},
            "rollups": {seqno: one.key for seqno, one in state.rollups.items()},
            "objects": self._objects(),
            "oldest row": self.inner.consensus.scan(ShardId(SHARD), SeqNo(0), 1)[0].seqno,
        }

    def rest(self) -> None:
        """Every process is gone. Once all leases have ended, upkeep leaves what the newest state refers to."""
        for process in self.processes.values():
            process.kill()
        self.processes.clear()
        self.clock.advance((len(self._ends) + 3) * APART_MS / 1000)
        client = self.observer
        client.expire(SHARD)
        client.roll_up(SHARD, force=True)
        client.collect(SHARD)
        client.audit_orphans(SHARD)
        check_swept(client, SHARD)


def _bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


def replayed(seeds: Iterable[int]) -> Counter[str]:
    """Carry out random traces. Returns what was done, counted. Raises Mismatch, which names the trace."""
    done: Counter[str] = Counter()
    for seed in seeds:
        try:
            done += Replay(trace(seed)).run()
        except Mismatch as mismatch:
            raise Mismatch(f"trace {seed} of shard.pml: {mismatch}") from mismatch
    return done


def events() -> set[str]:
    """What steps the model has, of processes that make no mistake."""
    found = re.findall(r"STEP\((\w+), \w+, (\w+),", (HERE / "shard.pml").read_text())
    return {f"{who} {what}" for who, what in found} - {
        "who what",
        "writer again",
        "compactor clean",
        "auditor read_first",
    }
