"""Many writers and many batches: bounded memory, a listing for each thousand batches, each content read once.

PERSIST_PENDING_BATCHES of them from PERSIST_PENDING_WRITERS writers; `make pending` takes 100,000 from 1,000.

Edge writers on S3 with the credentials of the docs: counted and refused at the server.

PERSIST_PENDING_DEVICES of them; `make pending` has a hundred.
"""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib import pending_area
from persist_lib.core.pending import PendingName
from persist_lib.errors import InvalidUsage
from persist_lib.format.paths import blob_key, pending_prefix
from persist_lib.frontier import at
from persist_lib.ids import ShardId
from persist_lib.location import open_location
from persist_lib.location.api import BlobEntry, Page
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.location.objects.blob import ObjectsBlob
from persist_lib.pending_area import Writer
from persist_lib.pending_area.objects import encode
from persist_lib.testing import check_swept, contents_of
from persist_lib.testing.servers import S3Server, use_test_credentials
from tests.unit.pending_area.areas import NAME, plain, said
from tests.worlds import SCHEMA

WRITERS = int(os.environ.get("PERSIST_PENDING_WRITERS", "100"))
BATCHES = int(os.environ.get("PERSIST_PENDING_BATCHES", "3000"))
SHARD = ShardId("readings")
UPDATES = 3
MIB = 1 << 20


class Many(MemoryBlob):
    """A Blob in which every writer has put all of the same batches: they are made when they are asked for."""

    def __init__(self, writers: int, each: int) -> None:
        super().__init__()
        self.lists = 0
        self.names: list[PendingName] = []
        self.sizes: list[int] = []
        for number in range(each):
            name, data = self._made(number)
            self.names.append(name)
            self.sizes.append(len(data))
        self.writers = [f"edge-{number:05d}" for number in range(writers)]
        self.prefix = pending_prefix(SHARD)
        self.is_gone = np.zeros(writers * each, bool)

    def _made(self, number: int) -> tuple[PendingName, bytes]:
        lower, upper = number * UPDATES, (number + 1) * UPDATES
        table = pa.Table.from_pylist(said(lower, upper), SCHEMA.updates)
        name, data = encode(SCHEMA, table, "", lower, at(upper))
        return name, bytes(data)

    def _place(self, key: str) -> int:
        writer, name = key.removeprefix(self.prefix).split("/")
        return self.writers.index(writer) * len(self.names) + int(name[:20]) // UPDATES

    def _key(self, place: int) -> str:
        writer, number = divmod(place, len(self.names))
        name = self.names[number]
        return blob_key(SHARD, PendingName(self.writers[writer], name.lower, name.upper, name.count, name.digest).key)

    def page(self, prefix: str, after: str) -> Page:
        self.lists += 1
        if not prefix.startswith("-pending/"):
            return Page([entry for entry in super().list(prefix) if entry.key > after], is_last=True)
        first = self._place(after) + 1 if after else 0
        left = np.flatnonzero(~self.is_gone[first:])[:1001] + first
        found = [BlobEntry(self._key(place), self.sizes[place % len(self.names)]) for place in left[:1000].tolist()]
        return Page(found, is_last=len(left) <= 1000)

    def get(self, key: str) -> bytes | None:
        if not key.startswith(self.prefix):
            return super().get(key)
        place = self._place(key)
        return None if self.is_gone[place] else self._made(place % len(self.names))[1]

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        for key in keys:
            if key.startswith(self.prefix):
                self.is_gone[self._place(key)] = True
        return super().delete_many([key for key in keys if not key.startswith(self.prefix)])


