"""`persist pending`: a pending area at a shell, from the first look to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.core.plan.written import Plan, parse_plan
from persist_lib.location.api import Newest
from persist_lib.location.open import open_location
from tests.integration.test_cli import Shell
from tests.unit.pending_area.areas import said
from tests.worlds import SCHEMA


class Pending(Shell):
    """A shell, and writers of a collection."""

    def put(self, writer: str, lower: int, upper: int, word: str = "w") -> None:
        with pending_area.Writer(self.root, "readings", writer, SCHEMA) as write:
            write.put(said(lower, upper, word), lower, upper)


@pytest.fixture
def sh(tmp_path: Path) -> Pending:
    sh = Pending(tmp_path / "data")
    with persist.open(tmp_path / "data") as client:
        pending_area.create(client, "readings", SCHEMA).close()
    return sh


def test_a_life_of_a_pending_area(sh: Pending):
    assert sh("pending", "show").strip() == "nothing is pending"
    for lower in range(0, 9, 3):
        sh.put("edge-7", lower, lower + 3)
    sh.put("edge-8", 0, 4)
    assert "readings" in sh("pending", "show")
    assert [one["collection"] for one in sh.json("pending", "show")["collections"]] == ["readings"]
    shown = sh.json("pending", "show", "readings")
    assert [(one["writer"], one["batches"], one["late"]) for one in shown["writers"]] == [
        ("edge-7", 3, 0), ("edge-8", 1, 0),
    ]  # fmt: skip
    assert "reach without a gap to [9]" in sh("pending", "show", "readings")
    before = sh.files()
    assert "would absorb" in sh("maintain", "--only", "pending", "readings", "--dry-run")
    assert sh.files() == before
    assert "up to [9]" in sh("maintain", "--only", "pending", "--all")
    assert len(sh.json("read", "readings", "--diff")["rows"]) == 6
    sh("maintain", "readings")
    sh("maintain", "readings")
    assert sh.json("pending", "show", "readings")["batches"] == 0


def test_a_damaged_collection_is_named_and_the_others_are_listed(sh: Pending):
    with persist.open(sh.root) as client:
        pending_area.create(client, "broken", SCHEMA).close()
    for name in ("broken", "readings"):
        with pending_area.Writer(sh.root, name, "edge-7", SCHEMA) as write:
            write.put(said(0, 3), 0, 3)
    with open_location(sh.root) as location:
        newest = location.consensus.head("broken")
        assert newest is not None
        location.consensus.compare_and_set("broken", Newest(newest.seqno), b"damaged")
    done = sh.run("pending", "show")
    assert done.exit_code == 3, "it is damage"
    assert "readings" in done.stdout
    assert "broken: " in done.stderr
    assert sh.run("maintain", "--only", "pending", "--all").exit_code == 3


def test_writers_that_disagree_are_told_and_an_operator_chooses(sh: Pending):
    sh.put("edge-7", 0, 3)
    sh.put("edge-8", 0, 3, word="x")
    done = sh.run("maintain", "--only", "pending", "readings")
    assert done.exit_code == 3
    assert "edge-7" in done.stdout
    assert "disagree" in done.stdout
    assert json.loads(sh.run("maintain", "--only", "pending", "--all", "--json").stdout)["collections"][0][
        "disagreements"
    ]
    before = sh.files()
    assert "would absorb 1 batch" in sh("pending", "choose", "readings", "edge-8", "--dry-run")
    assert sh.files() == before
    assert "choose one of" in sh.fails(2, "pending", "choose", "readings", "edge-9")
    assert "has absorbed 1 batch" in sh("pending", "choose", "readings", "edge-8", "--through", "3")
    assert {row["word"] for row in sh.json("read", "readings", "--diff")["rows"]} == {"x"}
    sh.put("edge-9", 1, 3)
    assert "came late" in sh("maintain", "--only", "pending", "readings")
    assert "would discard 1 late batch" in sh("pending", "delete", "readings", "--writer", "edge-9", "--dry-run")
    assert "has discarded 1 late batch" in sh("pending", "delete", "readings", "--writer", "edge-9")
    assert "came late" not in sh("maintain", "--only", "pending", "readings")


def test_deleting_asks_and_leaves_nothing(sh: Pending):
    sh.put("edge-7", 0, 3)
    assert "would be deleted, with 1 pending batch" in sh("pending", "delete", "readings", "--dry-run")
    assert "nothing was changed" in sh.fails(2, "pending", "delete", "readings")
    assert "was deleted" in sh("pending", "delete", "readings", "--yes")
    assert sh("pending", "show").strip() == "nothing is pending"
    sh.put("edge-7", 3, 6)
    assert "deleted" in sh("pending", "show")
    assert "1 pending batch were deleted" in sh("maintain", "--only", "pending", "--all")


def test_what_is_wrong_is_a_sentence(sh: Pending):
    assert "names or --all, not both" in sh.fails(2, "maintain", "readings", "--all", "--only", "pending")
    assert "NotFound" in sh.fails(1, "maintain", "--only", "pending", "nothing")
    assert "NotFound" in sh.fails(1, "pending", "show", "nothing")
    assert "writer's name" in sh.fails(2, "pending", "choose", "readings", "a/b")


def test_what_is_pending_is_planned_and_done_exactly(sh: Pending, tmp_path: Path):
    path = tmp_path / "plan.json"
    assert "there is nothing" not in sh("maintain", "--only", "pending", "--plan", path)
    assert parse_plan(path.read_text()) == Plan(())
    sh.put("edge-7", 0, 3)
    said = sh("maintain", "--only", "pending", "--plan", path)
    assert "readings (plan): 1 step" in said
    assert "absorb 1 batch" in said
    stale = path.read_text()
    sh.put("edge-9", 3, 6)
    refused = sh.run("maintain", "--apply", path)
    assert refused.exit_code == 1
    assert "other batches are pending" in refused.stderr
    sh("maintain", "readings", "--only", "pending", "--plan", path)
    assert path.read_text() != stale
    (done,) = sh.json("maintain", "--apply", path)["collections"]
    assert (done["shard"], done["batches"], done["left"]) == ("readings", 2, 0)
    assert sh.run("maintain", "--apply", path).exit_code == 1, "it is done"
    assert "nothing to do" in sh("maintain", "--only", "pending", "--plan", path)
