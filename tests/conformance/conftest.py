"""Fixtures of the conformance suite: each implementation in turn, and a pool of processes to race in."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persist_lib.location.api import Blob, Consensus
from tests.conformance.stores import BLOBS, CONSENSUSES, BlobKind, ConsensusKind, stop_servers

PROCESSES = 8
IMPORTED_ONCE = [
    "tests.conformance.racers",
    "persist_lib.location.postgres.consensus",
    "persist_lib.location.objects.consensus",
]


@pytest.fixture(params=sorted(BLOBS))
def blob_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def blob_kind(blob_name: str) -> BlobKind:
    return BLOBS[blob_name]


@pytest.fixture
def blob_url(blob_kind: BlobKind, tmp_path: Path) -> str:
    return blob_kind.prepare(tmp_path)


@pytest.fixture
def blob(blob_kind: BlobKind, blob_url: str) -> Iterator[Blob]:
    opened = blob_kind.open(blob_url)
    yield opened
    opened.close()


@pytest.fixture(params=sorted(CONSENSUSES))
def consensus_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def consensus_kind(consensus_name: str) -> ConsensusKind:
    return CONSENSUSES[consensus_name]


@pytest.fixture
def consensus_url(consensus_kind: ConsensusKind, tmp_path: Path) -> Iterator[str]:
    yield consensus_kind.prepare(tmp_path)
    stop_servers()


@pytest.fixture
def consensus(consensus_kind: ConsensusKind, consensus_url: str) -> Iterator[Consensus]:
    opened = consensus_kind.open(consensus_url)
    yield opened
    opened.close()


def pool(count: int) -> ProcessPoolExecutor:
    """So many, forked from one that has imported all and opened nothing: to import in each of 32 is a minute."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return ProcessPoolExecutor(count, mp_context=context)


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Processes that share nothing with this one."""
    with pool(PROCESSES) as few:
        yield few


Race = Callable[[list[tuple[Any, ...]]], list[Any]]


@pytest.fixture
def race(processes: ProcessPoolExecutor, tmp_path: Path) -> Race:
    """Run `(function, *arguments)` each in a process of its own, all at the same moment; answers their results."""

    def run(calls: list[tuple[Any, ...]]) -> list[Any]:
        start = tmp_path / "start"
        start.mkdir()
        futures = [processes.submit(partial(call[0], *call[1:], str(start))) for call in calls]
        while len(list(start.iterdir())) < len(calls):
            for future in futures:
                if future.done():
                    future.result()
            time.sleep(0.005)
        (start / "go").touch()
        return [future.result(timeout=60) for future in futures]

    return run
