"""What is a partition: all that is there and nothing that was dropped. Whose a minted name is, is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.partitions import NONE_YET
from orchestration.resources import Persist
from orchestration.settings import Settings
from persist_lib import pending_area
from persist_lib.sources.alerts import CHECKS
from persist_lib.sources.kinds import owners_of
from scripts.dagster_home import make_home
from tests.orchestration.runs import why
from tests.orchestration.test_passes import run
from tests.orchestration.test_sensors_and_schedules import skipped, tick
from tests.orchestration.test_sources import Fed
from tests.spark.collections import SCHEMA, SMALL, damage_a_part, write

pytestmark = pytest.mark.dagster
ON_DISK = True
DEFINED = ("shards", "collections", "sources", "pending")


@pytest.fixture
def repository(folder: Path) -> dg.RepositoryDefinition:
    return build_definitions(Settings(location=f"file:{folder}", config=SMALL)).get_repository_def()


def partitions(
    repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist
) -> dict[str, list[str]]:
    """The partitions once the sensor and the schedule of pending areas have ticked."""
    tick(repository, "shard_discovery", instance, given)
    skipped(repository, "pending_schedule", instance, given)
    return {name: sorted(instance.get_dynamic_partitions(f"persist_{name}")) for name in DEFINED}


def test_what_is_there_is_drawn_before_anything_ran_and_what_was_dropped_is_not(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist,
    folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    assert partitions(repository, instance, given) == {name: [NONE_YET] for name in DEFINED}, "grey, and not green"
    write(client, "plain", batches=1, rows=3)
    fed = Fed(client, tmp_path / "in")
    fed.create("words")
    fed.controller.create("orders", SCHEMA, shards=2)
    pending_area.create(client, "readings", SCHEMA).close()
    with pending_area.Writer(folder, "readings", "w", SCHEMA) as writer:
        writer.put([{"k": 1, "v": "w", "_time": 0, "_diff": 1}], 0, 1)
    found = partitions(repository, instance, given)
    assert found["sources"] == ["words"]
    assert set(found["collections"]) >= {"orders", "words", "words/health"}
    assert found["pending"] == ["readings"]
    owners = owners_of(client)
    of = {owners.of(shard): shard for shard in found["shards"]}
    assert {"", "the catalog", "collection orders, rendition 1, shard 1", "source words: bindings"} <= set(of)
    assert NONE_YET not in found["shards"]
    assert all(instance.get_materialized_partitions(dg.AssetKey(name)) == set() for name in ("sources", "collections"))

    fed.controller.drop("orders")
    fed.sources.drop("words")
    for _ in range(3):
        fed.controller.tend()
    fed.sources.close()
    fed.controller.close()
    left = partitions(repository, instance, given)
    assert "orders" not in left["collections"]
    assert left["sources"] == [NONE_YET]
    assert set(left["shards"]) <= set(found["shards"]) - {of["collection orders, rendition 1, shard 1"]}
    assert not [shard for shard in left["shards"] if owners_of(client).of(shard).startswith(("collection", "source"))]
    pending_area.delete(client, "readings")
    left = partitions(repository, instance, given)
    assert (left["pending"], "readings" in left["shards"], "plain" in left["shards"]) == ([NONE_YET], False, True)


def test_a_shard_with_a_minted_name_says_whose_it_is(
    client: persist.Client, folder: Path, instance: dg.DagsterInstance
) -> None:
    with client.controller() as controller:
        controller.create("orders", SCHEMA, mode="compare_and_append")
        with controller.open_writer("orders") as write_:
            for n in range(6):
                write_.upsert([{"k": key, "v": f"{n}"} for key in range(200)])
        (shard,) = controller.describe("orders").active.shards
    whose = "collection orders, rendition 1, shard 0"
    done: Any = run(folder, instance, "census", shards=[shard])
    (event,) = done.get_asset_materialization_events()
    found = event.step_materialization_data.materialization
    assert (found.partition, found.description, found.metadata["owner"].value) == (shard, whose, whose)
    assert whose in found.metadata["report"].value
    assert all((one.description or "").startswith(whose) for one in done.get_asset_check_evaluations())
    damage_a_part(folder, shard)
    assert f"{shard} ({whose})" in why(run(folder, instance, "scrub", shards=[shard]))


def is_green(instance: dg.DagsterInstance, what: str) -> bool:
    """Whether Dagster's UI draws an asset as materialized: no partition of it is missing or failed."""
    there = set(instance.get_dynamic_partitions(f"persist_{what}"))
    return not there - instance.get_materialized_partitions(dg.AssetKey("census" if what == "shards" else what))


def test_on_a_new_instance_nothing_is_green_before_a_tick_and_where_no_location_opens(
    tmp_path: Path, folder: Path
) -> None:
    make_home(tmp_path / "made")
    with dg.DagsterInstance.from_config(str(tmp_path / "made")) as made:
        repository = build_definitions(Settings(location=f"file:{folder}")).get_repository_def()
        assert not [what for what in DEFINED if is_green(made, what)], "before anything ticked"
    (tmp_path / "fresh").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "fresh")) as fresh:
        none = Persist(location=f"file:{folder}/none")
        with pytest.raises(persist.NotFound):
            tick(repository, "shard_discovery", fresh, none)
        assert not [what for what in DEFINED if is_green(fresh, what)]


def test_on_a_new_instance_a_declared_source_with_data_that_nothing_ingests_is_red(
    client: persist.Client, repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, given: Persist,
    folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    fed = Fed(client, tmp_path / "in")
    for name in ("never", "left"):
        fed.create(name)
        fed.write(name, {"id": 1, "word": "a"})
    fed.sources.run("left", until_idle=True)
    fed.write("left", {"id": 2, "word": "a"})
    key = dg.AssetCheckKey(dg.AssetKey("sources"), "instances")
    job = dg.define_asset_job(
        "judge", selection=dg.AssetSelection.checks(*(dg.AssetCheckKey(key.asset_key, name) for name in CHECKS))
    )
    definitions = dg.Definitions.merge(
        build_definitions(Settings(location=f"file:{folder}", config=SMALL)), dg.Definitions(jobs=[job])
    )
    assert definitions.resolve_job_def("judge").execute_in_process(instance=instance).success, (
        "a red check fails no run"
    )
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key].evaluation
    assert found is not None
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    for name in ("never", "left"):
        assert f"{name}: something new is there, and no instance and no run ingests it" in (found.description or "")
    judged: Any = tick(repository, "source_watch", instance, given).asset_events
    (same,) = [one for one in judged if one.check_name == "instances"]
    assert (same.passed, same.description) == (False, found.description)
    fed.sources.close()
    fed.controller.close()
