"""The pages of types, locations and errors name what there is, all of it and no more; so do the references."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.events import store as kinds
from persist_lib.location.open import BUILT_IN
from persist_lib.schema import types
from scripts import site_pages
from tests import built

DOCS = built.ROOT / "docs"


def first_cells(page: str, heading: str = "") -> list[str]:
    """The names in the first column of the table under a heading, or of the first one of the page."""
    section = (DOCS / page).read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def public_errors() -> set[str]:
    found = {name: getattr(persist, name) for name in persist.public.__all__}
    return {name for name, thing in found.items() if inspect.isclass(thing) and issubclass(thing, Exception)}


def test_every_public_error_is_on_the_page_once_with_what_it_means_and_what_to_do() -> None:
    names = first_cells("errors.md", "## All of them")
    assert sorted(names) == sorted(public_errors())
    rows = [line.split(" | ") for line in (DOCS / "errors.md").read_text().splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and all(cell.strip("| ") for cell in row) for row in rows)


def test_the_table_of_types_has_each_type_and_each_other_name_is_one() -> None:
    said = [persist.Schema(key={"k": name}).key[0].type for name in first_cells("types.md", "## Column types")]
    plain = {name for name in said if re.fullmatch(r"\w+|time64\[us\]", name)}
    assert plain == set(types._SIMPLE)
    kinds = {type(types.parse_type(name)) for name in said} - {type(pa.int64())}
    assert {pa.TimestampType, pa.DurationType, pa.Decimal128Type, pa.FixedSizeBinaryType} <= kinds
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", (DOCS / "types.md").read_text(), re.MULTILINE)
    for cell, others in rows:
        meant = {str(types.parse_type(name)) for name in re.findall(r"`([^`]+)`", cell)}
        for other in re.findall(r"`([^`]+)`", others):
            assert str(types.parse_type(other)) in meant, other


def test_the_table_of_locations_has_each_scheme() -> None:
    urls = first_cells("locations.md")
    assert {url.partition(":")[0] for url in urls} == set(BUILT_IN) - {"postgres"}, "which is postgresql's other name"


def test_the_extras_that_are_installed_are_those_of_the_page() -> None:
    assert first_cells("install.md") == list(built.project("persist-lib")["optional-dependencies"])
    assert metadata.metadata("persist-lib").get_all("Provides-Extra"), "as pip sees them"


BRACKETS = re.compile(r"\b(persist(?:[-_](?:lib|pipeline))?)(?:-[\w.-]*?\.whl)?\\{0,2}\[([a-z0-9, -]+)\]")
IN_WORDS = re.compile(r"\bextras? ((?:`[\w-]+`(?:, | and | or )?)+)")
ERRORS = re.compile(r"\bextra=\"([a-z-]+)\"")
NO_EXTRAS = {"refuse", "add", "ignore", "forbid", "allow"}
"""What pydantic and the readers of lines call `extra`."""


def pages_and_programs() -> Iterator[Path]:
    yield from (built.ROOT / "README.md", built.ROOT / "pipeline" / "README.md")
    yield from (path for path in DOCS.rglob("*.md") if path.parent.name != "design")
    for folder in ("persist_lib", "orchestration", "jobs", "examples", "bench", "scripts"):
        yield from (built.ROOT / folder).rglob("*.py")


def extras_named(text: str) -> Iterator[tuple[str, str]]:
    """The distribution and the extra that a text names, in `persist-lib[s3,sql]`, in words, or in an error."""
    for name, extras in BRACKETS.findall(text):
        yield from ((name.replace("_", "-"), extra.strip()) for extra in extras.split(","))
    for found in IN_WORDS.findall(text):
        yield from (("persist-lib", extra) for extra in re.findall(r"[\w-]+", found) if extra not in ("and", "or"))
    yield from (("persist-lib", extra) for extra in ERRORS.findall(text) if extra not in NO_EXTRAS)


def test_every_extra_that_a_page_a_hint_or_a_help_text_names_can_be_installed() -> None:
    there = {
        (name, extra)
        for name in ("persist-lib", "persist-pipeline") for extra in built.project(name)["optional-dependencies"]
    }  # fmt: skip
    named = {(path.name, one) for path in pages_and_programs() for one in extras_named(path.read_text())}
    assert len(named) > 20
    assert {(path, "[".join(one) + "]") for path, one in named if one not in there} == set()
    of_stores = {kind.extra for kind in kinds.BUILT_IN.values() if kind.extra is not None}
    assert {("persist-lib", extra) for extra in of_stores} <= there


def test_the_reference_of_the_api_has_every_public_name_once() -> None:
    assert site_pages.public_names() == persist.public.__all__
    assert set(site_pages.error_names()) == public_errors()
    text = "".join(page for _, _, page in site_pages.api_pages())
    assert sorted(re.findall(r"^::: persist_lib\.public\.(\w+)$", text, re.MULTILINE)) == sorted(persist.public.__all__)


def test_a_public_name_that_no_page_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(site_pages.GROUPS, "times", ("Times", "…", ["Antichain", "at"]))
    with pytest.raises(LookupError, match="TOP"):
        list(site_pages.api_pages())


def test_the_reference_of_the_command_has_each_command() -> None:
    page = site_pages.command_page()
    for words in ("persist append", "persist hold set", "persist maintain"):
        assert f"\n## {words}\n" in page
    assert page.count("Usage: persist") == page.count("\n## persist")
