"""PostgreSQL killed under load loses nothing that was acknowledged, and an older copy of it is refused."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, HistoryRegressed, Indeterminate
from persist_lib.ids import SeqNo
from persist_lib.location.postgres.consensus import PostgresConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import check_world, contents_of
from tests.conformance.history import Claim, violations
from tests.servers import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.torture]
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def url(server: PostgresServer, request: pytest.FixtureRequest) -> str:
    return f"{server.url}?persist_schema=t{abs(hash(request.node.name)):x}"


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": id_, "word": "w"} for id_ in ids]


class Hammer:
    """Threads that extend one key as fast as they can, whatever happens to the server, and write down the answers."""

    def __init__(self, url: str) -> None:
        self.consensus = PostgresConsensus(url, operation_s=3)
        self.stop = threading.Event()

    def run(self, who: int) -> list[Claim]:
        claims: list[Claim] = []
        while not self.stop.is_set():
            try:
                head = self.consensus.head("s")
                expected = head and head.newest
                data = f"{who}:{len(claims)}".encode()
                won: bool | None = self.consensus.compare_and_set("s", expected, data)
            except Indeterminate:
                won = None
            except Determinate:
                time.sleep(0.01)
                continue
            claims.append(Claim("s", expected, data, won))
        return claims


@pytest.mark.parametrize("mode", [signal.SIGKILL, signal.SIGQUIT, signal.SIGINT])
def test_what_was_acknowledged_before_a_crash_is_there_after_it(
    server: PostgresServer, url: str, mode: signal.Signals
) -> None:
    hammer = Hammer(url)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(hammer.run, who) for who in range(4)]
        try:
            for _ in range(3):
                time.sleep(0.4)
                server.stop(mode)
                server.start()
            time.sleep(0.4)
        finally:
            hammer.stop.set()
        claims = [*chain.from_iterable(future.result(30) for future in running)]
    found = hammer.consensus.scan("s", SeqNo(0), 1_000_000)
    assert violations("s", claims, found) == []
    assert sum(1 for claim in claims if claim.won) > 20
    hammer.consensus.close()


@pytest.mark.parametrize("mode", [signal.SIGKILL, signal.SIGQUIT])
def test_a_client_goes_on_over_a_crash_with_every_append_there_once(
    server: PostgresServer, url: str, tmp_path: Any, mode: signal.Signals
) -> None:
    with persist.open(f"file:{tmp_path}/blobs", url) as client:
        write = client.open_writer("s", SCHEMA)
        done = threading.Event()
        appended = 0

        def crash() -> None:
            try:
                for _ in range(2):
                    time.sleep(0.3)
                    server.stop(mode)
                    time.sleep(0.2)
                    server.start()
                time.sleep(0.3)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            crashing = pool.submit(crash)
            while not done.is_set():
                write.compare_and_append(rows(appended), appended, appended + 1, timeout=30)
                appended += 1
                time.sleep(0.005)
            crashing.result()
        with client.open_reader("s") as read:
            found = contents_of(read.snapshot(appended - 1, diff=True).to_arrow())
        assert found == {(n, "w"): 1 for n in range(appended)}
        check_world(client, "s")


def test_an_older_copy_restored_under_live_clients_is_refused(server: PostgresServer, url: str, tmp_path: Any) -> None:
    place = (f"file:{tmp_path}/blobs", url)
    live = persist.open(*place, runtime=Runtime(background=False))
    write = live.open_writer("s", SCHEMA)
    reader = live.open_reader("s")
    for n in range(3):
        write.compare_and_append(rows(n), n, n + 1)
    server.stop()
    copy = server.copy()
    server.start()
    for n in range(3, 6):
        write.compare_and_append(rows(n), n, n + 1)
    server.stop()
    server.restore(copy)
    server.start()
    with pytest.raises(HistoryRegressed):
        live.inspect("s")
    with pytest.raises(HistoryRegressed):
        write.compare_and_append(rows(6), 6, 7)
    with pytest.raises(HistoryRegressed):
        reader.fetch_upper()
    # Somebody who never saw the lost rows goes on from the copy; who saw them still refuses, though the log is as long.
    with persist.open(*place, runtime=Runtime(background=False)) as other:
        fresh = other.open_writer("s", SCHEMA)
        for n in range(3, 12):
            fresh.compare_and_append(rows(100 + n), n, n + 1)
    with pytest.raises(HistoryRegressed):
        live.inspect("s")
    live.location.close()
