"""What tests of ingests share: files with known rows and bad lines, a location that kills at a request, and what must
be so.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import persist_lib as persist
from jobs.ingesting.engines import Local
from jobs.ingesting.running import Ingest, Outcome, ingest
from jobs.ingesting.settings import Settings
from jobs.ingesting.work import Done, Work, run_task
from jobs.stop import Stop
from persist_lib.location import open_location
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import check_world
from tests.worlds import around_both

T = TypeVar("T")
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"name": "string"})
JSONL = Settings("jsonl", chunk_bytes=300, group_bytes=700)


class Killed(BaseException):
    """The process ends here."""


class Kills:
    """Ends the process at the n-th request that changes something: before it happens, or after."""

    def __init__(self, at: int, *, happens: bool) -> None:
        self.at, self.happens, self.seen = at, happens, 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.kind not in ("set", "compare_and_set", "compare_and_set_many", "delete", "delete_many"):
            if self.seen >= self.at:
                raise Killed
            return call()
        self.seen += 1
        if self.seen == self.at and self.happens:
            call()
        if self.seen >= self.at:
            raise Killed
        return call()


def client_of(url: str, kills: Kills | None = None, config: persist.Config | None = None) -> persist.Client:
    location = open_location(url, create=True)
    if kills is not None:
        location = around_both(location, kills.around)
    runtime = persist.Runtime(background=False)
    return persist.open(location, config=config or persist.Config(inline_bytes=0, part_bytes=65536), runtime=runtime)


class Reads:
    """Runs tasks, and counts how often each chunk was read."""

    def __init__(self) -> None:
        self.chunks: Counter[tuple[str, int]] = Counter()

    def __call__(self, work: Work, write: Any) -> Done:
        for chunk in work.task.chunks:
            self.chunks[work.files[chunk.file].path, chunk.start] += 1
        return run_task(work, write)


def run(client: persist.Client, job: Ingest, reads: Reads | None = None) -> Outcome:
    stop = Stop()
    return ingest(client, job, Local(stop, 1, reads or run_task), stop)


def write_files(
    folder: Path, files: int = 3, lines: int = 40, first: int = 0
) -> tuple[Counter[Any], set[tuple[str, int]]]:
    """Files of JSON lines, one of them packed; returns the rows and the bad lines that are in them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: Counter[Any] = Counter()
    bad = set()
    for number in range(first, first + files):
        path = folder / (f"{number}.jsonl.gz" if number % 3 == 1 else f"{number}.jsonl")
        texts = []
        for line in range(lines):
            if line % 7 == 3:
                texts.append(f'{{"id": "{line}"')
                bad.add((str(path), line + 1))
            else:
                texts.append(json.dumps({"id": line % 10, "name": f"{number}-{line}"}))
                rows[line % 10, f"{number}-{line}"] += 1
        data = "\n".join(texts).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return rows, bad


def contents(client: persist.Client, shard: str) -> list[dict[str, Any]]:
    with client.open_reader(shard) as reader:
        upper = reader.fetch_upper().time or 0
        return [] if not upper else reader.snapshot(upper - 1, diff=True).to_pylist()


def check(client: persist.Client, shard: str, rows: Counter[Any], bad: set[tuple[str, int]]) -> None:
    """The shard has exactly the rows, and the side shard each bad line once."""
    found = {(row["id"], row["name"]): row["_diff"] for row in contents(client, shard)}
    assert found == dict(rows)
    side = [((row["file"], row["line"]), row["_diff"]) for row in contents(client, f"{shard}_bad")]
    assert sorted(side) == sorted((one, 1) for one in bad)
    groups = [row for row in contents(client, f"{shard}_files") if row["kind"] == "group"]
    assert sum(row["written"] for row in groups) == sum(rows.values())
    assert sum(row["bad"] for row in groups) == len(bad)
    for name in (shard, f"{shard}_bad", f"{shard}_files"):
        check_world(client, name)
