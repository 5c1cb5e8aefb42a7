"""The whole library against the reference model: random calls by several clients, faults included, all checked."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import persist_lib as persist
from persist_lib.core.holds import newest_time
from persist_lib.errors import AlreadyProduced, Indeterminate, LeaseExpired, SinceViolation, UpperMismatch
from persist_lib.testing import Chances, Model, Outcome, check_swept, check_world, contents_of, updates_of
from persist_lib.testing.model import Row, summed
from tests import servers
from tests.at_a_time import commit_at, written
from tests.worlds import World

SCHEMAS = [
    persist.Schema(key={"id": "int64"}, value={"word": "string", "f": "double"}),
    persist.Schema(key={"id": "int64"}, value={"word": "string", "f": "double", "more": "int64"}),
    persist.Schema(key={"id": "int64"}, value={"word": "string", "f": "double", "more": "int64", "last": "binary"}),
]
CONFIGS = [
    persist.Config(lease_ms=20_000, rollup_every=7, timeout_s=2),
    persist.Config(
        lease_ms=20_000, rollup_every=16, timeout_s=2, inline_bytes=0, part_bytes=64 * 1024, task_bytes=64 * 1024
    ),
    persist.Config(lease_ms=20_000, rollup_every=5, timeout_s=2, inline_bytes=900),
]
FAULTS = {Outcome.REFUSED: 0.04, Outcome.HAPPENED_UNKNOWN: 0.04, Outcome.LOST_UNKNOWN: 0.04}
VALUES = {
    "id": st.one_of(st.none(), st.integers(-2, 4)),
    "word": st.sampled_from([None, "", "a", "ab", "\0"]),
    "f": st.sampled_from([None, 0.0, -0.0, float("nan"), 1.5]),
    "more": st.sampled_from([None, 0, 7]),
    "last": st.sampled_from([None, b"", b"x"]),
}
Change = tuple[dict[str, Any], int, int]
"""Values, how far after lower, diff."""
CHANGES = st.lists(
    st.tuples(st.fixed_dictionaries(VALUES), st.integers(0, 6), st.sampled_from([1, 1, 2, -1])), max_size=12
)


class LibraryMachine(RuleBasedStateMachine):
    """Three clients of one shard; the middle one's location fails now and then."""

    url = "memory:"
    consensus: str | None = None
    world_kind = World

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.schemas = 1
        self.finished = False
        self.readers: list[tuple[persist.ReadHandle, int]] = []
        self.snapshots: list[tuple[persist.Snapshot, int, persist.ReadHandle]] = []
        self.listens: list[tuple[persist.Listen, int, Counter[Any]]] = []
        self.holds: dict[str, int] = {}

    @initialize(config=st.sampled_from(CONFIGS), seed=st.integers(0, 1000))
    def begin(self, config: persist.Config, seed: int) -> None:
        self.config = config
        self.world = self.world_kind(self.url, seed, self.consensus)
        self.faults = Chances(seed, FAULTS)
        self.faults.stop()
        self.clients = [
            self.world.client(config),
            self.world.client(config, plan=self.faults),
            self.world.client(config),
        ]
        self.writers = [client.open_writer("s", SCHEMAS[0]) for client in self.clients]
        self.checker = self.world.client()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.faults.stop()
            try:
                if not self.finished:
                    self.come_to_rest()
            finally:
                self.world.close()

    @property
    def upper(self) -> int:
        return self.model.upper.time or 0

    def rows(
        self, changes: list[Change], lower: int, upper: int, schema: persist.Schema
    ) -> tuple[list[dict[str, Any]], Any]:
        rows = [
            {**{name: values[name] for name in schema.names}, "_time": min(lower + after, upper - 1), "_diff": diff}
            for values, after, diff in changes
        ]
        newest = SCHEMAS[self.schemas - 1].names
        from persist_lib.testing.model import updates_from  # noqa: PLC0415

        return rows, updates_from(newest, rows)

    @rule(who=st.integers(0, 2), changes=CHANGES, step=st.integers(1, 5))
    def append(self, who: int, changes: list[Change], step: int) -> None:
        write, lower = self.writers[who], self.upper
        rows, updates = self.rows(changes, lower, lower + step, write.schema)
        if self.finished:
            return
        self.acknowledge(lambda token: write.compare_and_append(rows, lower, lower + step, token=token), who)
        self.model.append(updates, persist.at(lower), persist.at(lower + step))

    @rule(who=st.integers(0, 2), changes=CHANGES, step=st.integers(1, 5), runs=st.integers(1, 3))
    def append_what_was_written_before(self, who: int, changes: list[Change], step: int, runs: int) -> None:
        """Objects that were written before it was known at which time they are appended."""
        write, lower = self.writers[who], self.upper
        rows, _ = self.rows(changes, 0, 1, write.schema)
        if self.finished or not changes or not (batch := written(write, rows, runs)).parts:
            return

        def commit(token: bytes | None) -> None:
            nonlocal batch
            try:
                commit_at(write, batch, lower, lower + step, lower + step - 1, token)
            except LeaseExpired:  # whoever uploaded it is retired, so it has to be written again, by a new writer
                write._registration.forget()
                batch = written(write, rows, runs)
                raise

        self.acknowledge(commit, who)
        _, updates = self.rows([(values, step, diff) for values, _, diff in changes], lower, lower + step, write.schema)
        self.model.append(updates, persist.at(lower), persist.at(lower + step))

    @rule(
        who=st.integers(0, 2),
        changes=CHANGES,
        step=st.integers(1, 5),
        name=st.sampled_from("ab"),
        ahead=st.integers(0, 2),
    )
    def append_by_a_producer(self, who: int, changes: list[Change], step: int, name: str, ahead: int) -> None:
        """Repeated without a token until it is there, or is said to be: its number is enough to append it once."""
        write, lower, last = self.writers[who], self.upper, self.model.produced.get(name, -1)
        rows, updates = self.rows(changes, lower, lower + step, write.schema)
        if self.finished or last + ahead < 0:
            return
        number, answered = last + ahead, []

        def append(_token: bytes | None) -> None:
            try:
                write.compare_and_append(rows, lower, lower + step, producer=(name, number))
            except AlreadyProduced as error:
                answered.append(error.last)

        self.acknowledge(append, who)
        assert answered in ([], [number])
        if ahead:
            self.model.append_produced(updates, persist.at(lower), persist.at(lower + step), (name, number))
        else:
            assert answered == [last], "it was not appended again"

    def acknowledge(self, call: Any, who: int) -> None:
        """Until it is done: an unknown outcome is asked for by its token, whatever did not happen is tried again."""
        token = None
        if who == 1:
            self.faults.go_on()
        try:
            for attempt in range(50):
                if attempt == 8:
                    self.faults.stop()
                try:
                    call(token)
                except Indeterminate as error:
                    token = error.fields.get("token")
                except (LeaseExpired, persist.Determinate):
                    continue
                else:
                    return
            raise AssertionError("did not succeed without faults")
        finally:
            self.faults.stop()

    @rule(who=st.integers(0, 2), changes=CHANGES, back=st.integers(0, 8), step=st.integers(1, 5))
    def append_what_others_have_too(self, who: int, changes: list[Change], back: int, step: int) -> None:
        """Definite data: what overlaps is what is there already, and the rest is new."""
        if self.finished:
            return
        write, upper = self.writers[who], self.upper
        lower, names = max(0, upper - back), SCHEMAS[self.schemas - 1].names
        if write.schema.names != names:
            return
        rows, fresh = self.rows(changes, upper, upper + step, write.schema)
        known = [
            {**{n: _plain(v) for n, v in zip(names, data, strict=True)}, "_time": time, "_diff": diff}
            for data, time, diff in self.model.updates
            if lower <= time
        ]
        self.acknowledge(lambda token: write.append(known + rows, lower, upper + step, token=token), who)
        self.model.append(fresh, persist.at(upper), persist.at(upper + step))

    @rule(who=st.integers(0, 2))
    def a_gap_is_refused(self, who: int) -> None:
        if not self.finished:
            for verb in (self.writers[who].compare_and_append, self.writers[who].append):
                try:
                    verb([], self.upper + 2, self.upper + 3)
                except (UpperMismatch, LeaseExpired):
                    continue
                raise AssertionError("a gap was accepted")

    @rule(who=st.integers(0, 2))
    def open_reader(self, who: int) -> None:
        if not self.finished and len(self.readers) < 4:
            read = self.clients[who].open_reader("s", SCHEMAS[self.schemas - 1])
            self.readers.append((read, read.since.time or 0))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def take_snapshot(self, data: st.DataObject) -> None:
        read, since = data.draw(st.sampled_from(self.readers))
        if self.upper <= since:
            return
        as_of = data.draw(st.integers(since, self.upper - 1))
        with self.living(read):
            self.snapshots.append((read.snapshot(as_of, diff=True), as_of, read))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), n=st.integers(1, 3))
    def read_snapshot(self, data: st.DataObject, n: int) -> None:
        index = data.draw(st.integers(0, len(self.snapshots) - 1))
        snapshot, as_of, read = self.snapshots.pop(index)
        width = len(read.schema.names)
        expected = self.contents(as_of, width)
        with self.living(read):
            assert contents_of(snapshot.to_arrow()) == expected
            total: Counter[Row] = Counter()
            for split in snapshot.splits(n):
                for data_, count in contents_of(split.to_arrow(self.world.inner.blob)).items():
                    assert data_ not in total
                    total[data_] = count
            assert total == expected
        snapshot.release()

    def contents(self, as_of: int, width: int) -> Counter[Row]:
        return summed((_widened(data, width), n) for data, n in self.model.contents(as_of).items())

    @contextmanager
    def living(self, read: persist.ReadHandle) -> Iterator[None]:
        """A block in which LeaseExpired is the right answer if the reader was retired, and only then."""
        try:
            yield
        except LeaseExpired:
            assert read.id not in self.checker.inspect("s").state.readers, "it was live"
            self.readers = [(r, s) for r, s in self.readers if r is not read]

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def listen(self, data: st.DataObject) -> None:
        read, since = data.draw(st.sampled_from(self.readers))
        as_of = data.draw(st.integers(since, max(since, self.upper)))
        if len(self.listens) < 3:
            with self.living(read):
                self.listens.append((read.listen(as_of), as_of, Counter()))

    @precondition(lambda self: self.listens)
    @rule(data=st.data(), one=st.booleans())
    def hear(self, data: st.DataObject, one: bool) -> None:
        entry = data.draw(st.sampled_from(self.listens))
        listen, as_of, heard = entry
        handle = listen._handle
        before = listen.frontier
        try:
            events = [next(listen)] if one and listen.frontier < self.model.upper else listen.poll()
        except LeaseExpired:
            assert handle.id not in self.checker.inspect("s").state.readers, "it was live"
            self.listens.remove(entry)
            return
        for event in events:
            if isinstance(event, persist.Updates):
                news = updates_of(event.table)
                assert all(before.is_before(time) for _, time, _ in news)
                for row, time, diff in news:
                    heard[row, time] += diff
            else:
                assert before < event.frontier
                before = event.frontier
        done = [((row, time), diff) for (row, time), diff in heard.items() if before.has_passed(time)]
        width = len(handle.schema.names)
        expected = [
            ((_widened(row, width), time), diff) for (row, time), diff in self.model.between(as_of + 1, before).items()
        ]
        assert summed(done) == summed(expected)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def downgrade(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        read, since = self.readers[index]
        new = data.draw(st.integers(since, max(since, self.upper) + 2))
        with self.living(read):
            read.downgrade_since(new)
            self.readers[index] = (read, max(new, since))
            if since < new and since < self.upper:
                try:
                    read.snapshot(since, diff=True)
                except SinceViolation:
                    return
                raise AssertionError("history that was given up could be read")

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_reader(self, data: st.DataObject) -> None:
        read, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        read.close()
        self.snapshots = [entry for entry in self.snapshots if entry[2] is not read]
        self.listens = [entry for entry in self.listens if entry[0]._handle.id is not None]

    @rule(name=st.sampled_from(["a", "b"]), further=st.integers(0, 5))
    def hold(self, name: str, further: int) -> None:
        if not self.finished:
            state = self.checker.inspect("s").state
            least = self.holds.get(name, state.since.time or 0)
            newest = newest_time(state).time
            to = least + further if newest is None else max(least, min(least + further, newest))
            self.clients[0].downgrade_hold("s", name, to)
            self.holds[name] = to

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.holds)))
        del self.holds[name]
        self.clients[2].release_hold("s", name)

    @rule(distance=st.sampled_from([None, 0, 3]))
    def retention(self, distance: int | None) -> None:
        if not self.finished:
            self.clients[2].set_retention("s", distance)

    @rule(seconds=st.sampled_from([0.1, 5, 15, 25]), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        self.world.clock.advance(seconds)
        if beating:
            for client in self.clients:
                client.heartbeat()

    @rule(
        who=st.integers(0, 2),
        duty=st.sampled_from(
            ["compact", "roll_up", "collect", "audit_orphans", "expire", "retain", "maintain", "scrub"]
        ),
        eager=st.booleans(),
        cluster=st.sampled_from([None, "more", "more"]),
    )
    def maintain(self, who: int, duty: str, eager: bool, cluster: str | None) -> None:
        client, policy = self.clients[who], persist.Policy(part_bytes=512 if cluster else None, cluster=cluster)
        if eager:
            policy = msgspec.structs.replace(policy, weight=1e9, advance=0.01)
        options: dict[str, Any] = {"policy": policy} if duty in {"compact", "maintain"} else {}
        if who == 1:
            self.faults.go_on()
        try:
            getattr(client, duty)("s", **options)
        except (Indeterminate, persist.Determinate, LeaseExpired):
            assert who == 1, "without a fault"
        finally:
            self.faults.stop()
        if duty == "scrub" and who != 1:
            assert not client.scrub("s").damaged

    @precondition(lambda self: self.schemas < len(SCHEMAS) and not self.finished)
    @rule(who=st.integers(0, 2))
    def evolve(self, who: int) -> None:
        self.checker.evolve_schema("s", SCHEMAS[self.schemas])
        self.schemas += 1
        self.model.updates = [
            (_widened(d, len(SCHEMAS[self.schemas - 1].names)), t, n) for d, t, n in self.model.updates
        ]
        self.writers[who].close()
        self.writers[who] = self.clients[who].open_writer("s", SCHEMAS[self.schemas - 1])

    @rule(who=st.integers(0, 2), politely=st.booleans())
    def reopen(self, who: int, politely: bool) -> None:
        if self.finished:
            return
        gone = self.clients[who]
        schema = self.writers[who].schema
        self.clients[who] = self.world.client(self.config, plan=self.faults if who == 1 else None)
        if politely:
            self.readers = [(r, s) for r, s in self.readers if r.machine is not gone.machine("s")]
            self.snapshots = [entry for entry in self.snapshots if entry[2].machine is not gone.machine("s")]
            self.listens = [entry for entry in self.listens if entry[0]._handle.machine is not gone.machine("s")]
            gone.close()
        self.writers[who] = self.clients[who].open_writer("s", schema)

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "world"):
            return
        found = check_world(self.checker, "s")
        if not self.finished:
            assert found.state.upper == self.model.upper
            read_only = self.world.client(read_only=True)
            with read_only.open_reader("s", SCHEMAS[self.schemas - 1]) as read:
                if self.upper and found.state.since.has_passed(self.upper - 1) is False:
                    as_of = self.upper - 1
                    assert contents_of(read.snapshot(as_of, diff=True).to_arrow()) == self.model.contents(as_of)
            read_only.close()
            self.world.clients.remove(read_only)

    @precondition(lambda self: not self.finished and self.upper > 12)
    @rule()
    def finish(self) -> None:
        state = self.checker.inspect("s").state
        if state.readers or state.holds.keys() - {"retention"}:
            try:
                self.checker.finish("s")
            except persist.StillRead:
                return
            raise AssertionError("finished while it was read")
        self.checker.finish("s")
        self.finished = True
        self.readers, self.snapshots, self.listens, self.holds = [], [], [], {}

    def come_to_rest(self) -> None:
        """Everybody goes; what is left is exactly what is referred to."""
        expected = self.model.contents(self.upper - 1) if self.upper else None
        self.world.clock.advance(1000)
        client = self.world.client()
        for _ in range(8):
            seqno = client.inspect("s").seqno
            client.maintain("s")
            if client.inspect("s").seqno == seqno:
                break
        else:
            raise AssertionError("maintenance does not come to rest")
        assert client.census("s").batches <= client.census("s").batch_bound
        check_swept(client, "s")
        since = client.inspect("s").state.since.time
        if expected is not None and since is not None and since < self.upper:
            with client.open_reader("s") as read:
                assert contents_of(read.snapshot(self.upper - 1, diff=True).to_arrow()) == expected


