"""Blobs and log on an emulator: USE_GCS is a location of one."""

import os

import persist_lib as persist

with persist.open(os.environ["USE_GCS"]) as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append([{"id": 1, "word": "w" * 100_000}], 0, 1)
    assert [row["id"] for row in read.snapshot(as_of=0).to_pylist()] == [1]
