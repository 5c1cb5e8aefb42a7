"""Blobs as files: durable on return, written once, safe among processes.

An object is written under a private name, fsynced, linked to its own name (linking never overwrites), and the directory
is fsynced. So after any crash an object exists with all of its bytes, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.location.api import BlobEntry, Upload
from persist_lib.location.contract import check_key, check_prefix, check_range, written_before
from persist_lib.location.directories import DurableDirectories, OpenDirectory, Staging, fsync_directory, no_room
from persist_lib.location.in_place import moved_away
from persist_lib.runtime.ambient import Runtime

TEMPORARY = ".tmp"
DELETE_THREADS = 4
DELETE_CHUNK = 64
ATTEMPTS, AT_ONCE, PAUSE_S = 40, 4, 0.001
"""How often an object is stored whose directory others remove, how often without a pause, and by what pauses grow."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that mean: there is no object of that key (its path may be a directory of other keys)."""


class FileBlob:
    """Objects as files below `root`, which is made when the first one is set. Half-written files are in `root/.tmp`."""

    def __init__(self, root: Path | str, runtime: Runtime | None = None) -> None:
        self._root = Path(root).absolute()
        self._root_text = str(self._root)
        self._runtime = runtime or Runtime()
        self._directories = DurableDirectories(self._root)
        self._staging = Staging(self._root / TEMPORARY, self._runtime.entropy)

    def get(self, key: str) -> bytes | None:
        try:
            # Joined as text, as making a path takes as long as reading a small object.
            with open(f"{self._root_text}/{check_key(key)}", "rb", buffering=0) as file:  # noqa: PTH123 - one read
                return file.readall()
        except ABSENT:
            return None
        except OSError as error:
            raise _failed(Determinate, "read", key, error) from error

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        check_range(key, start, end)
        try:
            return _read_range(self._path(key), start, end)
        except ABSENT:
            return None
        except OSError as error:
            raise _failed(Determinate, "read", key, error) from error

    def check_in_place(self) -> None:
        with _failing_as(Determinate, "look for the directory of", "the location"):
            self._directories.check_in_place()

    def set(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        view = memoryview(data).cast("B")
        for attempt in range(ATTEMPTS):
            try:
                return self._set(key, view)
            except FileNotFoundError:
                # Another process removed an empty directory on the way, or swept ours, between two of our steps.
                self._directories.forget(key.rpartition("/")[0])
                self._staging.abandon()
                if attempt >= AT_ONCE:  # several that store and delete one object each can keep one another from it
                    self._runtime.sleep(attempt * PAUSE_S * self._runtime.random.random())
        raise Determinate(
            f"blob {key} could not be stored: its directory was removed in each of {ATTEMPTS} attempts", key=key
        )

    def _set(self, key: str, data: memoryview) -> None:
        parent, _, name = key.rpartition("/")
        with self._staged(key, parent) as (directory, temporary):
            _write_durably(temporary, data, key)
            try:
                with _failing_as(Indeterminate, "link", key, self._root / parent):
                    os.link(temporary, name, dst_dir_fd=directory.fd)
            except FileExistsError:
                self._check_same(key, data)
            # Also if it existed: the process that linked it may not have come to this line.
            with _failing_as(Indeterminate, "fsync the directory of", key):
                os.fsync(directory.fd)
                self._check_found(key, temporary)

    @contextlib.contextmanager
    def _staged(self, key: str, parent: str) -> Iterator[tuple[OpenDirectory, Path]]:
        """The directory of an object, and a path for its bytes until it is there."""
        self.check_in_place()
        with _failing_as(Determinate, "store", key, self._root):
            directory, temporary = self._directories.open(parent), self._staging.fresh_path(key)
        try:
            yield directory, temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _check_found(self, key: str, temporary: Path) -> None:
        """Raise HistoryRegressed if the file just linked is not at its path: a directory on the way was replaced."""
        try:
            found = self._path(key).stat()
        except ABSENT:
            found = None
        # With one link, an equal object of another writer is there, or this one was deleted since, as an audit
        # does after its writer was retired. With two links, it must be at its path.
        linked = temporary.stat()
        if linked.st_nlink > 1 and (found is None or not os.path.samestat(found, linked)):
            raise moved_away(str(self._path(key)), f"Blob {key!r} was stored in a directory that is no longer there")

    def _check_same(self, key: str, data: memoryview) -> None:
        found = self.get(key)
        if found is None and self._path(key).is_dir():
            raise InvalidUsage(f"blob {key} cannot be stored as a file: other keys continue it with '/'", key=key)
        if found is None:
            raise FileNotFoundError(key)  # deleted since: link again
        if found != data:
            raise written_before(key, len(data), len(found))

    @property
    def address(self) -> str:
        return f"{self._root}/"

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        """Replace the file under a lock of its directory, which processes and threads wait for."""
        parent = check_key(key).rpartition("/")[0]
        with self._staged(key, parent) as (_, temporary):
            lock = os.open(self._root / parent, os.O_RDONLY | os.O_CLOEXEC)  # of its own: threads share the cached one
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (found := self.get(key)) not in (follows, data):
                    return False
                if found != data:
                    _write_durably(temporary, memoryview(data), key)
                    with _failing_as(Indeterminate, "replace", key):
                        os.replace(temporary, self._path(key))  # noqa: PTH105 - one call, as everywhere here
                        os.fsync(lock)
                return True
            finally:
                os.close(lock)

    def delete(self, key: str) -> bool:
        self.check_in_place()
        try:
            self._path(key).unlink()
        except ABSENT:
            return False
        except OSError as error:
            if self._path(key).is_dir():
                return False  # the error for unlinking a directory differs among systems
            raise _failed(Indeterminate, "delete", key, error) from error
        self._settle(key.rpartition("/")[0])
        return True

    def _settle(self, parent: str) -> None:
        """Make deletions in the directory `parent` durable, and remove it if nothing is left."""
        with _failing_as(Indeterminate, "fsync the directory", parent), contextlib.suppress(*ABSENT):
            fsync_directory(self._root / parent)
        self._directories.prune(parent)

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete several objects, with one fsync for up to 64 keys of a directory. Returns the errors by key."""
        groups: dict[str, list[str]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            groups[check_key(key).rpartition("/")[0]].append(key)
        chunks = [names[i : i + DELETE_CHUNK] for names in groups.values() for i in range(0, len(names), DELETE_CHUNK)]
        if len(chunks) <= 1:
            return self._delete_chunk(chunks[0]) if chunks else {}
        failures: dict[str, Exception] = {}
        with self._runtime.pool(DELETE_THREADS, "persist-delete") as pool:
            for failed in pool.map(self._delete_chunk, chunks):
                failures.update(failed)
        return failures

    def _delete_chunk(self, keys: list[str]) -> dict[str, Exception]:
        self.check_in_place()
        failures: dict[str, Exception] = {}
        for key in keys:
            try:
                self._path(key).unlink()
            except ABSENT:
                continue
            except OSError as error:
                failures[key] = _failed(Indeterminate, "delete", key, error)
        try:
            self._settle(keys[0].rpartition("/")[0])
        except PersistError as error:
            failures.update(dict.fromkeys(keys, error))
        return failures

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Yield every object below `prefix`, a directory at a time. Raises Determinate for an unreadable one."""
        check_prefix(prefix)
        return self._walk(prefix)

    def _walk(self, prefix: str) -> Iterator[BlobEntry]:
        pending = [prefix]
        while pending:
            below = pending.pop()
            try:
                entries = _entries(self._root / below)
            except OSError as error:
                raise _failed(Determinate, "list", below, error) from error
            for name, size in entries:
                if size is None:
                    pending.append(f"{below}{name}/")
                else:
                    yield BlobEntry(below + name, size)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield half-written files below `prefix`, and those of dead processes that do not name their key.

        A file does not name its key if an older release made it, or if its key is very long. Such a file is listed
        below any `prefix`, once its process is gone.
        """
        check_prefix(prefix)
        with _failing_as(Determinate, "list the temporary files of", prefix):
            found = [*self._staging.leftovers()]
        for left in found:
            key = left.key or f"{prefix}{TEMPORARY}/{left.path}"
            if key.startswith(prefix) and (left.key or left.is_dead):
                yield Upload(key, left.path, left.size, left.is_dead)

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        self.check_in_place()
        failed: dict[Upload, Exception] = {}
        for upload in uploads:
            try:
                self._staging.remove(upload.id)
            except OSError as error:
                failed[upload] = _failed(Determinate, "remove the temporary file of", upload.key, error)
        return failed

    def close(self) -> None:
        self._staging.close()
        self._directories.close()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)


def _write_durably(path: Path, data: memoryview, key: str) -> None:
    """Write all of `data` to the new file `path` and fsync it.

    SUBTLE: after a failed fsync the kernel forgets which pages were lost, and the next fsync of that file succeeds. So
    this file is given up, and a retry writes a new one.
    """
    with _failing_as(Determinate, "write", key, path.parent, len(data)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with _failing_as(Determinate, "write", key, path.parent, len(data)):
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
        # Some file systems check for free room only here.
        with _failing_as(Indeterminate, "fsync", key, path.parent, len(data)):
            os.fsync(fd)
    finally:
        os.close(fd)


def _read_range(path: Path, start: int, end: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = min(end, os.fstat(fd).st_size)
        pieces = []
        while start < end and (piece := os.pread(fd, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        os.close(fd)


def _entries(path: Path) -> list[tuple[str, int | None]]:
    """Return names in a directory with their sizes, None for a directory. Skips entries that vanish during the call."""
    found: list[tuple[str, int | None]] = []
    with contextlib.suppress(*ABSENT), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):
                is_directory = entry.is_dir(follow_symlinks=False)
                found.append((entry.name, None if is_directory else entry.stat(follow_symlinks=False).st_size))
    return found


@contextlib.contextmanager
def _failing_as(
    kind: type[PersistError], doing: str, key: str, path: Path | None = None, size: int | None = None
) -> Iterator[None]:
    """Raise an error of the system as `kind`, except those that the caller handles itself.

    Where a `path` needs room, lack of it is DiskFull. Nothing is visible then yet, so nothing has happened.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except NotADirectoryError as error:
        raise InvalidUsage(
            f"blob {key} cannot be stored as a file: a part of its path is an object", key=key
        ) from error
    except OSError as error:
        what = f"blob {key!r}" if size is None else f"blob {key!r} of {size:,} bytes"
        full = None if path is None else no_room(what, path, error)
        raise full or _failed(kind, doing, key, error) from error


def _failed(kind: type[PersistError], doing: str, key: str, error: OSError) -> PersistError:
    return kind(f"could not {doing} blob {key!r}: {error}", key=key, errno=error.errno)
