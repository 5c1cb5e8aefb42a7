"""What goes between a server and its clients: each value comes out as it went in, and what is not known is refused."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.state import Outcome, Produced
from persist_lib.core.transitions import change
from persist_lib.errors import Indeterminate, InvalidUsage, NewerFormat, PersistError, TimedOut
from persist_lib.format import wire
from persist_lib.frontier import TOP, at
from persist_lib.ids import SeqNo
from tests.properties.core_commands import Commands
from tests.properties.histories import CREATED_4, CREATED_6, CREATED_12, Shard


def test_every_command_and_every_refusal_comes_out_as_it_went_in():
    seen: set[str] = set()
    refused: set[str] = set()
    for seed in range(12):
        shard, commands = Shard(), Commands(Random(seed), 0.7)
        shard.run(CREATED_12 if seed == 10 else CREATED_6 if seed % 2 else CREATED_4)
        for _ in range(120):
            command = commands.any(shard.state, shard.next_seqno)
            answer = change(shard.state, shard.next_seqno, command)
            try:
                name, fields = wire.encode_command(command)
            except InvalidUsage:
                continue  # half a surrogate pair, or a number that is too large: it never leaves its sender
            numbers = [getattr(command, "expected", 0), (getattr(command, "producer", None) or ("", 0))[1]]
            if any(type(number) is bool for number in numbers):
                continue  # a truth value counts as a number here, and not over there
            assert wire.decode_command(name, fields) == command
            seen.add(name)
            if not isinstance(answer, StateDiff):
                assert wire.decode_refusal(*wire.encode_refusal(answer)) == answer
                refused.add(type(answer).__name__)
            shard.run(command)
    assert wire.COMMANDS.keys() - seen <= {"Finish", "Create"}
    for refusal in (
        r.InlineFull(5), r.Finished(), r.TooManyProducers("x", 1000), r.AlreadyDone(Outcome(b"t", SeqNo(4), TOP)),
        r.AlreadyProduced("x", 4, Produced(5, SeqNo(4), at(9), 1)), r.WrongOpaque("h", None, b"x"),
    ):  # fmt: skip
        assert wire.decode_refusal(*wire.encode_refusal(refusal)) == refusal


def test_what_is_not_known_is_refused_and_never_nothing():
    fields = msgspec.Raw(msgspec.msgpack.encode({"distance": 5, "levitation": 1}))
    with pytest.raises(NewerFormat, match="levitation"):
        wire.decode_command("SetRetention", fields)
    with pytest.raises(NewerFormat, match="Levitate"):
        wire.decode_command("Levitate", fields)
    with pytest.raises(NewerFormat, match="Levitated"):
        wire.decode_refusal("Levitated", fields)
    with pytest.raises(NewerFormat, match="version 2"):
        wire.decode_call(msgspec.msgpack.encode([2, "x", 5]), str)
    with pytest.raises(wire.Unread, match="version 2") as told:
        wire.decode_reply(msgspec.msgpack.encode([2, 0, "x"]), str)
    assert isinstance(told.value.error, NewerFormat)
    with pytest.raises(InvalidUsage, match="cannot be read"):
        wire.decode_call(msgspec.msgpack.encode([1, "x", 5, "more"]), str)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93", b"\x93\x01\xa1x\xa1y", b"\x81" * 2000, bytes(100), b"\x93\x01\xc4\x01\xff\x05"]
)
def test_bytes_that_are_no_call_are_told_as_such(data):
    with pytest.raises(InvalidUsage, match="cannot be read"):
        wire.decode_call(data, str)
    with pytest.raises(InvalidUsage, match="cannot be read"):
        wire.decode_command("SetHold", msgspec.Raw(data))


def test_a_command_with_a_field_of_a_wrong_type_is_told_as_such():
    wrong: object
    for wrong in ({"distance": "5"}, {"distance": 1.5}, {}, []):
        with pytest.raises(InvalidUsage, match="cannot be read"):
            wire.decode_command("SetRetention", msgspec.Raw(msgspec.msgpack.encode(wrong)))


@pytest.mark.parametrize(
    "error", [Indeterminate("perhaps", token=b"t", shard="s"), TimedOut("no", timeout_s=1.5), InvalidUsage("wrong")]
)
def test_errors_are_the_same_on_the_other_side(error):
    with pytest.raises(type(error)) as told:
        wire.decode_reply(wire.encode_error(error, 7), str)
    assert (told.value.message, told.value.fields) == (error.message, error.fields)


@pytest.mark.parametrize("name", ["Levitated", "HIDDEN", "redacted", "PersistError", "__doc__"])
def test_an_error_that_is_not_known_promises_nothing(name):
    data = msgspec.msgpack.encode([1, 0, None, [name, "what it says", {}]])
    with pytest.raises(PersistError, match="what it says") as told:
        wire.decode_reply(data, str)
    assert type(told.value) is Indeterminate or name == "PersistError"


def test_values_come_out_as_they_went_in():
    assert wire.decode_call(wire.encode_call(("s", 5), 1.5), tuple[str, int]) == (("s", 5), 1.5)
    assert wire.decode_reply(wire.encode_reply([b"x"], 9), list[bytes]) == ([b"x"], 9)
    command = c.SetRetention(5)
    commit = wire.Commit(b"t", False, (("s", SeqNo(4), *wire.encode_command(command)),))
    (found, _) = wire.decode_call(wire.encode_call(commit, 1), wire.Commit)
    assert wire.decode_command(*found.commands[0][2:]) == command


def test_rows_are_sent_in_pages_of_at_least_one():
    assert wire.rows_that_fit([5, 5], int) == 2
    assert wire.rows_that_fit([wire.PAGE_BYTES + 1, 5], int) == 1
    assert wire.rows_that_fit([1, wire.PAGE_BYTES, 5], int) == 1
    assert wire.rows_that_fit([], int) == 0
