"""What Dagster loads: everything is there, and loading it opens nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import InstigatorType
from dagster_shared.yaml_utils import load_yaml_from_path

from orchestration.definitions import build_definitions
from orchestration.duties import DUTIES
from orchestration.settings import Settings, resolved
from persist_lib.errors import InvalidUsage
from scripts.dagster_home import make_home

pytestmark = pytest.mark.dagster
ROOT = Path(__file__).parents[2]
OTHERS = {"collections", "sources", "pending", "erasures", "plans", "health", "fleet", "shard_page", "tables"}
ASSETS = {*DUTIES, *OTHERS}

OPENS_NOTHING = """
import sys
for name in [name for name in __import__("os").environ if name.startswith("PERSIST")]:
    del __import__("os").environ[name]
opened = []
def hook(event, args):
    if event in ("socket.connect", "sqlite3.connect") or (event == "subprocess.Popen" and args[0] != "file") or (
        event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    ):
        opened.append((event, args))
sys.addaudithook(hook)
import orchestration.definitions as d
import dagster as dg
dg.Definitions.validate_loadable(d.defs)
wrote = [one for one in opened if ".pyc" not in str(one) and "__pycache__" not in str(one)]
assert not wrote, wrote
assert "pyspark" not in sys.modules or not __import__("pyspark").SparkContext._active_spark_context
print(len(d.defs.resolve_all_asset_specs()))
"""


def test_definitions_load_and_validate_without_opening_anything() -> None:
    done = subprocess.run([sys.executable, "-B", "-c", OPENS_NOTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(ASSETS))


def test_every_duty_is_an_asset_with_a_description_owner_group_and_kind() -> None:
    specs = {spec.key.to_user_string(): spec for spec in build_definitions().resolve_all_asset_specs()}
    assert set(specs) == ASSETS
    for name, spec in specs.items():
        assert spec.description
        assert spec.owners
        assert spec.kinds
        assert spec.group_name == ("data" if name == "tables" else "maintenance")
        if name not in {"erasures", "plans", "health", "fleet"}:  # they are about all there is
            assert isinstance(spec.partitions_def, dg.DynamicPartitionsDefinition)


def test_a_backfill_of_duties_is_one_run_whatever_the_number_of_partitions() -> None:
    (duties,) = [one for one in build_definitions().assets or () if getattr(one, "op", None) and len(one.keys) > 1]  # type: ignore[union-attr]
    assert duties.backfill_policy == dg.BackfillPolicy.single_run()  # type: ignore[union-attr]


def test_schedules_and_sensors_are_stopped_unless_they_are_told_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIST_RUNNING", "0")
    for is_running in (True, None, False):
        definitions = build_definitions(Settings(is_running=is_running))
        repository = definitions.get_repository_def()
        assert {one.default_status.value for one in repository.schedule_defs} == {
            "RUNNING" if is_running else "STOPPED"
        }
        running = {one.name for one in repository.sensor_defs if one.default_status.value == "RUNNING"}
        ours = {"shard_discovery", "compaction_debt", "source_watch", "alerts"}
        assert running == (ours if is_running else set())
        assert {one.name for one in repository.sensor_defs} == {*ours, "source_news"}


def test_dagster_finds_the_same_location_by_workspace_and_by_project() -> None:
    (entry,) = load_yaml_from_path(str(ROOT / "workspace.yaml"))["load_from"]  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    module = project["code_location_target_module"]
    assert entry["python_module"]["module_name"] == module == "orchestration.definitions"
    assert entry["python_module"]["location_name"] == project["code_location_name"]


def test_no_tick_is_kept_for_ever(tmp_path: Path) -> None:
    make_home(tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        for kind in InstigatorType:
            days = instance.get_tick_retention_settings(kind)
            assert days
            assert all(0 < one <= 30 for one in days.values()), kind


def test_settings_come_from_the_environment_where_they_are_left_out() -> None:
    environ = {
        "PERSIST_LOCATION": "file:/x",
        "PERSIST_CONFIG": '{"lease_ms": 5000}',
        "PERSIST_SPARK_REMOTE": "sc://h:1",
    }
    found = resolved(Settings(), environ)
    assert found.location == "file:/x"
    assert found.config == {"lease_ms": 5000}
    assert found.spark is not None
    assert found.spark.remote == "sc://h:1"
    assert resolved(Settings(location="memory:"), environ).location == "memory:"
    with pytest.raises(InvalidUsage, match="PERSIST_LOCATION"):
        resolved(Settings(), {})


def test_the_pipeline_s_workers_have_short_leases_unless_settings_say_otherwise() -> None:
    assert resolved(Settings(location="memory:"), {}).config == {"lease_ms": 60_000}
    assert resolved(Settings(location="memory:", config={"lease_ms": 5000}), {}).config == {"lease_ms": 5000}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PERSIST_CONFIG", "{", "PERSIST_CONFIG must be a JSON object"),
        ("PERSIST_CONFIG", "[1]", "PERSIST_CONFIG must be a JSON object"),
        ("PERSIST_CONFIG", '{"part_byte": 1}', "part_byte"),
        ("PERSIST_CONFIG", '{"lease_ms": "soon"}', "lease_ms"),
        ("PERSIST_LOCATION", "flie:./data", "file:"),
        ("PERSIST_CONSENSUS", "postgres//host", "scheme"),
        ("PERSIST_PRICES", "cheap", "prices"),
    ],
)
def test_a_setting_that_cannot_be_right_is_an_error_when_the_code_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidUsage, match=says):
        build_definitions()
