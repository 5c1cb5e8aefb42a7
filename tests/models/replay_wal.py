"""Traces of the model of a timeline with a WAL (`wal.pml`) on the real code.

The store's clock stands still at 0, so that times are those of the model. After each step the WAL, the promise, the
handover, and what each rendition has are those of the model, and a reader that changes nothing reads the table as of
each time. In the end the processes are gone; then upkeep brings everything into the table and leaves the WAL empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import persist_lib as persist
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.catalog.records import HOLD, RenditionRecord
from persist_lib.catalog.renditions import Renditions
from persist_lib.catalog.wal import SCHEMA as WAL
from persist_lib.catalog.wal import wal_shard
from persist_lib.errors import HandoverRefused
from persist_lib.format.log import decode_row
from persist_lib.location import open_location
from persist_lib.schema.schema import DIFF
from persist_lib.testing.checks import check_world
from persist_lib.timeline.tables import Tables
from tests.models.processes import SETS, Mismatch, Process
from tests.models.replay import INLINE, Replay, Step, bits

TABLE = "t"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={}, times="ms")
NEVER = 99
_ALL = {"T": 12, "APPLIERS": 2, "TRUNCATIONS": 9}


class WalReplay(Replay):
    """A table with a WAL and a second rendition, and those who commit to it, apply it, hand it over and truncate it."""

    file = "wal.pml"
    profiles = (_ALL, {**_ALL, "TRUNCATIONS": 3}, {**_ALL, "APPLIERS": 1})
    mistaken = frozenset({"applier look_again"})
    start_ns = 0
    config = INLINE

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.observer = self.observing(self.config)
        self.controller = self.observer.controller()
        self.controller.tables().create(TABLE, SCHEMA, mode="wal")
        self.controller.make_rendition(TABLE, copy=True)
        contents = self.controller.catalog.fetch()
        self.collection = contents.find(TABLE)
        self.wal = wal_shard(str(self.collection.timeline))
        self.renditions = contents.renditions_of(self.collection.id)
        self.reads = persist.open(
            open_location(self.url, clock=self.clock),
            config=self.config,
            runtime=self.clock.runtime(98),
            read_only=True,
        )
        self.table_reads = self.reads.controller().tables()
        self._tables: dict[str, Tables] = {}
        self._read: dict[str, tuple[int, list[dict[str, int]]]] = {}
        self._checked: dict[str, str] = {}
        self._promised = 1
        self._uppers = [0, 0]

    @cached_property
    def _watched(self) -> set[str]:
        return {self.wal, self.collection.shard, *(one.names[0] for one in self.renditions)}

    def counts(self, process: Process) -> bool:
        """An append to the WAL, to the rendition shard or to a rendition, and a move of the WAL's hold."""
        if process.waits_for not in SETS:
            return False
        diffs = [
            (key, diff)
            for key, (_, data) in process.sent.items()
            if key in self._watched
            for diff in decode_row(data, key).diffs
        ]
        return any(diff.trace is not None or (key == self.wal and diff.holds) for key, diff in diffs)

    def carry_out(self, at: int, step: Step) -> None:
        process = self.process(f"{step.who} {step.number}")
        if process.name not in self._tables:
            self._tables[process.name] = process.client.controller().tables()
        getattr(self, f"_{step.who}")(process, self._tables[process.name], step)
        self._promised, self._uppers = step.number_of("promised"), step.numbers("uppers")

    def _committer(self, process: Process, tables: Tables, step: Step) -> None:
        time = step.argument - 1
        process.start(lambda: tables.insert(TABLE, [{"id": time}]))
        process.commits()
        if process.finish().time != time:
            raise Mismatch(f"it committed at {process.answer.time}, and not at {time}")

    def _applier(self, process: Process, tables: Tables, step: Step) -> None:
        match step.what:
            case "look_old" | "look_new":
                process.start(tables.apply)
                process.reads()
            case "promise":
                self.commits_if(process, is_new=step.number_of("promised") != self._promised)
            case _:
                self.commits_if(process, is_new=step.numbers("uppers") != self._uppers)
                process.finish()

    def _controller(self, process: Process, _tables: Tables, step: Step) -> None:
        match step.what:
            case "intend":
                at = None if step.argument == NEVER else step.argument
                process.start(lambda: process.client.controller().hand_over(TABLE, 2, at=at))
                process.reads()
            case "refused":
                process.finish(HandoverRefused)
            case _:
                process.commits()
                if process.finish() != step.argument:
                    raise Mismatch(f"it was handed over at {process.answer}, and not at {step.argument}")

    def _copier(self, process: Process, _tables: Tables, step: Step) -> None:
        if step.what == "copy":
            process.commits()
            process.finish()
            return
        process.start(lambda: process.client.controller().copy_rendition(TABLE, 2))
        self.commits_if(process, is_new=step.number_of("promised") != self._promised)

    def _truncation(self, process: Process, tables: Tables, step: Step) -> None:
        match step.what:
            case "read_wal":
                if process.waits_for is None:
                    process.start(tables.tidy)
                process.reads_until(lambda: process.asks == self.wal)
                process.reads_until(lambda: not process.asks.startswith(self.wal))
                if self.counts(process):
                    raise Mismatch("it should read the WAL now, and gives up what was not in the tables")
            case "read_tables":
                process.reads()
                has_rows = any(time < step.argument for time in bits(step.number_of("rows")))
                if not has_rows and step.number_of("since") + 1 >= step.argument:
                    process.finish()
            case "retract":
                process.commits()
            case _:
                process.commits()
                process.finish()

    def modelled(self, step: Step) -> dict[str, object]:
        handover = step.number_of("handover")
        return {
            "wal's upper": step.number_of("wal"),
            "wal's since": step.number_of("since"),
            "wal's rows": bits(step.number_of("rows")),
            "promised": step.number_of("promised"),
            "handed over at": None if handover == NEVER else handover,
            "uppers": step.numbers("uppers"),
            "old": _counted(step.numbers("old")),
            "new": _counted(step.numbers("new")),
        }

    def there(self) -> dict[str, object]:
        state = self.observer.machine(self.wal).fetch().state
        timeline = Renditions(self.observer, self.collection.shard, "ms", TABLE).fetch()
        old, new = self.renditions
        return {
            "wal's upper": state.upper.time,
            "wal's since": state.holds[HOLD].since.time,
            "wal's rows": sorted(row["at"] for row in self._rows(self.wal, WAL)),
            "promised": timeline.upper.time,
            "handed over at": timeline.last.start if len(timeline.spans) > 1 else None,
            "uppers": [self._upper(one) for one in self.renditions],
            "old": self._commits(old),
            "new": self._commits(new),
        }

    def _upper(self, rendition: RenditionRecord) -> int:
        return self.observer.machine(rendition.names[0]).fetch().state.upper.time or 0

    def _rows(self, shard: str, schema: persist.Schema) -> list[dict[str, int]]:
        """The newest rows of a shard, which are read again only where it has changed."""
        seqno = self.observer.machine(shard).fetch().seqno
        if self._read.get(shard, (0, []))[0] != seqno:
            with unheld(self.observer, shard, schema).snapshot(diff=True) as snapshot:
                self._read[shard] = seqno, snapshot.to_pylist()
        return self._read[shard][1]

    def _commits(self, rendition: RenditionRecord) -> Counter[int]:
        if not self._upper(rendition):
            return Counter()
        found: Counter[int] = Counter()
        for row in self._rows(rendition.names[0], rendition.columns):
            found[row["id"]] += row[DIFF]
        return found

    def check(self, step: Step) -> None:
        """As of the newest time and one before, the table has the commits up to then, unless it is still copied."""
        if step.state == self._checked:
            return
        self._checked, upper = step.state, step.number_of("wal")
        handover, (_, copied) = step.number_of("handover"), step.numbers("uppers")
        for time in {upper - 1, sum(step.numbers("uppers")) % upper}:
            if handover <= time and copied <= handover:
                continue
            with self.table_reads.read(TABLE, time) as found:
                ids = sorted(row["id"] for row in found.to_pylist())
            wanted = [commit for commit in bits(step.number_of("commits")) if commit <= time]
            if ids != wanted:
                raise Mismatch(f"as of {time} the table has the commits {ids}, and these are {wanted}")

    def rest(self) -> None:
        tables, last = self.controller.tables(), self.steps[-1]
        if last.number_of("handover") != NEVER:
            tables.apply()
            self.controller.copy_rendition(TABLE, 2, to_end=True)
        tables.apply()
        tables.tidy()
        if rows := self._rows(self.wal, WAL):
            raise Mismatch(f"upkeep leaves rows in the WAL: {rows}")
        with tables.read(TABLE) as found:
            ids = sorted(row["id"] for row in found.to_pylist())
        if ids != bits(last.number_of("commits")):
            raise Mismatch(f"in the end the table has {ids}, and not {bits(last.number_of('commits'))}")
        for shard in self._watched:
            check_world(self.observer, shard)

    def close(self) -> None:
        self.observer.close()
        self.reads.close()


def _counted(times: Sequence[int]) -> Counter[int]:
    return Counter({time: count for time, count in enumerate(times) if count})