@pytest.mark.slow
@pytest.mark.timeout(0 if BATCHES > 10_000 else 120)
def test_many_batches_are_absorbed_in_bounded_memory_with_few_listings():
    each = BATCHES // WRITERS
    blob = Many(WRITERS, each)
    location = replace(open_location("memory:", create=True), blob=blob)
    with persist.open(location, config=persist.Config(lease_ms=600_000)) as client:
        pending_area.create(client, SHARD, SCHEMA).close()
        tracemalloc.start()
        done = pending_area.absorb(client, SHARD)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pages = -(-BATCHES // 1000)
        took = f"{blob.lists} pages, {done.cost.gets:,} GETs, {peak / MIB:.0f} MiB"
        print(f"{BATCHES:,} batches of {WRITERS:,} writers: {took}")
        assert (done.upper, done.left, done.waits) == (at(each * UPDATES), 0, "")
        assert done.batches + done.discarded == BATCHES
        assert blob.lists <= 2 * pages + 10
        assert done.cost.gets <= 2 * each + 200, "each content is read once, however many wrote it"
        assert peak < 32 * MIB + 800 * BATCHES
        assert len(client.inspect(SHARD).state.garbage) <= 7_000
        for _ in range(3):
            client.maintain(SHARD)
        assert blob.is_gone.all()
        with client.open_reader(SHARD) as read, read.snapshot(diff=True) as snapshot:
            assert contents_of(snapshot.to_arrow()) == plain(said(0, each * UPDATES), each * UPDATES - 1)


PAGE = Path(__file__).parents[2] / "docs" / "pending-area.md"
BOOTSTRAP = 1 + 3 + 3
"""Requests before the server begins to check credentials: the bucket, and two users with a policy and a key."""
DEVICES = int(os.environ.get("PERSIST_PENDING_DEVICES", "4"))
TIMES = 15
EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
LIMITED = persist.Config(inline_bytes=0)


class Server(S3Server):
    """An S3 that checks credentials against policies, and says what it was asked."""

    def user(self, name: str, policy: str) -> tuple[str, str]:
        iam = boto3.client("iam", endpoint_url=self.url)
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="policy", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return key["AccessKeyId"], key["SecretAccessKey"]

    def requests(self) -> list[tuple[str, str, int]]:
        """Method, path and status of each request so far."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", (self.root / "log").read_text())
        return [(m, path, int(status)) for m, path, status in re.findall(r'"([A-Z]+) (\S+) HTTP/1.1" (\d+)', log)]


def policy_of_the_docs(writer: str) -> str:
    [text] = re.findall(r'```json title="the policy of edge-7"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    return text.replace("BUCKET/PREFIX", "persist/try").replace("/edge-7/", f"/{writer}/")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    use_test_credentials()
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(BOOTSTRAP))
    with Server() as server:
        yield server


def use(monkeypatch: pytest.MonkeyPatch, key: tuple[str, str]) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key[1])


def test_a_writer_with_the_policy_of_the_docs_puts_and_can_do_nothing_else(server: Server, monkeypatch):
    admin, edge = server.user("admin", json.dumps(EVERYTHING)), server.user("edge-7", policy_of_the_docs("edge-7"))
    use(monkeypatch, admin)
    with persist.open(server.location("try", "s3+cas"), config=LIMITED) as client:
        pending_area.create(client, NAME, SCHEMA).close()
        before = len(server.requests())
        use(monkeypatch, edge)
        with Writer(server.location("try"), NAME, "edge-7", SCHEMA) as write:
            for lower in range(0, 30, 3):
                write.put(said(lower, lower + 3), lower, lower + 3)
            write.put(said(0, 3), 0, 3)
        asked = server.requests()[before:]
        assert Counter(method for method, *_ in asked) == {"PUT": 11}, "no other request, also for what is there"
        assert Counter(status for *_, status in asked) == {200: 10, 412: 1}
        with (
            Writer(server.location("try"), NAME, "edge-8", SCHEMA) as write,
            pytest.raises(InvalidUsage, match="AccessDenied"),
        ):
            write.put(said(0, 3), 0, 3)
        with Writer(server.location("try"), "others", "edge-7", SCHEMA) as write, pytest.raises(InvalidUsage):
            write.put(said(0, 3), 0, 3)
        with pytest.raises(persist.PersistError):
            persist.open(server.location("try", "s3+cas"))
        use(monkeypatch, admin)
        assert pending_area.absorb(client, NAME).batches == 10


def test_devices_that_die_are_offline_or_write_the_same_make_one_collection(monkeypatch):
    """Each by its own credentials. Some write the same, most stop, and one comes back with a day's batches."""
    use_test_credentials()
    names = [*(f"edge-{number}" for number in range(DEVICES)), "offline"]
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(1 + 3 * (1 + len(names))))
    with Server() as server:
        admin = server.user("admin", json.dumps(EVERYTHING))
        keys = {name: server.user(name, policy_of_the_docs(name)) for name in names}

        def put(name: str, upto: int, step: int) -> None:
            use(monkeypatch, keys[name])
            with Writer(server.location("try"), NAME, name, SCHEMA) as write:
                for lower in range(0, upto, step):
                    write.put(said(lower, min(lower + step, TIMES)), lower, min(lower + step, TIMES))

        use(monkeypatch, admin)
        with persist.open(server.location("try", "s3+cas"), config=LIMITED) as client:
            read = pending_area.create(client, NAME, SCHEMA)
            for number in range(DEVICES):
                put(f"edge-{number}", TIMES if number < 2 else 1 + number % TIMES, 1 + number % 3)
            assert contents_of(read.contents(TIMES - 1, diff=True)) == plain(said(0, TIMES), TIMES - 1)
            done = pending_area.absorb(client, NAME)
            assert (done.upper.time, done.left, done.disagreements) == (TIMES, 0, ())
            put("offline", TIMES, 5)
            assert pending_area.absorb(client, NAME).discarded == TIMES // 5
            assert contents_of(read.contents(TIMES - 1, diff=True)) == plain(said(0, TIMES), TIMES - 1)
            read.close()
            for _ in range(4):
                client.maintain(NAME)
            check_swept(client, NAME)
            assert list(pending_area.pending_collections(client)) == []


