"""A shard with more of everything than stores list, delete or scan at once is read and swept like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core.plan.compaction import Policy
from persist_lib.format.paths import blob_key, part_key
from persist_lib.ids import ShardId, WriterId
from persist_lib.location import open_location
from persist_lib.location.objects.blob import ObjectsBlob, enter
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.location.scheme import Opening
from persist_lib.testing import check_swept, check_world, contents_of
from tests import servers
from tests.worlds import SCHEMA, row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = 3
CONFIG = persist.Config(inline_bytes=0, part_bytes=64 * 1024, rollup_every=500)
ALL_IN_ONE = Policy(weight=1e9)


def _on_files(folder: Path) -> persist.Client:
    return persist.open(f"file:{folder}/data", config=CONFIG)


def _alone(scheme: str, _: Path) -> persist.Client:
    """By pages of three: with a thousand it would be the same, and take minutes."""
    servers.use_test_credentials()
    url = servers.store_url(f"{scheme}+cas")
    location = open_location(url, create=True)
    blob, consensus = ObjectsBlob(enter(url, Opening()), page=PAGE), ObjectsConsensus(enter(url, Opening()), page=PAGE)
    return persist.open(replace(location, blob=blob, consensus=consensus), config=CONFIG)


STORES: dict[str, tuple[Callable[[Path], persist.Client], int]] = {
    "files and SQLite": (_on_files, 1005),
    **{f"{scheme} alone": (partial(_alone, scheme), 11) for scheme in servers.STORES},
}


@pytest.fixture(params=[*STORES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[persist.Client, int]]:
    make, many = STORES[request.param]
    with make(tmp_path) as client:
        yield client, many


def test_a_shard_of_more_parts_garbage_and_orphans_than_a_page_is_read_and_swept(
    store: tuple[persist.Client, int],
) -> None:
    client, many = store
    with client.open_writer("s", SCHEMA) as write:
        for moment in range(many):
            write.compare_and_append([row(moment, time=moment)], moment, moment + 1)
        dead = WriterId(write.id)
    for other in range(many):
        client.location.consensus.compare_and_set(f"other{other}", None, b"x")
    assert client.shards() == sorted(["s", *(f"other{n}" for n in range(many))])
    before = read(client, many)
    assert before == {(n, "w"): 1 for n in range(many)}
    orphans = [blob_key(ShardId("s"), part_key(dead, n)) for n in range(many)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: client.blob.set(key, b"never linked"), orphans))
    world = check_world(client, "s")
    assert len(world.orphans) == many
    assert len(world.referred) >= many
    assert len(client.audit_orphans("s").orphans) == many
    assert client.compact("s", policy=ALL_IN_ONE).batches_after == 1
    assert len(client.inspect("s").state.garbage) >= many
    client.roll_up("s", force=True)
    assert len(client.collect("s").keys) >= many
    for _ in range(4):
        client.maintain("s")
    check_swept(client, "s")
    assert read(client, many) == before


def read(client: persist.Client, many: int) -> dict[tuple[object, ...], int]:
    with client.open_reader("s") as reader:
        return dict(contents_of(reader.snapshot(many - 1, diff=True).to_arrow()))
