"""A location on files, servers for it, and clients that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

import persist_lib as persist
from persist_lib.server.shard_server import ShardServer

CONFIG = persist.Config(format=4, timeout_s=20)
S = TypeVar("S", bound="Site")


class Site:
    """All are closed at the end: `made` are clients and connections."""

    def __init__(self, folder: Path, consensus: str | None = None, config: persist.Config = CONFIG) -> None:
        self.folder, self.url, self.config = folder, f"file:{folder}/location", config
        self.store = persist.open(self.url, consensus, config=config)
        self.servers: list[ShardServer] = []
        self.made: list[Any] = []

    @property
    def server(self) -> Any:
        """The one that was started last."""
        return self.servers[-1]

    def serve(self, listen: str = "127.0.0.1:0", **options: Any) -> ShardServer:
        server = ShardServer(self.store, listen, **options)
        server.start()
        self.servers.append(server)
        return server

    def stop(self, seconds: float = 0.1) -> None:
        self.servers[-1].stop(seconds)
        del self.servers[-1]

    def served(self, *servers: ShardServer) -> str:
        return "persist://" + ",".join(f"127.0.0.1:{server.port}" for server in servers or self.servers)

    def client(self, *servers: ShardServer, **options: Any) -> persist.Client:
        self.made.append(persist.open(self.url, self.served(*servers), **{"config": self.config, **options}))
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            one.close()
        while self.servers:
            self.stop()
        self.store.close()


class Served(Site):
    """With a server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.serve()


def site_of(kind: type[S]) -> Any:
    """The fixture that makes such a site."""

    @pytest.fixture
    def site(tmp_path: Path) -> Iterator[S]:
        with closing(kind(tmp_path)) as made:
            yield made

    return site
