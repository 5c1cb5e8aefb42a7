"""The database or the blobs of a file location are replaced under live clients, by what people really do to files.

Whoever has the old one open must not be acknowledged, and must not delete by what it knows, here or in another process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import persist_lib as persist
from persist_lib.errors import HistoryRegressed
from persist_lib.ids import SeqNo
from persist_lib.location import in_place
from persist_lib.location.file.blob import FileBlob
from persist_lib.location.sqlite.consensus import SqliteConsensus
from persist_lib.testing import check_world, contents_of
from tests.worlds import SCHEMA, row

ROOT = Path(__file__).resolve().parents[2]
CONFIG = persist.Config(timeout_s=5, inline_bytes=0)


class Place:
    """A location with a backup of its database, taken when it held one append."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.database = self.folder / "consensus.sqlite"
        self.copy = folder / "copy.sqlite"
        with persist.open(self.url, config=CONFIG) as client, client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1, "kept")], 0, 1)
        shutil.copy2(self.database, self.copy)

    @property
    def url(self) -> str:
        return f"file:{self.folder}"

    def client(self, *, read_only: bool = False) -> persist.Client:
        return persist.open(self.url, config=CONFIG, read_only=read_only)


def put_copy(place: Place) -> None:
    """As rsync does it: a new file, renamed over the old one; what belonged to the old one goes."""
    fresh = place.database.with_name(".copy")
    shutil.copyfile(place.copy, fresh)
    os.replace(fresh, place.database)  # noqa: PTH105
    for kind in ("-wal", "-shm"):
        place.database.with_name(place.database.name + kind).unlink(missing_ok=True)


def put_copy_and_leave_the_log(place: Place) -> None:
    fresh = place.database.with_name(".copy")
    shutil.copyfile(place.copy, fresh)
    os.replace(fresh, place.database)  # noqa: PTH105


def move_away(place: Place) -> None:
    place.database.rename(place.database.with_name("gone"))


def remove_log(place: Place) -> None:
    place.database.with_name(place.database.name + "-wal").unlink()


def remove_shared_memory(place: Place) -> None:
    place.database.with_name(place.database.name + "-shm").unlink()


def remove_log_and_shared_memory(place: Place) -> None:
    remove_log(place)
    remove_shared_memory(place)


def swap_directory(place: Place) -> None:
    place.folder.rename(place.folder.with_name("old"))
    shutil.copytree(place.folder.with_name("old"), place.folder)


FAULTS = [put_copy, put_copy_and_leave_the_log, move_away, remove_log, remove_shared_memory, swap_directory]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def live(place: Place) -> Iterator[persist.Client]:
    client = place.client()
    yield client
    client.leases._kept.clear()
    client._handles.clear()
    client.close()


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_acknowledged_read_or_deleted_by_who_has_the_old_files_open(
    place: Place, live: persist.Client, fault: Callable[[Place], None], is_settled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write = live.open_writer("s", SCHEMA)
    write.compare_and_append([row(2, "lost", 1)], 1, 2)
    read = live.open_reader("s")
    if is_settled:  # one look at the directory tells from now on, and no file is asked for
        with monkeypatch.context() as patched:
            patched.setattr(in_place, "SETTLED_NS", 50_000_000)
            time.sleep(0.1)
            live.inspect("s")
            patched.setattr(in_place, "identity_of", None)
            live.inspect("s")
    before = {entry.key for entry in live.location.blob.list("")}
    fault(place)
    for attempt in (
        lambda: write.compare_and_append([row(3, "wrong", 2)], 2, 3),
        lambda: live.inspect("s"),
        live.shards,
        lambda: live.collect("s"),
        lambda: live.audit_orphans("s"),
        lambda: live.set_hold("s", "h", 0),
        lambda: read.downgrade_since(1),
        lambda: live.location.consensus.truncate("s", SeqNo(2)),
        lambda: live.location.consensus.head("s"),
        lambda: live.location.consensus.compare_and_set_many({"t": (None, b"x")}),
    ):
        with pytest.raises(HistoryRegressed, match="put one whole copy of it in place"):
            attempt()
    assert before <= {entry.key for entry in live.location.blob.list("")}


def test_what_a_restored_log_committed_is_not_deleted_by_the_audit_of_a_client_from_before(
    place: Place, live: persist.Client
) -> None:
    live.open_writer("s", SCHEMA).compare_and_append([row(2, "lost", 1)], 1, 2)
    put_copy(place)
    with place.client() as restored, restored.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(4, "theirs", 1)], 1, 2)
        with pytest.raises(HistoryRegressed):
            live.audit_orphans("s")
        with pytest.raises(HistoryRegressed):
            live.maintain("s")
        with restored.open_reader("s") as read:
            assert contents_of(read.snapshot(1, diff=True).to_arrow()) == {(1, "kept"): 1, (4, "theirs"): 1}
        check_world(restored, "s")


