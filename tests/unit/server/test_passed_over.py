"""A server that does not answer, beside one that does: each call goes to the other one, in time and once.

A client that may use the store behind its servers: when it does, when it stops, and what its URL shows.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import grpc
import msgspec
import pytest

import persist_lib as persist
from persist_lib.errors import (
    Determinate,
    Indeterminate,
    InvalidUsage,
    NewerFormat,
    NotAuthenticated,
    NotFound,
    redacted,
)
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location import Location
from persist_lib.location.open import _Stores
from persist_lib.location.rpc import servers
from persist_lib.location.rpc.consensus import LONGEST_PAUSE_S, FallbackStore, RpcConsensus, canonical
from persist_lib.location.rpc.servers import SHUNNED_MOST_S, SHUNNED_S, Server, Servers, Unreached
from persist_lib.location.scheme import Opening
from persist_lib.location.sqlite.consensus import SqliteConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from persist_lib.shard.leases import renew
from persist_lib.testing import check_world
from tests.faults.shard_servers import Server as Process
from tests.unit.server.following import eventually, follows_at
from tests.unit.server.sites import CONFIG as PATIENT
from tests.unit.server.sites import Site, site_of
from tests.unit.server.test_push import QUIET
from tests.worlds import SCHEMA, row

WITHIN_S = 4.5
"""Of a client that waits 5 s for the last server: what a call takes that passes one over, on a busy machine."""
CONFIG = persist.Config(timeout_s=5, lease_ms=60_000)


class Place:
    """A location with two servers: a process, which can be paused, and one in this process."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder}/location"
        self.store = persist.open(self.url, config=CONFIG)
        self.healthy = ShardServer(self.store, "127.0.0.1:0")
        self.port = self.healthy.start()
        self.process = Process(self.url, None)

    def shard(self, client: persist.Client) -> str:
        """A new shard, whose first server is the first of the client's."""
        rpc = cast("RpcConsensus", client.location.consensus)._servers
        name = "s"
        while rpc.order(name) != rpc._servers or name in self.store.shards():
            name = f"s-{os.urandom(3).hex()}"
        return name

    def client(self, first: int, more: str = "") -> persist.Client:
        address = f"persist://127.0.0.1:{first},127.0.0.1:{self.port}{more}"
        return persist.open(self.url, address, config=CONFIG, runtime=QUIET)

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert self.process.process is not None
        self.process.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill(signal.SIGKILL)
        self.healthy.stop(0)
        self.store.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"))
    yield made
    made.close()


class Failed(grpc.RpcError):  # type: ignore[misc]
    """A call that failed so."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "so"


class Opened:
    """A client and handles of a shard of its own."""

    def __init__(self, place: Place, client: persist.Client) -> None:
        self.place, self.client, self.shard = place, client, place.shard(client)
        self.write, self.read = client.open_shard(self.shard, SCHEMA)
        self.write.upsert([row(1)])
        self.rows = 1

    def append(self) -> None:
        self.rows += 1
        self.write.append_now([row(100 + self.rows)])

    def upsert(self) -> None:
        self.write.upsert([row(1, "other"), row(8)])
        self.rows += 1

    def look(self) -> None:
        upper = self.read.fetch_upper().time or 0
        assert self.read.snapshot(upper - 1).to_arrow().num_rows == self.rows

    def heartbeat(self) -> None:
        before = self.place.store.inspect(self.shard).seqno
        assert renew(self.write.machine, (self.write.id,), CONFIG.lease_ms, 2.0)
        assert self.place.store.inspect(self.shard).seqno > before

    def subscribe(self) -> None:
        consensus = cast("RpcConsensus", self.client.location.consensus)

        def is_told() -> bool:
            upper = self.read.fetch_upper().time or 0
            consensus.wait(self.shard, SeqNo(0), 0)
            return follows_at(self.client, self.shard) == f"127.0.0.1:{self.place.port}" and upper >= 0

        eventually(is_told)

    def open(self) -> None:
        self.client.open_writer(self.shard, SCHEMA).close()


VERBS: dict[str, Callable[[Opened], None]] = {
    "append": Opened.append, "upsert": Opened.upsert, "read": Opened.look, "heartbeat": Opened.heartbeat,
    "subscribe": Opened.subscribe, "open": Opened.open,
}  # fmt: skip


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.parametrize("verb", VERBS)
def test_a_paused_server_is_passed_over_and_asked_again_later(place: Place, verb: str) -> None:
    with place.client(place.process.port) as client:
        opened = Opened(place, client)
        with place.paused():
            assert timed(lambda: VERBS[verb](opened)) < WITHIN_S
            assert timed(opened.append) < WITHIN_S
        opened.look()
        check_world(place.store, opened.shard)


@contextmanager
def silent(accepts: bool) -> Iterator[int]:
    """The port of a black hole: what comes there is never answered, or never even accepted."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64 if accepts else 0))
        port = listener.getsockname()[1]
        for _ in range(0 if accepts else 3):  # more than its queue takes
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        yield port


