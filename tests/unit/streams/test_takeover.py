"""Who may write: the lock, and what keeps a predecessor out, each rule with the mistake that it prevents.

`design/0043` has the rules. Each mutant below is an implementation without one of them; the same check finds it.
Dropping all streams of a location, for development: when it is allowed, what it leaves, and repeating it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.core import commands as c
from persist_lib.relation.registration import Registration
from persist_lib.shard.admin import retire_writers
from persist_lib.streams import lifecycle, lock
from persist_lib.streams import lock as fencing
from persist_lib.streams import stream_runtime as runtimes
from persist_lib.streams.lifecycle import wipe
from persist_lib.streams.lock import SHARD, WriterLock
from persist_lib.streams.stream_list import Catalog
from persist_lib.testing import Rival
from tests.streaming import SCHEMA, all_of, start, update
from tests.worlds import World

Act = Callable[["Predecessor"], None]


class Predecessor:
    """A runtime that is paused and continues, at any moment. It remembers what was acknowledged."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runtime = start(world, reentrance_id="same")
        self.write, _ = self.runtime.create_or_load("s0", SCHEMA)
        self.known: Counter[int] = Counter()
        self.streams, self.n, self.refused = {"s0"}, 0, 0
        self.do(write)
        self.do(seal)
        assert not self.refused

    def do(self, act: Act) -> None:
        try:
            act(self)
        except (persist.Fenced, persist.NotSent):
            self.refused += 1

    def versions(self) -> dict[str, int]:
        heads = dict(self.world.inner.consensus.heads())
        return {name: seqno for name, seqno in heads.items() if not name.startswith("streams.")}


def write(old: Predecessor) -> None:
    old.n += 1
    old.write.write([update(old.n, 1_000 + old.n)]).result()
    old.known[old.n] += 1


def seal(old: Predecessor) -> None:
    old.n += 1
    old.write.seal(100 + old.n).result()


def move_since(old: Predecessor) -> None:
    old.n += 1
    old.write.allow_compaction(old.n).result()


def create(old: Predecessor) -> None:
    old.n += 1
    name = f"s{old.n}"
    new, _ = old.runtime.create_or_load(name, SCHEMA)
    old.streams.add(name)
    new.write([update(old.n, 5)]).result()


def write_after_expiry(old: Predecessor) -> None:
    """Its id has expired by then, so it has to register again."""
    machine = old.runtime.client.machine("s0.unsealed")
    for id_ in machine.fetch().state.writers:
        machine.commit(lambda _state, _now, id_=id_: c.Retire(id_))  # type: ignore[misc]
    write(old)


ACTS = [write, seal, move_since, create, write_after_expiry]


def check_takeover(world: World, act: Act, place: int) -> bool:
    """The predecessor acts just before the successor's commit number `place`, and continues then. False: no such one.

    What was acknowledged to it is there for the successor, and after the takeover it commits nothing more.
    """
    old, rival = Predecessor(world), Rival(world.inner.consensus)
    for _ in range(place):
        rival.before_next(lambda: None)
    rival.before_next(lambda: old.do(act))
    new = start(world, reentrance_id="same", rival=rival)
    known = set(new._shared.catalog.fetch())
    pairs = {name: new.create_or_load(name, SCHEMA) for name in sorted(known)}
    if rival.waiting:
        return False
    assert old.streams <= known
    before = old.versions()
    for late in ACTS:
        refused = old.refused
        old.runtime._shared.committer._dead = None  # type: ignore[union-attr]
        old.do(late)
        assert old.refused > refused, late.__name__
    if before != old.versions():  # retiring an id, as an expiry does, is no commit of the predecessor
        changed = {name for name, seqno in old.versions().items() if before.get(name) != seqno}
        assert changed <= {"s0.unsealed"}
        assert not world.client().inspect("s0.unsealed").state.writers
    write_new, read = pairs["s0"]
    with read.contents() as found:
        assert Counter(found.to_arrow().column("id").to_pylist()) == old.known
    write_new.write([update(0, 10_000)]).result()
    write_new.seal(20_000).result()
    write_new.allow_compaction(19_000).result()
    return True


