"""What keeps the library small to read: the length of functions and parameter lists, and how much is marked subtle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[3] / "persist_lib"
Function = ast.FunctionDef | ast.AsyncFunctionDef
LONG = {"core/transitions.py change"}
"""The table of transitions: a line for each command and refusal."""
MANY = {
    "catalog/handover.py hand_over", "events/loop.py __init__", "relation/reader.py snapshot",
    "streams/lifecycle.py open", "table/table.py read", "timeline/tables.py create",
    "maintain/survey.py __init__",
}  # fmt: skip
"""Calls of users, whose arguments are named there; and one more."""


@pytest.fixture(scope="module")
def functions() -> dict[str, Function]:
    return {
        f"{file.relative_to(LIBRARY)} {node.name}": node
        for file in sorted(LIBRARY.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, Function) and (is_long(node) or takes_many(node))
    }


def is_long(node: Function) -> bool:
    return (node.end_lineno or 0) - node.lineno + 1 > 60


def takes_many(node: Function) -> bool:
    arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in arguments if name not in {"self", "cls"}]) > 8


def test_no_function_is_longer_than_a_screen_but_the_table_of_transitions(functions: dict[str, Function]) -> None:
    assert {name for name, node in functions.items() if is_long(node)} <= LONG


def test_no_parameter_list_is_longer_than_eight_but_of_some_public_calls(functions: dict[str, Function]) -> None:
    assert {name for name, node in functions.items() if takes_many(node)} <= MANY


def test_what_is_marked_as_subtle_is_little_enough_to_be_heeded() -> None:
    def marked() -> Iterator[str]:
        for file in LIBRARY.rglob("*.py"):
            yield from (f"{file.name}: {line.strip()}" for line in file.read_text().splitlines() if "SUBTLE" in line)

    assert len(list(marked())) <= 60
