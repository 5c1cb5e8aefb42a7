"""Several pipelines beside each other: no name collides, and each maintains its own location."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
from persist_lib.errors import InvalidUsage
from tests.orchestration.test_definitions import ASSETS
from tests.spark.collections import SMALL, write

pytestmark = pytest.mark.dagster


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[persist.Client, persist.Client]]:
    config = persist.Config(**SMALL)
    with (
        persist.open(f"file:{tmp_path / 'eu'}", config=config) as eu,
        persist.open(f"file:{tmp_path / 'us'}", config=config) as us,
    ):
        yield eu, us


def names(definitions: dg.Definitions) -> set[str]:
    """Every name that Dagster knows of these definitions."""
    repository = definitions.get_repository_def()
    return {
        *(spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()),
        *(job.name for job in repository.get_all_jobs() if not job.name.startswith("__")),
        *(schedule.name for schedule in repository.schedule_defs),
        *(sensor.name for sensor in repository.sensor_defs),
        *(definitions.resources or {}),
    }


def test_two_locations_in_one_code_location_share_no_name_and_load(tmp_path: Path) -> None:
    eu = build_definitions(Settings(location=f"file:{tmp_path / 'eu'}"), name="eu")
    us = build_definitions(Settings(location=f"file:{tmp_path / 'us'}"), name="us")
    plain = build_definitions(Settings(location=f"file:{tmp_path / 'plain'}"))
    assert not names(eu) & names(us)
    assert not names(eu) & names(plain)
    merged = dg.Definitions.merge(eu, us, plain)
    dg.Definitions.validate_loadable(merged)
    assert len(merged.resolve_all_asset_specs()) == 3 * len(ASSETS)
    assert names(merged) == names(eu) | names(us) | names(plain)
    assert {spec.group_name for spec in eu.resolve_all_asset_specs()} == {"eu", "eu_data"}
    checks = set(merged.resolve_asset_graph().asset_check_keys)
    assert len(checks) == 3 * len({key.name for key in checks})


def test_each_maintains_its_own_location_and_partitions(
    two: tuple[persist.Client, persist.Client], instance: dg.DagsterInstance
) -> None:
    eu, us = two
    write(eu, "orders", batches=4, rows=20)
    write(us, "orders", batches=4, rows=20)
    write(us, "more", batches=1, rows=20)
    merged = dg.Definitions.merge(
        build_definitions(Settings(location=eu.url, config=SMALL), name="eu"),
        build_definitions(Settings(location=us.url, config=SMALL), name="us", key_prefix=["lake", "us"], group="lake"),
    )
    done = merged.resolve_job_def("eu_compaction").execute_in_process(instance=instance)
    assert done.success
    assert (eu.census("orders").batches, us.census("orders").batches) == (1, 4)
    assert instance.get_dynamic_partitions("eu_persist_shards") == ["orders"]
    assert instance.get_dynamic_partitions("us_persist_shards") == []
    assert instance.get_materialized_partitions(dg.AssetKey(["eu", "compaction"])) == {"orders"}
    assert merged.resolve_job_def("us_compaction").execute_in_process(instance=instance).success
    assert us.census("orders").batches == 1
    assert instance.get_materialized_partitions(dg.AssetKey(["lake", "us", "compaction"])) == {"orders"}
    assert instance.get_dynamic_partitions("us_persist_shards") == ["orders"], "nothing was due on the other shard"


@pytest.mark.parametrize("name", ["a b", "ä", "1st", "a/b", "a-b", "a.b", None, 3, b"eu", np.int64(3), ["eu"], " "])
def test_a_name_that_dagster_would_refuse_is_refused_with_words(name: object) -> None:
    with pytest.raises(InvalidUsage, match="name must be letters"):
        build_definitions(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", [[""], ["a b"], 3, [3], {"a": 1}, ["a", None]])
def test_a_prefix_that_dagster_would_refuse_is_refused_with_words(prefix: object) -> None:
    with pytest.raises(InvalidUsage, match="key_prefix must be a list of names"):
        build_definitions(name="eu", key_prefix=prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", ["", "a b", 3, ["x"]])
def test_a_group_that_dagster_would_refuse_is_refused_with_words(group: object) -> None:
    with pytest.raises(InvalidUsage, match="group must be letters"):
        build_definitions(group=group)  # type: ignore[arg-type]


def test_a_prefix_may_be_one_name_or_none() -> None:
    one = build_definitions(name="eu", key_prefix="lake")
    assert {spec.key.path[0] for spec in one.resolve_all_asset_specs()} == {"lake"}
    bare = build_definitions(name="eu", key_prefix=[])
    assert {spec.key.to_user_string() for spec in bare.resolve_all_asset_specs()} == ASSETS
