"""Which commands no later state accepts: just before the edge they may still be committed, and at it never again."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.formats import REMEMBERS_OUTCOMES
from persist_lib.core.state import Outcome, Rollup, State, Writer
from persist_lib.frontier import TOP, at
from persist_lib.ids import SeqNo
from tests.unit.core.core_shard import SCHEMA, WRITER, batch
from tests.unit.core.test_look import PART, ROLLUPS

TOKEN = b"token"
MARK = Outcome(b"", SeqNo(7), at(3))
STATE = State(
    schemas=(SCHEMA,), trace=(batch(0, 5),), writers={WRITER: Writer("ingest", 2**62)}, rollups=ROLLUPS,
    format=REMEMBERS_OUTCOMES, outcomes=(MARK,),
)  # fmt: skip
CLOSED = msgspec.structs.replace(batch(5, 6), upper=TOP)
ROLLUP = Rollup(PART, 5, bytes(16))


@pytest.mark.parametrize(
    ("command", "is_out"),
    [
        (c.CompareAndAppend(WRITER, TOKEN, batch(4, 6), 0), True),
        (c.CompareAndAppend(WRITER, TOKEN, batch(5, 6), 0), False),
        (c.Append(WRITER, TOKEN, batch(3, 5), 0), True),
        (c.Append(WRITER, TOKEN, batch(3, 6), 0), False),
        (c.AddRollup(WRITER, SeqNo(40), ROLLUP), True),
        (c.AddRollup(WRITER, SeqNo(41), ROLLUP), False),
        (c.Upgrade(REMEMBERS_OUTCOMES), True),
        (c.Upgrade(REMEMBERS_OUTCOMES + 1), False),
        (c.EvolveSchema(-1, SCHEMA), True),
        (c.EvolveSchema(0, SCHEMA), False),
    ],
)
def test_a_command_is_out_from_the_edge_on(command: c.Command, is_out: bool) -> None:
    assert is_out_for_ever(STATE, command) is is_out


@pytest.mark.parametrize(
    ("changes", "since", "is_out"),
    [
        ({}, 7, False),
        ({}, 6, True),
        ({"trace": (batch(0, 5), CLOSED)}, 7, True),
        ({"outcomes": (MARK, Outcome(TOKEN, SeqNo(9), at(5)))}, 8, True),
        ({"outcomes": (MARK, Outcome(TOKEN, SeqNo(9), at(5)))}, 9, False),
        ({"outcomes": (MARK, Outcome(b"another", SeqNo(9), at(5)))}, 8, False),
    ],
)
def test_an_append_at_the_next_time_is_out_once_it_is_there_or_forgotten_or_the_shard_is_closed(
    changes: dict[str, object], since: int, is_out: bool
) -> None:
    state = msgspec.structs.replace(STATE, **changes)
    assert is_out_for_ever(state, c.AppendNow(WRITER, TOKEN, batch(5, 6), 0, since=SeqNo(since))) is is_out
