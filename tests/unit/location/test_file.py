"""What a Blob of files does with the system calls that can fail it; and identities of files, those of `os.stat`."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persist_lib.errors import Determinate, DiskFull, Indeterminate, InvalidUsage
from persist_lib.location.file.blob import FileBlob
from persist_lib.location.in_place import by_stat, identity_of
from persist_lib.location.wrap.deadline import RetryingBlob


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "blob"


@pytest.fixture
def blob(root: Path) -> Iterator[FileBlob]:
    opened = FileBlob(root)
    yield opened
    opened.close()


class Calls:
    """The system calls that decide about durability, in order, with the path that each was about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        self.fail: dict[str, int] = {}
        fsync, link, write = os.fsync, os.link, os.write

        def traced_fsync(fd: int) -> None:
            self.note("fsync", str(Path(f"/proc/self/fd/{fd}").readlink()))
            fsync(fd)

        def traced_link(source: Any, target: Any, **options: Any) -> None:
            self.note("link", str(target))
            link(source, target, **options)

        def traced_write(fd: int, data: Any) -> int:
            self.note("write", str(Path(f"/proc/self/fd/{fd}").readlink()))
            return write(fd, data)

        monkeypatch.setattr(os, "fsync", traced_fsync)
        monkeypatch.setattr(os, "link", traced_link)
        monkeypatch.setattr(os, "write", traced_write)

    def note(self, name: str, path: str) -> None:
        self.made.append((name, path))
        for pattern, code in self.fail.items():
            if pattern in f"{name} {path}":
                raise OSError(code, os.strerror(code))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def temporary_files(root: Path) -> list[Path]:
    return [p for p in (root / ".tmp").rglob("*") if p.is_file() and p.name != "lock"]


def test_an_object_is_durable_before_its_name_and_its_name_before_the_answer(
    blob: FileBlob, root: Path, calls: Calls
) -> None:
    blob.set("s/w/first", b"x")
    calls.made.clear()
    blob.set("s/w/part", b"data")
    (write, _), (fsync, temporary), (link, name), (last, directory) = calls.made
    assert (write, fsync, link, last) == ("write", "fsync", "link", "fsync")
    assert temporary.startswith(str(root / ".tmp"))
    assert name == "part"
    assert directory == str(root / "s/w")


def test_every_new_directory_is_durable_up_to_one_that_was_there(blob: FileBlob, root: Path, calls: Calls) -> None:
    blob.set("s/w/part", b"data")
    synced = {path for name, path in calls.made if name == "fsync"}
    assert {str(root / "s/w"), str(root / "s"), str(root), str(root.parent), str(root.parent.parent)} <= synced


def test_a_directory_that_someone_else_made_is_synced_too_as_he_may_not_have_come_to_it(
    blob: FileBlob, root: Path, calls: Calls
) -> None:
    (root / "s/w").mkdir(parents=True)
    blob.set("s/w/part", b"data")
    assert {("fsync", str(root / "s")), ("fsync", str(root))} <= set(calls.made)


