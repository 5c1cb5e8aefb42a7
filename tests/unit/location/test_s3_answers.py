"""What S3 may answer that moto never does, from a server that says what a test tells it to, over HTTP."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from jobs.ingesting.inputs import File as Ingested
from jobs.ingesting.reading import read_range
from persist_lib.errors import Corrupt, Determinate, Indeterminate, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest
from persist_lib.location.objects.blob import ObjectsBlob
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.location.objects.target import parse_url
from persist_lib.location.s3.objects import Clients, S3Objects
from persist_lib.location.wrap.deadline import RetryingBlob, RetryingConsensus, within
from persist_lib.runtime.ambient import Runtime
from persist_lib.sources.files.folders import File as Listed
from persist_lib.sources.files.folders import Prefix
from tests import servers

servers.use_test_credentials()
AT = "/b/x/blob/s/k"


class Reply(NamedTuple):
    """A status and a body. `stores`: whether a PUT is carried out all the same, whatever is answered."""

    status: int
    body: bytes = b""
    stores: bool = False
    announced: int | None = None
    after_s: float = 0.0


def refusal(status: int, code: str, *, stores: bool = False) -> Reply:
    return Reply(status, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode(), stores)


CONFLICT = refusal(409, "ConditionalRequestConflict")
SLOW_DOWN = refusal(503, "SlowDown")
TAKEN = refusal(412, "PreconditionFailed")
MISSING = refusal(404, "NoSuchKey")


class Scripted:
    """Keeps objects, as S3 does, but for the next requests of a method, which are answered as told."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.told: dict[str, list[Reply]] = {}
        self.asked: list[str] = []
        scripted = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                scripted.asked.append(self.command)
                told = scripted.told.get(self.command)
                reply = told.pop(0) if told else scripted.honest(self.command, path, body)
                if reply.stores:
                    scripted.objects.setdefault(path, body)
                time.sleep(reply.after_s)
                self.send_response(reply.status)
                announced = len(reply.body) if reply.announced is None else reply.announced
                self.send_header("Content-Length", str(announced))
                self.send_header("ETag", '"e"')
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else reply.body)
                if announced != len(reply.body):
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_DELETE = answer  # noqa: N815 - what the base class calls

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"s3://b/x?endpoint=http://127.0.0.1:{self._server.server_port}&path_style=true"

    def honest(self, method: str, path: str, body: bytes) -> Reply:
        if method == "PUT":
            return TAKEN if path in self.objects else Reply(200, stores=True)
        return Reply(200, self.objects[path]) if path in self.objects else MISSING

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def blob(server: Scripted) -> Iterator[ObjectsBlob]:
    blob = ObjectsBlob(S3Objects(parse_url(server.url)))
    yield blob
    blob.close()


def trying(blob: ObjectsBlob, timeout_s: float = 5.0) -> RetryingBlob:
    return RetryingBlob(blob, Runtime(), timeout_s)


def test_a_conflict_means_that_s3_could_not_decide_and_the_put_is_sent_again(
    server: Scripted, blob: ObjectsBlob
) -> None:
    server.told["PUT"] = [CONFLICT, CONFLICT]
    with pytest.raises(Determinate, match="ConditionalRequestConflict"):
        blob.set("s/k", b"data")
    trying(blob).set("s/k", b"data")
    assert server.objects == {AT: b"data"}
    assert server.asked == ["PUT", "PUT", "PUT"]


def test_a_request_to_slow_down_is_obeyed_within_the_caller_s_deadline(server: Scripted, blob: ObjectsBlob) -> None:
    server.told["PUT"] = [SLOW_DOWN]
    with pytest.raises(Determinate, match="SlowDown"):
        blob.set("s/k", b"data")
    assert server.asked == ["PUT"], "boto3's own retry would take a conditional PUT's success for somebody else's"
    server.told["PUT"] = [SLOW_DOWN] * 4
    started = time.monotonic()
    trying(blob).set("s/k", b"data")
    assert server.objects == {AT: b"data"}
    assert time.monotonic() - started > 0.02, "and each time a little slower"
    server.told["GET"] = [SLOW_DOWN] * 10_000
    started = time.monotonic()
    with pytest.raises(Determinate, match="SlowDown"):
        trying(blob, 0.5).get("s/k")
    assert time.monotonic() - started < 9
    assert server.asked.count("GET") < 30


def test_a_put_that_finds_its_own_object_has_succeeded(server: Scripted, blob: ObjectsBlob) -> None:
    """A proxy sent it twice, and passed on the second answer."""
    server.told["PUT"] = [TAKEN._replace(stores=True)]
    blob.set("s/k", b"data")
    assert server.objects == {AT: b"data"}
    assert server.asked == ["PUT", "GET"]


