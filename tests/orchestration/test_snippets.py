"""The definitions that docstrings show load as they stand, each as a module that Dagster is given."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.reconstruct import reconstructable  # noqa: F401 - loads what the next one needs
from dagster._core.workspace.autodiscovery import loadable_targets_from_python_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.dagster


def snippets() -> Iterator[object]:
    """Each indented block of a module's docstring that defines `defs`."""
    for path in sorted((ROOT / "orchestration").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        blocks: list[list[str]] = [[]]
        for line in text.splitlines():
            if line.startswith("    ") or (not line and blocks[-1]):
                blocks[-1].append(line)
            elif blocks[-1]:
                blocks.append([])
        for number, block in enumerate(blocks):
            code = textwrap.dedent("\n".join(block))
            if "defs = " in code:
                yield pytest.param(code, id=f"{path.stem}-{number}")


FOUND = list(snippets())


def test_there_are_some() -> None:
    assert len(FOUND) >= 6


@pytest.mark.parametrize("code", FOUND)
def test_a_snippet_is_one_definitions_object_that_loads(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one would be an error of `dagster dev -f`."""
    monkeypatch.delenv("PERSIST_LOCATION", raising=False)
    path = tmp_path / "snippet.py"
    path.write_text(code)
    (target,) = loadable_targets_from_python_file(str(path))
    assert isinstance(target.target_definition, dg.Definitions)
    dg.Definitions.validate_loadable(target.target_definition)
