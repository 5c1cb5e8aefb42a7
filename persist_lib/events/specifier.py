"""Specifiers: which kind of store, and what it needs to know. `kind[:option[:option…]]`, in which `\\:` is a colon.

disk:/var/lib/ledger      pg:postgresql\\://user@host/db:ledger      s3:s3\\://bucket/ledger:limit=65536
"""

from __future__ import annotations

import re
from typing import NamedTuple

from persist_lib.arguments import shown
from persist_lib.errors import HIDDEN, InvalidUsage, redacted

DEFAULT = "disk"
PIECE = re.compile(r"((?:[^:\\]|\\[:\\]|\\)*)(:|\Z)")
ESCAPE = re.compile(r"\\([:\\])")
SECRET = re.compile(r"(://[^/?#]*?:).*(?=@)")


class Specifier(NamedTuple):
    """A kind of store, and its options. Shown without passwords."""

    kind: str
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """As it is written, passwords included."""
        return ":".join([self.kind, *map(_escaped, self.options)])

    def __str__(self) -> str:
        # SUBTLE: together, as colons that were not escaped have cut a URL into several options.
        plain = ":".join([self.kind, *self.options])
        return self.text() if redacted(plain) == plain else redacted(plain)

    def __repr__(self) -> str:
        return f"Specifier({str(self)!r})"


def parse_specifier(text: object) -> Specifier:
    """Take a specifier apart. Raises InvalidUsage, which quotes no options, as they may hold a password."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidUsage(f"a store of events is kind[:options], as in 'disk:./ledger': got {_kind_of(text)}")
    if not text.isprintable():
        raise InvalidUsage(f"a store of events has unprintable characters: {_kind_of(text)}")
    kind, *options = _split(text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]*", kind):
        raise InvalidUsage(f"a store of events begins with its kind, as in 'disk:./ledger': got {_kind_of(text)}")
    return Specifier(kind, tuple(options))


def _split(text: str) -> list[str]:
    pieces, at = [], 0
    while True:
        found = PIECE.match(text, at)
        assert found is not None  # noqa: S101 - it matches the empty text
        pieces.append(ESCAPE.sub(r"\1", found[1]))
        if not found[2]:
            return pieces
        at = found.end()


def _escaped(option: str) -> str:
    return option.replace("\\", "\\\\").replace(":", "\\:")


def _kind_of(text: object) -> str:
    """A specifier as messages quote it when its options cannot be told apart."""
    if not isinstance(text, str):
        return shown(text)
    kind, colon, _ = text.partition(":")
    return shown(kind if "@" not in kind else HIDDEN) + (f" and options ({HIDDEN})" if colon else "")


def take_limit(options: tuple[str, ...]) -> tuple[list[str], int | None]:
    """The options without `limit=N`, and the limit on records that it sets (None: it is not there)."""
    rest = [option for option in options if not option.startswith("limit=")]
    limits = [option.removeprefix("limit=") for option in options if option.startswith("limit=")]
    if not limits:
        return rest, None
    if len(limits) > 1 or not limits[0].isdecimal() or len(limits[0]) > 12:
        raise InvalidUsage(f"limit= is given once, as a number of bytes, as in limit=65536: got {shown(limits)}")
    return rest, int(limits[0])
