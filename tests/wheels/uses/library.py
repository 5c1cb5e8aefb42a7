"""Without an extra: write, read, the command; and what a missing extra says."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import persist_lib as persist

folder = Path(sys.argv[1])
assert persist.__version__ == importlib.metadata.version("persist-lib")


def refusal(call: Callable[[], object]) -> str:
    """What is said of a package that is not installed."""
    try:
        call()
    except persist.InvalidUsage as error:
        return str(error)
    raise AssertionError("it was not refused")


orders = persist.Schema(key={"order_id": "int64"}, value={"state": "string", "cents": "int64"})
with persist.open(f"file:{folder}/data") as client:
    write, read = client.open_shard("orders", orders)
    write.compare_and_append([{"order_id": 1, "state": "placed", "cents": 999}], 0, 1)
    assert read.snapshot(as_of=0).to_arrow().num_rows == 1
    assert "persist-lib[polars]" in refusal(read.snapshot(as_of=0).to_polars)
assert "persist-lib[s3]" in refusal(lambda: persist.open("s3+cas://bucket/a"))
assert "persist-lib[postgres]" in refusal(lambda: persist.open(f"file:{folder}/data", "postgresql://host/a"))
for name in ("jobs", "orchestration", "tests", "bench", "pandas", "polars", "boto3", "psycopg", "pyspark", "dagster"):
    assert importlib.util.find_spec(name) is None, f"{name} came with persist-lib"
command = [str(Path(sys.executable).with_name("persist")), "--location", f"file:{folder}/data", "shard", "list"]
said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
assert "orders" in said, said
