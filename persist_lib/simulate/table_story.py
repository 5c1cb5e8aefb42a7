"""Writers, listeners, a controller that hands over, and workers of upkeep at one table, whatever carries it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, cast

import pyarrow as pa

import persist_lib as persist
from persist_lib.errors import (
    Determinate,
    HandoverRefused,
    NotFound,
    Refused,
    SchemaChanged,
    UpperMismatch,
)
from persist_lib.ids import CATALOG
from persist_lib.schema.schema import Schema
from persist_lib.simulate.scheduler import Actor
from persist_lib.simulate.story import DUTIES, PASSING, Outcome, Recorded
from persist_lib.table.opening import make_table
from persist_lib.testing.checks import check_location
from persist_lib.testing.model import contents_of, summed, updates_of

NAME = "t"
WORLD = (*PASSING, UpperMismatch, HandoverRefused, NotFound, SchemaChanged, persist.WriteConflict)
"""What a process may meet when the world fails, or another one was first."""
MOST_ROWS = 10
Appends = Callable[[pa.Table, bytes | None], int | None]
"""Appends rows under a token, and answers at which time."""
Kind = Literal["shard", "collection", "timeline"]


class Layout(NamedTuple):
    """What carries a table, as `persist create` says it."""

    kind: Kind = "collection"
    mode: str | None = None
    shards: int = 1
    hash_columns: tuple[str, ...] | None = None
    retention: int | None = None


class TableStory(Recorded):
    """One table of any schema. Its rows are appended, replaced by their key, and deleted."""

    roles: Mapping[str, int] = {"writer": 2, "listener": 2, "controller": 1, "maintainer": 1}
    refused = (Refused, Determinate)

    def __init__(self, seed: int, schema: Schema, layout: Layout = Layout(), **how: Any) -> None:  # noqa: B008 - a tuple
        super().__init__(seed, schema, **how)
        self.layout, self.commands = layout, 0
        self.is_definite = layout.kind == "collection" and layout.mode in {None, "append"}
        """Whether writers append identical data."""

    def begin(self, client: persist.Client) -> None:
        kind, mode, shards, hashed, given = self.layout
        retention, chosen = self.retention(given, self.schema.times), cast("Any", mode)
        if kind == "collection":
            client.controller().create(
                NAME, self.schema, shards=shards, mode=chosen or "append", hash_columns=hashed, retention=retention
            )
        elif kind == "timeline":
            client.controller().tables().create(NAME, self.schema, shards=shards, mode=chosen, retention=retention)
        else:
            make_table(client, NAME, self.schema)
            client.set_retention(NAME, retention)

    def writer(self, actor: Actor) -> None:
        """Change the table again and again, by one handle for a while."""
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.change(actor, client, client.table(NAME)), WORLD)

    def change(self, actor: Actor, client: persist.Client, table: persist.Table) -> None:
        own: list[int] = []
        for _ in range(8):  # a handle keeps what it has read of promises
            if self.is_definite:
                with table.writer() as write:
                    self.write_alike(actor, write)
                    self.did["append"] += 1
            elif own and self.sampler.is_named_by_key and actor.random.random() < 0.3:
                self.replace_row(actor, table, own.pop(actor.random.randrange(len(own))))
            elif self.layout.kind != "timeline" and actor.random.random() < 0.4:
                self.append_at(actor, table, own)
            else:
                self.append(actor, lambda rows, token: table.append(rows, token=token).time, own)
            client.heartbeat()
            actor.sleep(actor.random.random())

    def numbers(self, actor: Actor) -> list[int]:
        first = len(self.ledger.entries) * MOST_ROWS
        return [first + i for i in range(actor.random.choice([1, 3]))]

    def append(self, actor: Actor, append: Appends, own: list[int]) -> None:
        """Append rows at a time that the library chooses."""
        numbers = self.numbers(actor)
        rows = self.sampler.table(numbers)
        outcome = self.commit([(number, 0, 1) for number in numbers], lambda token: append(rows, token))
        own += numbers if outcome == "acknowledged" else []

    def append_at(self, actor: Actor, table: persist.Table, own: list[int]) -> None:
        """Append rows at a time of one's own."""
        with table.writer() as write:
            upper = write.fetch_upper().time or 0
            numbers = self.numbers(actor)
            rows = self.sampler.table(numbers, [upper] * len(numbers))
            entry = self.ledger.begin(updates_of(rows), (upper, upper + 1))
            try:
                write.compare_and_append(rows, upper, upper + 1)
            except Refused:
                entry.outcome = "refused"
                raise
            entry.outcome = "acknowledged"
            own += numbers

    def replace_row(self, actor: Actor, table: persist.Table, number: int) -> None:
        """Replace the row of a key by another one, or delete it."""
        if actor.random.random() < 0.5 and self.schema.value:
            rows = self.sampler.table([number], variant=1)
            if rows != self.sampler.table([number]):
                self.commit([(number, 0, -1), (number, 1, 1)], lambda token: table.upsert(rows, token=token).time)
            return
        keys = self.sampler.table([number]).select(self.schema.key_names)
        self.commit([(number, 0, -1)], lambda token: table.delete(keys, token=token).time)

    def commit(self, changes: list[tuple[int, int, int]], act: Callable[[bytes | None], int | None]) -> Outcome:
        """Do it under a token; where the outcome is unknown do it again by that, until it is known.

        `changes` are numbers of rows, variants and diffs.
        """
        made = [self.sampler.table([number], [0], [diff], variant=variant) for number, variant, diff in changes]
        entry = self.ledger.begin(update for one in made for update in updates_of(one))

        def placed(token: bytes | None) -> tuple[int, int] | None:
            time = act(token)
            return None if time is None else (time, time + 1)

        self.settle(entry, placed)
        return entry.outcome

    def listener(self, actor: Actor) -> None:
        """Read, and listen from there on."""
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.listen(actor, client), WORLD, beating=client)

    def listen(self, actor: Actor, client: persist.Client) -> None:
        table = client.table(NAME)
        with table.read(self.as_of(actor, table), diff=True) as read:
            as_of, total = read.as_of, contents_of(read.to_arrow())
        if as_of < 0:
            return
        self.learn(as_of, Counter(total))
        with table.listen(as_of) as listen:
            for _ in range(12):
                for event in listen.poll():
                    if isinstance(event, persist.Updates):
                        for data, _, diff in updates_of(event.table):
                            total[data] += diff
                    elif event.as_of is not None:
                        total = Counter(summed(total.items()))
                        self.learn(event.as_of, Counter(total))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def as_of(self, actor: Actor, table: persist.Table) -> int | None:
        """A time to read: the newest one, or a little before it."""
        if actor.random.random() < 0.5:
            return None
        found = table.describe()
        as_of = max(found.since.time or 0, (found.upper.time or 0) - 2)
        return as_of if found.upper.has_passed(as_of) else None

    def controller(self, actor: Actor) -> None:
        """Make a copy, copy, hand over, copy the rest; a command that got no answer is repeated by its id."""
        with actor.client(self.config) as client:
            controller = client.controller()
            while not self.is_over() and self.layout.kind == "collection":
                self.commands += 1
                made, handed = f"make-{self.commands}", f"hand-{self.commands}"
                number: int | None = None
                for _ in range(6):
                    with suppress(*WORLD):
                        if number is None:
                            shards = 1 + self.commands % 3
                            number = controller.make_rendition(NAME, shards=shards, copy=True, command=made).number
                        controller.copy_rendition(NAME, number)
                        controller.hand_over(NAME, number, command=handed)
                        controller.copy_rendition(NAME, number, to_end=True)
                        self.did["hand over"] += 1
                        break
                    client.heartbeat()
                actor.sleep(3 * actor.random.random())

    def maintainer(self, actor: Actor) -> None:
        """Do one duty after the other, by the policy, and finish copies that a controller left."""
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*WORLD):
                    self.tend(client)
                client.heartbeat()
                with suppress(*WORLD):
                    duty, shards = actor.random.choice(DUTIES), client.shards()
                    shard = actor.random.choice([one for one in shards if one != CATALOG] or shards)
                    self.upkeep(client, shard, duty)
                client.heartbeat()
                actor.sleep(actor.random.random())

    def tend(self, client: persist.Client) -> None:
        """Do what the layer above the shards has to do."""
        controller = client.controller()
        if self.layout.kind == "collection":
            controller.tend(NAME)
            active = controller.describe(NAME).active
            if active.copies is not None and active.start is not None and active.upper < persist.at(active.start):
                controller.copy_rendition(NAME, active.number, to_end=True)
        elif self.layout.kind == "timeline":
            tables = controller.tables()
            for step in (tables.apply, tables.tidy, tables.controller.tend):
                with suppress(*WORLD):
                    step()
        self.did["tend"] += 1

    def judge(self, client: persist.Client) -> None:
        self.simulation.clock.advance(100 * self.config.lease_ms / 1000)
        for shard in client.shards():
            client.expire(shard)
        for _ in range(3):
            self.tend(client)
        table = client.table(NAME)
        since = table.describe().since
        for as_of in self.known:
            if since <= persist.at(as_of):
                with table.read(as_of, diff=True) as read:
                    self.learn(as_of, contents_of(read.to_arrow()))
        with table.read(diff=True) as read:
            found = contents_of(read.to_arrow())
        self.judge_all(found)
        if self.layout.kind != "shard":
            left = client.controller().describe(NAME).pending
            self.expect("at rest nothing is left to do", list(left))
        check_location(client)
        self.held["logs, states, objects and promises agree"] += 1