def test_a_put_that_finds_another_s_object_is_damage(server: Scripted, blob: ObjectsBlob) -> None:
    server.objects[AT] = b"theirs"
    with pytest.raises(Corrupt, match="s/k"):
        blob.set("s/k", b"data")
    assert server.objects == {AT: b"theirs"}


def test_an_object_that_was_stored_though_the_answer_was_an_error_is_found_by_the_next_attempt(
    server: Scripted, blob: ObjectsBlob
) -> None:
    for answer in (refusal(500, "InternalError", stores=True), refusal(503, "ServiceUnavailable", stores=True)):
        server.objects.clear()
        server.told["PUT"] = [answer]
        with pytest.raises(Indeterminate):
            blob.set("s/k", b"data")
        trying(blob).set("s/k", b"data")
        assert server.objects == {AT: b"data"}


def test_a_404_after_a_put_that_found_its_place_taken_is_tried_again(server: Scripted, blob: ObjectsBlob) -> None:
    """Taken, and gone when looked at: somebody deletes, or a cache still says what was so before the PUT."""
    server.told["PUT"] = [TAKEN]
    server.told["GET"] = [MISSING]
    blob.set("s/k", b"data")
    assert server.objects == {AT: b"data"}
    assert server.asked == ["PUT", "GET", "PUT"]
    server.objects.clear()
    server.told["PUT"] = [TAKEN] * 99
    with pytest.raises(Determinate, match="deleted"):
        blob.set("s/k", b"data")
    assert len(server.asked) < 20, "and not for ever"


@pytest.mark.parametrize("announced", [8, 400])
def test_a_body_shorter_than_announced_is_read_again_and_never_taken_for_whole(
    server: Scripted, blob: ObjectsBlob, announced: int
) -> None:
    server.objects[AT] = b"data"
    short = Reply(200, b"data"[:3], announced=announced)
    for read in (lambda b: b.get("s/k"), lambda b: b.get_range("s/k", 0, 4)):
        server.told["GET"] = [short]
        with pytest.raises(Determinate):
            read(blob)
        server.told["GET"] = [short, short]
        assert read(trying(blob)) == b"data"


def test_a_server_that_stalls_is_waited_for_as_long_as_the_caller_and_no_longer(
    server: Scripted, blob: ObjectsBlob
) -> None:
    server.told["GET"] = [Reply(200, b"late", after_s=12)]
    started = time.monotonic()
    with pytest.raises(PersistError):
        within(Runtime().deadline(1), lambda: blob.get("s/k"))
    assert time.monotonic() - started < 9


@pytest.mark.parametrize(
    ("answer", "is_known"),
    [(CONFLICT, True), (SLOW_DOWN, True), (refusal(500, "InternalError"), False)],
)
def test_a_compare_and_set_that_s3_did_not_decide_is_lost_by_nobody(
    server: Scripted, answer: Reply, is_known: bool
) -> None:
    consensus = ObjectsConsensus(S3Objects(parse_url(server.url.replace("s3:", "s3+cas:"))))
    assert consensus.compare_and_set("s", None, b"1")
    server.told["PUT"] = [answer]
    attempt: Callable[[], bool] = lambda: RetryingConsensus(consensus, Runtime(), 5).compare_and_set(  # noqa: E731
        "s", Newest(SeqNo(1)), b"2"
    )
    if is_known:
        assert attempt()
    else:
        with pytest.raises(Indeterminate):
            attempt()
        assert attempt(), "it had not happened"
    assert sorted(data for path, data in server.objects.items() if "/log/" in path) == [b"1", b"2"]
    consensus.close()


class Answers:
    """A client whose every object is these bytes: it knows no ranges, and may cut an answer short."""

    def __init__(self, arrives: bytes) -> None:
        self._arrives = arrives

    def get_object(self, **_: object) -> dict[str, object]:
        told = {"ContentLength": 10, "ETag": '"v"', "ResponseMetadata": {"HTTPStatusCode": 200}}
        return {**told, "Body": io.BytesIO(self._arrives)}


@pytest.mark.parametrize("use", ["a source of files", "ingestion"])
def test_a_range_is_cut_out_of_a_whole_object_and_none_of_one_that_did_not_arrive_whole(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> bytes:
        if use == "ingestion":
            return b"".join(read_range(Ingested("s3://bucket/a", 10, "v", ""), 2, 5))
        with closing(Prefix("s3://bucket/")) as folder:
            return bytes(folder.open(Listed("a", 10, "v")).range(2, 5))

    monkeypatch.setattr("jobs.ingesting.inputs.PATIENCE_S", 0.0)
    monkeypatch.setattr(Clients, "get", lambda _self: Answers(b"0123456789"))
    assert read() == b"234"
    monkeypatch.setattr(Clients, "get", lambda _self: Answers(b"0123"))
    with pytest.raises(Determinate, match="only 4 of 10 bytes"):
        read()