def test_a_listing_takes_one_request_for_each_page_of_batches():
    """Pages of fifty, so that a few objects do; S3 has a thousand in a page."""
    use_test_credentials()
    with Server() as server, persist.open(server.location("try", "s3+cas"), config=LIMITED) as client:
        blob: Any = client.location.blob
        while not isinstance(blob, ObjectsBlob):
            blob = blob.inner
        blob._page = 50
        pending_area.create(client, NAME, SCHEMA).close()
        pending_area.create(client, f"{NAME}-x", SCHEMA).close()
        with Writer(server.location("try"), NAME, "edge-0", SCHEMA) as write:
            names = [write.put([], lower, lower + 1).key for lower in range(20)]
        s3 = boto3.client("s3", endpoint_url=server.url)
        for number in range(1, 6):  # the same batches of other writers
            for name in names:
                key = name.replace("/edge-0/", f"/edge-{number}/").replace("-pending/", f"-pending/{NAME}/")
                s3.put_object(Bucket="persist", Key=f"try/blob/{key}", Body=b"")
        s3.put_object(Bucket="persist", Key=f"try/blob/-pending/{NAME}-x/a/x", Body=b"")

        def listings(begun: int) -> int:
            asked = server.requests()[begun:]
            return len([path for _, path, _ in asked if "list-type" in path and "-pending" in path])

        before = len(server.requests())
        found = pending_area.census(client, NAME)
        assert (found.batches, len(found.writers), listings(before)) == (120, 6, 3)
        before = len(server.requests())
        assert sorted(pending_area.pending_collections(client)) == [NAME, f"{NAME}-x"]
        assert listings(before) <= 3, "where only names are asked for, one for each of them, and the end"
        before = len(server.requests())
        done = pending_area.absorb(client, NAME)
        assert (done.upper.time, done.batches, done.discarded, listings(before)) == (20, 20, 100, 3)
        assert done.cost.gets < 60, "each content is read once, however many wrote it"
