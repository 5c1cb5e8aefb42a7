"""Streams against a plain list: any calls, the writer killed at any request, or requests whose answer is lost.

After a kill the next runtime must find what was acknowledged, and of the calls that were not, a prefix: each whole, in
the order in which they were made. A reader that knows nothing of streams must find the sealed part as well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib import streams
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome
from persist_lib.testing.faults import Chances
from tests.streaming import SCHEMA, start, update
from tests.worlds import World

NAMES = ("a", "b")
STEP = 1 if os.environ.get("PERSIST_FAULTS") == "all" else 3
"""Of how many requests of a program one is chosen to kill it at."""
SMALL = persist.Config(timeout_s=5.0, inline_bytes=0)
INLINE = persist.Config(timeout_s=5.0)


class Op(NamedTuple):
    """What a program does. `rows` are (id, distance from the frontier, diff); `by` is a distance as well."""

    kind: str
    stream: str
    rows: tuple[tuple[int, int, int], ...] = ()
    by: int = 0


rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.sampled_from([1, 1, 2, -1])), min_size=0, max_size=4
).map(tuple)
names = st.sampled_from(NAMES)
writes = st.builds(Op, st.just("write"), names, rows)
seals = st.builds(Op, st.just("seal"), names, by=st.integers(0, 6))
sinces = st.builds(Op, st.just("since"), names, by=st.integers(1, 6))
several = st.lists(st.one_of(writes, seals), min_size=2, max_size=5).map(tuple)
calls = st.one_of(st.tuples(writes), st.tuples(seals), st.tuples(sinces), several)
programs = st.lists(calls, min_size=1, max_size=12)


class Plain:
    """The streams as plain lists."""

    def __init__(self) -> None:
        self.updates: dict[str, tuple[tuple[int, int, int], ...]] = dict.fromkeys(NAMES, ())
        self.upper = dict.fromkeys(NAMES, 0)
        self.since = dict.fromkeys(NAMES, 0)

    def copy(self) -> Plain:
        other = Plain()
        other.updates, other.upper, other.since = dict(self.updates), dict(self.upper), dict(self.since)
        return other

    def parts(self, call: Sequence[Op], writers: dict[str, streams.StreamWriter]) -> list[Any]:
        """The parts of a call, which is carried out here as well."""
        found: list[Any] = []
        for op in call:
            writer, name = writers[op.stream], op.stream
            if op.kind == "write":
                new = tuple((id_, self.upper[name] + far, diff) for id_, far, diff in op.rows)
                self.updates[name] += new
                found.append(streams.Write(writer, [update(id_, time, diff=diff) for id_, time, diff in new]))
            elif op.kind == "seal":
                self.upper[name] += op.by
                found.append(streams.Seal(writer, self.upper[name]))
            else:
                since = max(0, self.upper[name] - op.by)
                if since < self.upper[name]:
                    self.since[name] = max(self.since[name], since)
                    found.append(streams.AllowCompaction(writer, since))
        return found

    def contents(self, name: str, as_of: int) -> Counter[int]:
        bag: Counter[int] = Counter()
        for id_, time, diff in self.updates[name]:
            bag[id_] += diff if time <= as_of else 0
        return Counter({id_: count for id_, count in bag.items() if count})

    def unsealed(self, name: str) -> Counter[tuple[int, int]]:
        bag: Counter[tuple[int, int]] = Counter()
        for id_, time, diff in self.updates[name]:
            bag[id_, time] += diff if time >= self.upper[name] else 0
        return Counter({key: count for key, count in bag.items() if count})


class Killed(BaseException):
    """The process is gone."""


class Kill:
    """A plan by which the process is killed at its request number `at`; `after` that has happened."""

    def __init__(self, at: int, *, after: bool) -> None:
        self._left, self._after = at, after

    def decide(self, operation: Operation) -> Fate:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            raise Killed
        return Fate(Outcome.HAPPENED_UNKNOWN if self._left == 0 else Outcome.DONE)


def net(found: Iterable[tuple[Any, int]]) -> Counter[Any]:
    bag: Counter[Any] = Counter()
    for key, diff in found:
        bag[key] += diff
    return Counter({key: count for key, count in bag.items() if count})


def unsealed_of(found: streams.Contents) -> Counter[tuple[int, int]]:
    return net(((row["id"], row["_time"]), row["_diff"]) for row in found.unsealed.to_pylist())


class Found(NamedTuple):
    """What is there of one stream."""

    upper: int
    since: int
    unsealed: Counter[tuple[int, int]]
    contents: dict[int, Counter[int]]


def look(world: World, runtime: streams.Streams, name: str) -> Found:
    write, read = runtime.create_or_load(name, SCHEMA)
    upper, since = write.upper.time, write.since.time
    assert upper is not None
    assert since is not None
    with read.contents() as found:
        assert found.upper == write.upper
        unsealed = unsealed_of(found)
    with read.contents(ahead="accepted") as known:  # what this process has in memory is what is durable
        assert unsealed_of(known) == unsealed
    contents = {}
    if upper:
        stranger = world.client(read_only=True)
        with stranger.open_reader(read.record.sealed) as shard:
            assert shard.fetch_upper() == write.upper
            for as_of in {since, (since + upper) // 2, upper - 1}:
                with shard.snapshot(as_of, diff=True) as snapshot:
                    contents[as_of] = net((row["id"], row["_diff"]) for row in snapshot.to_pylist())
        stranger.close()
    return Found(upper, since, unsealed, contents)


def is_like(found: dict[str, Found], plain: Plain) -> bool:
    return all(
        (one.upper, one.since, one.unsealed) == (plain.upper[name], plain.since[name], plain.unsealed(name))
        and all(bag == plain.contents(name, as_of) for as_of, bag in one.contents.items())
        for name, one in found.items()
    )


class Program:
    """A program that is started again whenever it was killed, and continues with the first call that is not there."""

    def __init__(self, config: persist.Config, world: World | None = None) -> None:
        self.world, self.config = world or World(), config
        self.states = [Plain()]
        self.done = 0

    def run(self, program: Sequence[Sequence[Op]], plan: Any) -> None:
        """Make the calls that are left, until the plan kills it."""
        try:
            runtime = start(self.world, self.config, plan=plan, reentrance_id="same")
            writers = {name: runtime.create_or_load(name, SCHEMA)[0] for name in NAMES}
            for number in range(self.done, len(program)):
                after = self.states[number].copy()
                parts = after.parts(program[number], writers)
                del self.states[number + 1 :]
                self.states.append(after)
                runtime.multi_write(parts).result()
                self.done = number + 1
            runtime.stop()
        except Killed:
            self.world.clients.pop()  # it is never closed

    def check(self) -> None:
        """The next runtime finds all that is acknowledged, and perhaps the call that was under way, whole."""
        runtime = start(self.world, self.config, reentrance_id="same")
        found = {name: look(self.world, runtime, name) for name in NAMES}
        (self.done, *_) = [n for n in range(self.done, len(self.states)) if is_like(found, self.states[n])]
        runtime.stop()


@settings(max_examples=40)
@given(
    program=programs, kills=st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=4), inline=st.booleans()
)
def test_a_writer_that_is_killed_at_any_request_loses_and_invents_nothing(
    program: list[tuple[Op, ...]], kills: list[tuple[int, bool]], inline: bool
) -> None:
    run = Program(INLINE if inline else SMALL)
    try:
        for at, after in kills:
            run.run(program, Kill(at, after=after))
            run.check()
        run.run(program, None)
        assert run.done == len(program)
        run.check()
    finally:
        run.world.close()


def test_a_writer_is_killed_at_each_request_of_one_program() -> None:
    program = [
        (Op("write", "a", ((1, 0, 1), (2, 7, 1), (3, 3, 1))),),
        (Op("seal", "a", by=3), Op("write", "b", ((1, 1, 2),)), Op("seal", "b", by=2)),
        (Op("since", "a", by=1),),
        (Op("write", "a", ((1, 1, -1),)), Op("seal", "a", by=6)),
    ]
    for after in (False, True):
        for at in range(1 + after, 1000, STEP):
            run = Program(SMALL)
            try:
                run.run(program, Kill(at, after=after))
                was_killed = run.done < len(program)
                run.check()
                run.run(program, None)
                run.check()
                assert run.done == len(program)
            finally:
                run.world.close()
            if not was_killed:
                break
        assert at > 30


@settings(max_examples=25)
@given(program=programs, seed=st.integers(0, 1 << 20))
def test_lost_answers_neither_lose_nor_repeat_a_call(program: list[tuple[Op, ...]], seed: int) -> None:
    chances = {Outcome.HAPPENED_UNKNOWN: 0.15, Outcome.LOST_UNKNOWN: 0.15, Outcome.REFUSED: 0.05}
    run = Program(INLINE)
    try:
        plan = Chances(seed, chances, delay_s=0.01)
        plan.stop()
        runtime = start(run.world, run.config, plan=plan, reentrance_id="same")
        writers = {name: runtime.create_or_load(name, SCHEMA)[0] for name in NAMES}
        plan.go_on()
        plain = Plain()
        for call in program:
            after = plain.copy()
            try:
                runtime.multi_write(after.parts(call, writers)).result()
            except persist.Determinate:
                continue
            plain = after
        plan.stop()
        runtime.stop()
        run.states, run.done = [plain], 0
        run.check()
    finally:
        run.world.close()
