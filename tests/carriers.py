"""A table `t` on each of the six carriers, for what has to be the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import persist_lib as persist

SCHEMA = persist.Schema({"id": "int64 not null"}, {"seq": "int64", "word": "string"}, unique=True, times="ms")


def shard(db: persist.Client) -> None:
    db.open_writer("t", SCHEMA).close()
    db.set_retention("t", 1 << 40)  # as a collection, it keeps all of its history from the beginning on


def collection(shards: int) -> Callable[[persist.Client], None]:
    return lambda db: ignore(db.controller().create("t", SCHEMA, shards=shards, mode="compare_and_append"))


def timeline(mode: Any) -> Callable[[persist.Client], None]:
    return lambda db: ignore(db.controller().tables().create("t", SCHEMA, shards=2, mode=mode))


def ignore(_: object) -> None:
    """For what is answered and not needed."""


def promoted(db: persist.Client) -> None:
    db.open_writer("t", SCHEMA).close()
    db.upgrade("t")
    db.controller().promote("t")


CARRIERS = {
    "shard": shard, "promoted shard": promoted, "collection of 1": collection(1), "collection of 3": collection(3),
    "direct": timeline("yolo"), "wal": timeline("wal"),
}  # fmt: skip