def takeovers() -> Iterator[tuple[Act, int]]:
    return ((act, place) for act in ACTS for place in range(9))


def check_all_takeovers() -> int:
    done = 0
    for act, place in takeovers():
        world = World()
        try:
            done += check_takeover(world, act, place)
        finally:
            world.close()
    return done


def test_a_predecessor_that_acts_at_any_moment_of_a_takeover_loses_nothing_and_commits_nothing_after_it() -> None:
    assert check_all_takeovers() == 4 * len(ACTS)


def _without_the_lock(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(fencing.FencedRegistration, "_commit", Registration._commit)


def _hold_unfenced(mp: pytest.MonkeyPatch) -> None:
    def anyone(state: Any, lock: WriterLock, since: Any = None) -> c.SetHold:
        hold = state.holds.get(fencing.HOLD)
        kept = state.since if hold is None else hold.since if since is None else hold.since.join(since)
        return c.SetHold(fencing.HOLD, kept, None if hold is None else hold.opaque, b"%d" % lock.epoch)

    mp.setattr(fencing, "hold_command", anyone)
    mp.setattr("persist_lib.streams.committer.hold_command", anyone)


def _create_unfenced(mp: pytest.MonkeyPatch) -> None:
    change = Catalog.change
    mp.setattr(
        Catalog, "change",
        lambda self, to, beside, deadline: change(
            self, to, [one for one in beside if one.machine.shard != SHARD], deadline
        ),
    )  # fmt: skip


def _early(mp: pytest.MonkeyPatch, *, retires: bool) -> None:
    """The live ids are looked up before the lock is taken, and (`retires`) retired then, or else only those later."""
    seen: dict[str, list[str]] = {}
    take, retire = WriterLock.take, retire_writers

    def take_late(self: WriterLock, **options: Any) -> Any:
        client = self._client
        for record in Catalog(client).fetch().values():
            for name in (record.sealed, record.unsealed):
                machine = client.machine(name)
                seen[name] = list(machine.fetch().state.writers)
                if retires:
                    retire(machine)
        return take(self, **options)

    def only_seen(machine: Any) -> None:
        for id_ in [] if retires else seen.get(machine.shard, []):
            machine.try_commit(lambda _state, _now, id_=id_: c.Retire(id_))

    mp.setattr(WriterLock, "take", take_late)
    mp.setattr(fencing, "retire_writers", only_seen)


def _load_before_retire(mp: pytest.MonkeyPatch) -> None:
    load = runtimes.Streams._load

    def load_first(self: Any, committer: Any, name: str, record: Any, schema: Any) -> Any:
        if fencing.HOLD not in self.client.machine(record.sealed).fetch().state.holds:
            fencing.fence(self.client, record, committer.lock)  # a new one, which has no predecessor
        stream = load(self, committer, name, record, schema)
        fencing.fence(self.client, record, committer.lock)
        return stream

    mp.setattr(lifecycle, "take_over", lambda *_: None)
    mp.setattr(runtimes, "fence", lambda *_: None)
    mp.setattr(runtimes.Streams, "_load", load_first)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "register_unfenced": _without_the_lock,
    "hold_unfenced": _hold_unfenced,
    "create_unfenced": _create_unfenced,
    "retire_before_lock": lambda mp: _early(mp, retires=True),
    "lookup_before_lock": lambda mp: _early(mp, retires=False),
    "load_before_retire": _load_before_retire,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_of_the_model_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, persist.PersistError)):
        check_all_takeovers()


def test_without_a_reentrance_id_a_held_lock_is_refused_until_its_lease_ends(world: World) -> None:
    first = start(world, owner="the first")
    before = streams.fetch_lock(first.client)
    with pytest.raises(persist.Locked, match=r"the first.*epoch 1") as caught:
        start(world)
    assert caught.value.epoch == 1
    assert streams.fetch_lock(first.client) == before
    with pytest.raises(persist.Locked, match="without a reentrance id"):
        start(world, reentrance_id="mine")
    world.clock.advance(first.client.config.lease_ms / 1000 + 1)
    assert start(world).epoch == 2


