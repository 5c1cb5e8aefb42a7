"""A server under strangers and crowds: what is no call, what never ends, and a thousand at once. Others are served on.

Servers are processes of their own. What is counted is what was answered, refused or passed; times are not.

A shard server that has more to do than it takes: what it refuses, and that the leases of its clients stay.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import NotAuthenticated, Overloaded
from persist_lib.format import wire
from persist_lib.format.log import decode_row
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.rpc.credentials import SCHEME
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.requests import OF_A_CLIENT_MOST, WAITING_MOST, Request
from persist_lib.testing import check_world
from tests.conformance.stores import CONSENSUSES
from tests.faults.raw_http2 import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, Connection, frame, headers
from tests.faults.relay import Relay
from tests.faults.served import Served, until
from tests.served import PATIENT_S, Sharing
from tests.worlds import SCHEMA, row

CONFIG = persist.Config(format=4, timeout_s=60)
TOKEN = "a-token-0123456789abcdef"
CROWD = 1000


class Site:
    """A location, servers of it and clients of these."""

    def __init__(self, folder: Path, consensus: str | None = None) -> None:
        self.folder, self.url, self.consensus = folder, f"file:{folder}/location", consensus
        self.store = persist.open(self.url, consensus, config=CONFIG)
        self.servers: list[Served] = []
        self.written = 0

    def serve(self, *options: str, files: int | None = None) -> Served:
        log = self.folder / f"log-{len(self.servers)}"
        self.servers.append(Served(self.url, self.consensus, log, "--drain", "1", *options, files=files))
        return self.servers[-1]

    def client(self, server: Served) -> persist.Client:
        return persist.open(self.url, consensus=f"persist://127.0.0.1:{server.port}", config=CONFIG)

    def write(self, server: Served, shard: str = "s") -> None:
        """What others do meanwhile."""
        with self.client(server) as client:
            client.open_writer(shard, SCHEMA).append_now([row(self.written)])
            self.written += 1

    def close(self) -> None:
        for server in self.servers:
            server.end()
        self.store.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = Site(tmp_path)
    yield made
    made.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def on_postgres(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, CONSENSUSES["postgresql"].prepare(tmp_path))
    yield made
    made.close()


def test_a_message_of_a_stranger_is_not_taken(site: Site) -> None:
    tokens = site.folder / "tokens.toml"
    tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["append"] }}')
    server = site.serve("--token-file", str(tokens))
    relay = Relay(server.port)
    message = bytes(60 << 20)
    options = [("grpc.max_send_message_length", wire.MOST_BYTES)]
    with grpc.insecure_channel(f"127.0.0.1:{relay.port}", options=options) as channel:
        call = channel.unary_unary(f"/{wire.SERVICE}/commit")
        for metadata in ((), (("authorization", f"{SCHEME}{TOKEN[::-1]}"),)):
            with pytest.raises(NotAuthenticated):
                wire.decode_reply(call(message, timeout=60, metadata=metadata), object)
        assert server.figure("received_bytes_total") == 0
        assert relay.bytes_asked < len(message) / 2, "what fits into the buffers of connections, and no more"
        reply = call(message, timeout=60, metadata=(("authorization", f"{SCHEME}{TOKEN}"),))
        with pytest.raises(persist.InvalidUsage):
            wire.decode_reply(reply, object)
        assert relay.bytes_asked > len(message)
    assert server.figure("received_bytes_total") == len(message)
    server.end()
    relay.close()


NO_CALLS = {
    "HTTP/1": b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "silence": b"",
    "half a preface": PREFACE[:10],
    "a preface and silence": PREFACE,
    "half a frame": PREFACE + frame(SETTINGS) + frame(HEADERS, headers("now"), END_HEADERS, 1)[:20],
    "half a message": PREFACE + frame(SETTINGS) + frame(HEADERS, headers("now"), END_HEADERS, 1)
    + frame(DATA, b"\x00\x00\x01\x00\x00abc", 0, 1),
    "a frame that is too large": PREFACE + frame(SETTINGS) + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "headers that are too large": PREFACE + frame(SETTINGS)
    + frame(HEADERS, headers("now", **{f"x{n}": "y" * 100 for n in range(300)}), END_HEADERS, 1),
    "noise": bytes(range(256)) * 40,
}  # fmt: skip


def test_connections_that_say_nothing_or_nonsense_hold_up_nobody(site: Site) -> None:
    server = site.serve()
    site.write(server)
    with ExitStack() as stack:
        for data in NO_CALLS.values():
            for _ in range(20):
                connection = stack.enter_context(Connection(server.port, begins=False))
                connection.send(data)
        for _ in range(10):
            site.write(server)
        assert server.get("/readyz")[0] == 200
    until(lambda: server.figure("connections") == 0)
    site.write(server)
    assert server.log.stat().st_size < 10_000, "a line for each of them would fill a disk"


@pytest.mark.parametrize("sent", ["silence", "half a preface", "a preface and silence", "HTTP/1", "noise"])
def test_a_connection_that_does_not_begin_is_ended(site: Site, sent: str) -> None:
    server = site.serve()
    with Connection(server.port, begins=False) as connection:
        connection.send(NO_CALLS[sent])
        assert connection.is_ended()


def test_a_thousand_connections_at_once_are_served_on(site: Site) -> None:
    server = site.serve()
    with ExitStack() as stack:
        crowd = [stack.enter_context(Connection(server.port)) for _ in range(CROWD)]
        for one in crowd:
            one.call("now", wire.encode_call(None, 30))
        assert all(wire.decode_reply(one.answer(), type(None))[0] is None for one in crowd)
        assert server.figure("connections") >= CROWD
        site.write(server)
    until(lambda: server.figure("connections") == 0)
    site.write(server)


def test_more_connections_than_files_are_refused_and_those_that_are_there_are_served_on(site: Site) -> None:
    server = site.serve(files=256)
    with site.client(server) as client:
        write = client.open_writer("s", SCHEMA)
        write.append_now([row(1)])
        with ExitStack() as stack:
            crowd = [stack.enter_context(Connection(server.port, begins=False)) for _ in range(600)]
            answered = 0
            for one in crowd:
                try:
                    one.send(PREFACE + frame(SETTINGS))
                    one.call("now", wire.encode_call(None, 30))
                    one.answer()
                    answered += 1
                except (EOFError, OSError):
                    pass
            assert 64 <= answered <= 128, answered
            for n in range(20):
                write.append_now([row(n)])
            assert server.get("/readyz")[0] == 200, "there are files left for others"
        write.append_now([row(2)])
    until(lambda: server.figure("connections") == 0)
    site.write(server)
    assert server.log.stat().st_size < 10_000
    check_world(site.store, "s")


def _hold(number: int) -> bytes:
    command = c.SetHold(f"h{number}", persist.frontier.MINIMUM, None, b"x")
    commit = wire.Commit(number.to_bytes(16, "big"), False, (("s", SeqNo(0), *wire.encode_command(command)),))
    return wire.encode_call(commit, 120)


def test_while_a_thousand_connections_wait_for_an_answer_the_others_are_served(on_postgres: Site) -> None:
    site = on_postgres
    site.store.open_writer("s", SCHEMA).close()
    assert site.consensus is not None
    server = site.serve()
    with psycopg.connect(_dsn(site)) as blocker, ExitStack() as stack:
        blocker.execute(f"SELECT 1 FROM {_schema(site)}.shard_head WHERE key = 's' FOR UPDATE")
        crowd = [stack.enter_context(Connection(server.port)) for _ in range(CROWD)]
        for number, one in enumerate(crowd):
            one.call("commit", _hold(number))
        until(lambda: server.figure("commands_under_way") == CROWD)
        for _ in range(5):
            site.write(server, "other")
        assert server.get("/readyz")[0] == 200
        blocker.rollback()
        answers = [wire.decode_reply(one.answer(), list[wire.Answer])[0] for one in crowd]
    committed = sum(answer[0].is_committed for answer in answers)
    refused = [answer[0].refusal for answer in answers if not answer[0].is_committed]
    rows = [decode_row(one.data, "row") for one in site.store.consensus.scan("s", SeqNo(0), 10_000)]
    holds = sum(step.command == "SetHold" and step.diff is not None for one in rows for step in one.steps)
    assert committed == holds
    assert committed + len(refused) == CROWD
    assert committed > 0
    until(lambda: server.figure("commands_under_way") == 0)
    check_world(site.store, "other")


def _dsn(site: Site) -> str:
    return str(site.consensus).partition("?")[0]


def _schema(site: Site) -> Any:
    return str(site.consensus).partition("persist_schema=")[2].partition("&")[0] or "persist"


SHARD = ShardId("s")
RUNTIME = Runtime()


def asked(number: int, client: int) -> Request:
    command = c.SetHold("hold", MINIMUM, b"never", b"x")
    deadline = RUNTIME.deadline(PATIENT_S)
    return Request(SHARD, command, b"%d" % number, f"client {client}", deadline, SeqNo(0))


def test_leases_stay_while_a_server_has_more_to_do_than_it_takes() -> None:
    world = Sharing()
    try:
        client = world.client(persist.Config(lease_ms=20_000))
        write = client.open_writer(SHARD, SCHEMA)
        assert write.id
        funnels = world.slots[0].server._funnels
        funnel = funnels.funnel(SHARD)
        world.clock.advance(15)
        beat = threading.Thread(target=client.heartbeat, daemon=True)
        with funnel.machine.turn:  # nothing gets on meanwhile
            flood = [asked(number, number // OF_A_CLIENT_MOST) for number in range(WAITING_MOST)]
            for request in flood:
                funnels.submit(request)
            refused = asked(WAITING_MOST, 99)
            funnels.submit(refused)
            with pytest.raises(Overloaded):
                refused.answer.result(0)
            beat.start()
            patience = RUNTIME.deadline(PATIENT_S)
            while not funnel.queue._urgent:
                assert not patience.has_passed(), "the heartbeat was not taken"
                patience.pause(0.001)
        beat.join(PATIENT_S)
        assert all(request.answer.result(PATIENT_S).refusal for request in flood), "each is answered"
        world.clock.advance(15)
        world.client().expire(SHARD)
        found = check_world(world.client(), SHARD)
        assert write.id in found.state.writers
    finally:
        world.close()
