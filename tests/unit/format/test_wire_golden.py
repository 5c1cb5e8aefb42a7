"""Messages between clients and servers of the first version, as files: every later release reads them.

A fleet is upgraded one process at a time, so that older clients ask newer servers, and the other way round. The files
were written once, by this module run as a program, and are never written again.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.errors import Indeterminate
from persist_lib.format import wire
from persist_lib.frontier import TOP, at
from persist_lib.ids import PartKey, SeqNo
from persist_lib.location.api import Newest, Row
from persist_lib.server.rpc_calls import RAW
from tests.unit.format.test_log_rows import AT, BATCH, GOLDEN, OUTCOME, PENDING, PRODUCED, R1, ROLLUP, SCHEMA, W1, W2

COMMANDS: tuple[c.Command, ...] = (
    c.Create(SCHEMA, 4), c.RegisterWriter(W1, "maintenance", 60_000, "the loader ☃"),
    c.RegisterReader(R1, 60_000, "dashboard"), c.CompareAndAppend(W1, b"\x00one", BATCH, 60_000, ("nightly", 7), 5),
    c.Append(W2, b"two", msgspec.structs.replace(BATCH, parts=(AT,)), 1),
    c.Absorb(W1, b"three", BATCH, ((PENDING.key, 9),), 60_000), c.DiscardPending(((PENDING.key, 9),)),
    c.CloneReader(R1, R1, 60_000, "a copy"), c.Heartbeat((W1, R1), 60_000),
    c.DowngradeSince(R1, TOP, SeqNo(7), 60_000), c.SetHold("audit", at(7), None, b"\xff"),
    c.SetHold("audit", at(7), b"", b"x"), c.ReleaseHold("audit", b"x"), c.ForgetProducer("nightly", 7),
    c.SetRetention(5), c.SetRetention(None), c.Expire(0), c.Retire(W1), c.ApplyCompaction(W1, ((3, 4), (4, 5)), BATCH),
    c.AddRollup(W1, SeqNo(8), ROLLUP), c.ForgetGarbage((PartKey("w/1"),)), c.ForgetRetired((W1,)),
    c.EvolveSchema(2, SCHEMA), c.Upgrade(4), c.Finish(),
)  # fmt: skip
REFUSALS: tuple[r.Refusal, ...] = (
    r.Finished(), r.Exists("s"), r.Malformed("why"), r.NotLive((W1,)), r.InvalidBounds("why"),
    r.WrongUpper(at(5), TOP), r.OlderFormat(3, 4), r.AlreadyDone(), r.AlreadyDone(OUTCOME),
    r.AlreadyProduced("nightly", 7, PRODUCED), r.TooManyProducers("nightly", 1000), r.WrongSequence("nightly", 7, None),
    r.NeedsFormat("a group", 4, 3), r.InlineFull(5), r.BelowSince(at(1), at(2)), r.WrongOpaque("audit", b"", None),
    r.NotEquivalent("why"), r.InputsGone(((3, 4),)), r.TooOld(SeqNo(7), SeqNo(8)), r.Unknown(("w/1",)),
    r.WrongSchema(2, "why"), r.Held(("audit",)), r.StillPending(PENDING.key, at(7), at(5)), r.NothingDue(),
)  # fmt: skip
ROWS = [Row(SeqNo(7), b"\x00row"), Row(SeqNo(8), b"\xff")]
GIVEN: dict[str, Any] = {
    "now": None, "head": "s", "scan": ("s", SeqNo(7), 1000),
    "compare_and_set": ("s", Newest(SeqNo(7), b"\x00start"), b"row"),
    "compare_and_set_many": {"s": (None, b"row"), "t": (Newest(SeqNo(7), b"start"), b"\xff")},
    "truncate": ("s", SeqNo(7)), "rewind": ("s", SeqNo(7), Newest(SeqNo(9), b"start")),
    "list_keys": None, "heads": None,
}  # fmt: skip
ANSWERS: dict[str, tuple[Any, Any]] = {
    "now": (type(None), None), "head": (Row | None, ROWS[0]), "scan": (tuple[list[Row], bool], (ROWS, True)),
    "compare_and_set": (bool, True), "compare_and_set_many": (bool, False), "truncate": (int, 7), "rewind": (int, 7),
    "list_keys": (list[str], ["s", "t ☃"]), "heads": (dict[str, SeqNo], {"s": SeqNo(7)}),
}  # fmt: skip
NOW = 1_700_000_000_123


def commit() -> wire.Commit:
    return wire.Commit(b"token\x00", True, tuple(("s", SeqNo(7), *wire.encode_command(one)) for one in COMMANDS))


def answers() -> list[wire.Answer]:
    done = wire.Answer(SeqNo(8), True, None, tuple((row.seqno, row.data) for row in ROWS))
    return [done, *(wire.Answer(SeqNo(7), False, wire.encode_refusal(one)) for one in REFUSALS)]


def golden(name: str) -> bytes:
    return (GOLDEN / f"wire_{name}_v1.bin").read_bytes()


def test_commands_of_the_first_version_are_understood() -> None:
    (found, timeout_s) = wire.decode_call(golden("commit"), wire.Commit)
    assert (found.token, found.is_repeated, timeout_s) == (b"token\x00", True, 1.5)
    assert tuple(wire.decode_command(*one[2:]) for one in found.commands) == COMMANDS
    assert {one[:2] for one in found.commands} == {("s", SeqNo(7))}


def test_answers_of_the_first_version_are_understood() -> None:
    found, now = wire.decode_reply(golden("commit_answer"), list[wire.Answer])
    assert now == NOW
    assert tuple(wire.decode_refusal(*one.refusal) for one in found[1:]) == REFUSALS
    assert (found[0].seqno, found[0].is_committed, found[0].refusal) == (SeqNo(8), True, None)
    assert [Row(*row) for row in found[0].rows] == ROWS


@pytest.mark.parametrize("name", GIVEN)
def test_calls_of_the_first_version_are_understood(name: str) -> None:
    calls, told = msgspec.msgpack.decode(golden("calls")), msgspec.msgpack.decode(golden("answers"))
    assert wire.decode_call(calls[name], RAW[name].kind) == (GIVEN[name], 1.5)
    kind, value = ANSWERS[name]
    assert wire.decode_reply(told[name], kind) == (value, NOW)


def test_an_error_of_the_first_version_is_understood() -> None:
    with pytest.raises(Indeterminate, match="perhaps") as told:
        wire.decode_reply(golden("error"), str)
    assert told.value.fields == {"token": b"t", "shard": "s"}


def test_every_command_and_refusal_of_the_first_version_is_in_the_files() -> None:
    """Those that came later are in files of their own, or in none: an older program refuses them by their names."""
    assert {type(one).__name__ for one in COMMANDS} <= wire.COMMANDS.keys()
    assert {type(one).__name__ for one in REFUSALS} <= wire.REFUSALS.keys()
    assert len({type(one) for one in COMMANDS}) == 23
    assert len({type(one) for one in REFUSALS}) == 23


if __name__ == "__main__":
    files = {
        "commit": wire.encode_call(commit(), 1.5),
        "commit_answer": wire.encode_reply(answers(), NOW),
        "calls": msgspec.msgpack.encode({name: wire.encode_call(given, 1.5) for name, given in GIVEN.items()}),
        "answers": msgspec.msgpack.encode({name: wire.encode_reply(one, NOW) for name, (_, one) in ANSWERS.items()}),
        "error": wire.encode_error(Indeterminate("perhaps", token=b"t", shard="s"), NOW),
    }
    for name, data in files.items():
        if not (path := GOLDEN / f"wire_{name}_v1.bin").exists():
            path.write_bytes(data)
