"""The checker of histories finds what it is for: in histories that are made up, and in tables with a planted bug."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.timeline.transaction import Transaction
from persist_lib.timeline.wal_cache import Tail
from persist_lib.timeline.wal_timeline import WalLine
from tests.torture.isolation import Key, Outcome, Recorded, Value, anomalies
from tests.worlds import World

X, Y = ("a", 1), ("b", 1)
INITIAL: dict[Key, Value] = {X: (10, ""), Y: (10, "")}
SCHEMA = persist.Schema({"id": "int64 not null"}, {"cents": "int64 not null", "by": "string not null"})


def one(
    id_: str, as_of: int, reads: dict[Key, Value], writes: dict[Key, Value], time: int | None, **more: Any
) -> Recorded:
    known = {"outcome": "committed", "client": id_, "began": as_of * 10 + 5, "ended": (time or as_of) * 10 + 1} | more
    return Recorded(id=id_, as_of=as_of, reads=reads, writes=writes, time=time, **known)  # type: ignore[arg-type]


FIRST = one("t1", 0, {X: (10, "")}, {X: (5, "t1"), Y: (15, "t1")}, 3)


@pytest.mark.parametrize(
    ("name", "history"),
    [
        ("lost update", [FIRST, one("t2", 1, {X: (10, "")}, {X: (7, "t2")}, 5)]),
        (
            "dirty read",
            [
                one("t1", 0, {}, {X: (5, "t1")}, None, outcome="refused"),
                one("t2", 4, {X: (5, "t1")}, {}, None),
            ],
        ),
        ("dirty read", [one("t2", 4, {X: (5, "nobody")}, {}, None)]),
        ("fractured read", [FIRST, one("t2", 4, {X: (5, "t1"), Y: (10, "")}, {}, None)]),
        ("wrong snapshot", [FIRST, one("t2", 4, {X: (10, ""), Y: (10, "")}, {}, None)]),
        ("wrong snapshot", [FIRST, one("t2", 2, {X: (5, "t1"), Y: (15, "t1")}, {}, None, began=99)]),
        ("non-monotonic reads", [FIRST, one("t2", 2, {X: (10, "")}, {}, None, began=99)]),
        (
            "non-monotonic reads",
            [FIRST, one("t2", 4, {X: (5, "t1")}, {}, None), one("t3", 2, {X: (10, "")}, {}, None, began=99)],
        ),
        ("same time", [FIRST, one("t2", 2, {}, {("c", 1): (1, "t2")}, 3)]),
    ],
)
def test_an_anomaly_is_found_by_its_name(name: str, history: list[Recorded]) -> None:
    found = anomalies(history, INITIAL)
    assert any(text.startswith(name) for text in found), found


def test_a_history_in_order_has_none_and_neither_has_write_skew() -> None:
    skew = [
        one("t2", 4, {X: (5, "t1")}, {Y: (0, "t2")}, 6, began=44),
        one("t3", 4, {Y: (15, "t1")}, {X: (0, "t3")}, 7, began=44),
    ]
    last = one("t4", 7, {X: (0, "t3"), Y: (0, "t2")}, {}, None)
    assert anomalies([FIRST, *skew, last], INITIAL) == []


def run(seed: int) -> list[str]:
    """Two clients with transactions that overlap, an applier beside; what the checker says of it."""
    rng = random.Random(seed)
    world = World()
    clients = [world.client(persist.Config(inline_bytes=0)).controller().tables() for _ in range(3)]
    for name in ("a", "b"):
        clients[0].create(name, SCHEMA, mode="wal")
    with clients[0].transaction() as start:
        for name in ("a", "b"):
            start.insert(name, [{"id": i, "cents": 10, "by": ""} for i in range(2)])
    clients[2].apply()
    keys: list[Key] = [(name, i) for name in ("a", "b") for i in range(2)]
    clock = itertools.count()
    history: list[Recorded] = []
    going: list[Iterator[None]] = []

    def transaction(number: int) -> Iterator[None]:
        tables, began = rng.choice(clients[:2]), next(clock)
        t = tables.transaction()
        chosen = rng.sample(keys, 3)
        reads: dict[Key, Value] = {}
        for table, id_ in chosen:
            row = t.read(table, keys=[id_], diff=True).to_pylist()[0]
            reads[table, id_] = row["cents"], row["by"]
            yield
        writes = {key: (reads[key][0] + 1, f"t{number}") for key in chosen[: rng.randint(0, 2)]}
        for (table, id_), (cents, by) in writes.items():
            t.upsert(table, [{"id": id_, "cents": cents, "by": by}])
            yield
        outcome: Outcome = "committed"
        try:
            t.commit()
        except persist.WriteConflict:
            outcome = "refused"
        history.append(
            Recorded(
                f"t{number}", str(clients.index(tables)), t.as_of, reads, writes, outcome, t.time, began, next(clock)
            )
        )

    numbers = itertools.count(1)
    for _ in range(150):
        if len(going) < 4:
            going.append(transaction(next(numbers)))
        step = rng.choice(going)
        if next(step, step) is step:
            going.remove(step)
        if rng.random() < 0.2:
            clients[2].apply()
        if rng.random() < 0.1:
            clients[2].tidy()
    world.close()
    return anomalies(history, dict.fromkeys(keys, (10, "")))


def test_overlapping_transactions_have_the_isolation_that_is_promised() -> None:
    for seed in range(3):
        assert run(seed) == []


def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "_check", lambda *_: None)


def no_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that take what is in the tables for all there is."""
    settled = WalLine.settled
    monkeypatch.setattr(WalLine, "settled", lambda *args: (*settled(*args)[:2], []))


def tail_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that take all of the tail, whatever their time is: so they see what was committed since they began."""
    of = Tail.of
    monkeypatch.setattr(Tail, "of", lambda self, table, after, to: of(self, table, after, to + 10**9))


def no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that forgets what open transactions have to check."""
    monkeypatch.setattr(WalLine, "oldest", lambda _, time: time)


def old_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions that begin without a look at the WAL, where this process has looked before."""
    look = WalLine.look
    monkeypatch.setattr(WalLine, "look", lambda self: None if self.upper > 1 and self._reader else look(self))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (no_check, "lost update"), (no_tail, "wrong snapshot"), (tail_too_far, "fractured read"),
        (no_pins, "lost update"), (old_time, "non-monotonic reads"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], name: str
) -> None:
    plant(monkeypatch)
    found: list[str] = []
    for seed in range(5):
        found += run(seed)
        if any(text.startswith(name) for text in found):
            return
    raise AssertionError(f"no {name} in {found[:5]}")
