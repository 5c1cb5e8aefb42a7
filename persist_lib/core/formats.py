"""The formats of the log: which there are, what each brought, and what a given change needs.

Rows and rollups carry the number of their format. A program reads every format up to `NEWEST`, and refuses a newer one
before it does anything. A shard's state says which format is written; only `Upgrade` moves it, when every program of a
fleet knows the next one. To add a format: raise `NEWEST`, and enter here each field and each command that it brings.

    1   the first
    2   the state says its format (`Upgrade`) and remembers the outcomes of its last appends

SUBTLE: `CREATED` follows `NEWEST` one release later. A fleet is upgraded machine by machine, and the shards that its
new programs create during the upgrade must be readable for its old ones.
"""

from __future__ import annotations

from persist_lib.core.diff import StateDiff

FIRST = 1
NEWEST = 2
CREATED = 2
"""In which format shards are created, unless settings say otherwise. Nothing older than 2 was ever released."""

REMEMBERS_OUTCOMES = 2

STATE_FIELDS = {1: 14, 2: 16}
"""How many fields a stored state has: later ones are left out, and must have their defaults."""
DIFF_FIELDS = {"format": 2, "outcomes": 2}
"""The fields of a diff that came after format 1."""
COMMANDS = {"Upgrade": 2}
"""The commands that came after format 1."""


def needed(command: str, diff: StateDiff) -> int:
    """The oldest format that can say this."""
    fields = [since for name, since in DIFF_FIELDS.items() if getattr(diff, name) is not None]
    return max([FIRST, COMMANDS.get(command, FIRST), *fields])
