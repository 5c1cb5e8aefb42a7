"""Traces of the model of a source (`sources.pml`) on the real code.

Instances are real ones of a source of the kind `Custom`, over an upstream in memory (`upstream`). They also stop where
a part of their step begins (`Stopping`). Each has the store's clock of its own, which says the time that it binds at:
time n of the model is (n + 1) * APART_MS. After each step, what the upstream has and was told, the bindings with their
checks, their hold, and what the collections have at which times are those of the model. In the end the instances are
gone, and a new one does what is left, or says why it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa

import persist_lib as persist
from persist_lib.catalog.answers import integer_times
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import RenditionRecord
from persist_lib.errors import Determinate, Diverged, Gone, SinceViolation
from persist_lib.format.log import decode_row
from persist_lib.location.wrap.around import Operation
from persist_lib.schema.schema import DIFF, TIME
from persist_lib.sources import Custom, Ingestion, Progress
from persist_lib.sources.bindings import Bindings, Window
from persist_lib.sources.protocol import HOLD
from persist_lib.testing.checks import check_world
from tests.models.processes import SETS, Mismatch, Process
from tests.models.replay import INLINE, Replay, Step
from tests.models.upstream import LIVES, PARTITION, UPSTREAMS, Upstream

SOURCE = "s"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={})
APART_MS = 10_000
"""Between two times of the model: more than after which a source ticks, and its holds move."""
_ALL = {"M": 4, "T": 6, "RESTARTS": 0, "FORGETS": 1}


class Before(NamedTuple):
    """What of the model's state a step begins from."""

    upper: int
    hold: int
    uppers: list[int]


class Stopping(Ingestion):
    """An instance that also stops where it begins to look, to move holds, to read, and to tell."""

    process: Process

    def _stop(self, before: str) -> None:
        self.process.request(Operation(before, ""), lambda: None)

    def _catch_up(self, timeout_s: float) -> Progress:
        self._stop("look")
        return super()._catch_up(timeout_s)

    def _move_holds(self, time: int) -> None:
        self._stop("hold")
        super()._move_holds(time)

    def _parts(self, window: Window) -> Iterable[tuple[Window, pa.Table]]:
        if window.steps and any(low.address < high.address for low, high in window.ranges().values()):
            self._stop("read")
        return super()._parts(window)

    def _tell(self) -> None:
        self._stop("tell")
        super()._tell()


