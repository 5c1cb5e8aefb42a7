"""Shards with something in them, and what is in them."""

from __future__ import annotations

import random

import persist_lib as persist
from persist_lib.testing import Model
from tests.worlds import SCHEMA, row, updates

TINY = persist.Config(part_bytes=64 * 1024, inline_bytes=0, task_bytes=64 * 1024, merge_bytes=1024 * 1024)


def filled(client: persist.Client, times: int = 40, seed: int = 0, shard: str = "s") -> Model:
    """A shard with updates and retractions at every time, and its model."""
    rng, model = random.Random(seed), Model()
    with client.open_writer(shard, SCHEMA) as write:
        for time in range(times):
            rows = [
                row(rng.randrange(30), rng.choice(["a", "b", None]), time, rng.choice([1, 1, 2, -1])) for _ in range(6)
            ]
            write.compare_and_append(rows, time, time + 1)
            model.append(updates(rows), persist.at(time), persist.at(time + 1))
    return model


EAGER = persist.Policy(weight=1e9, advance=0.01)