def test_another_reentrance_id_is_refused_and_the_same_takes_over_at_once(world: World) -> None:
    start(world, reentrance_id="a")
    with pytest.raises(persist.Locked, match="another reentrance id"):
        start(world, reentrance_id="b")
    assert start(world, reentrance_id="a").epoch == 2


def test_a_lease_that_is_renewed_does_not_end(world: World) -> None:
    first = start(world)
    for _ in range(10):
        world.clock.advance(first.client.config.lease_ms / 3000)
        first.client.heartbeat()
    with pytest.raises(persist.Locked):
        start(world)


def test_a_runtime_that_was_paused_beyond_its_lease_continues_if_no_other_took_over(world: World) -> None:
    first = start(world)
    write, read = first.create_or_load("s0", SCHEMA)
    write.write([update(1, 5)]).result()
    world.clock.advance(first.client.config.lease_ms / 500)
    world.client().maintain("s0.unsealed")  # expires its id
    write.write([update(2, 6)]).result()
    write.seal(10).result()
    assert all_of(read) == {(1, "w", 5): 1, (2, "w", 6): 1}
    first.client.heartbeat()
    with pytest.raises(persist.Locked):
        start(world)


def test_a_stopped_runtime_frees_the_lock_and_leaves_no_ids(world: World) -> None:
    first = start(world)
    write, _ = first.create_or_load("s0", SCHEMA)
    write.write([update(1, 5)])
    write.seal(6)
    first.stop()
    client = world.client()
    for name in client.shards():
        assert not client.inspect(name).state.writers, name
    assert start(world).epoch == 2


def test_a_broken_lock_can_be_taken_and_its_holder_registers_nothing_more(world: World) -> None:
    first = start(world)
    write, _ = first.create_or_load("s0", SCHEMA)
    client = world.client()
    with pytest.raises(persist.Locked, match="at epoch 1 by now, not at 7"):
        streams.break_lock(client, epoch=7)
    with pytest.raises(persist.Locked, match="at epoch 1 by now, not at 0"):
        streams.break_lock(client, epoch=0)
    assert streams.break_lock(client, epoch=1).epoch == 2
    with pytest.raises(persist.Fenced):
        write.write([update(1, 5)]).result()
    with pytest.raises(persist.Fenced):
        first.create_or_load("s1", SCHEMA)
    assert start(world).epoch == 3
    with suppress(persist.PersistError):
        first.stop()
    assert streams.fetch_lock(client).epoch == 3  # type: ignore[union-attr]


def test_breaking_a_lock_that_is_free_changes_nothing(world: World) -> None:
    with pytest.raises(persist.NotFound):
        streams.break_lock(world.client())
    start(world).stop()
    assert streams.break_lock(world.client()).epoch == 1


def test_whoever_takes_over_last_wins_and_all_others_are_fenced(world: World) -> None:
    runtimes_ = [start(world, reentrance_id="same") for _ in range(4)]
    pairs = []
    for runtime in runtimes_:
        with suppress(persist.Fenced):
            pairs.append((runtime.epoch, runtime.create_or_load("s0", SCHEMA)))
    assert [epoch for epoch, _ in pairs] == [4]


def test_a_store_without_transactions_is_refused_before_anything_is_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()

    def no_transactions(_changes: object) -> bool:
        raise persist.InvalidUsage("no transactions")

    monkeypatch.setattr(client.consensus, "compare_and_set_many", no_transactions)
    with pytest.raises(persist.InvalidUsage, match="no transactions"):
        streams.open(client)
    assert world.client().shards() == []


def fill(world: World) -> None:
    runtime = start(world)
    for name in ("a", "b"):
        write, _ = runtime.create_or_load(name, SCHEMA)
        write.write([update(1, 5)]).result()
        write.seal(3).result()
    runtime.stop()


