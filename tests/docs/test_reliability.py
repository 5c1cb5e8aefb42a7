"""docs/reliability.md: what is shown is what the kept counts give, and counts are added up as they were written."""

from __future__ import annotations

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests import counted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reliability() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("reliability", str(ROOT / "scripts" / "reliability"))
    spec = spec_from_loader("reliability", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_pages_show_what_the_kept_counts_give(reliability: Any) -> None:
    assert reliability.main(["--check"]) == 0


def test_a_count_that_is_changed_by_hand_is_seen(reliability: Any, tmp_path: Path, monkeypatch: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- counts totals -->\n| seeds | 12 |\n<!-- end -->\nafter\n")
    monkeypatch.setattr(reliability, "PAGES", (page,))
    assert reliability.main(["--check"]) == 1


def test_lines_are_added_up_by_kind_and_a_part_that_was_not_run_again_stays(
    reliability: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(counted.VARIABLE, str(tmp_path / "sim.jsonl"))
    counted.count("simulation", seeds=1, operations=10, faults={"lost": 2, "late": 1})
    counted.count("simulation", seeds=1, operations=5, faults={"lost": 3})
    counted.count("kills", kills=4)
    said = {"date": "2026-01-02", "commit": "abc", "sizes": ["SEEDS=2"], "passed": True, "seconds": 3}
    (tmp_path / "sim.json").write_text(json.dumps(said))
    (tmp_path / "empty.json").write_text(json.dumps(said))
    older = {"torture": {**said, "date": "2026-01-01", "passed": False, "counts": {"kills": {"kills": 1}}}}
    kept = reliability.taken(older, tmp_path)
    assert [*kept] == ["sim", "torture"], "what counted nothing is not kept"
    assert kept["sim"]["counts"] == {
        "kills": {"kills": 4},
        "simulation": {"seeds": 2, "operations": 15, "faults": {"lost": 5, "late": 1}},
    }
    made = reliability.blocks(kept)
    assert "| seeds simulated | 2 |" in made["totals"]
    assert "| real processes killed | 5 |" in made["totals"]
    assert "| mutation score: changes of the ground floor that the fast tests find | not measured |" in made["totals"]
    assert "| recorded bugs that the tests find | not measured |" in made["totals"]
    assert "| simulated | lost | 5 |" in made["faults"]
    assert "| `make sim SEEDS=2` | 2026-01-02 | abc | passed | 3 |" in made["parts"]
    assert "**failed**" in made["parts"]
    assert made["line"].startswith("The long tests from 2026-01-01 to 2026-01-02: 2 simulated histories, 15 simulated")
    assert reliability.blocks({})["line"] == "Nothing was counted yet."


def test_mutants_that_are_excused_are_not_asked_for(reliability: Any) -> None:
    part = {"date": "2026-01-02", "commit": "abc", "sizes": [], "passed": True, "seconds": 3}
    counts = {"mutants": {"drawn": 1_300, "found": 1_100, "excused": 100}, "defects": {"planted": 400, "found": 399}}
    made = reliability.blocks({"mutants": {**part, "counts": counts}})
    assert "that the fast tests find | 1,100 of 1,200 |" in made["totals"]
    assert "| recorded bugs that the tests find | 399 of 400 |" in made["totals"]


def test_nothing_is_written_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(counted.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    counted.count("kills", kills=1)
    assert [*tmp_path.iterdir()] == []
