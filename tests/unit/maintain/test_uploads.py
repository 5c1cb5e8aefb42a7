"""The audit gives up uploads in pieces whose writer is gone for ever, no others, and continues where it sees none.

It races others: what is linked while it looks is never deleted, wherever in between that happens. It lists objects
before it reads the state. The other way round, an object would be listed that is linked by a state newer than the one
it is judged by, and its uploader, unknown to that, would count as gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

import persist_lib as persist
from persist_lib.cli import duty_outcomes
from persist_lib.core import units
from persist_lib.core.commands import Retire
from persist_lib.errors import Determinate
from persist_lib.format.paths import blob_key
from persist_lib.ids import PartKey, ShardId
from persist_lib.location import open_location
from persist_lib.location.api import BlobEntry
from persist_lib.location.objects.blob import ObjectsBlob
from persist_lib.location.wrap.around import Operation
from persist_lib.maintain import Audited
from persist_lib.testing import ManualClock, check_world, contents_of
from tests import servers
from tests.worlds import SCHEMA, SMALL, World, around_both, row

servers.use_test_credentials()
CONFIG = persist.Config(lease_ms=1000, inline_bytes=0)


class Uploading:
    """Clients of one location on S3, whose clock a test moves, and uploads that are never finished."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        server = servers.s3_server()
        self.url = f"s3://{servers.BUCKET}/{os.urandom(8).hex()}?endpoint={server.url}&path_style=true"
        self.log = f"memory:{os.urandom(8).hex()}"
        self.location = open_location(self.url, self.log, create=True, clock=self.clock)
        self.client = self.open()

    def open(self, **changed: Any) -> persist.Client:
        location = replace(self.location, **changed)
        return persist.open(location, config=CONFIG, runtime=self.clock.runtime())

    @property
    def blob(self) -> ObjectsBlob:
        assert isinstance(self.location.blob, ObjectsBlob)
        return self.location.blob

    def begin(self, key: str) -> None:
        """Send one piece, and die."""
        at = self.blob._objects.at(f"blob/{blob_key(ShardId('s'), PartKey(key))}")
        client = self.blob._objects.clients.get()
        upload = client.create_multipart_upload(**at)["UploadId"]
        client.upload_part(**at, UploadId=upload, PartNumber=1, Body=b"piece")

    def unfinished(self) -> list[str]:
        return sorted(upload.key.removeprefix("s/") for upload in self.blob.uploads("s/"))


@pytest.fixture
def place() -> Iterator[Uploading]:
    place = Uploading()
    yield place
    place.location.close()


def test_an_upload_is_given_up_once_its_writer_is_retired_and_not_before(place: Uploading) -> None:
    write = place.client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    place.begin(f"{write.id}/half.parquet")
    assert place.client.audit_orphans("s").uploads == 0
    assert place.unfinished() == [f"{write.id}/half.parquet"]
    place.clock.advance(10)
    place.client.expire("s")
    assert place.client.audit_orphans("s", dry_run=True).uploads == 1
    assert place.unfinished() == [f"{write.id}/half.parquet"], "a dry run changes nothing"
    with place.open().open_writer("s", SCHEMA) as other:
        place.begin(f"{other.id}/sending.parquet")
        assert place.client.maintain("s").audited.uploads == 1
        assert place.unfinished() == [f"{other.id}/sending.parquet"]
    check_world(place.client, "s")


def test_the_first_attempt_at_an_object_that_is_there_is_given_up_and_the_object_stays(place: Uploading) -> None:
    write = place.client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    (key,) = place.client.inspect("s").state.trace[-1].keys
    place.begin(key)
    place.begin(key)
    place.clock.advance(10)
    place.client.expire("s")
    audited = place.client.audit_orphans("s")
    assert (audited.uploads, audited.orphans, audited.live) == (2, (), 1)
    assert place.unfinished() == []
    with place.client.open_reader("s") as read:
        assert contents_of(read.snapshot(0, diff=True).to_arrow()) == {(1, "w"): 1}


