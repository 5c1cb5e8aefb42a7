"""Object stores: what each failure means, listings, processes that fork, and all that is built on the one object store.

What S3 alone does, and what each of its failures is, is in test_s3.py and test_s3_cas.py.

What every Blob and Consensus promises is in tests/conformance, over the same emulators.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

import persist_lib as persist
from jobs.ingesting.inputs import find_files
from jobs.ingesting.reading import FileChanged, read_range
from persist_lib import pending_area
from persist_lib.core.cost import NAMED
from persist_lib.errors import Corrupt, Determinate, Indeterminate, InvalidName, InvalidUsage, NotFound, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Entry, Row
from persist_lib.location.objects.blob import ObjectsBlob, enter
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.location.objects.store import ANSWER_S, CloudObjects, Listing, objects_at, objects_of
from persist_lib.location.objects.target import CLOUDS, parse_url
from persist_lib.location.scheme import Opening
from persist_lib.location.wrap.deadline import RetryingBlob, within
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.servers import free_port
from tests import servers
from tests.faults.proxy import Fault, Proxy
from tests.logs import after

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]
servers.use_test_credentials()
NEW = ("gs", "az")
EVERY = pytest.mark.parametrize("scheme", ["s3", *NEW], indirect=True)


@pytest.fixture(autouse=True)
def _forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """A client of Azure that got the answer to another request is forgotten, for other threads may still use it."""
    yield
    if any(word in request.node.name for word in ("DUPLICATE", "another_request")):
        gc.collect()  # here, as a later test is not to find its connections unclosed


@pytest.fixture(params=NEW)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(scheme: str) -> str:
    return servers.store_url(scheme)


@pytest.fixture
def blob(url: str) -> Iterator[ObjectsBlob]:
    with contextlib.closing(ObjectsBlob(enter(url, Opening(create=True)))) as opened:
        yield opened


@pytest.fixture
def proxy(scheme: str, blob: ObjectsBlob) -> Iterator[Proxy]:
    with Proxy(servers.STORES[scheme]().port) as opened:
        yield opened


@pytest.fixture
def through(url: str, scheme: str, proxy: Proxy) -> Iterator[ObjectsBlob]:
    """The same blobs, reached through the proxy, with the impatience of a test."""
    with contextlib.closing(ObjectsBlob(impatient(via(url, scheme, proxy)))) as opened:
        yield opened


def via(url: str, scheme: str, proxy: Proxy) -> str:
    return url.replace(f":{servers.STORES[scheme]().port}", f":{proxy.port}")


def impatient(url: str) -> CloudObjects:
    objects = objects_at(url)
    objects.close()
    return type(objects)(parse_url(url), answer_s=1)


@pytest.mark.parametrize("patience_s", [0.4, 1.5, 3.0, 10.0, 300.0])
def test_an_answer_that_is_lost_leaves_time_for_another_request(url: str, patience_s: float) -> None:
    with contextlib.closing(objects_at(url)) as objects:
        waits_s = within(Runtime().deadline(patience_s), objects._timeouts)[1]
        assert waits_s <= min(patience_s, ANSWER_S)
        assert patience_s < 1 or waits_s == 2 ** int(math.log2(min(patience_s, ANSWER_S)))
        assert not 1 < patience_s < ANSWER_S or waits_s < patience_s


@EVERY
@pytest.mark.parametrize("fault", [*Fault])
def test_whatever_breaks_a_put_it_is_whole_or_none_and_a_retry_finds_its_own(
    blob: ObjectsBlob, through: ObjectsBlob, proxy: Proxy, fault: Fault
) -> None:
    proxy.at(1, fault)
    with contextlib.suppress(Indeterminate):
        through.set("s/w/key", b"whole" * 1000)
    assert proxy.struck == 1
    assert blob.get("s/w/key") in {None, b"whole" * 1000}
    proxy.at(1, fault)
    RetryingBlob(through, timeout_s=10).set("s/w/key", b"whole" * 1000)
    assert blob.get("s/w/key") == b"whole" * 1000
    with pytest.raises(Corrupt):
        through.set("s/w/key", b"other")


@EVERY
@pytest.mark.parametrize("fault", [*Fault])
@pytest.mark.parametrize("read", ["get", "get_range", "list", "delete"])
def test_whatever_breaks_a_read_it_is_whole_or_determinate(
    blob: ObjectsBlob, through: ObjectsBlob, proxy: Proxy, scheme: str, fault: Fault, read: str
) -> None:
    blob.set("s/w/key", b"0123456789" * 1000)
    expected: dict[str, Any] = {
        "get": (lambda: through.get("s/w/key"), b"0123456789" * 1000),
        "get_range": (lambda: through.get_range("s/w/key", 3, 6003), (b"0123456789" * 601)[3:6003]),
        "list": (lambda: [*through.list("s/")], [("s/w/key", 10_000)]),
        "delete": (lambda: through.delete("s/never"), False),
    }
    call, answer = expected[read]
    proxy.at(1, fault)
    is_answered = False
    with contextlib.suppress(Determinate):
        assert call() == answer
        is_answered = True
    if scheme == "s3" and fault is not Fault.DUPLICATE:
        assert is_answered == (fault is Fault.DELAY or (fault is Fault.HALF_REPLY and read == "delete"))
    assert proxy.struck == 1
    proxy.at(0, None)
    if fault is Fault.DUPLICATE and scheme != "s3":  # the answer that is left over may be refused
        with contextlib.suppress(Determinate):
            assert call() == answer
    assert call() == answer


@EVERY
@pytest.mark.filterwarnings("ignore:.*")
def test_an_answer_cut_after_any_byte_is_never_taken_for_the_whole(
    blob: ObjectsBlob, through: ObjectsBlob, proxy: Proxy, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    step = {"s3": 7, "gs": 31, "az": 151}[scheme]
    blob.set("s/w/key", b"x" * 100)
    reads: list[Callable[[], Any]] = [
        lambda: through.get("s/w/key"), lambda: through.get_range("s/w/key", 5, 9), lambda: [*through.list("s/")],
    ]  # fmt: skip
    for read in reads:
        proxy.at(1, None)
        whole = read()
        for kept in range(0, proxy.replied, step):
            proxy.at(1, Fault.HALF_REPLY, keep_bytes=kept)
            with contextlib.suppress(Determinate):
                # Azure's own client reads once more what it saw to be cut short, after a second.
                assert within(Runtime().deadline(0.5), read) == whole
            assert proxy.struck == 1


@EVERY
def test_nothing_hangs_beyond_the_caller_s_deadline(url: str, scheme: str, proxy: Proxy) -> None:
    with contextlib.closing(ObjectsBlob(objects_at(via(url, scheme, proxy)))) as patient:
        patient.get("s/x")
        for fault, call in itertools.product(
            (Fault.BLACK_HOLE, Fault.BLACK_HOLE_REPLY), (lambda: patient.get("s/x"), lambda: patient.set("s/y", b"y"))
        ):
            proxy.at(1, fault)
            started = time.monotonic()
            with pytest.raises((Determinate, Indeterminate)):
                within(Runtime().deadline(0.7), call)
            assert time.monotonic() - started < 15


CALLS: dict[str, Callable[[ObjectsBlob], Any]] = {
    "get": lambda blob: blob.get("k"),
    "range": lambda blob: blob.get_range("k", 0, 5),
    "look": lambda blob: blob.get_range("k", 0, 0),
    "list": lambda blob: [*blob.list("")],
    "set": lambda blob: blob.set("k", b"x"),
    "delete": lambda blob: blob._objects.delete_one("k", "delete"),
}


@EVERY
@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_no_empty_one(scheme: str, url: str, call: str) -> None:
    bucket = parse_url(url).bucket
    if (scheme, call) == ("s3", "look"):
        pytest.skip("an answer to HEAD has no body, and S3 says only there which of both is missing")
    with contextlib.closing(ObjectsBlob(objects_at(url.replace(bucket, "no-such-place")))) as blob:
        with pytest.raises(NotFound, match=f"{CLOUDS[scheme].bucket}s are not made by Persist"):
            CALLS[call](blob)
        failed = blob.delete_many(["k"])
        assert {type(error) for error in failed.values()} == {NotFound}


def test_a_server_that_is_not_there_did_nothing(scheme: str, url: str) -> None:
    away = url.replace(f":{servers.STORES[scheme]().port}", f":{free_port()}")
    with contextlib.closing(ObjectsBlob(objects_at(away))) as blob:
        for call in CALLS.values():
            with pytest.raises(Determinate):
                call(blob)


class Scripted:
    """A server that answers each request alike."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815 - what the base class calls

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "read", "write"),
    [
        (403, "AuthorizationFailure", InvalidUsage, InvalidUsage),
        (401, "InvalidAuthenticationInfo", InvalidUsage, InvalidUsage),
        (429, "TooManyRequests", Determinate, Determinate),
        (500, "InternalError", Determinate, Indeterminate),
        (503, "Unknown", Determinate, Indeterminate),
        (503, "ServerBusy", Determinate, None),
    ],
)
def test_refusals_are_told_apart_by_type(
    scheme: str, status: int, code: str, read: type[PersistError], write: type[PersistError] | None
) -> None:
    """Only Azure says by a code that a request was throttled: on GCS a 503 leaves a write in doubt."""
    write = write or (Determinate if scheme == "az" else Indeterminate)
    with Scripted(status, {"x-ms-error-code": code}) as server:
        blob = ObjectsBlob(objects_at(f"{scheme}://bucket/x?endpoint={server.endpoint}"))
        for name, call in CALLS.items():
            with pytest.raises(PersistError) as caught:
                call(blob)
            assert type(caught.value) is (write if name in ("set", "delete") else read), name
        blob.close()


