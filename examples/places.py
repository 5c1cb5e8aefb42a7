"""Where the demo keeps its data: in a folder, or on a PostgreSQL and an S3 server that it starts and stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

import persist_lib as persist
from persist_lib.testing.servers import (
    AzureServer,
    GcsServer,
    PostgresServer,
    S3Server,
    StoreServer,
    use_test_credentials,
)

STORES: Mapping[str, Callable[[], StoreServer]] = {"s3": S3Server, "gcs": GcsServer, "azure": AzureServer}


@dataclass(frozen=True, slots=True)
class Place:
    """A location by its URLs, its size on the Consensus, and what to print at the end."""

    url: str
    consensus: str | None
    consensus_bytes: Callable[[], int]
    farewell: tuple[str, ...]
    """What to say at the end: where to look around."""

    def open(self, *, read_only: bool = False) -> persist.Client:
        """Open a client of the location."""
        return persist.open(self.url, self.consensus, read_only=read_only)

    @property
    def urls(self) -> list[str]:
        """The URLs as arguments of another program."""
        return [self.url, *([self.consensus] if self.consensus else [])]


@contextmanager
def folder(output: Path) -> Iterator[Place]:
    """Files and SQLite in `output/data`. It deletes those of the last demo; the new ones are kept."""
    data = output / "data"
    if data.exists():
        shutil.rmtree(data)
    yield Place(
        f"file:{data.resolve()}",
        None,
        lambda: sum(path.stat().st_size for path in data.glob("consensus.sqlite*")),
        (
            f"look around: .venv/bin/persist --location file:{data} shard show orders",
            f"the same in Dagster's UI: make dev PERSIST_LOCATION=file:{data.resolve()}",
        ),
    )


@contextmanager
def servers(store: str) -> Iterator[Place]:
    """An object store and PostgreSQL on this machine, for as long as the demo runs. Their data is lost with them."""
    use_test_credentials()
    with ExitStack() as running:
        blobs, log = running.enter_context(STORES[store]()), running.enter_context(PostgresServer())
        yield Place(
            blobs.location("demo"),
            log.url,
            lambda: _table_bytes(log.url),
            ("the servers are stopped, and their data is gone",),
        )


def _table_bytes(url: str) -> int:
    query = (
        "SELECT sum(pg_total_relation_size(c.oid))::int8 FROM pg_class c WHERE relnamespace = 'persist'::regnamespace"
    )
    with psycopg.connect(url) as connection:
        return int((connection.execute(query + " AND relkind = 'r'").fetchone() or (0,))[0])


def sizes(client: persist.Client, shards: Iterable[str]) -> dict[str, list[int]]:
    """The size of each object of these shards, by kind."""
    found: dict[str, list[int]] = {"parts": [], "rollups": []}
    for shard in shards:
        for entry in client.blob.list(f"{shard}/"):
            kind = "rollups" if entry.key.startswith(f"{shard}/rollup/") else "parts"
            found[kind].append(entry.size)
    return found
