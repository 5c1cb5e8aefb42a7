"""What a long test has done, for docs/reliability.md: one line of JSON in the file that PERSIST_COUNTS names.

`scripts/nightly` sets it for each of its parts, and `scripts/reliability` adds the lines up. Without it nothing is
written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "PERSIST_COUNTS"


def count(kind: str, **numbers: int | dict[str, int]) -> None:
    """Note what was done: numbers, or numbers by name. A line is written at once, so that processes may share the file.

    Lines of one `kind` are added up.
    """
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as lines:
            lines.write(json.dumps({"kind": kind, **numbers}) + "\n")
