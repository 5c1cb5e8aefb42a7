"""`make docs` builds the site, and a link that leads nowhere is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MKDOCS = built.ROOT / ".venv" / "docs" / "bin" / "mkdocs"


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(MKDOCS), "build", "--strict"], cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the site is made of, to be spoilt. `make docs` sets up what builds it."""
    subprocess.run(["make", ".venv/docs/.packages"], cwd=built.ROOT, check=True, stdout=subprocess.DEVNULL)
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "scripts", "persist_lib"):
        shutil.copytree(built.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(built.ROOT / "mkdocs.yml", folder)
    return folder


def test_the_site_is_built_with_its_references(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 0, done.stderr
    site = tree / "build" / "site"
    for page, call in (("write", "WriteHandle.upsert"), ("client", "Client.set_hold"), ("read", "Snapshot.to_duckdb")):
        assert f'id="persist_lib.public.{call}"' in (site / "api" / f"{page}.html").read_text(), "inherited ones too"
    assert "persist hold set" in (site / "command.html").read_text()
    for page in ("install", "operations", "design/index", "design/0001-transitions-answer-diffs"):
        assert (site / f"{page}.html").exists(), page
    assert "fonts.googleapis" not in (site / "index.html").read_text(), "nothing is fetched from elsewhere"


@pytest.mark.parametrize(
    "wrong",
    [
        {
            "nowhere.md": "[a page](nowhere.md)",
            "no-such-heading": "[a heading](operations.md#no-such-heading)",
            "none.png": "![a picture](pictures/none.png)",
        },
        {"NoSuchName": "::: persist_lib.public.NoSuchName"},
    ],
    ids=["links", "names"],
)
def test_what_leads_nowhere_is_an_error(tree: Path, wrong: dict[str, str]) -> None:
    page = tree / "docs" / "types.md"
    text = page.read_text()
    page.write_text("\n\n".join([text, *wrong.values(), ""]))
    done = build(tree)
    page.write_text(text)
    assert done.returncode != 0
    assert [name for name in wrong if name not in done.stderr] == []


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "pipeline/README.md", "requirements/README.md", "CHANGELOG.md"):
        page = built.ROOT / name
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not re.match(r"https?:", link):
                path, _, anchor = unquote(link).partition("#")
                found = page.parent / path if path else page
                assert found.exists(), (name, link)
                assert not anchor or anchor in anchors_of(found), (name, link)


def anchors_of(page: Path) -> set[str]:
    """What a code host calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
