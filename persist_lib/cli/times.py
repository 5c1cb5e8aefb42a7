"""Times as people type them at a shell and in SQL."""

from __future__ import annotations

from persist_lib.cli.arguments import NUMBER
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import parse_time


def parse_time_text(text: str, what: str) -> int:
    """The time that a text says: 1000 or 1_000. Raises InvalidUsage for anything else; `what` names it there."""
    if not NUMBER.fullmatch(text.strip()):
        raise InvalidUsage(f"{what} must be a time, as in 7 or 1_000: got {text!r}", **{what: text})
    return parse_time(int(text.strip()), what)
