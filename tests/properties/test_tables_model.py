"""Tables beside plain dicts: two clients, open transactions, appliers, handovers, renames; all times are read."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import persist_lib as persist
from persist_lib.testing import check_location
from persist_lib.timeline import Tables
from persist_lib.timeline.transaction import Transaction
from tests.properties.uncached import NothingKept
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"cents": "int64"}, unique=True)
IDS = st.integers(0, 4)
CENTS = st.integers(-3, 3)
ROWS = st.dictionaries(IDS, CENTS, min_size=1, max_size=3)
NAMES = ("a", "b", "c")
WHO = st.integers(0, 1)
Contents = dict[int, int]


def rows_of(rows: Contents) -> list[dict[str, int]]:
    return [{"id": id_, "cents": cents} for id_, cents in rows.items()]


def after(verb: str, rows: Contents, contents: Contents) -> Contents | None:
    """What a statement makes of the contents; None if a constraint refuses it."""
    if verb == "insert":
        return None if rows.keys() & contents.keys() else {**contents, **rows}
    if verb == "upsert":
        return {**contents, **rows}
    if verb == "delete":
        return {id_: cents for id_, cents in contents.items() if id_ not in rows}
    return {id_: cents + 1 if cents > 0 else cents for id_, cents in contents.items()}


def do(target: Tables | Transaction, verb: str, name: str, rows: Contents) -> Any:
    if verb in {"insert", "upsert"}:
        return getattr(target, verb)(name, rows_of(rows))
    if verb == "delete":
        return target.delete(name, list(rows))
    return target.update(name, {"cents": pc.field("cents") + 1}, filter=pc.field("cents") > 0)


class Open:
    """An open transaction, and what it should see."""

    def __init__(self, transaction: Transaction, contents: dict[str, Contents]) -> None:
        self.transaction, self.contents = transaction, contents
        self.before = {name: dict(found) for name, found in contents.items()}

    def changed(self, name: str) -> set[int]:
        return changed(self.before[name], self.contents[name])


def changed(before: Contents, now: Contents) -> set[int]:
    return {id_ for id_ in before.keys() | now.keys() if before.get(id_) != now.get(id_)}


class Model(RuleBasedStateMachine):
    """What is true of both modes."""

    mode = "yolo"
    world_kind = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.world_kind()
        config = persist.Config(inline_bytes=200)
        self.clients = [self.world.client(config).controller().tables() for _ in range(2)]
        for index, name in enumerate(NAMES):
            self.clients[0].create(name, SCHEMA, shards=1 + index % 2, mode=self.mode)  # type: ignore[arg-type]
        self.names = {name: name for name in NAMES}
        self.contents: dict[str, Contents] = {name: {} for name in NAMES}
        self.history: list[tuple[int, dict[str, Contents]]] = []
        self.open: list[Open] = []
        self.breaks: list[tuple[int, str]] = []
        self.clients[0].upsert("a", rows_of({0: 0}))
        self.committed(self.clients[0].read_time(), {**self.contents, "a": {0: 0}})

    def committed(self, time: int, contents: dict[str, Contents]) -> None:
        assert not self.history or time > self.history[-1][0], "times are strictly increasing"
        self.contents = contents
        self.history.append((time, contents))

    @rule(
        who=WHO, name=st.sampled_from(NAMES), verb=st.sampled_from(["insert", "upsert", "delete", "update"]), rows=ROWS
    )
    def statement(self, who: int, name: str, verb: str, rows: Contents) -> None:
        expected = after(verb, rows, self.contents[name])
        try:
            done = do(self.clients[who], verb, self.names[name], rows)
        except persist.ConstraintViolated:
            assert expected is None
            return
        assert expected is not None
        assert (done.time is None) == (expected == self.contents[name])
        if done.time is not None:
            self.committed(done.time, {**self.contents, name: expected})

    @rule(who=WHO, name=st.sampled_from(NAMES), back=st.integers(0, 6), ids=st.none() | st.lists(IDS, max_size=3))
    def read(self, who: int, name: str, back: int, ids: list[int] | None) -> None:
        time, contents = self.history[-1 - min(back, len(self.history) - 1)]
        as_of = None if back == 0 else time
        found = self.clients[who].read(self.names[name], as_of, keys=ids)
        expected = {id_: cents for id_, cents in contents[name].items() if ids is None or id_ in ids}
        assert {row["id"]: row["cents"] for row in found.to_pylist()} == expected
        positive = self.clients[who].read(
            self.names[name], as_of, columns=["cents"], filter=pc.field("cents") > 0, diff=True
        )
        sums: dict[int, int] = {}
        for cents in contents[name].values():
            if cents > 0:
                sums[cents] = sums.get(cents, 0) + 1
        assert {row["cents"]: row["_diff"] for row in positive.to_pylist()} == sums

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 10**6))
    def rename(self, name: str, number: int) -> None:
        to = f"{name}{number}"
        if to not in self.names.values():
            self.clients[0].rename(self.names[name], to)
            self.names[name] = to

    @rule(seconds=st.sampled_from([0.001, 1, -1]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(who=WHO, name=st.sampled_from(NAMES), shards=st.integers(1, 3))
    def hand_over(self, who: int, name: str, shards: int) -> None:
        controller = self.clients[who].controller
        made = controller.make_rendition(self.names[name], shards=shards, copy=True)
        controller.copy_rendition(self.names[name], made.number)
        time = controller.hand_over(self.names[name], made.number)
        self.finish(controller, name, made.number)
        self.breaks.append((time, name))

    def finish(self, controller: Any, name: str, number: int) -> None:
        # The rest is copied once the old rendition is closed at the handover.
        writer = self.clients[0].controller.open_writer(self.names[name], rendition=number - 1)
        writer.advance_upper(controller.describe(self.names[name]).active.start)
        controller.copy_rendition(self.names[name], number, to_end=True)

    @invariant()
    def the_newest_is_read(self) -> None:
        if not self.history:
            return
        at = self.clients[1].read_time()
        for name in NAMES:
            found = self.clients[1].read(self.names[name], at).to_pylist()
            assert {row["id"]: row["cents"] for row in found} == self.contents[name]

    def teardown(self) -> None:
        try:
            check_location(self.world.client())
        finally:
            self.world.close()


class WalModel(Model):
    """And transactions."""

    mode = "wal"

    def finish(self, controller: Any, name: str, number: int) -> None:
        self.clients[0].apply()
        controller.copy_rendition(self.names[name], number, to_end=True)

    @rule(who=WHO)
    def begin(self, who: int) -> None:
        if len(self.open) < 3:
            now = {name: dict(found) for name, found in self.contents.items()}
            self.open.append(Open(self.clients[who].transaction(), now))

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 2),
        name=st.sampled_from(NAMES),
        verb=st.sampled_from(["insert", "upsert", "delete", "update"]),
        rows=ROWS,
    )
    def change(self, which: int, name: str, verb: str, rows: Contents) -> None:
        one = self.open[which % len(self.open)]
        if any(time > one.transaction.as_of and broken == name for time, broken in self.breaks):
            return  # it will be refused, and what it sees of that table is as of before
        expected = after(verb, rows, one.contents[name])
        try:
            do(one.transaction, verb, self.names[name], rows)
        except persist.ConstraintViolated:
            assert expected is None
            return
        assert expected is not None
        one.contents[name] = expected
        found = one.transaction.read(self.names[name]).to_pylist()
        assert {row["id"]: row["cents"] for row in found} == expected

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), commits=st.booleans())
    def end(self, which: int, commits: bool) -> None:
        one = self.open.pop(which % len(self.open))
        if not commits:
            one.transaction.rollback()
            return
        as_of = one.transaction.as_of
        changes = {name: one.changed(name) for name in NAMES if one.changed(name)}
        touched: dict[str, set[int]] = {name: set() for name in NAMES}
        before = one.before
        for time, contents in self.history:
            if time > as_of:
                for name in NAMES:
                    touched[name] |= changed(before[name], contents[name])
            before = contents
        is_refused = any(keys & touched[name] for name, keys in changes.items()) or any(
            time > as_of and name in changes for time, name in self.breaks
        )
        try:
            done = one.transaction.commit()
        except persist.WriteConflict:
            assert is_refused
            return
        assert not is_refused
        assert (done.time is None) == (not changes)
        if done.time is not None:
            merged = {name: dict(found) for name, found in self.contents.items()}
            for name, keys in changes.items():
                for id_ in keys:
                    if id_ in one.contents[name]:
                        merged[name][id_] = one.contents[name][id_]
                    else:
                        merged[name].pop(id_, None)
            self.committed(done.time, merged)

    @rule(who=WHO)
    def apply(self, who: int) -> None:
        self.clients[who].apply()

    @rule(who=WHO)
    def tidy(self, who: int) -> None:
        self.clients[who].tidy()

    @rule(who=WHO)
    def tend(self, who: int) -> None:
        self.clients[who].controller.tend()


class NothingKeptModel(NothingKept, WalModel):
    """The same."""


TestYoloTables = Model.TestCase
TestYoloTables.settings = settings(max_examples=8, stateful_step_count=20)
TestWalTables = WalModel.TestCase
TestWalTables.settings = settings(max_examples=15, stateful_step_count=30)
TestNothingKept = NothingKeptModel.TestCase
TestNothingKept.settings = settings(max_examples=10, stateful_step_count=30)
