"""JSON documents as text: the one canonical text of each, its value in Python, and back.

Names are sorted by code point, there are no spaces, and nothing is escaped that need not be. Integers are as they are,
of up to as many digits as Python reads. Other numbers are exact decimals, written as Python writes floats: `1e0`,
`1.0` and `1.00` are `1.0`, which is not `1`. What no program reads back alike has no canonical text: a name twice in
an object, NaN, a number beyond what floats reach, half of a surrogate pair, and what is nested too deep.

Texts are not compared with what a release of a library writes: numbers are written here, and golden texts hold the
rest.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any

import msgspec

from persist_lib.arguments import shown

DEEPEST = 256
"""How deep documents may be nested: a quarter of what Python reads, as its own calls count towards that, too."""
LONGEST_INTEGER = 4300
"""As many characters of an integer Python reads."""
NULL = "null"

_PLAIN = re.compile(r"-?(?:[1-9]\d{0,15}\.(?:\d*[1-9]|0)|0\.(?:0|(?!0000)\d*[1-9]))", re.ASCII)
"""Numbers that are canonical as they are: most of those that are no integers."""
_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", re.ASCII)
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
_PLAIN_DIGITS = range(-3, 17)
"""Where the point may be, counted from the first digit, in a number without an exponent."""


def canonical(text: str) -> str:
    """The canonical text of a JSON text. ValueError, or RecursionError, for what has none."""
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(text)
    try:
        found = _encode(_exact(text)).decode()
    except msgspec.DecodeError as error:
        half = ": half of a surrogate pair is no text" if "\\ud" in text.lower() else ""
        raise ValueError(f"{error}{half}") from error
    # A name that was there twice took a colon with it, and only an escaped colon adds one.
    if found != text and (found.count(":") != text.count(":") or "\\u003" in text):
        json.loads(text, object_pairs_hook=_check_object, parse_float=str)
    return found


def text_of(value: object) -> str:
    """The canonical text of a value in Python. ValueError, TypeError or RecursionError for what JSON cannot say."""
    text = _encode(_exactly(value, 0)).decode()
    if len(text) > LONGEST_INTEGER:
        _exact(text)  # refuses what canonical text does not have
    return text


def parsed(text: str) -> Any:
    """The value of any JSON text. ValueError or RecursionError as of `canonical`."""
    return value_of(canonical(text))


def _number(text: str) -> msgspec.Raw:
    """A number that is no integer, in canonical text."""
    return msgspec.Raw((text if _PLAIN.fullmatch(text) else _decimal(text)).encode())


def _decimal(text: str) -> str:
    [(sign, whole, fraction, exponent)] = _NUMBER.findall(text)
    digits = (whole + fraction).lstrip("0")
    point = len(digits) - len(fraction) + int(exponent or 0)
    digits = digits.rstrip("0")
    if not digits:
        return f"{sign}0.0"
    if math.isinf(number := float(text)) or not number:
        raise ValueError(f"{shown(text)} is beyond what floats of 64 bits reach: make it a text")
    if point not in _PLAIN_DIGITS:
        return f"{sign}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}e{point - 1:+03d}"
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[:point].ljust(point, '0')}.{digits[point:] or '0'}"


_exact = msgspec.json.Decoder(float_hook=_number).decode
_encode = msgspec.json.Encoder(order="sorted").encode
value_of = msgspec.json.Decoder().decode
"""The value of a canonical text."""


def _check_depth(text: str) -> None:
    depth = max(accumulate(_STEPS.get(letter, 0) for letter in _STRINGS.sub("", text)), default=0)
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def _exactly(value: Any, depth: int) -> Any:
    """The value as what the encoder has one text for. Not all that it takes: bytes and moments are no JSON."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no number that JSON has")
        return msgspec.Raw(float.__repr__(value).encode())
    if isinstance(value, (str, int)):  # an enumeration, say
        return str.__str__(value) if isinstance(value, str) else int(value)
    if depth == DEEPEST and isinstance(value, (dict, list, tuple)):
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        if wrong := [name for name in value if not isinstance(name, str)]:
            # Names 1, None and True would become text, so that {1: …, "1": …} had one name twice.
            raise TypeError(f"the name {shown(wrong[0])} is not text")
        return {str.__str__(name): _exactly(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exactly(inner, depth + 1) for inner in value]
    raise TypeError(f"a {kind.__name__} is no JSON")


def _check_object(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"a name occurs twice in {shown([name for name, _ in pairs])}")
