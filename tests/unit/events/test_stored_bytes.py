"""Every kind of stored byte of every store, flipped, cut and swapped: damage that is named, or the right answer.

`python -m tests.unit.events.test_stored_bytes` writes the table of `docs/design/0045-event-stores.md`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.eventlogs import KINDS
from tests.storedbytes import LOCAL, ask, make, wrongs
from tests.storedbytes_served import damage_served

IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"
COUNT, COUNT_SLOW = (60, 8) if IS_ALL else (1, 1)
"""How many damages of each kind to each file or value; of kinds that take long, fewer."""
SEED = 1
STATES = {"closed": False, "killed": True}
BAD = ("WRONG", "OTHER", "UNTYPED", "CRASH", "HANG")
# A database whose number says that it is of another program may be that.
FOREIGN = "OTHER InvalidUsage: "
NOT_OURS = "not one of Persist's"
CASES = [(kind, state) for kind in LOCAL for state in STATES if (kind, state) != ("persist", "killed")]
"""A location in SQLite has nothing that says where its write-ahead log ended: what that means is in the table. What is
said of its damaged files is in `tests/unit/location/test_sqlite_damage.py` and `test_sqlite_log.py`."""
CRASHES = ("rock", "OPTIONS")
"""RocksDB reads this file without a check, and of 80 flips one ended the process. `0045-event-stores.md` has it."""
DESIGN = Path("docs/design/0045-event-stores.md")
HEADING = "| Store | Region | Flip | Cut | Swap |"


def said_of(kind: str, folder: Path, state: str, count: int, step: int = 1) -> dict[tuple[str, str], list[str]]:
    """What is said, by region and kind of damage."""
    place = make(kind, folder, is_killed=STATES[state])
    cases = list(wrongs(place, count, SEED))[::step]
    found: dict[tuple[str, str], list[str]] = {}
    for wrong, said in zip(cases, ask(kind, place, cases, folder / "work"), strict=True):
        found.setdefault((region_of(wrong.file), wrong.kind), []).append(said)
    return found


def region_of(file: str) -> str:
    """The name of a file without the numbers in it."""
    name = file.partition("/")[2] or {"events": "the database"}.get(file, file)
    if name.startswith("events/"):
        return "events/<segment>"
    return "".join(itertools.takewhile(lambda sign: not sign.isdigit(), name)).rstrip("-/") or f"*{Path(name).suffix}"


def is_bad(said: str) -> bool:
    """Whether that must not be said."""
    is_foreign = said.startswith(FOREIGN) and NOT_OURS in said
    return (said.startswith(BAD) and not is_foreign) or "UNNAMED" in said[:20]


@pytest.mark.parametrize(("kind", "state"), CASES)
def test_no_damage_to_a_file_gives_another_log(kind: str, state: str, tmp_path: Path) -> None:
    is_slow = kind == "persist"
    found = said_of(kind, tmp_path, state, COUNT_SLOW if is_slow else COUNT, 1 if IS_ALL or not is_slow else 4)
    found_bad = {region: bad for region, said in found.items() if (bad := [one for one in said if is_bad(one)])}
    known = {key: bad for key, bad in found_bad.items() if (kind, key[0]) == CRASHES and "HANG" not in bad}
    assert found_bad == known
    assert any("Corrupt" in one for said in found.values() for one in said), "nothing was damaged at all"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LOCAL])
def test_no_damage_to_a_served_value_gives_another_log(kind: str, tmp_path: Path) -> None:
    found = damage_served(kind, tmp_path, COUNT_SLOW, is_sample=not IS_ALL)
    assert {region: bad for region, said in found.items() if (bad := [one for one in said if is_bad(one)])} == {}
    assert any("Corrupt" in one for said in found.values() for one in said), "nothing was damaged at all"


def _told(said: list[str]) -> str:
    """The outcomes and how often each was seen."""
    kinds = Counter(
        one.split(":")[0].replace("OTHER ", "").replace("right, without the snapshot", "right, no snapshot")
        for one in said
    )
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "-"


def table(count: int, count_slow: int) -> list[str]:
    """The rows of the table."""
    rows = [HEADING, "|---|---|---|---|---|"]
    for kind in KINDS:
        found: dict[tuple[str, str], list[str]] = {}
        for state in STATES if kind in LOCAL else ("served",):
            with tempfile.TemporaryDirectory() as folder:
                size = count if kind in LOCAL and kind != "persist" else count_slow
                part = (
                    said_of(kind, Path(folder), state, size)
                    if kind in LOCAL
                    else damage_served(kind, Path(folder), size)
                )
            for key, said in part.items():
                found.setdefault(key, []).extend(said)
        for region in dict.fromkeys(region for region, _ in found):
            cells = " | ".join(_told(found.get((region, damage), [])) for damage in ("flip", "cut", "swap"))
            rows.append(f"| `{kind}` | {region} | {cells} |")
    return rows


def main() -> None:
    """Write the table into the design note."""
    before, _, rest = DESIGN.read_text().partition(HEADING)
    after = rest.partition("\n\n")[2]
    DESIGN.write_text(before + "\n".join(table(40, 4)) + "\n\n" + after)


if __name__ == "__main__":
    main()
