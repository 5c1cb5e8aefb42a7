"""A shard's appends under other policies: what is predicted is what happens, and what is not known is said."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import persist_lib as persist
from persist_lib import report
from persist_lib.cli.app import app
from persist_lib.core.state import Version
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.report import simulated
from tests.unit.report.test_fleet import Checked
from tests.worlds import SCHEMA, World

ROWS, STEPS, EVERY = 2_000, 40, 5
LAZY: dict[str, Any] = {"compaction_weight": 0.1, "compaction_ahead": 0.0}


def lived(client: persist.Client, policy: persist.Policy, shard: str = "s") -> Version:
    """A load, then upserts, with compaction after every few of them: the same rows for each policy."""
    dice = random.Random(3)
    with client.open_writer(shard, SCHEMA) as write:
        write.upsert([{"id": n, "word": f"{n:09}"} for n in range(ROWS)])
        for step in range(STEPS):
            write.upsert([{"id": n, "word": f"{step}-{n}"} for n in sorted(dice.sample(range(ROWS), 150))])
            if step % EVERY == EVERY - 1:
                client.compact(shard, policy=policy)
    client.compact(shard, policy=policy)
    return client.inspect(shard)


def test_what_is_predicted_is_what_happens_under_each_policy(world: World) -> None:
    """Batches exactly, and updates that are stored but for what estimates cannot know."""
    client = world.client()
    own = lived(client, client.policy()).state
    found = report.simulate(client, "s", {"lazy": LAZY})
    lazy = lived(client, persist.Policy(weight=0.1, ahead=0.0), "t").state
    assert [one.policy for one in found.found] == [simulated.AS_IT_IS, "lazy"]
    for said, state in zip(found.found, (own, lazy), strict=True):
        assert said.batches == len(state.filled)
        assert said.appended == ROWS + 2 * 150 * STEPS, "an upsert of a row that is there is two updates"
        stored = sum(batch.size for batch in state.stored)
        assert 0.8 < said.stored / stored < 1.25
        assert 0.8 < said.written / (state.appended_bytes + state.maintained_bytes) < 1.25
    assert found.appends == STEPS + 1
    assert found.found[0].worst < found.found[1].worst, "contents ahead bound what reads do"
    assert found.found[0].written > found.found[1].written, "and are what that costs"


def test_what_upkeep_truncated_is_said_and_what_is_known_is_taken_for_typical(world: World) -> None:
    client = world.client()
    lived(client, client.policy())
    client.maintain("s")
    with pytest.raises(InvalidUsage, match="no appends that are still known"):
        report.simulate(client, "s", {"lazy": LAZY})
    with client.open_writer("s", SCHEMA) as write:
        for step in range(3):
            write.upsert([{"id": n, "word": f"{step}+{n}"} for n in range(100)])
    found = report.simulate(client, "s", {"lazy": LAZY})
    assert found.appends == simulated.ENOUGH
    told = " ".join(found.assumed)
    for words in ("before are not known", "3 appends of it are known", f"after each {simulated.EVERY} appends"):
        assert words in told
    assert len({one.batches for one in found.found} | {one.rewritten for one in found.found}) > 2


def test_history_that_a_policy_gives_up_is_not_stored(world: World) -> None:
    client = world.client()
    lived(client, client.policy())
    asked: dict[str, dict[str, Any]] = {
        "short": {"retention": 0, "compaction_ahead": 0.0},
        "long": {"compaction_ahead": 0.0},
    }
    asked["last"] = {**asked["short"], "retention": "last 1"}
    _, short, long, last = report.simulate(client, "s", asked).found
    assert msgspec.structs.replace(last, policy="short") == short, "each append is of one time here"
    assert short.stored < long.stored / 2
    assert short.read < long.read


def test_reads_are_in_the_dollars_as_often_as_they_are_said_to_be(world: World) -> None:
    client = world.client()
    client.prices = persist.Prices(get=1.0, put=0.0, gib_month=0.0)
    lived(client, client.policy())
    never, often = (report.simulate(client, "s", {}, reads_a_day=n).found[0] for n in (0, 2))
    assert often.dollars_month - never.dollars_month == pytest.approx(60 * never.read_gets)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quiet": ["08:00-09:00"]}, "says quiet, which a replay"), ({"bytes_day": 5}, "says bytes_day"),
        ({}, "says nothing"), ("", "says nothing"), (3, "got 3"),
        ({"compaction_wait": 1}, "compaction_weight"), ("compaction_weight =", "TOML"), ({"retention": "7 pies"}, "7"),
    ],
)  # fmt: skip
def test_a_policy_that_says_nothing_here_is_refused(world: World, given: object, said: str) -> None:
    client = world.client()
    lived(client, client.policy())
    with pytest.raises(InvalidUsage, match=said):
        report.simulate(client, "s", {"odd": given})


def test_a_policy_is_the_same_in_each_form(world: World) -> None:
    client = world.client()
    lived(client, client.policy())
    forms = {
        "toml": "compaction_weight = 2.0",
        "fields": {"compaction_weight": 2.0},
        "value": persist.Policy(weight=2.0),
    }
    _, *found = report.simulate(client, "s", forms).found
    assert len({(one.batches, one.written, one.read) for one in found}) == 1
    with pytest.raises(NotFound):
        report.simulate(client, "missing", forms)


def test_the_page_has_a_column_for_each_policy_and_a_picture(world: World) -> None:
    client = world.client()
    lived(client, client.policy())
    found = report.simulate(client, "s", {"lazy": LAZY})
    document = report.shown(found, picture=True)
    assert document.tables[0].columns == ("", simulated.AS_IT_IS, "lazy")
    assert document.picture.startswith(b"\x89PNG")
    assert "table" in Checked(report.html(document)).seen


def test_the_command_compares_files(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data") as client:
        lived(client, client.policy())
    (tmp_path / "lazy.toml").write_text("compaction_weight = 0.1\n")
    words = ["report", "s", "--location", f"file:{tmp_path}/data", "--policy", str(tmp_path / "lazy.toml"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [one["policy"] for one in json.loads(done.stdout)["found"]] == [simulated.AS_IT_IS, "lazy"]
    missing = CliRunner().invoke(app, [*words[:-2], str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
    assert "none.tomlcannotberead" in "".join(missing.output.split()), "lines end anywhere, as the path is long"
