"""Other releases, as wheels: one with the next format, and an older one, that knows no columns which evolve.

The next one is made from this tree by the few edits that `core.formats` says a format takes: a new command, a field of
the diff, a field of the state, and the next number.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from persist_lib.core.formats import NEWEST, STATE_FIELDS
from tests.built import ROOT, Wheels, build, copy_tree

FIELDS = STATE_FIELDS[NEWEST]
BEFORE = "2ce205bfc7bf"
"""The commit by which columns came to evolve; the older release is the one before it."""

Edit = tuple[str, str]
"""What is there once, and what comes in its place."""


def before(text: str, *lines: str) -> Edit:
    """Put lines before what is there."""
    return text, "".join(f"{line}\n" for line in lines) + text


NEXT: dict[str, list[Edit]] = {
    "pyproject.toml": [('version = "0.1.0"', 'version = "0.2.0"')],
    "pipeline/pyproject.toml": [
        ('version = "0.1.0"', 'version = "0.2.0"'),
        ("persist-lib[spark]==0.1.0", "persist-lib[spark]==0.2.0"),
    ],
    "persist_lib/core/formats.py": [
        (f"NEWEST = {NEWEST}\n", f"NEWEST = {NEWEST + 1}\n"),
        (f"{NEWEST}: {FIELDS}}}", f"{NEWEST}: {FIELDS}, {NEWEST + 1}: {FIELDS + 1}}}"),
        ("DIFF_FIELDS = {\n", f'DIFF_FIELDS = {{\n    "label": {NEWEST + 1},\n'),
        ('    "Upgrade": 2,', f'    "SetLabel": {NEWEST + 1}, "Upgrade": 2,'),
    ],
    "persist_lib/core/state.py": [
        before("\n    @property\n    def upper(", "    label: str | None = None"),
    ],
    "persist_lib/core/diff.py": [
        before("\n\ndef apply_diff(", "    label: tuple[str | None, str | None] | None = None"),
        before(
            "    if diff.outcomes is not None:\n",
            "    if diff.label is not None:",
            "        changes['label'] = diff.label[1]",
        ),
    ],
    "persist_lib/core/commands.py": [
        before("class Adopt(", "class SetLabel(msgspec.Struct, frozen=True):", "    label: str | None", "", ""),
        ("Upgrade | Adopt", "Upgrade | SetLabel | Adopt"),
    ],
    "persist_lib/core/transitions.py": [
        before(
            "        case c.Finish():\n",
            f"        case c.SetLabel() if state.format <= {NEWEST}:",
            "            return r.Malformed('a label, before its format')",
            "        case c.SetLabel(label):",
            "            return StateDiff(label=(state.label, label))",
        ),
    ],
}


def build_next(folder: Path) -> Wheels:
    """The wheels of the next release, in `folder`."""
    source = copy_tree(folder / "source")
    for name, edits in NEXT.items():
        text = (source / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        (source / name).write_text(text)
    return Wheels(build(source, folder))


def has_history() -> bool:
    """Whether this clone has that commit."""
    return (
        subprocess.run(["git", "cat-file", "-e", f"{BEFORE}^"], cwd=ROOT, capture_output=True, check=False).returncode
        == 0
    )


def build_before(folder: Path) -> Wheels:
    """The wheels of the release before columns evolved, in `folder`."""
    source = folder / "source"
    source.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", f"{BEFORE}^"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=packed, check=True)
    return Wheels(build(source, folder))