@pytest.mark.parametrize("answer", ["refused", "cut", "away", "not TLS"])
def test_no_error_holds_a_signature(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2026-10-06&sp=rwdl&sig=hunter2")
    headers = {"Transfer-Encoding": "chunked"} if answer == "cut" else {}
    with Scripted(403 if answer == "refused" else 200, headers) as server:
        endpoint = f"http://127.0.0.1:{free_port()}" if answer == "away" else server.endpoint
        if answer == "not TLS":
            endpoint = endpoint.replace("http:", "https:")
        with contextlib.closing(ObjectsBlob(objects_at(f"az://bucket/x?endpoint={endpoint}"))) as blob:
            blob._objects._answer_s = 0.3
            for name in ("get", "set", "list"):
                with pytest.raises(PersistError) as caught:
                    within(Runtime().deadline(0.3), partial(CALLS[name], blob))
                error: BaseException | None = caught.value
                assert error is not None
                assert "hunter2" not in str(error)
                assert error.__suppress_context__ or error.__context__ is None


def test_what_a_library_says_of_a_url_is_said_without_its_query() -> None:
    objects = objects_at("az://bucket/x?endpoint=http://127.0.0.1:1")
    with pytest.raises(Indeterminate, match="url: /bucket/x") as caught, objects._writing("put"):
        raise OSError("Max retries exceeded with url: /bucket/x?sv=1&sig=hunter2 (Caused by something)")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__
    objects.close()


def test_tokens_are_never_sent_in_the_clear_and_a_place_needs_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidUsage, match="AZURE_STORAGE_ACCOUNT"):
        objects_at("az://bucket/x").get("k", "read")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/there/is/none.json")
    with pytest.raises(InvalidUsage, match=r"none[.]json"):
        objects_at("gs://bucket/x").get("k", "read")
    with Scripted(200, {"X-Goog-Generation": "7"}, b"data") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint.removeprefix("http://"))
        found = objects_at("gs://bucket/x").get("k", "read")
        assert found is not None
        assert (found.data, found.version) == (b"data", "7")


