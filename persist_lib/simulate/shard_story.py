"""Writers, twins that write the same, readers and workers of upkeep at one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa

import persist_lib as persist
from persist_lib.errors import ConstraintViolated, Determinate, Indeterminate, LeaseExpired, UpperMismatch
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.simulate.ledger import Entry, Ledger, Outcome
from persist_lib.simulate.sampling import Sampler
from persist_lib.simulate.scheduler import Actor
from persist_lib.simulate.story import DUTIES, PASSING, Story
from persist_lib.testing.checks import check_world
from persist_lib.testing.model import Row, contents_of, updates_of

SHARD = "s"
SIZES = (1, 3, 20)
MOST_ROWS = 100
"""Rows are numbered by their append: those of append n begin at n * MOST_ROWS."""
TRIES = 20
TAKEN_BACK = 0.3
"""The share of appends that also take back a row of their writer."""
REFUSED = (UpperMismatch, LeaseExpired, ConstraintViolated, Determinate)


class ShardStory(Story):
    """One busy shard of any schema."""

    roles: Mapping[str, int] = {"writer": 2, "placer": 1, "twin": 2, "maintainer": 2, "reader": 1}

    def __init__(self, seed: int, schema: Schema, retention: int | None = None, **how: Any) -> None:
        super().__init__(seed, **how)
        self.kept = self.retention(retention, schema.times)
        self.schema, self.sampler, self.ledger = schema, Sampler(schema, seed), Ledger()
        self.known: dict[int, Counter[Row]] = {}
        self.twins: dict[int, Entry] = {}

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

    def writer(self, actor: Actor) -> None:
        """Append rows of its own, take some of them back later, and note each outcome."""
        own: list[tuple[int, int]] = []
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, self.schema)
            while not self.is_over():
                with suppress(*REFUSED, Indeterminate):
                    lower = write.fetch_upper().time or 0
                    upper = lower + actor.random.randrange(1, 4)
                    number = len(self.ledger.entries)
                    rows = self.rows(actor, lower, upper, own)
                    entry = self.ledger.begin(updates_of(rows), (lower, upper))
                    entry.outcome = self.append(write, rows, lower, upper)
                    if entry.outcome == "acknowledged":
                        own.append((number * MOST_ROWS, rows.column(DIFF)[0].as_py()))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def append(self, write: persist.WriteHandle, rows: pa.Table, lower: int, upper: int) -> Outcome:
        """Append; where the outcome is unknown ask by the token, until it is known."""
        token = None
        for _ in range(TRIES):
            try:
                if write.machine.runtime.random.random() < 0.3:
                    write.append_async(rows, lower, upper, token=token).result(0)
                else:
                    write.compare_and_append(rows, lower, upper, token=token)
            except Indeterminate as error:
                if "token" not in error.fields:
                    return "unknown"  # it was its registration, or an upload, that got no answer
                token = cast("bytes", error.fields["token"])
            except REFUSED:
                return "refused" if token is None else "unknown"  # its token is not known under a new id
            else:
                return "acknowledged"
        return "unknown"

    def placer(self, actor: Actor) -> None:
        """Append wherever upper is. Only its token keeps such an append from being there twice."""
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, self.schema)
            while not self.is_over():
                rows = self.rows(actor, 0, 1, [])
                with suppress(*REFUSED):
                    self.place(write, self.ledger.begin(updates_of(rows)), rows.drop_columns(TIME))
                client.heartbeat()
                actor.sleep(actor.random.random())

    def place(self, write: persist.WriteHandle, entry: Entry, rows: pa.Table) -> None:
        """Append; where the outcome is unknown ask by the token, now or after others came, or never."""
        token = None
        for _ in range(TRIES):
            try:
                upper = write.append_now(rows, token=token).upper.time or 0
            except Indeterminate as error:
                if "token" not in error.fields or write.machine.runtime.random.random() < 0.1:
                    return
                token = cast("bytes", error.fields["token"])
            except REFUSED:
                if token is None:
                    entry.outcome = "refused"
                raise
            else:
                entry.bounds, entry.outcome = (upper - 1, upper), "acknowledged"
                self.did["append placed again" if token else "append placed"] += 1
                return

    def twin(self, actor: Actor) -> None:
        """Append what other twins append, too: at each time one row that the time decides. The first one counts."""
        with actor.client(self.config) as client:
            write = client.open_writer(SHARD, self.schema)
            while not self.is_over():
                with suppress(UpperMismatch, *PASSING):
                    upper = write.fetch_upper().time or 0
                    lower = max(0, upper - actor.random.randrange(3))
                    times = [upper, upper + 1]
                    rows = self.sampler.table([-1 - time for time in times], times)
                    for update in updates_of(rows):
                        if update[1] not in self.twins:
                            self.twins[update[1]] = self.ledger.begin([update], is_shared=True)
                    write.append(rows, lower, upper + 2)
                client.heartbeat()
                actor.sleep(actor.random.random())

    def maintainer(self, actor: Actor) -> None:
        """Do one duty after the other, by the policy."""
        with actor.client(self.config) as client:
            while not self.is_over():
                duty = actor.random.choice(DUTIES)
                with suppress(*PASSING):
                    self.upkeep(client, SHARD, duty)
                actor.sleep(actor.random.random())

    def reader(self, actor: Actor) -> None:
        """Read as of times, and listen, for as long as the lease lasts."""
        with actor.client(self.config) as client:
            while not self.is_over():
                with suppress(*PASSING):
                    self.read(actor, client)
                actor.sleep(actor.random.random())

    def read(self, actor: Actor, client: persist.Client) -> None:
        with client.open_reader(SHARD) as read:
            first = read.since.time or 0
            if not read.fetch_upper().has_passed(first):
                return
            base = contents_of(read.snapshot(first, diff=True).to_arrow())
            self.learn(first, base, base)
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
                    self.learn(as_of, found, expected)
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

    def learn(self, as_of: int, found: Counter[Row], expected: Counter[Row]) -> None:
        """Check contents as of a time against what was heard, what others read, and what was written."""
        where = f"as of {as_of}"
        self.expect("a snapshot is an earlier one and what was heard since", found != expected, where)
        self.expect("as of a time all read the same", self.known.setdefault(as_of, found) != found, where)
        self.expect("a read has what was acknowledged by then", self.ledger.problems(found, as_of), where)

    def judge(self, client: persist.Client) -> None:
        check_world(client, SHARD)
        self.held["log, state, objects and history agree"] += 1
        upper = client.inspect(SHARD).state.upper.time or 0
        if upper:
            found = contents_of(client.open_reader(SHARD).snapshot(upper - 1, diff=True).to_arrow())
            self.expect("nothing is lost, doubled or invented", self.ledger.problems(found))
            self.expect("an append is there as a whole, or not at all", self.ledger.parts(found))
            self.expect("no two appends are at the same times", self.ledger.overlaps(found))
        self.come_to_rest(client, SHARD)
