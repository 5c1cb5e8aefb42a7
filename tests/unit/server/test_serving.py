"""A server over its network: the library through it, and what reaches it that is no call.

What a server must not answer from its memory, and what it must not take from a client's clock.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

import persist_lib as persist
from persist_lib.core import refusals as r
from persist_lib.errors import Determinate, InvalidUsage, NewerFormat, UpperMismatch
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.commands import Answered
from persist_lib.location.rpc.servers import Servers, Unreached
from persist_lib.runtime.ambient import Runtime
from persist_lib.server import rpc_calls
from persist_lib.server.shard_server import ShardServer
from persist_lib.shard import dedup_index, group_commit
from persist_lib.testing import check_swept, check_world, contents_of
from tests.faults.raw_http2 import DATA, END_HEADERS, END_STREAM, HEADERS, Connection, frame, headers
from tests.unit.server.sites import Served, Site, site_of
from tests.worlds import SCHEMA, WIDER, row

site = site_of(Served)


def test_the_library_works_through_a_server(site: Site) -> None:
    client = site.client()
    write, read = client.open_shard("s", SCHEMA)
    for n in range(40):
        write.compare_and_append([row(n, time=n)], n, n + 1)
    with pytest.raises(UpperMismatch):
        write.compare_and_append([row(0)], 0, 1)
    write.upsert([{"id": 5, "word": "other"}])
    client.set_hold("s", "h", since=3, opaque=b"x", expected=None)
    client.set_retention("s", 10)
    client.maintain("s")
    upper = write.fetch_upper().time or 0
    assert sum(contents_of(read.snapshot(upper - 1, diff=True).to_arrow()).values()) == 40
    with site.client() as other:
        other.open_writer("t", SCHEMA).append_now([row(1)])
    one, two = client.open_writer("t", SCHEMA), client.open_writer("u", SCHEMA)
    at = one.fetch_upper().time or 0
    client.compare_and_append_many(
        [persist.Append(one, [row(2, time=at)], at, at + 1), persist.Append(two, [row(2)], 0, 1)]
    )
    for shard in "stu":
        check_world(site.store, shard)
    write.close()
    read.close()
    client.release_hold("s", "h")
    for _ in range(4):
        client.maintain("s")
    check_swept(site.store, "s")


def test_a_server_that_stops_is_left_for_the_next_one(site: Site) -> None:
    first, second = site.servers[0], site.serve()
    client = site.client(first, second)
    write = client.open_writer("s", SCHEMA)
    for n in range(30):
        if n == 10:
            first.stop(0.5)
            site.servers.remove(first)
        write.compare_and_append([row(n, time=n)], n, n + 1)
    check_world(site.store, "s")


def test_without_any_server_a_call_says_that_nothing_was_sent(site: Site, tmp_path: Path) -> None:
    client = site.client(config=persist.Config(format=4, timeout_s=1))
    write = client.open_writer("s", SCHEMA)
    site.servers.pop().stop(0)
    with pytest.raises((Determinate, persist.Indeterminate)):
        write.compare_and_append([row(1)], 0, 1)
    started = time.monotonic()
    with pytest.raises(Unreached, match="cannot be reached"):
        Servers(["127.0.0.1:1"], Runtime()).call("now", None, type(None), route="", seconds=1, reads=False)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("addresses", ["", "host", "h:99999", "a:1,,b:2", "a b:1", "a:1/path"])
def test_addresses_that_are_none_are_refused(addresses: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage):
        persist.open(f"file:{tmp_path}/x", consensus=f"persist://{addresses}")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:0", "[::]:0", "example.org:7600", "7600", "127.0.0.1:", "10.0.0.1:7600", ""]
)
def test_a_server_listens_to_this_machine_only(site: Site, listen: str) -> None:
    with pytest.raises(InvalidUsage, match="loopback"):
        ShardServer(site.store, listen).start()


def test_a_server_whose_address_is_taken_says_so_and_leaves_nothing_behind(site: Site) -> None:
    taken = f"127.0.0.1:{site.servers[0].port}"
    threads = set(threading.enumerate())
    with pytest.raises(InvalidUsage, match=f"cannot listen on {taken}"):
        ShardServer(site.store, taken).start()
    with pytest.raises(InvalidUsage, match=f"cannot serve HTTP on {taken}"):
        ShardServer(site.store, "127.0.0.1:0", http=taken).start()
    assert set(threading.enumerate()) == threads


MALFORMED = [b"", b"\xff" * 100, b"\x93\x01\xa1x\xa1y", b"\x93\x01\x92\x00\x00\x05", bytes(1_000_000)]


@pytest.mark.parametrize("name", wire.CALLS)
def test_what_is_no_call_is_refused_and_the_others_are_served_on(site: Site, name: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{site.servers[0].port}") as channel:
        for data in MALFORMED:
            reply = channel.unary_unary(f"/{wire.SERVICE}/{name}")(data, timeout=5)
            with pytest.raises((InvalidUsage, NewerFormat)):
                wire.decode_reply(reply, object)
        with pytest.raises(grpc.RpcError) as told:
            channel.unary_unary(f"/{wire.SERVICE}/levitate")(b"", timeout=5)
    assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED
    site.client().open_writer("s", SCHEMA).append_now([row(1)])


def test_a_message_that_is_too_large_is_refused(site: Site) -> None:
    address = f"127.0.0.1:{site.servers[0].port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as told:
        channel.unary_unary(f"/{wire.SERVICE}/now")(bytes(wire.MOST_BYTES + 1), timeout=20)
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    site.client().open_writer("s", SCHEMA).append_now([row(1)])


def test_a_message_that_does_not_end_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_calls, "RECEIVE_S", 0.2)
    with Connection(site.servers[0].port) as slow:
        slow.send(frame(HEADERS, headers("commit"), END_HEADERS, 1))
        slow.send(frame(DATA, b"\x00" + (1000).to_bytes(4, "big") + b"begun", 0, 1))
        with pytest.raises(InvalidUsage, match="did not arrive"):
            wire.decode_reply(slow.answer(), object)
        slow.call("now", wire.encode_call(None, 5), stream=3)
        assert wire.decode_reply(slow.answer(), type(None))[0] is None
    site.client().open_writer("s", SCHEMA).append_now([row(1)])


def test_a_call_without_a_message_is_refused(site: Site) -> None:
    with Connection(site.servers[0].port) as empty:
        empty.send(frame(HEADERS, headers("commit"), END_HEADERS | END_STREAM, 1))
        with pytest.raises(InvalidUsage, match="without a message"):
            wire.decode_reply(empty.answer(), object)


def test_a_server_that_nobody_refers_to_serves_on(site: Site) -> None:
    port = ShardServer(site.store, "127.0.0.1:0").start()
    gc.collect()
    with Connection(port) as one:
        one.call("now", wire.encode_call(None, 5))
        assert wire.decode_reply(one.answer(), type(None))[0] is None


FORKED_AFTER_STOP = """
import gc, os, signal, sys
import persist_lib as persist
from persist_lib.server.shard_server import ShardServer

