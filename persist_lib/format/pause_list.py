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
from persist_lib.format.frame import Form, has_magic, version_of

PREFIX = "-pause/"
MAGIC = b"PSTp"
VERSION, WITH_RULES, MORE_RULES = 1, 2, 3
FIRST_FIELDS = frozenset(
    {"pattern", "retention", "compaction_weight", "compaction_advance", "compaction_ahead", "quiet"}
)
"""What rules of the second format have. A release that knows no more must not pass by what others say."""


class Wishes(NamedTuple):
    """What people want of upkeep in a location."""

    pauses: tuple[Pause, ...] = ()
    rules: tuple[Rule, ...] = ()


_TOLD = ("the list of pauses that was written there", "pauses", ". So no duty begins")
_FORMS = {
    version: Form[Any](MAGIC, version, type_, *_TOLD)
    for version, type_ in ((VERSION, tuple[Pause, ...]), (WITH_RULES, Wishes), (MORE_RULES, Wishes))
}


def encode_wishes(wishes: Wishes) -> bytes:
    """The bytes of a list: in the oldest format that can say it, so that older releases read what they know."""
    if not wishes.rules:
        return _FORMS[VERSION].encode(wishes.pauses)
    said = {name for rule in wishes.rules for name, value in msgspec.structs.asdict(rule).items() if value is not None}
    is_last = any(last_of(rule.retention) is not None for rule in wishes.rules)
    is_first = said <= FIRST_FIELDS and not is_last
    return _FORMS[WITH_RULES if is_first else MORE_RULES].encode(wishes)


EMPTY_SIZE = len(encode_wishes(Wishes()))
"""How long the list of none is. No other is as short, so a listing alone tells that nothing is wanted."""


def decode_wishes(data: bytes, key: str) -> Wishes:
    """The list that `data` holds. Raises Corrupt or NewerFormat, which name `key`."""
    version = version_of(data) if has_magic(data, MAGIC) else MORE_RULES
    found: Any = _FORMS.get(version, _FORMS[MORE_RULES]).decode(data, key)
    return Wishes(found) if version == VERSION else found


SPENT_PREFIX = "-spent/"
SPENT_FORM = Form[Spent](
    b"PSTb", 1, Spent, "what was spent of budgets", "budgets", ". So no compaction begins where a rule has one"
)
