"""A group of commands of which one may never be committed: that one is answered so, and the others are applied."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import groups
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import GROUPS
from persist_lib.core.state import State
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_state
from persist_lib.errors import InvariantViolated
from persist_lib.ids import SeqNo, format_writer_id
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
