"""A Spark that is not there is told in words, within ten seconds, and no JVM is started for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from jobs import session
from jobs.reach import STREAM_FAILURE, SparkUnreachable, check_master, check_remote
from jobs.session import SparkSettings, build_session
from persist_lib.testing.servers import free_port
from tests.loopback import Loopback


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_java_home", lambda: pytest.fail("a JVM was about to start"))


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def told(settings: SparkSettings) -> str:
    started = time.monotonic()
    with pytest.raises(SparkUnreachable) as raised:
        build_session(settings)
    assert time.monotonic() - started < 30
    return raised.value.message


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_a_server_that_is_not_there_is_told_with_the_setting_to_correct(scheme: str, silent: int) -> None:
    for where, words in (
        (f"127.0.0.1:{free_port()}", "nothing listens there"),
        (f"127.0.0.1:{silent}", "not answer"),
        ("no-such-host.invalid:7077", "a host that is unknown"),
    ):
        url = f"{scheme}://{where}"
        said = told(SparkSettings(master=url) if scheme == "spark" else SparkSettings(remote=url))
        assert url in said
        assert words in said
        assert ("PERSIST_SPARK_MASTER" if scheme == "spark" else "PERSIST_SPARK_REMOTE") in said


def test_the_port_of_a_web_page_is_told() -> None:
    with Answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        assert "as a web page does" in told(SparkSettings(master=f"spark://127.0.0.1:{server.port}"))


def test_one_master_of_a_list_that_answers_is_enough(silent: int) -> None:
    with Answering(bytes(8) + bytes([STREAM_FAILURE])) as server:
        check_master(f"spark://127.0.0.1:{silent},127.0.0.1:{server.port}")
    with pytest.raises(SparkUnreachable) as raised:
        check_master(f"spark://127.0.0.1:{silent},127.0.0.1:{free_port()},nowhere")
    said = raised.value.message
    assert "does not answer" in said
    assert "refuses" in said
    assert "nowhere is not of the form host:port" in said


def test_a_connect_server_answers_the_start_of_a_connection() -> None:
    with Answering(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as server:
        check_remote(f"sc://127.0.0.1:{server.port}/;user_id=me")


def test_masters_that_are_no_server_are_not_asked() -> None:
    check_master("local[2,4]")
    check_master("yarn")


class Answering(Loopback):
    """A server that answers the first bytes of each connection."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        super().__init__()

    def connected(self, client: socket.socket) -> None:
        with client:
            client.recv(1024)
            client.sendall(self._answer)
