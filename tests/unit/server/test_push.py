"""Push through real servers: those that follow a shard ask for nothing, and a lost push costs time alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

import grpc
import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.errors import InvalidUsage
from persist_lib.format import wire
from persist_lib.format.wire import FOLLOW, News, Pushed, decode_pushed, encode_follow
from persist_lib.ids import SeqNo
from persist_lib.location.rpc import push_stream
from persist_lib.location.rpc import subscriptions as told
from persist_lib.location.rpc.push_stream import PushStream
from persist_lib.location.rpc.subscriptions import Followed, Subscriptions
from persist_lib.relation import listen as following
from persist_lib.runtime.ambient import Runtime
from persist_lib.server import row_push
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing import check_world
from tests.servers import postgres_at
from tests.unit.server.following import (
    Listener,
    Writer,
    asked,
    eventually,
    followed_by,
    follows_at,
    is_told,
    without_checks,
)
from tests.unit.server.sites import CONFIG, Served, Site, site_of
from tests.worlds import SCHEMA, row

UPDATES = 40
QUIET = Runtime(background=False)
"""No heartbeat comes in between, which reads the log, and is told rows with its answer."""


class Pushing(Served):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store.open_shard("s", SCHEMA)[0].compare_and_append([{"id": 0, "word": "x"}], 0, 1)


site = site_of(Pushing)


def stream(site: Site, said: SimpleQueue[bytes | None], token: str | None = None) -> Any:
    """A client's own stream to the first server."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # it takes no more unasked
    channel = grpc.insecure_channel(f"127.0.0.1:{site.servers[0].port}", options=options)
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    return channel.stream_stream(f"/{wire.SERVICE}/{FOLLOW}")(iter(said.get, None), metadata=metadata)


def test_a_listener_asks_for_nothing_while_rows_are_pushed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    eventually(lambda: is_told(client))
    listener.wait_for(writer.append())
    before = asked(client)
    for _ in range(UPDATES):
        listener.wait_for(writer.append())
    assert asked(client) == before
    assert listener.ids == list(range(1, UPDATES + 2))
    check_world(site.store, "s")


def test_a_waiting_snapshot_wakes_without_polling(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    client, writer = site.client(runtime=QUIET), Writer(site.client(runtime=QUIET), SCHEMA)
    read = client.open_reader("s")
    rows: list[int] = []
    waits = threading.Thread(target=lambda: rows.append(read.snapshot(20).to_arrow().num_rows))
    waits.start()
    eventually(lambda: is_told(client))
    before = asked(client)
    for _ in range(20):
        writer.append()
    waits.join(30)
    assert rows == [21]
    assert asked(client) == before


def test_a_row_that_is_never_pushed_costs_time_and_is_not_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "CHECK_S", 0.1)
    monkeypatch.setattr(following, "LONGEST_WAIT_S", 0.15)
    take = Subscriptions._take

    def lose(self: Subscriptions, line_: PushStream, told: Pushed) -> None:
        take(self, line_, Pushed(told.version, tuple(one for one in told.news if not one.rows), told.ended))

    monkeypatch.setattr(Subscriptions, "_take", lose)
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    eventually(lambda: is_told(client))
    for _ in range(5):
        listener.wait_for(writer.append())
    assert listener.ids == [1, 2, 3, 4, 5]


def test_a_timeout_is_never_told_by_what_was_pushed_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    monkeypatch.setattr(following, "LONGEST_WAIT_S", 1e6)
    monkeypatch.setattr(Followed, "add", lambda *_: None)  # nothing that is pushed comes
    client = site.client(runtime=QUIET)
    read, rows = client.open_reader("s"), []
    waits = threading.Thread(target=lambda: rows.append(read.snapshot(1, timeout=3).to_arrow().num_rows))
    waits.start()
    eventually(lambda: is_told(client))
    Writer(site.store, SCHEMA).append()
    waits.join(60)
    assert rows == [2]


