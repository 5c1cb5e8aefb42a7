"""A process that has no descriptors left: each call that needs one raises an error of the library's, and nothing that
was acknowledged is lost. Once there are some again, the same client continues.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.server import connect
from persist_lib.testing import check_world, contents_of
from tests import servers
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA

LIMIT, MOST_LEFT = 200, 12
SHARD = "s"


def _at(n: int) -> list[dict[str, Any]]:
    return [{"id": n * 1000 + i, "word": f"{n} {i}", "_time": n} for i in range(100)]


class Worker:
    """What a process does while it has so many descriptors left: appends, reads, upkeep, and another client."""

    def __init__(self, url: str, consensus: str | None) -> None:
        self.where = (url, consensus)
        self.config = persist.Config(inline_bytes=0, timeout_s=3, lease_ms=60_000)
        self.client = persist.open(*self.where, config=self.config)
        self.write, self.read = self.client.open_shard(SHARD, SCHEMA)
        self.next, self.errors = 0, list[str]()

    def append(self) -> None:
        """One more, at most once whatever the answer: what is in doubt is asked for later."""
        try:
            self.write.compare_and_append(_at(self.next), self.next, self.next + 1)
        except persist.UpperMismatch:  # one that was in doubt is there
            self.next = self.write.fetch_upper().time or 0
        else:
            self.next += 1

    def look(self) -> None:
        if upper := self.read.fetch_upper().time:
            found = self.read.snapshot(upper - 1).to_arrow().num_rows
            assert found == 100 * upper, f"{found} rows of {upper} appends"

    def source(self) -> None:
        """What a source of a table asks its server."""
        url = (self.where[1] or "").partition("?")[0]
        if url.startswith("postgresql:"):
            connect(Postgres(url=url, table="t")).close()

    def reopen(self) -> None:
        with persist.open(*self.where, config=self.config) as other, other.open_reader(SHARD) as read:
            read.fetch_upper()

    def tend(self) -> None:
        self.client.maintain(SHARD)

    def all_of_it(self) -> None:
        for call in (self.append, self.look, self.reopen, self.source, self.tend):
            try:
                call()
            except PersistError as error:
                self.errors.append(type(error).__name__)


def exhausted(url: str, consensus: str | None) -> None:
    """Do all of it with no, one, two … descriptors left, each time twice: first with connections, then without."""
    worker = Worker(url, consensus)
    worker.all_of_it()
    assert not worker.errors, worker.errors
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    held: list[int] = []
    for left in range(MOST_LEFT):
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for fd in held[len(held) - left :]:
            os.close(fd)
        del held[len(held) - left :]
        worker.all_of_it()
    during = list(worker.errors)
    for fd in held:
        os.close(fd)
    worker.errors.clear()
    worker.next = worker.write.fetch_upper().time or 0
    worker.all_of_it()
    assert not worker.errors, f"it does not continue: {worker.errors}"
    worker.client.close()
    print(json.dumps({"errors": during, "upper": worker.next}))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("door", ["file", "s3", "s3+cas", "postgresql"])
def test_each_call_without_descriptors_raises_a_typed_error_and_the_client_continues(tmp_path: Path, door: str) -> None:
    url, consensus = f"file:{tmp_path}/data", None
    if door == "postgresql":
        consensus = CONSENSUSES["postgresql"].prepare(tmp_path)
    elif door != "file":
        url = servers.s3_url(door)
        consensus = f"file:{tmp_path}/log" if door == "s3" else None
    with persist.open(url, consensus):
        pass
    program = [sys.executable, "-m", "tests.faults.test_descriptors", url, *([consensus] if consensus else [])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["errors"], "it never had too few"
    print(door, len(found["errors"]), sorted(set(found["errors"])), done.stderr[-500:])
    with persist.open(url, consensus) as client:
        check_world(client, SHARD)
        with client.open_reader(SHARD) as read:
            there = contents_of(read.snapshot(found["upper"] - 1, diff=True).to_arrow())
    assert set(there.values()) == {1}
    assert len(there) == 100 * found["upper"]


if __name__ == "__main__":
    exhausted(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