@pytest.mark.parametrize("accepts", [True, False], ids=["accepts", "does not accept"])
def test_a_black_hole_is_passed_over_by_every_verb_and_paid_for_once(
    place: Place, accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CONNECT_S", 0.5)  # sat out by the first call
    with silent(accepts) as port, place.client(port) as client:
        opened = Opened(place, client)
        hole = cast("RpcConsensus", client.location.consensus)._servers._servers[0]
        for verb in VERBS.values():
            hole.shunned_until = 0.0  # it is tried again
            assert timed(lambda verb=verb: verb(opened)) < WITHIN_S  # type: ignore[misc]
        opened.look()
        assert hole.is_shunned
        check_world(place.store, opened.shard)


def test_the_store_is_asked_where_the_only_server_is_paused(place: Place) -> None:
    address = f"persist://127.0.0.1:{place.process.port}?store={quote(place.url)}"
    with persist.open(place.url, address, config=CONFIG, runtime=QUIET) as client:
        opened = Opened(place, client)
        with place.paused():
            assert timed(opened.append) < WITHIN_S
            assert timed(opened.look) < WITHIN_S
        opened.append()
        opened.look()
        check_world(place.store, opened.shard)


def test_what_a_paused_server_holds_is_committed_once(place: Place) -> None:
    """It gets the command, is paused before it commits, and commits what it holds when it is resumed."""
    with place.client(place.process.port) as client:
        opened = Opened(place, client)
        for _ in range(2):
            with place.paused():
                client.location.consensus._servers._servers[0].shunned_until = 0.0  # type: ignore[attr-defined]
                client.location.consensus._servers._servers[0]._is_ready = True  # type: ignore[attr-defined]
                opened.append()
            opened.append()
        opened.look()
        check_world(place.store, opened.shard)
    with place.client(place.process.port) as client:  # through the server that was paused
        assert client.inspect(opened.shard).state.upper == place.store.inspect(opened.shard).state.upper


@pytest.mark.slow
def test_at_the_default_timeout_an_append_beside_a_paused_server_takes_three_seconds(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One share of it, of 2 s, and once: counted, as a busy machine takes longer than the second of the first time."""
    monkeypatch.setattr(servers, "SHUNNED_S", 60.0)
    paused, sent, waited = f"127.0.0.1:{place.process.port}", Server.send, []

    def counted(self: Server, channel: grpc.Channel, name: str, call: bytes, seconds: float) -> bytes:
        waited.extend([seconds] if self.address == paused else [])
        # The other one has all the time that it needs, as it is only a busy machine that makes it slow.
        return sent(self, channel, name, call, seconds if self.address == paused else 60.0)

    with persist.open(place.url, f"persist://{paused},127.0.0.1:{place.port}", runtime=QUIET) as client:
        opened = Opened(place, client)
        monkeypatch.setattr(Server, "send", counted)
        with place.paused():
            opened.append()
            opened.append()
        assert [seconds <= servers.SHARE_S for seconds in waited] == [True], "it is asked last after that"
        opened.look()
        check_world(place.store, opened.shard)


@pytest.mark.slow
def test_two_servers_of_a_slow_store_end_in_the_answer_and_commit_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit takes longer than a server's share."""
    monkeypatch.setattr(servers, "SHARE_S", 0.5)
    append, slow = SqliteConsensus.compare_and_set, 1.5

    def late(self: SqliteConsensus, *given: Any) -> bool:
        time.sleep(slow)
        return append(self, *given)

    with ExitStack() as stack:
        ports = []
        for _ in range(2):
            store = stack.enter_context(persist.open(place.url, config=CONFIG))
            server = ShardServer(store, "127.0.0.1:0")
            ports.append(server.start())
            stack.callback(server.stop, 0)
        address = f"persist://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
        client = stack.enter_context(persist.open(place.url, address, runtime=QUIET))
        opened = Opened(place, client)
        with monkeypatch.context() as patch:
            patch.setattr(SqliteConsensus, "compare_and_set", late)
            for _ in range(2):
                assert timed(opened.append) < 0.5 + 4 * slow
        opened.look()
        check_world(place.store, opened.shard)


def test_a_server_that_does_not_answer_is_tried_less_and_less_often() -> None:
    now = [100.0]
    runtime = Runtime(monotonic=lambda: now[0])
    server = Servers(["127.0.0.1:1", "127.0.0.1:2"], runtime)._servers[0]
    pauses = []
    for _ in range(9):
        server.shun()
        server.shun()  # another call that was under way
        pauses.append(server.shunned_until - now[0])
        now[0] = server.shunned_until
        assert server.is_silent
        assert not server.is_shunned
    assert pauses[:3] == [SHUNNED_S, 2 * SHUNNED_S, 4 * SHUNNED_S]
    assert pauses[-2:] == [SHUNNED_MOST_S] * 2
    server.answered()
    server.shun()
    assert server.shunned_until - now[0] == SHUNNED_S


def test_a_silent_server_is_tried_for_a_moment() -> None:
    """Before something else to ask; where it is the last one, as long as any."""
    now = [100.0]
    runtime = Runtime(monotonic=lambda: now[0])
    for addresses, has_store, while_shunned, later in ((2, False, 2.0, 0.25), (1, True, 0.25, 0.25), (1, False, 2, 2)):
        asked = Servers([f"127.0.0.1:{n + 1}" for n in range(addresses)], runtime, has_store=has_store)
        first = asked._servers[0]
        assert asked._connect_s(first) == 2.0
        first.shun()
        assert asked._connect_s(first) == while_shunned
        now[0] += SHUNNED_S
        assert asked._connect_s(first) == later
        first.answered()
        assert asked._connect_s(first) == 2.0


@pytest.mark.parametrize(
    ("addresses", "has_store", "timeout_s", "takes_s", "expected"),
    [
        (3, False, 60, 0, [2.0, 2.0, 30.0]),
        (2, False, 60, 0, [2.0, 30.0]),
        (2, False, 2, 0, [1.0, 1.0]),
        (2, False, 60, 5, [7.0, 35.0]),
        (2, True, 60, 0, [2.0, 2.0]),
        (1, True, 60, 0, [2.0]),
        (1, False, 60, 0, [60.0]),
    ],
)
def test_a_server_has_a_share_of_the_time_where_there_is_another_and_the_last_one_half(
    addresses: int, has_store: bool, timeout_s: float, takes_s: float, expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given: list[float] = []

    def send(_server: Server, _channel: object, _name: str, call: bytes, _seconds: float) -> bytes:
        given.append(wire.decode_call(call, type(None))[1])
        raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED)

    monkeypatch.setattr(Server, "_ready", lambda _server, _seconds: None)
    monkeypatch.setattr(Server, "send", send)
    runtime = Runtime(monotonic=lambda: 100.0)
    asked = Servers([f"127.0.0.1:{n + 1}" for n in range(addresses)], runtime, has_store=has_store)
    with pytest.raises(Unreached):
        asked.call("heads", None, None, route="", seconds=timeout_s, reads=True, takes_s=takes_s)
    assert given == pytest.approx(expected)


@pytest.mark.parametrize(("addresses", "has_store", "most"), [(1, True, 2), (2, False, 2), (2, True, 3), (3, False, 7)])
def test_servers_that_are_all_slow_end_in_an_answer(
    addresses: int, has_store: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store takes five seconds, and what is cut off before is not done: the worst case."""
    now, sent = [100.0], list[str]()

    def send(server: Server, _channel: object, _name: str, call: bytes, _seconds: float) -> bytes:
        sent.append(server.address)
        given = wire.decode_call(call, type(None))[1]
        now[0] += min(5.0, given)
        if given < 5:
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED)
        return wire.encode_reply(7, 0)

    monkeypatch.setattr(Server, "_ready", lambda _server, _seconds: None)
    monkeypatch.setattr(Server, "send", send)
    asked = Servers([f"127.0.0.1:{n + 1}" for n in range(addresses)], Runtime(lambda: now[0]), has_store=has_store)

    def answered() -> tuple[int, float]:
        """How many calls one write takes, and how long."""
        sent.clear()
        began = now[0]
        while now[0] - began < 60:
            try:
                assert asked.call("commit", None, int, route="", seconds=60 - (now[0] - began), reads=False) == 7
            except Indeterminate:
                continue
            return len(sent), now[0] - began
        raise AssertionError("no answer")

    assert answered() == (most, (most - 1) * 2 + 5)
    for _ in range(20):
        calls, seconds = answered()
        assert calls <= most
        assert seconds <= (most - 1) * 2 + 5


def test_a_server_that_nobody_asked_since_it_was_cut_off_does_not_give_another_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All servers were cut off for a moment, and one of them served every call since."""
    now, away = [100.0], {"1", "2"}

    def send(server: Server, _channel: object, _name: str, call: bytes, _seconds: float) -> bytes:
        if server.address[-1] not in away:
            return wire.encode_reply(int(server.address[-1]), 0)
        now[0] += wire.decode_call(call, type(None))[1]
        raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED)

    monkeypatch.setattr(Server, "_ready", lambda _server, _seconds: None)
    monkeypatch.setattr(Server, "send", send)
    asked = Servers(["127.0.0.1:1", "127.0.0.1:2"], Runtime(lambda: now[0]))

    def call() -> tuple[int, float]:
        began = now[0]
        found = asked.call("head", None, int, route="", seconds=60, reads=True)
        return found, now[0] - began

    with pytest.raises(Unreached):
        call()
    now[0] = asked._servers[1].shunned_until
    away.clear()
    assert call() == (1, 0)
    away.add("1")
    assert call() == (2, 2)
    now[0] += SHUNNED_MOST_S
    away.add("2")
    began = now[0]
    with pytest.raises(Unreached):
        call()
    assert now[0] - began == 2 + 29, "the other one was tried just now: both may only be slow"


NEWER = msgspec.msgpack.encode([wire.VERSION + 1, 0, None])
WRONG = wire.encode_reply({"not": "a list"}, 0)


@pytest.mark.parametrize(
    ("answer", "read_fails_as"),
    [(b"\xc1", InvalidUsage), (NEWER, NewerFormat), (WRONG, InvalidUsage), (None, Unreached)],
    ids=["no answer", "a newer version", "another type", "too many calls, or too large an answer"],
)
@pytest.mark.parametrize("reads", [True, False])
def test_an_answer_that_cannot_be_read_does_not_say_that_nothing_was_done(
    answer: bytes | None, read_fails_as: type[Exception], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> bytes:
        if answer is None:
            raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED)
        return answer

    monkeypatch.setattr(Server, "_ready", lambda _server, _seconds: None)
    monkeypatch.setattr(Server, "send", send)
    asked = Servers(["127.0.0.1:1"], Runtime())
    with pytest.raises(read_fails_as if reads else Indeterminate) as told:
        asked.call("commit", None, list[int], route="", seconds=5, reads=reads)
    assert reads or "othing was done" not in str(told.value)


@pytest.mark.parametrize("slow", [{"1"}, {"2"}, {"1", "2"}, set()])
def test_servers_of_which_one_is_only_slow_may_be_there(slow: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So an opening asks again, whichever of them was asked last."""

    def ready(server: Server, _seconds: float) -> None:
        raise Unreached("no connection", is_slow=server.address[-1] in slow)

    monkeypatch.setattr(Server, "_ready", ready)
    with pytest.raises(Unreached) as caught:
        Servers(["127.0.0.1:1", "127.0.0.1:2"], Runtime()).call("now", None, None, route="", seconds=1, reads=True)
    assert caught.value.is_slow == bool(slow)


def test_a_call_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "_ready", lambda _server, _seconds: None)
    monkeypatch.setattr(servers, "MOST_BYTES", 1000)
    with pytest.raises(InvalidUsage, match="at most 1000"):
        Servers(["127.0.0.1:1"], Runtime()).call("commit", b"x" * 1001, None, route="", seconds=5, reads=False)


def test_a_server_that_is_slow_to_accept_is_waited_for_at_opening(place: Place) -> None:
    address = f"persist://127.0.0.1:{place.process.port}"
    with place.paused():
        resume = threading.Timer(3, os.kill, (cast("subprocess.Popen[str]", place.process.process).pid, signal.SIGCONT))
        resume.start()
        with persist.open(place.url, address, config=persist.Config(timeout_s=30), runtime=QUIET) as client:
            assert not resume.is_alive()
            assert client.shards() == place.store.shards()


def test_a_server_that_never_accepts_ends_an_opening_in_its_time() -> None:
    def opened() -> None:
        address, config = f"persist://127.0.0.1:{port},127.0.0.1:{other}", persist.Config(timeout_s=6)
        with pytest.raises(Determinate, match="cannot be reached"):
            persist.open("memory:", address, config=config)

    with silent(accepts=True) as port, silent(accepts=False) as other:
        assert 5 < timed(opened) < 12


def test_a_server_that_is_not_there_ends_an_opening_at_once() -> None:
    def opened() -> None:
        with pytest.raises(Determinate, match="cannot be reached"):
            persist.open("memory:", "persist://127.0.0.1:1,127.0.0.1:2")

    assert timed(opened) < WITHIN_S


class Behind(Site):
    """With a server, always at the same port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = self.serve().port

    def again(self) -> None:
        self.serve(f"127.0.0.1:{self.port}")

    @property
    def at(self) -> str:
        return f"persist://127.0.0.1:{self.port}?store={quote(self.url)}"


site = site_of(Behind)


def test_a_client_goes_on_without_servers_and_comes_back_to_them(site: Behind) -> None:
    with persist.open(site.url, site.at, config=PATIENT) as client:
        behind = cast("RpcConsensus", client.location.consensus)._fallback
        assert behind is not None
        write, read = client.open_shard("s", SCHEMA)
        other = client.open_writer("t", SCHEMA)
        for n in range(6):
            if n == 2:
                site.stop()
            if n == 4:
                site.again()
                while behind.is_in_use:
                    behind._next_look = 0.0
            write.compare_and_append([row(n, time=n)], n, n + 1)
            assert behind._is_away == (n in (2, 3))
            both = [persist.Append(other, [row(n, time=n)], n, n + 1)]
            client.compare_and_append_many(both)
            assert client.shards() == ["s", "t"]
        assert read.snapshot(5).to_arrow().num_rows == 6
        client.maintain("s")
    check_world(site.store, "s")
    check_world(site.store, "t")


def test_a_client_opens_without_any_server(site: Behind) -> None:
    site.stop()
    with persist.open(site.url, site.at, config=PATIENT) as client:
        client.open_writer("s", SCHEMA).append_now([row(1)])
    check_world(site.store, "s")


def test_what_a_server_refuses_is_not_tried_on_the_store(site: Behind, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[clients.a]\ntoken = "a-token-0123456789abcdef"\nrights = { "*" = ["append"] }')
    server = ShardServer(site.store, "127.0.0.1:0", token_file=tokens)
    port = server.start()
    try:
        with pytest.raises(NotAuthenticated):
            persist.open(site.url, f"persist://127.0.0.1:{port}?store={quote(site.url)}")
    finally:
        server.stop(0)


def test_servers_are_looked_for_less_and_less_often() -> None:
    now, looked = [1000.0], [0]

    class Counted(Servers):
        def is_there(self, seconds: float) -> bool:
            looked[0] += 1
            return super().is_there(seconds)

    runtime = Runtime(monotonic=lambda: now[0])
    stores = _Stores(Opening(runtime=runtime))
    memory = persist.open("memory:looks")
    stores.blob = memory.location.blob
    behind = FallbackStore("memory:looks", stores, Counted(["127.0.0.1:1"], runtime), runtime)
    assert not behind.is_in_use
    behind.leave(Determinate("all are gone"))
    for _ in range(36_000):
        now[0] += 0.1
        assert behind.is_in_use
    behind.close()
    memory.close()
    assert 3600 / LONGEST_PAUSE_S <= looked[0] <= 3600 / LONGEST_PAUSE_S + 6


def test_a_client_without_servers_has_one_heart_which_ends_with_it() -> None:
    runtime, made = Runtime(), list[object]()
    stores = _Stores(Opening(runtime=runtime))
    memory = persist.open("memory:hearts")
    stores.blob = memory.location.blob

    class Beating:
        ended = 0

        def end(self) -> None:
            self.ended += 1

    def make(*given: object) -> Any:
        assert given == (memory.location.blob, store, runtime)
        made.append(Beating())
        return made[-1]

    behind = FallbackStore("memory:hearts", stores, Servers(["127.0.0.1:1"], runtime), runtime)
    store = behind.consensus()
    first = behind.heart(make)
    assert behind.heart(make) is first
    behind.close()
    behind.close()
    memory.close()
    assert made == [first]
    assert cast("Beating", first).ended == 1


def test_a_store_that_is_not_there_is_told(site: Behind, tmp_path: Path) -> None:
    site.stop()
    with pytest.raises(NotFound):
        persist.open(site.url, f"persist://127.0.0.1:{site.port}?store=file:{tmp_path}/nowhere", config=PATIENT)


@pytest.mark.parametrize("store", ["", "persist://a:1", "persists://a:1?store=file:x", "levitate:x", "s3://bucket/x"])
def test_what_cannot_be_behind_servers_is_refused(store: str, site: Behind) -> None:
    with pytest.raises(InvalidUsage):
        persist.open(site.url, f"persist://127.0.0.1:{site.port}?store={quote(store, safe='')}")


def test_the_url_means_the_same_in_any_process(site: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with persist.open(site.url, f"persist://127.0.0.1:{site.port}?store=./location", config=PATIENT) as client:
        monkeypatch.chdir("/")
        assert client.consensus_url == f"persist://127.0.0.1:{site.port}?store={quote(site.url, safe='')}"
        site.stop()
        again = pickle.loads(pickle.dumps(client.location))
        assert isinstance(again, Location)
        assert again == client.location
        again.close()


@pytest.mark.parametrize("user", ["u:hunter2%40x@", "u:hunter2@", "u:hun@ter2@"])
@pytest.mark.parametrize("safe", ["", "/", ":/", ":/@?=", ":/@?=%"])
@pytest.mark.parametrize("end", ["", "?password=hunter2", "?sslmode=require"])
def test_a_password_of_the_store_is_never_shown(user: str, safe: str, end: str) -> None:
    url = f"persist://a:7600,b:7600?store={quote(f'postgresql://{user}db:5432/x{end}', safe=safe)}&ca=/x"
    for told in (url, canonical(url), f"in {url!r}, somewhere", f"store={quote(f'postgresql://{user}db', safe='')}"):
        assert "ter2" not in redacted(told), redacted(told)
    with pytest.raises(InvalidUsage) as refused:
        persist.open("memory:", url.replace("a:7600", "a"))
    assert "ter2" not in str(refused.value)
    assert "ter2" not in repr(refused.value.fields)


def test_a_store_without_a_password_is_shown() -> None:
    url = "persist://a:7600?store=postgresql%3A%2F%2Fu%40db%2Fx"
    assert redacted(url) == url
