"""The carriers that a table can have, and how it is made on each."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import persist_lib as persist

SCHEMA = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "word": "string"}, unique=True, times="ms")


class Carrier(NamedTuple):
    """`shards`: 0 for a lone shard. `mode`: that of the timeline, for a table. Or a collection that was a shard."""

    name: str
    shards: int = 0
    mode: Any = None
    is_promoted: bool = False

    def make_table(self, client: persist.Client, name: str, schema: persist.Schema) -> None:
        if self.mode:
            client.controller().tables().create(name, schema, shards=self.shards, mode=self.mode)
        elif self.is_promoted:
            client.open_writer(name, schema).close()
            client.upgrade(name)
            client.controller().promote(name)
        elif self.shards:
            client.controller().create(name, schema, shards=self.shards, mode="compare_and_append")
        else:
            client.open_writer(name, schema).close()


ALL = (
    Carrier("shard"), Carrier("promoted shard", 1, is_promoted=True), Carrier("collection of 1", 1),
    Carrier("collection of 3", 3), Carrier("direct", 2, "yolo"), Carrier("wal", 2, "wal"),
)  # fmt: skip


def _table_t(carrier: Carrier, db: persist.Client) -> None:
    carrier.make_table(db, "t", SCHEMA)
    if not carrier.shards:
        db.set_retention("t", 1 << 40)  # as a collection, it keeps all of its history from the beginning on


CARRIERS = {one.name: partial(_table_t, one) for one in ALL}
"""What makes a table `t` on each, by name: for what has to be the same on all of them."""
