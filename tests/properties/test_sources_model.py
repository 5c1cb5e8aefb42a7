"""A source's instances against a plain loop over its files: definite, tolerant, concise, whatever is done to them.

Definite: what one reader once read of a collection as of a time is what every reader reads there. Tolerant: instances
are killed at any request, stand still, lose leases and continue; the end is that of a plain loop. Concise: t never
falls, nothing before the addresses at t is asked for again, and the upstream gets no more than that.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.sources import Ingestion, Meaning, running
from persist_lib.testing import check_location
from tests.faults.test_collection_commands import Died, Dying
from tests.ingests import CONFIG, Lines, Topics, Watched, topics_of_files
from tests.worlds import World

WHO = st.integers(0, 1)
FILES = st.sampled_from("abc")


class SourceMachine(RuleBasedStateMachine):
    """Two instances of one source, which are killed and begun again."""

    @initialize(upserts=st.booleans(), keeps=st.booleans(), shards=st.integers(1, 2), apart=st.booleans())
    def begin(self, upserts: bool, keeps: bool, shards: int, apart: bool) -> None:
        """Files, or `apart` topics of Kafka, which have an output each."""
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(seed=5)
        folder = Path(self.folder.name) / "in"
        self.lines = Topics(folder, "abc") if apart else Lines(folder)
        self.patches = ExitStack()
        self.patches.enter_context(topics_of_files())
        meaning = Meaning(envelope="upsert" if upserts else "none", keep_raw=keeps)
        self.sizes = running.Ingestion.step_bytes, running.Ingestion.window_bytes
        running.Ingestion.step_bytes, running.Ingestion.window_bytes = 60, 150
        self.watched = Watched(self.world, self.lines, meaning, shards)
        self.patches.enter_context(self.watched.watching())
        self.plans = [Dying(None, happens=True) for _ in range(2)]
        self.every_plan = [*self.plans]
        self.clients: list[persist.Client | None] = [None, None]
        self.instances: list[Ingestion | None] = [None, None]

    def teardown(self) -> None:
        if not hasattr(self, "every_plan"):
            return
        try:
            for plan in self.every_plan:  # connections are closed at last
                plan.k = None
            self.come_to_rest()
        finally:
            self.patches.close()
            running.Ingestion.step_bytes, running.Ingestion.window_bytes = self.sizes
            self.world.close()
            self.folder.cleanup()

    def instance(self, who: int) -> Ingestion:
        """The instance, or a new one for one that died."""
        found = self.instances[who]
        if found is None:
            self.plans[who] = Dying(None, happens=True)
            self.every_plan.append(self.plans[who])
            client = self.clients[who] = self.world.client(CONFIG, plan=self.plans[who])
            found = self.instances[who] = self.watched.open(client)
        return found

    @rule(name=FILES, id_=st.integers(0, 3), word=st.sampled_from(["x", "y", "z"]))
    def a_line_comes(self, name: str, id_: int, word: str) -> None:
        self.lines.add(name, id_, word)

    @rule(name=FILES, data=st.sampled_from([b"garbage\n", b"\n", b'{"id": 1, "wo', b'rd": "q"}\n', b"\xff\n"]))
    def something_else_comes(self, name: str, data: bytes) -> None:
        self.lines.append(name, data)

    @rule(seconds=st.sampled_from([0.001, 1, 5, 30]))
    def time_goes_by(self, seconds: float) -> None:
        """30 seconds are more than a lease."""
        self.world.clock.advance(seconds)

    @rule(who=WHO, mints=st.booleans())
    def step(self, who: int, mints: bool) -> None:
        with suppress(PersistError):
            self.instance(who).step(mints=mints)
        self.watched.learn()

    @rule(who=WHO, k=st.integers(1, 25), happens=st.booleans())
    def step_and_die(self, who: int, k: int, happens: bool) -> None:
        """Its connections are cut at a request that changes something, which itself still happens or not."""
        instance, plan = self.instance(who), self.plans[who]
        plan.k, plan.happens = plan.seen + k, happens
        try:
            with suppress(PersistError):
                instance.step()
        except Died:
            self.instances[who] = None
        else:
            plan.k = None
        self.watched.learn()

    @rule()
    def tend(self) -> None:
        with suppress(PersistError):
            self.watched.controller.tend()
        self.watched.client.heartbeat()

    @rule(who=WHO)
    def nothing_before_t_is_asked_for(self, who: int) -> None:
        durable = self.watched.durable()
        self.watched.asked.clear()
        with suppress(PersistError):
            self.instance(who).step()
        assert all(start >= durable.get(partition, 0) for partition, start in self.watched.asked)
        assert all(address <= self.watched.durable().get(name, 0) for name, address in self.watched.told.items())

    def come_to_rest(self) -> None:
        """Without deaths, any one instance makes all that is there durable, and what was read stays so."""
        for who in (0, 1):
            for _ in range(60):
                self.world.clock.advance(1)
                try:
                    if self.instance(who).step().is_idle:
                        break
                except PersistError:
                    continue
            else:
                raise AssertionError("it never comes to rest")
            self.watched.learn()
        self.watched.check_end()
        check_location(self.world.client())


TestSources = SourceMachine.TestCase
TestSources.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
