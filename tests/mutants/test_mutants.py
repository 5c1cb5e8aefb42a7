"""What `make mutants` relies on: a change is planted in functions that others have imported, and no reason is stale."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants.plant import Unplantable, functions, plant

HERE = Path(__file__).parent
LIBRARY = HERE.parents[1] / "persist_lib"
LISTED = tomllib.loads((HERE / "equivalent.toml").read_text())["mutant"]
KINDS = {"equivalent", "speed", "message", "impossible"}
SOURCE = """
import functools

def outer(number):
    def inner():
        return number + 1
    return inner()

class Kind:
    @property
    def size(self):
        return 2

    @functools.cache
    def kept(self):
        return 3
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    made = ModuleType("module")
    exec(compile(SOURCE, str(path), "exec"), made.__dict__)
    made.__file__ = str(path)
    return made


def changed(module: ModuleType, was: str, becomes: str) -> int:
    path = str(module.__file__)
    return plant(path, SOURCE, SOURCE.replace(was, becomes), functions(str(Path(path).parent)))


def test_a_change_shows_in_what_was_imported_before(module: ModuleType) -> None:
    outer, kind = module.outer, module.Kind()
    assert changed(module, "number + 1", "number - 1") == 1
    assert (outer(5), kind.size, kind.kept()) == (4, 2, 3)
    assert changed(module, "return 2", "return 20") == 1
    assert changed(module, "return 3", "return 30") == 1
    assert (kind.size, module.Kind().kept()) == (20, 30)


def test_what_was_within_a_function_may_be_gone(module: ModuleType) -> None:
    assert changed(module, "return number + 1", "return [number for _ in ()]") == 1
    assert module.outer(5) == []
    assert changed(module, "def inner():\n        return number + 1\n    return inner()", "return number") == 1
    assert module.outer(5) == 5


def test_values_that_are_equal_and_of_another_type_are_a_change(module: ModuleType) -> None:
    assert changed(module, "return 2", "return 2.0") == 1
    assert isinstance(module.Kind().size, float)


def test_what_cannot_be_planted_is_said(module: ModuleType) -> None:
    for was, becomes in (("import functools", "import functools as functools"), ("outer", "other")):
        with pytest.raises(Unplantable):
            changed(module, was, becomes)
    assert module.outer(5) == 6


def bodies(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{outer}.{node.name}" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else outer
        yield name.strip("."), node
        yield from bodies(node, name)


@pytest.mark.parametrize("one", LISTED, ids=lambda one: f"{one['file']} {one['function']} {one['was'][:40]}")
def test_what_is_excused_is_still_there_and_has_its_reason(one: dict[str, str]) -> None:
    source = (LIBRARY / one["file"]).read_text()
    found = [node for name, node in bodies(ast.parse(source)) if name == one["function"]]
    assert any(one["was"] in joined(source, node) for node in found), "take it out: the line is not there any more"
    assert one["kind"] in KINDS
    assert len(one["reason"]) > 20


def joined(source: str, node: ast.AST) -> str:
    """The lines of a function, stripped and joined, as a mutant's are."""
    return " ".join(line.strip() for line in (ast.get_source_segment(source, node, padded=True) or "").splitlines())
