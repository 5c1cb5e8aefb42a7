"""Runs the snippets of one page, in their order, in this folder. It runs where users' code does, without our tests.

    python runner.py PAGE [PREPARATION.json]        exit status 1 and page:line where something is not as the page says

What is run, and what is compared:

    ```python                   in one namespace for the page. An expression beside a literal has that value:
                                    snapshot.to_pylist()  # [{"id": 1}]
    ```bash, ```sh              as one script; it stops at the first command that fails
    ```console                  each line after `$ ` is run; what follows it up to the next `$ ` is what it prints
    ```text title="output"      right after a snippet: what that prints
    ```python title="not run: a reason that readers see"

In what is printed, `…` stands for any text within a line, and a line of `…` alone for any lines.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<more>[^`\n]*)$")
TITLE = re.compile(r'title="([^"]*)"')
RUN = {"python", "bash", "sh", "console"}
SHOWN = {"", "text", "json", "yaml", "toml", "sql", "mermaid", "markdown"}
"""What is only read. A fence in another language is refused: it would be a snippet that nobody runs."""
NOT_RUN = "not run: "
OUTPUT = "output"


class Wrong(Exception):
    """A page does not say what is so."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, without its indentation. `line` is that of its first line of code."""

    language: str
    title: str
    code: str
    line: int

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.title.startswith(NOT_RUN)


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not (fence := FENCE.match(line)):
            continue
        indent, code = fence["indent"], []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            code.append(inner.removeprefix(indent))
        else:
            raise Wrong(f"line {number}: this fence is never closed")
        title = TITLE.search(fence["more"])
        found.append(Block(fence["language"], title[1] if title else "", "\n".join(code) + "\n", number + 1))
    return found


def check_fences(blocks: list[Block]) -> None:
    """Raise Wrong for a snippet that would silently not be run."""
    for block in blocks:
        if block.language not in RUN | SHOWN:
            raise Wrong(
                f"line {block.line - 1}: ```{block.language} is not known; snippets are {', '.join(sorted(RUN))}"
            )
        if block.title.startswith("not run") and len(block.title.partition(NOT_RUN)[2].split()) < 2:
            raise Wrong(f'line {block.line - 1}: say why it is not run, as in title="{NOT_RUN}needs a cluster"')


def run(blocks: list[Block], page: str) -> int:
    """Run all snippets of a page; returns how many there were."""
    check_fences(blocks)
    # As a program has it: what pickles a class of the page, or resolves its annotations, looks into this module.
    program = sys.modules["__main__"] = ModuleType("__main__")
    names = program.__dict__
    count = 0
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if not block.is_run:
            continue
        count += 1
        try:
            printed = _run_one(block, names, page)
            if following is not None and following.title == OUTPUT:
                _compare(printed, following.code)
        except Wrong as wrong:
            raise Wrong(f"{page}, the {block.language} at line {block.line}: {wrong}") from wrong.__cause__
        except Exception as error:
            raise Wrong(
                f"{page}, the {block.language} at line {block.line}: {type(error).__name__}: {error}"
            ) from error
    return count


def _run_one(block: Block, names: dict[str, Any], page: str) -> str:
    match block.language:
        case "python":
            return _run_python(block, names, page)
        case "console":
            return "".join(_run_session(block.code))
        case _:
            return _run_shell(block.code)


def _run_python(block: Block, names: dict[str, Any], page: str) -> str:
    # The line numbers of a traceback are those of the page.
    code = "\n" * (block.line - 1) + block.code
    tree = _Answers(code).visit(ast.parse(code))
    names["_answered"] = _answered
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.fix_missing_locations(tree), page, "exec", dont_inherit=True), names)
    return printed.getvalue()


class _Answers(ast.NodeTransformer):
    """Has each expression that stands beside a literal compared with it."""

    def __init__(self, code: str) -> None:
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        self._comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        comment = self._comments.get(node.end_lineno or node.lineno, "").removeprefix("#").strip()
        try:
            ast.literal_eval(comment)
        except (SyntaxError, ValueError):
            return node  # words
        said = ast.Constant(comment)
        call = ast.Call(ast.Name("_answered", ast.Load()), [node.value, said, ast.Constant(node.lineno)], [])
        return ast.copy_location(ast.Expr(call), node)


def _answered(value: object, said: str, line: int) -> None:
    if value != ast.literal_eval(said):
        raise Wrong(f"line {line} says {said}, and it is {value!r}")


def _run_shell(script: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Wrong(f"exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def _run_session(session: str) -> Iterator[str]:
    """Run the commands of a session one by one. They may fail, where what they print is shown."""
    pieces = re.split(r"^\$ ", session, flags=re.MULTILINE)
    if pieces[0].strip():
        raise Wrong(f"a session starts with `$ `, not with {pieces[0]!r}")
    for piece in pieces[1:]:
        command, _, shown = _continued(piece)
        done = subprocess.run(
            ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode and not shown.strip():
            raise Wrong(f"$ {command}\nexit status {done.returncode}\n{done.stdout}")
        if shown.strip():
            _compare(done.stdout, shown, f"$ {command}\n")
        yield done.stdout


def _continued(piece: str) -> tuple[str, str, str]:
    """The command, with the lines that a backslash joins to it, and what is shown of its output."""
    command, newline, rest = piece.partition("\n")
    while command.endswith("\\") and rest:
        more, newline, rest = rest.partition("\n")
        command = f"{command}\n{more}"
    return command, newline, rest


def _compare(printed: str, shown: str, before: str = "") -> None:
    pattern = "".join(_line_pattern(line) for line in shown.strip("\n").splitlines())
    tidy = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n") + "\n"
    if not re.fullmatch(pattern, tidy):
        raise Wrong(f"{before}the page shows\n{shown}\nand it prints\n{printed}")


def _line_pattern(line: str) -> str:
    if line.strip() in {"…", "..."}:
        return r"(?:.*\n)*?"
    return ".*?".join(re.escape(piece) for piece in line.rstrip().split("…")) + r"\n"


def main(page: str, preparation: str = "") -> int:
    """Run a page. The preparation has texts to `replace`, and Python to run `before` and `after` the snippets."""
    prepared = json.loads(Path(preparation).read_text()) if preparation else {}
    text = Path(page).read_text()
    for old, new in prepared.get("replace", {}).items():
        if old not in text:
            sys.exit(f"{page}: {old!r} is not in it any more")
        text = text.replace(old, new)
    extra = {side: [Block("python", "", prepared[side], 1)] for side in ("before", "after") if side in prepared}
    os.environ.setdefault("COLUMNS", "80")
    try:
        count = run([*extra.get("before", []), *blocks_of(text), *extra.get("after", [])], Path(page).name)
    except Wrong as wrong:
        if wrong.__cause__ is not None and not isinstance(wrong.__cause__, Wrong):
            traceback.print_exception(wrong.__cause__)
        sys.exit(str(wrong))
    print(f"{count} snippets")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
