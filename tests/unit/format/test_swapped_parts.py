"""Two valid parts of one size and one schema, swapped in Blob: every way to read them says which object is wrong.

Each decodes, and its length, columns and format are as said. Only the digest in the state tells it from the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt
from persist_lib.format.digest import CHUNK
from persist_lib.format.paths import blob_key
from persist_lib.ids import ShardId
from tests.worlds import SCHEMA, SMALL, World, row

SHARD = "s"


def swap(world: World, client: persist.Client) -> set[str]:
    """Swap the first two parts; answers their keys."""
    first, second = [blob_key(ShardId(SHARD), part.key) for b in client.inspect(SHARD).state.trace for part in b.parts][
        :2
    ]
    blob = world.inner.blob
    bytes_ = {key: blob.get(key) for key in (first, second)}
    assert len(bytes_[first] or b"") == len(bytes_[second] or b"") <= CHUNK
    assert bytes_[first] != bytes_[second]
    for key, data in ((first, bytes_[second]), (second, bytes_[first])):
        blob.delete(key)
        blob.set(key, data or b"")
    return {first, second}


def filled(client: persist.Client, times: tuple[int, ...]) -> None:
    with client.open_writer(SHARD, SCHEMA) as write:
        for number, time in enumerate(times):
            rows = [row(number * 10 + i, f"{number}{i}", time) for i in range(5)]
            write.compare_and_append(rows, number, number + 1)


READS: dict[str, Callable[[persist.Snapshot], Any]] = {
    "whole": lambda snapshot: snapshot.to_arrow(),
    "in batches": lambda snapshot: list(snapshot.batches()),
    "as rows": lambda snapshot: snapshot.to_pylist(),
    "in splits": lambda snapshot: [split.to_arrow() for split in snapshot.splits(3)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {}, "one column": {"columns": ["id"]}, "one key": {"key": (3,)}, "a range": {"key_from": (1,)},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("as_of", [0, 1])
def test_a_snapshot_of_swapped_parts_names_one_of_them(world, way, options, as_of):
    """As of 0 one run is the contents and is decoded as it is; as of 1 two are merged."""
    filled(world.client(SMALL), (0, 1, 2))
    client = world.client(SMALL)
    keys = swap(world, client)
    with client.open_reader(SHARD) as read, pytest.raises(Corrupt) as caught:
        READS[way](read.snapshot(as_of, **OPTIONS[options]))
    assert caught.value.fields["key"] in keys
    assert str(caught.value.fields["key"]) in str(caught.value)


def test_with_a_cache_as_well(world, tmp_path):
    filled(world.client(SMALL), (0, 1))
    cached = SMALL.model_copy(update={"cache": persist.CacheConfig()})
    client = world.client(cached)
    keys = swap(world, client)
    with client.open_reader(SHARD) as read, pytest.raises(Corrupt) as caught:
        read.snapshot(1).to_arrow()
    assert caught.value.fields["key"] in keys


@pytest.mark.parametrize("as_of", [0, 1])
def test_a_listener_names_one_of_them_and_gets_nothing_from_it(world, as_of):
    filled(world.client(SMALL), (0, 1, 2))
    client = world.client(SMALL)
    keys = swap(world, client)
    with client.open_reader(SHARD) as read:
        listener = read.listen(as_of)
        if as_of == 0:
            with pytest.raises(Corrupt) as caught:
                next(listener)
            assert caught.value.fields["key"] in keys
        else:
            assert next(listener).table.column("id").to_pylist() == [20, 21, 22, 23, 24], "it is in the third, unharmed"


@pytest.mark.parametrize("duty", ["compact", "maintain"])
def test_maintenance_names_one_of_them_and_changes_no_batch(world, duty):
    filled(world.client(SMALL), (0, 1, 2))
    client = world.client(SMALL)
    keys = swap(world, client)
    before = client.inspect(SHARD).state.trace
    with pytest.raises(Corrupt) as caught:
        getattr(client, duty)(SHARD, policy=persist.Policy(weight=1e9))
    assert caught.value.fields["key"] in keys
    assert client.inspect(SHARD).state.trace == before


def test_a_scrub_names_both(world):
    filled(world.client(SMALL), (0, 1, 2))
    client = world.client(SMALL)
    keys = swap(world, client)
    damaged = client.scrub(SHARD).damaged
    assert [id_ for id_, _ in damaged] == [(0, 1), (1, 2)]
    assert {key for key in keys for _, problem in damaged if problem.startswith(key)} == keys
