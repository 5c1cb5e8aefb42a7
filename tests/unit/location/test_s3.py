"""Blobs on S3: conditional writes and their traps, pieces, pages, per-key errors, and what each failure means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import botocore
import botocore.credentials
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, ReadTimeoutError

from persist_lib.errors import (
    Corrupt,
    Determinate,
    Indeterminate,
    InvalidName,
    InvalidUsage,
    NewerFormat,
    NotFound,
    PersistError,
)
from persist_lib.location import open_location
from persist_lib.location.objects.blob import ObjectsBlob, enter
from persist_lib.location.objects.target import canonical, parse_url
from persist_lib.location.s3.objects import Clients, S3Objects
from persist_lib.location.scheme import Opening
from persist_lib.location.wrap.deadline import RetryingBlob
from tests import servers
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.slow

servers.use_test_credentials()
MIB = 1024 * 1024


@pytest.fixture
def url() -> str:
    return f"s3://{servers.BUCKET}/{os.urandom(8).hex()}?endpoint={servers.s3_server().url}&path_style=true"


@pytest.fixture
def blob(url: str) -> Iterator[ObjectsBlob]:
    opened = ObjectsBlob(enter(url, Opening(create=True)), multipart_above=6 * MIB, piece=5 * MIB)
    yield opened
    opened.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(servers.s3_server().port) as opened:
        yield opened


@pytest.fixture
def through(url: str, blob: ObjectsBlob, proxy: Proxy) -> Iterator[ObjectsBlob]:
    """The same blobs, reached through the proxy, with the impatience of a test."""
    opened = ObjectsBlob(S3Objects(parse_url(via(url, proxy)), answer_s=1), multipart_above=6 * MIB, piece=5 * MIB)
    yield opened
    opened.close()


def via(url: str, proxy: Proxy) -> str:
    return url.replace(f":{servers.s3_server().port}", f":{proxy.port}")


def uploads(blob: ObjectsBlob) -> list[str]:
    return [upload.key for upload in blob.uploads("")]


class Intercepts:
    """A client one of whose operations is replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.inner, self.replaced = inner, replaced

    def __getattr__(self, name: str) -> Any:
        return self.replaced.get(name) or getattr(self.inner, name)


def intercept(monkeypatch: pytest.MonkeyPatch, blob: ObjectsBlob, **replaced: Any) -> None:
    client = blob._objects.clients.get()
    monkeypatch.setattr(blob._objects.clients, "get", lambda: Intercepts(client, **replaced))


