"""Streams to test: runtimes in a world whose clock, rivals and faults a test decides, and what a stream has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import persist_lib as persist
from persist_lib import streams
from persist_lib.testing import Rival
from persist_lib.testing.faults import Plan
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
QUICK = persist.Config(timeout_s=5.0)
Bag = Counter[tuple[Any, ...]]


def update(id_: int, time: int, word: str | None = "w", diff: int = 1) -> dict[str, Any]:
    return {"id": id_, "word": word, "_time": time, "_diff": diff}


def start(
    world: World,
    config: persist.Config = QUICK,
    *,
    plan: Plan | None = None,
    rival: Rival | None = None,
    **options: Any,
) -> streams.Streams:
    """A runtime on a client of its own."""
    client = world.client(config, plan=plan, rival=rival, read_only=options.get("mode") == "read")
    return streams.open(client, **options)


def sealed_in(client: persist.Client, shard: str) -> Bag:
    """All updates of a sealed shard at their times, by a reader that knows nothing of streams. since must be 0."""
    with client.open_reader(shard) as reader:
        if reader.fetch_upper() == persist.at(0):
            return Counter()
        with reader.changes(None) as found:
            return counted(found.to_arrow().to_pylist())


def unsealed_in(read: streams.StreamReader) -> Bag:
    with read.contents() as found:
        return counted(found.unsealed.to_pylist())


def counted(rows: list[dict[str, Any]]) -> Bag:
    bag: Bag = Counter()
    for row in rows:
        bag[row["id"], row["word"], row["_time"]] += row["_diff"]
    return Counter({key: count for key, count in bag.items() if count})


def all_of(read: streams.StreamReader) -> Bag:
    """Everything that a stream contains with exact times, sealed or not. since must be 0."""
    return sealed_in(read._client, read.record.sealed) + unsealed_in(read)
