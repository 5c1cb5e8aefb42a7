"""At every width, every number, name, moment and digest is whole; nothing is left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text
from typer.testing import Result

import persist_lib as persist
from persist_lib.cli import render
from persist_lib.cli.table_layout import Fitted, Flow, wrapped
from persist_lib.core.duties import DUTIES
from persist_lib.core.state import Batch, Part, State, Version
from persist_lib.frontier import at
from persist_lib.ids import PartKey, SeqNo
from persist_lib.maintain import census_of
from tests.commands import invoke
from tests.unit.cli.shells import LONG, NS, make_large

WIDTHS = (80, 60, 40)


def printed(renderable: RenderableType, width: int) -> str:
    out = Console(file=StringIO(), width=width)
    out.print(renderable, crop=False)
    return str(out.file.getvalue())  # type: ignore[attr-defined]


def words(text: str) -> Counter[str]:
    return Counter(word.removesuffix(":") for word in re.findall(r"[^\s─]+", text))


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d[\d,.]*", text))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_large(tmp_path_factory.mktemp("large") / "data")


def run(url: str, width: int | None, *words: str, stdin: str | None = None) -> Result:
    return invoke(*words, typed=stdin, PERSIST_LOCATION=url, COLUMNS=None if width is None else str(width))


COMMANDS = [
    ("shard", "list"), ("shard", "list", "--long"), ("shard", "show", LONG), ("shard", "show", LONG, "--batches"),
    ("shard", "log", LONG), ("shard", "log", "o"), ("shard", "log", LONG, "0"), ("shard", "log", LONG, "2", "8"),
    ("shard", "list", "--watch", "--count", "1"), ("shard", "scrub", LONG), ("config",), ("tables",), ("read", LONG),
    ("read", "o"), ("describe", LONG), ("describe", LONG, "--who"), ("set-retention", LONG),
    ("maintain", "--all", "--dry-run"),
    *(("maintain", LONG, "--only", duty.name, "--dry-run") for duty in DUTIES if duty.is_upkeep),
    ("drop", LONG, "--dry-run"), ("shard", "repair", LONG, "--dry-run"), ("shard", "upgrade", LONG, "--dry-run"),
    ("listen", "o", "--as-of", "0", "--no-wait"),
    ("outcome", "o", "00" * 16, "--lower", "5", "--upper", str(NS)), ("create", "o", "--key", "id:int64"),
    ("evolve", LONG, "--add", "more:string", "--dry-run"),
]  # fmt: skip
MEASURED = re.compile(r"\d[\d.]* (ms|s|min)( |$)|\d+ requests?, .* (read|written)|known since|\d+\.\d+ s$")


EMPTY = frozenset({"reads", "from", "lease", "until", "owner"})
"""Words in the names of columns that are empty, which are left out where columns are below a line."""


def stable(text: str) -> str:
    """The text without what differs from run to run: how long leases last, and how long things took."""
    return "\n".join(line for line in text.splitlines() if not MEASURED.search(line))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_number_and_word_of_a_command_is_whole_at_every_width(url: str, command: tuple[str, ...]) -> None:
    wide = run(url, None, *command)
    assert wide.exit_code == 0, wide.output
    for width in WIDTHS:
        narrow = run(url, width, *command)
        assert narrow.exit_code == 0, narrow.output
        gone = words(stable(wide.stdout)) - words(narrow.stdout)
        assert set(gone) <= EMPTY, (width, gone, narrow.stdout)
        longest = max((cell_len(word) for word in words(narrow.stdout)), default=0)
        for line in narrow.stdout.splitlines():
            assert cell_len(line.rstrip()) <= max(width, longest + 12), (width, line)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one[0] != "listen"], ids=" ".join)
def test_every_large_number_of_the_json_is_whole_in_the_text_at_80_columns(url: str, command: tuple[str, ...]) -> None:
    def found(value: Any) -> set[int]:
        if isinstance(value, dict):
            return set().union(*(found(item) for item in value.values()), set())
        if isinstance(value, list):
            return set().union(*(found(item) for item in value), set())
        return {value} if isinstance(value, int) and not isinstance(value, bool) and value >= 10**15 else set()

    def figures(text: str) -> set[int]:
        return {int(digits.replace(",", "")) for digits in re.findall(r"\d[\d,]*\d", text)}

    large = found(json.loads(run(url, None, *command, "--json").stdout.splitlines()[0]))
    wide, narrow = run(url, None, *command).stdout, run(url, 80, *command).stdout
    assert large & figures(wide) <= figures(narrow), command
    if set(command) & {"read", "list", "show"} and LONG in wide:
        assert large & figures(narrow), "the test sees none of them"


def test_what_is_a_number_stands_at_the_right_and_under_its_name(url: str) -> None:
    table = Fitted(("name", "count"), frozenset({"count"}))
    table.add_row("a", "7")
    table.add_row("b", "1,000,000,000,000")
    lines = printed(table, 40).splitlines()
    assert lines[3].rstrip().endswith(" 7")
    assert len({len(line.rstrip()) for line in lines[1:5]}) == 1


def test_a_table_that_is_too_wide_gets_lines_below_its_lines() -> None:
    table = Fitted(("shard", "upper", "size", "held by"), frozenset({"upper", "size"}))
    table.add_row("orders", f"[{NS}]", "931 GiB", "1 reader, 2 holds")
    assert printed(table, 30).splitlines() == [
        " shard                   upper", " ─────────────────────────────", f" orders  [{NS}]",
        "    size: 931 GiB", "    held by: 1 reader, 2 holds", "",
    ]  # fmt: skip


def test_a_name_that_is_wider_than_the_terminal_is_a_heading_and_stays_whole() -> None:
    table = Fitted(("shard", "upper"), frozenset({"upper"}))
    table.add_row("x" * 50, str(NS))
    assert printed(table, 40).split() == ["shard", "─" * 39, "x" * 50, "upper:", str(NS)]


def test_brackets_in_names_and_values_are_no_markup() -> None:
    table = Fitted(("[red]", "b"))
    table.add_row("[bold]x[/]", "[0]")
    for width in (80, 10):
        assert {"[red]", "[bold]x[/]", "[0]"} <= set(printed(table, width).split())


def test_a_number_keeps_its_unit_and_a_date_its_time() -> None:
    text = "read 931 GiB at 2026-11-22 13:14:15Z for $1,234.50 in 12 s"
    for width in range(20, 60):
        lines = [line.plain.strip() for line in wrapped(Text(text), width, 2)]
        assert any("931 GiB" in line for line in lines)
        assert any("2026-11-22 13:14:15Z" in line for line in lines)
        assert any("12 s" in line for line in lines)


CELLS = st.text(st.sampled_from("ab1 0,名é\n"), max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=4, max_size=4), max_size=5), st.integers(5, 120), st.sets(st.integers(0, 3)))
def test_whatever_the_cells_and_the_width_no_word_is_broken_and_none_is_lost(
    rows: list[list[str]], width: int, right: set[int]
) -> None:
    names = ["n0", "n1", "n2", "n3"]
    table = Fitted(names, frozenset(names[place] for place in right))
    for row in rows:
        table.add_row(*row)
    text = printed(table, width)
    expected = words("\n".join(cell for row in rows for cell in row))
    assert not expected - words(text)
    assert not words(text) - expected - Counter(dict.fromkeys(names, 10**6))
    longest = max((cell_len(word) for word in words(text)), default=0)
    assert all(cell_len(line.rstrip()) <= max(width, longest + 10) for line in text.splitlines())


@settings(max_examples=150, deadline=None)
@given(CELLS, st.integers(1, 40))
def test_text_that_flows_keeps_its_words_and_its_lines(text: str, width: int) -> None:
    shown = printed(Flow(Text(text)), width)
    assert words(shown) == words(text)
    assert len(shown.splitlines()) >= len(text.split("\n")) or not text


def test_a_shard_of_a_petabyte_is_printed_whole(tmp_path: Path) -> None:
    key = PartKey("w00000000000000aa/0000000000000001.parquet")
    part = Part(key, 10**15, 10**13, bytes(16), b"a", b"z", NS, NS, 0)
    batch = Batch(0, 1, at(0), at(NS + 1), at(0), 10**13, 10**13, 7, (part,), (0,))
    schema = persist.Schema(key={"k": "int64"})
    state = State(trace=(batch,), schemas=(schema,), count=10**13, size=10**15, fingerprint=7)
    census = census_of(LONG, Version(SeqNo(10**9), state, bytes(16)), 1_000_000)
    for table in (render.shards_table([census]), render.census_table(census), render.compare_table([census], [census])):
        wide = numbers(printed(table, 1000))
        assert {"10,000,000,000,000", str(NS + 1)} <= set(wide)
        for width in WIDTHS:
            assert not wide - numbers(printed(table, width)), printed(table, width)
