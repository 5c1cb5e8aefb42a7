"""A location takes time, sleep, random numbers and threads from the runtime it is opened with, and from no other."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.location import open_location
from persist_lib.location.file.blob import DELETE_CHUNK
from persist_lib.location.s3.blob import MULTIPART_ABOVE
from persist_lib.runtime.ambient import Runtime
from tests import servers
from tests.worlds import SCHEMA, row

servers.use_test_credentials()

Place = tuple[str, str | None]


def _on_s3(_: Path, scheme: str = "s3+cas") -> Place:
    name = os.urandom(8).hex()
    return f"{scheme}://{servers.BUCKET}/{name}?endpoint={servers.s3_server().url}&path_style=true", None


def _on_servers(path: Path) -> Place:
    return _on_s3(path, "s3")[0], servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")


PLACES: list[object] = [
    pytest.param(lambda _: ("memory:", None), id="memory"),
    pytest.param(lambda path: (f"file:{path}/data", None), id="file"),
    pytest.param(_on_s3, id="s3+cas", marks=pytest.mark.slow),
    pytest.param(_on_servers, id="s3 and postgresql", marks=pytest.mark.slow),
]


def seeded(seed: int) -> Runtime:
    return Runtime(random=random.Random(seed), background=False)


def work(place: Place, runtime: Runtime) -> None:
    """Everything for which a store needs a random number, a pause or threads."""
    config = persist.Config(inline_bytes=0)
    with persist.open(*place, config=config, runtime=runtime) as client:
        write, read = client.open_shard("s", SCHEMA)
        for time_ in range(3):
            write.compare_and_append([row(time_, time=time_)], time_, time_ + 1)
        with read.snapshot(2) as snapshot:
            assert snapshot.to_arrow().num_rows == 3
        blob = client.location.blob
        blob.set("s/w/large", bytes(MULTIPART_ABOVE + 1))
        keys = [f"s/w/{n}" for n in range(2 * DELETE_CHUNK)]
        for key in keys:
            blob.set(key, b"")
        assert blob.delete_many([*keys, "s/w/large"]) == {}


@pytest.mark.parametrize("place_in", PLACES)
def test_no_driver_takes_anything_ambient_from_elsewhere(
    place_in: Callable[[Path], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, runtime = place_in(tmp_path), seeded(7)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a runtime or a pool of its own")

    monkeypatch.setattr(Runtime, "__post_init__", refuse)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(random, "SystemRandom", refuse)
    monkeypatch.setattr(time, "sleep", refuse)
    work(place, runtime)


@pytest.mark.parametrize("url", ["memory:", "file:{0}/{1}"])
def test_the_same_seed_draws_the_same_in_embedded_locations(tmp_path: Path, url: str) -> None:
    one, two = seeded(7), seeded(7)
    work((url.format(tmp_path, "one"), None), one)
    work((url.format(tmp_path, "two"), None), two)
    assert one.random.getstate() == two.random.getstate()


def test_unnamed_memories_of_the_same_seed_are_two() -> None:
    with open_location("memory:", runtime=seeded(7)) as one, open_location("memory:", runtime=seeded(7)) as two:
        one.blob.set("s/x", b"x")
        assert one.url != two.url
        assert two.blob.get("s/x") is None