def _plain(value: Any) -> Any:
    return struct.unpack("<d", value[1])[0] if isinstance(value, tuple) else value


def _widened(row: Row, width: int) -> Row:
    """The row in a schema of that many columns: new ones are null, and those that are not there are left out."""
    return (row + (None,) * (width - len(row)))[:width]


class OnFiles:
    """A machine on files and SQLite."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="persist-model-")
        self.url = f"file:{self.directory}/data"
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            shutil.rmtree(self.directory)


class FileMachine(OnFiles, LibraryMachine):
    """The same on files and SQLite."""


class ServerMachine(LibraryMachine):
    """The same on S3 and PostgreSQL."""

    def __init__(self) -> None:
        servers.use_test_credentials()
        name = f"t{os.urandom(8).hex()}"
        self.url = servers.s3_server().location(name)
        self.consensus = servers.postgres_at(persist_schema=name)
        super().__init__()


EXAMPLES = int(os.environ.get("PERSIST_MODEL_EXAMPLES", "25"))
TestInMemory = LibraryMachine.TestCase
TestInMemory.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestOnFiles = FileMachine.TestCase
TestOnFiles.settings = settings(max_examples=max(4, EXAMPLES // 10), stateful_step_count=25)
TestOnServers = pytest.mark.slow(ServerMachine.TestCase)
TestOnServers.settings = settings(max_examples=max(3, EXAMPLES // 20), stateful_step_count=15)
