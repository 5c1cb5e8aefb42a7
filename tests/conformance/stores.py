"""Every implementation that the conformance suite runs over, in one registry.

To add one: a `BlobKind` or `ConsensusKind` here whose `prepare` answers the URL of a fresh, empty
place. Nothing else in this folder names an implementation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import persist_lib as persist
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.open import open_location
from persist_lib.location.scheme import Opening
from persist_lib.location.wrap.around import ReadOnlyBlob, ReadOnlyConsensus
from persist_lib.location.wrap.deadline import RetryingBlob, RetryingConsensus
from persist_lib.location.wrap.metering import Meter, MeteredBlob, MeteredConsensus
from tests import servers

servers.use_test_credentials()
FEW = 3
"""A page so small that whatever lists or deletes several of anything needs more than one."""


def _blob(url: str, read_only: bool = False) -> Blob:
    return open_location(url, create=not read_only, read_only=read_only).blob


def _consensus(url: str, read_only: bool = False) -> Consensus:
    blobs = "memory:" if url.startswith(("postgres", "persist")) else url
    return open_location(blobs, url, create=not read_only, read_only=read_only).consensus


def _cloud_blob(url: str, read_only: bool = False, page: int = 1000) -> Blob:
    from persist_lib.location.objects.blob import ObjectsBlob, enter  # noqa: PLC0415 - not in every process that races

    blob = ObjectsBlob(enter(url, Opening(create=not read_only, read_only=read_only)), page=page)
    return ReadOnlyBlob(blob) if read_only else blob


def _paged_blob(url: str, read_only: bool = False) -> Blob:
    return _cloud_blob(url, read_only, page=FEW)


def _paged_consensus(url: str, read_only: bool = False) -> Consensus:
    from persist_lib.location.objects.blob import enter  # noqa: PLC0415
    from persist_lib.location.objects.consensus import ObjectsConsensus  # noqa: PLC0415

    consensus = ObjectsConsensus(enter(url, Opening(create=not read_only, read_only=read_only)), page=FEW)
    return ReadOnlyConsensus(consensus) if read_only else consensus


def _retrying_blob(url: str, read_only: bool = False) -> Blob:
    return MeteredBlob(RetryingBlob(_blob(url, read_only)), Meter())


def _retrying_consensus(url: str, read_only: bool = False) -> Consensus:
    return MeteredConsensus(RetryingConsensus(_consensus(url, read_only)), Meter())


def _memory_url(_: Path) -> str:
    return f"memory:{os.urandom(8).hex()}"


def _file_url(path: Path) -> str:
    return f"file:{path}/location"


def _postgres_url(_: Path) -> str:
    return servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")


def _pooled_url(_: Path) -> str:
    return servers.postgres_at(servers.pooler().port, persist_schema=f"t{os.urandom(8).hex()}")


_stops: list[Callable[[], object]] = []


def stop_servers() -> None:
    """Stop what `prepare` started in this process for one place, if anything."""
    while _stops:
        _stops.pop()()


def _served_url(path: Path, count: int = 2, **options: Any) -> str:
    """Shard servers of one fresh place, in this process; other processes reach them by the same URL."""
    from persist_lib.server.shard_server import ShardServer  # noqa: PLC0415 - not in every process that races

    store = persist.open(f"file:{path}/served")
    _stops.append(store.close)
    started = [ShardServer(store, "127.0.0.1:0", **options) for _ in range(count)]
    _stops.extend(partial(server.stop, 0) for server in started)
    return "persist://" + ",".join(f"127.0.0.1:{server.start()}" for server in started)


def _secured_url(path: Path) -> str:
    """The same, one server, with TLS and a token, which the client has in a file."""
    from tests.unit.server.certificates import Authority  # noqa: PLC0415

    cert, key, tokens, own = (path / name for name in ("cert.pem", "key.pem", "tokens.toml", "token"))
    authority = Authority(path / "authority", "one")
    authority.issue(cert, key)
    own.write_text(os.urandom(16).hex())
    rights = '{ "*" = ["append", "read", "maintain"] }'
    tokens.write_text(f'[clients.all]\ntoken = "{own.read_text()}"\nrights = {rights}\n')
    url = _served_url(path, 1, token_file=tokens, tls_cert=cert, tls_key=key)
    return f"{url.replace('persist:', 'persists:')}?ca={authority.ca}&credentials={own}"


def _on(scheme: str) -> Callable[[Path], str]:
    return lambda _: servers.store_url(scheme)


@dataclass(frozen=True)
class BlobKind:
    """An implementation of Blob: where to find a fresh one, and how to open it (also in another process)."""

    prepare: Callable[[Path], str]
    open: Callable[..., Blob] = _blob
    is_shared: bool = True  # among processes
    more_than_a_page: int = 1100
    refuses: str = ""  # characters of keys


@dataclass(frozen=True)
class ConsensusKind:
    """An implementation of Consensus."""

    prepare: Callable[[Path], str]
    open: Callable[..., Consensus] = _consensus
    is_shared: bool = True
    has_transactions: bool = True
    rows_to_race_for: int = 150
    more_than_a_page: int = 1100


CLOUDS = {"s3": "s3", "gcs": "gs", "azure": "az"}
BLOBS = {
    "memory": BlobKind(_memory_url, is_shared=False),
    "file": BlobKind(_file_url),
    **{
        name: BlobKind(_on(scheme), opened, is_shared, more, "\\" if scheme == "az" else "")
        for cloud, scheme in CLOUDS.items()
        for name, opened, is_shared, more in (
            (cloud, _cloud_blob, True, 1100),
            (f"{cloud}, pages of three", _paged_blob, False, 10),
        )
    },
    "retrying, metered memory": BlobKind(_memory_url, _retrying_blob, is_shared=False),
}

CONSENSUSES = {
    "memory": ConsensusKind(_memory_url, is_shared=False),
    "sqlite": ConsensusKind(_file_url),
    "postgresql": ConsensusKind(_postgres_url),
    "postgresql, pooled": ConsensusKind(_pooled_url, rows_to_race_for=40),
    **{
        name: ConsensusKind(
            _on(f"{scheme}+cas"),
            opened,
            is_shared=is_shared,
            has_transactions=False,
            rows_to_race_for=15 if scheme == "az" else 40,
            more_than_a_page=more,
        )
        for cloud, scheme in CLOUDS.items()
        for name, opened, is_shared, more in (
            (cloud, _consensus, True, 40),
            (f"{cloud}, pages of three", _paged_consensus, False, 10),
        )
    },
    "shard servers": ConsensusKind(_served_url, rows_to_race_for=40, more_than_a_page=100),
    "shard server, TLS and a token": ConsensusKind(_secured_url, rows_to_race_for=20, more_than_a_page=50),
    "retrying, metered memory": ConsensusKind(_memory_url, _retrying_consensus, is_shared=False),
}

SHARED_BLOBS = [name for name, kind in BLOBS.items() if kind.is_shared]
SHARED_CONSENSUSES = [name for name, kind in CONSENSUSES.items() if kind.is_shared]
FORKED_CONSENSUSES = [name for name in SHARED_CONSENSUSES if not name.startswith("shard server")]
"""Those that a forked child can use. Shard servers are in this process, and then it is refused (test_forked)."""
TRANSACTIONAL = [name for name, kind in CONSENSUSES.items() if kind.has_transactions]
"""For `parametrize("consensus_name", ..., indirect=True)`: a test that some cannot pass does not run over those."""
