"""Upsert, delete, append_now and constraints against a model: random calls by several clients, with rivals and faults.

The model is the multiset of rows now, and what each call does to it by definition. A rival acts just before the commit
of a call, so that the call was decided on what is not so any more.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired
from persist_lib.ids import SeqNo
from persist_lib.testing import Chances, Outcome, Rival, check_world, contents_of
from persist_lib.times import PER_SECOND, Unit
from tests.properties.test_library_model import OnFiles
from tests.worlds import World

CONFIGS = [
    persist.Config(lease_ms=20_000, rollup_every=7, timeout_s=2),
    persist.Config(lease_ms=20_000, rollup_every=16, timeout_s=2, inline_bytes=0, part_bytes=64 * 1024),
    persist.Config(lease_ms=20_000, rollup_every=5, timeout_s=2, inline_bytes=900),
]
FAULTS = {Outcome.REFUSED: 0.04, Outcome.HAPPENED_UNKNOWN: 0.05, Outcome.LOST_UNKNOWN: 0.05}
IDS, WORDS = st.one_of(st.none(), st.integers(0, 5)), st.sampled_from([None, "", "a", "b"])
UPSERTS = st.dictionaries(IDS, WORDS, max_size=5)
KEYS = st.lists(IDS, max_size=5)
CHANGES = st.lists(st.tuples(IDS, WORDS, st.integers(0, 3), st.sampled_from([1, 1, -1, 2])), max_size=6)
ACTS = st.one_of(
    st.none(), st.tuples(st.just("upsert"), UPSERTS), st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("append"), CHANGES), st.tuples(st.just("advance"), st.none()),
)  # fmt: skip
SKEWS = (0.0, -2.5, 40.0)
"""By how many seconds the clocks of the clients are off."""
Row = tuple[Any, Any]
Change = tuple[Any, Any, int, int]
"""Id, word, how far after lower, diff."""


def broken_by(call: Callable[[], object]) -> persist.ConstraintViolated | None:
    """The constraint that a call was refused for; None if it was not."""
    try:
        call()
    except persist.ConstraintViolated as error:
        return error
    return None


class VerbsMachine(RuleBasedStateMachine):
    """Three clients of one shard: one that is raced, one whose location fails now and then, and the rival."""

    url = "memory:"
    world_kind = World

    @initialize(
        config=st.sampled_from(CONFIGS), seed=st.integers(0, 1000), unique=st.booleans(), non_negative=st.booleans(),
        times=st.sampled_from([None, "ms", "us"]),
    )  # fmt: skip
    def begin(self, config: persist.Config, seed: int, unique: bool, non_negative: bool, times: Unit | None) -> None:
        self.world, self.config = self.world_kind(self.url, seed), config
        self.schema = persist.Schema(
            {"id": "int64"}, {"word": "string"}, times=times, unique=unique, non_negative=non_negative
        )
        self.faults = Chances(seed, FAULTS)
        self.faults.stop()
        self.rival = Rival(self.world.inner.consensus)
        self.clients = [
            self.world.client(config, rival=self.rival), self.world.client(config, plan=self.faults),
            self.world.client(config),
        ]  # fmt: skip
        for client, skew in zip(self.clients, SKEWS, strict=True):
            skewed = partial(lambda clock, ms: clock() + ms, client.runtime.clock_ms, round(skew * 1_000))
            client.runtime = dataclasses.replace(client.runtime, clock_ms=skewed)
        self.writers = [client.open_writer("s", self.schema) for client in self.clients]
        self.checker = self.world.client()
        self.now: Counter[Row] = Counter()
        self.upper = 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()

    def next_upper(self) -> int:
        """Upper after a call that takes the next time: one more, or of a clock whatever it was when the call asked."""
        if self.schema.times is None:
            return self.upper + 1
        found = self.checker.inspect("s").state.upper.time
        per_ns = PER_SECOND[self.schema.times] / 10**9
        assert found is not None
        assert found > self.upper, "times never go back"
        assert found == self.upper + 1 or found - 1 <= max(self.clocks()) * per_ns, "no clock was there yet"
        return found

    def clocks(self) -> list[int]:
        return [self.world.clock() + round(skew * 10**9) for skew in SKEWS]

    # --- what calls do, by definition -------------------------------------------------------------------------------

    def upserted(self, rows: dict[Any, Any]) -> persist.Changed:
        inserted = updated = unchanged = 0
        for key, word in rows.items():
            had = {row: n for row, n in self.now.items() if row[0] == key and n}
            inserted += not had
            unchanged += had == {(key, word): 1}
            updated += bool(had) and had != {(key, word): 1}
            for row in had:
                del self.now[row]
            self.now[key, word] = 1
        self.upper = self.next_upper() if inserted + updated else self.upper
        return persist.Changed(
            SeqNo(0), persist.at(self.upper), 0, b"", 0, inserted=inserted, updated=updated, unchanged=unchanged
        )

    def deleted(self, keys: Sequence[Any]) -> persist.Changed:
        gone = [row for row, n in self.now.items() if row[0] in keys and n]
        deleted = len({row[0] for row in gone})
        for row in gone:
            del self.now[row]
        self.upper = self.next_upper() if deleted else self.upper
        return persist.Changed(
            SeqNo(0), persist.at(self.upper), 0, b"", 0, deleted=deleted, unchanged=len(set(keys)) - deleted
        )

    def appended(self, changes: Sequence[Change], step: int, upper: Callable[[], int] | None = None) -> str | None:
        """Add the changes, if that breaks no constraint at any of their times; otherwise the first that breaks."""
        now = Counter(self.now)
        for time in range(step):
            for key, word, after, diff in changes:
                if min(after, step - 1) == time:
                    now[key, word] += diff
            live = [row for row, n in now.items() if n]
            if self.schema.non_negative and any(n < 0 for n in now.values()):
                return "non_negative"
            each_once = all(now[row] == 1 for row in live) and len({row[0] for row in live}) == len(live)
            if self.schema.unique and not each_once:
                return "unique"
        self.now = Counter({row: n for row, n in now.items() if n})
        self.upper = self.upper + step if upper is None else upper()
        return None

    def appended_now(self, changes: Sequence[Change]) -> str | None:
        return self.appended(changes, 1, self.next_upper) if changes else None

    # --- calls -------------------------------------------------------------------------------------------------------

    @rule(who=st.integers(0, 2), rows=UPSERTS, act=ACTS)
    def upsert(self, who: int, rows: dict[Any, Any], act: Any) -> None:
        given = [{"id": key, "word": word} for key, word in rows.items()]
        done = self.call(who, act, lambda token: self.writers[who].upsert(given, token=token))
        self.compare(done, self.upserted(rows))

    @rule(who=st.integers(0, 2), keys=KEYS, act=ACTS)
    def delete(self, who: int, keys: list[Any], act: Any) -> None:
        done = self.call(who, act, lambda token: self.writers[who].delete(keys, token=token))
        self.compare(done, self.deleted(keys))

    @rule(who=st.integers(0, 2), changes=CHANGES, act=ACTS)
    def append_now(self, who: int, changes: list[Change], act: Any) -> None:
        rows = [{"id": key, "word": word, "_diff": diff} for key, word, _, diff in changes]

        def call(token: bytes | None) -> Any:
            return self.writers[who].append_now(rows, token=token)

        broken = broken_by(lambda: self.call(who, act, call))
        assert self.appended_now(changes) == (broken and broken.constraint)

    @rule(
        who=st.sampled_from([0, 2]), changes=CHANGES, step=st.integers(1, 4), back=st.integers(0, 2), data=st.booleans()
    )
    def append(self, who: int, changes: list[Change], step: int, back: int, data: bool) -> None:
        """By compare_and_append, or by `append` with times that the shard has already."""
        lower, write = self.upper, self.writers[who]
        rows = [
            {"id": key, "word": word, "_time": lower + min(after, step - 1), "_diff": diff}
            for key, word, after, diff in changes
        ]
        try:
            if data:
                broken = broken_by(lambda: write.append(rows, max(0, lower - back), lower + step))
            else:
                broken = broken_by(lambda: write.compare_and_append(rows, lower, lower + step))
        except LeaseExpired:
            return
        assert (self.appended(changes, step) is None) == (broken is None)
        if broken is not None:
            assert broken.rows
            assert lower <= broken.time < lower + step

    @rule(twice=st.sampled_from([1, 5]), words=st.permutations(["a", "b", None]))
    def upsert_two_rows_of_one_key(self, twice: int, words: list[Any]) -> None:
        rows = [{"id": twice, "word": word} for word in words[:2]]
        with pytest.raises(persist.InvalidUsage) as told:
            self.writers[0].upsert([*rows, {"id": 3, "word": "a"}])
        assert told.value.keys == [{"id": twice}]

    def call(self, who: int, act: Any, verb: Callable[[bytes | None], Any]) -> Any:
        """Make a call as a user does; a rival acts before its first commit, or before it if it commits nothing."""
        acted: list[bool] = []

        def rival() -> None:
            acted.append(True)
            self.act(act)

        if who == 0 and act is not None:
            self.rival.before_next(rival)
        elif act is not None:
            self.act(act)
        if who == 1:
            self.faults.go_on()
        token: bytes | None = None
        try:
            for attempt in range(60):
                if attempt == 10:
                    self.faults.stop()
                try:
                    return verb(token)
                except Indeterminate as error:
                    token = error.fields.get("token")  # type: ignore[assignment]
                except (Determinate, LeaseExpired):
                    continue
            raise AssertionError("did not succeed without faults")
        finally:
            self.faults.stop()
            self.rival._acts.clear()

    def act(self, act: tuple[str, Any]) -> None:
        what, given = act
        write = self.writers[2]
        for _ in range(3):
            try:
                if what == "upsert":
                    self.compare(write.upsert([{"id": k, "word": w} for k, w in given.items()]), self.upserted(given))
                elif what == "delete":
                    self.compare(write.delete(given), self.deleted(given))
                elif what == "advance":
                    write.advance_upper(self.upper + 2)
                    self.upper += 2
                else:
                    rows = [{"id": key, "word": word, "_diff": diff} for key, word, _, diff in given]
                    write.append_now(rows)
                    assert self.appended_now(given) is None
            except LeaseExpired:
                continue
            except persist.ConstraintViolated:
                assert self.appended(given, 1) is not None
            return

    def compare(self, done: Any, expected: persist.Changed) -> None:
        counts = ("inserted", "updated", "unchanged", "deleted")
        found = [getattr(done, name) for name in counts]
        if done.attempts == 0 and done.token:  # an earlier call did it, whose counts are not known
            return
        assert found == [getattr(expected, name) for name in counts]
        assert done.upper == persist.at(self.upper)

    # --- what else happens ------------------------------------------------------------------------------------------

    @rule(who=st.integers(0, 2))
    def maintain(self, who: int) -> None:
        self.clients[who].maintain("s")

    @rule(distance=st.sampled_from([0, 1, 5, None]))
    def set_retention(self, distance: int | None) -> None:
        self.checker.set_retention("s", distance)

    @rule(ms=st.sampled_from([1_000, 30_000, -5_000]))
    def time_passes(self, ms: int) -> None:
        self.world.clock.advance(ms / 1000)

    @rule(who=st.integers(0, 2))
    def reopen(self, who: int) -> None:
        self.writers[who].close()
        self.writers[who] = self.clients[who].open_writer("s", self.schema)

    @rule(keys=st.lists(IDS, max_size=4), n=st.integers(1, 3), columns=st.sampled_from([None, ["id"], ["id", "word"]]))
    def look_up(self, keys: list[Any], n: int, columns: list[str] | None) -> None:
        if not self.upper:
            return
        with self.checker.open_reader("s") as read, read.snapshot(keys=keys, columns=columns, diff=True) as snapshot:
            whole = snapshot.to_arrow()
            expected = Counter({row: count for row, count in self.now.items() if row[0] in keys and count})
            if columns == ["id"]:
                found: Counter[Any] = Counter()
                for row in whole.to_pylist():
                    found[row["id"]] += row["_diff"]
                by_key: Counter[Any] = Counter()
                for (key, _), count in expected.items():
                    by_key[key] += count
                assert {k: c for k, c in found.items() if c} == {k: c for k, c in by_key.items() if c}
                return
            assert contents_of(whole) == expected
            total: Counter[Any] = Counter()
            for split in snapshot.splits(n):
                total.update(contents_of(split.to_arrow(self.world.inner.blob)))
            assert total == expected
            streamed = [contents_of(table) for table in snapshot.batches()]
            assert sum(streamed, Counter()) == Counter({row: n for row, n in expected.items() if n > 0})

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "world"):
            return
        state = check_world(self.checker, "s").state
        assert state.upper == persist.at(self.upper)
        if self.upper and state.since <= persist.at(self.upper - 1):
            with self.checker.open_reader("s") as read:
                assert contents_of(read.snapshot(diff=True).to_arrow()) == Counter(
                    {r: n for r, n in self.now.items() if n}
                )


class FileVerbsMachine(OnFiles, VerbsMachine):
    """The same on files and SQLite."""


EXAMPLES = int(os.environ.get("PERSIST_MODEL_EXAMPLES", "25"))
TestInMemory = VerbsMachine.TestCase
TestInMemory.settings = settings(max_examples=EXAMPLES, stateful_step_count=30)
TestOnFiles = FileVerbsMachine.TestCase
TestOnFiles.settings = settings(max_examples=max(4, EXAMPLES // 10), stateful_step_count=20)