gc.disable()
for _ in range(2):
    server = ShardServer(persist.open(sys.argv[1]), "127.0.0.1:0")
    server.start()
    server.stop()
    del server
if (child := os.fork()) == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_after_a_server_stopped_does_not_wait_for_its_threads(site: Site) -> None:
    """In a process of its own: gRPC's thread is there until the last of a process' servers is freed."""
    program = [sys.executable, "-c", FORKED_AFTER_STOP, site.url]
    forked = subprocess.run(program, check=False, capture_output=True, text=True)
    assert forked.returncode == 0, forked.stderr
    assert "Traceback" not in forked.stderr


def test_silent_connections_hold_up_nobody(site: Site) -> None:
    silent = [socket.create_connection(("127.0.0.1", site.servers[0].port)) for _ in range(300)]
    client = site.client()
    client.open_writer("s", SCHEMA).append_now([row(1)])
    for one in silent:
        one.close()


def test_a_client_that_was_away_for_long_makes_its_command_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would have to read all rows since then, to know whether the command is a repetition."""
    monkeypatch.setattr(dedup_index, "SCAN_ROWS", 2)
    told: list[object] = []

    def refused(_: object, refusal: r.Refusal, seqno: SeqNo, __: object) -> Answered:
        told.append(refusal)
        return Answered(seqno, refusal)

    monkeypatch.setattr(group_commit, "refused", refused)
    away, near = site.client(), site.client()
    with site.store.open_writer("orders", SCHEMA) as write:
        known = away.machine("orders").fetch().seqno
        for n in range(20):
            write.compare_and_append([row(n, time=n)], n, n + 1)
    near.set_hold("orders", "h", since=0, opaque=b"x", expected=None)
    assert away.machine("orders").version.seqno == known
    away.set_hold("orders", "h", since=0, opaque=b"y", expected=b"x")
    assert away.machine("orders").fetch().state.holds["h"].opaque == b"y"
    assert [type(one) for one in told] == [r.Forgotten]


QUIET = Runtime(background=False)


class Reading(Served):
    """A server that has the shard in memory, as it was."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client(runtime=QUIET).open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)


reading = site_of(Reading)


# *Reads that must be linearizable (the orphan audit, opening, `fetch`) scan the store; memory serves hints.*


def test_what_others_committed_is_fetched_though_the_server_does_not_know_it(reading: Site) -> None:
    client = reading.client(runtime=QUIET)
    write, read = client.open_shard("s", SCHEMA)
    reading.store.open_writer("s", SCHEMA).compare_and_append([row(2, time=1)], 1, 2)
    assert read.fetch_upper().time == 2
    assert write.fetch_upper().time == 2
    assert client.machine("s").fetch().seqno == reading.store.machine("s").fetch().seqno


def test_a_shard_is_opened_as_it_is_and_not_as_the_server_knows_it(reading: Site) -> None:
    reading.store.evolve_schema("s", WIDER)
    with reading.client(runtime=QUIET).open_reader("s") as read:
        assert read.schema == WIDER


def test_an_audit_through_a_server_spares_what_a_writer_links_that_the_server_does_not_know(reading: Site) -> None:
    """The audit looks at the state after it has listed the objects: a former state would not know their writer."""
    config = persist.Config(format=4, inline_bytes=0)
    auditor = reading.client(runtime=QUIET)
    auditor.audit_orphans("s")
    with persist.open(reading.url, config=config, runtime=QUIET) as direct:
        write = direct.open_writer("s", SCHEMA)
        write.compare_and_append([row(2, time=1)], 1, 2)
        assert not auditor.audit_orphans("s").orphans
        write.compare_and_append([row(3, time=2)], 2, 3)
    check_world(reading.store, "s")


# *Deadlines travel with requests, as durations.*


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_a_client_whose_clock_is_another_has_its_whole_timeout(reading: Site, ahead_s: float) -> None:
    clock = replace(QUIET, monotonic=lambda: time.monotonic() + ahead_s)
    write = reading.client(runtime=clock).open_writer("s", SCHEMA)
    write.compare_and_append([row(2, time=1)], 1, 2, timeout=30)
    assert write.fetch_upper().time == 2
