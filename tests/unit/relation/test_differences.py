"""Differences of carriers today, and what is decided: `differs` names both, and the test asserts that of today.

The commit that makes the carriers one in a row changes its test into one over all carriers, and nothing else here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import MemberOf
from tests.unit.relation.carriers import THREE, Carrier, over, over_all, over_handles, over_renditions, rows, time_of
from tests.worlds import World

T = TypeVar("T", bound=Callable[..., object])
DIFFERENCES: dict[str, str] = {}


def differs(row: str, decided: str) -> Callable[[T], T]:
    """Mark a test that asserts a difference of today. `decided` is what is to hold for all carriers."""
    assert row not in DIFFERENCES
    DIFFERENCES[row] = decided
    return lambda test: test


@differs("next time", "of tables the store's clock, of shards the process's")
@over_all
def test_next_time(world: World, carrier: Carrier) -> None:
    carrier.make(world.client())
    world.seed += 1
    runtime = world.runtime(world.seed)
    ahead = replace(runtime, clock_ms=lambda: runtime.clock_ms() + 3_600_000)
    client = persist.open(world.reach(), runtime=ahead)
    world.clients.append(client)
    skew = time_of(carrier.open(client).now(rows(1))) - world.clock() // 1_000_000
    assert skew == (0 if carrier.mode else 3_600_000)


@differs("producer and token", "all verbs take both; a definite append is judged in every place")
@over_handles
def test_producer_and_token(world: World, carrier: Carrier) -> None:
    write = carrier.make(world.client()).write
    assert {"token", "producer"} <= signature(write.append_now).parameters.keys()
    assert signature(write.append).parameters.keys() & {"token", "producer"} == {"token"}


@differs("mode", "fixed by promote, from then on")
@over_handles
def test_mode(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.at([], 0, 1)
    if carrier.shards:
        with pytest.raises(persist.InvalidUsage, match="append"):
            relation.write.append([], 0, 2)
    else:
        assert relation.write.append([], 0, 2).upper == persist.at(2)


@differs("answers", "one Written; `shards` keeps seqno and attempts")
@over_all
def test_answers(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    names = [type(done).__name__ for done in (relation.now(rows(1)), relation.upsert(rows(2)))]
    kinds = {"": ["Appended", "Changed"], "collection": ["Written", "Written"], "table": ["Done", "Done"]}
    assert names == kinds["table" if carrier.mode else "collection" if carrier.shards else ""]


@differs("memory", "streamed, and spread over places")
@over_handles
def test_memory(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(inline_bytes=0, part_bytes=64 * 1024)))
    relation.at([], 0, 1)
    uploaded: list[int] = []

    def tables() -> Iterator[pa.Table]:
        for start in range(0, 24_000, 4_000):
            uploaded.append(world.count("set"))
            yield pa.table({"id": np.arange(start, start + 4_000), "word": [f"{n:030}" for n in range(4_000)]})

    relation.at(tables(), 1, 2)
    assert (uploaded[-1] > uploaded[0]) is not bool(carrier.shards), "what came before is written already"


@differs("time not complete", "NotComplete at once, or after timeout= if it is given")
@over_all
def test_time_not_complete(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client(persist.Config(timeout_s=5)))
    relation.now(rows(1))
    started = world.clock()
    with pytest.raises(persist.NotComplete):
        relation.snapshot(started // 1_000_000 + 3_600_000)
    assert (world.clock() - started > 4_000_000_000) is (carrier.mode is None)
    if carrier.mode:
        assert relation.snapshot(started // 1_000_000 + 3_600_000, newest=True).as_of >= 0


@differs("before the handle's since", "a table: what holds keep; a handle: its own")
@over_all
def test_before_the_handles_since(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    first, second = (time_of(relation.now(rows(n))) for n in (1, 2))
    relation.contents()
    if carrier.mode:
        assert relation.contents(first) == {(1, "w"): 1}, "by a second reader"
        return
    relation.read.downgrade_since(second)
    with pytest.raises(persist.SinceViolation):
        relation.snapshot(first)


@differs("listen", "replace for all")
@over_all
def test_listen(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    listen = relation.tables.listen if carrier.mode else relation.read.listen
    assert ("replace" in signature(listen).parameters) is (carrier.shards > 0 and not carrier.mode)


@differs("order", "tables promise none; `shards`, splits and `by_shard` by key")
@over_handles
def test_order(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    relation.now(rows(*range(50)))
    ids = relation.snapshot().to_arrow().column("id").to_pylist()
    assert (ids == sorted(ids)) is (carrier is not THREE)


@differs("restore, clone, finish, evolve, splits", "all of them for all carriers")
@over_renditions
def test_restore_and_others(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    time = time_of(relation.now(rows(1)))
    for call in (lambda: relation.client.restore("c", time), lambda: relation.client.finish("c")):
        with pytest.raises(MemberOf if carrier.is_promoted else persist.NotFound):
            call()
    assert hasattr(relation.snapshot(), "splits") is (carrier.mode is None)


@differs("retention", "one call, in force when it returns")
@over(THREE)
def test_retention(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    for n in range(3):
        relation.now(rows(n))
    relation.controller.alter("c", retention=0)
    assert relation.controller.describe("c").since == persist.at(0)
    relation.controller.tend("c")
    assert relation.controller.describe("c").since > persist.at(0)


# --- found by this suite, and not decided yet ------------------------------------------------------------------------
# More, each with the word "today": the timeout that TimedOut names (test_statements.py), how a listener ends to
# which nothing can come (test_following.py), and as of when a new table is read (test_reads.py).


@differs("listeners of a reader that is closed", "not yet: those of a shard end with it")
@over_handles
def test_listeners_of_a_closed_reader(world: World, carrier: Carrier) -> None:
    relation = carrier.make(world.client())
    time = time_of(relation.now(rows(1)))
    relation.now(rows(2))
    listener: Any = relation.listen(time)
    relation.read.close()
    if carrier.shards:
        assert len(listener.poll()) == 2
        listener.close()
    else:
        with pytest.raises(persist.LeaseExpired):
            listener.poll()
