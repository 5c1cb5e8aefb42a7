"""A shard server and its pages, asked anything: each request has an answer that is documented, or a clean status, and
the server serves on. No answer has a trace of the program in it, nor a token.

There is no specification of the pages that a tool could read: three paths, and no parameters.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from random import Random
from typing import Any

import grpc
import msgspec
import pytest

from persist_lib.errors import PersistError
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest
from persist_lib.location.rpc.credentials import SCHEME
from tests.circles import is_day
from tests.fuzz import served
from tests.fuzz.target import mutated
from tests.unit.server.sites import Site
from tests.worlds import SCHEMA, row

TOKEN = "a-token-that-no-answer-has-0123456789"
COUNT = 60 if is_day() else 3000
"""Of each call."""
CLEAN = {
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED,
}  # fmt: skip
NAMES = ("s", "", "\0", "a/../b", "x" * 5000, "-catalog", "☃", "s\ns", "'; drop table rows; --", "%s", "s.")
NUMBERS = (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a client that may do all, and one that may do nothing."""
    folder = tmp_path_factory.mktemp("site")
    tokens = folder / "tokens.toml"
    tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["read", "append", "maintain"] }}\n')
    with closing(Site(folder)) as made:
        made.serve(token_file=tokens, http="127.0.0.1:0")
        made.store.open_writer("s", SCHEMA).append_now([row(1)])
        yield made


def seed() -> str:
    return os.environ.get("PERSIST_SEED", "fixed")


def said(value: object) -> None:
    """Nothing that is answered shows the program or a secret."""
    text = str(value)
    assert "Traceback" not in text
    assert "the server failed" not in text
    assert TOKEN not in text


def clean(error: Any) -> str:
    """The status of gRPC with which a call ended, which is one of those that are documented."""
    said(error.details())
    assert error.code() in CLEAN, f"{error.code()} {error.details()}"
    return str(error.code())


def ask(channel: Any, name: str, data: bytes, *, token: str | None = TOKEN) -> str:
    """What came of a call: an answer, the name of its error, or the status of gRPC."""
    metadata = () if token is None else (("authorization", SCHEME + token),)
    try:
        reply = channel.unary_unary(f"/{wire.SERVICE}/{name}")(data, timeout=20, metadata=metadata)
    except grpc.RpcError as error:
        return clean(error)
    said(reply)
    try:
        wire.decode_reply(reply, Any)
    except PersistError as error:
        said(error.message)
        return type(error).__name__
    return "answered"


def lives(site: Site, channel: Any) -> None:
    """A right call is answered as ever."""
    assert ask(channel, "now", wire.encode_call(None, 5)) == "answered"
    with site.store.open_reader("s") as reader:
        assert reader.snapshot().to_pylist()


@pytest.mark.parametrize("name", wire.CALLS)
def test_any_bytes_to_any_call_have_an_answer(site: Site, name: str) -> None:
    seeds = [one[1:] for one in served.TARGETS[0].seeds()]
    with grpc.insecure_channel(f"127.0.0.1:{site.server.port}") as channel:
        for data in mutated(seeds, COUNT, Random(f"{seed()} {name}")):
            ask(channel, name, data)
        lives(site, channel)


def _arguments() -> Iterator[tuple[str, object]]:
    """Calls of the right form with any names and numbers."""
    for name in NAMES:
        yield from (("head", name), ("heads", [name]), ("losing", (name, None)))
        yield "debts", ("", {"garbage": [name]}, None, 1.0)
        yield "compare_and_set", (name, None, b"x")
        yield "compare_and_set_many", {name: (None, b"x"), "s": (None, b"y")}
        yield "commit", wire.Commit(b"t", False, ((f"{name}2", SeqNo(0), "Finish", msgspec.Raw(b"\x80")),))
    for first, second in itertools.product(NUMBERS, NUMBERS):
        yield "scan", ("s", first, second)
    for number in NUMBERS:
        yield "truncate", ("other", number)
        yield "rewind", ("other", number, Newest(SeqNo(number), b"x"))
        yield "compare_and_set", ("other", Newest(SeqNo(number), b"x"), b"x")
        yield "debts", ("", {}, number, float(number))
        yield "commit", wire.Commit(b"t", False, (("other", SeqNo(number), "Expire", msgspec.Raw(b"\x81\xa3now\x00")),))


def test_any_names_and_numbers_have_an_answer(site: Site) -> None:
    met = set()
    with grpc.insecure_channel(f"127.0.0.1:{site.server.port}") as channel:
        for name, given in _arguments():
            met.add(ask(channel, name, wire.encode_call(given, 2)))
        lives(site, channel)
    assert met & {"answered", "InvalidUsage", "InvalidName"}


def test_who_has_no_token_is_told_so_and_nothing_else(site: Site) -> None:
    chance = Random(seed())
    with grpc.insecure_channel(f"127.0.0.1:{site.server.port}") as channel:
        for name in wire.CALLS:
            for token in (None, "", "x", TOKEN[:-1], TOKEN.upper(), "x" * 4000):
                data = next(mutated([wire.encode_call(None, 5)], 1, chance))
                assert ask(channel, name, data, token=token) in {"NotAuthenticated", "StatusCode.RESOURCE_EXHAUSTED"}
        lives(site, channel)


def test_any_bytes_on_a_stream_that_follows_have_an_answer(site: Site) -> None:
    seeds = [wire.encode_follow(("s",)), wire.encode_follow(("a", "b" * 300), ("s",))]
    metadata = (("authorization", SCHEME + TOKEN),)
    with grpc.insecure_channel(f"127.0.0.1:{site.server.port}") as channel:
        for data in mutated(seeds, COUNT, Random(seed())):
            call = channel.stream_stream(f"/{wire.SERVICE}/{wire.FOLLOW}")
            try:
                for answer in itertools.islice(call(iter([data]), timeout=0.3, metadata=metadata), 2):
                    said(answer)
                    wire.decode_pushed(answer)
            except grpc.RpcError as error:
                clean(error)
        lives(site, channel)


PAGES: Sequence[bytes] = (
    b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /metrics?x=1&y=%00#z HTTP/1.1\r\n\r\n",
    b"GET /readyz?verbose HTTP/1.0\r\nAccept: */*\r\nX: " + b"y" * 500 + b"\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde", b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
)  # fmt: skip


def page(port: int, data: bytes) -> bytes:
    """What is answered to some bytes, up to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        found = bytearray()
        with suppress(ConnectionError):
            while more := connection.recv(65536):
                found += more
    return bytes(found)


def test_any_request_for_a_page_has_a_clean_status_or_none(site: Site) -> None:
    """What is not a request has no answer, and no other one waits for it."""
    port = site.server.http_port
    met = set()
    for data in [*PAGES, *mutated(PAGES, 5 * COUNT, Random(seed()))]:
        found = page(port, data)
        said(found)
        if found:
            head, _, body = found.partition(b"\r\n\r\n")
            status = head.split(b"\r\n")[0]
            assert status in {
                b"HTTP/1.1 200 OK", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 405 Method Not Allowed",
                b"HTTP/1.1 503 Service Unavailable",
            }  # fmt: skip
            assert head.count(b"\r\n") == 4  # what was asked for adds no line to the head
            assert not body or int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]) == len(body)
            assert b"passwd" not in body
            met.add(status[9:12])
    assert {b"200", b"404", b"405"} <= met
    assert page(port, PAGES[0]).startswith(b"HTTP/1.1 200 OK")
