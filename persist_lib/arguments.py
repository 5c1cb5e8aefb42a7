"""Checks of single arguments where they come in: by type and range, before anything is read or written.

Each `parse_…` answers the value as the plain Python type that the rest of the library expects, or raises InvalidUsage
that names the argument. numpy's integers, floats and bools count as Python's; a bool is never a number. `shown` is how
a value that a caller passed is quoted in a message.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

import msgspec

from persist_lib.errors import InvalidUsage, NotAllowed, NotAuthenticated, redacted

T = TypeVar("T")

LONGEST_SHOWN = 300
"""Characters of a value that a message quotes."""
LONGEST_S = 1e9
"""Seconds, some 31 years: the longest wait that a caller may ask for. Locks and sleeps refuse much more than that."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no value of a type: of another form, no UTF-8, or nested without end."""

UNPARSED = (ValueError, RecursionError)
"""What json and tomllib raise for a text that they cannot read, also for a number of thousands of digits."""

_LARGEST = sys.float_info.max


class _Bounded(Repr):
    """A repr of bounded size. Passwords go before text is cut, as what is left of a URL would not look like one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxother = LONGEST_SHOWN
        self.maxlong = 80

    def repr_str(self, x: str, level: int) -> str:
        head = x[: 4 * LONGEST_SHOWN]
        return super().repr_str(redacted(head), level)

    def repr_bytes(self, x: bytes, _level: int) -> str:
        return repr(x) if len(x) <= LONGEST_SHOWN else f"{x[:40]!r}... ({len(x)} bytes)"


_bounded = _Bounded()


def shown(value: object) -> str:
    """The value's repr, cut to a bounded length. Never raises, whatever the value is."""
    try:
        text = _bounded.repr(value)
    except Exception:  # noqa: BLE001 - the message that quotes a value must not fail because of it
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """The names that are similar to `typed`, the nearest first. Upper and lower case do not matter."""
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(name.lower(), []).append(name)
    return [name for near in get_close_matches(typed.lower(), folded) for name in folded[near]]


def did_you_mean(typed: object, names: Iterable[str]) -> str:
    """A part of a message, `Did you mean this or that? `, or nothing if no name is similar to what was typed."""
    near = near_names(typed, names) if isinstance(typed, str) else []
    return f"Did you mean {' or '.join(near)}? " if near else ""


@contextmanager
def within(where: object, **fields: object) -> Iterator[None]:
    """Let what is refused say where that stands. Its kind and its fields stay; what is about rights is left."""
    try:
        yield
    except (NotAuthenticated, NotAllowed):
        raise
    except InvalidUsage as error:
        raise type(error)(f"{where}: {error.message}", **{**error.fields, **fields}) from error


def native(value: object) -> object:
    """The number or bool that a numpy scalar is; anything else as it is. A caller that has one has imported numpy."""
    is_number = is_of(value, "numpy", "generic") and value.dtype.kind in "biuf"  # type: ignore[attr-defined]
    return value.item() if is_number else value  # type: ignore[attr-defined]


def is_of(value: object, module: str, *kinds: str) -> bool:
    """Whether this is an instance of one of a module's classes; without importing it, as whoever made the value has.

    Another thread may be importing the module at this moment, so that its classes are not there yet. Then
    nobody can have such a value.
    """
    found = sys.modules.get(module)
    return isinstance(value, tuple(getattr(found, kind) for kind in kinds if hasattr(found, kind)))


def _wrong(what: str, must: str, value: object, more: str = "") -> InvalidUsage:
    return InvalidUsage(f"{what} must {must}: got {shown(value)}{more}", argument=what, value=value)


def parse_integer(value: object, what: str, least: int = 0, most: int | None = None) -> int:
    """An integer in `[least, most]`."""
    found = native(value)
    if isinstance(found, int) and not isinstance(found, bool) and least <= found and (most is None or found <= most):
        return int(found)
    bounds = f", {least} or more" if most is None else f" in [{least}, {most}]"
    raise _wrong(what, f"be an integer{bounds}", value)


def parse_number(value: object, what: str, least: float = 0.0, most: float = math.inf) -> float:
    """A finite number in `[least, most]`."""
    found = native(value)
    # Compared before it becomes a float, which the largest integers cannot.
    if isinstance(found, (int, float)) and not isinstance(found, bool) and least <= found <= min(most, _LARGEST):
        return float(found)
    bounds = f", {least:g} or more" if most == math.inf else f" in [{least:g}, {most:g}]"
    raise _wrong(what, f"be a finite number{bounds}", value)


def parse_seconds(value: object, what: str = "timeout") -> float:
    """A number of seconds to wait for at most: finite, 0 or more."""
    if type(value) is float and 0.0 <= value <= LONGEST_S:
        return value
    try:
        return parse_number(value, what, 0.0, LONGEST_S)
    except InvalidUsage:
        raise _wrong(what, f"be a number of seconds in [0, {LONGEST_S:g}]", value) from None


def parse_flag(value: object, what: str) -> bool:
    """True or False."""
    found = native(value)
    if isinstance(found, bool):
        return found
    raise _wrong(what, "be True or False", value)


def parse_bytes(value: object, what: str, least: int = 0, most: int | None = None) -> bytes:
    """Bytes, so many of them."""
    if not isinstance(value, bytes):
        hint = "; encode the text first" if isinstance(value, str) else ""
        raise _wrong(what, "be bytes", value, hint)
    if len(value) < least or (most is not None and len(value) > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise InvalidUsage(
            f"{what} must have {bounds} bytes: got {len(value)}, {shown(value)}", argument=what, value=value
        )
    return bytes(value)


def parse_text(value: object, what: str, most: int) -> str:
    """Printable text on one line, which may be empty."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise _wrong(what, f"be text of at most {most} printable characters", value)
    return str(value)


def check_type(value: object, kind: type[T], what: str, example: str) -> T:
    """The value, which must be of this type. `example` says how to write one."""
    if isinstance(value, kind):
        return value
    raise _wrong(what, f"be a {kind.__name__}, as in {example}", value)


def check_callable(value: T, what: str, takes: str) -> T:
    """The value, which must be a function; `takes` says of what."""
    if callable(value):
        return value
    raise _wrong(what, f"be a function of {takes}", value)


def not_pickled(what: str, instead: str) -> Callable[[Any], tuple[object, ...]]:
    """A `__reduce__` that says why these cannot be pickled, and what to pass to another process instead."""

    def refuse(_self: Any) -> tuple[object, ...]:
        raise InvalidUsage(f"{what} cannot be pickled or copied, as it holds connections and leases. {instead}")

    return refuse
