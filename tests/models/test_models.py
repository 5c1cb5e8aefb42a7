"""The formal models hold within their bounds, their mistakes are found, and the real code does what the model does."""

from __future__ import annotations

import re
import shutil

import pytest

from persist_lib.sources.conformance import check_diverged, check_gone, check_reader
from persist_lib.sources.protocol import START
from tests.circles import is_day
from tests.models import check, scenes
from tests.models.processes import Mismatch
from tests.models.replay import Replay, events, replayed, trace
from tests.models.replay_groups import GroupsReplay
from tests.models.replay_shard import ShardReplay
from tests.models.replay_sources import SourcesReplay
from tests.models.replay_wal import WalReplay
from tests.models.replays import REPLAYS
from tests.models.upstream import PARTITION, Upstream, UpstreamReader

needs_spin = pytest.mark.skipif(
    bool(check.missing_tools()), reason=f"{check.missing_tools()}; scripts/spin does it, as root"
)
MODELS = sorted(check.HERE.glob("*.pml"))
RICH = {
    ShardReplay: (225, 4, 48, 102, 85, 118, 212, 99, 135),
    GroupsReplay: (46, 153, 30, 28, 283),
    WalReplay: (52, 136, 2),
    SourcesReplay: (86, 21, 8, 14),
}
"""By Spin 6.5, traces that together come to all steps that some hundred traces came to."""
SHARES, NIGHTLY_TRACES = (1 if is_day() else 3), 75
RARE = {
    "compactor gone",
    "compactor never_known",
    "compactor not_found_expired",
    "reader read_expired",
    "roller too_old",
    "server not_found",
    "controller refused",
}
"""Steps that random traces may not come to."""
MISTAKEN = [
    (ShardReplay, "lease_does_not_fence"),
    (ShardReplay, "collector_needs_no_rollup"),
    (ShardReplay, "since_ignores_readers"),
    (GroupsReplay, "all_are_answered_alike"),
    (GroupsReplay, "tokens_are_not_looked_up"),
    (WalReplay, "handover_below_the_wal"),
    (WalReplay, "truncation_forgets_the_old_rendition"),
    (SourcesReplay, "hold_follows_the_errors"),
    (SourcesReplay, "told_what_is_read"),
]


def name_of(replay: type[Replay]) -> str:
    return replay.file.removesuffix(".pml")


@needs_spin
@pytest.mark.parametrize("scene", scenes.SCENES, ids=lambda scene: f"{scene.file} {scene.name}")
def test_every_claim_holds(scene: scenes.Scene) -> None:
    found = check.explore_scene(scene, at_night=not is_day())
    assert (found.broken, found.is_whole) == (None, True), found
    assert found.states > 100, "it looked at next to nothing"


@needs_spin
@pytest.mark.parametrize("mutant", scenes.MUTANTS, ids=lambda mutant: f"{mutant.file} {mutant.name}")
def test_a_mistake_breaks_the_claim_that_it_should(mutant: scenes.Mutant) -> None:
    assert check.explore_mutant(mutant).broken == mutant.claim


@needs_spin
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("replay", REPLAYS, ids=name_of)
def test_the_real_code_does_what_the_model_does(replay: type[Replay], share: int) -> None:
    first = 1_000 + share * NIGHTLY_TRACES
    done = replayed(replay, [*RICH[replay][share::SHARES], *(() if is_day() else range(first, first + NIGHTLY_TRACES))])
    assert done.total() > 30, "traces of hardly any steps"


@needs_spin
@pytest.mark.skipif(is_day(), reason="the traces of the day are too few")
@pytest.mark.parametrize("replay", REPLAYS, ids=name_of)
def test_traces_come_to_nearly_every_step(replay: type[Replay]) -> None:
    seeds = [*RICH[replay], *range(1_000, 1_000 + SHARES * NIGHTLY_TRACES)]
    assert events(replay) - RARE <= {f"{step.who} {step.what}" for seed in seeds for step in trace(replay, seed)}


@needs_spin
@pytest.mark.parametrize(("replay", "mistake"), MISTAKEN, ids=[mistake for _, mistake in MISTAKEN])
def test_the_real_code_does_not_do_what_a_mistaken_model_does(replay: type[Replay], mistake: str) -> None:
    def agrees(seed: int) -> bool:
        try:
            replay(trace(replay, seed, mistake)).run()
        except Mismatch:
            return False
        return True

    assert not all(agrees(seed) for seed in range(1, 60))


def test_the_upstream_of_a_replay_keeps_what_a_reader_promises() -> None:
    upstream = Upstream("promises")
    upstream.have = 4
    check_reader(lambda: UpstreamReader(upstream), {PARTITION: [upstream.message(n) for n in range(4)]})
    mark = UpstreamReader(upstream).high_watermarks({}, 2)[PARTITION]
    check_gone(UpstreamReader(upstream), PARTITION, START, mark)  # as it was told
    upstream.begin_again()
    upstream.have = 4
    check_diverged(UpstreamReader(upstream), PARTITION, START, mark)


@needs_spin
def test_what_was_cut_off_does_not_count_as_whole() -> None:
    found = check.explore("shard.pml", scenes.SCENES[1].night, seconds=0.01)
    assert (found.broken, found.is_whole) == (None, False)


def test_without_spin_it_says_so_and_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "spin" else f"/usr/bin/{name}")
    assert check.main([]) == check.Exit.NOT_RUN
    assert capsys.readouterr().err == "not run: no spin. Debian: apt-get install spin\n"


def test_every_mistake_in_a_model_is_one_that_must_be_found() -> None:
    written = {(file.name, name) for file in MODELS for name in re.findall(r"MUTANT_(\w+)", file.read_text())}
    assert written == {(mutant.file, mutant.name) for mutant in scenes.MUTANTS}


def test_every_claim_is_one_that_a_mistake_breaks() -> None:
    claims = {(file.name, name) for file in MODELS for name in re.findall(r"assert\((\w+)\)", file.read_text())}
    assert claims - {(mutant.file, mutant.claim) for mutant in scenes.MUTANTS} == set()


def test_a_model_says_what_it_stands_for_and_its_bounds() -> None:
    for file in MODELS:
        head = file.read_text().split("*/", 1)[0]
        assert all(word in head for word in ("What is real behind each step", "Bounds:", "not modelled")), file.name
