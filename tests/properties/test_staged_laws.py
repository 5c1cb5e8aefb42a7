"""Laws of staged writes: cut into tasks, tried again, raced against, they are what one call would have done."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.kernel.merge import pairs
from persist_lib.kernel.order import sort_updates
from persist_lib.relation.differences import DELETE
from persist_lib.relation.stage import Staged
from tests.worlds import World

KEYED = persist.Schema(key={"k": "int8"}, value={"v": "string"})
UNIQUE = persist.Schema(key={"k": "int8"}, value={"v": "string"}, unique=True)
I64_MAX = 2**63 - 1
Row = tuple[int | None, str | None]

data = st.tuples(st.one_of(st.none(), st.integers(0, 5)), st.sampled_from(["a", "b", "a\0", None]))
diffs = st.one_of(st.integers(-3, 3).filter(bool), st.sampled_from([I64_MAX, -I64_MAX, 2**62]))
tables = st.lists(st.tuples(data, diffs), max_size=30)
# No inline answers, a few rows inline, or all of them; parts of a few rows, or one part a task.
configs = st.builds(
    lambda inline, part: persist.Config(inline_bytes=inline).model_copy(update={"part_bytes": part}),
    st.sampled_from([0, 1024, 16_384]), st.sampled_from([60, 300, 1 << 20]),
)  # fmt: skip


def rows(updates: list[tuple[Row, int]]) -> list[dict[str, Any]]:
    return [{"k": k, "v": v, "_diff": diff} for (k, v), diff in updates]


def cut(given_: list[Any], at: list[int]) -> list[list[Any]]:
    places = sorted(min(place, len(given_)) for place in at)
    return [given_[a:b] for a, b in zip([0, *places], [*places, len(given_)], strict=True)]


def sent(staged: Staged) -> Staged:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(pickle.loads(pickle.dumps(staged))), type=Staged)


def in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Have nothing be small, so that differences are made piece by piece."""
    patch.setattr("persist_lib.relation.differences.SMALL_BYTES", -1)
    patch.setattr("persist_lib.relation.differences.MOST_RUNS", 2)
    patch.setattr("persist_lib.kernel.merge.PAIR_BYTES", 1)


def contents(client: persist.Client, shard: str = "s") -> Counter[Row]:
    with client.open_reader(shard) as read:
        if read.fetch_upper() == persist.at(0):
            return Counter()
        found = read.snapshot(diff=True).to_arrow().to_pylist()
    counted: Counter[Row] = Counter()
    for row in found:
        counted[row["k"], row["v"]] += row["_diff"]
    return counted


def summed(updates: list[tuple[Row, int]]) -> Counter[Row]:
    total: Counter[Row] = Counter()
    for row, diff in updates:
        total[row] += diff
    return Counter({row: diff for row, diff in total.items() if diff})


@given(tables, st.lists(st.integers(0, 30), max_size=4), configs, st.lists(tables, max_size=2), st.booleans())
def test_a_staged_append_is_the_plain_append_of_all_rows(
    updates: list[tuple[Row, int]],
    at: list[int],
    config: persist.Config,
    rivals: list[list[tuple[Row, int]]],
    retried: bool,
) -> None:
    rivals = [[(row, max(-9, min(9, diff))) for row, diff in rival] for rival in rivals]
    with World().client(config) as client:
        write = client.open_writer("s", KEYED)
        with write.stage() as stage:
            if retried:
                stage.write(rows(updates))  # its answer is lost
            staged = [sent(stage.write(rows(task))) for task in cut(updates, at)]
            for rival in rivals:
                write.append_now(rows(rival))
            upper, total = write.fetch_upper(), summed(updates)
            if any(not -(2**63) <= diff <= I64_MAX for diff in total.values()):
                with pytest.raises(persist.DiffOverflow):
                    write.append_staged(staged)
                assert write.fetch_upper() == upper
                return
            answer = write.append_staged(staged, producer=("q", 3))
        both = summed([update for rival in rivals for update in rival] + updates)
        if all(-(2**63) <= diff <= I64_MAX for diff in both.values()):
            assert contents(client) == both
        if any(one.parts for one in staged):
            assert answer.upper == persist.at((upper.time or 0) + 1)
            batch = client.machine("s").state.trace[-1]
            assert (batch.lower, batch.upper) == (upper, answer.upper)
            assert {part.time_lower for part in batch.parts} == {upper.time}
            assert (batch.diff_sum - sum(diff for _, diff in updates)) % 2**64 == 0
        else:
            assert answer.upper == upper
        client.scrub("s")


ops = st.lists(st.tuples(data, st.booleans()), max_size=20)


def upserted(old: Counter[Row], changes: list[tuple[Row, bool]]) -> Counter[Row] | None:
    """The contents after these; None where they contradict each other."""
    new: dict[int | None, set[Row | None]] = {}
    for row, is_deleted in changes:
        new.setdefault(row[0], set()).add(None if is_deleted else row)
    if any(len(found) > 1 for found in new.values()):
        return None
    kept = {row: diff for row, diff in old.items() if row[0] not in new}
    return Counter({**kept, **{row: 1 for found in new.values() for row in found if row is not None}})


