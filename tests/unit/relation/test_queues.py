"""Appends that are accepted and written later, over a shard and collections: in order, together, once or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import persist_lib as persist
from persist_lib.testing import Outcome
from tests.unit.relation.carriers import KINDS, Carrier, Cut, over_handles, rows
from tests.worlds import World


def at(time: int, *ids: int, diff: int = 1) -> list[dict[str, Any]]:
    return [{**one, "_time": time, "_diff": diff} for one in rows(*ids)]


@over_handles
def test_what_is_accepted_is_one_commit_and_each_future_counts_its_own(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    write = relation.queue()
    write.compare_and_append([], 0, 1)
    futures = [
        write.append_async(*batch)
        for batch in (
            (at(1, 9, 8) + at(2, 1), 1, 4),
            ([], 4, 5),
            (at(5, *range(7)), 5, 6),
            (at(8, 9), 6, 9),
        )
    ]
    assert not any(future.done() for future in futures)
    world.requests.clear()
    write.flush()
    done = [future.result(0) for future in futures]
    assert world.count(*KINDS) <= 2 if carrier.shards else world.count(*KINDS) == 1, "a promise, and the appends"
    assert [one.count for one in done] == [3, 0, 7, 1]
    assert len({one.token for one in done}) == 1
    assert {one.upper for one in done} == {persist.at(9)}
    later = write.append_async(at(9, 3), 9, 10)
    assert write.compare_and_append(at(10, 4), 10, 11).upper == persist.at(11), "it comes after what was accepted"
    assert later.result(0).upper == persist.at(10)
    assert sum(relation.contents(10).values()) == 13


@over_handles
def test_one_with_a_token_or_a_producer_is_a_commit_of_its_own(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    write = relation.queue()
    options: list[dict[str, Any]] = [{}, {"token": b"1" * 16}, {"producer": ("p", 1)}, {}, {}]
    futures = [write.append_async(at(n, n), n, n + 1, **given) for n, given in enumerate(options)]
    write.flush()
    assert [future.result(0).upper for future in futures] == [persist.at(n) for n in (1, 2, 3, 5, 5)]
    assert write.compare_and_append(at(1, 1), 1, 2, token=b"1" * 16).upper == persist.at(2)
    repeated = write.append_async(at(5, 5), 5, 6, producer=("p", 1))
    with pytest.raises(persist.AlreadyProduced):
        write.flush()
    assert isinstance(repeated.exception(), persist.AlreadyProduced)
    assert sum(relation.contents(4).values()) == 5


@over_handles
@pytest.mark.parametrize("became", ["it happened", "it was lost", "another was first"])
def test_the_token_of_those_sent_together_decides_all_of_them(world: World, carrier: Carrier, became: str) -> None:
    outcome = Outcome.HAPPENED_UNKNOWN if became == "it happened" else Outcome.LOST_UNKNOWN
    cut = Cut(outcome, KINDS[bool(carrier.shards)])  # of a collection: not that of the promise before it
    others = carrier.make(world.client())
    write = carrier.open(world.client(persist.Config(timeout_s=1), plan=cut)).queue()
    write.compare_and_append(at(0, 0), 0, 1)
    batches = [(at(n, *([n] * (n != 2)), -n), n, n + 1) for n in range(1, 5)]
    futures = [write.append_async(*batch) for batch in batches]
    cut.is_armed = True
    with pytest.raises(persist.Indeterminate):
        write.flush()
    cut.is_armed = False
    errors = [future.exception() for future in futures]
    tokens = [error.token for error in errors if isinstance(error, persist.Indeterminate)]
    assert (len(tokens), len(set(tokens))) == (4, 1), "they have one token, and each its times"
    if became == "another was first":
        others.at(at(1, 99), 1, 2)
    for n in (3, 0, 3, 1, 2):  # the last one first, and one twice
        if became == "another was first":
            with pytest.raises(persist.UpperMismatch):
                write.compare_and_append(*batches[n], token=tokens[n])
        else:
            done = write.compare_and_append(*batches[n], token=tokens[n])
            assert (done.count, done.upper, done.token) == (1 if n == 1 else 2, persist.at(5), tokens[n])
    expected = {(0, "w"): 1, (99, "w"): 1} if became == "another was first" else None
    found = others.contents()
    assert found == expected if expected else (len(found), sum(found.values())) == (8, 8)


@over_handles
@pytest.mark.parametrize("token", [None, b"its own"], ids=["of one commit", "of the next commit"])
def test_what_was_accepted_behind_a_cancelled_append_is_not_sent(
    world: World, carrier: Carrier, token: bytes | None
) -> None:
    """Its times follow those of the cancelled one, whose updates nothing will bring."""
    write = carrier.make(world.client()).queue()
    first = write.append_async(at(0, 0), 0, 1)
    behind = [write.append_async(at(n, n), n, n + 1, token=token) for n in (1, 2)]
    assert first.cancel()
    with pytest.raises(persist.NotSent, match="cancelled"):
        write.flush()
    for future in behind:
        with pytest.raises(persist.NotSent, match="cancelled"):
            future.result(0)
    assert write.fetch_upper() == persist.at(0)
    write.append_async(at(0, 0), 0, 1)
    last = write.append_async(at(1, 0), 1, 2)
    assert last.cancel(), "the last one cancelled fails nothing"
    write.flush()
    assert write.fetch_upper() == persist.at(1)


@over_handles
def test_wrong_input_is_refused_at_the_call_and_concerns_nothing_else(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    write = relation.queue()
    first = write.append_async(at(0, 0), 0, 1)
    most = at(1, 1, diff=2**62)
    for call in (
        lambda: write.append_async(at(7, 1), 1, 2), lambda: write.append_async([{"word": "w"}], 1, 2),
        lambda: write.append_async([], 2, 1), lambda: write.append_async("rows", 1, 2),
        lambda: write.append_async([], 1, 2, block="yes"), lambda: write.append_async([], 1, 2, token=""),
        lambda: write.append_async([], 1, 2, timeout="1"), lambda: write.flush(timeout=-1),
        lambda: write.append_async(most * 3, 1, 2), lambda: relation.queue(bytes_=-1),
    ):  # fmt: skip
        with pytest.raises((persist.InvalidUsage, persist.DiffOverflow)):
            call()
    second = write.append_async(at(1, 1), np.int64(1), np.int32(2))
    write.flush()
    assert (first.result(0).count, second.result(0).count) == (1, 1)


@over_handles
def test_a_rival_that_wins_every_other_race_never_makes_an_append_go_missing(world: World, carrier: Carrier) -> None:
    """Whoever appends at the upper that a failure tells loses nothing and doubles nothing."""
    others = carrier.make(world.client())
    write = carrier.open(world.client(rival=world.rival)).write
    write.compare_and_append([], 0, 1)
    upper, mine = 1, 0
    for n in range(12):
        if n % 2:
            world.rival.before_next(lambda: others.write.advance_upper((others.write.fetch_upper().time or 0) + 1))
        try:
            upper = write.append_async(at(upper, n), upper, upper + 1).result(0).upper.time or 0
            mine += 1
        except persist.UpperMismatch as error:
            upper = error.actual.time or 0
    found = others.contents(upper - 1)
    assert sum(found.values()) == len(found) == mine >= 6


@over_handles
def test_leases_that_ended_fail_what_was_accepted_or_are_registered_anew_and_nothing_is_doubled(
    world: World, carrier: Carrier
) -> None:
    relation = carrier.make(world.client(persist.Config(lease_ms=1000)))
    write = relation.queue()
    write.compare_and_append(at(0, 0), 0, 1)
    futures = [write.append_async(at(n, n), n, n + 1) for n in (1, 2)]
    world.clock.advance(2)
    other = world.client()
    for shard in other.shards():
        other.expire(shard)
    with pytest.raises(persist.LeaseExpired):
        write.flush()
    assert all(isinstance(future.exception(), persist.LeaseExpired) for future in futures)
    write.append_async(at(1, 1), 1, 2)
    write.flush()
    assert carrier.open(other).contents(1) == {(0, "w"): 1, (1, "w"): 1}
