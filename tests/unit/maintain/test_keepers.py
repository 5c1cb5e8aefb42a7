"""The ledger: what goes if a reader or hold goes is what the ledger says, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib import health
from persist_lib.core import commands as c
from persist_lib.core.leases import is_mark
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.plan.keepers import Keeper, keepers_of
from persist_lib.core.state import Batch, Garbage, Hold, Reader, Rollup, State
from persist_lib.core.transitions import apply
from persist_lib.frontier import at
from persist_lib.ids import PartKey, ReaderId, SeqNo
from tests.properties.histories import history
from tests.shards import TINY
from tests.worlds import SCHEMA, World, row

EAGER = TINY.model_copy(update={"compaction_weight": 1e9, "compaction_advance": 0.001, "inline_bytes": 0})


def deletable(state: State, seqno: SeqNo) -> set[PartKey]:
    """What can be deleted once there is a rollup as new as can be."""
    rollup = Rollup(PartKey("rollup/x"), 1, bytes(16))
    return set(plan_garbage(msgspec.structs.replace(state, rollups={seqno: rollup}), seqno).keys)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_garbage_that_goes_with_a_reader_is_what_the_ledger_says(seed: int) -> None:
    shard = history(seed, 60, 0.95)
    state, seqno, after = shard.state, SeqNo(shard.next_seqno - 1), SeqNo(shard.next_seqno)
    ledger = keepers_of(state, seqno)
    names = [
        *state.readers,
        *state.writers,
        *(name for name, hold in state.holds.items() if not is_mark(name, hold)),
        *state.pins,
    ]
    assert sorted(one.name for one in ledger if one.kind != "rollup") == sorted(map(str, names))
    before = deletable(state, after)
    for one in ledger:
        assert one.garbage_size == sum(state.garbage[key].size for key in one.garbage)
        if one.kind == "reader":
            gone = apply(state, after, c.Retire(one.name))
            assert isinstance(gone, State)
            assert deletable(gone, after) - before == set(one.garbage)
        elif one.kind == "pin":
            gone = apply(state, after, c.Unpin(one.name, state.pins[one.name].opaque))
            assert isinstance(gone, State)
            readers = {key for key, found in state.garbage.items() if found.seqno >= state.seqno_since(after)}
            assert deletable(gone, after) - before == set(one.garbage) - readers == set(one.garbage)
        elif one.kind == "rollup":
            now = set(plan_garbage(state, seqno).keys)
            rollup = {seqno: Rollup(PartKey("rollup/x"), 1, bytes(16))}
            assert set(plan_garbage(msgspec.structs.replace(state, rollups=rollup), seqno).keys) - now == set(
                one.garbage
            )
        else:
            assert not one.garbage


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_batches_have_changes_of_the_time_that_only_their_keeper_needs(seed: int) -> None:
    shard = history(seed, 60, 0.95)
    state, ledger = shard.state, keepers_of(shard.state, SeqNo(shard.next_seqno - 1))
    people = {one.name: one for one in ledger if one.since is not None}
    alone = [one for one in people.values() if one.batches]
    assert len(alone) <= 1, "since follows the least of all, and only that one is alone"
    for keeper in alone:
        others = [one.since for one in people.values() if one is not keeper and one.since is not None]
        assert all(keeper.since is not None and keeper.since < since for since in others)
        sizes = {batch.id: batch for batch in state.trace if batch.count}
        assert keeper.history_size == sum(sizes[id_].size for id_ in keeper.batches)


def changing(client: persist.Client, times: int) -> None:
    """One row that is another one at each time."""
    with client.open_writer("s", SCHEMA) as write:
        for time in range(times):
            old = [row(1, f"w{time - 1}", time, -1)] if time else []
            write.compare_and_append([*old, row(1, f"w{time}", time)], time, time + 1)


def ledger(client: persist.Client) -> dict[str, Keeper]:
    return {one.name: one for one in client.keepers("s")}


def let_go(client: persist.Client, since: int) -> int:
    """Have since follow, and the history forgotten. Returns the bytes of the shard then."""
    client.set_retention("s", 1)
    client.maintain("s")
    assert client.inspect("s").state.since == at(since)
    return client.census("s").size


def test_what_a_hold_alone_keeps_is_forgotten_when_it_is_released(world: World) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    client.set_hold("s", "audit", 3, opaque=b"ann")
    assert ledger(client)["audit"].set_ms == client.consensus.now()
    world.clock.advance(100)
    size = let_go(client, 3)
    found = ledger(client)
    assert (found["audit"].kind, found["audit"].owner, found["retention"].kind) == ("hold", "ann", "retention")
    state = client.inspect("s").state
    own = [batch for batch in state.trace if batch.id in found["audit"].batches]
    assert found["audit"].history_size == sum(batch.size for batch in own) > 0
    assert (found["retention"].batches, found["retention"].history_size) == ((), 0)
    assert found["retention"].shared_size <= found["audit"].history_size
    assert found["audit"].is_older, "a rollup took the place of the row that set it"
    assert (found["audit"].set_ms or 0) > client.consensus.now() - 100_000
    client.release_hold("s", "audit")
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 12, 13)  # since moves when something does
    assert let_go(client, 11) < size
    assert not any(one.history_size for one in client.keepers("s"))


def test_what_two_holds_keep_together_goes_with_neither(world: World) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    for name in ("audit", "dashboard"):
        client.set_hold("s", name, 3)
    size = let_go(client, 3)
    found = ledger(client)
    for name in ("audit", "dashboard"):
        assert (found[name].batches, found[name].size) == ((), 0)
        assert found[name].shared_size > 0
    client.release_hold("s", "audit")
    assert let_go(client, 3) == size
    assert ledger(client)["dashboard"].batches


def test_garbage_that_waits_is_told_from_history_and_goes_with_its_reader(world: World) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    reader = client.open_reader("s", purpose="report")
    reader.snapshot(5)
    client.compact("s")
    client.maintain("s")
    found = ledger(client)[str(reader.id)]
    state = client.inspect("s").state
    assert (found.kind, found.owner, set(found.garbage)) == ("reader", "report", set(state.garbage))
    assert found.garbage_size == sum(one.size for one in state.garbage.values()) > 0
    world.clock.advance(5)
    second = client.open_reader("s", purpose="another")
    assert ledger(client)[str(second.id)].garbage == ()
    assert (ledger(client)[str(second.id)].set_ms or 0) >= (ledger(client)[str(reader.id)].set_ms or 0) + 5000
    reader.close()
    client.maintain("s")
    assert not client.inspect("s").state.garbage.keys() & set(found.garbage)


def test_garbage_that_waits_for_a_rollup_alone_is_the_rollups(world: World) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    client.compact("s")
    with client.open_writer("s", SCHEMA):
        pass  # a version beyond the one that made garbage
    [missing] = [one for one in client.keepers("s") if one.kind == "rollup"]
    assert set(missing.garbage) == set(client.inspect("s").state.garbage)
    client.roll_up("s", force=True)
    assert not [one for one in client.keepers("s") if one.kind == "rollup"]


@pytest.mark.parametrize(("kept", "wrong"), [(None, []), (10**9, []), (1, ["kept"])])
def test_health_alerts_where_one_holder_keeps_more_than_the_limit(
    world: World, kept: int | None, wrong: list[str]
) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    client.set_hold("s", "audit", 3)
    let_go(client, 3)
    limits: dict[str, Any] = {"kept": kept}
    found = health.check(world.client(EAGER), health.Limits(**limits))
    assert [one.check for one in found.problems if one.check == "kept"] == wrong
    for one in found.problems:
        assert "hold audit alone keeps" in one.says
        assert one.do == "persist shard show s"


def test_the_policy_that_keeps_history_is_no_alert(world: World) -> None:
    client = world.client(EAGER)
    changing(client, 12)
    client.set_hold("s", "audit", 11)
    assert ledger(client)["retention"].history_size > 0
    assert not health.check(client, health.Limits(kept=1)).problems


def batch(lo: int, lower: int, upper: int, count: int = 1) -> Batch:
    return Batch(lo, lo + 1, at(lower), at(upper), at(0), count, 0, 0)


TRACE = (batch(0, 0, 3), batch(1, 3, 4), batch(2, 4, 6), batch(3, 6, 7, count=0), batch(4, 7, 9))


@pytest.mark.parametrize(
    ("holds", "batches"),
    [({"a": 3}, []), ({"a": 3, "b": 3}, []), ({"a": 3, "b": 4}, [2]), ({"a": 2, "b": 3}, [1]),
     ({"a": 0, "b": 3}, [0, 1]), ({"a": 3, "b": 8}, [2, 4]), ({"a": 8, "b": 9}, [])],
)  # fmt: skip
def test_of_which_batches_changes_can_be_forgotten(holds: dict[str, int], batches: list[int]) -> None:
    state = State(since=at(0), trace=TRACE, holds={name: Hold(at(since)) for name, since in holds.items()})
    found = {one.name: one for one in keepers_of(state, SeqNo(9))}
    assert [lo for lo, _ in found["a"].batches] == batches
    assert all(not one.batches for name, one in found.items() if name != "a")


@pytest.mark.parametrize(("seqno", "keeps"), [(4, True), (5, True), (6, False)])
def test_a_reader_keeps_what_was_deleted_at_its_own_state_or_after(seqno: int, keeps: bool) -> None:
    garbage = {PartKey("w/x"): Garbage(SeqNo(5), 10)}
    state = State(garbage=garbage, readers={ReaderId("r"): Reader(at(0), SeqNo(seqno), 1)})
    [reader] = [one for one in keepers_of(state, SeqNo(9)) if one.kind == "reader"]
    assert bool(reader.garbage) == keeps
