"""The library's models again, by clients of shard servers that are cut off and replaced in the middle of it all.

The machines, their models and their checks are those of clients without a server. PERSIST_SERVED_EXAMPLES: how many
examples of each, where the other models have PERSIST_MODEL_EXAMPLES.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import persist_lib as persist
from persist_lib.format.log import GROUP, decode_row
from persist_lib.ids import SeqNo
from persist_lib.testing.model import updates_from
from tests.properties import test_collections_model as collections
from tests.properties import test_streams_model as streams
from tests.properties import test_tables_model as tables
from tests.properties.test_append_async_model import AppendsMachine
from tests.properties.test_library_model import CHANGES, SCHEMAS, Change, LibraryMachine
from tests.properties.test_verbs_model import VerbsMachine
from tests.served import ServedWorld, Sharing, TwoServers

EXAMPLES = int(os.environ.get("PERSIST_SERVED_EXAMPLES", "2"))
WHICH = st.integers(0, 1)


class Servers(RuleBasedStateMachine):
    """What may happen to servers at any time."""

    world: Any

    @rule(which=WHICH)
    def a_server_is_replaced(self, which: int) -> None:
        self.world.slots[which % self.world.servers].replace()

    @precondition(lambda self: hasattr(self, "world") and self.world.servers > 1)
    @rule(which=WHICH)
    def a_server_is_gone(self, which: int) -> None:
        for number, slot in enumerate(self.world.slots):
            if number == which:
                slot.lose()
            elif slot.proxy.target is None:
                slot.replace()


class Library(Servers, LibraryMachine):
    """Besides, what only servers do: a commit is cut in the middle, and commands of two clients share a row."""

    world_kind = ServedWorld

    @rule(
        changes=CHANGES, step=st.integers(1, 3), who=st.integers(0, 2), is_before=st.booleans(),
        call=st.sampled_from(["append", "hold", "open_reader", "reopen", "many"]),
    )  # fmt: skip
    def a_server_is_cut_off_in_the_middle(
        self, changes: list[Change], step: int, who: int, is_before: bool, call: str
    ) -> None:
        for which in range(self.world.servers):
            self.world.cut_at_next(which, is_before=is_before)
        if call == "append":
            self.append(who, changes, step)
        elif call == "hold":
            self.hold("a", step)
        elif call == "open_reader":
            self.open_reader(who)
        elif call == "reopen":
            self.reopen(who, politely=False)
        elif not self.finished:
            self.append_to_two_shards(who, changes, step)

    @rule(who=st.integers(0, 2), changes=CHANGES, step=st.integers(1, 3))
    def append_to_two_shards(self, who: int, changes: list[Change], step: int) -> None:
        write, client, lower = self.writers[who], self.clients[who], self.upper
        if self.finished:
            return
        rows, updates = self.rows(changes, lower, lower + step, write.schema)
        with client.open_writer("other", SCHEMAS[0]) as other:
            at = other.fetch_upper().time or 0
            parts = [persist.Append(write, rows, lower, lower + step), persist.Append(other, [], at, at + 1)]
            self.acknowledge(lambda token: client.compare_and_append_many(parts, token=token), who)
            assert other.fetch_upper().time == at + 1, "once"
        self.model.append(updates, persist.at(lower), persist.at(lower + step))

    @rule(first=CHANGES, second=CHANGES, step=st.integers(1, 3), further=st.integers(0, 3))
    def two_clients_at_once(self, first: list[Change], second: list[Change], step: int, further: int) -> None:
        """The second appends where the first one ends, and a third sets a hold: that fits into one row."""
        if self.finished:
            return
        lower, middle, upper = self.upper, self.upper + step, self.upper + 2 * step
        writers, least = (self.writers[0], self.writers[2]), self.checker.inspect("s").state.since.time or 0
        parts = [
            self.rows(first, lower, middle, writers[0].schema),
            self.rows(second, middle, upper, writers[1].schema),
        ]
        since = max(self.holds.get("b", 0), least)
        since = max(since, min(since + further, self.upper - 1))

        def hold() -> bool:
            self.clients[1].downgrade_hold("s", "b", since)
            return True

        is_first, is_second, is_held = self.world.at_once(
            "s",
            lambda: self.try_append(writers[0], parts[0][0], lower, middle),
            lambda: self.try_append(writers[1], parts[1][0], middle, upper),
            hold,
        )  # fmt: skip
        assert is_held
        self.holds["b"] = since
        names = SCHEMAS[self.schemas - 1].names
        for is_there, (rows, _), start, end in (
            (is_first, parts[0], lower, middle),
            (is_second, parts[1], middle, upper),
        ):
            if is_there:
                self.model.append(updates_from(names, rows), persist.at(start), persist.at(end))

    def try_append(self, write: persist.WriteHandle, rows: list[dict[str, Any]], lower: int, upper: int) -> bool:
        """Whether it was appended. A writer that is retired, or an append across a gap, is not."""
        try:
            write.compare_and_append(rows, lower, upper)
        except (persist.LeaseExpired, persist.UpperMismatch):
            return False
        except persist.Indeterminate:  # sent again over a new connection, and there is a gap: it may be closed later
            return self.checker.inspect("s").state.upper == persist.at(upper)
        return True


class LibraryAfterUpgrade(Library):
    """Rows are shared once the shard is upgraded."""

    @rule()
    def upgrade(self) -> None:
        if not self.finished:
            self.checker.upgrade("s")


class LibraryByTwo(Library):
    """Two servers, and rows that are shared from the first."""

    world_kind = TwoServers


class Verbs(Servers, VerbsMachine):
    """One server, and rows that are shared."""

    world_kind = Sharing


class VerbsByTwo(Servers, VerbsMachine):
    """Two servers."""

    world_kind = TwoServers


class Appends(Servers, AppendsMachine):
    """Two servers, and a handle whose way to them fails now and then."""

    world_kind = TwoServers


class Collections(Servers, collections.CollectionMachine):
    """Two servers of a catalog and its shards."""

    world_kind = TwoServers


class Tables(Servers, tables.Model):
    """One server, and tables whose shards are committed together."""

    world_kind = Sharing


class WalTables(Servers, tables.WalModel):
    """Two servers, and tables behind a WAL shard."""

    world_kind = TwoServers


def some(steps: int) -> settings:
    return settings(max_examples=EXAMPLES, stateful_step_count=steps)


TestLibrary = LibraryAfterUpgrade.TestCase
TestLibrary.settings = some(25)
TestLibraryByTwo = LibraryByTwo.TestCase
TestLibraryByTwo.settings = some(25)
TestVerbs = Verbs.TestCase
TestVerbs.settings = some(20)
TestVerbsByTwo = VerbsByTwo.TestCase
TestVerbsByTwo.settings = some(20)
TestAppends = Appends.TestCase
TestAppends.settings = some(20)
TestCollections = Collections.TestCase
TestCollections.settings = some(10)
TestTables = Tables.TestCase
TestTables.settings = some(10)
TestWalTables = WalTables.TestCase
TestWalTables.settings = some(10)


@settings(max_examples=EXAMPLES)
@given(
    program=streams.programs, inline=st.booleans(), two=st.booleans(),
    kills=st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=3),
)  # fmt: skip
def test_streams_of_a_writer_that_is_killed_while_servers_are_replaced(
    program: list[tuple[streams.Op, ...]], inline: bool, two: bool, kills: list[tuple[int, bool]]
) -> None:
    world = (TwoServers if two else Sharing)()
    run = streams.Program(streams.INLINE if inline else streams.SMALL, world)
    try:
        for at, after in kills:
            world.cut_at_next(at, is_before=after)
            run.run(program, streams.Kill(at, after=after))
            run.check()
        run.run(program, None)
        assert run.done == len(program)
        run.check()
    finally:
        world.close()


def test_in_this_world_commands_of_several_clients_do_share_a_row() -> None:
    """So that the models above say something about rows that are shared."""
    world = TwoServers()
    try:
        schema = SCHEMAS[0]
        clients = [world.client() for _ in range(3)]
        first, second = (client.open_writer("s", schema) for client in clients[:2])
        assert first.id
        assert second.id
        world.at_once(
            "s",
            lambda: first.compare_and_append([], 0, 1), lambda: second.compare_and_append([], 1, 2),
            lambda: clients[2].set_hold("s", "h", 0),
        )  # fmt: skip
        rows = [decode_row(one.data, "row") for one in world.inner.consensus.scan("s", SeqNo(0), 100)]
        assert rows[-1].command == GROUP
        assert len(rows[-1].steps) == 3
    finally:
        world.close()
