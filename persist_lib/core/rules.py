"""Rules: how shards and tables of some names are looked after, as a value that a location keeps.

A rule names shards and tables by a pattern, as a pause does, and says some things about them. Of several that say the
same thing about a name, the most specific one counts: one without wildcards, then the one with the longest fixed text.
What a shard says of itself (`set_retention`) counts over rules, and rules over the settings of a program.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from persist_lib.arguments import UNPARSED, did_you_mean, parse_integer, parse_number, parse_seconds, parse_text, shown
from persist_lib.core.pauses import WILD, ByRule, Pause
from persist_lib.core.plan.clusters import by_name
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.retention import parse_retention, retention_of
from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage
from persist_lib.times import Times

WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
DAY_MS, MINUTE_MS = 86_400_000, 60_000
DEFAULT = "default"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How what has a name of this pattern is looked after. A field that is None says nothing.

    `retention` is how much history a shard or collection without a retention of its own keeps: times behind upper, or
    text such as "7 days" where times are a clock, or, of a lone shard, "last 10": what can be read since the last ten
    appends began.
    `compaction_weight`, `compaction_advance` and `compaction_ahead` are as in the settings. `cluster` is a column by
    whose values compaction puts the rows of large batches into clusters, so that filters on it leave most of them out.
    `quiet` are windows of the day, UTC, in which no duty begins: "08:00-18:00", or "22:00-06:00" over midnight.

    `bytes_day` and `dollars_day` are budgets: once compaction of all that a rule says it of has begun to read and
    write so much on a day, UTC, none begins there until the next day. `order` is which of these shards compaction takes
    first: those with most "debt" (None), or those that a survey saw move last ("newest") or longest ago ("coldest").
    `engine` and `verify_reads` are as in the configuration of Dagster's runs, which counts over them.

    `still`, `kept` and `garbage` are from when on something is wrong, as in `health.Limits`.
    """

    pattern: str
    retention: int | str | None = None
    compaction_weight: float | None = None
    compaction_advance: float | None = None
    compaction_ahead: float | None = None
    quiet: tuple[str, ...] | None = None
    bytes_day: int | None = None
    dollars_day: float | None = None
    order: str | None = None
    engine: str | None = None
    verify_reads: int | None = None
    still: float | str | None = None
    kept: int | None = None
    garbage: int | None = None
    cluster: str | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern,)

    @property
    def shown(self) -> str:
        """What it says, for people."""
        said = ((name, getattr(self, name)) for name in FIELDS)
        return "; ".join(f"{name} {Told(value, '').shown}" for name, value in said if value is not None)

    @property
    def specificity(self) -> tuple[bool, int]:
        """The greater, the sooner it counts."""
        return WILD.isdisjoint(self.pattern), sum(letter not in WILD for letter in self.pattern)


SHARES = ("compaction_weight", "compaction_advance", "compaction_ahead")
BUDGETS = ("bytes_day", "dollars_day")
FIELDS = tuple(name for name in Rule.__struct_fields__ if name != "pattern")
ORDERS, ENGINES = ("debt", "newest", "coldest"), ("auto", "spark", "local")


class Told(NamedTuple):
    """What a rule says of a name, and the pattern of that rule."""

    value: Any
    pattern: str

    @property
    def shown(self) -> str:
        """The value for people."""
        if isinstance(self.value, float):
            return f"{self.value:g}"
        return ", ".join(self.value) if isinstance(self.value, tuple) else str(self.value)

    @property
    def source(self) -> str:
        """Where the value is from."""
        return f"the rule {self.pattern!r}"


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
            set_ms, reason = now - since, f"it is quiet {window} UTC"
            return ByRule((quiet.pattern,), (), quiet.source, reason, set_ms, set_ms + (ends - begins) % DAY_MS)
    return None


def ruled(policy: Policy, said: Mapping[str, Told]) -> Policy:
    """A policy of the settings, with what rules say in its place."""
    names = {
        **{name: name.removeprefix("compaction_") for name in SHARES},
        "retention": "retention",
        "cluster": "cluster",
    }
    return msgspec.structs.replace(policy, **{names[name]: one.value for name, one in said.items() if name in names})


