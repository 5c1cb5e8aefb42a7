"""The orphan audit races others: what is linked while it looks is never deleted, wherever in between that happens.

It lists objects before it reads the state. The other way round, an object would be listed that is linked by a state
newer than the one it is judged by, and its uploader, unknown to that, would count as gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

import persist_lib as persist
from persist_lib.location import open_location
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from persist_lib.maintain import Audited
from persist_lib.testing import check_world
from tests.worlds import SCHEMA, SMALL, World, row

T = TypeVar("T")
OTHER = 7


class Between:
    """Another process acts once, just before the n-th operation of the audit, or just after the last one."""

    def __init__(self, place: int, act: Callable[[], object]) -> None:
        self.place, self._act = place, act
        self.kinds: list[str] = []
        self.is_armed = self.has_acted = False

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if self.is_armed:
            if len(self.kinds) == self.place:
                self.act()
            self.kinds.append(operation.kind)
        return call()

    def act(self) -> None:
        if not self.has_acted:
            self.has_acted = True
            self._act()


class BlobBetween(AroundBlob):
    def __init__(self, inner: Blob, between: Between) -> None:
        super().__init__(inner)
        self.between = between

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.between.around(operation, call)


class ConsensusBetween(AroundConsensus):
    def __init__(self, inner: Consensus, between: Between) -> None:
        super().__init__(inner)
        self.between = between

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        return self.between.around(operation, call)


def auditor(world: World, between: Between) -> persist.Client:
    """A client that knows the shard, and is disturbed once it is armed."""
    inner = open_location(world.inner.url, clock=world.clock)
    disturbed = replace(
        inner, blob=BlobBetween(inner.blob, between), consensus=ConsensusBetween(inner.consensus, between)
    )
    client = persist.open(disturbed, config=SMALL, runtime=world.clock.runtime(OTHER))
    world.clients.append(client)
    client.inspect("s")
    between.is_armed = True
    return client


def links(world: World) -> None:
    """A new process registers, uploads, links, compacts, rolls up, and is gone."""
    with persist.open(world.inner, config=SMALL, runtime=world.clock.runtime(OTHER + 1)) as client:
        with client.open_writer("s", SCHEMA) as write:
            write.append([row(2, time=1)], 1, 2)
            write.append([row(3, time=2)], 2, 3)
        client.compact("s", policy=persist.Policy(weight=1e9))
        client.roll_up("s", force=True)


@pytest.mark.parametrize("is_rival", [False, True])
@pytest.mark.parametrize("place", range(8))
def test_what_is_uploaded_and_linked_at_any_moment_of_an_audit_is_never_deleted(world, place, is_rival):
    """By itself and, if `is_rival`, with an orphan to delete beside."""
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, 1)
        if is_rival:
            world.inner.blob.set("s/w00000000000000aa/00000000000000ab.parquet", b"orphan")
    between = Between(place, lambda: links(world))
    found = auditor(world, between).audit_orphans("s")
    between.is_armed = False
    between.act()
    assert list(found.orphans) == ["w00000000000000aa/00000000000000ab.parquet"] * is_rival
    check_world(client, "s")
    with client.open_reader("s") as read:
        assert read.snapshot(2).to_arrow().column("id").to_pylist() == [1, 2, 3]
    asked = between.kinds
    assert "scan" in asked[asked.index("list") :], "the state as it is after the listing, not as it was known"


def test_an_audit_waits_for_a_writer_that_has_uploaded_and_not_linked_yet(world):
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, 1)
        found: list[Audited] = []
        racing = world.client(SMALL, rival=world.rival)
        with racing.open_writer("s", SCHEMA) as late:
            late.fetch_upper()
            late.compare_and_append([], 1, 2)
            world.rival.before_next(lambda: found.append(client.audit_orphans("s")))
            late.compare_and_append([row(2, time=2)], 2, 3)
    assert world.rival.waiting == 0
    assert [(audited.orphans, audited.pending) for audited in found] == [((), 1)]
    check_world(client, "s")
