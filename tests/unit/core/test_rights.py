"""Which command needs which right."""

from __future__ import annotations

from typing import get_args

import pytest

from persist_lib.core import commands as c
from persist_lib.core.rights import ALL, ANY, APPEND, BY_COMMAND, MAINTAIN, READ, RIGHTS, WRITE, missing, needed_for
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, WriterId, format_reader_id, format_writer_id

W, R = format_writer_id(1), format_reader_id(1)


def test_every_command_of_the_core_has_its_line_and_there_is_no_other() -> None:
    assert set(BY_COMMAND) == set(get_args(c.Command))


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


def test_no_right_includes_another_and_nothing_is_free() -> None:
    for found in BY_COMMAND.values():
        if isinstance(found, tuple):
            assert missing(found, frozenset()) == found
            assert not missing(found, frozenset(RIGHTS))
    retire = needed_for(c.Retire(WriterId(W)))
    assert missing(retire, frozenset({"read"})) == retire
    assert missing(ALL, frozenset({"read", "append"})) == MAINTAIN
