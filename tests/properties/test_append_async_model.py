"""Appends that wait, appends that do not, a rival and faults, at random: what futures say is what there is."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, NotSent, PersistError, UpperMismatch
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Chances, Fate, Model, Outcome, check_swept, check_world, contents_of
from tests.worlds import SCHEMA, Storm, World, row, updates

CONFIGS = [
    persist.Config(lease_ms=20_000, timeout_s=2, rollup_every=9),
    persist.Config(lease_ms=20_000, timeout_s=2, rollup_every=9, inline_bytes=0, part_bytes=64 * 1024),
    persist.Config(lease_ms=20_000, timeout_s=2, buffer_bytes=64 * 1024),
]
BATCHINGS = [None, persist.Batching(bytes=10**6, age_s=1.0), persist.Batching(bytes=200, age_s=0.5)]
FAULTS = [
    {Outcome.REFUSED: 0.08, Outcome.HAPPENED_UNKNOWN: 0.08, Outcome.LOST_UNKNOWN: 0.08},
    {Outcome.HAPPENED_UNKNOWN: 0.2, Outcome.LOST_UNKNOWN: 0.79},
]
"""Now and then, and hardly anything gets through: then appends end in doubt."""
NOT_THERE = (NotSent, UpperMismatch, Determinate, LeaseExpired)


class Weather:
    """Faults at random, and storms in which no compare-and-set gets an answer."""

    def __init__(self, chances: Chances) -> None:
        self.chances, self.storm = chances, Storm(Outcome.DONE)

    def decide(self, operation: Operation) -> Fate:
        return self.storm.decide(operation) if self.storm.blows else self.chances.decide(operation)


class Asked:
    """One append that was asked for: how it ended, and the token by which its outcome can be asked for again.

    `after`: the one before it, if it was not known yet what became of that.
    """

    def __init__(self, rows: list[dict[str, Any]], lower: int, upper: int) -> None:
        self.rows, self.lower, self.upper = rows, lower, upper
        self.future: Any = None
        self.outcome: persist.Appended | Exception | None = None
        self.token: bytes | None = None
        self.after: Asked | None = None

    def settle(self, outcome: Any) -> None:
        self.outcome = outcome
        if isinstance(outcome, Indeterminate):
            self.token = outcome.token

    def look(self) -> None:
        """Take over what the future says by now."""
        if self.outcome is None and self.future is not None and self.future.done():
            self.settle(NotSent("cancelled") if self.future.cancelled() else self.future.exception())
            if self.outcome is None:
                self.settle(self.future.result())


class AppendsMachine(RuleBasedStateMachine):
    """A handle on a location that fails now and then, and a rival on one that does not."""

    world_kind = World

    @initialize(
        config=st.sampled_from(CONFIGS), batching=st.sampled_from(BATCHINGS), seed=st.integers(0, 1000),
        faults=st.sampled_from(FAULTS),
    )  # fmt: skip
    def begin(
        self, config: persist.Config, batching: persist.Batching | None, seed: int, faults: dict[Outcome, float]
    ) -> None:
        self.world = self.world_kind("memory:", seed)
        self.faults = Chances(seed, faults)
        self.faults.stop()
        self.weather = Weather(self.faults)
        self.write = self.world.client(config, plan=self.weather).open_writer("s", SCHEMA, batching=batching)
        self.witness = self.world.client()
        self.rival = self.witness.open_writer("s", SCHEMA)
        self.asked: list[Asked] = []
        self.rivals: list[Asked] = []
        self.next = self.told = 0

    @property
    def upper(self) -> int:
        return self.witness.inspect("s").state.upper.time or 0

    def ask(self, count: int, step: int, lower: int) -> Asked:
        number = len(self.asked) + len(self.rivals)
        rows = [row(number * 100 + i // 2, "w", lower + i % step) for i in range(count)]
        return Asked(rows, lower, lower + step)

    @rule(
        count=st.integers(0, 5), step=st.integers(1, 3), token=st.sampled_from([False, False, False, True]),
        where=st.sampled_from(["next"] * 5 + ["upper"]), block=st.booleans(), big=st.booleans(),
        timeout=st.sampled_from([None, None, 0.5]),
    )  # fmt: skip
    def append_async(
        self, count: int, step: int, *, token: bool, where: str, block: bool, big: bool, timeout: float | None
    ) -> None:
        """Usually where the one before ends, whatever became of that: what a producer does that does not wait."""
        asked = self.ask(count, step, self.next if where == "next" else self.upper)
        if big:
            asked.rows = [one | {"word": "x" * 30_000} for one in asked.rows]
        own = len(self.asked).to_bytes(16, "big") if token else None
        try:
            asked.future = self.write.append_async(
                asked.rows, asked.lower, asked.upper, token=own, block=block, timeout=timeout
            )
        except NOT_THERE:
            self.is_told()
            return
        self.follows(asked)
        self.asked.append(asked)
        self.next = asked.upper

    def is_told(self) -> None:
        """It knows that something failed, and takes up from what there is."""
        self.next, self.told = self.upper, len(self.asked)

    def follows(self, asked: Asked) -> None:
        before = self.asked[-1] if len(self.asked) > self.told else None
        if before is not None and before.outcome is None and before.upper == asked.lower:
            asked.after = before

    @rule(counts=st.lists(st.integers(0, 3), min_size=2, max_size=8))
    def append_several_async(self, counts: list[int]) -> None:
        for count in counts:
            self.append_async(count, 1, token=count == 3, where="next", block=True, big=False, timeout=None)

    @rule(counts=st.lists(st.integers(0, 2), min_size=2, max_size=8), first=st.sampled_from(Outcome))
    def append_several_async_in_a_storm(self, counts: list[int], first: Outcome) -> None:
        with suppress(PersistError):
            self.write.flush()
            assert self.write.id
        self.is_told()
        storm = self.weather.storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan", first=first)
        self.append_several_async(counts)
        storm.blows = True
        self.flush()
        storm.blows = False
        for asked in self.asked:
            asked.look()
        self.decide()
        self.is_told()

    @rule(
        counts=st.lists(st.integers(0, 2), min_size=2, max_size=6), which=st.integers(0, 5), tokens=st.booleans(),
        gap=st.sampled_from([0, 0, 2]),
    )  # fmt: skip
    def append_several_async_against_a_rival(self, counts: list[int], which: int, tokens: bool, gap: int) -> None:
        """The rival goes exactly as far as one of them, so that what comes behind a lost race would fit."""
        self.flush()
        self.is_told()
        upper = self.upper
        for index, count in enumerate(counts):
            self.append_async(count, 1, token=tokens, where="next", block=True, big=False, timeout=None)
            self.next += gap if index == which else 0
        if which < len(counts) and self.upper == upper:
            self.a_rival_appends(1, which + 1)
        self.append_async(1, 1, token=False, where="next", block=True, big=False, timeout=None)
        self.flush()
        self.append_async(1, 1, token=False, where="next", block=True, big=False, timeout=None)

    @rule(count=st.integers(0, 3), verb=st.sampled_from(["compare_and_append", "append"]))
    def append(self, count: int, verb: str) -> None:
        asked, before = self.ask(count, 1, self.next), self.upper
        self.follows(asked)
        try:
            asked.settle(getattr(self.write, verb)(asked.rows, asked.lower, asked.upper))
            self.next = asked.upper
        except PersistError as error:
            asked.settle(error)
            self.is_told()
        if verb == "append" and isinstance(asked.outcome, persist.Appended) and before >= asked.upper:
            return  # somebody else's was there
        self.asked.append(asked)

    @rule()
    def flush(self) -> None:
        try:
            self.write.flush()
        except PersistError:
            self.is_told()
        assert all(asked.outcome is not None or asked.future.done() for asked in self.asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.asked)).look()
        if any(isinstance(asked.outcome, Exception) for asked in self.asked[self.told :]):
            self.is_told()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked[-4:]))
        if asked.future is not None:
            asked.future.cancel()

    @rule(count=st.integers(0, 3), step=st.integers(1, 3))
    def a_rival_appends(self, count: int, step: int) -> None:
        asked = self.ask(count, step, self.upper)
        with suppress(LeaseExpired):  # it registers again for the next one
            asked.settle(self.rival.compare_and_append(asked.rows, asked.lower, asked.upper))
            self.rivals.append(asked)

    @rule(seconds=st.sampled_from([0.1, 0.6, 5]), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> None:
        self.world.clock.advance(seconds)
        if beating:
            self.witness.heartbeat()

    @rule()
    def the_writer_expires(self) -> None:
        self.world.clock.advance(30)
        self.witness.expire("s")

    @rule(blow=st.booleans())
    def faults_begin_or_stop(self, blow: bool) -> None:
        self.faults.go_on() if blow else self.faults.stop()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "world"):
            check_world(self.witness, "s")

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.faults.stop()
            with suppress(PersistError):
                self.write.flush()
            for asked in self.asked:
                asked.look()
            self.decide()
            self.judge()
            self.sweep()
        finally:
            self.faults.stop()
            self.world.close()

    def decide(self) -> None:
        """What is in doubt is asked for by its token, which a writer under a new id does not know any more."""
        for asked in self.asked:
            if isinstance(asked.outcome, Indeterminate) and self.write.id in self.witness.inspect("s").state.writers:
                with suppress(PersistError):
                    asked.settle(self.write.compare_and_append(asked.rows, asked.lower, asked.upper, token=asked.token))

    def judge(self) -> None:
        upper = self.upper
        if not upper:
            return
        with self.witness.open_reader("s") as read:
            found = contents_of(read.snapshot(upper - 1, diff=True).to_arrow())
        there: list[Asked] = []
        for asked in (*self.asked, *self.rivals):
            model = Model()
            model.append(updates(asked.rows), persist.at(0), persist.at(0))
            own = model.contents(upper)
            present = {data: found[data] for data in own if data in found}
            if isinstance(asked.outcome, persist.Appended):
                assert present == own, f"{asked.lower}..{asked.upper} was acknowledged"
            elif isinstance(asked.outcome, NOT_THERE):
                assert not present, f"{asked.lower}..{asked.upper} failed with {asked.outcome!r} and is there"
            else:
                assert isinstance(asked.outcome, Indeterminate)
                assert present in ({}, own), f"{asked.lower}..{asked.upper} is there in part"
            there += [asked] if present or isinstance(asked.outcome, persist.Appended) else []
            is_there = present or isinstance(asked.outcome, persist.Appended)
            assert not (is_there and asked.after and isinstance(asked.after.outcome, NOT_THERE)), "across a gap"
            for data in own:
                found.pop(data, None)
        assert not found, "nobody asked for it"
        spans = sorted((asked.lower, asked.upper) for asked in there)
        assert all(left[1] <= right[0] for left, right in pairwise(spans)), "they overlap"
        if not any(isinstance(asked.outcome, Indeterminate) for asked in self.asked):
            assert all(left[1] == right[0] for left, right in pairwise([(0, 0), *spans, (upper, upper)])), "a gap"
        seqnos = [asked.outcome.seqno for asked in self.asked if isinstance(asked.outcome, persist.Appended)]
        lowers = [asked.lower for asked in self.asked if isinstance(asked.outcome, persist.Appended)]
        assert seqnos == sorted(seqnos), "in the order in which they were asked for"
        assert lowers == sorted(lowers)

    def sweep(self) -> None:
        """Nobody's uploads stay behind."""
        self.world.clock.advance(1000)
        for _ in range(4):
            self.world.client().maintain("s")
        check_swept(self.witness, "s")


EXAMPLES = int(os.environ.get("PERSIST_MODEL_EXAMPLES", "40"))
TestAppends = AppendsMachine.TestCase
TestAppends.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