def test_where_rows_are_left_out_as_a_client_lags_it_reads_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    monkeypatch.setattr(row_push, "Backlog", partial(row_push.Backlog, bytes_most=1))
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    eventually(lambda: is_told(client))
    for _ in range(UPDATES):
        writer.append()
    listener.wait_for(UPDATES)
    assert listener.ids == list(range(1, UPDATES + 1))


def test_rows_of_another_shard_are_not_taken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    site.store.open_shard("t", SCHEMA)[0].compare_and_append([{"id": 7, "word": "wrong"}], 0, 1)
    take, others = Subscriptions._take, {"s": "t"}

    def mix_up(self: Subscriptions, line_: PushStream, told: Pushed) -> None:
        def mixed(one: News) -> News:
            rows = site.store.consensus.scan(others[one.shard], SeqNo(0), 100)
            return News(one.shard, tuple((SeqNo(seqno), rows[-1].data) for seqno, _ in one.rows), one.newest)

        take(self, line_, Pushed(told.version, tuple(mixed(one) for one in told.news), told.ended))

    monkeypatch.setattr(Subscriptions, "_take", mix_up)
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    eventually(lambda: is_told(client))
    for _ in range(10):
        listener.wait_for(writer.append())
    assert listener.ids == list(range(1, 11))