def test_a_deletion_whose_answer_is_cut_short_is_not_taken_for_done(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    intercept(monkeypatch, blob, delete_objects=lambda **_: {})
    assert {key: type(error) for key, error in blob.delete_many(["s/w/a"]).items()} == {"s/w/a": Indeterminate}


def test_a_large_object_goes_in_pieces_and_is_not_there_before_the_last(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(12 * MIB + 7)
    client = blob._objects.clients.get()
    pieces: list[int] = []

    def upload_part(**arguments: Any) -> Any:
        assert len(pieces) >= 3 or blob.get("s/w/big") is None
        pieces.append(len(arguments["Body"]))
        return client.upload_part(**arguments)

    intercept(monkeypatch, blob, upload_part=upload_part)
    blob.set("s/w/big", memoryview(data))
    assert sorted(pieces) == [2 * MIB + 7, 5 * MIB, 5 * MIB]
    monkeypatch.undo()
    assert blob.get("s/w/big") == data
    assert blob.get_range("s/w/big", 5 * MIB - 3, 5 * MIB + 3) == data[5 * MIB - 3 : 5 * MIB + 3]
    blob.set("s/w/big", data)
    with pytest.raises(Corrupt):
        blob.set("s/w/big", data[:-1] + bytes([data[-1] ^ 1]))
    assert uploads(blob) == []


def test_pieces_of_what_failed_are_given_up(blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    client = blob._objects.clients.get()

    def upload_part(**arguments: Any) -> Any:
        if arguments["PartNumber"] == 2:
            raise ConnectionClosedError(endpoint_url="x")
        return client.upload_part(**arguments)

    intercept(monkeypatch, blob, upload_part=upload_part)
    with pytest.raises(Indeterminate):
        blob.set("s/w/big", bytes(12 * MIB))
    assert uploads(blob) == []
    assert blob.get("s/w/big") is None


def test_what_a_dead_writer_left_unfinished_is_swept_and_what_a_live_one_is_sending_is_not(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        intercept(patch, blob, complete_multipart_upload=raising(ReadTimeoutError(endpoint_url="x")))
        for key in ("s/dead/a", "s/dead/b", "s/live/c", "t/dead/d"):
            with pytest.raises(Indeterminate):
                blob.set(key, bytes(7 * MIB))
    assert sorted(uploads(blob)) == ["s/dead/a", "s/dead/b", "s/live/c", "t/dead/d"]
    found = [*blob.uploads("s/")]
    assert sorted(upload.key for upload in found) == ["s/dead/a", "s/dead/b", "s/live/c"]
    dead = [upload for upload in found if upload.key.startswith("s/dead/")]
    assert blob.abort_uploads(dead) == {}
    assert sorted(uploads(blob)) == ["s/live/c", "t/dead/d"]
    assert blob.abort_uploads(dead) == {}, "what is given up already is no failure"


def raising(error: Exception) -> Any:
    def raise_it(**_: Any) -> Any:
        raise error

    return raise_it


def client_error(status: int, code: str) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "as planned"}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "PutObject",
    )


@pytest.mark.parametrize(
    ("error", "write", "read"),
    [
        (client_error(503, "SlowDown"), Determinate, Determinate),
        (client_error(429, "TooManyRequests"), Determinate, Determinate),
        (client_error(503, "ServiceUnavailable"), Indeterminate, Determinate),
        (client_error(500, "InternalError"), Indeterminate, Determinate),
        (client_error(502, "502"), Indeterminate, Determinate),
        (client_error(409, "ConditionalRequestConflict"), Determinate, Determinate),
        (client_error(400, "BadDigest"), Determinate, Determinate),
        (client_error(400, "RequestTimeout"), Determinate, Determinate),
        (client_error(403, "RequestTimeTooSkewed"), Determinate, Determinate),
        (client_error(403, "AccessDenied"), InvalidUsage, InvalidUsage),
        (client_error(404, "NoSuchBucket"), NotFound, NotFound),
        (client_error(301, "PermanentRedirect"), InvalidUsage, InvalidUsage),
        (EndpointConnectionError(endpoint_url="x"), Determinate, Determinate),
        (ReadTimeoutError(endpoint_url="x"), Indeterminate, Determinate),
        (ConnectionClosedError(endpoint_url="x"), Indeterminate, Determinate),
        (OSError("anything else"), Indeterminate, Determinate),
    ],
)  # fmt: skip
def test_each_failure_says_whether_it_happened(
    error: Exception, write: type[PersistError], read: type[PersistError]
) -> None:
    assert type(S3Objects(parse_url("s3://b"))._failed(error, "x", Indeterminate)) is write
    assert type(S3Objects(parse_url("s3://b"))._failed(error, "x", Determinate)) is read


def test_a_key_that_could_not_be_deleted_is_named_though_the_answer_is_a_200(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("s/w/a", "s/w/b"):
        blob.set(key, b"x")
    client = blob._objects.clients.get()

    def delete_objects(**arguments: Any) -> Any:
        refused = [o["Key"] for o in arguments["Delete"]["Objects"] if o["Key"].endswith("/b")]
        arguments["Delete"]["Objects"] = [o for o in arguments["Delete"]["Objects"] if o["Key"] not in refused]
        answer = client.delete_objects(**arguments)
        return {**answer, "Errors": [{"Key": key, "Code": "InternalError", "Message": "planned"} for key in refused]}

    intercept(monkeypatch, blob, delete_objects=delete_objects)
    assert {key: type(error) for key, error in blob.delete_many(["s/w/a", "s/w/b"]).items()} == {"s/w/b": Determinate}
    assert [entry.key for entry in blob.list("")] == ["s/w/b"]


def test_a_key_that_may_not_be_deleted_is_told_at_once_and_the_others_are_deleted(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is denied, one has a failure that passes: the second is tried again for, the first is not."""
    for key in ("s/w/a", "s/w/denied", "s/w/failing"):
        blob.set(key, b"data")
    client = blob._objects.clients.get()
    asked: list[list[str]] = []

    def delete_objects(**arguments: Any) -> Any:
        names = [entry["Key"] for entry in arguments["Delete"]["Objects"]]
        asked.append([name.rpartition("/")[2] for name in names])
        codes = {"denied": "AccessDenied"} | ({"failing": "InternalError"} if len(asked) == 1 else {})
        errors = [{"Key": name, "Code": codes[end]} for name in names if (end := name.rpartition("/")[2]) in codes]
        refused = {error["Key"] for error in errors}
        if not (left := [name for name in names if name not in refused]):
            return {"Errors": errors}
        answer = client.delete_objects(Bucket=arguments["Bucket"], Delete={"Objects": [{"Key": name} for name in left]})
        return {**answer, "Errors": errors}

    intercept(monkeypatch, blob, delete_objects=delete_objects)
    trying = RetryingBlob(blob, timeout_s=30)
    failures = trying.delete_many(["s/w/a", "s/w/denied", "s/w/failing"])
    assert {key: type(error) for key, error in failures.items()} == {"s/w/denied": InvalidUsage}
    assert "operations.md" in str(failures["s/w/denied"])
    assert asked == [["a", "denied", "failing"], ["denied", "failing"]]
    assert [entry.key for entry in blob.list("")] == ["s/w/denied"]
    trying.delete_many(["s/w/denied"])
    assert len(asked) == 3


def test_a_thousand_keys_are_one_request_and_a_failed_request_names_only_its_own(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def delete_objects(**arguments: Any) -> Any:
        sizes.append(len(arguments["Delete"]["Objects"]))
        if len(sizes) == 2:
            raise ReadTimeoutError(endpoint_url="x")
        return {"Deleted": arguments["Delete"]["Objects"]}

    intercept(monkeypatch, blob, delete_objects=delete_objects)
    failures = blob.delete_many([f"s/w/{n}" for n in range(2500)])
    assert sizes == [1000, 1000, 500]
    assert set(failures) == {f"s/w/{n}" for n in range(1000, 2000)}


def test_more_than_a_thousand_objects_and_uploads_are_all_listed_and_all_go(blob: ObjectsBlob) -> None:
    keys = [f"s/w/{n}" for n in range(1005)]
    client = blob._objects.clients.get()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: blob.set(key, b"x"), keys))
        list(pool.map(lambda key: client.create_multipart_upload(**blob._objects.at(f"blob/{key}")), keys))
        list(pool.map(lambda key: client.create_multipart_upload(**blob._objects.at(f"blob/{key}")), keys[:10]))
    assert sorted(entry.key for entry in blob.list("s/")) == sorted(keys)
    assert sorted(uploads(blob)) == sorted([*keys, *keys[:10]])
    assert blob.delete_many(keys) == {}
    assert blob.abort_uploads([*blob.uploads("s/")]) == {}
    assert ([*blob.list("")], uploads(blob)) == ([], [])


@pytest.mark.parametrize("page", [1, 2, 3, 7])
def test_uploads_are_told_once_each_whatever_a_page_holds(blob: ObjectsBlob, page: int) -> None:
    """Several of one key are on either side of a page's end, where only the upload's id tells them apart."""
    client, paged = blob._objects.clients.get(), ObjectsBlob(blob._objects, page=page)
    keys = ["s/w/a", "s/w/b", "s/w/b", "s/w/b", "s/w/c", "s/w/c", "t/w/d"]
    ids = [(key, client.create_multipart_upload(**blob._objects.at(f"blob/{key}"))["UploadId"]) for key in keys]
    assert sorted((upload.key, upload.id) for upload in paged.uploads("")) == sorted(ids)
    assert sorted((upload.key, upload.id) for upload in paged.uploads("s/")) == sorted(ids[:-1])
    assert paged.abort_uploads([*paged.uploads("s/")]) == {}
    assert uploads(blob) == ["t/w/d"]


@pytest.mark.parametrize("page", [1, 3])
def test_pages_are_as_large_as_was_asked(blob: ObjectsBlob, url: str, proxy: Proxy, page: int) -> None:
    for n in range(5):
        blob.set(f"s/w/{n}", b"x")
    through = ObjectsBlob(S3Objects(parse_url(via(url, proxy))), page=page)
    for act, requests in (
        (lambda: [*through.list("s/")], -(-5 // page)),
        (lambda: through.delete_many([f"s/w/{n}" for n in range(5)]), -(-5 // page)),
    ):
        proxy.at(0, None)
        act()
        assert proxy.requests == requests
    through.close()


def test_a_location_that_is_not_there_is_not_found_and_not_made(url: str) -> None:
    for read_only in (False, True):
        with pytest.raises(NotFound, match="create=True"):
            open_location(url, "memory:", read_only=read_only)
    with pytest.raises(InvalidUsage, match="consensus="):
        open_location(url, create=True)


def test_objects_of_somebody_else_and_newer_formats_are_left_alone(url: str) -> None:
    target = parse_url(url)
    clients = Clients(target)
    at = {"Bucket": servers.BUCKET, "Key": f"{target.prefix}/thesis.tex"}
    clients.get().put_object(**at, Body=b"x")
    with pytest.raises(InvalidUsage, match="thesis"):
        enter(url, Opening(create=True))
    clients.get().put_object(**{**at, "Key": f"{target.prefix}/persist.json"}, Body=b'{"format": 2}')
    with pytest.raises(NewerFormat):
        enter(url, Opening(create=True))
    clients.get().put_object(**{**at, "Key": f"{target.prefix}/persist.json"}, Body=b"{")
    with pytest.raises(Corrupt):
        enter(url, Opening(create=True))
    clients.close()


@pytest.mark.parametrize(("ignored", "header"), [("IfNoneMatch", "If-None-Match"), ("IfMatch", "If-Match")])
def test_a_server_that_ignores_conditions_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, ignored: str, header: str
) -> None:
    """The rows of a log are put where none is, and its floor where it is the one that was read."""
    inner = Clients.get

    def get(self: Clients) -> Any:
        client = inner(self)
        return Intercepts(
            client,
            put_object=lambda **a: client.put_object(**{name: value for name, value in a.items() if name != ignored}),
        )

    monkeypatch.setattr(Clients, "get", get)
    with pytest.raises(InvalidUsage, match=f"ignores {header}:"):
        enter(url.replace("s3:", "s3+cas:", 1), Opening(create=True))


def test_many_may_create_a_location_at_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: enter(url, Opening(create=True)), range(6)))
    for clients in opened:
        clients.close()


@pytest.mark.parametrize(
    "wrong",
    ["s3:bucket/x", "s3://", "s3:///x", "s3://b/x?nonsense=1", "s3://b/x?path_style=maybe", "s3://b/" + "x" * 300],
)
def test_a_url_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidUsage):
        canonical(wrong)


def test_a_url_means_the_same_however_it_is_written() -> None:
    for one in ("s3://b/a/c/?region=r&endpoint=http://h:1", "s3://b//a/c?endpoint=http%3A%2F%2Fh%3A1&region=r"):
        assert canonical(one) == "s3://b/a/c?endpoint=http%3A%2F%2Fh%3A1&region=r"
    assert canonical(canonical("s3://b/a%20b")) == "s3://b/a%20b"
    assert parse_url("s3://b").prefix == ""
    assert parse_url("s3://b").path("blob", "k") == "blob/k"


def test_a_key_longer_than_s3_takes_is_refused() -> None:
    with pytest.raises(InvalidName):
        parse_url("s3://b/" + "p" * 150).path("blob", "/".join(["x" * 200] * 5)[:1000])


def test_settings_of_the_url_reach_the_client(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    clients = Clients(parse_url(f"s3://b/x?endpoint=https://h:1&region=eu-west-3&ca={tmp_path}/ca.pem&path_style=true"))
    client = clients.get()
    assert client.meta.region_name == "eu-west-3"
    assert client.meta.endpoint_url == "https://h:1"
    assert client.meta.config.s3["addressing_style"] == "path"
    assert client.meta.config.retries["total_max_attempts"] == 1
    assert client.meta.config.request_checksum_calculation == "when_supported"
    clients.close()
    with pytest.raises(InvalidUsage, match="closed"):
        clients.get()
    clients = Clients(parse_url("s3://b/x?endpoint=https://h:1&checksums=when_required"))
    assert clients.get().meta.config.request_checksum_calculation == "when_required"
    clients.close()


def test_requests_do_not_parse_times_nor_describe_the_machine(
    blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take much of a request's CPU, a listing's most of all, and nothing reads them."""
    for key in ("s/a", "s/b"):
        blob.set(key, b"x")

    def parse(*_: object, **__: object) -> None:
        raise AssertionError("a time was parsed")

    monkeypatch.setattr("dateutil.parser.parse", parse)
    assert blob.get("s/a") == b"x"
    assert [entry.key for entry in blob.list("s/")] == ["s/a", "s/b"]
    sent: list[str] = []
    client = blob._objects.clients.get()
    client.meta.events.register_last(
        "before-send.s3", lambda request, **_: sent.append(request.headers["User-Agent"].decode())
    )
    blob.get("s/a")
    assert sent == [f"persist boto3/{boto3.__version__} Botocore/{botocore.__version__}"]


def test_credentials_of_a_role_are_asked_for_and_renewed(
    url: str, blob: ObjectsBlob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their end is a time in an answer of STS, which this client does not parse."""
    asked: list[str] = []
    make = botocore.credentials.AssumeRoleCredentialFetcher._get_credentials  # type: ignore[attr-defined]

    def counted(fetcher: Any) -> Any:
        found = make(fetcher)
        asked.append(found["Credentials"]["Expiration"])
        return found

    monkeypatch.setattr(botocore.credentials.AssumeRoleCredentialFetcher, "_get_credentials", counted)
    (tmp_path / "config").write_text(
        "[profile base]\naws_access_key_id = a\naws_secret_access_key = b\n"
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = base\nregion = us-east-1\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", servers.s3_server().url)
    blob.set("s/a", b"x")
    with closing(ObjectsBlob(enter(f"{url}&profile=role", Opening()))) as other:
        assert other.get("s/a") == b"x"
        assert len(asked) == 1
        ends = datetime.fromisoformat(asked[0])
        monkeypatch.setattr(botocore.credentials, "_local_now", lambda: ends - timedelta(minutes=1))
        monkeypatch.setattr(botocore.credentials.RefreshableCredentials, "_seconds_remaining", lambda _: 60)
        assert other.get("s/a") == b"x"
        assert len(asked) == 2


def test_without_credentials_it_says_so(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidUsage, match="redentials"):
        enter(url, Opening())


def test_opening_files_imports_neither_boto3_nor_psycopg(tmp_path: Path) -> None:
    program = (
        "import sys, persist_lib as p; p.open(sys.argv[1]).close(); "
        "print([m for m in ('boto3', 'botocore', 'psycopg') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program, f"file:{tmp_path}/d"], capture_output=True, check=True)
    assert run.stdout.decode().strip() == "[]"
