"""Pauses in Dagster: nothing asks for what is paused, runs leave it and say so, and a cancel is a pause."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from jobs.parallel import in_parallel
from orchestration import sweep
from orchestration.definitions import build_definitions
from orchestration.mount import Mount
from orchestration.resources import Persist
from orchestration.settings import Settings
from orchestration.stopping import BY_ITSELF, CANCELS, next_ticks
from persist_lib.core.duties import NAMES
from tests.orchestration.test_passes import run, summary
from tests.orchestration.test_sensors_and_schedules import shards_of, skipped, tick
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
ON_DISK = True
WHO: dict[str, Any] = {"owner": "ann", "reason": "the bucket is copied"}


@pytest.fixture
def repository(folder: Path) -> dg.RepositoryDefinition:
    return build_definitions(Settings(location=f"file:{folder}", config=SMALL)).get_repository_def()


def said(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    return "\n".join(entry.user_message for entry in instance.all_logs(result.run_id))


def test_nothing_asks_for_what_is_paused_and_each_page_says_so(
    client: persist.Client, folder: Path, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance,
    given: Persist,
) -> None:  # fmt: skip
    for name in ("a", "b"):
        write(client, name, batches=6, rows=5)
    client.pause("a", **WHO, only=["compaction"])
    data = tick(repository, "compaction_debt", instance, given)
    assert shards_of(data) == [["b"]]
    result = run(folder, instance, "compaction")
    assert (summary(result)["visited"], summary(result)["paused"], summary(result)["idle"]) == (1, 1, 0)
    assert "on 1 of them it is paused" in said(instance, result)
    assert (client.census("a").batches, client.census("b").batches) == (6, 1)
    idle: Any = tick(repository, "compaction_debt", instance, given)
    assert "1 are not compacted, as that is paused" in idle.skip_message
    asked = skipped(repository, "compaction_schedule", instance, given)
    assert asked.endswith("on 1 of them it is paused")
    assert skipped(repository, "census_schedule", instance, given) == "", "to count changes nothing"


def test_a_run_that_a_person_starts_leaves_what_is_paused_and_says_by_whom(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    write(client, "a", batches=6, rows=5)
    client.pause("a", **WHO, only=["compaction"])
    result = run(folder, instance, "compaction", shards=["a"])
    assert result.success
    assert summary(result)["left"] == 1
    assert "a is left: a: compaction is paused by ann" in said(instance, result)
    assert client.census("a").batches == 6
    assert summary(run(folder, instance, "compaction", shards=["a"], even_if_paused=True))["left"] == 0
    assert client.census("a").batches == 1


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, kind: type[BaseException]) -> None:
    """A run is cancelled when so many shards are done."""
    whole = in_parallel

    def some(one: Any, shards: Sequence[str], *rest: Any) -> Iterator[Any]:
        yield from whole(one, shards[:after], *rest)
        raise kind

    monkeypatch.setattr(sweep, "in_parallel", some)


@pytest.mark.parametrize("cancel", CANCELS)
def test_a_cancel_pauses_what_is_unfinished_until_the_next_schedule_or_a_person(
    client: persist.Client, folder: Path, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance,
    given: Persist, monkeypatch: pytest.MonkeyPatch, cancel: type[BaseException],
) -> None:  # fmt: skip
    for name in ("a", "b", "c"):
        write(client, name, batches=6, rows=5)
    with monkeypatch.context() as patched:
        interrupted(patched, 1, cancel)
        assert not run(folder, instance, "compaction", shards=["a", "b", "c"]).success
    pauses = client.pauses()
    assert {one.patterns for one in pauses} == {("b", "c")}
    assert all(one.is_cancel and one.owner.startswith("Dagster run ") for one in pauses)
    until = {duty: one.until_ms for one in pauses for duty in one.duties}
    assert until.keys() == {"leases", "retention", "compaction", "publication", "rollups", "garbage"}
    now = client.consensus.now()
    assert all(ms is not None and now < ms <= now + 86_400_000 for ms in until.values())
    assert (until["leases"] or 0) <= now + 61_000
    assert shards_of(tick(repository, "compaction_debt", instance, given)) == []
    done = client.maintain("b")
    assert "cancelled" in done.paused["compaction"], "persist maintain heeds it as well"
    by_itself = {"ops": {"compaction_of_shards": {"config": {"engine": "local", "shards": ["b"]}}}}
    definition = repository.get_job("compaction")
    definition.execute_in_process(instance=instance, run_config=by_itself, tags={BY_ITSELF[0]: "compaction_schedule"})
    assert client.census("b").batches == 6, "this one was not started by a person"
    assert run(folder, instance, "compaction", shards=["b"], dry_run=True).success
    assert "b" in client.survey().pauses
    assert run(folder, instance, "compaction", shards=["b"]).success
    assert (client.census("b").batches, client.census("c").batches) == (1, 6)
    assert client.survey().pauses.keys() == {"c"}
    assert run(folder, instance, "compaction").success, "a person who names none means all"
    assert client.census("c").batches == 1
    assert client.pauses() == ()


def test_a_failed_run_pauses_nothing(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "a", batches=6, rows=5)
    interrupted(monkeypatch, 0, RuntimeError)
    assert not run(folder, instance, "compaction").success
    assert client.pauses() == ()


def test_each_duty_is_next_due_by_its_own_schedule_or_by_that_of_a_job_with_it() -> None:
    at = dt.datetime(2026, 11, 27, 4, 0, 30, tzinfo=dt.UTC).timestamp()
    found = {duty: dt.datetime.fromtimestamp(ms / 1000, dt.UTC) for ms, some in next_ticks(at, NAMES, Mount()).items()
             for duty in some}  # fmt: skip
    day = dt.datetime(2026, 11, 27, tzinfo=dt.UTC)
    assert found == {
        "leases": day.replace(hour=4, minute=1), "retention": day.replace(hour=4, minute=7),
        "rollups": day.replace(hour=4, minute=7), "garbage": day.replace(hour=4, minute=7),
        "compaction": day.replace(hour=4, minute=53), "publication": day.replace(hour=4, minute=53),
        "orphans": day.replace(day=28, hour=2, minute=23),
        "scrub": day.replace(day=29, hour=3, minute=41),
    }  # fmt: skip
