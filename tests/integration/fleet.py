"""Two releases as wheels: this one, and one with the next format, each installed in an environment of its own.

The next one is made from this tree by the few edits that `core.formats` says a format takes: a new command, a field of
the diff, a field of the state, and the next number.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).parent / "uv")
PACKED = ("persist_lib", "orchestration", "jobs", "pyproject.toml", "README.md")

Edit = tuple[str, str]
"""What is there once, and what comes in its place."""


def before(text: str, *lines: str) -> Edit:
    """Put lines before what is there."""
    return text, "".join(f"{line}\n" for line in lines) + text


NEXT: dict[str, list[Edit]] = {
    "pyproject.toml": [('version = "0.1.0"', 'version = "0.2.0"')],
    "persist_lib/core/formats.py": [
        ("NEWEST = 3\n", "NEWEST = 4\n"),
        ("STATE_FIELDS = {1: 14, 2: 16, 3: 18}", "STATE_FIELDS = {1: 14, 2: 16, 3: 18, 4: 19}"),
        ('DIFF_FIELDS = {"format": 2,', 'DIFF_FIELDS = {"label": 4, "format": 2,'),
        ('COMMANDS = {"Upgrade": 2}', 'COMMANDS = {"Upgrade": 2, "SetLabel": 4}'),
    ],
    "persist_lib/core/state.py": [
        before("\n    @property\n    def upper(", "    label: str | None = None"),
    ],
    "persist_lib/core/diff.py": [
        before("\n\ndef apply_diff(", "    label: tuple[str | None, str | None] | None = None"),
        before(
            "    if diff.format is not None:\n",
            "    if diff.label is not None:",
            "        changes['label'] = diff.label[1]",
        ),
    ],
    "persist_lib/core/commands.py": [
        before("class Finish(", "class SetLabel(msgspec.Struct, frozen=True):", "    label: str | None", "", ""),
        ("Upgrade | Finish", "Upgrade | SetLabel | Finish"),
    ],
    "persist_lib/core/transitions.py": [
        before(
            "        case c.Finish():\n",
            "        case c.SetLabel() if state.format < 4:",
            "            return r.Malformed('a label, before format 4')",
            "        case c.SetLabel(label):",
            "            return StateDiff(label=(state.label, label))",
        ),
    ],
}


def build(folder: Path, *, is_next: bool) -> Path:
    """The wheel of this tree, or of the next release, below `folder`."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    for name, edits in NEXT.items() if is_next else ():
        text = (source / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        (source / name).write_text(text)
    command = [UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([*command, "-o", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A bare environment with this wheel, and what it depends on from the one that runs the tests; its `bin`."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    # A folder that is added this way has none of its own .pth files read: the tree that is tested is not among it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [UV, "pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin" / "python"), str(wheel)]
    subprocess.run(command, check=True)
    return folder / "bin"
