"""A location on a file system that is really full: small, in memory, and mounted for the test.

Event logs on a file system that is really full: what was acknowledged stays, and more room helps.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import persist_lib as persist
from persist_lib.errors import DiskFull, Indeterminate, NotSent
from persist_lib.testing import check_world
from tests.eventlogs import contents, store_of
from tests.worlds import SCHEMA, row


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs the right to")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("inline_bytes", [0, 16 * 1024])
def test_appends_to_a_full_disk_fail_at_once_and_go_on_when_there_is_room(small_disk: Path, inline_bytes: int) -> None:
    with persist.open(f"file:{small_disk}/data", config=persist.Config(inline_bytes=inline_bytes)) as client:
        write = client.open_writer("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        filler = small_disk / "filler"
        filling = filler.open("wb", buffering=0)
        while True:
            try:
                filling.write(bytes(4096))
            except OSError:
                break
        filling.close()
        uppers = range(1, 1000)

        def append_on() -> None:
            for upper in uppers:
                write.compare_and_append([row(2, os.urandom(4000).hex(), upper)], upper, upper + 1)

        started = time.monotonic()
        with pytest.raises(DiskFull) as caught:
            append_on()
        assert time.monotonic() - started < 20
        assert cast("int", caught.value.free) < 100_000
        assert str(caught.value.path).startswith(str(small_disk))
        upper = write.upper.time or 0
        filler.unlink()
        write.compare_and_append([row(3, "w", upper)], upper, upper + 1)
        check_world(client, "s")
        temporary = [path for path in (small_disk / "data/blob/.tmp").rglob("*") if path.is_file()]
        assert {path.name for path in temporary} <= {"lock"}


__all__ = ["small_disk"]


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb", "rock"])
def test_a_full_disk_loses_nothing_that_was_acknowledged(kind: str, small_disk: Path) -> None:
    store = store_of(kind, small_disk)
    acknowledged: list[bytes] = []
    with store.writer() as writer:
        writer.write(1, b"one").result(60)
        acknowledged.append(b"one")
        failure: BaseException | None = None
        while failure is None:
            payload = os.urandom(100_000)
            future = writer.write(writer.accepted + 1, payload)
            if (failure := future.exception(60)) is None:
                acknowledged.append(payload)
        # LMDB says that there was no room, or that a write was short; RocksDB does not say what it wrote.
        assert isinstance(failure, DiskFull if kind in ("disk", "sqlt") else (DiskFull, Indeterminate)), failure
        with pytest.raises(NotSent, match="earlier write failed"):
            writer.write(writer.accepted + 1, b"")
    found = contents(store) if kind != "rock" else acknowledged  # RocksDB opens nothing without room for its own log
    assert found == acknowledged
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    with store.writer() as writer:
        assert len(acknowledged) <= writer.last <= len(acknowledged) + (kind == "rock")
        writer.write(writer.last + 1, b"afterwards").result(60)
    assert contents(store)[: len(acknowledged)] == acknowledged
    assert contents(store)[-1] == b"afterwards"
