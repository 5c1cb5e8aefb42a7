"""A table that is published as Iceberg and Delta, and read by pyiceberg and deltalake."""

import sys

from deltalake import DeltaTable
from pyiceberg.table import StaticTable

import persist_lib as persist

schema = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
with persist.open(f"file:{sys.argv[1]}/data") as client:
    client.table("words", schema).append([{"id": n, "word": "w"} for n in range(100)])
    iceberg, delta = client.publish("words"), client.publish("words", "delta")
    assert StaticTable.from_metadata(iceberg.place).scan().to_arrow().num_rows == 100
    assert sum(DeltaTable(delta.place).get_add_actions(flatten=True)["num_records"].to_pylist()) == 100
