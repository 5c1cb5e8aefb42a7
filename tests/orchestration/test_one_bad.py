"""One bad source, collection or timeline: it is named, in red, and stops none of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import ScheduleExecutionError

import persist_lib as persist
from orchestration import duties
from orchestration.resources import Persist
from persist_lib.catalog.describe import Tended
from persist_lib.catalog.renditions import Renditions, Timeline
from persist_lib.errors import Corrupt, Determinate
from persist_lib.sources import Custom, Files, SourceDescription, Sources
from persist_lib.timeline import Lag, Tables
from tests.orchestration.runs import defined, ticked, why
from tests.orchestration.test_sensors_and_schedules import tick
from tests.orchestration.test_sources import SCHEMA, Fed, asked, run
from tests.spark.collections import write

pytestmark = pytest.mark.dagster
ON_DISK = True


@pytest.fixture
def definitions(folder: Path) -> dg.Definitions:
    return defined(folder)


def three_sources(client: persist.Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fed:
    """A good one, one whose reader is broken, and one that cannot be shown."""
    fed = Fed(client, folder)
    for name in ("good", "hidden"):
        fed.create(name)
        fed.write(name, {"id": 1, "word": "a"})
    module = sys.modules.setdefault("one_bad_reader", ModuleType("one_bad_reader"))
    module.reader = lambda: Files(place=str(folder / "good"), format="jsonl").open()  # type: ignore[attr-defined]
    fed.sources.create("broken", Custom(factory="one_bad_reader:reader"), SCHEMA)

    def no_door() -> Any:
        raise ValueError("the feed has no door")

    module.reader = no_door  # type: ignore[attr-defined]
    show = Sources.show

    def shows(sources: Sources, name: str) -> SourceDescription:
        if name == "hidden":
            raise KeyError("c0123")
        return show(sources, name)

    monkeypatch.setattr(Sources, "show", shows)
    return fed


def test_a_tick_judges_the_other_sources_and_names_the_bad_one(
    client: persist.Client, definitions: dg.Definitions, instance: dg.DagsterInstance, given: Persist,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fed = three_sources(client, tmp_path / "in", monkeypatch)
    data: Any = tick(definitions.get_repository_def(), "source_watch", instance, given)
    found = {one.check_name: (one.passed, one.description) for one in data.asset_events}
    passed, says = found["unread"]
    assert not passed
    assert "hidden: KeyError: 'c0123'" in says
    assert "broken: the upstream could not be read: ValueError: the feed has no door" in says
    assert (found["instances"][0], "good: something new is there" in found["instances"][1]) == (False, True)
    data = tick(definitions.get_repository_def(), "source_news", instance, given)
    assert asked(data) == ["good", "hidden"]
    fed.sources.close()
    fed.controller.close()


def test_a_run_ingests_the_other_sources_and_names_the_bad_one(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = three_sources(client, tmp_path / "in", monkeypatch)
    done = run(folder, instance, sources=["broken", "hidden", "good"])
    assert not done.success
    assert "2 of 3 sources" in why(done)
    assert "the feed has no door" in why(done)
    assert "KeyError: 'c0123'" in why(done)
    assert fed.count("good") == 1
    fed.sources.close()
    fed.controller.close()


def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the rendition shard of the collection "bad" cannot be read."""
    fetch: Callable[..., Timeline] = Renditions.fetch

    def fetches(renditions: Renditions, *args: Any, **options: Any) -> Timeline:
        if renditions._name == "bad":
            raise Corrupt("its bytes are not what was written", key="c1.renditions")
        return fetch(renditions, *args, **options)

    monkeypatch.setattr(Renditions, "fetch", fetches)


def test_other_collections_are_tended_beside_a_damaged_one(
    client: persist.Client, folder: Path, definitions: dg.Definitions, instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    controller = client.controller()
    for name in ("bad", "orders", "bills"):
        controller.create(name, SCHEMA, retention=1, mode="compare_and_append")
        with controller.open_writer(name) as write:
            for n in range(4):
                write.append_now([{"id": n, "word": "a"}])
    with controller.tables() as tables:
        tables.create("accounts", SCHEMA, mode="wal", timeline="t")
        tables.insert("accounts", [{"id": 1, "word": "a"}])
    damaged(monkeypatch)
    with pytest.raises(Corrupt, match="bad: Corrupt: its bytes") as told:
        controller.tend(dry_run=True)
    planned: Any = told.value.done
    assert isinstance(planned, Tended)
    assert {step.collection for step in planned.steps} >= {"orders", "bills"}

    assert len(ticked(folder, instance, "collections_schedule").run_requests) == 1
    done = definitions.resolve_job_def("collections").execute_in_process(instance=instance, raise_on_error=False)
    assert not done.success
    assert "bad: Corrupt: its bytes are not what was written" in why(done)
    acted = {event.partition for event in done.get_asset_materialization_events()}
    assert acted == {"orders", "bills", "accounts"}
    assert set(instance.get_dynamic_partitions("persist_collections")) >= {"bad", "orders"}
    with pytest.raises(ScheduleExecutionError) as red:
        ticked(folder, instance, "collections_schedule")
    assert "bad: Corrupt: its bytes" in str(red.value.__cause__)
    controller.close()


def test_tables_are_judged_beside_a_timeline_that_cannot_be_read(
    client: persist.Client, definitions: dg.Definitions, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.controller() as controller, controller.tables() as tables:
        for name in ("bad", "good"):
            tables.create(f"of_{name}", SCHEMA, mode="wal", timeline=name)
            tables.insert(f"of_{name}", [{"id": 1, "word": "a"}])
    lag = Tables.lag

    def lags(tables: Tables, name: str) -> Lag:
        if name == "bad":
            raise Corrupt("its bytes are not what was written", key="t1.wal")
        return lag(tables, name)

    monkeypatch.setattr(Tables, "lag", lags)
    key = dg.AssetCheckKey(dg.AssetKey("collections"), "tables_applied")
    job = dg.define_asset_job("judge", selection=dg.AssetSelection.checks(key))
    judge = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("judge")
    (found,) = judge.execute_in_process(instance=instance).get_asset_check_evaluations()
    assert not found.passed
    assert "bad: Corrupt: its bytes are not what was written" in (found.description or "")
    assert "good" in str(found.metadata["timelines"])


def test_a_sentence_that_cannot_be_made_is_that_shards_failure_and_stops_no_duty(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(client, "a", rows=5)

    def broken(*given: object) -> Any:
        if given[-1] == "retention":
            raise Determinate("the store does not answer")
        return []

    monkeypatch.setattr(duties, "explain", broken)
    report = duties.look_after(client, "a", ("retention", "rollups"), duties.Options())
    assert [one.duty for one in report.done] == ["rollups"]
    assert list(report.errors) == ["retention"]
    assert "the store does not answer" in str(report.errors["retention"])
