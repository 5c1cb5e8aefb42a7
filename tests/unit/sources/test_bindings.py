"""Bindings: monotone, one winner, at the store's clock, by threads, by processes and by turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import persist_lib as persist
from persist_lib.errors import ClockAhead, InvalidUsage, SinceViolation
from persist_lib.sources.bindings import MOST_AHEAD_MS, SCHEMA, Bindings, Bound, Marks, Propose
from persist_lib.sources.protocol import Mark
from persist_lib.testing import Rival
from tests.worlds import World

NAME = "s1.bindings"


def opened(client: persist.Client) -> Bindings:
    client.open_writer(NAME, SCHEMA).close()
    return Bindings(client, NAME)


def marks(**addresses: int) -> dict[str, Mark]:
    return {partition: Mark(address, f"check {address}") for partition, address in addresses.items()}


def saying(found: Marks) -> Propose:
    return lambda _: found


def check(bound: Bound) -> None:
    """What always holds: times go up, and so do a partition's addresses."""
    last, at = -1, dict(bound.start)
    for step in bound.steps:
        assert last < step.time < bound.upper
        last = step.time
        for partition, mark in step.marks.items():
            assert mark.address > at.get(partition, Mark(-1)).address
            at[partition] = mark


def test_what_is_bound_is_read_back_as_of_each_time(world: World) -> None:
    client = world.client()
    bindings, deadline = opened(client), client.runtime.deadline(10)
    times = []
    for found in (marks(a=3), marks(a=5, b=1), marks(b=1), marks(a=4), {}, marks(b=9)):
        world.clock.advance(10)
        bindings.mint(saying(found), deadline)
        times.append(bindings.newest().upper - 1)
    assert times == sorted(set(times))
    whole = bindings.since(0)
    check(whole)
    assert [step.marks for step in whole.steps] == [marks(a=3), marks(a=5, b=1), marks(b=9)]
    assert whole.steps[0].time == times[0]
    later = bindings.since(times[1] + 1)
    assert later.start == marks(a=5, b=1)
    assert [step.time for step in later.steps] == [times[5]]
    assert bindings.newest().start == marks(a=5, b=9) == whole.marks
    assert bindings.since(later.upper) == Bound(marks(a=5, b=9), (), later.upper)


def test_an_idle_tick_moves_upper_and_nothing_else(world: World) -> None:
    client = world.client()
    bindings, deadline = opened(client), client.runtime.deadline(10)
    bindings.mint(lambda _: marks(a=1), deadline)
    before = bindings.newest()
    world.clock.advance(2)
    bindings.mint(lambda _: {}, deadline)
    after = bindings.newest()
    assert after.start == before.start
    assert after.upper >= before.upper + 2000
    bindings.mint(lambda _: {}, deadline)
    bindings.mint(lambda _: {}, deadline)
    assert bindings.newest().upper <= client.consensus.now() + 1, "ticks must not run ahead of the clock"


