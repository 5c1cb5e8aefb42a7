"""Frames in and out."""

import sys

import pandas as pd

import persist_lib as persist

with persist.open(f"file:{sys.argv[1]}/data") as client:
    write, read = client.open_shard("orders", persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    write.compare_and_append(pd.DataFrame({"id": [1, 2], "word": ["a", None]}), 0, 1)
    frame = read.snapshot(as_of=0).to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert sorted(frame["id"]) == [1, 2]
