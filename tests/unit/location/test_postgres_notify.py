"""Waking waiters by LISTEN and NOTIFY: promptly, seldom asking, and never wrong when notifications are lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import Newest
from persist_lib.location.postgres.consensus import PostgresConsensus, canonical
from persist_lib.location.postgres.notify import Notifier
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import RecordingLocation
from tests import servers
from tests.faults.proxy import Fault, Proxy
from tests.worlds import SCHEMA, row

pytestmark = pytest.mark.slow

WOKEN_S = 10.0
"""Far below the time after which a waiter looks by itself, and far above what a notification takes."""


@pytest.fixture
def url() -> str:
    url = servers.postgres_url()
    return f"{url}{'&' if '?' in url else '?'}persist_schema=t{os.urandom(8).hex()}&persist_notify=1"


@pytest.fixture
def opened(url: str) -> Iterator[Callable[..., PostgresConsensus]]:
    made: list[PostgresConsensus] = []

    def opened(other: str | None = None) -> PostgresConsensus:
        made.append(PostgresConsensus(other or url))
        return made[-1]

    yield opened
    for consensus in made:
        consensus.close()


def settle(consensus: PostgresConsensus, key: str = "s") -> None:
    """Wait until notifications are listened to, and this thread has looked since."""
    deadline = time.monotonic() + 10
    while not consensus.wait(key, SeqNo(0), 0.01):
        assert time.monotonic() < deadline, "it never listens"
        time.sleep(0.01)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return call(), time.monotonic() - started


def test_a_waiter_hears_of_another_process_s_row_at_once(opened: Callable[..., PostgresConsensus]) -> None:
    writer, waiter = opened(), opened()
    assert writer.compare_and_set("s", None, b"1")
    settle(waiter)
    with ThreadPoolExecutor(1) as pool:
        for n in range(1, 4):
            settled = pool.submit(settle, waiter)
            settled.result(10)
            waiting = pool.submit(timed, lambda n=n: waiter.wait("s", SeqNo(n), 30))  # type: ignore[misc]
            time.sleep(0.05)
            assert not waiting.done()
            assert writer.compare_and_set("s", Newest(SeqNo(n)), b"x")
            told, seconds = waiting.result(30)
            assert told
            assert seconds < WOKEN_S


def test_what_is_announced_between_looking_and_waiting_is_not_missed(opened: Callable[..., PostgresConsensus]) -> None:
    writer, waiter = opened(), opened()
    settle(waiter)
    assert writer.compare_and_set("s", None, b"1")
    time.sleep(0.3)
    assert timed(lambda: waiter.wait("s", SeqNo(0), 30))[1] < WOKEN_S
    told, seconds = timed(lambda: waiter.wait("s", SeqNo(1), 0.3))
    assert told
    assert seconds > 0.2, "nothing is beyond 1"


def test_other_keys_wake_nobody(opened: Callable[..., PostgresConsensus]) -> None:
    writer, waiter = opened(), opened()
    settle(waiter)
    writer.compare_and_set_many({"t": (None, b"1"), "s with spaces": (None, b"1")})
    assert timed(lambda: waiter.wait("s", SeqNo(0), 0.3))[1] > 0.2
    settle(waiter, "t")
    assert timed(lambda: waiter.wait("t", SeqNo(0), 30))[1] < WOKEN_S
    settle(waiter, "s with spaces")
    assert timed(lambda: waiter.wait("s with spaces", SeqNo(0), 30))[1] < WOKEN_S


def test_each_thread_looks_once_more_after_the_connection_was_made_again(
    opened: Callable[..., PostgresConsensus], url: str
) -> None:
    """What was committed while nobody listened was announced to nobody."""
    writer, waiter = opened(), opened()
    settle(waiter)
    killed = listeners(url, "pg_terminate_backend(pid)")
    assert killed == 1
    deadline = time.monotonic() + 20
    while not waiter.wait("s", SeqNo(0), 0.001):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as pool:  # a thread that has not looked since
        assert pool.submit(timed, lambda: waiter.wait("s", SeqNo(0), 30)).result(40)[1] < WOKEN_S
    writer.compare_and_set("s", None, b"1")
    assert timed(lambda: waiter.wait("s", SeqNo(0), 30))[1] < WOKEN_S


def listeners(url: str, act: str = "pid") -> int:
    """How many connections listen; `act` is done to each."""
    with psycopg.connect(servers.postgres_url(), autocommit=True) as sql:
        schema = url.partition("persist_schema=")[2].partition("&")[0]
        rows = sql.execute(
            f"SELECT {act} FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND (query LIKE %s OR query LIKE 'SELECT pg_catalog.pg_notify%%') AND application_name = 'persist'",
            (f'LISTEN "persist_{schema}"%',),
        ).fetchall()
    return len(rows)


def test_who_waits_when_the_connection_breaks_is_let_go_to_look(
    opened: Callable[..., PostgresConsensus], url: str
) -> None:
    with Proxy(int(servers.postgres_url().rpartition(":")[2].partition("/")[0])) as proxy:
        waiter = opened(through(url, proxy))
        settle(waiter)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(settle, waiter).result(10)
            waiting = pool.submit(timed, lambda: waiter.wait("s", SeqNo(0), 30))
            time.sleep(0.1)
            proxy.cut()
            assert waiting.result(30)[1] < WOKEN_S
        proxy.close()
        assert not waiter.wait("s", SeqNo(0), 30), "nobody tells: look yourself"


def through(url: str, proxy: Proxy) -> str:
    port = servers.postgres_url().rpartition(":")[2].partition("/")[0].partition("?")[0]
    return url.replace(f":{port}/", f":{proxy.port}/")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.BLACK_HOLE, Fault.BLACK_HOLE_REPLY])
def test_a_connection_that_fell_silent_makes_news_late_and_never_lost(url: str, fault: Fault) -> None:
    """The listening connection is swallowed; the ones that read are not."""
    quiet = Runtime(background=False)
    with (
        Proxy(int(servers.postgres_url().rpartition(":")[2].partition("/")[0])) as proxy,
        persist.open(f"memory:{os.urandom(4).hex()}", url, runtime=quiet) as client,
    ):
        consensus = client.location.consensus
        assert isinstance(consensus, PostgresConsensus)
        notifier = consensus._notifier
        assert notifier is not None
        notifier._connect = lambda: psycopg.connect(through(plain(url), proxy), autocommit=True)
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        settle(consensus)
        proxy.at(1, fault)
        done = threading.Timer(0.3, write.compare_and_append, ([row(2, time=1)], 1, 2))
        done.start()
        upper, seconds = timed(lambda: read.wait_for_upper(2, timeout=30))
        done.join()
        assert upper == persist.at(2)
        assert seconds < 20


def plain(url: str) -> str:
    return url.partition("?")[0]


def test_a_store_that_tells_nonsense_makes_nobody_look_more_often_than_without_it(url: str) -> None:
    recording = RecordingLocation(open_location(f"memory:{os.urandom(4).hex()}", url, create=True))
    config = persist.Config(poll_s=0.05)
    with persist.open(recording.location, config=config, runtime=Runtime(background=False)) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        consensus = client.location.consensus.inner  # type: ignore[attr-defined]
        settle(consensus)
        consensus._notifier._note("1000000 s")
        consensus._notifier._note("nonsense")
        recording.clear()
        with pytest.raises(persist.TimedOut):
            read.wait_for_upper(2, timeout=1)
        assert recording.count("scan") <= 45


@pytest.mark.slow
def test_an_idle_listener_hardly_asks_and_one_without_notifications_does(url: str) -> None:
    asked = []
    for shard, option in (("told", "persist_notify=1"), ("not-told", "persist_notify=0")):
        place = open_location(f"memory:{os.urandom(4).hex()}", url.replace("persist_notify=1", option), create=True)
        recording = RecordingLocation(place)
        with persist.open(recording.location, runtime=Runtime(background=False)) as client:
            write, read = client.open_shard(shard, SCHEMA)
            write.compare_and_append([row(1)], 0, 1)
            with pytest.raises(persist.TimedOut):
                read.wait_for_upper(2, timeout=1)  # until it listens
            recording.clear()
            with pytest.raises(persist.TimedOut):
                next(read.listen(0, timeout=5))
            asked.append(recording.count("scan"))
    assert asked[0] <= 8
    assert asked[1] > 50


def test_a_listener_hears_of_appends_soon_after_they_are_acknowledged(url: str) -> None:
    place = f"memory:{os.urandom(4).hex()}"
    with persist.open(place, url) as client, persist.open(place, url) as other:
        write = other.open_writer("s", SCHEMA)
        write.compare_and_append([row(0)], 0, 1)
        heard: dict[int, float] = {}

        def hear() -> None:
            with client.open_reader("s") as read, read.listen(0, until=21, timeout=20) as listening:
                for event in listening:
                    if isinstance(event, persist.Progress):
                        heard[event.frontier.time or 0] = time.monotonic()

        with ThreadPoolExecutor(1) as pool:
            hearing = pool.submit(hear)
            time.sleep(1)
            acknowledged = {}
            for n in range(1, 21):
                write.compare_and_append([row(n, time=n)], n, n + 1)
                acknowledged[n + 1] = time.monotonic()
                time.sleep(0.05)
            hearing.result(30)
        late = sorted(heard[n] - at for n, at in acknowledged.items() if n in heard)
        assert len(late) > 10
        assert late[len(late) // 2] < 0.2, "5 s would be who looks by itself"


def test_a_forked_child_waits_on_a_connection_of_its_own_and_leaves_its_parent_s_alone(
    opened: Callable[..., PostgresConsensus],
) -> None:
    writer, waiter = opened(), opened()
    settle(waiter)
    if (child := os.fork()) == 0:
        status = 1
        try:
            settle(waiter)
            if timed(lambda: waiter.wait("s", SeqNo(0), 30))[1] < 20:
                waiter.close()
                status = 0
        finally:
            os._exit(status)
    time.sleep(0.5)
    writer.compare_and_set("s", None, b"1")
    assert timed(lambda: waiter.wait("s", SeqNo(0), 30))[1] < WOKEN_S
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    settle(waiter)
    writer.compare_and_set("s", Newest(SeqNo(1)), b"2")
    assert timed(lambda: waiter.wait("s", SeqNo(1), 30))[1] < WOKEN_S


def test_closing_lets_waiters_go_and_ends_the_thread_and_the_connection(
    opened: Callable[..., PostgresConsensus], url: str
) -> None:
    waiter = opened()
    settle(waiter)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(settle, waiter).result(10)
        waiting = pool.submit(timed, lambda: waiter.wait("s", SeqNo(0), 30))
        time.sleep(0.1)
        waiter.close()
        waiter.close()
        assert waiting.result(30)[1] < WOKEN_S
    notifier = waiter._notifier
    assert notifier is not None
    assert notifier._thread is not None
    assert not notifier._thread.is_alive()
    assert not waiter.wait("s", SeqNo(0), 30)
    deadline = time.monotonic() + 5  # the server takes its time to notice
    while listeners(url):
        assert time.monotonic() < deadline, "a connection is left"
        time.sleep(0.05)


def test_where_what_one_tells_oneself_does_not_come_back_nobody_waits(url: str) -> None:
    """As behind a pooler in transaction mode: LISTEN succeeds, on a connection that is another's a moment later."""
    tries = []

    def connect() -> psycopg.Connection:
        tries.append(psycopg.connect(plain(url), autocommit=True))
        connection = tries[-1]
        execute = connection.execute

        def deaf(query: Any, *arguments: Any, **options: Any) -> Any:
            return execute("SELECT 1") if not isinstance(query, str) else execute(query, *arguments, **options)

        connection.execute = deaf  # type: ignore[method-assign]
        return connection

    notifier = Notifier(connect, "persist_x", Runtime())
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert not notifier.wait("s", 0, 1)
        time.sleep(0.02)
    notifier.close()
    assert 1 <= len(tries) <= 3, "and it is not tried all the time"
    assert all(connection.closed for connection in tries)