def test_a_minter_that_lost_binds_what_is_beyond_the_winner(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    bindings, deadline = opened(client), client.runtime.deadline(10)
    theirs = Bindings(other, NAME)
    bindings.mint(lambda _: marks(a=1), deadline)
    seen: list[object] = []

    def propose(bound: object) -> dict[str, Mark]:
        seen.append(dict(bound))  # type: ignore[call-overload]
        return marks(a=5, b=2)

    rival.before_next(lambda: theirs.mint(lambda _: marks(a=9), deadline))
    bindings.mint(propose, deadline)
    assert seen == [marks(a=1), marks(a=9)]
    assert bindings.newest().start == marks(a=9, b=2)
    check(bindings.since(0))


def test_what_others_bind_between_two_looks_is_in_the_newest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minter took upper from one look and marks from an earlier one, and was refused: each key once."""
    client = world.client()
    mine, deadline = opened(client), client.runtime.deadline(10)
    theirs, since = Bindings(world.client(), NAME), Bindings.since
    mine.mint(saying(marks(a=1)), deadline)

    def late(self: Bindings, time: int) -> Bound:
        monkeypatch.undo()
        world.clock.advance(1)
        theirs.mint(saying(marks(a=5)), deadline)
        return since(self, time)

    monkeypatch.setattr(Bindings, "since", late)
    mine.mint(saying(marks(a=5, b=2)), deadline)
    assert mine.newest().start == marks(a=5, b=2)
    check(mine.since(0))


def test_what_a_proposal_takes_is_not_the_time_of_its_binding(world: World) -> None:
    """The first copy of a large table took longer than the call's timeout, so that the call after it timed out."""
    rival = Rival(world.inner.consensus)
    client, theirs = world.client(rival=rival), Bindings(world.client(), NAME)
    bindings, deadline = opened(client), client.runtime.deadline(10)

    def long(bound: Marks) -> Marks:
        if not bound:
            world.clock.advance(1_000)
            rival.before_next(lambda: theirs.mint(saying(marks(b=1)), world.client().runtime.deadline(10)))
        return marks(a=1)

    bindings.mint(long, deadline)
    assert bindings.newest().start == marks(a=1, b=1)


def test_bindings_far_ahead_of_the_clock_are_refused(world: World) -> None:
    client = world.client()
    bindings, deadline = opened(client), client.runtime.deadline(10)
    bindings.mint(lambda _: marks(a=1), deadline)
    now = client.consensus.now()
    with client.open_writer(NAME, SCHEMA) as write:
        write.advance_upper(now + MOST_AHEAD_MS + 5_000)
    before = bindings.newest()
    with pytest.raises(ClockAhead, match="1 min 5 s ahead of the store's clock"):
        bindings.mint(lambda _: marks(a=2), deadline)
    assert bindings.newest() == before
    world.clock.advance(10)
    bindings.mint(lambda _: marks(a=2), deadline)
    assert bindings.newest().start == marks(a=2)


def test_get_binding_answers_what_covers_a_message(world: World) -> None:
    client = world.client()
    bindings, deadline = opened(client), client.runtime.deadline(10)
    mark, first = bindings.get_binding("a", 0, Mark(1), deadline)
    assert mark == Mark(1)
    world.clock.advance(1)
    bindings.mint(lambda _: marks(a=7), deadline)
    mark, time = bindings.get_binding("a", 4, Mark(5), deadline)
    assert mark == marks(a=7)["a"]
    assert time > first
    assert bindings.get_binding("a", 0, Mark(1), deadline) == (Mark(1), first)
    assert bindings.get_binding("a", 6, Mark(7), deadline) == (mark, time)
    with pytest.raises(InvalidUsage):
        bindings.get_binding("a", 8, Mark(8), deadline)
    client.downgrade_hold(NAME, "source", time)
    assert bindings.since(time + 1).start == marks(a=7)
    bindings.mint(lambda _: marks(a=8), deadline)
    with pytest.raises(SinceViolation):
        bindings.get_binding("a", 0, Mark(1), deadline)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_two_minters_by_turns(data: st.DataObject) -> None:
    world = World(seed=3)
    try:
        clients = [world.client(), world.client()]
        minters = [opened(client) for client in clients]
        deadline = clients[0].runtime.deadline(1e9)
        most: dict[str, int] = {}
        for _ in range(data.draw(st.integers(1, 12))):
            who = data.draw(st.integers(0, 1))
            found = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 20), max_size=3))
            world.clock.advance(data.draw(st.sampled_from([0, 0, 0.001, 5])))
            if data.draw(st.booleans()):
                minters[who].mint(saying(marks(**found)), deadline)
            else:
                for partition, address in found.items():
                    mark, _time = minters[who].get_binding(partition, address, Mark(address + 1), deadline)
                    assert mark.address > address
                    most[partition] = max(most.get(partition, 0), address + 1)
            for partition, address in found.items():
                most[partition] = max(most.get(partition, 0), address)
            for minter in minters:
                bound = minter.since(0)
                check(bound)
                assert {p: m.address for p, m in bound.marks.items()} == {p: a for p, a in most.items() if a}
    finally:
        world.close()


PROGRAM = """
import sys
import persist_lib as persist
from persist_lib.sources.bindings import Bindings
from persist_lib.sources.protocol import Mark
url, number = sys.argv[1:]
with persist.open(url) as client:
    bindings = Bindings(client, "s1.bindings")
    for address in range(1, 20):
        mark, time = bindings.get_binding("both", address, Mark(address + 1, number), client.runtime.deadline(60))
        print(address, mark.address, mark.check, time, flush=True)
"""


def test_processes_that_ask_for_bindings_get_the_same_answers(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/db"
    with persist.open(url) as client:
        opened(client).close()
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, url, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    answers = [program.communicate(timeout=100)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    assert answers[0] == answers[1]
    with persist.open(url) as client:
        check(Bindings(client, NAME).since(0))
