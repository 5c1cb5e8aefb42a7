"""What a client says that it asked of S3 is what the server's own log says that it was asked.

The client end to end on S3 and PostgreSQL, and on S3 alone: what it answers, and exactly which requests it makes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.config import MIB
from persist_lib.core.commands import Heartbeat
from persist_lib.core.cost import Cost
from persist_lib.location import open_location
from persist_lib.location.objects.store import PIECE
from persist_lib.location.postgres.sessions import PREPARED_AFTER
from persist_lib.location.stack import metered, wrap
from persist_lib.location.wrap.metering import Meter
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import RecordingLocation
from tests import servers
from tests.faults.proxy import Fault, Proxy

pytestmark = pytest.mark.slow
servers.use_test_credentials()
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
QUIET = Runtime(background=False)
LINE = re.compile(r'"(?:\x1b\[\S*?m)?(GET|PUT|POST|HEAD|DELETE) (\S+) HTTP')


class Log:
    """The requests that the server logged for one prefix of its bucket, by the class that they are billed in."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.path = prefix, servers.s3_server().root / "log"

    def requests(self) -> Counter[str]:
        text = self.path.read_text(errors="replace")
        found = [match.groups() for match in LINE.finditer(text) if self.prefix in match[2] or "?delete" in match[2]]
        return Counter(self._class(*request) for request in found)

    def _class(self, method: str, path: str) -> str:
        if method == "DELETE" or (method == "POST" and "?delete" in path):
            return "deletes"
        if method == "GET" and ("list-type=" in path or "?uploads" in path):
            return "lists"
        return "gets" if method in ("GET", "HEAD") else "puts"


def told(cost: Cost) -> Counter[str]:
    return Counter({name: n for name in ("gets", "puts", "lists", "deletes") if (n := getattr(cost, name))})


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log(os.urandom(8).hex())
    before = log.requests()  # a bulk delete names no prefix, so those of earlier tests are taken off
    yield log
    assert before.keys() <= {"deletes"}


def large(n: int) -> pa.Table:
    return pa.table({"id": pa.array(range(n), pa.int64()), "word": pa.array([os.urandom(16).hex() for _ in range(n)])})


@pytest.mark.parametrize("scheme", ["s3+cas", "s3"])
def test_a_client_counts_each_request_that_the_server_saw(scheme: str, log: Log) -> None:
    before = log.requests()
    url = servers.s3_server().location(log.prefix, scheme)
    consensus = None if scheme == "s3+cas" else "memory:metered"
    config = persist.Config(inline_bytes=0, rollup_every=4)
    with persist.open(url, consensus, config=config, runtime=QUIET) as client:
        write, read = client.open_shard("s", SCHEMA)
        for n in range(8):
            write.compare_and_append(large(200), n, n + 1)
        with read.snapshot(7) as snapshot:
            assert snapshot.to_arrow().num_rows
            assert sum(table.num_rows for table in snapshot.batches())
        read.downgrade_since(7)
        read.close()
        for _ in range(3):
            client.maintain("s")
        cost = client.metrics().cost
        assert told(cost) == log.requests() - before
        assert cost.dollars == pytest.approx(5e-6 * (cost.puts + cost.lists) + 4e-7 * cost.gets)
        assert min(cost.gets, cost.puts, cost.lists, cost.deletes) > 0
        if scheme == "s3+cas":
            assert cost.commits == cost.queries == 0, "they are requests to S3"
        written = sum(count.sent_bytes for count in client.metrics().operations.values())
        assert cost.bytes_written == written > 8 * 200 * 16


