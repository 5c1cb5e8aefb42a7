"""Whether a Spark master or Connect server answers, found out in seconds and before a JVM starts.

Spark itself retries for minutes, and then tells little. A master is asked for a file that it does not have, in the
frames of Spark's transport: it says that there is none. A Connect server is asked to open an HTTP/2 connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from urllib.parse import urlsplit

from jobs.aside import Call
from jobs.stop import Stop
from persist_lib.errors import Determinate

ANSWER_S = 6.0
"""How long a master may take to answer. All masters of a list are asked at once."""
STREAM_REQUEST, STREAM_FAILURE = 6, 8
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins a connection: the preface, and settings without a change. The server sends its own at once."""
FILE = b"/files/persist-asks-whether-you-are-there"


class SparkUnreachable(Determinate):
    """Spark is not there, does not answer, or has nothing to run tasks on. Nothing was changed. Field: where."""


def check_master(master: str) -> None:
    """Raise SparkUnreachable unless one of the masters in `spark://host:port,host:port` answers. Other URLs pass."""
    if not master.startswith("spark://"):
        return
    places = [place for place in master.removeprefix("spark://").split(",") if place]
    refusals = _ask_all({place: lambda place=place: _ask_master(place) for place in places})  # type: ignore[misc]
    if len(refusals) == len(places):
        said = "; ".join(f"{place} {why}" for place, why in refusals.items()) or "no host is named"
        raise SparkUnreachable(
            f"the Spark master {master} cannot be reached: {said}. Nothing was changed. "
            "Start it, or correct PERSIST_SPARK_MASTER (--master, spark.master)",
            where=master,
        )


def check_remote(remote: str) -> None:
    """Raise SparkUnreachable unless the Connect server at `sc://host:port` answers."""
    if not remote.startswith("sc://"):
        return
    if refusals := _ask_all({remote: lambda: _ask_remote(remote)}):
        raise SparkUnreachable(
            f"the Spark Connect server {remote} cannot be reached: it {refusals[remote]}. Nothing was changed. "
            "Start it, or correct PERSIST_SPARK_REMOTE (--remote, spark.remote)",
            where=remote,
        )


def _ask_all(asks: dict[str, Callable[[], str]]) -> dict[str, str]:
    """Ask all at once. Returns why, for each that did not answer."""
    calls, stop = {place: Call(ask, "persist-spark-ask") for place, ask in asks.items()}, Stop()
    said = {place: call.result(stop) for place, call in calls.items()}
    return {place: why for place, why in said.items() if why}


def _ask_master(place: str) -> str:
    """Why a master cannot be used; an empty string if it answers."""
    body = bytes([STREAM_REQUEST]) + struct.pack(">i", len(FILE)) + FILE
    said, answer = _exchange(place, struct.pack(">q", len(body) + 8) + body)
    if answer.startswith(b"HTTP/"):
        return "answers as a web page does; the master's own port is usually 7077"
    return said  # another answer, or a closed connection, may be that of a master with encryption


def _ask_remote(remote: str) -> str:
    """Why a Connect server cannot be used; an empty string if it answers."""
    place, _, options = remote.removeprefix("sc://").partition("/")
    place = place.rpartition("@")[2]
    if not place.rpartition(":")[2].isdecimal():
        place += ":15002"
    is_tls = "use_ssl=true" in options.lower() or "token=" in options.lower()
    said, answer = _exchange(place, HTTP_2, is_tls=is_tls)
    if answer.startswith(b"HTTP/"):
        return "answers as a web page does; a Connect server's own port is usually 15002"
    return said


def _exchange(place: str, question: bytes, *, is_tls: bool = False) -> tuple[str, bytes]:
    """Send a question to `host:port`. Returns why there is no answer, or the first bytes of the answer."""
    try:
        at = urlsplit(f"//{place}")
        host, port = at.hostname, at.port
    except ValueError:
        host = port = None
    if not host or port is None:
        return "is not of the form host:port", b""
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S / 2) as connection:
            connection.settimeout(ANSWER_S / 2)
            if is_tls:
                return "", b""  # whom to trust is for Spark to decide
            connection.sendall(question)
            return "", connection.recv(16)
    except OSError as error:
        return _why(error), b""


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"names a host that is unknown ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"does not answer within {ANSWER_S / 2:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections: nothing listens there"
    return f"fails: {error}"
