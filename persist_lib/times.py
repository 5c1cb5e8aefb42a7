"""Times that people have: a schema may say that its times are a clock, and this reads and shows them.

Times are integers everywhere below the doors. In a schema with `times="ms"` (or `"us"`) they count the milliseconds
(microseconds) since 1970-01-01T00:00:00Z, up to the end of the year 9999. There a time may be given as

    an integer, also numpy's               1763812800000
    a datetime, a pandas Timestamp         with a zone; one without is refused, as its reader would have to guess
    a text: ISO 8601                       "2026-11-22T12:00Z", "2026-11-22 13:00+01:00"
    what cannot say its zone: it is UTC    numpy's datetime64, a date, "2026-11-22", "today", "yesterday"
    a text: relative to now                "now", "1 hour ago", "2 days 12 hours ago"

No time is ever rounded but an `as_of`, which is rounded down: the contents as of 12:00:00.0005 are those as of
12:00:00.000, as no update of a clock in milliseconds lies between.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from persist_lib.arguments import is_of, native, parse_integer, shown
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MAX_TIME, TOP, Antichain, parse_time

Unit: TypeAlias = Literal["ms", "us"]
TimeLike: TypeAlias = "int | str | dt.date | Any"
"""A time as callers write it, numpy's and pandas' included; see the module."""
UNITS: tuple[Unit, ...] = get_args(Unit)
PER_SECOND: dict[Unit, int] = {"ms": 1_000, "us": 1_000_000}
LONGEST = 100
"""Characters of a text that can be a time or a duration."""
END_S = 253_402_300_800
"""Where the year 10000 begins, in seconds since 1970. What is later cannot be shown as a datetime."""

_BEYOND_S = END_S + Fraction(1, 1_000_000)
"""The first seconds that no time has: frontiers may be at the end of the clock."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_DAY_S = 86_400
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[Tt ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))? ?(Z|z|UTC|[+-]\d\d:?\d\d)?)?", re.ASCII
)
_AGO = re.compile(r"(.+?)\s+ago", re.IGNORECASE)
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)(?:\s*,)?\s*(?:and\s+)?", re.ASCII | re.IGNORECASE)
_NAMES: dict[str, Fraction] = {
    name: Fraction(micros, 1_000_000)
    for names, micros in {
        "us µs microsecond microseconds": 1, "ms millisecond milliseconds": 1_000, "s sec secs second seconds": 10**6,
        "min mins minute minutes": 60 * 10**6, "h hr hrs hour hours": 3_600 * 10**6, "d day days": _DAY_S * 10**6,
        "w week weeks": 7 * _DAY_S * 10**6,
    }.items()
    for name in names.split()
}  # fmt: skip
"""No months and years, whose lengths differ, and no `m`, which means minutes to some and months to others."""
_NUMPY: dict[str, Fraction] = {
    "W": Fraction(7 * _DAY_S), "D": Fraction(_DAY_S), "h": Fraction(3_600), "m": Fraction(60), "s": Fraction(1),
    **{name: Fraction(1, 1_000 ** power) for power, name in enumerate(("ms", "us", "ns", "ps", "fs", "as"), 1)},
}  # fmt: skip
_WAYS = 'an integer, a datetime with a zone, or a text like "2026-11-22T12:00Z" or "1 hour ago"'
_LENGTHS = 'a number of units, a timedelta, or a text like "7 days", "1 hour" or "90 s"'


def once(clock_ms: Callable[[], int]) -> Callable[[], int]:
    """A clock that is read at most once, when it is first asked: all times of one call have the same now."""
    read: list[int] = []

    def ask() -> int:
        if not read:
            read.append(clock_ms())
        return read[0]

    return ask