def test_an_id_is_remembered_while_something_of_it_is_unfinished(place: Uploading) -> None:
    write = place.client.open_writer("s", SCHEMA)
    place.begin(f"{write.id}/half.parquet")
    write.close()
    assert place.client.audit_orphans("s").swept == ()
    assert len(place.client.audit_orphans("s").swept) == 1


class Blind:
    """A server that does not tell its uploads, or will not give one up."""

    def __init__(self, inner: ObjectsBlob, *, tells: bool) -> None:
        self._inner, self._tells = inner, tells

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        return self._inner.list(prefix)

    def uploads(self, prefix: str) -> Any:
        if not self._tells:
            raise Determinate("not implemented", code="NotImplemented")
        return self._inner.uploads(prefix)

    def abort_uploads(self, uploads: Any) -> Any:
        return {upload: Determinate("no") for upload in uploads}


@pytest.mark.parametrize("tells", [False, True])
def test_orphans_go_though_the_server_says_no_to_what_concerns_uploads(place: Uploading, tells: bool) -> None:
    write = place.client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    place.location.blob.set(f"s/{write.id}/orphan.parquet", b"x")
    place.begin(f"{write.id}/half.parquet")
    place.clock.advance(10)
    place.client.expire("s")
    other = persist.open(
        replace(place.location, blob=Blind(place.blob, tells=tells)),
        config=CONFIG.model_copy(update={"timeout_s": 0.2}), runtime=place.clock.runtime(),
    )  # fmt: skip
    audited = other.audit_orphans("s")
    assert len(audited.orphans) == 1
    assert audited.uploads == 0
    assert len(audited.failed) == 1
    assert place.client.audit_orphans("s").uploads == 1


def test_a_read_only_client_counts_uploads_and_gives_none_up(place: Uploading) -> None:
    write = place.client.open_writer("s", SCHEMA)
    place.begin(f"{write.id}/half.parquet")
    write.close()
    with persist.open(open_location(place.url, place.log, read_only=True)) as client:
        assert client.audit_orphans("s", dry_run=True).uploads == 1
        with pytest.raises(persist.InvalidUsage):
            client.audit_orphans("s")
    assert len(place.unfinished()) == 1


def test_a_location_that_sends_nothing_in_pieces_is_not_asked_for_uploads(world: World) -> None:

    client = world.client()
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)
    assert client.audit_orphans("s").uploads == 0
    assert world.count("uploads", "abort_uploads") == 0


def killed_in_the_middle_of_an_upload(url: str) -> None:
    """A process that is killed with a part of an append written, and not linked."""
    if (child := os.fork()) == 0:
        try:
            write = persist.open(url, config=CONFIG).open_writer("s", SCHEMA)
            os.link = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            write.compare_and_append([row(1, "x" * 100_000)], 0, 1)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_what_a_killed_process_left_half_written_in_a_directory_is_named_and_deleted(tmp_path: Path) -> None:
    url, left = f"file:{tmp_path}/data", tmp_path / "data/blob/.tmp"
    killed_in_the_middle_of_an_upload(url)
    (half,) = [path for path in left.rglob("*") if path.is_file() and path.name != "lock"]
    size = half.stat().st_size
    with persist.open(url) as client:
        client.open_writer("other", SCHEMA)
        assert client.audit_orphans("other").uploads == 0, "it is another shard's"
        for read_only in (False, True):
            with persist.open(url, read_only=read_only) as looking:
                told = looking.audit_orphans("s", dry_run=True)
            assert (told.uploads, told.uploads_size) == (1, size)
            assert half.exists()
        outcome = duty_outcomes.audited(told, dry_run=True)
        assert f"1 unfinished upload, {units.size(size)}, would be given up" in outcome.summary
        done = client.audit_orphans("s")
        assert (done.uploads, done.uploads_size, done.failed) == (1, size, {})
        assert not half.parent.exists()
        assert client.audit_orphans("s").uploads == 0


