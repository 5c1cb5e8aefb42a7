"""A collection that is handed over again and again, and a shard that is promoted, as one seed decides.

PERSIST_COLLECTION_SEEDS of each. Whatever a listener adds up to, and whatever anybody reads as of a time, is what
everybody else reads there, for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter
from persist_lib.core.formats import MEMBERS
from persist_lib.errors import MemberOf, NameTaken
from persist_lib.simulate import Actor, Layout, TableStory
from persist_lib.simulate.table_story import NAME, WORLD
from tests.simulation.stories import COLLECTION_SEEDS, play
from tests.worlds import SCHEMA

COLLECTION = Layout("collection", "compare_and_append", shards=2, retention=3)
STEPS = 2500
HANDED = (1, 2, 3)
"""Seeds whose stories hand over; in others the controller is killed first each time."""


def written(write: persist.WriteHandle, rows: pa.Table, token: bytes | None) -> int:
    """Append to a shard, and answer at which time."""
    return (write.append_now(rows, token=token).upper.time or 1) - 1


class Promoted(TableStory):
    """The collection is a shard at first. Writers and listeners have it open by its name, and some never look again."""

    roles: Mapping[str, int] = {**TableStory.roles, "stranger": 1}

    def begin(self, client: persist.Client) -> None:
        client.open_writer(NAME, SCHEMA).close()
        client.set_hold(NAME, "audit", 0)
        client.set_retention(NAME, 3)

    def append_at(self, actor: Actor, table: persist.Table, own: list[int]) -> None:
        with suppress(MemberOf):  # a writer of its own is of what carried the table when it was opened
            super().append_at(actor, table, own)

    def stranger(self, actor: Actor) -> None:
        """A program that has the shard open by its name for as long as it lives."""
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*WORLD, MemberOf, NameTaken):
                    write = client.open_writer(NAME, SCHEMA)
                    while not self.is_over():
                        with suppress(MemberOf):
                            self.append(actor, partial(written, write), [])
                            self.did["append by name"] += 1
                        client.heartbeat()
                        actor.sleep(actor.random.random())
                actor.sleep(3)

    def controller(self, actor: Actor) -> None:
        with actor.client(self.config) as client:
            while not self.is_over() and not self.did["promote"]:
                actor.sleep(5 * actor.random.random())
                with suppress(*WORLD):
                    client.table(NAME).promote()
                    self.did["promote"] += 1
        super().controller(actor)

    def tend(self, client: persist.Client) -> None:
        if self.did["promote"] or self.is_over():
            super().tend(client)

    def judge(self, client: persist.Client) -> None:
        super().judge(client)
        found = client.table(NAME).describe()
        assert found.holds == {"audit": persist.at(0)}
        assert client.controller().describe(NAME).retention == 3
        assert found.since == persist.at(0), "what a hold keeps is gone"


@pytest.mark.parametrize("seed", range(COLLECTION_SEEDS))
def test_a_table_that_is_promoted_is_what_it_was_to_everybody(seed: int) -> None:
    config: dict[str, Any] = {"format": MEMBERS}
    story = play(Promoted(seed, SCHEMA, COLLECTION, steps=STEPS, config=config))
    assert story.did["promote"] or seed >= 4, "those of each day are promoted"


@pytest.mark.parametrize("seed", range(COLLECTION_SEEDS))
def test_whatever_is_read_of_a_collection_is_what_everybody_reads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of the stories writers promise ahead of what they write, as they do where times are a clock."""
    if seed % 2:
        monkeypatch.setattr(CollectionWriter, "_ahead", lambda _, promise: persist.at((promise.time or 0) + 2))
    story = play(TableStory(seed, SCHEMA, COLLECTION, steps=STEPS))
    assert story.ledger.outcomes["acknowledged"]
    assert story.did["hand over"] or seed not in HANDED, "these have some, and each day has one of them"


@pytest.mark.parametrize("layout", [Layout("collection", "append", 3), Layout("timeline", "yolo", 2)], ids=str)
def test_so_it_is_where_writers_write_the_same_or_at_times_of_a_clock(layout: Layout) -> None:
    story = play(TableStory(1, SCHEMA, layout, steps=STEPS))
    assert story.did["append"] or story.ledger.outcomes["acknowledged"]