class Times:
    """How one call reads and shows the times of one shard. `unit` is the schema's clock; None: plain integers.

    `clock_ms` answers now in milliseconds since 1970, and is asked at most once, by relative texts alone.
    """

    def __init__(self, unit: Unit | None, clock_ms: Callable[[], int]) -> None:
        self.unit = unit
        self._clock_ms = clock_ms

    @cached_property
    def now_ms(self) -> int:
        """When this call was made."""
        return self._clock_ms()

    def parse(self, value: object, what: str) -> int:
        """The time that `value` is, exactly. Raises InvalidUsage for anything else; the field `what` is the value."""
        return self._time(value, what, END_S, rounds=False)

    def as_of(self, value: object, what: str = "as_of") -> int:
        """The last time that is not after `value`: the contents as of both are the same."""
        return self._time(value, what, END_S, rounds=True)

    def start(self, value: object, what: str = "as_of") -> int:
        """After which time something begins: -1, before all times, for None, and for the -1 of contents without any."""
        found = native(value)
        if found is None or (isinstance(found, int) and not isinstance(found, bool) and found == -1):
            return -1
        return self.as_of(value, what)

    def frontier(self, value: object, what: str) -> Antichain:
        """The frontier at a time: a time, an Antichain, or `[]` for the empty one. It may be at the clock's end."""
        if isinstance(value, Antichain):
            if self.unit is not None and value.time is not None:
                self._time(value.time, what, _BEYOND_S, rounds=False)
            return value
        if isinstance(value, (list, tuple)) and len(value) < 2:
            return Antichain(self._time(value[0], what, _BEYOND_S, rounds=False)) if value else TOP
        return Antichain(self._time(value, what, _BEYOND_S, rounds=False))

    def distance(self, value: object, what: str) -> int:
        """A length of time as a number of times: an integer, or where times are a clock also a duration."""
        if self.unit is None:
            if is_duration(value):
                raise InvalidUsage(
                    f"{what} must be an integer, 0 or more: got {shown(value)}, and the times of this shard are plain "
                    f"integers, which have no days or seconds. {_CREATE}",
                    argument=what, value=value,
                )  # fmt: skip
            return parse_integer(value, what, 0, MAX_TIME)
        found = _duration(value, what)
        if found is None:
            return parse_integer(value, f"{what} ({_LENGTHS})", 0, MAX_TIME)
        ticks = found * PER_SECOND[self.unit]
        if ticks.denominator != 1:
            raise _lossy(self.unit, value, what)
        return parse_integer(int(ticks), what, 0, MAX_TIME)

    def show(self, found: int | Antichain | None) -> str:
        """A time or frontier for people. What is shown reads back as the same time."""
        if isinstance(found, Antichain):
            return show_frontier(found, self.unit)
        return "[]" if found is None else show_time(found, self.unit)

    def show_distance(self, distance: int) -> str:
        """A number of times for people: of a clock, in days, hours, minutes and seconds."""
        return f"{distance:,}" if self.unit is None else show_duration(distance, self.unit)

    def _time(self, value: object, what: str, end_s: int | Fraction, *, rounds: bool) -> int:
        if self.unit is None:
            if not is_moment(value):
                return parse_time(value, what)
            raise InvalidUsage(
                f"{what} must be an integer in [0, 2**64), got {shown(value)}. The times of this shard are plain "
                f"integers, not a clock. {_CREATE}",
                **{what: value},
            )  # fmt: skip
        per_second = PER_SECOND[self.unit]
        if type(value) is int and 0 <= value < END_S * per_second:
            return value
        seconds = self._seconds(value, what)
        if seconds is None:
            found = native(value)
            if not isinstance(found, int) or isinstance(found, bool):
                raise InvalidUsage(f"{what} must be {_WAYS}: got {shown(value)}", **{what: value})
            seconds = Fraction(found, per_second)
        self._check(seconds, value, what, end_s)
        ticks = seconds * per_second
        if ticks.denominator != 1 and not rounds:
            raise _lossy(self.unit, value, what)
        return int(ticks // 1)

    def _check(self, seconds: Fraction, value: object, what: str, end_s: int | Fraction) -> None:
        if seconds < 0:
            raise InvalidUsage(
                f"{what} is {shown(value)}, and the shard's clock starts at 1970-01-01T00:00:00Z: what was before has "
                "no time there. Use that time or a later one",
                **{what: value},
            )  # fmt: skip
        if seconds >= end_s:
            raise InvalidUsage(
                f"{what} is {shown(value)}, which is after the year 9999, as the shard's clock counts {self.unit} "
                "since 1970. Look at the unit: is it a number of microseconds or nanoseconds?",
                **{what: value},
            )  # fmt: skip

    def _seconds(self, value: object, what: str) -> Fraction | None:
        """Seconds since 1970, exactly; None for what is no moment."""
        value = _scalar(value)
        if isinstance(value, str):
            return self._text(value, what)
        if isinstance(value, dt.datetime):
            return _of_datetime(value, what)
        if isinstance(value, dt.date):
            return Fraction((value - _EPOCH.date()).days * _DAY_S)
        return _of_numpy(value, what) if _is_numpy(value, "M") else None

    def _text(self, text: str, what: str) -> Fraction:
        if len(text) > LONGEST:
            raise InvalidUsage(f"{what} must be {_WAYS}: got {shown(text)}", **{what: text})
        now, plain = Fraction(self.now_ms, 1_000) if _is_relative(text) else Fraction(0), text.strip().lower()
        if plain == "now":
            return now
        if plain in ("today", "yesterday"):
            return Fraction((now // _DAY_S - (plain == "yesterday")) * _DAY_S)
        if match := _AGO.fullmatch(plain):
            return now - _length(match[1], what, text)
        if not (match := _ISO.fullmatch(text.strip())):
            raise InvalidUsage(f"{what} must be {_WAYS}: got {shown(text)}", **{what: text})
        return _of_iso(match, what, text)


PLAIN = Times(None, lambda: 0)
"""Times that are plain integers."""


def is_moment(value: object) -> bool:
    """Whether this is meant as a time of a clock: a date, a text, a datetime of any kind, and no number."""
    if type(value) is int:  # as of most appends, which ask this several times
        return False
    value = _scalar(value)
    return isinstance(value, (str, dt.date)) or _is_numpy(value, "M")


def is_time_text(text: str) -> bool:
    """Whether a text is written as a time of a clock is: ISO 8601, or relative to now."""
    plain = text.strip()
    return len(plain) <= LONGEST and (_is_relative(plain) or _ISO.fullmatch(plain) is not None)


def is_duration(value: object) -> bool:
    """Whether this is meant as a length of time: a text or a timedelta of any kind, and no number."""
    return isinstance(value, (str, dt.timedelta)) or _is_numpy(value, "m")


def show_time(time: int, unit: Unit | None) -> str:
    """A time for people: `2026-11-22T12:00:00.250Z`; an integer where times are no clock, or beyond its end."""
    if unit is None or not 0 <= time < END_S * PER_SECOND[unit]:
        return str(time)
    seconds, rest = divmod(time, PER_SECOND[unit])
    text = (_EPOCH + dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{rest:0{3 if unit == 'ms' else 6}}Z" if rest else f"{text}Z"


def show_frontier(frontier: Antichain, unit: Unit | None) -> str:
    """A frontier for people: `[2026-11-22T12:00:00Z]`, or `[]` for the empty one."""
    return "[]" if frontier.time is None else f"[{show_time(frontier.time, unit)}]"


def moment(time: int, unit: Unit) -> dt.datetime:
    """A time as a datetime in UTC. Raises InvalidUsage for a time after the year 9999."""
    if not 0 <= time < END_S * PER_SECOND[unit]:
        raise InvalidUsage(f"{time} {unit} since 1970 is after the year 9999, which no datetime holds", time=time)
    return _EPOCH + time * (1_000_000 // PER_SECOND[unit]) * _MICROSECOND


def show_duration(distance: int, unit: Unit) -> str:
    """A number of units of time for people, as `distance` reads it: `7 days`, `1 day 12 h`, `90 ms`."""
    seconds, rest = divmod(distance, PER_SECOND[unit])
    found = []
    for name, length in (("days", _DAY_S), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            found.append(f"{count:d} {'day' if name == 'days' and count == 1 else name}")
    return " ".join([*found, f"{rest} {unit}"] if rest or not found else found)


def parse_unit(value: object) -> Unit | None:
    """The clock of a schema: "ms", "us", or None for plain integers. Raises InvalidUsage for anything else."""
    if value is None:
        return None
    if isinstance(value, str) and value in UNITS:
        return value
    raise InvalidUsage(
        f'times must be "ms" or "us" (since 1970, in UTC), or None for plain integers: got {shown(value)}',
        problem="times", times=value,
    )  # fmt: skip


_CREATE = 'Pass an integer. Only a shard that was created with persist.Schema(…, times="ms") takes clock times'


def _is_relative(text: str) -> bool:
    plain = text.strip().lower()
    return plain in ("now", "today", "yesterday") or plain.endswith("ago")


def _is_numpy(value: object, kind: str) -> bool:
    """Whether this is numpy's datetime64 ("M") or timedelta64 ("m"). A caller that has one has imported numpy."""
    return is_of(value, "numpy", "generic") and value.dtype.kind == kind  # type: ignore[attr-defined]


def _scalar(value: Any) -> Any:
    """What an Arrow scalar holds, as numpy's where Python has no such value; anything else as it is."""
    if not is_of(value, "pyarrow", "Scalar") or not value.is_valid:
        return value
    arrow: Any = sys.modules["pyarrow"]
    if not arrow.types.is_timestamp(value.type):
        return value.as_py()
    import numpy as np  # noqa: PLC0415 - Arrow has imported it

    stamp = np.datetime64(value.value, value.type.unit)
    return stamp if value.type.tz is not None else stamp.astype("datetime64[us]").item()


def _of_datetime(value: dt.datetime, what: str) -> Fraction:
    if type(value).__name__ == "NaTType":  # which pandas says is a datetime
        raise InvalidUsage(f"{what} must be {_WAYS}: got NaT, which is no time", **{what: value})
    if value.utcoffset() is None:
        raise InvalidUsage(
            f"{what} is {shown(value)}, which has no zone, so it is not known which moment it is. Say the zone: "
            'value.replace(tzinfo=datetime.UTC), or tz_localize("UTC") of pandas, if it is in UTC; '
            "value.astimezone() if it is this machine's time",
            **{what: value},
        )  # fmt: skip
    if hasattr(value, "nanosecond"):  # pandas' Timestamp: to UTC by pandas, with its nanoseconds
        return _of_numpy(value.to_datetime64(), what)  # type: ignore[attr-defined]
    return Fraction((value - _EPOCH) // _MICROSECOND, 1_000_000)


def _of_numpy(value: Any, what: str) -> Fraction:
    import numpy as np  # noqa: PLC0415 - whose value this is

    if np.isnat(value):
        raise InvalidUsage(f"{what} must be {_WAYS}: got NaT, which is no time", **{what: value})
    name, count = np.datetime_data(value.dtype)
    if name in ("Y", "M") and abs(value.astype("datetime64[M]").astype(np.int64)) < 12 * 10_000:
        value, name, count = value.astype("datetime64[D]"), "D", 1
    if name not in _NUMPY:
        raise InvalidUsage(f"{what} must be {_WAYS}: got {shown(value)}", **{what: value})
    return int(value.astype(np.int64)) * count * _NUMPY[name]


def _of_iso(match: re.Match[str], what: str, text: str) -> Fraction:
    day, time, fraction, zone = match.groups()
    if time is not None and zone is None:
        raise InvalidUsage(
            f"{what} is {shown(text)}, which has no zone, so it is not known which moment it is. Add one: "
            f"{text.strip()}Z for UTC, or an offset as in {text.strip()}+01:00",
            **{what: text},
        )  # fmt: skip
    offset = "+00:00" if zone in (None, "Z", "z", "UTC") else zone
    try:
        # Without the fraction, of which Python would drop all digits after the sixth.
        found = dt.datetime.fromisoformat(f"{day}T{time or '00:00'}{offset}")
        whole = (found - _EPOCH) // dt.timedelta(seconds=1)
    except (ValueError, OverflowError) as error:
        raise InvalidUsage(f"{what} is {shown(text)}, which is no date and time: {error}", **{what: text}) from error
    return Fraction(whole) + (Fraction(int(fraction), 10 ** len(fraction)) if fraction else 0)


def _length(text: str, what: str, given: object) -> Fraction:
    """A text such as `1 hour 30 min` in seconds."""
    total, place, plain = Fraction(0), 0, text.strip().lower()[: LONGEST + 1]
    while match := _LENGTH.match(plain, place):
        if (length := _NAMES.get(match[2])) is None:
            break
        total, place = total + Fraction(match[1]) * length, match.end()
    if not plain or place != len(plain):
        raise InvalidUsage(
            f"{what} is {shown(given)}, which is no length of time: write one like 7 days, 1 hour 30 min, 90 s, 250 ms "
            "(weeks, days, hours, minutes, seconds, ms, us; months and years differ in length)",
            **{what: given},
        )  # fmt: skip
    return total


def _duration(value: object, what: str) -> Fraction | None:
    """Seconds of a duration, exactly; None for what is none."""
    if isinstance(value, str):
        return _length(value, what, value)
    if isinstance(value, dt.timedelta) and type(value).__name__ != "NaTType":
        nanoseconds = getattr(value, "nanoseconds", 0)  # pandas' Timedelta
        micro = value.days * _DAY_S * 1_000_000 + value.seconds * 1_000_000 + value.microseconds
        return _not_negative(Fraction(micro * 1_000 + nanoseconds, 1_000_000_000), value, what)
    if _is_numpy(value, "m"):
        import numpy as np  # noqa: PLC0415 - whose value this is

        name, count = np.datetime_data(value.dtype)  # type: ignore[attr-defined]
        if not np.isnat(value) and name in _NUMPY:  # type: ignore[call-overload]
            return _not_negative(int(value.astype(np.int64)) * count * _NUMPY[name], value, what)  # type: ignore[attr-defined]
        raise InvalidUsage(f"{what} must be {_LENGTHS}: got {shown(value)}", argument=what, value=value)
    return None


def _not_negative(seconds: Fraction, value: object, what: str) -> Fraction:
    if seconds < 0:
        raise InvalidUsage(f"{what} must not be negative: got {shown(value)}", argument=what, value=value)
    return seconds


def _lossy(unit: Unit, value: object, what: str) -> InvalidUsage:
    return InvalidUsage(
        f"{what} is {shown(value)}, and the shard's times are whole {unit}: nothing is rounded or cut silently. Cut it "
        + ("to milliseconds first" if unit == "ms" else "to microseconds first"),
        **{what: value},
    )  # fmt: skip