@given(tables, ops, st.lists(st.integers(0, 30), max_size=3), configs, st.booleans())
def test_a_staged_upsert_leaves_what_an_upsert_and_a_delete_leave(
    before: list[tuple[Row, int]],
    changes: list[tuple[Row, bool]],
    at: list[int],
    config: persist.Config,
    is_small: bool,
) -> None:
    before = [(row, max(-9, min(9, diff))) for row, diff in before]
    with pytest.MonkeyPatch.context() as patch, World().client(config) as client:
        if not is_small:
            in_pieces(patch)
        write = client.open_writer("s", KEYED)
        write.append_now(rows(before))
        old = summed(before)
        expected = upserted(old, changes)
        with write.stage() as stage:
            pieces = cut([(row, DELETE if is_deleted else 1) for row, is_deleted in changes], at)
            staged = [sent(stage.write(rows(task))) for task in pieces]
            if expected is None:
                with pytest.raises(persist.InvalidUsage, match="key"):
                    write.upsert_staged(staged)
                assert contents(client) == old
                return
            answer = write.upsert_staged(staged)
            assert contents(client) == expected
            assert (answer.attempts == 0) == (expected == old)
            keys = {row[0] for row, is_deleted in changes if not is_deleted}
            assert answer.inserted + answer.updated + answer.unchanged >= len(keys)
            again = [stage.write(rows(task)) for task in pieces]
            assert write.upsert_staged(again).count == 0
        assert not client.machine("s").fetch().state.readers


@given(tables, tables, st.lists(st.integers(0, 30), max_size=3), configs, st.booleans(), st.booleans())
def test_a_staged_overwrite_leaves_what_was_staged(
    before: list[tuple[Row, int]],
    after: list[tuple[Row, int]],
    at: list[int],
    config: persist.Config,
    are_same: bool,
    is_small: bool,
) -> None:
    before = [(row, max(-9, min(9, diff))) for row, diff in before]
    after = before if are_same else [(row, max(-9, min(9, diff))) for row, diff in after]
    with pytest.MonkeyPatch.context() as patch, World().client(config) as client:
        if not is_small:
            in_pieces(patch)
        write = client.open_writer("s", KEYED)
        write.append_now(rows(before))
        upper = write.fetch_upper()
        with write.stage() as stage:
            answer = write.overwrite_staged([stage.write(rows(task)) for task in cut(after, at)])
        assert contents(client) == summed(after)
        is_changed = summed(before) != summed(after)
        assert (answer.upper != upper) == is_changed
        client.scrub("s")


@given(ops, ops, st.lists(st.integers(0, 30), max_size=3), st.booleans())
def test_constraints_hold_after_a_staged_append_or_nothing_was_written(
    before: list[tuple[Row, bool]], after: list[tuple[Row, bool]], at: list[int], is_small: bool
) -> None:
    first = [(row, 1) for row in {row[0]: row for row, _ in before}.values()]
    updates = [(row, -1 if is_retracted else 1) for row, is_retracted in after]
    with pytest.MonkeyPatch.context() as patch, World().client() as client:
        if not is_small:
            in_pieces(patch)
        write = client.open_writer("s", UNIQUE)
        write.append_now(rows(first))
        expected = summed(first + updates)
        keys = Counter(row[0] for row in expected)
        holds = all(diff == 1 for diff in expected.values()) and all(count == 1 for count in keys.values())
        with write.stage() as stage:
            staged = [stage.write(rows(task)) for task in cut(updates, at)]
            if holds:
                write.append_staged(staged)
                assert contents(client) == expected
            else:
                with pytest.raises(persist.ConstraintViolated):
                    write.append_staged(staged)
                assert contents(client) == summed(first)


@given(st.lists(data, max_size=30), st.lists(data, max_size=30), st.integers(1, 5), st.sampled_from([1, 50, 1 << 20]))
def test_pairs_hold_each_key_once_and_lose_no_row(left: list[Row], right: list[Row], piece: int, size: int) -> None:
    schema = KEYED.updates

    def table(some: list[Row]) -> pa.Table:
        made = pa.Table.from_pylist([{"k": k, "v": v, "_time": 0, "_diff": 1} for k, v in some], schema=schema)
        return sort_updates(KEYED, made) if made.num_rows else made

    def pieces(some: list[Row]) -> list[pa.Table]:
        made = table(some)
        return [made.slice(start, piece) for start in range(0, made.num_rows, piece)]

    found = list(pairs(iter(pieces(left)), iter(pieces(right)), ["k"], table([]), size))
    for side, given_ in enumerate((left, right)):
        assert [row for pair in found for row in pair[side].to_pylist()] == table(given_).to_pylist()
    keys = [{row["k"] for table_ in pair for row in table_.to_pylist()} for pair in found]
    assert all(keys)
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_an_overwrite_tells_a_float_from_the_one_that_compares_equal() -> None:
    floats = persist.Schema(key={"k": "int8"}, value={"v": "double"})
    with World().client() as client, client.open_writer("floats", floats) as write:
        write.append_now([{"k": 1, "v": 0.0}])
        with write.stage() as stage:
            assert write.overwrite_staged([stage.write([{"k": 1, "v": -0.0}])]).count == 2
