"""Debezium's transactions beside a plain model: no time shows half of one, whatever comes when, and how often."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given, settings

import persist_lib as persist
from persist_lib.sources import Decoding, Meaning, Transactions
from persist_lib.sources.pipeline import Pipeline, made_of
from persist_lib.sources.records import OUTPUT
from persist_lib.sources.transactions import WAITING
from tests.bank import MARKS, TOPICS, Bank, Told, sums, topic_of
from tests.unit.sources.messages import applied, messages

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64 not null"}, times="ms")
Arrived = tuple[int, str, int, bytes]
"""A time, a partition, an address and a value."""


def pipelines_of(*outputs: str, **how: Any) -> dict[str, Pipeline]:
    """Pipelines of one output for all topics, or of one for each of these."""
    meaning = Meaning(envelope="debezium", transactions=Transactions(topic=MARKS, **how))
    return {role: Pipeline(Decoding(), meaning, SCHEMA) for role in outputs or (OUTPUT,)}


def arrivals(dice: random.Random, told: Sequence[Told], times: int) -> list[Arrived]:
    """The messages of each partition in their order, at times that have nothing to do with those of others."""
    parts = dice.choice([1, 2, 3])
    values: dict[str, list[bytes]] = {}
    for one in told:
        number = 0 if one.topic == MARKS else int(one.key) // 2 % parts
        values.setdefault(f"{one.topic}/{number}", []).append(one.value)
    found: list[Arrived] = []
    for name in sorted(values):
        at = sorted(dice.randrange(1, times + 1) for _ in values[name])
        found += [(time, name, n, value) for n, (time, value) in enumerate(zip(at, values[name], strict=True))]
    return sorted(found)


def table_of(found: Sequence[Arrived]) -> pa.Table:
    times, partitions, addresses, values = ([one[n] for one in found] for n in range(4))
    return messages(times, values, partitions, address=pa.array(addresses, pa.uint64()))  # type: ignore[arg-type]


class Kept:
    """What a run of windows has made so far: the output, and the state."""

    def __init__(self, pipelines: dict[str, Pipeline]) -> None:
        self.pipelines = pipelines
        self.updates: Counter[tuple[Any, ...]] = Counter()
        self.waiting: Counter[tuple[Any, ...]] = Counter()
        self.history: list[tuple[Any, ...]] = []

    def window(self, found: Sequence[Arrived]) -> None:
        if not found:
            return
        state = pa.Table.from_pylist(
            [{**dict(zip(WAITING.names, row, strict=True)), "_diff": 1} for row in self.waiting.elements()],
            schema=WAITING.contents,
        )
        made = made_of(self.pipelines, self.role_of, table_of(found), self.lookup, waiting=state)
        assert made["errors"].num_rows == 0
        self.add(made)

    def role_of(self, partition: str) -> str:
        topic = partition.rpartition("/")[0]
        return OUTPUT if OUTPUT in self.pipelines else topic

    def lookup(self, role: str, keys: pa.Table | None) -> pa.Table:
        assert keys is not None
        wanted = set(keys.column("id").to_pylist())
        assert role in {OUTPUT, *map(topic_of, wanted)}
        rows = [{"id": id_, "cents": cents, "_diff": 1} for id_, cents in self.contents().items() if id_ in wanted]
        return pa.Table.from_pylist(rows, schema=SCHEMA.contents)

    def add(self, made: Mapping[str, pa.Table]) -> None:
        for role in self.pipelines:
            for row in made[role].to_pylist():
                assert role in {OUTPUT, topic_of(row["id"])}
                self.updates[row["id"], row["cents"], row["_time"]] += row["_diff"]
        for row in made["waiting"].to_pylist():
            self.history.append(tuple(row.values()))
            self.waiting[tuple(row[name] for name in WAITING.names)] += row["_diff"]
        assert set(self.waiting.values()) <= {0, 1}
        self.waiting += Counter()

    def contents(self, as_of: int = 1 << 60) -> dict[int, int]:
        found: Counter[tuple[int, int]] = Counter()
        for (id_, cents, time), diff in self.updates.items():
            if time <= as_of:
                found[id_, cents] += diff
        rows = [row for row, count in found.items() if count]
        assert all(found[row] == 1 for row in rows)
        assert len({id_ for id_, _ in rows}) == len(rows)
        return dict(rows)


class Plain:
    """The same, message by message and as simply as can be."""

    def __init__(self, *, in_order: bool) -> None:
        self.in_order = in_order
        self.changes: list[tuple[str, int, str, int, dict[str, int]]] = []
        self.begins: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.done: list[str] = []
        self.contents: dict[int, int] = {}

    def arrive(self, partition: str, address: int, value: bytes) -> None:
        found = json.loads(value)
        if "status" in found:
            if found["status"] == "BEGIN":
                self.begins.setdefault(found["id"], address)
            else:
                self.counts.setdefault(found["id"], found["event_count"])
            return
        id_, number = found["transaction"]["id"], found["transaction"]["total_order"]
        if id_ not in self.done and not any(one[0] == id_ and one[1] == number for one in self.changes):
            self.changes.append((id_, number, partition, address, found["after"]))

    def is_whole(self, id_: str) -> bool:
        return sum(one[0] == id_ for one in self.changes) == self.counts.get(id_)

    def before(self, id_: str) -> set[str]:
        """The transactions that this one comes after, by one step."""
        waiting = {one[0] for one in self.changes} | (set(self.begins) - set(self.done))
        return {
            other
            for other in waiting - {id_}
            if any(
                mine[0] == id_ and theirs[0] == other and mine[2] == theirs[2] and theirs[3] < mine[3]
                for mine in self.changes
                for theirs in self.changes
            )
            or (self.in_order and id_ in self.begins and self.begins.get(other, 1 << 60) < self.begins[id_])
        }

    def release(self) -> list[str]:
        ready = []
        for id_ in {one[0] for one in self.changes}:
            reached, fresh = {id_}, {id_}
            while fresh:
                fresh = {other for one in fresh for other in self.before(one)} - reached
                reached |= fresh
            if all(self.is_whole(one) for one in reached):
                ready.append(id_)
        for _, _, _, _, row in sorted((one for one in self.changes if one[0] in ready), key=lambda one: one[2:4]):
            self.contents[row["id"]] = row["cents"]
        self.changes = [one for one in self.changes if one[0] not in ready]
        self.done += ready
        return ready


@given(st.integers(0, 10**9), st.booleans(), st.booleans(), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_transactions_are_what_a_plain_model_makes(
    seed: int, in_order: bool, apart: bool, transfers: int, times: int
) -> None:
    """In one output, or in one for each topic: then what is in all of them together is the same at each time."""
    dice = random.Random(seed)
    bank = Bank(dice)
    for _ in range(transfers):
        bank.transfer()
    found = arrivals(dice, bank.with_repeats(), times)
    pipelines = pipelines_of(*(TOPICS if apart else ()), in_order=in_order)
    whole, parts = Kept(pipelines), Kept(pipelines)
    whole.window(found)
    cuts = sorted({1, times + 1, *(dice.randrange(1, times + 2) for _ in range(dice.randrange(4)))})
    for low, high in pairwise(cuts):
        parts.window([one for one in found if low <= one[0] < high])
    plain = Plain(in_order=in_order)
    ids = [id_ for id_, _ in bank.history]
    for time in range(1, times + 1):
        for _, partition, address, value in [one for one in found if one[0] == time]:
            plain.arrive(partition, address, value)
        plain.release()
        assert whole.contents(time) == plain.contents
        assert sums(plain.contents)
        if in_order:
            assert set(plain.done) == set(ids[: len(plain.done)])
    assert whole.contents() == bank.balances
    assert parts.updates == whole.updates
    assert parts.waiting == whole.waiting
    assert {row[3] for row in whole.waiting} == {"done"}
    assert len(whole.waiting) == len(bank.history)


def change(id_: int, cents: int, transaction: str | None = None, number: int = 1) -> bytes:
    found: dict[str, Any] = {"before": None, "after": {"id": id_, "cents": cents}, "op": "c"}
    if transaction is not None:
        found["transaction"] = {"id": transaction, "total_order": number, "data_collection_order": number}
    return json.dumps(found).encode()


def mark(status: str, id_: str, count: int | None = None, **collections: int) -> bytes:
    counts = [{"data_collection": name, "event_count": one} for name, one in collections.items()]
    return json.dumps({"status": status, "id": id_, "event_count": count, "data_collections": counts}).encode()


def test_what_is_of_no_transaction_waits_only_behind_what_waits() -> None:
    kept = Kept(pipelines_of())
    kept.window([(1, "a/0", 0, change(1, 5)), (1, "a/0", 1, change(1, 6, "x")), (1, "a/0", 2, change(1, 7))])
    assert kept.contents() == {1: 5}
    kept.window([(2, "b/0", 0, change(2, 8))])
    assert kept.contents() == {1: 5, 2: 8}
    kept.window([(3, f"{MARKS}/0", 0, mark("END", "x", 1))])
    assert kept.contents() == {1: 7, 2: 8}


def test_on_request_a_transaction_waits_for_all_that_begin_before_it() -> None:
    marks = [mark("BEGIN", "x"), mark("END", "x", 1), mark("BEGIN", "y"), mark("END", "y", 1)]
    messages = [(1, "a/0", 0, change(1, 5, "y")), *((1, f"{MARKS}/0", n, one) for n, one in enumerate(marks))]
    late, ordered = Kept(pipelines_of()), Kept(pipelines_of(in_order=True))
    for kept in (late, ordered):
        kept.window(messages)
    assert (late.contents(), ordered.contents()) == ({1: 5}, {})
    ordered.window([(2, "b/0", 0, change(2, 6, "x"))])
    assert ordered.contents() == {1: 5, 2: 6}


def test_only_changes_that_the_source_reads_are_counted() -> None:
    kept = Kept(pipelines_of(collections=("a",)))
    kept.window([(1, "a/0", 0, change(1, 5, "x")), (1, f"{MARKS}/0", 0, mark("END", "x", 3, a=1, b=2))])
    kept.window([(2, f"{MARKS}/0", 1, mark("END", "y", 2, b=2))])
    assert kept.contents() == {1: 5}
    assert [row[0] for row in kept.waiting] == ["x"], "of the other one nothing is known"


def test_what_is_remembered_of_transactions_is_bounded() -> None:
    kept = Kept(pipelines_of(remembered=3))
    for n in range(10):
        kept.window([(n + 1, "a/0", n, change(1, n, f"x{n}")), (n + 1, f"{MARKS}/0", n, mark("END", f"x{n}", 1))])
        assert len(kept.waiting) <= 3
    assert kept.contents() == {1: 9}
    kept.window([(20, "a/0", 20, change(1, 7, "x7")), (20, f"{MARKS}/0", 20, mark("END", "x7", 1))])
    assert kept.contents() == {1: 9}, "it was repeated"


def test_bad_messages_are_errors_and_hold_nothing_back() -> None:
    (pipeline,) = pipelines_of().values()
    found = [
        (1, "a/0", 0, b"garbage"), (1, "a/0", 1, change(1, 5, "x")), (1, f"{MARKS}/0", 0, b"{"),
        (1, f"{MARKS}/0", 1, mark("SOME", "x")), (1, f"{MARKS}/0", 2, mark("END", "x", 1)), (1, "a/0", 2, b"null"),
        (1, "a/0", 3, b'{"op": "u", "after": {"id": "text"}}'),
    ]  # fmt: skip
    made = applied(pipeline, table_of(found), lambda _: SCHEMA.contents.empty_table())
    assert made.output.num_rows == 1
    assert sorted((row["partition"], row["address"]) for row in made.errors.to_pylist()) == [
        ("a/0", 0), ("a/0", 3), (f"{MARKS}/0", 0), (f"{MARKS}/0", 1),
    ]  # fmt: skip


def test_changes_wrapped_with_their_schemas_are_known_too() -> None:
    kept = Kept(pipelines_of())
    for time, (partition, value) in enumerate([("a/0", change(1, 5, "x")), (f"{MARKS}/0", mark("END", "x", 1))], 1):
        assert kept.contents() == {}
        kept.window([(time, partition, 0, b'{"schema": {}, "payload": %s}' % value)])
    assert kept.contents() == {1: 5}


def test_many_transactions_are_held_back_in_time() -> None:
    dice = random.Random(1)
    bank = Bank(dice)
    for _ in range(3000):
        bank.transfer()
    kept = Kept(pipelines_of())
    kept.window(arrivals(dice, bank.told, 30))
    assert kept.contents() == bank.balances