@pytest.mark.slow
def test_a_half_written_file_of_a_retired_writer_goes_though_its_process_lives_and_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a paused one, whose lease ended. What it stores then is an orphan, for the next audit."""
    client = persist.open(f"file:{tmp_path}/data", config=CONFIG)
    write = client.open_writer("s", SCHEMA)
    link = os.link
    given_up: list[Audited] = []

    def paused(*arguments: Any, **options: Any) -> None:
        if not given_up:
            other = persist.open(f"file:{tmp_path}/data", config=CONFIG)
            other.machine("s").commit(lambda _state, _now: Retire(write.id))
            given_up.append(other.audit_orphans("s"))
            other.close()
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", paused)
    with pytest.raises(persist.LeaseExpired):
        write.compare_and_append([row(1)], 0, 1)
    assert given_up[0].uploads == 1
    monkeypatch.undo()
    assert len(client.audit_orphans("s").orphans) == 1, "it was stored after all"
    write.compare_and_append([row(1)], 0, 1)
    assert contents_of(client.open_reader("s").snapshot(0, diff=True).to_arrow()) == {(1, "w"): 1}
    client.close()


T = TypeVar("T")
OTHER = 7


class Between:
    """Another process acts once, just before the n-th operation of the audit, or just after the last one."""

    def __init__(self, place: int, act: Callable[[], object]) -> None:
        self.place, self._act = place, act
        self.kinds: list[str] = []
        self.is_armed = self.has_acted = False

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if self.is_armed:
            if len(self.kinds) == self.place:
                self.act()
            self.kinds.append(operation.kind)
        return call()

    def act(self) -> None:
        if not self.has_acted:
            self.has_acted = True
            self._act()


def auditor(world: World, between: Between) -> persist.Client:
    """A client that knows the shard, and is disturbed once it is armed."""
    inner = open_location(world.inner.url, clock=world.clock)
    client = persist.open(around_both(inner, between.around), config=SMALL, runtime=world.clock.runtime(OTHER))
    world.clients.append(client)
    client.inspect("s")
    between.is_armed = True
    return client


def links(world: World) -> None:
    """A new process registers, uploads, links, compacts, rolls up, and is gone."""
    with persist.open(world.inner, config=SMALL, runtime=world.clock.runtime(OTHER + 1)) as client:
        with client.open_writer("s", SCHEMA) as write:
            write.append([row(2, time=1)], 1, 2)
            write.append([row(3, time=2)], 2, 3)
        client.compact("s", policy=persist.Policy(weight=1e9))
        client.roll_up("s", force=True)


@pytest.mark.parametrize("is_rival", [False, True])
@pytest.mark.parametrize("place", range(8))
def test_what_is_uploaded_and_linked_at_any_moment_of_an_audit_is_never_deleted(world, place, is_rival):
    """By itself and, if `is_rival`, with an orphan to delete beside."""
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, 1)
        if is_rival:
            world.inner.blob.set("s/w00000000000000aa/00000000000000ab.parquet", b"orphan")
    between = Between(place, lambda: links(world))
    found = auditor(world, between).audit_orphans("s")
    between.is_armed = False
    between.act()
    assert list(found.orphans) == ["w00000000000000aa/00000000000000ab.parquet"] * is_rival
    check_world(client, "s")
    with client.open_reader("s") as read:
        assert read.snapshot(2).to_arrow().column("id").to_pylist() == [1, 2, 3]
    asked = between.kinds
    assert "scan" in asked[asked.index("list") :], "the state as it is after the listing, not as it was known"


def test_an_audit_waits_for_a_writer_that_has_uploaded_and_not_linked_yet(world):
    client = world.client(SMALL)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, 1)
        found: list[Audited] = []
        racing = world.client(SMALL, rival=world.rival)
        with racing.open_writer("s", SCHEMA) as late:
            late.fetch_upper()
            late.compare_and_append([], 1, 2)
            world.rival.before_next(lambda: found.append(client.audit_orphans("s")))
            late.compare_and_append([row(2, time=2)], 2, 3)
    assert world.rival.waiting == 0
    assert [(audited.orphans, audited.pending) for audited in found] == [((), 1)]
    check_world(client, "s")
