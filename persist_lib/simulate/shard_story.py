"""Writers, twins that write the same, readers and workers of upkeep at one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

import persist_lib as persist
from persist_lib.errors import ConstraintViolated, Determinate, Indeterminate, LeaseExpired, UpperMismatch
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.simulate.scheduler import Actor
from persist_lib.simulate.story import DUTIES, PASSING, Recorded
from persist_lib.testing.checks import check_world
from persist_lib.testing.model import Row, contents_of, updates_of

SHARD = "s"
SIZES = (1, 3, 20)
MOST_ROWS = 100
"""Rows are numbered by their append: those of append n begin at n * MOST_ROWS."""
TAKEN_BACK = 0.3
"""The share of appends that also take back a row of their writer."""


class ShardStory(Recorded):
    """One busy shard of any schema."""

    roles: Mapping[str, int] = {"writer": 2, "placer": 1, "twin": 2, "maintainer": 2, "reader": 1}
    refused = (UpperMismatch, LeaseExpired, ConstraintViolated, Determinate)

    def __init__(self, seed: int, schema: Schema, retention: int | None = None, **how: Any) -> None:
        super().__init__(seed, schema, **how)
        self.kept = self.retention(retention, schema.times)

    def begin(self, client: persist.Client) -> None:
        client.open_writer(SHARD, self.schema)
        client.set_retention(SHARD, self.kept)

    def rows(self, actor: Actor, lower: int, upper: int, own: list[tuple[int, int]]) -> pa.Table:
        """Rows of the next append, at times in `[lower, upper)`. It may take back one of the writer's `own`, too."""
        first = len(self.ledger.entries) * MOST_ROWS
        numbers = [first + i for i in range(actor.random.choice(SIZES))]
        times, diffs = [actor.random.randrange(lower, upper) for _ in numbers], [1] * len(numbers)
        if not self.schema.unique and actor.random.random() < TAKEN_BACK:
            diffs[0] = 2
        if own and actor.random.random() < TAKEN_BACK:
            number, diff = own.pop(actor.random.randrange(len(own)))
            numbers, times, diffs = [*numbers, number], [*times, lower], [*diffs, -diff]
        return self.sampler.table(numbers, times, diffs)

    def writing(
        self, actor: Actor, step: Callable[[persist.WriteHandle], object], passing: tuple[type[Exception], ...]
    ) -> None:
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, self.schema)
            self.repeat(actor, lambda: step(write), passing, beating=client)

    def writer(self, actor: Actor) -> None:
        """Append rows of its own, take some of them back later, and note each outcome."""
        own: list[tuple[int, int]] = []
        self.writing(actor, lambda write: self.append(actor, write, own), (*self.refused, Indeterminate))

    def append(self, actor: Actor, write: persist.WriteHandle, own: list[tuple[int, int]]) -> None:
        lower = write.fetch_upper().time or 0
        upper = lower + actor.random.randrange(1, 4)
        number = len(self.ledger.entries)
        rows = self.rows(actor, lower, upper, own)
        entry = self.ledger.begin(updates_of(rows), (lower, upper))

        def act(token: bytes | None) -> tuple[int, int]:
            if actor.random.random() < 0.3:
                write.append_async(rows, lower, upper, token=token).result(0)
            else:
                write.compare_and_append(rows, lower, upper, token=token)
            return lower, upper

        self.settle(entry, act)
        if entry.outcome == "acknowledged":
            own.append((number * MOST_ROWS, rows.column(DIFF)[0].as_py()))

    def placer(self, actor: Actor) -> None:
        """Append wherever upper is. Only its token keeps such an append from being there twice."""
        self.writing(actor, lambda write: self.place(actor, write), self.refused)

    def place(self, actor: Actor, write: persist.WriteHandle) -> None:
        """Append; where the outcome is unknown ask by the token, now or after others came, or never."""
        rows = self.rows(actor, 0, 1, [])

        def act(token: bytes | None) -> tuple[int, int]:
            upper = write.append_now(rows.drop_columns(TIME), token=token).upper.time or 0
            self.did["append placed again" if token else "append placed"] += 1
            return upper - 1, upper

        self.settle(self.ledger.begin(updates_of(rows)), act, lambda: actor.random.random() < 0.1)

    def twin(self, actor: Actor) -> None:
        """Append what other twins append, too."""
        self.writing(actor, lambda write: self.write_alike(actor, write), (UpperMismatch, *PASSING))

    def maintainer(self, actor: Actor) -> None:
        """Do one duty after the other, by the policy."""
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.upkeep(client, SHARD, actor.random.choice(DUTIES)))

    def reader(self, actor: Actor) -> None:
        """Read as of times, and listen, for as long as the lease lasts."""
        with actor.client(self.config) as client:
            self.repeat(actor, lambda: self.read(actor, client))

    def read(self, actor: Actor, client: persist.Client) -> None:
        with client.open_reader(SHARD) as read:
            first = read.since.time or 0
            if not read.fetch_upper().has_passed(first):
                return
            base = contents_of(read.snapshot(first, diff=True).to_arrow())
            self.compare(first, base, base)
            heard: dict[tuple[Row, int], int] = {}
            listener = read.listen(first)
            for _ in range(5):
                self.listen(listener, heard)
                newest = (listener.frontier.time or 0) - 1
                if newest >= first:
                    as_of = actor.random.randint(first, newest)
                    expected = Counter(base)
                    for (data, time), diff in heard.items():
                        expected[data] += diff if time <= as_of else 0
                    found = contents_of(read.snapshot(as_of, diff=True).to_arrow())
                    self.compare(as_of, found, expected)
                    if actor.random.random() < 0.3:
                        read.downgrade_since(max(first, newest - 5))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def listen(self, listener: persist.Listen, heard: dict[tuple[Row, int], int]) -> None:
        before = listener.frontier
        for event in listener.poll():
            if isinstance(event, persist.Updates):
                for data, time, diff in updates_of(event.table):
                    self.expect(
                        "a listener gets each update once, at its time",
                        not before.is_before(time) or (data, time) in heard, f"{data} at {time}",
                    )  # fmt: skip
                    heard[data, time] = diff
            else:
                before = event.frontier

    def compare(self, as_of: int, found: Counter[Row], expected: Counter[Row]) -> None:
        """Check contents as of a time against what was heard, what others read, and what was written."""
        self.expect("a snapshot is an earlier one and what was heard since", found != expected, f"as of {as_of}")
        self.learn(as_of, found)

    def judge(self, client: persist.Client) -> None:
        check_world(client, SHARD)
        self.held["log, state, objects and history agree"] += 1
        upper = client.inspect(SHARD).state.upper.time or 0
        if upper:
            found = contents_of(client.open_reader(SHARD).snapshot(upper - 1, diff=True).to_arrow())
            self.judge_all(found)
            self.expect("no two appends are at the same times", self.ledger.overlaps(found))
        self.come_to_rest(client, SHARD)
