"""Races without threads: a rival acts just before the next compare-and-set, for every operation and every rival's.

Whatever both do, each either is done once or is refused with a reason that is true, and the shard is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import (
    CompactionRefused,
    HoldConflict,
    LeaseExpired,
    SchemaMismatch,
    ShardFinished,
    SinceViolation,
    StillRead,
    UpperMismatch,
)
from persist_lib.testing import Model, Rival, check_swept, check_world, contents_of
from tests.shards import TINY
from tests.worlds import SCHEMA, WIDER, World, row, updates

CONFIG = TINY.model_copy(update={"lease_ms": 60_000})
EAGER = persist.Policy(weight=1e9, advance=0.01)
UPPER = 6
DATA = [row(i, "x", t) for t in range(UPPER) for i in range(3)]
MORE = [row(9, "new", UPPER), row(9, "new", UPPER + 1)]


class Side:
    """One of the two: a client with a writer and a reader that are registered already."""

    def __init__(self, world: World, rival: Rival | None = None) -> None:
        self.client = world.client(CONFIG, rival=rival)
        self.write = self.client.open_writer("s", SCHEMA)
        assert self.write.id
        self.read = self.client.open_reader("s")

    def append(self, verb: str, upper: int) -> None:
        rows = [r for r in MORE if r["_time"] < upper]
        getattr(self.write, verb)(rows, UPPER, upper)

    def operations(self) -> dict[str, Callable[[], Any]]:
        client = self.client
        return {
            "compare_and_append": lambda: self.append("compare_and_append", UPPER + 1),
            "append many": lambda: client.compare_and_append_many(
                [persist.Append(self.write, MORE[:1], UPPER, UPPER + 1)]
            ),
            "append": lambda: self.append("append", UPPER + 2),
            "advance_upper": lambda: self.write.advance_upper(UPPER),
            "close writer": self.write.close,
            "open reader": lambda: client.open_reader("s").close(),
            "listen": lambda: self.read.listen(UPPER - 1).close(),
            "downgrade": lambda: self.read.downgrade_since(4),
            "close reader": self.read.close,
            "heartbeat": client.heartbeat,
            "set hold": lambda: client.set_hold("s", "h", 5, expected=None, opaque=b"me"),
            "retention": lambda: client.set_retention("s", 3),
            "retain": lambda: client.retain("s"),
            "expire": lambda: client.expire("s"),
            "compact": lambda: client.compact("s", policy=EAGER),
            "roll up": lambda: client.roll_up("s", force=True),
            "collect": lambda: client.collect("s"),
            "audit": lambda: client.audit_orphans("s"),
            "maintain": lambda: client.maintain("s", policy=EAGER),
            "evolve": lambda: client.evolve_schema("s", WIDER),
            "finish": lambda: client.finish("s"),
        }


NAMES = [
    "compare_and_append", "append many", "append", "advance_upper", "close writer", "open reader", "listen",
    "downgrade", "close reader", "heartbeat", "set hold", "retention", "retain", "expire", "compact", "roll up",
    "collect", "audit", "maintain", "evolve", "finish",
]  # fmt: skip
REASONS = (
    UpperMismatch, LeaseExpired, HoldConflict, SinceViolation, StillRead, ShardFinished, SchemaMismatch,
    CompactionRefused,
)  # fmt: skip
ALLOWED: dict[str, tuple[type[Exception], ...]] = {
    "compare_and_append": (UpperMismatch,),
    "append many": (UpperMismatch,),
    "set hold": (HoldConflict,),
    "finish": (StillRead,),
}


def prepare(world: World) -> tuple[Side, Side, Rival]:
    """A shard with data, garbage and something to compact, and two sides."""
    first = world.client(CONFIG)
    with first.open_writer("s", SCHEMA) as write:
        for time in range(UPPER):
            write.compare_and_append([r for r in DATA if r["_time"] == time], time, time + 1)
            if time == 3:
                first.compact("s", policy=EAGER)
    rival = Rival(world.inner.consensus)
    return Side(world, rival), Side(world), rival


def attempt(act: Callable[[], Any]) -> Exception | None:
    try:
        act()
    except REASONS as error:
        return error
    return None


@pytest.mark.parametrize("theirs", NAMES)
@pytest.mark.parametrize("ours", NAMES)
def test_two_operations_race_and_both_are_told_the_truth(world: World, ours: str, theirs: str) -> None:
    us, them, rival = prepare(world)
    model = Model()
    model.append(updates(DATA), persist.at(0), persist.at(UPPER))
    told: list[Exception | None] = []
    rival.before_next(lambda: told.append(attempt(them.operations()[theirs])))
    ours_told = attempt(us.operations()[ours])
    raced = bool(told)
    if not raced:
        told.append(attempt(them.operations()[theirs]))  # ours had nothing to commit
        rival._acts.clear()
    for name, error in ((ours, ours_told), (theirs, told[0])):
        assert error is None or isinstance(error, ALLOWED.get(name, ())), f"{name} was told {error!r}"
    upper = us.client.inspect("s").state.upper.time
    appended = {"compare_and_append": UPPER + 1, "append many": UPPER + 1, "append": UPPER + 2}
    reached = [appended[n] for n, error in ((ours, ours_told), (theirs, told[0])) if n in appended and error is None]
    assert upper == max(reached, default=UPPER)
    model.append([u for u in updates(MORE) if u[1] < upper], persist.at(UPPER), persist.at(upper))
    check_world(us.client, "s")
    with world.client(read_only=True).open_reader("s", SCHEMA) as read:
        assert contents_of(read.snapshot(upper - 1, diff=True).to_arrow()) == model.contents(upper - 1)
        assert contents_of(read.snapshot(5, diff=True).to_arrow()) == model.contents(5)


@pytest.mark.parametrize("theirs", ["compact", "maintain", "collect", "roll up", "append", "downgrade"])
@pytest.mark.parametrize("nth", range(6))
def test_a_rival_before_any_commit_of_maintenance_breaks_nothing(world: World, theirs: str, nth: int) -> None:
    us, them, rival = prepare(world)
    for side in (us, them):
        side.read.downgrade_since(4)
    for _ in range(nth):
        rival.before_next(lambda: None)
    rival.before_next(lambda: attempt(them.operations()[theirs]))
    us.client.maintain("s", policy=EAGER)
    check_world(us.client, "s")
    upper = us.client.inspect("s").state.upper.time or 0
    rows = [r for r in [*DATA, *MORE] if r["_time"] < upper]
    model = Model()
    model.append(updates(rows), persist.at(0), persist.at(upper))
    assert contents_of(us.read.snapshot(upper - 1, diff=True).to_arrow()) == model.contents(upper - 1)
    assert contents_of(them.read.snapshot(5, diff=True).to_arrow()) == model.contents(5)
    rival._acts.clear()
    us.client.close()
    them.client.close()
    client = world.client(CONFIG)
    for _ in range(4):
        client.maintain("s")
    check_swept(client, "s")


def test_creation_is_won_once_and_both_use_the_shard(world: World) -> None:
    rival = Rival(world.inner.consensus)
    us, them = world.client(rival=rival), world.client()
    rival.before_next(lambda: them.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1))
    us.open_writer("s", SCHEMA).compare_and_append([row(2, time=1)], 1, 2)
    assert not rival.waiting
    check_world(us, "s")


def test_creation_with_another_schema_is_refused_to_the_one_who_lost(world: World) -> None:
    rival = Rival(world.inner.consensus)
    us, them = world.client(rival=rival), world.client()
    rival.before_next(lambda: them.open_writer("s", WIDER))
    with pytest.raises(SchemaMismatch):
        us.open_writer("s", SCHEMA)
    assert them.inspect("s").state.schemas == (WIDER,)


def test_expiry_is_decided_by_the_state_that_wins_not_by_the_one_it_was_planned_on(world: World) -> None:
    rival = Rival(world.inner.consensus)
    owner, janitor = world.client(CONFIG), world.client(CONFIG, rival=rival)
    write = owner.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    world.clock.advance(61)
    rival.before_next(lambda: write.compare_and_append([row(1, time=1)], 1, 2))
    janitor.expire("s")
    assert not rival.waiting
    assert write.id in owner.inspect("s").state.writers, "its append renewed the lease first"
    write.compare_and_append([row(1, time=2)], 2, 3)


def test_a_reader_that_opens_while_since_moves_reads_from_its_own_since(world: World) -> None:
    us, them, rival = prepare(world)
    them.read.downgrade_since(5)
    us.read.close()
    rival.before_next(lambda: attempt(them.operations()["maintain"]))
    read = us.client.open_reader("s")
    assert read.since == us.client.inspect("s").state.readers[read.id].since  # type: ignore[index]
    them.read.downgrade_since(5)
    them.client.maintain("s", policy=EAGER)
    model = Model()
    model.append(updates(DATA), persist.at(0), persist.at(UPPER))
    as_of = read.since.time or 0
    assert contents_of(read.snapshot(as_of, diff=True).to_arrow()) == model.contents(as_of)
