"""Names with a leading underscore are a package's own: other packages of the library do not reach for them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).parents[3] / "persist_lib"
OF_PYTHON = {"_field_defaults", "_replace", "_asdict", "_fields", "_make", "_register_atexit"}
OF_OTHERS = {"_exit", "_PARTITION_EOF", "_AUTO_OFFSET_RESET"}
"""Public names of other libraries."""


def package_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def told(tree: ast.Module) -> Iterator[str]:
    """The private names that a module gives to what it defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def reached_for(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The private names of other objects that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not (isinstance(of, ast.Name) and of.id in {"self", "cls", "super"}):
                yield node.lineno, node.attr


def test_no_package_reaches_for_what_is_private_to_another() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}
    own: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        own[package_of(path)].update(filter(is_private, told(tree)))
    assert [
        f"{path.relative_to(LIBRARY)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in reached_for(tree)
        if name not in own[package_of(path)] | OF_PYTHON | OF_OTHERS
    ] == []
