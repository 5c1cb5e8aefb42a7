"""Forks of processes with clients and servers: a child uses a client by itself, or is refused in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.location.rpc import grpc_forks as rpc_forked
from persist_lib.location.rpc import servers
from persist_lib.location.rpc.grpc_forks import Core
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing import check_world
from tests.faults.shard_servers import Server
from tests.unit.runtime.test_forks import forked
from tests.unit.server.following import Listener, Writer, eventually, is_told
from tests.unit.server.test_push import QUIET
from tests.worlds import SCHEMA

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
THREADS, FORKS = 2, 3


class Place:
    """A location, and the process that serves it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder}/location"
        self.store = persist.open(self.url)
        self.server = Server(self.url, None)

    def client(self) -> persist.Client:
        return persist.open(self.url, f"persist://127.0.0.1:{self.server.port}", runtime=QUIET)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"))
    yield made
    made.server.kill(signal.SIGKILL)
    made.store.close()


def test_children_use_the_client_of_a_busy_parent(place: Place) -> None:
    """Each has one of its own, and the parent's calls under way at the fork are answered.

    SUBTLE: no rows are appended, as Arrow's threads do not survive such a fork.
    """
    failures: list[BaseException] = []
    is_over = threading.Event()
    with place.client() as client:
        client.open_writer("busy", SCHEMA).close()

        def work(name: str) -> int:
            token = os.urandom(8)
            client.set_hold("busy", name, since=0, opaque=token, expected=None)
            client.release_hold("busy", name)
            return len(client.shards())

        def run(name: str) -> None:
            while not (is_over.is_set() or failures):
                try:
                    work(name)
                except BaseException as error:  # noqa: BLE001 - shown below
                    failures.append(error)

        threads = [threading.Thread(target=run, args=(f"thread-{number}",)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(FORKS):
                assert forked(lambda: work("child")) == repr(len(place.store.shards()))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert not failures
    check_world(place.store, "busy")


def test_a_child_follows_by_itself_and_its_parent_goes_on(place: Place) -> None:
    client = place.client()
    writer = Writer(place.store, SCHEMA, "told")
    writer.append()
    listener = Listener(client, "told")
    eventually(lambda: is_told(client, "told"))
    assert forked(lambda: client.open_reader("told").snapshot(0, timeout=20).to_arrow().num_rows) == "1"
    listener.wait_for(writer.append())
    assert listener.failure is None
    client.close()


def test_a_server_and_a_client_beside_it_are_refused_in_a_child(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = persist.open(f"file:{tmp_path}/other")
    server = ShardServer(store, "127.0.0.1:0")
    server.start()
    client = place.client()
    calls: dict[str, Callable[[], object]] = {
        "another server": lambda: ShardServer(store, "127.0.0.1:0").start(),
        "the server": lambda: server.stop(0),
        "the client": client.shards,
        "another client": place.client,
    }
    try:
        with monkeypatch.context() as quick:
            quick.setattr(rpc_forked, "ENDS_S", 0.05)
            for name, call in calls.items():
                told = forked(call)
                assert told.startswith("InvalidUsage("), f"{name}: {told}"
                assert "forked while gRPC was in use" in told
        assert client.shards() == place.store.shards()
    finally:
        server.stop(0)
        store.close()
    assert forked(client.shards) == repr(client.shards()), "gRPC has ended with the server"
    client.close()


def test_a_call_that_does_not_end_keeps_no_fork_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FORK_WAITS_S", 0.05)
    monkeypatch.setattr(rpc_forked, "ENDS_S", 0.05)
    with place.client() as client:
        server = client.location.consensus._servers._servers[0]  # type: ignore[attr-defined]
        with server.connected(5):
            assert forked(client.shards).startswith("InvalidUsage(")
            assert forked(client.close) == "None"
        assert client.shards() == place.store.shards()


def test_where_a_system_tells_no_threads_what_was_used_counts_as_there(tmp_path: Path) -> None:
    core = Core(tmp_path / "nowhere")
    assert forked(lambda: core.use("it")) == "None"
    core.use("it")
    assert forked(lambda: core.use("it")).startswith("InvalidUsage(")


@pytest.mark.parametrize(
    "status", [None, "State:\tR (running)\nvoluntary_ctxt_switches:\t0\n"], ids=["ended", "begins"]
)
def test_a_thread_that_ends_or_begins_during_the_look_may_be_grpcs(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, children of a busy parent waited for ever: the last of gRPC's threads makes another, and ends."""
    monkeypatch.setattr(rpc_forked, "ENDS_S", 0.05)
    (tmp_path / "7").mkdir()
    if status is not None:
        (tmp_path / "7" / "comm").write_text("python\n")
        (tmp_path / "7" / "status").write_text(status)
    core = Core(tmp_path)
    assert forked(lambda: core.use("it")).startswith("InvalidUsage(")
    (tmp_path / "7" / "comm").write_text("python\n")
    (tmp_path / "7" / "status").write_text("State:\tS (sleeping)\nvoluntary_ctxt_switches:\t10\n")
    assert forked(lambda: core.use("it")) == "None"


@pytest.mark.parametrize(
    ("given", "first", "found"),
    [
        (None, "persist_lib.server", "0 0"),
        (None, "persist_lib.location.rpc", "0 0"),
        ("1", "persist_lib.location.rpc", "1 0"),
        (None, "grpc, persist_lib.location.rpc", "None 1"),
    ],
    ids=["of a server", "of a client", "set by the user", "gRPC came first"],
)
def test_handlers_of_forks_that_come_with_grpc_are_off(given: str | None, first: str, found: str) -> None:
    """With them, children of native code (`Popen(user=…)`) died before their program ran: 2 to 4 of 480 under load."""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    environ |= {} if given is None else {"GRPC_ENABLE_FORK_SUPPORT": given}
    program = f"import os, {first}; print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'), end=' ')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert ended.stdout + str(ended.stderr.count("gRPC was imported before")) == found
