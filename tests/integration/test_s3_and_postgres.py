"""The client end to end on S3 and PostgreSQL, and on S3 alone: what it answers, and exactly which requests it makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.core.commands import Heartbeat
from persist_lib.location import open_location
from persist_lib.location.postgres.sessions import PREPARED_AFTER
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import check_world, contents_of
from persist_lib.testing.faults import RecordingLocation
from tests import servers
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.slow
servers.use_test_credentials()
ROOT = Path(__file__).parents[2]
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
QUIET = Runtime(background=False)
"""No renewal of leases in between: requests are counted."""


def postgres_url() -> str:
    url = servers.postgres_url()
    return f"{url}{'&' if '?' in url else '?'}persist_schema=t{os.urandom(8).hex()}"


PLACES: dict[str, Callable[[], tuple[str, str | None]]] = {
    "s3 and postgresql": lambda: (servers.s3_url(), postgres_url()),
    "s3 alone": lambda: (servers.s3_url("s3+cas"), None),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    return PLACES[request.param]()


class Counted:
    """A client whose requests are recorded."""

    def __init__(self, place: tuple[str, str | None], config: persist.Config | None = None) -> None:
        self.recording = RecordingLocation(open_location(*place, create=True))
        self.client = persist.open(self.recording.location, config=config, runtime=QUIET)

    def count(self, act: Callable[[], object]) -> dict[str, int]:
        self.recording.clear()
        act()
        kinds = [request.kind for request in self.recording.requests]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.fixture
def counted(place: tuple[str, str | None]) -> Iterator[Counted]:
    counted = Counted(place)
    yield counted
    counted.client.close()


def rows(*ids: int, word: str = "w") -> list[dict[str, Any]]:
    return [{"id": id_, "word": word} for id_ in ids]


def large(n: int) -> pa.Table:
    return pa.table({"id": pa.array(range(n), pa.int64()), "word": pa.array([os.urandom(16).hex() for _ in range(n)])})


def test_what_is_appended_is_read_compacted_collected_and_read_the_same(place: tuple[str, str | None]) -> None:
    config = persist.Config(inline_bytes=0, rollup_every=8)
    with persist.open(*place, config=config) as client:
        write, read = client.open_shard("orders", SCHEMA)
        expected: dict[tuple[int, str], int] = {}
        for n in range(20):
            write.compare_and_append(rows(n, n % 3), n, n + 1)
            for id_ in (n, n % 3):
                expected[id_, "w"] = expected.get((id_, "w"), 0) + 1
        assert contents_of(read.snapshot(19, diff=True).to_arrow()) == expected
        read.downgrade_since(19)
        read.close()
        before = len([*client.blob.list("orders/")])
        for _ in range(3):
            client.maintain("orders")
        assert len([*client.blob.list("orders/")]) < before
        with client.open_reader("orders") as again:
            assert contents_of(again.snapshot(19, diff=True).to_arrow()) == expected
        check_world(client, "orders")
        with persist.open(*place, read_only=True) as other:
            assert other.shards() == ["orders"]
            with other.open_reader("orders") as reader:
                assert contents_of(reader.snapshot(19, diff=True).to_arrow()) == expected


def test_heartbeats_and_downgrades_cost_no_blob_operation(counted: Counted) -> None:
    write, read = counted.client.open_shard("s", SCHEMA)
    for n in range(3):
        write.compare_and_append(rows(n), n, n + 1)
    assert counted.count(lambda: read.downgrade_since(2)) == {"compare_and_set": 1}
    machine = counted.client.machine("s")
    made = counted.count(lambda: machine.commit(lambda _s, now: Heartbeat((write.id,), now + 10**9)))
    assert made == {"compare_and_set": 1}


def test_an_inline_append_is_one_round_trip_on_the_wire_and_a_larger_one_is_one_more() -> None:
    blobs, log = servers.s3_url(), postgres_url()
    port = int(log.rpartition(":")[2].partition("/")[0])
    with Proxy(servers.s3_server().port) as s3, Proxy(port) as sql:
        blobs = blobs.replace(f":{servers.s3_server().port}", f":{s3.port}")
        log = log.replace(f":{port}/", f":{sql.port}/")
        with persist.open(blobs, log, runtime=QUIET) as client:
            write = client.open_writer("s", SCHEMA)
            for n in range(PREPARED_AFTER + 2):  # what is used that often is prepared, by a round trip of its own
                write.compare_and_append(rows(1), n, n + 1)
            for appended, requests in ((rows(2), (0, 1)), (large(5000), (1, 1))):
                upper = client.inspect("s").state.upper.time
                s3.at(0, None)
                sql.at(0, None)
                write.compare_and_append(appended, upper, (upper or 0) + 1)
                assert (s3.requests, sql.requests) == requests
