"""Shards as tables of DuckDB, from Python and by the command."""

import subprocess
import sys
from pathlib import Path

import persist_lib as persist

where = f"file:{sys.argv[1]}/data"
with persist.open(where) as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append([{"id": 1, "word": "a"}, {"id": 2, "word": "b"}], 0, 1)
    assert read.snapshot(as_of=0).to_duckdb().aggregate("sum(id)").fetchall() == [(3,)]
command = [
    str(Path(sys.executable).with_name("persist")),
    "--location",
    where,
    "sql",
    "select sum(id) as s from orders",
]
said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
assert "3" in said, said