@pytest.mark.parametrize("url", ["gs:x", "gs://", "gs://b/x?region=y", "az://c/x?profile=y", f"az://c/{'x' * 201}"])
def test_urls_that_are_wrong_are_refused(url: str) -> None:
    with pytest.raises(InvalidUsage, match=url.partition(":")[0]):
        persist.open(url, "postgresql://u@h/d")


def test_blobs_alone_name_the_scheme_that_needs_no_database(url: str, scheme: str) -> None:
    with pytest.raises(InvalidUsage, match=rf"{scheme}\+cas://"):
        persist.open(url)


def test_a_listing_starts_behind_a_name_whatever_the_server_makes_of_that(blob: ObjectsBlob) -> None:
    """Neither emulator knows where a listing is to start: both send all, and pages of what was not asked for."""
    names = [f"s/{n:03}" for n in range(20)]
    for name in names:
        blob.set(name, b"x")
    objects, prefix = blob._objects, "blob/s/"
    for start in (0, 3, 11, 19):
        behind = [f"blob/{name}" for name in names[start + 1 :]]
        after = f"blob/{names[start]}"
        assert [found.name for found in objects.entries(prefix, "list", after, 4)] == behind
        page, is_last = objects.page(prefix, "list", after, 4)
        assert [found.name for found in page] == behind[: len(page)]
        assert bool(page) == bool(behind)
        assert is_last == (len(page) == len(behind))
        whole = blob.page("s/", names[start])
        assert ([found.key for found in whole.entries], whole.is_last) == (names[start + 1 :], True)
    fresh = objects_of(objects.target)
    seen, last = [], ""
    for _ in range(8):  # pages of the audit: each begins where the one before ended
        page, is_last = fresh.page(prefix, "list", last, 4)
        seen += [found.name for found in page]
        if is_last:
            break
        last = seen[-1]
    assert (seen, is_last) == ([f"blob/{name}" for name in names], True)


