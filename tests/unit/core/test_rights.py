"""Which command needs which right."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest

from persist_lib.core import commands as c
from persist_lib.core.rights import ALL, ANY, APPEND, MAINTAIN, READ, RIGHTS, TABLE, WRITE, Right, missing, needed_for
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, WriterId, format_reader_id, format_writer_id
from tests.unit.core.rights_of_commands import every_command_with_its_rights, is_allowed

W, R = format_writer_id(1), format_reader_id(1)


def test_every_command_of_the_core_has_its_line_and_there_is_no_other() -> None:
    assert set(TABLE) == set(get_args(c.Command))


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (c.RegisterWriter(W, "ingest", 0), APPEND),
        (c.RegisterWriter(W, "maintenance", 0), MAINTAIN),
        (c.Heartbeat((W,), 0), WRITE),
        (c.Heartbeat((R,), 0), READ),
        (c.Heartbeat((R, W, R), 0), (*WRITE, *READ)),
        (c.Heartbeat((), 0), ANY),
        (c.Heartbeat(("x",), 0), ALL),
        (c.Retire(W), WRITE),
        (c.Retire(R), READ),
        (c.Expire(2**40), MAINTAIN),
        (c.DowngradeSince(R, MINIMUM, SeqNo(1), 0), READ),
        (c.Finish(), MAINTAIN),
    ],
)
def test_some_commands_need_a_right_by_what_they_hold(command: c.Command, needed: object) -> None:
    assert set(needed_for(command)) == set(needed)  # type: ignore[call-overload]


CASES = every_command_with_its_rights()


@pytest.mark.parametrize(("name", "command", "allowed"), CASES, ids=[name for name, *_ in CASES])
def test_each_command_with_each_set_of_rights(name: str, command: c.Command, allowed: str) -> None:
    """What is allowed is written down a second time, in the letters of rights, apart from the table."""
    for count in range(4):
        for some in combinations(RIGHTS, count):
            given: frozenset[Right] = frozenset(some)
            may = not missing(needed_for(command, lambda hold: hold == "mine"), given)
            assert may == is_allowed(allowed, given), (name, given)


def test_the_rights_are_tried_with_every_command() -> None:
    assert {type(command) for _, command, _ in CASES} == set(get_args(c.Command))


def test_no_right_includes_another_and_nothing_is_free() -> None:
    for line in TABLE.values():
        if isinstance(found := line.needed, tuple):
            assert missing(found, frozenset()) == found
            assert not missing(found, frozenset(RIGHTS))
    retire = needed_for(c.Retire(WriterId(W)))
    assert missing(retire, frozenset({"read"})) == retire
    assert missing(ALL, frozenset({"read", "append"})) == MAINTAIN
