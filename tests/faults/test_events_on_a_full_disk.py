"""Event logs on a file system that is really full: what was acknowledged stays, and more room helps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from persist_lib.errors import DiskFull, Indeterminate, NotSent
from tests.eventlogs import contents, store_of
from tests.faults.test_full_disk import small_disk

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
