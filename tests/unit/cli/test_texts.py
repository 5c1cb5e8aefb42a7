"""Texts that name a command: pages, notes, errors, docstrings and programs name none that there is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from persist_lib.cli.app import app

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"(?<![\w.,-])(?<!and )persist(?: -{1,2}[\w-]+[ =][^\s-]\S*)* ([a-z][a-z-]*(?: [a-z][a-z-]*)*)")
"""A command as it is named, maybe after options: `persist --location file:data read orders`."""
GROUP: Any = get_command(app)
CODE = ("persist_lib/**/*.py", "orchestration/**/*.py", "jobs/**/*.py", "examples/**/*.py", "bench/**/*.py")


def wrong(text: str) -> list[str]:
    """The commands that a text names and that there are not."""
    return [found[0] for found in NAMED.finditer(text) if not is_there(found[1].split())]


def is_there(words: list[str]) -> bool:
    """Whether a command, or the group of several, begins a line of these words."""
    group = GROUP
    for word in words:
        if not hasattr(group, "commands"):
            return True
        if word not in group.commands:
            return False
        group = group.commands[word]
    return True


def strings(path: Path) -> Iterator[str]:
    """The texts of a program: docstrings, messages, examples. What is computed in one is X."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("tree", CODE)
def test_texts_of_programs_name_commands_that_there_are(tree: str) -> None:
    texts = ((path, text) for path in ROOT.glob(tree) if path.name != "root.py" for text in strings(path))
    assert {(path.name, *found) for path, text in texts if (found := wrong(text))} == set()


def test_pages_and_notes_name_commands_that_there_are() -> None:
    texts = {path: path.read_text() for path in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "Makefile")}
    assert {(path.name, *found) for path, text in texts.items() if (found := wrong(text))} == set()