class SourcesReplay(Replay):
    """A source with two instances, and its upstream."""

    file = "sources.pml"
    profiles = (_ALL, {**_ALL, "FORGETS": 0}, {**_ALL, "RESTARTS": 2})
    most_statements = 30_000
    start_ns = 0
    config = INLINE

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.observer = self.observing(self.config)
        self.upstream = Upstream(self.url)
        sources = self.observer.sources()
        sources.create(
            SOURCE, Custom(factory="tests.models.upstream:open_reader", options={"name": self.upstream.name}), SCHEMA
        )
        self.record = sources.find(SOURCE)
        contents = self.observer.controller().catalog.fetch()
        self.output, self.errors = (
            contents.renditions_of(self.record.collections[role])[0] for role in ("output", "errors")
        )
        self.bindings = Bindings(self.observer, self.record.reader.clock(sources.controller, self.record, "").shard)
        self._instances: dict[str, Stopping] = {}
        self._before = Before(0, 0, [0, 0])

    def counts(self, process: Process) -> bool:
        """An append to the bindings or a collection, a move of the bindings' hold, or a stop of `Stopping`."""
        if process.waits_for in {"look", "hold", "read", "tell"}:
            return True
        if process.waits_for not in SETS:
            return False
        ((key, (_, data)),) = process.sent.items()
        diffs = decode_row(data, key).diffs
        if key == self.bindings.shard:
            return any(diff.trace is not None or diff.holds for diff in diffs)
        return key in {*self.output.names, *self.errors.names} and any(diff.trace is not None for diff in diffs)

    def carry_out(self, at: int, step: Step) -> None:
        if step.who == "upstream":
            self._comes(step)
        else:
            process = self.process(f"{step.who} {step.number}")
            self._acts(process, self._instance(process), step)
        self._before = Before(step.number_of("upper"), step.number_of("hold"), step.numbers("uppers"))

    def _comes(self, step: Step) -> None:
        match step.what:
            case "message":
                self.upstream.have += 1
            case "forget":
                self.upstream.first = self.upstream.have
            case _:
                self.upstream.begin_again()

    def _instance(self, process: Process) -> Stopping:
        if process.name not in self._instances:
            sources = process.client.sources()
            made = self._instances[process.name] = Stopping(sources.controller, self.record, process.name)
            made.process = process
        return self._instances[process.name]

    def _acts(self, process: Process, instance: Stopping, step: Step) -> None:
        match step.what:
            case "propose" | "tick" | "nothing" | "diverged":
                self._proposes(process, instance, step)
            case "mint":
                process.commits()
            case "lost":
                if process.step()[1] is not False:
                    raise Mismatch("it should lose the race for the binding")
            case "look" | "hold" | "follow" | "bind" | "passed":
                self._looks(process, instance, step)
            case "read":
                if process.waits_for == "read":
                    process.step()
                process.lost()
            case "late" | "gone" | "other":
                self._goes_on(process, "read")
                process.finish({"late": Determinate, "gone": Gone, "other": Diverged}[step.what])
            case "write" | "write_errors":
                self.commits_if(process, is_new=self._before.uppers != step.numbers("uppers"))
            case "tell":
                self._goes_on(process, "tell")
                process.finish()
            case other:
                raise Mismatch(f"no such step: {other}")

    def _proposes(self, process: Process, instance: Stopping, step: Step) -> None:
        upper = self._before.upper
        process.ahead_ms = _upper_ms(upper) if step.what == "nothing" else (upper + 1) * APART_MS
        if process.waits_for is None:
            process.start(instance.step)
        if step.what == "diverged":
            process.finish(Diverged)
            return
        process.reads()
        self._stands(process, {"look"} if step.what == "nothing" else SETS)

    def _looks(self, process: Process, instance: Stopping, step: Step) -> None:
        if step.what == "look":
            if process.waits_for is None:
                process.start(lambda: instance.step(mints=False))
            self._goes_on(process, "look")
            self._stands(process, {"hold"})
        elif self._before.hold != step.number_of("hold"):
            process.lost()
            self._stands(process, {"hold"})
            process.step()
            process.commits()
        elif step.what == "follow":  # others have moved it further
            self._goes_on(process, "hold")
        elif step.what != "hold":
            if process.waits_for == "hold":
                process.step()
            if step.what == "passed":
                process.finish(SinceViolation)
            else:
                process.lost()

    def _goes_on(self, process: Process, what: str) -> None:
        """It begins a part of its step, and comes to the next request that counts and is not lost."""
        process.lost()
        self._stands(process, {what})
        process.step()
        process.lost()

    def _stands(self, process: Process, where: Collection[str]) -> None:
        if process.waits_for is None or process.waits_for not in where:
            ended = process.error or process.answer
            raise Mismatch(f"{process.name} should be at {sorted(where)}, and is at {process.waits_for} ({ended!r})")

    def modelled(self, step: Step) -> dict[str, object]:
        numbers = {name: step.numbers(name) for name in step.state}
        (hold,), places = numbers["hold"], range(len(numbers["out"]))
        marks = [*zip(numbers["marks"], map(str, numbers["checks"]), strict=True)]
        return {
            **{name: numbers[name][0] for name in ("have", "first", "life", "told", "upper", "hold")},
            "uppers": numbers["uppers"],
            "marks": [mark if mark[0] else None for mark in marks][max(0, hold - 1) :],
            "output": Counter({(LIVES * n + numbers["lives"][n], numbers["at"][n]): numbers["out"][n] for n in places}),
        }

    def there(self) -> dict[str, object]:
        state = self.observer.machine(self.bindings.shard).fetch().state
        upper, hold = _index(state.upper.time or 0), _index((state.holds[HOLD].since.time or -1) + 1)
        up = self.upstream
        return {
            "have": up.have, "first": up.first, "life": up.life, "told": up.told, "upper": upper, "hold": hold,
            "uppers": [self._upper(one) for one in (self.output, self.errors)],
            "marks": self._marks(hold, upper), "output": self._written(),
        }  # fmt: skip

    def check(self, step: Step) -> None:
        """The bindings' since is what their hold keeps."""
        state = self.observer.machine(self.bindings.shard).state
        if state.since != state.holds[HOLD].since:
            raise Mismatch(f"the bindings' since is {state.since}, and their hold is {state.holds[HOLD]}")

    def _upper(self, rendition: RenditionRecord) -> int:
        return _index(self.observer.machine(rendition.names[0]).fetch().state.upper.time or 0)

    def _marks(self, hold: int, upper: int) -> list[Any]:
        """The mark at each time from since on, as those who come then read them."""
        found = []
        for time in range(max(0, hold - 1), upper):
            mark = self.bindings.since(_upper_ms(time + 1)).start.get(PARTITION)
            found.append(None if mark is None else tuple(mark))
        return found

    def _written(self) -> Counter[tuple[int, int]]:
        """The rows of the output with their times."""
        (name,) = self.output.names
        reader = unheld(self.observer, name, self.output.columns)
        if not (upper := reader.fetch_upper().time):
            return Counter()
        with reader.changes(None, upper - 1) as changes:
            rows = integer_times(changes.to_arrow())
        found: Counter[tuple[int, int]] = Counter()
        for row in rows.to_pylist():
            found[(row["id"], row[TIME] // APART_MS - 1)] += row[DIFF]
        return found

    def rest(self) -> None:
        """A new instance does what is left, unless that is gone, or what is bound is of another life."""
        last, up = self.steps[-1], self.upstream
        marks, least = [0, *last.numbers("marks")], min(last.numbers("uppers"))
        is_other = marks[-1] > 0 and last.numbers("checks")[-1] != up.life
        is_gone = marks[least] < up.first and marks[least] < max(marks[-1], up.have)
        self.clock.advance(100 * APART_MS / 1_000)
        try:
            with closing(self.observer.sources().open(SOURCE)) as ingestion:
                ingestion.step()
        except Diverged:
            if not is_other:
                raise
        except Gone:
            if is_other or not is_gone:
                raise
        else:
            if is_other or is_gone:
                raise Mismatch("a new instance ingests what is gone, or of another life, and does not say so")
            ids = {id_ for id_, _ in self._written()}
            if lost := [n for n in range(up.have) if LIVES * n + up.life not in ids]:
                raise Mismatch(f"a new instance leaves the messages {lost}")
        for shard in (self.bindings.shard, *self.output.names, *self.errors.names):
            check_world(self.observer, shard)

    def close(self) -> None:
        self.observer.close()
        UPSTREAMS.pop(self.upstream.name, None)


def _upper_ms(upper: int) -> int:
    """What is the upper in the real world."""
    return upper * APART_MS + 1 if upper else 0


def _index(upper_ms: int) -> int:
    found = upper_ms // APART_MS
    if _upper_ms(found) != upper_ms:
        raise Mismatch(f"an upper is {upper_ms}, which the model does not have")
    return found
