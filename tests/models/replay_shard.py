"""Traces of the model of a shard (`shard.pml`) on the real code.

After each step, state, log and objects have to be those of the model, and `check_world` has to hold. In the end every
process is gone, and upkeep must leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import persist_lib as persist
from persist_lib.errors import LeaseExpired, UpperMismatch
from persist_lib.format.paths import key_of
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, ShardId
from persist_lib.maintain.compaction import Compacted
from persist_lib.maintain.worker import RolledUp
from persist_lib.testing import Outcome
from persist_lib.testing.checks import check_swept, check_world
from tests.models.processes import LEASE_MS, Mismatch, Process
from tests.models.replay import Replay, Step, bits
from tests.worlds import SCHEMA, row

SHARD = "s"
_ALL = {"T": 4, "WRITERS": 2, "APPENDS": 2, "COMPACTORS": 2, "DOUBTS": 3}
_PROFILES = (
    {**_ALL, "ROLLS": 3, "COLLECTS": 4, "AUDITS": 2, "EXPIRES": 3, "TAKES": 3, "HOLD": 1},
    {**_ALL, "ROLLS": 1, "COLLECTS": 4, "AUDITS": 0, "EXPIRES": 1, "TAKES": 3, "HOLD": 1, "WRITERS": 1, "APPENDS": 4},
    {**_ALL, "ROLLS": 2, "COLLECTS": 2, "AUDITS": 1, "EXPIRES": 1, "TAKES": 0, "HOLD": 1},
)
"""Bounds of traces: larger than what can be explored whole. All processes; those that read; those that are in doubt."""
APART_MS = 10_000_000
"""Between the ends of two leases."""
EAGER = persist.Policy(weight=1e9, advance=1e9)
"""Merges all batches as soon as there are two, and rewrites none alone."""
READER = 8
_FIRST = frozenset({"plan", "begin"})
"""Steps after which a process may register."""


def _process(step: Step) -> str:
    return f"{step.who} {step.number}" if step.who in {"writer", "compactor"} else step.who


@dataclass
class Names:
    """What the model's numbers are in the real world."""

    objects: dict[int, str] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)


class ShardReplay(Replay):
    """A shard, and those who write, read and tend it."""

    file = "shard.pml"
    profiles = _PROFILES
    mistaken = frozenset({"writer again", "compactor clean", "auditor read_first"})

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.names = Names()
        self._late: dict[str, Callable[[], bool]] = {}
        self._writers: dict[int, Any] = {}
        self._handle: Any = None
        self._snapshot: Any = None
        self.observer = self.observing()
        self.observer.open_writer(SHARD, SCHEMA).close()
        self.observer.set_hold(SHARD, "keep", 0)
        self.offset = self.observer.inspect(SHARD).seqno - 1
        expired = [(one.argument, at) for at, one in enumerate(steps) if one.what == "expire"]
        self._ends = {id_: rank for rank, (id_, _) in enumerate(expired, 1)}

    def carry_out(self, at: int, step: Step) -> None:
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
                ((key, (expected, data)),) = process.sent.items()
                self._late[process.name] = lambda: self.inner.consensus.compare_and_set(key, expected, data)
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
                if found != bits(argument):
                    raise Mismatch(f"it read the rows of the times {found}, and there are {bits(argument)}")
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

    def check(self, step: Step) -> None:
        check_world(self.observer, SHARD)

    def _seqno(self, modelled: int | str) -> int:
        return int(modelled) + self.offset

    def modelled(self, step: Step) -> dict[str, object]:
        names, numbers = self.names, {name: step.numbers(name) for name in step.state}
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
            "live": {names.ids[bit] for bit in bits(numbers["live"][0])} | ({names.ids[READER]} if is_read else set()),
            "retired": {names.ids[bit] for bit in bits(numbers["retired"][0])},
            "reader": (since, self._seqno(seqno)) if is_read else None,
            "hold": hold if is_held else None,
            "garbage": {names.objects[key]: self._seqno(at) for key, at in enumerate(numbers["garbage"]) if at},
            "rollups": {self._seqno(at): names.objects[key] for at, key in pairs if at},
            "objects": {names.objects[key] for key in bits(numbers["blob"][0])},
            "oldest row": lowest if lowest == 1 else self._seqno(lowest),
        }

    def there(self) -> dict[str, object]:
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
        """Once all leases have ended, upkeep leaves what the newest state refers to."""
        self.clock.advance((len(self._ends) + 3) * APART_MS / 1000)
        client = self.observer
        client.expire(SHARD)
        client.roll_up(SHARD, force=True)
        client.collect(SHARD)
        client.audit_orphans(SHARD)
        check_swept(client, SHARD)

    def close(self) -> None:
        self.observer.close()
