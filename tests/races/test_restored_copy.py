"""An older copy of Consensus is restored under live clients, and others bring it back to where those had seen it.

The seqno is the same then, the rows are not. Whatever a live client still knows, it must not be acknowledged on top of
rows that it has never seen: nobody could load the log afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import apsw
import psycopg
import pytest

import persist_lib as persist
from persist_lib.errors import HistoryRegressed
from persist_lib.ids import SeqNo
from persist_lib.location.memory.location import MemoryConsensus
from persist_lib.location.objects.blob import enter
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.location.scheme import Opening
from persist_lib.testing import check_world
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, row

KEPT = SeqNo(2)
"""Created and one writer registered: what the older copy holds."""


class Place(NamedTuple):
    """A location, and how to make its log what an older copy of it holds."""

    blob: str
    consensus: str
    rewind: Callable[[], None]


def rewind_memory(url: str) -> None:
    with persist.open(url, create=False).location as location:
        assert isinstance(location.consensus, MemoryConsensus)
        location.consensus._logs["s"] = location.consensus.scan("s", SeqNo(1), KEPT)


def rewind_sqlite(url: str) -> None:
    with apsw.Connection(f"{url.removeprefix('file:')}/consensus.sqlite") as connection:
        connection.execute("DELETE FROM consensus WHERE key = 's' AND seqno > ?", (KEPT,))


def rewind_postgres(url: str) -> None:
    base, _, schema = url.replace("?", "&").partition("&persist_schema=")
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"DELETE FROM {schema}.shard_log WHERE seqno > {KEPT}".encode())
        connection.execute(
            f"UPDATE {schema}.shard_head SET seqno = {KEPT}, start = (SELECT substring(data FROM 1 FOR 32)"
            f" FROM {schema}.shard_log WHERE seqno = {KEPT})".encode()
        )


def rewind_s3(url: str) -> None:
    consensus = ObjectsConsensus(enter(url, Opening()))
    for found in consensus.scan("s", SeqNo(KEPT + 1), 99):
        consensus._objects.clients.get().delete_object(**consensus._objects.at(consensus._row("s", found.seqno)))
    consensus.close()


REWINDS = {"memory": rewind_memory, "sqlite": rewind_sqlite, "postgresql": rewind_postgres, "s3": rewind_s3}


@pytest.fixture(params=sorted(REWINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Place:
    url = CONSENSUSES[kind].prepare(tmp_path)
    blob = f"file:{tmp_path}/blobs" if kind == "postgresql" else url
    return Place(blob, url, lambda: REWINDS[kind](url))


@pytest.fixture
def opened(place: Place) -> Iterator[Callable[[], persist.Client]]:
    clients: list[persist.Client] = []

    def make() -> persist.Client:
        clients.append(persist.open(place.blob, place.consensus, config=persist.Config(timeout_s=5)))
        return clients[-1]

    yield make
    for client in clients:
        client.leases._kept.clear()  # who has seen another history cannot retire what it registered there
        client._handles.clear()
        client.close()


def bring_back(client: persist.Client, until: SeqNo) -> persist.WriteHandle:
    """Append, as somebody who knows only the restored copy, until the log is as long as it was."""
    write = client.open_writer("s", SCHEMA)
    while client.inspect("s").seqno < until:
        upper = write.upper.time or 0
        write.compare_and_append([row(1, "restored", upper)], upper, upper + 1)
    assert client.inspect("s").seqno == until
    return write


def test_a_live_client_is_not_acknowledged_on_rows_that_it_never_saw(
    place: Place, opened: Callable[[], persist.Client]
) -> None:
    live, others = opened(), opened()
    write = live.open_writer("s", SCHEMA)
    for time in range(4):
        write.compare_and_append([row(1, "lost", time)], time, time + 1)
    seen = live.machine("s").version
    place.rewind()
    theirs = bring_back(others, seen.seqno)
    if isinstance(consensus := live.location.consensus, ObjectsConsensus):  # it looks again after a while
        consensus._seen["s"] = consensus._seen["s"]._replace(read_at=-1e9)
    with pytest.raises(HistoryRegressed, match=str(seen.digest.hex())):
        write.compare_and_append([row(1, "wrong", 4)], 4, 5)
    with pytest.raises(HistoryRegressed):
        live.open_reader("s")
    upper = theirs.upper.time or 0
    theirs.compare_and_append([row(2, "on", upper)], upper, upper + 1)
    check_world(opened(), "s")
