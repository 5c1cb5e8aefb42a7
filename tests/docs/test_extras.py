"""Each extra that a page, a message or a hint names is one that can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = (
    re.compile(r"(?<![\w.-])persist(?:-lib|-pipeline)?\[([a-z][a-z,-]*)\]"), re.compile(r"\bextras? `([a-z-]+)`"),
    re.compile(r'\bextra="([a-z-]+)"'),
)  # fmt: skip
OTHER = {"refuse", "ignore", "forbid"}
"""What the argument `extra` of something else may be."""


def known() -> set[str]:
    files = (ROOT / "pyproject.toml", ROOT / "pipeline" / "pyproject.toml")
    return {one for file in files for one in tomllib.loads(file.read_text())["project"]["optional-dependencies"]}


def test_each_extra_that_is_named_exists_and_is_one_of_persist_lib() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [one for folder in ("persist_lib", "orchestration", "jobs") for one in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in (*pages, *sources)
        for pattern in NAMED
        for found in pattern.finditer(path.read_text())
        if set(found.group(1).split(",")) - known() - OTHER or found.group().startswith("persist[")
    ]
    assert wrong == []
