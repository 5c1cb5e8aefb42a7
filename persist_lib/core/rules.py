"""Rules: how shards and tables of some names are looked after, as a value that a location keeps.

A rule names shards and tables by a pattern, as a pause does, and says some things about them. Of several that say the
same thing about a name, the most specific one counts: one without wildcards, then the one with the longest fixed text.
What a shard says of itself (`set_retention`) counts over rules, and rules over the settings of a program.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from persist_lib.arguments import did_you_mean, parse_number, parse_text, shown
from persist_lib.core.pauses import WILD, Pause
from persist_lib.core.plan.compaction import Policy, parse_retention
from persist_lib.errors import InvalidUsage

WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
DAY_MS, MINUTE_MS = 86_400_000, 60_000


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How what has a name of this pattern is looked after. A field that is None says nothing.

    `retention` is how much history a shard without a retention of its own keeps: times behind upper, or text such
    as "7 days" where times are a clock. `compaction_weight`, `compaction_advance` and `compaction_ahead` are as in
    the settings. `quiet` are windows of the day, UTC, in which no duty begins: "08:00-18:00", or "22:00-06:00" over
    midnight.
    """

    pattern: str
    retention: int | str | None = None
    compaction_weight: float | None = None
    compaction_advance: float | None = None
    compaction_ahead: float | None = None
    quiet: tuple[str, ...] | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern,)

    @property
    def specificity(self) -> tuple[bool, int]:
        """The greater, the sooner it counts."""
        return WILD.isdisjoint(self.pattern), sum(letter not in WILD for letter in self.pattern)


SHARES = ("compaction_weight", "compaction_advance", "compaction_ahead")
FIELDS = tuple(name for name in Rule.__struct_fields__ if name != "pattern")


class Told(NamedTuple):
    """What a rule says of a name, and the pattern of that rule."""

    value: Any
    pattern: str

    @property
    def shown(self) -> str:
        """The value for people."""
        return ", ".join(self.value) if isinstance(self.value, tuple) else str(self.value)


def told(rules: Iterable[Rule]) -> dict[str, Told]:
    """What the most specific of these rules, which all match a name, say of it."""
    found: dict[str, Told] = {}
    for rule in sorted(rules, key=lambda one: one.specificity):
        found |= {name: Told(value, rule.pattern) for name in FIELDS if (value := getattr(rule, name)) is not None}
    return found


def quiet_at(quiet: Told | None, now: int) -> Pause | None:
    """The pause that a window makes of `now` (ms of the store's clock); None outside of all windows."""
    if quiet is None:
        return None
    for window in quiet.value:
        hours = [int(text) for text in WINDOW.fullmatch(window).groups()]  # type: ignore[union-attr]
        begins, ends = (hours[0] * 60 + hours[1]) * MINUTE_MS, (hours[2] * 60 + hours[3]) * MINUTE_MS
        since = (now - begins) % DAY_MS
        if since < (ends - begins) % DAY_MS:
            set_ms, owner, reason = now - since, f"the rule {quiet.pattern!r}", f"it is quiet {window} UTC"
            return Pause((quiet.pattern,), (), owner, reason, set_ms, set_ms + (ends - begins) % DAY_MS)
    return None


def ruled(policy: Policy, said: Mapping[str, Told]) -> Policy:
    """A policy of the settings, with what rules say in its place."""
    names = {**{name: name.removeprefix("compaction_") for name in SHARES}, "retention": "retention"}
    return msgspec.structs.replace(policy, **{names[name]: one.value for name, one in said.items() if name in names})


def parse_rules(given: object) -> tuple[Rule, ...]:
    """Rules as mappings of their fields, or the text of a TOML file with `[[rule]]`. Raises InvalidUsage."""
    if isinstance(given, str):
        try:
            found = tomllib.loads(given)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InvalidUsage(f"rules are TOML with [[rule]]: {error}. Nothing was changed") from error
        if unknown := sorted(found.keys() - {"rule"}):
            raise InvalidUsage(f"a file of rules has [[rule]] alone: got {shown(unknown[0])}. Nothing was changed")
        given = found.get("rule", [])
    if not isinstance(given, (list, tuple)):
        raise InvalidUsage(f"rules are a list of mappings with a pattern: got {shown(given)}", argument="rules")
    rules = tuple(_parse(one) for one in given)
    patterns = [one.pattern for one in rules]
    if twice := sorted({one for one in patterns if patterns.count(one) > 1}):
        raise InvalidUsage(f"there are several rules for {twice[0]!r}: make one of them. Nothing was changed")
    return rules


def _parse(given: object) -> Rule:
    if isinstance(given, Rule):
        given = msgspec.structs.asdict(given)
    if not isinstance(given, Mapping):
        raise InvalidUsage(f"a rule is a mapping with a pattern: got {shown(given)}", argument="rules")
    if unknown := [name for name in given if name not in Rule.__struct_fields__]:
        meant = did_you_mean(str(unknown[0]), FIELDS)
        raise InvalidUsage(f"a rule has no {shown(unknown[0])}. {meant}It has {', '.join(FIELDS)}. Nothing was changed")
    pattern = parse_text(given.get("pattern"), "a rule's pattern", 500)
    if not pattern:
        raise InvalidUsage("a rule has a pattern, as in pattern = 'orders*'. Nothing was changed", argument="rules")
    values = {name: value for name in FIELDS if (value := given.get(name)) is not None}
    if "retention" in values:
        values["retention"] = parse_retention(values["retention"], f"retention of the rule {pattern!r}")
    for name in SHARES:
        if name in values:
            values[name] = parse_number(values[name], f"{name} of the rule {pattern!r}")
    if "quiet" in values:
        values["quiet"] = _windows(values["quiet"], pattern)
    return Rule(pattern, **values)


def _windows(given: object, pattern: str) -> tuple[str, ...]:
    windows: Sequence[object] = given if isinstance(given, (list, tuple)) else [given]
    for one in windows:
        match = WINDOW.fullmatch(one) if isinstance(one, str) else None
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise InvalidUsage(
                f"quiet of the rule {pattern!r} is windows of the day as '08:00-18:00', UTC: got {shown(one)}. Nothing "
                "was changed"
            )
    return tuple(str(one) for one in windows)
