"""The log on a PostgreSQL: USE_POSTGRES is the URL of one."""

import os
import sys

import persist_lib as persist

with persist.open(f"file:{sys.argv[1]}/blobs", os.environ["USE_POSTGRES"]) as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    assert [row["id"] for row in read.snapshot(as_of=0).to_pylist()] == [1]
