"""A live client that follows the log refuses whatever a fresh one that loads it refuses, and the other way round."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.state import Garbage, Hold, Reader, State, Version, Writer
from persist_lib.core.validate import check_change, check_references, check_state
from persist_lib.errors import InvariantViolated, PersistError
from persist_lib.format.log import GENESIS, LogRow, StoredState, decode_row, encode_row, encode_state, row_digest
from persist_lib.frontier import MINIMUM, TOP, Antichain, at
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Row
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.shard.log import fetch_newer, fetch_newest
from tests.properties.histories import Shard, history

SHARD = ShardId("s")


class Mutator:
    """Changes one thing somewhere in a diff: what a bug, or another program, might have written with right sums."""

    def __init__(self, random: Random, state: State, seqno: SeqNo) -> None:
        self.random, self.state, self.seqno = random, state, seqno
        self.names: list[Any] = [part.key for batch in state.trace for part in batch.parts]
        self.names += [rollup.key for rollup in state.rollups.values()]
        self.names += [*state.garbage, *state.writers, *state.readers, *state.retired, "x", ""]

    def diff(self, diff: StateDiff) -> StateDiff:
        if self.random.random() < 0.3:
            return self.with_one_more(diff)
        said = [name for name in diff.__struct_fields__ if getattr(diff, name)]
        name = self.random.choice(said or ["retention"])
        return msgspec.structs.replace(diff, **{name: self.any(getattr(diff, name))})

    def with_one_more(self, diff: StateDiff) -> StateDiff:
        name, seqno = self.random.choice(self.names), SeqNo(self.seqno + self.random.choice([-3, 0, 1]))
        entries: dict[str, Any] = {
            "garbage": (name, self.state.garbage.get(name), Garbage(seqno, 1)),
            "retired": (name, self.state.retired.get(name), seqno),
            "writers": (name, self.state.writers.get(name), self.random.choice([None, Writer("ingest", 5)])),
            "readers": (name, self.state.readers.get(name), Reader(at(self.random.randrange(9)), seqno, 5)),
            "holds": ("h", self.state.holds.get("h"), Hold(at(self.random.randrange(9)))),
        }
        field = self.random.choice(sorted(entries))
        return msgspec.structs.replace(diff, **{field: (*getattr(diff, field), entries[field])})

    def any(self, value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.random.choice([value + 1, value - 1, 0, self.seqno + 5, 2**63])
        if isinstance(value, str):
            return self.random.choice(self.names)
        if isinstance(value, bytes):
            return value[:-1]
        if isinstance(value, Antichain):
            time = value.time or 0
            return self.random.choice([at(time + 1), at(max(0, time - 1)), MINIMUM, TOP])
        if isinstance(value, msgspec.Struct):
            name = self.random.choice(value.__struct_fields__)
            return msgspec.structs.replace(value, **{name: self.any(getattr(value, name))})
        if isinstance(value, tuple) and value:
            return self.one_of(value)
        return value

    def one_of(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        index = self.random.randrange(len(values))
        kind = self.random.random()
        if kind < 0.7:
            return (*values[:index], self.any(values[index]), *values[index + 1 :])
        if kind < 0.8:
            return values[:index] + values[index + 1 :]
        return (*values, values[index]) if kind < 0.9 else values[::-1]


def refuses(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except InvariantViolated:
        return True
    return False


def follow(old: State, diff: StateDiff, new: State, seqno: SeqNo) -> None:
    check_change(old, diff, new, seqno)
    check_references(new, [diff], seqno)


def mutated(shard: Shard, random: Random) -> tuple[SeqNo, State, StateDiff, State]:
    """One transition of the history, changed somewhere, and still one that applies."""
    for _ in range(60):
        step = random.randrange(len(shard.rows))
        old, seqno = shard.states[step], SeqNo(step + 1)
        try:
            changed = Mutator(random, old, seqno).diff(decode_row(shard.rows[step], "row").diff)
            row = encode_row(LogRow(seqno, b"t", "SetHold", 0, GENESIS, None, changed))
            diff = decode_row(row, "row").diff
            return seqno, old, diff, apply_diff(old, diff)
        except (PersistError, TypeError, AttributeError, ValueError):
            continue  # such a row does not apply, for anybody
    assume(False)
    raise AssertionError


@example(seed=228_723_422)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=120, suppress_health_check=[HealthCheck.filter_too_much])
def test_what_loading_refuses_of_a_changed_transition_following_refuses_too(seed: int) -> None:
    random = Random(seed)
    shard = history(seed % 50, 60, 0.95)
    for _ in range(10):
        seqno, old, diff, new = mutated(shard, random)
        if refuses(check_state, new, seqno):
            assert refuses(follow, old, diff, new, seqno), diff


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_live_client_and_a_fresh_one_agree_on_a_row_that_only_its_sums_speak_for(seed: int) -> None:
    shard = history(seed % 50, 40, 0.95)
    seqno, old, diff, _ = mutated(shard, Random(seed))
    rows = chained(shard, seqno - 1)
    consensus, blob = MemoryConsensus(), MemoryBlob()
    consensus._logs[SHARD] = rows
    known = fetch_newest(blob, consensus, SHARD) or Version(SeqNo(0), State(), GENESIS)
    assert encoded(known.state) == encoded(old)
    try:
        consensus._logs[SHARD] = [
            *rows,
            Row(seqno, encode_row(LogRow(seqno, b"t", "SetHold", 0, known.digest, None, diff))),
        ]
    except (msgspec.ValidationError, OverflowError, TypeError):
        assume(False)
    if not rows:
        return  # nobody has seen anything yet
    live, fresh = outcome(fetch_newer, blob, consensus, SHARD, known), outcome(fetch_newest, blob, consensus, SHARD)
    assert live == fresh


def chained(shard: Shard, length: int) -> list[Row]:
    """The first transitions of a history as rows that name each other."""
    rows: list[Row] = []
    for number, data in enumerate(shard.rows[:length], 1):
        previous = row_digest(rows[-1].data) if rows else GENESIS
        changed = msgspec.structs.replace(decode_row(data, "row"), previous=previous)
        rows.append(Row(SeqNo(number), encode_row(changed)))
    return rows


def encoded(state: State) -> bytes:
    return encode_state(StoredState(SeqNo(0), b"", state))


def outcome(fetch: Any, *arguments: Any) -> object:
    try:
        return encoded(fetch(*arguments).state)
    except PersistError as damage:
        return type(damage)
