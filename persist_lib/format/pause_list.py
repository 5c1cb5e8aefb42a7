"""How the pauses and rules of a location are stored: one object with all of them, a new one for each change; and how
what was spent by rules with a budget is.

    -pause/<number, 20 digits>
    -spent/<number, 20 digits>

The greatest number is the list in force. A key is written once, so of two that change it at once one has lost, and
reads again. It is a record of what people want: what cannot be read is an error, and no duty begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from persist_lib.core.budgets import Spent
from persist_lib.core.pauses import Pause
from persist_lib.core.plan.retention import last_of
from persist_lib.core.rules import Rule
from persist_lib.format.frame import decode_framed, framed, has_magic, version_of

PREFIX = "-pause/"
MAGIC = b"PSTp"
VERSION, WITH_RULES, MORE_RULES = 1, 2, 3
FIRST_FIELDS = frozenset(
    {"pattern", "retention", "compaction_weight", "compaction_advance", "compaction_ahead", "quiet"}
)
"""What rules of the second format have. A release that knows no more must not pass by what others say."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[Pause, ...])


class Wishes(NamedTuple):
    """What people want of upkeep in a location."""

    pauses: tuple[Pause, ...] = ()
    rules: tuple[Rule, ...] = ()


def encode_wishes(wishes: Wishes) -> bytes:
    """The bytes of a list: in the oldest format that can say it, so that older releases read what they know."""
    if not wishes.rules:
        return framed(MAGIC, VERSION, _encoder.encode(wishes.pauses))
    said = {name for rule in wishes.rules for name, value in msgspec.structs.asdict(rule).items() if value is not None}
    is_last = any(last_of(rule.retention) is not None for rule in wishes.rules)
    is_first = said <= FIRST_FIELDS and not is_last
    return framed(MAGIC, WITH_RULES if is_first else MORE_RULES, _encoder.encode(wishes))


_with_rules: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Wishes)
EMPTY_SIZE = len(encode_wishes(Wishes()))
"""How long the list of none is. No other is as short, so a listing alone tells that nothing is wanted."""


def decode_wishes(data: bytes, key: str) -> Wishes:
    """The list that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    said = version_of(data) if has_magic(data, MAGIC) else MORE_RULES
    version = said if said in (VERSION, WITH_RULES) else MORE_RULES
    has_rules = version != VERSION
    decoder = _with_rules if has_rules else _decoder
    found: Any = decode_framed(
        data, key, MAGIC, version, decoder, what="the list of pauses that was written there", kind="pauses",
        then=". So no duty begins",
    )  # fmt: skip
    return found if has_rules else Wishes(found)


SPENT_PREFIX = "-spent/"
SPENT_MAGIC, SPENT_VERSION = b"PSTb", 1
_spent: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Spent)


def encode_spent(spent: Spent) -> bytes:
    """The bytes of what was spent."""
    return framed(SPENT_MAGIC, SPENT_VERSION, _encoder.encode(spent))


def decode_spent(data: bytes, key: str) -> Spent:
    """What was spent. Raises Corrupt or NewerFormat, which name `key`."""
    found: Spent = decode_framed(
        data, key, SPENT_MAGIC, SPENT_VERSION, _spent, what="what was spent of budgets", kind="budgets",
        then=". So no compaction begins where a rule has one",
    )  # fmt: skip
    return found
