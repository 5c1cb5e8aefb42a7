"""Whatever of a shard is damaged, a verification finds it, or nothing that anybody can read is another one.

And one that looks at what was added since finds there what a full one finds.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.memory.location import MemoryConsensus
from persist_lib.testing import contents_of
from tests.shards import EAGER
from tests.worlds import SCHEMA, World, row

SHARD = "s"
CONFIG = persist.Config(part_bytes=64 * 1024, inline_bytes=150, rollup_every=6)


class History:
    """A shard in memory that grows at random: appends, holders, compactions, rollups, collections."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.world = rng, World(seed=rng.randrange(1 << 30))
        self.client = self.world.client(CONFIG)
        self.client.open_writer(SHARD, SCHEMA).close()
        self.readers: list[persist.ReadHandle] = []

    def step(self) -> None:
        client, rng = self.client, self.rng
        acts: list[Callable[[], object]] = [
            self.append, self.append, self.append, self.read, lambda: client.compact(SHARD, policy=EAGER),
            lambda: client.roll_up(SHARD, force=rng.random() < 0.5), lambda: client.collect(SHARD),
            lambda: client.audit_orphans(SHARD), lambda: client.set_retention(SHARD, rng.randrange(4)),
            lambda: client.retain(SHARD),
        ]  # fmt: skip
        rng.choice(acts)()

    def append(self) -> None:
        with self.client.open_writer(SHARD, SCHEMA) as write:
            lower = write.fetch_upper().time or 0
            upper = lower + self.rng.randrange(1, 3)
            rows = [
                row(
                    self.rng.randrange(9),
                    self.rng.choice("ab") * self.rng.randrange(60),
                    self.rng.randrange(lower, upper),
                )
                for _ in range(self.rng.randrange(6))
            ]
            write.compare_and_append(rows, lower, upper)

    def read(self) -> None:
        if self.readers and self.rng.random() < 0.5:
            self.readers.pop().close()
        else:
            self.readers.append(self.client.open_reader(SHARD))

    def all_that_is_read(self) -> object:
        """The state, and the contents as of each time; or that there is an error."""
        client = self.world.client(CONFIG)
        try:
            state = client.inspect(SHARD).state
            since, upper = state.since.time or 0, state.upper.time or 0
            with client.open_reader(SHARD) as read:
                found = [contents_of(read.snapshot(at, diff=True).to_arrow()) for at in range(since, upper)]
        except persist.Damage as error:
            return type(error)
        return state.trace, state.holds, found

    def rows(self) -> list[Row]:
        return self.world.inner.consensus.scan(SHARD, SeqNo(0), 10_000)

    def damage(self, since: SeqNo = SeqNo(0), but: frozenset[str] = frozenset()) -> str:  # noqa: B008 - a number
        """Damage a row after `since`, or an object but these. Returns what was done; empty if there is nothing."""
        keys = [entry.key for entry in self.world.inner.blob.list(f"{SHARD}/") if entry.key not in but]
        if keys and self.rng.random() < 0.5:
            return self.damage_object(self.rng.choice(sorted(keys)), sorted(keys))
        rows = self.rows()
        places = [index for index, one in enumerate(rows) if one.seqno > since]
        if not places:
            return ""
        index, how = self.rng.choice(places), self.rng.choice(["flip", "cut", "swap", "drop"])
        data = rows[index].data
        match how:
            case "flip":
                rows[index] = rows[index]._replace(data=self.flipped(data))
            case "cut":
                rows[index] = rows[index]._replace(data=data[: self.rng.randrange(len(data))])
            case "swap":
                other = self.rng.choice(places)
                rows[index], rows[other] = (
                    rows[index]._replace(data=rows[other].data), rows[other]._replace(data=rows[index].data)
                )  # fmt: skip
            case _:
                del rows[index]
        consensus = self.world.inner.consensus
        assert isinstance(consensus, MemoryConsensus)
        consensus._logs[SHARD] = rows
        return f"{how} of row {index} of {len(rows)}"

    def damage_object(self, key: str, keys: list[str]) -> str:
        how, blob = self.rng.choice(["flip", "cut", "swap", "drop"]), self.world.inner.blob
        data = blob.get(key) or b""
        blob.delete(key)
        match how:
            case "flip":
                blob.set(key, self.flipped(data))
            case "cut":
                blob.set(key, data[: self.rng.randrange(len(data))])
            case "swap":
                blob.set(key, blob.get(self.rng.choice(keys)) or data)
            case _:
                pass
        return f"{how} of {key}"

    def flipped(self, data: bytes) -> bytes:
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]


@given(st.integers(0, 1 << 30))
def test_damage_is_found_or_changes_nothing_that_is_read(seed: int) -> None:
    history = History(Random(seed))
    for _ in range(history.rng.randrange(4, 30)):
        history.step()
    assert not history.client.verify(SHARD, full=True).is_damaged
    before = history.all_that_is_read()
    for reader in history.readers:  # so that only what the log and objects say decides
        reader.close()
    what = history.damage()
    found = history.world.client(CONFIG).verify(SHARD, full=True)
    if not found.is_damaged:
        assert history.all_that_is_read() == before, f"{what} was not found"
    history.world.close()


@given(st.integers(0, 1 << 30))
def test_a_look_at_what_was_added_finds_what_a_full_one_finds(seed: int) -> None:
    history = History(Random(seed))
    for _ in range(3):
        for _ in range(history.rng.randrange(1, 10)):
            history.step()
        assert not history.client.verify(SHARD).is_damaged
        assert not history.world.client(CONFIG).verify(SHARD, full=True).is_damaged
    seen, keys = (
        history.client.inspect(SHARD).seqno,
        frozenset(e.key for e in history.world.inner.blob.list(f"{SHARD}/")),
    )
    for _ in range(history.rng.randrange(1, 8)):
        history.step()
    for reader in history.readers:
        reader.close()
    history.damage(seen, keys)
    new, full = history.world.client(CONFIG).verify(SHARD), history.world.client(CONFIG).verify(SHARD, full=True)
    assert [one.about for one in new.findings if one.is_damage] == [one.about for one in full.findings if one.is_damage]
    history.world.close()
