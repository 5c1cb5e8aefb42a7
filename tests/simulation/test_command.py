"""`persist simulate`: some seeds of each kind of table hold, a seed that fails is shown, and nothing is touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Damage, InvalidUsage
from persist_lib.simulate import EAGER, NO_FAULTS, Faults, Layout, NotHeld, Story, simulate
from persist_lib.simulate.scene import Scene, parse_faults, scene_of
from tests.commands import invoke
from tests.simulation.stories import seeds
from tests.worlds import SCHEMA

COLUMNS = ("--key", "id:int64", "--value", "word:string")
SHORT = ("--steps", 400, "--seeds", 1)
FEW = 4
"""So many seeds of a shard find each of the defects that name this file."""


def answered(*words: object) -> dict[str, Any]:
    """What a command answers as JSON, and its exit code."""
    done = invoke("--json", *words)
    return {"code": done.exit_code, **json.loads(done.stdout)}


@pytest.mark.parametrize("seed", seeds(FEW))
def test_a_shard_holds_what_it_must(seed: int) -> None:
    found = simulate(Scene(persist.Schema({"id": "int64"}, {"word": "string"}, times="ms")).story, [seed])
    assert found.failed == ()


@pytest.mark.parametrize("mode", [(), ("--mode", "compare_and_append", "--shards", 2), ("--mode", "wal")])
def test_each_kind_of_table_is_simulated(mode: Sequence[object]) -> None:
    found = answered("simulate", *COLUMNS, *mode, *SHORT)
    assert (found["code"], found["held"], found["seeds"], found["failed"]) == (0, True, 1, [])
    assert found["operations"]["compare_and_set"]
    assert found["checks"]["nothing is lost, doubled or invented"] == 1


def test_the_same_seed_prints_the_same_history() -> None:
    words = ("simulate", *COLUMNS, "--steps", 200, "--seed", 5, "--replay")
    first = invoke(*words)
    assert first.exit_code == 0
    assert first.stdout == invoke(*words).stdout
    assert first.stdout.count(" compare_and_set s ") > 10


def test_a_table_of_a_location_is_read_and_nothing_of_it_is_touched(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url, create=True) as client:
        client.table("orders", schema=persist.Schema({"id": "int64"}, {"lines": "list<string>"})).append([{"id": 1}])
        client.controller().create("sums", SCHEMA, shards=3, mode="compare_and_append", retention=5)

    def files() -> dict[Path, str]:
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    for name in ("orders", "sums"):
        assert answered("--location", url, "simulate", name, *SHORT)["held"]
    assert files() == before
    with persist.open(url, read_only=True) as client:
        assert scene_of(client, "orders").schema.value[0].type == "list<string>"
        assert scene_of(client, "sums").layout == Layout("collection", "compare_and_append", 3, ("id",), 5)
    assert invoke("--location", url, "simulate", "nothing").exit_code == 1


def test_the_settings_the_policy_and_the_processes_are_the_users(tmp_path: Path) -> None:
    scene = Scene(SCHEMA, config={"lease_ms": 777, "cache": {"path": str(tmp_path / "cache")}}, writers=3, readers=0)
    story = scene.story(0)
    assert (story.config.lease_ms, story.config.part_bytes, story.config.cache) == (777, 64 * 1024, None)
    assert (story.roles["writer"], story.roles["reader"]) == (3, 0)
    lazy = persist.Policy(weight=0.1)
    assert [Scene(SCHEMA, policy=lazy).story(seed).policy for seed in (0, 1)] == [lazy, EAGER]
    file = tmp_path / "lazy.toml"
    file.write_text("compaction_weight = 0.1")
    config = ("--config", '{"lease_ms": 2000}', "--policy", file, "--writers", 1)
    assert answered("simulate", *COLUMNS, *SHORT, *config)["held"]


class Broken(Story):
    """A story whose check fails for one seed, and which is interrupted at another one."""

    def begin(self, client: persist.Client) -> None:
        self.simulation.note("it", "began")

    def judge(self, client: persist.Client) -> None:
        self.expect("seeds are small", self.seed == 3, "this one is 3")
        if self.seed == 5:
            raise KeyboardInterrupt


def test_a_seed_that_fails_is_said_with_the_end_of_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "story", lambda _self, seed, _lines=40: Broken(seed))
    shown = invoke("simulate", *COLUMNS, "--seeds", 10)
    assert shown.exit_code == 1
    assert "seed 3: NotHeld: seeds are small: this one is 3" in shown.stdout
    assert "it began" in shown.stdout
    assert "--seed 3 --replay" in shown.stdout
    assert "4 (0 to 3) of 10, as 1 seed failed" in shown.stdout
    on = answered("simulate", *COLUMNS, "--seeds", 5, "--keep-going")
    assert (on["code"], on["seeds"], [one["seed"] for one in on["failed"]]) == (1, 5, [3])
    stopped = answered("simulate", *COLUMNS, "--seed", 4, "--seeds", 5)
    assert (stopped["code"], stopped["seeds"], stopped["stopped"]) == (130, 1, "as it was interrupted")


def test_whatever_a_process_meets_is_an_answer_and_a_bound_of_time_ends_it() -> None:
    class Damaged(Broken):
        def judge(self, client: persist.Client) -> None:
            raise Damage("simulated")

    assert simulate(Damaged, range(3)).failed[0].error == "Damage"
    moments = iter(range(100))
    found = simulate(lambda seed: Broken(seed + 10), range(50), seconds=3, clock=lambda: next(moments))
    assert (found.took.seeds, found.stopped) == (3, "as 3 s were over")
    with pytest.raises(NotHeld, match="this one is 3"):
        Broken(3).run()


def test_faults_are_none_or_chances_by_name() -> None:
    assert parse_faults("none") == NO_FAULTS
    assert parse_faults('{"crash": 0.5}') == Faults(crash=0.5)
    for wrong in ('{"crush": 0.5}', '{"crash": 2}', "all", "[]"):
        with pytest.raises(InvalidUsage):
            parse_faults(wrong)
    assert answered("simulate", *COLUMNS, *SHORT, "--faults", "none")["faults"] == {}


def test_what_does_not_go_together_is_refused() -> None:
    for words in ((), ("orders", *COLUMNS), (*COLUMNS, "--replay"), (*COLUMNS, "--mode", "wal", "--times", "none")):
        assert invoke("simulate", *words).exit_code == 2, words