@pytest.mark.parametrize("consensus", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
@pytest.mark.parametrize("through", ["another server", "no server"])
def test_rows_that_others_commit_are_pushed_too(
    tmp_path: Path, consensus: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_checks(monkeypatch)
    place = None
    if consensus == "postgresql":
        place = postgres_at(persist_schema=f"p{os.urandom(8).hex()}", persist_notify="1")
    stores = [persist.open(f"file:{tmp_path}/x", place, config=CONFIG) for _ in range(2)]
    servers = [ShardServer(store, "127.0.0.1:0") for store in stores]
    ports = [server.start() for server in servers]
    try:
        stores[0].open_shard("s", SCHEMA)[0].compare_and_append([{"id": 0, "word": "x"}], 0, 1)
        url, (one, two) = f"file:{tmp_path}/x", (f"persist://127.0.0.1:{port}" for port in ports)
        with (
            persist.open(url, one, config=CONFIG, runtime=QUIET) as client,
            persist.open(url, two, config=CONFIG) as other,
        ):
            listener = Listener(client, until=6)
            writer = Writer(other if through == "another server" else stores[1], SCHEMA)
            eventually(lambda: is_told(client))
            listener.wait_for(writer.append())
            before = asked(client)
            for _ in range(4):
                listener.wait_for(writer.append())
            listener.thread.join(30)
            assert listener.ids == [1, 2, 3, 4, 5]
            assert asked(client)["scan"] - before["scan"] <= 1, "the one that closes its reader"
    finally:
        for server in servers:
            server.stop(0.1)
        for store in stores:
            store.close()


def test_a_client_that_never_reads_holds_up_nobody_and_costs_little(site: Site) -> None:
    said: SimpleQueue[bytes | None] = SimpleQueue()
    said.put(encode_follow(("s",)))
    call = stream(site, said)
    assert decode_pushed(next(call)).news
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    for _ in range(150):
        writer.append(word=os.urandom(6_000).hex())
    listener.wait_for(150)
    held = [one.backlog.bytes for one in site.servers[0]._pushing._subscribers]
    assert len(held) == 2
    assert max(held) <= row_push.BACKLOG_BYTES
    newest = site.store.machine("s").fetch().seqno
    told, rows = SeqNo(0), 0
    while told < newest:  # now it reads: what is left of the rows, and where the log ends
        for news in decode_pushed(next(call)).news:
            told, rows = max(told, news.newest), rows + len(news.rows)
    assert rows < 75, "most were left out"
    call.cancel()
    said.put(None)
    eventually(lambda: len(site.servers[0]._pushing._subscribers) == 1)


def test_a_client_that_goes_is_forgotten(site: Site) -> None:
    client = site.client(runtime=QUIET)
    Listener(client)
    eventually(lambda: is_told(client))
    hub = site.servers[0]._pushing
    assert hub.is_followed()
    client.close()
    eventually(lambda: not hub._subscribers and not hub.is_followed())


def test_a_listener_goes_on_at_the_next_server_and_comes_back(site: Site) -> None:
    ports = [site.servers[0].port, site.serve().port]
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.store, SCHEMA)
    eventually(lambda: bool(follows_at(client)))
    first = follows_at(client)
    [at] = [n for n, port in enumerate(ports) if first.endswith(f":{port}")]
    site.servers[at].stop(0.1)
    listener.wait_for(writer.append())
    eventually(lambda: follows_at(client) not in ("", first))
    listener.wait_for(writer.append())
    site.servers[at] = ShardServer(site.store, first)
    site.servers[at].start()
    eventually(lambda: bool(writer.append()) and follows_at(client) == first)
    listener.wait_for(writer.append())
    assert listener.ids == list(range(1, writer.next))


def test_a_server_that_gives_no_sign_of_life_is_left(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.serve()
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.store, SCHEMA)
    eventually(lambda: bool(follows_at(client)))
    first = follows_at(client)
    [server] = [one for one in site.servers if first.endswith(f":{one.port}")]
    monkeypatch.setattr(push_stream, "LOST_S", 0.2)
    is_back = threading.Event()
    server._loop.call_soon_threadsafe(is_back.wait, 60)  # its loop stands still, as in a process that is paused
    eventually(lambda: follows_at(client) != first)
    monkeypatch.setattr(push_stream, "LOST_S", 1e9)
    is_back.set()
    listener.wait_for(writer.append())
    assert listener.failure is None


def test_no_thread_is_left_and_whoever_waits_goes_on_when_a_client_is_closed(site: Site) -> None:
    client = site.client(runtime=QUIET)
    listener = Listener(client)
    eventually(lambda: is_told(client))
    consensus, waited = client.location.consensus, []
    waits = threading.Thread(target=lambda: waited.append(consensus.wait("s", SeqNo(10**6), 600)))  # type: ignore[attr-defined]
    waits.start()
    client.close()
    for thread in (waits, listener.thread):
        thread.join(30)
        assert not thread.is_alive()
    assert waited
    assert not [one for one in threading.enumerate() if one.name == "persist-push"]
    assert not consensus.wait("s", SeqNo(0), 600), "a closed one waits for nothing"  # type: ignore[attr-defined]


def test_a_deadline_ends_the_wait(site: Site) -> None:
    read = site.client(runtime=QUIET).open_reader("s")
    with pytest.raises(persist.TimedOut):
        read.snapshot(5, timeout=0.3)
    with pytest.raises(persist.TimedOut):
        next(iter(read.listen(0, timeout=0.3)))


def test_many_shards_take_one_stream_and_one_thread(site: Site) -> None:
    client = site.client(runtime=QUIET)
    shards = [f"many-{n}" for n in range(60)]
    for shard in shards:
        site.store.open_shard(shard, SCHEMA)[0].compare_and_append([{"id": 0, "word": "x"}], 0, 1)
    consensus = client.location.consensus
    for shard in shards:
        consensus.wait(shard, SeqNo(0), 0)  # type: ignore[attr-defined]
    eventually(lambda: all((one := followed_by(client, shard)) is not None and one.is_live for shard in shards))
    assert len(site.servers[0]._pushing._subscribers) == 1
    assert len([one for one in threading.enumerate() if one.name == "persist-push"]) == 1


def test_a_shard_that_nobody_waits_for_is_not_followed_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client = site.client(runtime=QUIET)
    client.location.consensus.wait("s", SeqNo(0), 0)  # type: ignore[attr-defined]
    eventually(lambda: followed_by(client, "s") is not None and followed_by(client, "s").is_live)  # type: ignore[union-attr]
    monkeypatch.setattr("persist_lib.location.rpc.subscriptions.UNUSED_S", 0.0)
    eventually(lambda: followed_by(client, "s") is None)
    eventually(lambda: not site.servers[0]._pushing.is_followed())


@pytest.mark.parametrize("data", [b"", b"\xff" * 50, b"\x93\x09\x90\x90", b"\x91\xa1x", bytes(100_000)])
def test_what_is_no_message_ends_that_stream_alone(site: Site, data: bytes) -> None:
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    eventually(lambda: is_told(client))
    said: SimpleQueue[bytes | None] = SimpleQueue()
    said.put(data)
    with pytest.raises(grpc.RpcError) as told:
        list(stream(site, said))
    said.put(None)
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    listener.wait_for(writer.append())


def told_of(call: Any, ends: bool) -> Sequence[str]:
    """The shards of which a stream tells next, or that it ends."""
    for data in call:
        told = decode_pushed(data)
        if found := told.ended if ends else [one.shard for one in told.news]:
            return found
    raise InvalidUsage("the stream is over")


def test_push_is_only_for_shards_that_a_client_may_see(site: Site, tmp_path: Path) -> None:
    token, other = "viewer-0123456789abcdefghij", "other-0123456789abcdefghij"
    tokens = tmp_path / "tokens.toml"

    def allow(pattern: str) -> None:
        text = f'[clients.v]\ntoken = "{token}"\nrights = {{ "{pattern}" = ["append"] }}\n'
        tokens.with_suffix(".new").write_text(f'{text}[clients.o]\ntoken = "{other}"\nrights = {{ "*" = ["read"] }}\n')
        tokens.with_suffix(".new").replace(tokens)

    allow("s")
    site.store.open_shard("secret", SCHEMA)
    server = ShardServer(site.store, "127.0.0.1:0", token_file=tokens)
    server.start()
    site.servers.insert(0, server)
    said: SimpleQueue[bytes | None] = SimpleQueue()
    said.put(encode_follow(("s", "secret")))
    call = stream(site, said, token)
    first = decode_pushed(next(call))
    assert ([one.shard for one in first.news], first.ended) == (["s"], ("secret",))
    writer = Writer(site.store, SCHEMA)
    writer.append()
    assert list(told_of(call, ends=False)) == ["s"]
    allow("another")
    writer.append()
    assert list(told_of(call, ends=True)) == ["s"]
    assert not server._pushing.is_followed()
    said.put(encode_follow(("s",)))
    tokens.with_suffix(".new").write_text(f'[clients.o]\ntoken = "{other}"\nrights = {{ "*" = ["read"] }}\n')
    tokens.with_suffix(".new").replace(tokens)
    with pytest.raises(grpc.RpcError) as gone:
        list(call)
    assert gone.value.code() is grpc.StatusCode.UNAUTHENTICATED
    said.put(None)


def test_a_listener_without_push_polls_as_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist_lib.server.row_push.FOLLOWED_MOST", 0)
    client = site.client(runtime=QUIET)
    listener, writer = Listener(client), Writer(site.client(runtime=QUIET), SCHEMA)
    for _ in range(3):
        listener.wait_for(writer.append())
    assert not is_told(client)


def test_what_waits_in_a_pending_area_is_not_put_off_until_the_shard_changes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LONGEST_WAIT_S", 1e6)
    without_checks(monkeypatch)
    client = site.client(runtime=QUIET)
    reader, writer = pending_area.create(client, "area", SCHEMA), pending_area.Writer(site.url, "area", "a", SCHEMA)
    came: Queue[int] = Queue()

    def listen() -> None:
        for event in reader.listen(0, until=4):
            if isinstance(event, persist.Progress):
                came.put(event.frontier.time or 0)

    writer.put([row(0)], 0, 1)
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    eventually(lambda: is_told(client, "area"))
    for n in range(1, 4):
        writer.put([row(n, time=n)], n, n + 1)
        while came.get(timeout=30) < n + 1:
            pass
    listening.join(30)