def parse_rules(given: object) -> tuple[Rule, ...]:
    """Rules as mappings of their fields, or the text of a TOML file with `[[rule]]`. Raises InvalidUsage."""
    if isinstance(given, str):
        try:
            found = tomllib.loads(given)
        except UNPARSED as error:
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
    values = {
        name: parse(value, f"{name} of the rule {pattern!r}")
        for name, parse in PARSERS.items()
        if (value := given.get(name)) is not None
    }
    return Rule(pattern, **values)


def _windows(given: object, what: str) -> tuple[str, ...]:
    windows: Sequence[object] = given if isinstance(given, (list, tuple)) else [given]
    for one in windows:
        match = WINDOW.fullmatch(one) if isinstance(one, str) else None
        if match is None or match[1] + match[2] == match[3] + match[4]:
            says = f"{what} is windows of the day as '08:00-18:00', UTC: got {shown(one)}. Nothing was changed"
            raise InvalidUsage(says)
    return tuple(str(one) for one in windows)


def _one_of(words: Sequence[str]) -> Callable[[object, str], str]:
    def parse(given: object, what: str) -> str:
        if not isinstance(given, str) or given not in words:
            raise InvalidUsage(f"{what} must be {', '.join(words)}: got {shown(given)}. Nothing was changed")
        return given

    return parse


def _span(given: object, what: str) -> float | str:
    if not isinstance(given, str):
        return parse_seconds(given, what)
    Times("ms", int).distance(given, what)
    return given


def _column(given: object, what: str) -> str:
    name = parse_text(given, what, 500)
    if not name:
        raise InvalidUsage(f"{what} is the name of a column: got an empty text. Nothing was changed")
    return name


PARSERS: Mapping[str, Callable[[object, str], Any]] = {
    "retention": parse_retention, **dict.fromkeys(SHARES, parse_number), "quiet": _windows, "bytes_day": parse_integer,
    "dollars_day": parse_number, "order": _one_of(ORDERS), "engine": _one_of(ENGINES), "verify_reads": parse_integer,
    "still": _span, "kept": parse_integer, "garbage": parse_integer,
    "cluster": _column,
}  # fmt: skip
"""What checks each field, and says what is wrong with it."""


class Value(NamedTuple):
    """What upkeep goes by for one name: a field of rules, its value (None: nothing is said) and where that is from.

    `spent` is how much of a budget is spent today, for people.
    """

    field: str
    value: Any
    source: str
    spent: str = ""

    @property
    def shown(self) -> str:
        """The value for people."""
        return "none" if self.value is None else Told(self.value, "").shown


def values_of(
    said: Mapping[str, Told], state: State | None, given: Mapping[str, tuple[Any, str]],
    spent: Mapping[tuple[str, str], str],
) -> tuple[Value, ...]:  # fmt: skip
    """What upkeep goes by for a name of which rules say this, and where each value is from.

    `state` is that of the shard (None: it is a table of several). `given` are values and sources from the settings, and
    `spent` is what is spent of budgets, by field and pattern.
    """
    found: list[Value] = []
    for field in FIELDS:
        value, source = given.get(field, (None, DEFAULT))
        if field in said:
            value, source = said[field].value, said[field].source
        if field == "retention" and state is not None:
            if state.retention is not None:
                value, source = Times(state.times, int).show_distance(state.retention), "set-retention"
            elif value is not None and retention_of(state, value) is None:
                value, source = None, f"{source} does not apply: a layer's shard, or no clock"
        if field == "cluster" and value is not None and state is not None and (why := _no_clusters(state, value)):
            value, source = None, f"{source} does not apply: {why}"
        found.append(Value(field, value, source, spent.get((field, said[field].pattern), "") if field in said else ""))
    return tuple(found)


def _no_clusters(state: State, name: str) -> str | None:
    """Why a shard is not put in clusters by the column of this name; None if it is."""
    if state.pins:
        return "it is published, in one run"
    if state.schemas and by_name(state.schemas, name) is None:
        return f"{name} is not a column behind the first of the key, of whole numbers, dates or times"
    return None


def as_toml(rules: Iterable[Rule]) -> str:
    """The rules as the text of a file that `parse_rules` reads."""

    def line(name: str, value: object) -> str:
        return f"{name} = {msgspec.json.encode(value).decode()}"  # texts, numbers and lists are the same in TOML

    tables = [
        "\n".join(["[[rule]]", *(line(n, v) for n, v in msgspec.structs.asdict(one).items() if v is not None)])
        for one in rules
    ]
    return "\n\n".join(tables)
