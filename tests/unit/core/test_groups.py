"""A group of commands of which one may never be committed: that one is answered so, and the others are applied.

The mark of a layer says whose a shard is, and keeps nothing: since moves as if it was not there, and so does it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import groups
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import GROUPS
from persist_lib.core.holds import layer_of
from persist_lib.core.leases import keepers
from persist_lib.core.state import MARK, Hold, State
from persist_lib.core.transitions import apply, change
from persist_lib.core.validate import check_state
from persist_lib.errors import InvariantViolated
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import SeqNo, format_reader_id, format_writer_id
from tests.unit.core.core_shard import CREATE, WRITER, batch
from tests.worlds import SCHEMA

IDS = [format_writer_id(n) for n in range(3)]
COMMANDS = [c.RegisterWriter(id_, "ingest", 1000) for id_ in IDS]


def test_a_command_that_would_break_the_state_changes_nothing_and_the_others_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a bug in a transition would: here it registers an id and retires it at once."""

    def broken(state: State, seqno: SeqNo, command: c.Command) -> Any:
        answer = change(state, seqno, command)
        if command is COMMANDS[1] and isinstance(answer, StateDiff):
            return msgspec.structs.replace(answer, retired=((IDS[1], None, seqno),))
        return answer

    made = change(State(), SeqNo(1), c.Create(SCHEMA, GROUPS))
    assert isinstance(made, StateDiff)
    state = apply_diff(State(), made)
    monkeypatch.setattr(groups, "change", broken)
    applied = groups.apply_together(state, SeqNo(2), COMMANDS)
    assert [type(answer) for answer in applied.answers] == [StateDiff, InvariantViolated, StateDiff]
    assert set(applied.state.writers) == {IDS[0], IDS[2]}
    check_state(applied.state, SeqNo(2))


READER = format_reader_id(1)
SET = c.SetHold(MARK, MINIMUM, None, b"pending")


def after(*commands: c.Command) -> Any:
    state: Any = State()
    for number, command in enumerate(commands, 1):
        state = apply(state, SeqNo(number), command)
        if not isinstance(state, State):
            return state
        check_state(state, SeqNo(number))
    return state


BEGUN = (
    CREATE, c.RegisterWriter(WRITER, "ingest", 99), c.CompareAndAppend(WRITER, b"a", batch(0, 9), 99),
    c.RegisterReader(READER, 99),
)  # fmt: skip


def test_a_mark_lets_only_its_layer_append_and_release_gives_the_shard_back() -> None:
    state = after(*BEGUN, SET)
    fresh = format_writer_id(2)
    assert layer_of(state) == "pending"
    assert apply(state, SeqNo(9), c.RegisterWriter(fresh, "ingest", 99)) == r.OfLayer("pending")
    for mine in (c.RegisterWriter(fresh, "ingest", 99, "", "pending"), c.RegisterWriter(fresh, "maintenance", 99)):
        assert isinstance(apply(state, SeqNo(9), mine), State)
    assert layer_of(after(*BEGUN, SET, c.ReleaseHold(MARK, b"pending"))) == ""


@pytest.mark.parametrize("moves", ["a reader", "a hold"])
def test_since_moves_as_without_a_mark_which_moves_with_it(moves: str) -> None:
    steps: tuple[c.Command, ...] = (*BEGUN, c.DowngradeSince(READER, at(5), SeqNo(1), 99))
    if moves == "a hold":
        steps = (*BEGUN, c.SetHold("h", MINIMUM, None, b""), c.Retire(READER), c.DowngradeHold("h", at(5), b"", b""))
    state = after(*steps[:4], SET, *steps[4:])
    assert state.since == after(*steps).since == at(5)
    assert state.holds[MARK] == Hold(at(5), b"pending")
    assert keepers(state) == keepers(after(*steps))


def test_a_mark_can_be_set_where_since_is_held_back_by_nothing_any_more() -> None:
    held_back = (*BEGUN, c.SetHold("h", at(5), None, b""), c.Retire(READER))
    assert after(*held_back, SET).since == MINIMUM


def test_a_marked_shard_can_be_finished() -> None:
    state = after(CREATE, SET, c.Finish())
    assert state.is_finished()
    assert not state.holds


def test_a_hold_of_that_name_with_another_value_is_a_hold() -> None:
    state = after(*BEGUN, c.SetHold(MARK, MINIMUM, None, b"mine"), c.DowngradeSince(READER, at(5), SeqNo(1), 99))
    assert (state.since, layer_of(state)) == (MINIMUM, "")
    assert f"hold {MARK}" in keepers(state)