def test_what_is_in_the_cache_is_not_asked_of_the_server(log: Log, tmp_path: Path) -> None:
    url = servers.s3_server().location(log.prefix, "s3+cas")
    cache = persist.CacheConfig(path=str(tmp_path))
    config = persist.Config(inline_bytes=0, cache=cache)
    with persist.open(url, config=config, runtime=QUIET) as client:
        write, read = client.open_shard("s", SCHEMA)
        for n in range(3):
            write.compare_and_append(large(100), n, n + 1)
        with read.snapshot(2) as snapshot:
            first, before = snapshot.to_arrow(), log.requests()
            assert snapshot.to_arrow().equals(first)
            assert log.requests() == before, "nothing at all"
    with persist.open(url, config=config, runtime=QUIET, read_only=True) as other, other.open_reader("s") as read:
        with read.snapshot(2) as snapshot:
            before = log.requests()
            assert snapshot.to_arrow().equals(first)
            assert log.requests() == before
        counts = other.metrics().cache
        assert counts is not None
        assert (counts.disk_hits, counts.misses, counts.hit_rate) == (3, 0, 1.0)


def test_each_piece_of_a_large_object_is_a_request_of_the_call_that_stored_it(log: Log) -> None:
    url = servers.s3_server().location(log.prefix)
    with open_location(url, "memory:pieces", create=True) as location:
        blob = wrap(location, persist.Config(), QUIET).blob
        before = log.requests()
        with Spending() as spent:
            blob.set("s/w/large", os.urandom(3 * PIECE + 1))
        assert told(spent.cost) == log.requests() - before == {"puts": 6}, "begin, four pieces, complete"
        assert spent.cost.bytes_written == 3 * PIECE + 1
        before = log.requests()
        with Spending() as spent:
            assert blob.get_range("s/w/large", 0, MIB) is not None
            assert blob.get("s/w/missing") is None
            assert blob.delete("s/w/missing") is False
        assert told(spent.cost) == log.requests() - before == {"gets": 3}, "to delete nothing, one looks for it"


def test_an_attempt_whose_answer_was_lost_is_counted_as_the_server_counts_it(log: Log) -> None:
    meter = Meter()
    with Proxy(servers.s3_server().port) as proxy:
        url = servers.s3_server().location(log.prefix).replace(str(servers.s3_server().port), str(proxy.port))
        with open_location(url, "memory:lost", create=True) as location:
            blob = wrap(location, persist.Config(), Runtime(), meter=meter).blob
            proxy.at(1, Fault.DROP_REPLY)
            before = log.requests()
            with Spending() as spent:
                blob.set("s/w/x", b"12345")
            assert told(spent.cost) == log.requests() - before == {"puts": 2, "gets": 1}, "taken by itself, and read"
            count: Any = meter.counts()["set"]
            assert (count.calls, count.failures, count.sent_bytes) == (2, 1, 10)


def test_a_listing_is_a_request_for_a_page(log: Log) -> None:
    url = servers.s3_server().location(log.prefix)
    with open_location(url, "memory:pages", create=True) as location:
        for n in range(3):
            location.blob.set(f"s/w/{n}", b"")
        meter = Meter()
        before = log.requests()
        assert len([*metered(location, meter).blob.list("s/")]) == 3
        assert told(meter.counts()["list"].cost) == log.requests() - before == {"lists": 1}


def postgres_url() -> str:
    url = servers.postgres_url()
    return f"{url}{'&' if '?' in url else '?'}persist_schema=t{os.urandom(8).hex()}"


PLACES: dict[str, Callable[[], tuple[str, str | None]]] = {
    "s3 and postgresql": lambda: (servers.s3_url(), postgres_url()),
    "s3 alone": lambda: (servers.s3_url("s3+cas"), None),
}


class Counted:
    """A client whose requests are recorded."""

    def __init__(self, place: tuple[str, str | None]) -> None:
        self.recording = RecordingLocation(open_location(*place, create=True))
        self.client = persist.open(self.recording.location, runtime=QUIET)

    def count(self, act: Callable[[], object]) -> dict[str, int]:
        self.recording.clear()
        act()
        kinds = [request.kind for request in self.recording.requests]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.fixture(params=PLACES)
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    counted = Counted(PLACES[request.param]())
    yield counted
    counted.client.close()


def rows(*ids: int, word: str = "w") -> list[dict[str, Any]]:
    return [{"id": id_, "word": word} for id_ in ids]


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
