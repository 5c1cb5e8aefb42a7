"""Collections against the reference model: controllers, writers, readers, listeners, copies, handovers, the duty.

Each rendition is a plain list of updates, and the collection is whichever of them was handed over to last before the
time that is read. Every snapshot and every listener's sum must be what that list says, at every time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import persist_lib as persist
from persist_lib.catalog import CollectionReader, CollectionWriter
from persist_lib.errors import LeaseExpired, SinceViolation
from persist_lib.frontier import at
from persist_lib.testing import Model, check_location, contents_of
from tests import servers
from tests.renditions import Listening, Told
from tests.worlds import SCHEMA, World, row, updates

CONFIG = persist.Config(lease_ms=20_000, rollup_every=7, timeout_s=5)
WORDS = st.sampled_from(["a", "b", None])
IDS = st.integers(0, 6)
ROWS = st.lists(st.tuples(IDS, WORDS, st.sampled_from([1, 1, 1, 2, -1])), max_size=6)
WHO = st.integers(0, 1)


class CollectionMachine(RuleBasedStateMachine):
    """Two processes at one collection. Both may do everything at any time."""

    url = "memory:"
    consensus: str | None = None
    mode: Any = "compare_and_append"
    world_kind = World
    slack = 0
    """How far writers promise ahead, as they do where times are a clock."""

    @initialize(seed=st.integers(0, 1000), shards=st.integers(1, 3))
    def begin(self, seed: int, shards: int) -> None:
        self.folder = tempfile.mkdtemp()
        url = self.url.format(folder=self.folder)
        self.world = self.world_kind(url, seed, self.consensus)
        self.clients = [self.world.client(CONFIG) for _ in range(2)]
        self.controllers = [client.controller() for client in self.clients]
        self.name, self.names = "c", 0
        self.controllers[0].create("c", SCHEMA, shards=shards, mode=self.mode)
        self.told = Told()
        self.made: dict[int, bool] = {}
        self.readers: list[tuple[CollectionReader, int]] = []
        self.listening: list[Listening] = []
        self.writers: dict[int, CollectionWriter] = {}
        self.patch = pytest.MonkeyPatch()
        if self.slack:
            self.patch.setattr(CollectionWriter, "_ahead", lambda _, promise: at((promise.time or 0) + self.slack))
        self.count = 1
        self.since = 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.come_to_rest()
            finally:
                self.patch.undo()
                self.world.close()
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def upper(self) -> int:
        return self.told.last.upper.time or 0

    def append(self, rows: list[tuple[int, str | None, int]], who: int, step: int) -> None:
        lower = self.upper
        made = [row(id_, word, lower + index % step, diff) for index, (id_, word, diff) in enumerate(rows)]
        writer = self.writer(who)
        (writer.append if self.mode == "append" else writer.compare_and_append)(made, lower, lower + step)
        self.told.last.append(updates(made), at(lower), at(lower + step))
        if self.mode == "append":  # instances of a source write all renditions alike
            self.append_independently(who, made, lower, step)

    def writer(self, who: int) -> CollectionWriter:
        """One that stays open, so that it keeps what it has read."""
        return self.writers.get(who) or self.writers.setdefault(who, self.controllers[who].open_writer(self.name))

    def append_independently(self, who: int, made: list[dict[str, Any]], lower: int, step: int) -> None:
        for number, is_copy in self.made.items():
            if not is_copy and number in self.told.renditions and number != self.told.starts[-1][1]:
                with self.controllers[who].open_writer(self.name, rendition=number) as writer:
                    mine = [{**one, "word": f"{one['word']}{number}"} for one in made]
                    writer.append(mine, lower, lower + step)
                    self.told.renditions[number].append(updates(mine), at(lower), at(lower + step))

    @rule(who=WHO, rows=ROWS, step=st.integers(1, 3))
    def write(self, who: int, rows: list[tuple[int, str | None, int]], step: int) -> None:
        self.append(rows, who, step)

    @precondition(lambda self: self.mode == "compare_and_append" and not self.has_doubles())
    @rule(who=WHO, ids=st.dictionaries(IDS, WORDS, min_size=1, max_size=4), is_delete=st.booleans())
    def change_by_key(self, who: int, ids: dict[int, str | None], is_delete: bool) -> None:
        lower, now = self.upper, self.told.contents(max(0, self.upper - 1))
        writer, rows = self.writer(who), [{"id": id_, "word": word} for id_, word in ids.items()]
        assert writer.fetch_upper() == at(lower)
        written = writer.delete([*ids]) if is_delete else writer.upsert(rows)
        old = [(data, lower, -diff) for data, diff in now.items() if data[0] in ids]
        new = [] if is_delete else [((id_, word), lower, 1) for id_, word in ids.items()]
        if written.count:
            self.told.last.append(old + new, at(lower), at(lower + 1))
            assert written.upper == at(lower + 1)

    def has_doubles(self) -> bool:
        return any(diff < 0 for diff in self.told.contents(max(0, self.upper - 1)).values())

    @rule(who=WHO)
    def close_writer(self, who: int) -> None:
        if who in self.writers:
            self.writers.pop(who).close()

    @rule(who=WHO)
    def open_reader(self, who: int) -> None:
        if len(self.readers) < 3:
            reader = self.controllers[who].open_reader(self.name)
            self.readers.append((reader, reader.since.time or 0))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        reader, since = data.draw(st.sampled_from(self.readers))
        if self.upper > since:
            as_of = data.draw(st.integers(since, self.upper - 1))
            assert contents_of(reader.snapshot(as_of, diff=True).to_arrow()) == self.told.contents(as_of)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def give_up_history(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        reader, since = self.readers[index]
        to = data.draw(st.integers(since, max(since, self.upper - 1)))
        reader.downgrade_since(to)
        self.readers[index] = reader, to

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def begin_to_listen(self, data: st.DataObject) -> None:
        reader, since = data.draw(st.sampled_from(self.readers))
        if self.upper > since and len(self.listening) < 3:
            self.listening.append(Listening(reader, data.draw(st.integers(since, self.upper - 1)), self.told))

    @precondition(lambda self: self.listening)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        heard = data.draw(st.sampled_from(self.listening))
        heard.poll()
        assert heard.frontier == max(heard.frontier, self.upper)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_reader(self, data: st.DataObject) -> None:
        reader, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        reader.close()

    @rule(who=WHO, shards=st.integers(1, 4), is_copy=st.booleans(), command=st.integers(0, 3))
    def make_rendition(self, who: int, shards: int, is_copy: bool, command: int) -> None:
        """Repeated by the other one under the same id, it is the same."""
        if len(self.made) >= 3 or (self.mode == "append" and self.upper and not is_copy):
            return
        id_, is_copy = f"make-{self.count}-{command}", is_copy or self.slack > 0
        made = self.controllers[who].make_rendition(self.name, shards=shards, copy=is_copy, command=id_)
        again = self.controllers[1 - who].make_rendition(self.name, shards=shards, copy=is_copy, command=id_)
        self.count += 1
        assert made.number == again.number == self.count
        self.made[made.number] = is_copy
        if not is_copy:
            self.told.renditions[made.number] = Model()

    @precondition(lambda self: any(self.made.values()))
    @rule(data=st.data(), who=WHO)
    def copy(self, data: st.DataObject, who: int) -> None:
        number = data.draw(st.sampled_from([n for n, is_copy in self.made.items() if is_copy]))
        if self.can_copy(number):
            self.controllers[who].copy_rendition(self.name, number)

    def can_copy(self, number: int) -> bool:
        found = {one.number: one for one in self.controllers[0].describe(self.name).renditions}
        return number in found and any(one.active and one.number == found[number].copies for one in found.values())

    @precondition(lambda self: self.made)
    @rule(data=st.data(), who=WHO, ahead=st.integers(0, 2))
    def hand_over(self, data: st.DataObject, who: int, ahead: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.made)))
        is_copy, controller, old = self.made[number], self.controllers[who], self.told.starts[-1][1]
        if is_copy and not self.can_copy(number):
            with pytest.raises((persist.HandoverRefused, persist.NotFound)):
                controller.hand_over(self.name, number)
            return
        if not is_copy:
            self.reach(controller, number)
        asked = None
        if ahead and is_copy:
            asked = max(self.upper + self.slack, 1 + self.told.starts[-1][0]) + ahead
        forced = not is_copy and self.mode == "append"  # instances are level with one another
        start = controller.hand_over(self.name, number, at=asked, force=forced, command=f"hand-{number}-{self.count}")
        again = self.controllers[1 - who].hand_over(
            self.name, number, at=asked, force=forced, command=f"hand-{number}-{self.count}"
        )
        assert again == start
        if is_copy:
            if start > self.upper and asked is None:  # it was promised ahead, and the handover has ended the old one
                self.told.last.append([], at(self.upper), at(start))
            if start > self.upper:  # what is written before goes to the old one
                self.append([(1, "before", 1)], who, start - self.upper)
            controller.copy_rendition(self.name, number, to_end=True)
            self.told.copy(number, old)
        self.told.hand_over(number, start)
        del self.made[number]
        if self.mode == "append":
            self.made[old] = False

    def reach(self, controller: Any, number: int) -> None:
        """Write an independent rendition until it can be handed over to, and is no further than the collection."""
        model, goal = self.told.renditions[number], max(self.upper, self.told.starts[-1][0] + 1)
        lower = model.upper.time or 0
        if goal > self.upper:
            self.append([], 0, goal - self.upper)
        goal += 1
        if lower < goal and self.mode == "compare_and_append":
            rows = [row(time, f"new {number}", time) for time in range(lower, goal)]
            with controller.open_writer(self.name, rendition=number) as writer:
                writer.compare_and_append(rows, lower, goal)
            model.append(updates(rows), at(lower), at(goal))

    @precondition(lambda self: self.made)
    @rule(data=st.data(), who=WHO)
    def drop_rendition(self, data: st.DataObject, who: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.made)))
        if all(number != active for _, active in self.told.starts):
            self.controllers[who].drop_rendition(self.name, number)
            del self.made[number]

    @rule(who=WHO)
    def rename(self, who: int) -> None:
        self.names += 1
        self.controllers[who].rename(self.name, f"c{self.names}")
        self.name = f"c{self.names}"

    @rule(who=WHO, retention=st.sampled_from([None, 0, 1, 5]))
    def retain(self, who: int, retention: int | None) -> None:
        self.controllers[who].alter(self.name, retention=retention)

    @rule(who=WHO, dry_run=st.booleans())
    def tend(self, who: int, dry_run: bool) -> None:
        self.controllers[who].tend(dry_run=dry_run)

    @rule(who=WHO)
    def compact(self, who: int) -> None:
        for rendition in self.controllers[who].describe(self.name).renditions:
            for shard in rendition.shards[:1]:
                self.clients[who].compact(shard)

    @rule(who=WHO)
    def beat(self, who: int) -> None:
        for client in (self.clients[who], self.clients[1 - who]):
            client.heartbeat()

    @rule()
    def leases_end(self) -> None:
        self.world.clock.advance(30)
        for shard in self.clients[0].shards():
            self.clients[0].expire(shard)
        for reader, since in self.readers:
            if self.upper > since:
                with pytest.raises((LeaseExpired, SinceViolation)):
                    reader.snapshot(self.upper - 1, diff=True)
        self.readers, self.listening = [], []
        for who in (*self.writers,):
            self.close_writer(who)

    def come_to_rest(self) -> None:
        """Every time that can be read is right; with no history to keep, one rendition is left; dropped, nothing is."""
        controller = self.controllers[0]
        for heard in self.listening:
            heard.poll()
        description = controller.describe(self.name)
        with controller.open_reader(self.name) as reader:
            for time in range(description.since.time or 0, self.upper):
                assert contents_of(reader.snapshot(time, diff=True).to_arrow()) == self.told.contents(time), (
                    f"as of {time}"
                )
        check_location(self.world.client())
        self.leases_end()
        for number in sorted(self.made):
            if all(number != active for _, active in self.told.starts):
                controller.drop_rendition(self.name, number)
        controller.alter(self.name, retention=0)
        for _ in range(3):
            controller.tend()
        if self.upper > self.told.starts[-1][0]:
            assert [one.number for one in controller.describe(self.name).renditions] == [self.told.starts[-1][1]]
        controller.drop(self.name)
        controller.tend()
        assert controller.list() == []
        assert controller.tend().steps == ()
        client = self.clients[0]
        for shard in client.shards():
            assert shard == "_catalog" or client.inspect(shard).state.is_finished(), shard


class AheadMachine(CollectionMachine):
    """Writers promise ahead of what they write."""

    slack = 3


class DefiniteMachine(CollectionMachine):
    """A collection of a source: any number of writers append identical data, also to renditions that may follow."""

    mode = "append"


STEPS = int(os.environ.get("PERSIST_COLLECTION_STEPS", "20"))
EXAMPLES = int(os.environ.get("PERSIST_COLLECTION_EXAMPLES", "8"))


class OnFiles(CollectionMachine):
    """On SQLite."""

    url = "file:{folder}/data"


class OnPostgres(CollectionMachine):
    """With Consensus on PostgreSQL."""

    url = "file:{folder}/data"

    def __init__(self) -> None:
        super().__init__()
        self.consensus = servers.postgres_at(persist_schema=f"c{os.urandom(8).hex()}")


def some(part: int) -> settings:
    return settings(max_examples=max(2, EXAMPLES // part), stateful_step_count=STEPS)


TestCollections = CollectionMachine.TestCase
TestCollections.settings = some(1)
TestAhead = AheadMachine.TestCase
TestAhead.settings = some(1)
TestDefinite = DefiniteMachine.TestCase
TestDefinite.settings = some(1)
TestOnFiles = pytest.mark.slow(OnFiles.TestCase)
TestOnFiles.settings = some(3)
TestOnPostgres = pytest.mark.slow(OnPostgres.TestCase)
TestOnPostgres.settings = some(4)
