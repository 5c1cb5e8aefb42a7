"""Behind a pooler in transaction mode: everything works, and nothing relies on what a session remembers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import persist_lib as persist
from persist_lib.testing import check_world, contents_of, updates_of
from tests import servers
from tests.pooler import Pooler
from tests.worlds import SCHEMA, row


@pytest.fixture
def pooler() -> Iterator[Pooler]:
    with Pooler(servers.postgres_port()) as pooler:
        yield pooler


@pytest.fixture
def place(pooler: Pooler, tmp_path: Path) -> tuple[str, str]:
    return f"file:{tmp_path}/blobs", servers.postgres_at(pooler.port, persist_schema=f"t{os.urandom(8).hex()}")


def test_what_is_appended_through_it_is_read_compacted_collected_and_read_the_same(
    place: tuple[str, str], pooler: Pooler
) -> None:
    with persist.open(*place, config=persist.Config(inline_bytes=0, rollup_every=8)) as client:
        write, read = client.open_shard("s", SCHEMA)
        for n in range(20):
            write.compare_and_append([row(n, time=n), row(n % 3, time=n)], n, n + 1)
        before = contents_of(read.snapshot(19, diff=True).to_arrow())
        assert sum(before.values()) == 40
        heard = [event.table for event in read.listen(0, until=20) if isinstance(event, persist.Updates)]
        assert sum(diff for table in heard for _, _, diff in updates_of(table)) == 38
        read.downgrade_since(19)
        read.close()
        objects = len([*client.blob.list("s/")])
        for _ in range(3):
            client.maintain("s")
        assert len([*client.blob.list("s/")]) < objects
        with client.open_reader("s") as again:
            assert contents_of(again.snapshot(19, diff=True).to_arrow()) == before
        check_world(client, "s")
    assert pooler.transactions > 60
    assert pooler.moved > pooler.transactions / 2
    assert len(pooler.named) <= 8, "a session that lost a prepared statement prepares no more"


def test_no_statement_is_prepared_where_the_url_says_so(place: tuple[str, str], pooler: Pooler) -> None:
    blobs, log = place
    with persist.open(blobs, f"{log}&persist_prepare=0") as client:
        write = client.open_writer("s", SCHEMA)
        for n in range(10):
            write.compare_and_append([row(n, time=n)], n, n + 1)
    assert pooler.named == []
    with pytest.raises(persist.InvalidUsage, match="persist_prepare must be 0 or 1"):
        persist.open(blobs, f"{log}&persist_prepare=maybe")


def test_clients_that_share_a_server_connection_share_what_is_prepared_there(tmp_path: Path) -> None:
    """The second one's statements are there already, under the same names."""
    with Pooler(servers.postgres_port(), most=1) as pooler:
        place = f"file:{tmp_path}/blobs", servers.postgres_at(pooler.port, persist_schema=f"t{os.urandom(8).hex()}")
        for who in range(2):
            with persist.open(*place) as client, client.open_writer("s", SCHEMA) as write:
                for n in range(10 * who, 10 * who + 10):
                    write.compare_and_append([row(n, time=n)], n, n + 1)
        assert len(pooler.named) > len(set(pooler.named)) > 0
        with persist.open(*place) as client, client.open_reader("s") as read:
            assert contents_of(read.snapshot(19, diff=True).to_arrow()) == {(n, "w"): 1 for n in range(20)}
            check_world(client, "s")


def test_writers_that_race_through_it_append_each_update_once(place: tuple[str, str]) -> None:
    with persist.open(*place) as client:
        client.open_writer("s", SCHEMA)

    def append(who: int) -> None:
        with persist.open(*place) as client, client.open_writer("s", SCHEMA) as write:
            done = 0
            while done < 10:
                upper = write.fetch_upper().time or 0
                try:
                    write.compare_and_append([row(100 * who + done, time=upper)], upper, upper + 1)
                except persist.UpperMismatch:
                    continue
                done += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    with persist.open(*place) as client, client.open_reader("s") as read:
        assert contents_of(read.snapshot(39, diff=True).to_arrow()) == {
            (100 * w + n, "w"): 1 for w in range(4) for n in range(10)
        }
        check_world(client, "s")


def test_notifications_asked_for_behind_it_make_nothing_wrong(place: tuple[str, str]) -> None:
    """They do not come through; docs say to leave them off."""
    blobs, log = place
    with persist.open(blobs, f"{log}&persist_notify=1") as client:
        write, read = client.open_shard("s", SCHEMA)
        with ThreadPoolExecutor(1) as pool:
            for n in range(3):
                waiting = pool.submit(read.wait_for_upper, n + 1, 30)
                write.compare_and_append([row(n, time=n)], n, n + 1)
                assert waiting.result(40) == persist.at(n + 1)


def test_the_pooler_of_these_tests_is_one_that_a_session_s_memory_does_not_survive(pooler: Pooler) -> None:
    url = servers.postgres_at(pooler.port)
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as client:
        client.execute("SET statement_timeout = '77s'")
        assert client.execute("SHOW statement_timeout").fetchone() != ("77s",)
        assert client.execute("SHOW search_path").fetchone() == ("nowhere",)
        with client.transaction():
            first = client.execute("SELECT pg_backend_pid()").fetchone()
            assert client.execute("SELECT pg_backend_pid()").fetchone() == first
        assert client.execute("SELECT pg_backend_pid()").fetchone() != first
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as client:
        with pytest.raises(psycopg.errors.InvalidSqlStatementName):
            client.execute("SELECT 1")
        assert pooler.named
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
        psycopg.connect(servers.postgres_at(pooler.port, options="-c search_path=x"))
