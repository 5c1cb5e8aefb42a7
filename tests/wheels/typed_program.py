"""A user's program, checked by a strict mypy against the installed wheel."""

from __future__ import annotations

from typing import assert_type

import persist_lib as persist

orders = persist.Schema(key={"order_id": "int64"}, value={"state": "string", "cents": "int64"})


def place(client: persist.Client, rows: list[dict[str, object]], at: int) -> int:
    """Append, and try again after another writer."""
    write, read = client.open_shard("orders", orders)
    assert_type(write, persist.WriteHandle)
    assert_type(read, persist.ReadHandle)
    try:
        write.compare_and_append(rows, expected_upper=at, new_upper=at + 1)
    except persist.UpperMismatch as mismatch:
        return place(client, rows, mismatch.actual.time or 0)
    snapshot = read.snapshot(as_of=at)
    assert_type(snapshot, persist.Snapshot)
    return len(snapshot.to_pylist())


with persist.open("file:./data", config=persist.Config(inline_bytes=0)) as client:
    assert_type(client, persist.Client)
    place(client, [{"order_id": 1, "state": "placed", "cents": 999}], 0)