def encoding(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(lock, "ENCODING", number)
    monkeypatch.setattr(lifecycle, "ENCODING", number)


def test_what_an_older_encoding_wrote_is_refused_unless_a_wipe_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world)
    before = {name: world.bytes(name) for name in world.client().shards()}
    encoding(monkeypatch, 2)
    with pytest.raises(persist.NewerFormat, match="wipe_older"):
        start(world)
    assert {name: world.bytes(name) for name in world.client().shards()} == before
    runtime = start(world, wipe_older=True)
    assert runtime.list() == []
    write, read = runtime.create_or_load("a", SCHEMA)
    assert read.record.sealed == "a.2"  # a shard's name is never used twice
    write.write([update(7, 5)]).result()
    assert all_of(read) == {(7, "w", 5): 1}
    runtime.stop()
    client = world.client()
    assert client.inspect("a").state.is_finished()
    assert client.inspect("b.unsealed").state.is_finished()
    assert streams.fetch_lock(client).encoding == 2  # type: ignore[union-attr]
    again = start(world, wipe_older=True)  # nothing is older any more
    assert [one.name for one in again.list()] == ["a"]


def test_what_a_newer_encoding_wrote_is_never_wiped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding(monkeypatch, 2)
    fill(world)
    before = {name: world.bytes(name) for name in world.client().shards()}
    encoding(monkeypatch, 1)
    for options in ({}, {"wipe_older": True}):
        with pytest.raises(persist.NewerFormat, match="encoding 2"):
            start(world, **options)  # type: ignore[arg-type]
    assert {name: world.bytes(name) for name in world.client().shards()} == before


def test_a_wipe_that_stopped_half_way_is_finished_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world)
    encoding(monkeypatch, 2)
    for place in range(1, 40):
        rival = Rival(world.inner.consensus)
        for _ in range(place):
            rival.before_next(lambda: None)

        def stop() -> None:
            raise KeyboardInterrupt

        rival.before_next(stop)
        try:
            start(world, wipe_older=True, reentrance_id="x", rival=rival)
        except KeyboardInterrupt:
            world.clients.pop()
        if rival.waiting:
            break
    assert place > 5
    runtime = start(world, wipe_older=True, reentrance_id="x")
    assert runtime.list() == []
    assert all(runtime.client.inspect(name).state.is_finished() for name in ("a", "a.unsealed", "b", "b.unsealed"))
    runtime.create_or_load("a", SCHEMA)


def test_a_stream_that_is_still_read_is_dropped_and_its_shard_left_until_the_next_wipe(world: World) -> None:
    fill(world)
    client = world.client()
    reading = client.open_reader("a")
    client.set_hold("b", "dashboard", 0)
    taken = WriterLock(client, "", "")
    taken.take(wipes=True)
    done = wipe(client, Catalog(client), taken)
    assert (done.dropped, done.left) == ((), ("a", "b"))
    reading.close()
    client.release_hold("b", "dashboard")
    assert wipe(client, Catalog(client), taken).dropped == ("a", "b")
    taken.release()
    assert start(world).list() == []


def test_a_wipe_of_a_predecessor_is_refused_at_each_step(world: World) -> None:
    for place in range(40):
        world = World()
        fill(world)
        rival = Rival(world.inner.consensus)
        client = world.client(rival=rival)
        taken = WriterLock(client, "same", "")
        taken.take(wipes=True)
        new: list[streams.Streams] = []
        for _ in range(place):
            rival.before_next(lambda: None)
        rival.before_next(lambda world=world, new=new: new.append(start(world, reentrance_id="same")))  # type: ignore[misc]
        try:
            wipe(client, Catalog(client), taken)
        except persist.Fenced:
            assert new
        if rival.waiting:
            break
        for one in new[0].list():  # what the newer runtime knows of is not dropped behind its back
            write, _ = new[0].create_or_load(one.name, SCHEMA)
            write.seal(50).result()
        world.close()
    assert place > 5
