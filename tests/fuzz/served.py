"""What goes between a shard server and its clients, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from persist_lib.errors import PersistError
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.server.rpc_calls import ASKED_OF_DEBTS, ASKED_OF_LOSING, RAW
from tests.fuzz.stored import GOLDEN
from tests.fuzz.target import Target
from tests.unit.format import test_wire_golden as golden

KINDS: Sequence[Any] = (wire.Commit, ASKED_OF_DEBTS, ASKED_OF_LOSING, *(raw.kind for raw in RAW.values()))
ANSWERS: Sequence[Any] = (list[wire.Answer], *(kind for kind, _ in golden.ANSWERS.values()))
NAMES = (sorted(wire.COMMANDS), sorted(wire.REFUSALS))


def _call(data: bytes) -> Any:
    """The first byte says which call it is."""
    kind = KINDS[(data[0] if data else 0) % len(KINDS)]
    given, _ = wire.decode_call(data[1:], kind)
    if isinstance(given, wire.Commit):
        return [wire.decode_command(*one[2:]) for one in given.commands]
    return given


def _call_seeds() -> list[bytes]:
    given = [golden.commit(), ("s", {"s": ["garbage"]}, 5, 1.5), ("s", None), *(golden.GIVEN[name] for name in RAW)]
    return [bytes([n]) + wire.encode_call(one, 1.5) for n, one in enumerate(given)]


def _reply(data: bytes) -> Any:
    kind = ANSWERS[(data[0] if data else 0) % len(ANSWERS)]
    found, _ = wire.decode_reply(data[1:], kind)
    if data[:1] == b"\0":
        return [None if one.refusal is None else wire.decode_refusal(*one.refusal) for one in found]
    return found


def _reply_seeds() -> list[bytes]:
    given = [golden.answers(), *(answer for _, answer in golden.ANSWERS.values())]
    errors = [bytes([1]) + (GOLDEN / "wire_error_v1.bin").read_bytes()]
    return [bytes([n]) + wire.encode_reply(one, golden.NOW) for n, one in enumerate(given)] + errors


def _command(data: bytes) -> Any:
    """The first byte says which command it is; its fields are the rest."""
    name = NAMES[0][(data[0] if data else 0) % len(NAMES[0])]
    return wire.decode_command(name, msgspec.Raw(data[1:]))


def _command_bytes(command: Any) -> bytes:
    name, fields = wire.encode_command(command)
    return bytes([NAMES[0].index(name)]) + bytes(fields)


def _refusal(data: bytes) -> Any:
    name = NAMES[1][(data[0] if data else 0) % len(NAMES[1])]
    return wire.decode_refusal(name, msgspec.Raw(data[1:]))


def _refusal_bytes(refusal: Any) -> bytes:
    name, fields = wire.encode_refusal(refusal)
    return bytes([NAMES[1].index(name)]) + bytes(fields)


def _follow(data: bytes) -> Any:
    said = wire.decode_follow(data)
    return said.begun, said.ended


def _pushed(data: bytes) -> Any:
    said = wire.decode_pushed(data)
    return said.news, said.ended


def _pushed_seeds() -> list[bytes]:
    news = wire.News("s", ((SeqNo(5), b"row"),), SeqNo(6))
    return [wire.encode_pushed((news,), ("t",))]


TARGETS: Sequence[Target] = (
    Target("call", _call, _call_seeds),
    Target("reply", _reply, _reply_seeds, errors=(PersistError, wire.Unread)),
    Target("command", _command, lambda: [_command_bytes(one) for one in golden.COMMANDS], encode=_command_bytes),
    Target("refusal", _refusal, lambda: [_refusal_bytes(one) for one in golden.REFUSALS], encode=_refusal_bytes),
    Target("follow", _follow, lambda: [wire.encode_follow(("a", "b"), ("c",))],
           encode=lambda said: wire.encode_follow(*said)),
    Target("pushed", _pushed, _pushed_seeds, encode=lambda said: wire.encode_pushed(*said)),
)  # fmt: skip