def test_pages_on_azure_continue_where_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no other way to begin a listing in the middle: an audit would read all pages again for each one."""
    blob = ObjectsBlob(enter(servers.store_url("az"), Opening(create=True)))
    for n in range(12):
        blob.set(f"s/{n:02}", b"x")
    objects, asked = blob._objects, list[int]()
    monkeypatch.setattr(sys.modules[type(objects).__module__], "requested", asked.append)
    last, is_last = "", False
    while not is_last:
        page, is_last = objects.page("blob/s/", "list", last, 3)
        last = page[-1].name
    assert len(asked) == 4
    blob.close()


class Unordered(CloudObjects):
    """A store that lists in another order."""

    no_version = "0"

    def __init__(self, *pages: list[str]) -> None:
        super().__init__(parse_url("gs://bucket/x"))
        self.pages = pages

    def _pages(self, *_: object) -> Iterator[Any]:
        for at, names in enumerate(self.pages, 1):
            yield Listing([Entry(name, 1, "v") for name in names], [], at == len(self.pages))

    at = get = find = put = overwrite = delete_one = _failed = None  # type: ignore[assignment]


@pytest.mark.parametrize("pages", [(["a/x", "a"],), (["a", "c"], ["b"]), (["a"], ["a"])])
def test_a_listing_in_another_order_is_refused_and_not_cut(pages: tuple[list[str], ...]) -> None:
    """A store with directories lists `a` behind `a/x`, and what is looked for behind a name would not be found."""
    with pytest.raises(InvalidUsage, match="another order"):
        list(Unordered(*pages).entries("", "list"))
    assert [found.name for found in Unordered(["a"], [], ["b", "c"]).entries("", "list", "a")] == ["b", "c"]


def test_names_that_azure_would_change_are_refused() -> None:
    blob = ObjectsBlob(enter(servers.store_url("az"), Opening(create=True)))
    for name in ("s/ends.", "s/part./x"):
        with pytest.raises(InvalidName, match="dot"):
            blob.set(name, b"x")
    assert [*blob.list("")] == []
    blob.close()


def test_the_address_on_azure_is_one_that_other_engines_read() -> None:
    blob = ObjectsBlob(enter(servers.store_url("az"), Opening(create=True)))
    assert re.fullmatch("abfss://[a-z0-9]+@devstoreaccount1[.]dfs[.]core[.]windows[.]net/location/blob/", blob.address)
    blob.close()


@EVERY
@pytest.mark.parametrize("fault", [*Fault])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_whatever_breaks_a_compare_and_set_its_answer_is_true_or_in_doubt(
    scheme: str, fault: Fault, index: int
) -> None:
    url = servers.store_url(f"{scheme}+cas")
    consensus = ObjectsConsensus(enter(url, Opening(create=True)))
    assert consensus.compare_and_set("s", None, b"1")
    with Proxy(servers.STORES[scheme]().port) as proxy:
        through = ObjectsConsensus(impatient(via(url, scheme, proxy)))
        assert through.scan("s", SeqNo(0), 9) == [Row(SeqNo(1), b"1")]
        proxy.at(index, fault)
        won: bool | None
        try:
            won = through.compare_and_set("s", after(1), b"2")
        except Indeterminate:
            won = None
        except Determinate:
            won = False
        there = consensus.scan("s", SeqNo(2), 9)
        assert there in ([], [Row(SeqNo(2), b"2")])
        assert won is None or won == bool(there)
        proxy.at(0, None)
        assert through.compare_and_set("s", after(1), b"again") is not bool(there)
        assert abs(through.now() - time.time() * 1000) < 5000
        through.close()
    consensus.close()


@EVERY
def test_the_requests_of_each_operation(scheme: str) -> None:
    """What docs/design/0012 says that it costs."""
    url = servers.store_url(f"{scheme}+cas")
    consensus = ObjectsConsensus(enter(url, Opening(create=True)))
    assert consensus.compare_and_set("s", None, b"1")
    with Proxy(servers.STORES[scheme]().port) as proxy:
        through = ObjectsConsensus(objects_at(via(url, scheme, proxy)))
        for act, requests in (
            (lambda: through.head("s"), 2),
            (lambda: through.head("s"), 1),
            (lambda: through.scan("s", SeqNo(1), 9), 1),
            (lambda: through.compare_and_set("s", after(1), b"2"), 2),
            (lambda: through.compare_and_set("s", after(2), b"3"), 2),
            (lambda: through.compare_and_set("s", after(2), b"!"), 0),
            (lambda: through.scan("s", SeqNo(3), 9), 1),
            (lambda: through.scan("s", SeqNo(2), 9), 3),
            (through.now, 0),
        ):
            if scheme == "gs":  # nothing is asked about the bucket once something was found there
                assert [*through.list_keys()] == ["s"]
            proxy.at(0, None)
            act()
            assert proxy.requests == requests
        through.close()
    consensus.close()


def test_files_there_are_inputs_of_an_ingestion(scheme: str) -> None:
    place = servers.store_url(scheme, name="")
    with contextlib.closing(objects_at(place)) as store:
        for name in ("in/a.jsonl", "in/b.csv", "in/_hidden.jsonl", "other/c.jsonl"):
            store.overwrite(name, name.encode(), "put")
    folder, pattern = place.replace("/?", "/in/?"), place.replace("/?", "/*/[ac].jsonl?")
    (file,) = find_files([folder], "jsonl").files
    assert file.path.endswith("/in/a.jsonl")
    assert b"".join(read_range(file, 1, 4)) == b"n/a"
    assert [found.path.rpartition("/")[2] for found in find_files([pattern], "jsonl").files] == ["a.jsonl", "c.jsonl"]
    with contextlib.closing(objects_at(place)) as store:
        store.overwrite("in/a.jsonl", b"another", "put")
    with pytest.raises(FileChanged):
        list(read_range(file))


def test_a_pending_area_a_collection_and_their_costs(scheme: str) -> None:
    """With PostgreSQL as its consensus, and with none: a pending area's batches are listed, absorbed and deleted."""
    schema = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
    for consensus in (None, servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")):
        blobs = servers.store_url(scheme)
        url = blobs if consensus else blobs.replace(f"{scheme}:", f"{scheme}+cas:")
        with persist.open(url, consensus, config=persist.Config(inline_bytes=0)) as client:
            pending_area.create(client, "readings", schema).close()
            with pending_area.Writer(url, "readings", "edge-7", schema) as write:
                for lower in range(3):
                    write.put([{"id": lower, "word": "w"}], lower, lower + 1)
            assert pending_area.census(client, "readings").batches == 3
            pending_area.absorb(client, "readings")
            with client.open_reader("readings") as read:
                assert read.snapshot(2).to_arrow().num_rows == 3
            assert client.prices == NAMED[CLOUDS[scheme].extra]
            assert client.metrics().cost.dollars > 0
            client.maintain("readings")


def test_an_answer_to_another_request_is_not_taken_on_azure() -> None:
    """A proxy that sends a request twice leaves an answer behind, which would be the next one's."""
    headers = {"Content-Range": "bytes 0-3/4", "ETag": '"0x1"', "x-ms-client-request-id": "another"}
    with Scripted(200, headers, b"data") as server:
        objects = objects_at(f"az://bucket/x?endpoint={server.endpoint}")
        client = objects.clients.get()
        with pytest.raises(Determinate, match="another request"):
            objects.get("k", "read")
        assert objects.clients.get() is not client, "the answers on its connections are behind"
        with pytest.raises(Indeterminate, match="another request"):
            objects.put("k", b"x", "put")
        objects.close()
    headers.pop("x-ms-client-request-id")
    with Scripted(200, headers, b"data") as server:  # a server that does not say
        objects = objects_at(f"az://bucket/x?endpoint={server.endpoint}")
        found = objects.get("k", "read")
        assert found is not None
        assert found.data == b"data"
        objects.close()


def test_a_large_object_is_one_request(blob: ObjectsBlob, url: str, scheme: str, proxy: Proxy) -> None:
    data = os.urandom(1 << 20) * 40
    through = ObjectsBlob(objects_at(via(url, scheme, proxy)))
    proxy.at(0, None)
    through.set("s/big", memoryview(data))
    assert proxy.requests == 1
    assert blob.get("s/big") == data
    assert blob.get_range("s/big", 39 << 20, 1 << 62) == data[39 << 20 :]
    with pytest.raises(Corrupt):
        through.set("s/big", data[:-1] + b"!")
    through.close()