@pytest.mark.parametrize("ends", ["close", "kill"])
@pytest.mark.parametrize("fault", [put_copy, put_copy_and_leave_the_log, remove_log_and_shared_memory])
def test_a_client_from_before_that_closes_does_no_harm_to_what_was_put_in_place(
    place: Place, fault: Callable[[Place], None], ends: str
) -> None:
    """SQLite's last connection writes its log back and deletes the file: here, over and of what others wrote."""
    old = SqliteConsensus(place.database)
    for n in range(50):
        assert old.compare_and_set(f"old-{n}", None, bytes(3000))
    fault(place)
    program = f"""
import os
from persist_lib.location.sqlite.consensus import SqliteConsensus
new = SqliteConsensus({str(place.database)!r})
assert all(new.compare_and_set("new-%d" % n, None, bytes(3000)) for n in range(50))
{"new.close()" if ends == "close" else "os._exit(0)"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    old.close()
    late = SqliteConsensus(place.database)
    assert {f"new-{n}" for n in range(50)} <= {*late.list_keys()}
    assert not late.compare_and_set("new-7", None, b"z")
    late.close()
    with apsw.Connection(str(place.database)) as connection:
        assert connection.pragma("integrity_check") == "ok"


def test_a_commit_that_was_under_way_when_the_file_was_replaced_is_not_acknowledged(
    place: Place, live: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from persist_lib.location.sqlite import consensus as sqlite  # noqa: PLC0415

    append = sqlite._append
    replaced: list[int] = []

    def slow(session: object, *arguments: object) -> bool:
        won = append(session, *arguments)  # type: ignore[arg-type]
        if not replaced:
            replaced.append(1)
            put_copy(place)
        return won

    write = live.open_writer("s", SCHEMA)
    monkeypatch.setattr(sqlite, "_append", slow)
    with pytest.raises(HistoryRegressed, match="it is not known whether it is also in what is there now"):
        write.compare_and_append([row(3, "wrong", 1)], 1, 2)
    monkeypatch.undo()
    with place.client() as fresh, fresh.open_reader("s") as read:
        assert contents_of(read.snapshot(0, diff=True).to_arrow()) == {(1, "kept"): 1}


def test_a_reading_client_and_one_that_knows_a_table_only_by_a_fork_refuse_too(place: Place) -> None:
    with place.client() as writer, place.client(read_only=True) as reader:
        writer.open_writer("s", SCHEMA)
        assert reader.shards() == ["s"]
        put_copy(place)
        with pytest.raises(HistoryRegressed):
            reader.shards()
        if (child := os.fork()) == 0:
            try:
                writer.shards()
            except HistoryRegressed:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.leases._kept.clear()
        writer._handles.clear()


def test_another_process_refuses_when_its_database_is_moved_and_a_copy_put_in_its_place(place: Place) -> None:
    program = f"""
import sys
import persist_lib as persist
from tests.worlds import SCHEMA, row
client = persist.open({place.url!r}, config=persist.Config(timeout_s=5, lease_ms=600))
write = client.open_writer("s", SCHEMA)
print(write.compare_and_append([row(2, "lost", 1)], 1, 2).seqno, flush=True)
sys.stdin.readline()
for attempt in (lambda: write.compare_and_append([row(3, "wrong", 2)], 2, 3), lambda: client.audit_orphans("s")):
    try:
        attempt()
    except persist.HistoryRegressed:
        print("refused", flush=True)
import os
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert int(other.stdout.readline()) > 2
        put_copy(place)
        other.stdin.write("\n")
        other.stdin.flush()
        assert [line.strip() for line in other.stdout] == ["refused", "refused"]
    with place.client() as fresh:
        check_world(fresh, "s")
        assert fresh.inspect("s").state.upper.time == 1


def swap_blobs(root: Path) -> None:
    root.rename(root.with_name("old"))
    shutil.copytree(root.with_name("old"), root)


def swap_shard(root: Path) -> None:
    swap_blobs(root / "s")


def swap_writer(root: Path) -> None:
    swap_blobs(root / "s/w")


def remove_blobs(root: Path) -> None:
    root.rename(root.with_name("old"))


@pytest.mark.parametrize("fault", [swap_blobs, swap_shard, swap_writer, remove_blobs])
def test_a_blob_is_not_said_to_be_stored_where_nobody_will_find_it(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    root = tmp_path / "blob"
    blob = FileBlob(root)
    blob.set("s/w/first", b"x")
    fault(root)
    with pytest.raises(HistoryRegressed):
        blob.set("s/w/second", b"y")
    if fault in (swap_blobs, remove_blobs):
        with pytest.raises(HistoryRegressed):
            blob.delete("s/w/first")
        with pytest.raises(HistoryRegressed):
            blob.delete_many(["s/w/first"])
    blob.close()
    assert not [path for path in (root / ".tmp").rglob("*") if path.is_file() and path.name != "lock"]
    fresh = FileBlob(root)
    fresh.set("s/w/second", b"y")
    assert fresh.get("s/w/second") == b"y"
    fresh.close()


def test_a_blob_that_is_deleted_as_soon_as_it_is_there_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an audit deletes it, once its writer is retired: no reason to stop everything."""
    blob = FileBlob(tmp_path / "blob")
    link = os.link

    def link_and_lose(*arguments: Any, **options: Any) -> None:
        link(*arguments, **options)
        (tmp_path / "blob/s/part").unlink()

    monkeypatch.setattr(os, "link", link_and_lose)
    blob.set("s/part", b"x")
    monkeypatch.undo()
    assert blob.get("s/part") is None
    blob.set("s/part", b"x")
    blob.close()
