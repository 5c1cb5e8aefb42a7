"""Dagster's code location, from a workspace that names the installed module, and by the module alone."""

import subprocess
import sys
from pathlib import Path

import dagster as dg

from orchestration.definitions import defs
from orchestration.duties import DUTIES

folder = Path(sys.argv[1])
assert len(defs.resolve_all_asset_specs()) == len(DUTIES) + 3  # and the collections, the sources, and pending areas
(folder / "workspace.yaml").write_text(
    "load_from:\n  - python_module: {module_name: orchestration.definitions, location_name: persist}\n"
)
dagster = str(Path(sys.executable).with_name("dagster"))
subprocess.run([dagster, "definitions", "validate", "-w", str(folder / "workspace.yaml")], check=True, cwd=folder)
with dg.DagsterInstance.ephemeral() as instance:
    assert instance.get_dynamic_partitions("persist_shards") == []