def test_short_writes_are_gone_on_with(blob: FileBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    blob.set("s/part", bytes(range(100)))
    monkeypatch.undo()
    assert blob.get("s/part") == bytes(range(100))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("where", ["write", "fsync {root}/.tmp", "link"])
def test_a_full_disk_leaves_nothing_and_is_not_tried_again(
    blob: FileBlob, root: Path, calls: Calls, code: int, where: str
) -> None:
    calls.fail[where.format(root=root)] = code
    started = time.monotonic()
    with pytest.raises(DiskFull, match=r"bytes are free there\. Nothing was stored") as caught:
        RetryingBlob(blob, timeout_s=30).set("s/part", b"data")
    assert time.monotonic() - started < 20
    assert isinstance(caught.value, Determinate)
    assert (caught.value.errno, str(caught.value.path).startswith(str(root))) == (code, True)
    assert blob.get("s/part") is None
    assert temporary_files(root) == []


def test_a_full_disk_that_is_told_after_the_link_leaves_a_doubt(blob: FileBlob, root: Path, calls: Calls) -> None:
    blob.set("s/other", b"x")
    calls.fail[f"fsync {root}/s"] = errno.ENOSPC
    with pytest.raises(Indeterminate):
        blob.set("s/part", b"data")


def test_a_file_that_may_not_become_so_large_is_a_full_disk(root: Path) -> None:
    """By a real limit, in a process of its own."""
    if (child := os.fork()) == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            blob = FileBlob(root)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            try:
                blob.set("s/part", bytes(100_000))
            except DiskFull:
                blob.set("s/small", bytes(5_000))
                os._exit(len(temporary_files(root)))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [entry.key for entry in FileBlob(root).list("")] == ["s/small"]


def test_a_failed_fsync_is_indeterminate_and_a_retry_takes_another_file(
    blob: FileBlob, root: Path, calls: Calls
) -> None:
    calls.fail["fsync " + str(root / ".tmp")] = errno.EIO
    with pytest.raises(Indeterminate):
        blob.set("s/part", b"data")
    assert blob.get("s/part") is None
    assert temporary_files(root) == []
    failed = next(path for name, path in calls.made if name == "fsync" and ".tmp" in path)
    calls.fail.clear()
    calls.made.clear()
    blob.set("s/part", b"data")
    assert failed not in {path for _, path in calls.made}
    assert blob.get("s/part") == b"data"


def test_a_failed_fsync_of_the_directory_is_indeterminate_and_a_retry_syncs_it_again(
    blob: FileBlob, root: Path, calls: Calls
) -> None:
    blob.set("s/other", b"x")
    calls.fail[f"fsync {root}/s"] = errno.EIO
    with pytest.raises(Indeterminate):
        blob.set("s/part", b"data")
    calls.fail.clear()
    calls.made.clear()
    blob.set("s/part", b"data")
    assert calls.made[-1] == ("fsync", str(root / "s"))


def test_a_delete_is_durable(blob: FileBlob, root: Path, calls: Calls) -> None:
    for n in range(10):
        blob.set(f"s/w/{n}", b"x")
    calls.made.clear()
    assert blob.delete("s/w/0")
    assert calls.made == [("fsync", str(root / "s/w"))]
    calls.made.clear()
    assert blob.delete_many([f"s/w/{n}" for n in range(1, 10)]) == {}
    assert calls.made == [("fsync", str(root / "s/w"))]


def test_what_cannot_be_deleted_is_named_and_the_rest_is_gone(blob: FileBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(100):
        blob.set(f"s/w{n % 2}/{n}", b"x")
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.name == "7":
            raise OSError(errno.EIO, "broken")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    failures = blob.delete_many([f"s/w{n % 2}/{n}" for n in range(100)])
    assert list(failures) == ["s/w1/7"]
    assert isinstance(failures["s/w1/7"], Indeterminate)
    assert [entry.key for entry in blob.list("")] == ["s/w1/7"]


def test_empty_directories_go_with_their_last_object(blob: FileBlob, root: Path) -> None:
    blob.set("s/w1/part", b"x")
    blob.set("s/w2/part", b"x")
    blob.delete("s/w1/part")
    assert sorted(p.name for p in (root / "s").iterdir()) == ["w2"]
    blob.delete_many(["s/w2/part"])
    assert sorted(p.name for p in root.iterdir()) == [".tmp"]


def test_a_directory_removed_by_another_process_is_made_again_durably(blob: FileBlob, root: Path, calls: Calls) -> None:
    blob.set("s/w/part", b"x")
    FileBlob(root).delete("s/w/part")
    calls.made.clear()
    blob.set("s/w/next", b"x")
    assert {("fsync", str(root / "s")), ("fsync", str(root))} <= set(calls.made)
    assert blob.get("s/w/next") == b"x"


@pytest.mark.parametrize("path", ["s/w", "s", ".tmp", "s/deeper/w"])
def test_a_directory_that_is_removed_while_it_is_made_is_made_again(
    blob: FileBlob, root: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Another process prunes it between the answer that it is there and the look at what it is."""
    raced: list[object] = []
    mkdir = os.mkdir

    def racing(name: Any, *arguments: Any, **options: Any) -> None:
        if Path(name) == root / path and not raced:
            raced.append(name)
            raise FileExistsError(errno.EEXIST, "File exists", str(name))
        mkdir(name, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", racing)
    blob.set("s/deeper/w/part", b"x")
    blob.set("s/w/part", b"x")
    assert raced
    assert blob.get("s/w/part") == b"x"


@pytest.mark.slow
def test_processes_that_set_and_delete_in_one_directory_meet_no_error_of_their_own_making(root: Path) -> None:
    children = []
    for name in range(4):
        if (child := os.fork()) == 0:
            failed = 1
            try:
                blob = FileBlob(root)
                for n in range(400):
                    blob.set(f"s/w/{name}-{n}", b"x")
                    blob.delete(f"s/w/{name}-{n}")
                failed = 0
            finally:
                os._exit(failed)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


def test_a_key_that_continues_an_object_or_is_continued_by_one_is_refused(blob: FileBlob) -> None:
    blob.set("s/a", b"x")
    with pytest.raises(InvalidUsage):
        blob.set("s/a/b", b"x")
    blob.set("s/d/e", b"x")
    with pytest.raises(InvalidUsage):
        blob.set("s/d", b"x")


def test_an_unreadable_object_or_directory_is_an_error_and_not_missing(
    blob: FileBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob.set("s/part", b"x")

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "scandir", broken)
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(Determinate):
        list(blob.list("s/"))
    with pytest.raises(Determinate):
        blob.get_range("s/part", 0, 1)


def leave_half_written(root: Path, *, die: bool, blob: FileBlob | None = None) -> int:
    """A child process that stops in the middle of a set, and is dead afterwards or not; answers its id."""
    if (child := os.fork()) == 0:
        try:
            blob = blob or FileBlob(root)
            blob.set("child/first", b"x")

            def stop(_: int) -> None:
                (root / f"stopped-{os.getpid()}").touch()
                if die:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

            os.fsync = stop  # type: ignore[assignment]
            blob.set("child/half", b"half of it")
        finally:
            os._exit(1)
    while not (root / f"stopped-{child}").exists():
        time.sleep(0.002)
    return child


def sweep(blob: FileBlob) -> int:
    """Remove what the audit would: half-written files of dead processes."""
    left = [upload for upload in blob.uploads("") if upload.is_dead]
    assert blob.abort_uploads(left) == {}
    return len(left)


def test_sweeping_removes_what_dead_processes_left_and_nothing_of_the_living(blob: FileBlob, root: Path) -> None:
    blob.set("mine", b"x")
    dead, alive = leave_half_written(root, die=True), leave_half_written(root, die=False)
    os.waitpid(dead, 0)
    try:
        assert len(temporary_files(root)) == 2
        assert {entry.key for entry in blob.list("")} == {"mine", "child/first", f"stopped-{dead}", f"stopped-{alive}"}
        assert sweep(blob) == 1
        (left,) = temporary_files(root)
        assert left.parent.name.startswith(f"{alive}-")
        blob.set("still works", b"x")
    finally:
        os.kill(alive, signal.SIGKILL)
        os.waitpid(alive, 0)
    assert sweep(blob) == 1
    assert temporary_files(root) == []
    assert sweep(blob) == 0


def test_half_written_files_are_listed_by_key_and_those_of_the_dead_are_told(blob: FileBlob, root: Path) -> None:
    dead, alive = leave_half_written(root, die=True), leave_half_written(root, die=False)
    os.waitpid(dead, 0)
    try:
        found = {upload.id.split("-")[0]: upload for upload in blob.uploads("")}
        assert {pid: (upload.key, upload.size, upload.is_dead) for pid, upload in found.items()} == {
            str(dead): ("child/half", 10, True), str(alive): ("child/half", 10, False),
        }  # fmt: skip
        assert [*blob.uploads("other/")] == []
        assert blob.abort_uploads([found[str(dead)]]) == {}
        assert [upload.id for upload in blob.uploads("")] == [found[str(alive)].id]
        assert not list((root / ".tmp").glob(f"{dead}-*")), "nothing else of it was left"
    finally:
        os.kill(alive, signal.SIGKILL)
        os.waitpid(alive, 0)


def test_what_a_release_before_left_is_found_by_its_lock_below_any_prefix(blob: FileBlob, root: Path) -> None:
    """Its names said nothing: a number each."""
    folder = root / ".tmp/123-00000000deadbeef"
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(bytes(1000))
    assert [*blob.uploads("s/")] == [], "no lock yet: its process may just be starting"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [*blob.uploads("s/")] == []
    (found,) = blob.uploads("s/")
    assert (found.size, found.is_dead) == (1000, True)
    blob.set("s/part", b"x")
    assert blob.abort_uploads([found]) == {}
    assert not folder.exists()
    assert blob.get("s/part") == b"x"


@pytest.mark.parametrize("key", ["s/ä ö/%2F=x", "s/" + "k" * 254, "s/" + "ü" * 120])
def test_a_temporary_file_of_any_key_can_be_made_and_names_its_key_if_it_is_not_too_long(
    blob: FileBlob, calls: Calls, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    calls.fail["link"] = errno.EIO
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _fd: seen.extend(upload.key for upload in blob.uploads("")))
    with pytest.raises(Indeterminate):
        blob.set(key, b"x")
    assert set(seen) == ({key} if len(key) < 80 else set())


def test_a_forked_child_has_a_temporary_directory_of_its_own(blob: FileBlob, root: Path) -> None:
    blob.set("mine", b"x")
    dead = leave_half_written(root, die=True, blob=blob)
    os.waitpid(dead, 0)
    (left,) = temporary_files(root)
    assert left.parent.name.startswith(f"{dead}-")
    assert sweep(blob) == 1, "known to be dead although its parent is alive"
    blob.set("mine too", b"x")


def test_a_set_whose_temporary_directory_is_swept_away_under_it_starts_anew(blob: FileBlob, root: Path) -> None:
    blob.set("first", b"x")
    for directory in (root / ".tmp").iterdir():
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
    blob.set("second", b"y")
    assert blob.get("second") == b"y"


def test_opening_and_reading_makes_no_directory(root: Path) -> None:
    blob = FileBlob(root)
    assert blob.get("s/x") is None
    assert list(blob.list("")) == []
    assert not blob.delete("s/x")
    assert blob.delete_many(["s/x", "t/x"]) == {}
    assert [*blob.uploads("")] == []
    blob.close()
    assert not root.exists()


def test_no_file_descriptor_is_left_open(root: Path) -> None:
    gc.collect()  # or others close what they left in the meantime
    before = len([*Path("/proc/self/fd").iterdir()])
    blob = FileBlob(root)
    for n in range(300):
        blob.set(f"s/{n}/x", b"x")
        assert blob.get_range(f"s/{n}/x", 0, 1) == b"x"
    blob.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("name", ["plain", "ä file with spaces", "n" * 200])
def test_it_is_what_the_system_says_of_the_path(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    path.write_bytes(b"1")
    other.write_bytes(b"2")
    os.link(path, tmp_path / "same")
    (tmp_path / "link").symlink_to(path)
    assert identity_of(str(path)) == by_stat(str(path)) == (path.stat().st_dev, path.stat().st_ino)
    assert identity_of(str(path)) == identity_of(str(tmp_path / "same")) == identity_of(str(tmp_path / "link"))
    assert identity_of(str(path)) != identity_of(str(other))
    assert identity_of("/proc/self/stat") == by_stat("/proc/self/stat")  # of another device
    assert identity_of(str(tmp_path)) == by_stat(str(tmp_path))


@pytest.mark.parametrize("identity", [identity_of, by_stat])
def test_a_path_that_leads_nowhere_is_an_error_of_its_kind(identity: object, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        identity(str(tmp_path / "gone"))  # type: ignore[operator]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        identity(str(tmp_path / "file" / "in it"))  # type: ignore[operator]
