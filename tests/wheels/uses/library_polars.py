"""Frames in and out."""

import sys

import polars as pl

import persist_lib as persist

with persist.open(f"file:{sys.argv[1]}/data") as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append(pl.DataFrame({"id": [1, 2], "word": ["a", None]}), 0, 1)
    frame = read.snapshot(as_of=0).to_polars()
    assert isinstance(frame, pl.DataFrame)
    assert sorted(frame["id"]) == [1, 2]
