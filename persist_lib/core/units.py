"""Numbers as text for people: sizes, counts, durations, dollars, moments."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that `persist --help` does not load what it does not need
    from persist_lib.core.cost import Cost

_SIZES = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def size(count: float) -> str:
    """Bytes: `0 B`, `999 B`, `1.5 KiB`, `117 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in _SIZES:
        count /= 1024
        # A number that would round to 1024 of a unit is shown as 1 of the next.
        if count < 1023.5 or unit == _SIZES[-1]:
            break
    return f"{count:.{0 if count >= 99.95 else 1}f} {unit}"


def number(count: int) -> str:
    """A count: `1,234,567`."""
    return f"{count:,}"


def of(count: int, noun: str) -> str:
    """A count of something: `1 batch`, `2 batches`, `0 objects`."""
    plural = noun + ("es" if noun.endswith(("s", "ch", "x")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def duration(ms: float) -> str:
    """A length of time: `850 ms`, `12 s`, `14 min`, `3.5 h`, `12 d`."""
    for unit, length, upto in (("ms", 1, 1_000), ("s", 1_000, 120_000), ("min", 60_000, 7_200_000)):
        if abs(ms) < upto:
            return f"{ms / length:.0f} {unit}"
    hours = ms / 3_600_000
    return f"{hours:.1f} h" if abs(hours) < 48 else f"{hours / 24:.0f} d"


def seconds(count: float) -> str:
    """A measured length of time: `0.03 s`, `12.4 s`."""
    return f"{count:.2f} s" if count < 1 else f"{count:.1f} s"


def dollars(amount: float) -> str:
    """Money: `$0`, `$12.30`, `$0.0042`, `<$0.0001`."""
    if amount == 0:
        return "$0"
    if amount < 0.0001:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.2g}"


def spent(cost: Cost) -> str:
    """The requests to a location: `12 requests, 1.5 KiB read, 300 B written, $0.0042`."""
    text = f"{of(cost.requests, 'request')}, {size(cost.bytes_read)} read, {size(cost.bytes_written)} written"
    return f"{text}, {dollars(cost.dollars)}"


def moment(ms: int) -> str:
    """A moment of the store's clock (ms since the epoch), in UTC."""
    return f"{dt.datetime.fromtimestamp(ms / 1000, dt.UTC):%Y-%m-%d %H:%M:%S}Z"


def size_class(level: int) -> str:
    """A level of the trace: `2¹²` for batches of up to 4096 updates, `empty` for level -1."""
    return "empty" if level < 0 else "2" + str(level).translate(_SUPERSCRIPTS)