def test_without_the_option_there_is_no_thread_and_nothing_waits(
    opened: Callable[..., PostgresConsensus], url: str
) -> None:
    consensus = opened(url.replace("persist_notify=1", "persist_notify=0"))
    assert consensus.compare_and_set("s", None, b"1")
    assert not consensus.wait("s", SeqNo(0), 30)
    assert consensus._notifier is None


def test_a_wrong_option_is_refused(url: str) -> None:
    with pytest.raises(InvalidUsage, match="persist_notify"):
        canonical(url.replace("persist_notify=1", "persist_notify=yes"))


def test_a_database_that_cannot_be_reached_costs_waiters_nothing() -> None:
    def connect() -> psycopg.Connection:
        raise PersistError("unreachable")

    notifier = Notifier(connect, "x", Runtime())
    notifier.announce("s", 1)
    assert not notifier.wait("s", 0, 30)
    assert timed(notifier.close)[1] < WOKEN_S


def test_one_thread_hears_of_the_rows_of_all_keys(opened: Callable[..., PostgresConsensus]) -> None:
    writer, hearer = opened(), opened()
    deadline = time.monotonic() + 10
    while hearer.heard(0.01) is None:
        assert time.monotonic() < deadline, "it never listens"
        time.sleep(0.01)
    assert hearer.heard(0.05) == {}
    assert writer.compare_and_set("s", None, b"1")
    assert writer.compare_and_set("s", Newest(SeqNo(1)), b"2")
    assert writer.compare_and_set_many({"t": (None, b"1"), "u": (None, b"1")})
    heard: dict[str, int] = {}
    while heard != {"s": 2, "t": 1, "u": 1}:
        news = hearer.heard(30)
        assert news, "nothing more was heard"
        heard |= news
    assert hearer.heard(0.05) == {}, "each is told once"
    hearer.close()
    assert hearer.heard(30) is None


def test_a_store_without_notifications_tells_of_no_rows(url: str, opened: Callable[..., PostgresConsensus]) -> None:
    assert opened(url.replace("persist_notify=1", "persist_notify=0")).heard(30) is None
