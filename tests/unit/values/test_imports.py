"""What an import and a `--help` load, counted in modules: seconds depend on the machine (`make bench NAME=imports`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = {
    "pandas", "polars", "boto3", "botocore", "psycopg", "psycopg_pool", "pyspark", "dagster", "duckdb", "typer", "rich",
    "jobs", "orchestration", "opentelemetry", "prometheus_client",
}  # fmt: skip
"""What only an extra, the command or the pipeline needs."""
SLOW = {"pyarrow", "numpy", "pydantic", "msgspec", "apsw", "xxhash"} | OPTIONAL
HELP = """
import typer.main
from persist_lib.cli.app import app

def names(group, *path):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from names(command, *path, name)

command = typer.main.get_command(app)  # once: to build it takes longer than to show a help
every = list(names(command))
assert len(every) > 15, every
for path in every:
    command([*path, "--help"], standalone_mode=False)
"""


def loaded_by(program: str) -> set[str]:
    """The packages that a program has loaded when it ends, with those that Python loads for itself."""
    last = "\nimport sys\nprint()\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program + last], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_import_alone_loads_the_standard_library_and_nothing_else() -> None:
    assert loaded_by("import persist_lib as persist") & SLOW == set()


def test_what_is_used_loads_no_extra_and_not_the_command() -> None:
    program = """
import persist_lib as persist
with persist.open("memory:") as client:
    write, read = client.open_shard("s", persist.Schema(key={"id": "int64"}, value={"text": "string"}))
    write.compare_and_append([{"id": 1, "text": "x"}], 0, 1)
    assert read.snapshot(as_of=0).to_arrow().num_rows == 1
    client.maintain("s")
    controller = client.controller()
    controller.create("c", persist.Schema(key={"id": "int64"}), mode="compare_and_append")
    with controller.open_writer("c") as write:
        write.append_now([{"id": 1}])
"""
    loaded = loaded_by(program)
    assert loaded & OPTIONAL == set()
    assert "pyarrow" in loaded, "so that the test can see what is loaded"


def test_an_arrow_table_is_appended_without_pandas() -> None:
    program = """
import numpy as np
import pyarrow as pa
import persist_lib as persist
schema = persist.Schema(key={"id": "int64 not null"})
types = [pa.int64(), pa.uint64(), pa.int64()]
values = [np.array([1, 2]), np.array([0, 0]), np.array([1, 1])]
columns = [pa.Array.from_buffers(t, 2, [None, pa.py_buffer(v)]) for t, v in zip(types, values)]
with persist.open("memory:") as client:
    write, read = client.open_shard("s", schema)
    write.compare_and_append(pa.Table.from_arrays(columns, schema=schema.updates), 0, 1)
    assert read.snapshot(as_of=0).to_arrow().num_rows == 2
"""
    assert "pandas" not in loaded_by(program), "Arrow imports it for much that looks harmless, and that takes long"


def test_the_help_of_every_command_is_shown_without_arrow_and_without_the_library() -> None:
    loaded = loaded_by(HELP)
    assert loaded & {"pyarrow", "numpy", "apsw", "pandas"} == set()
    assert "rich" in loaded


@pytest.mark.parametrize("first", ["timeline", "sources"])
def test_what_stands_on_the_catalog_may_be_imported_first(first: str) -> None:
    """The import contract leaves out that a controller loads these, so it would not see a circle."""
    loaded_by(f"import persist_lib.{first}")
