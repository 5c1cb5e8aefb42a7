"""TLS of a client: which authorities it believes, and its own certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.reread import Reread

FILES = ("ca", "key", "cert")


class Tls:
    """Paths of PEM files: `ca` (without it, the authorities that come with gRPC), and the client's `cert`, `key`."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Raises InvalidUsage if a file cannot be read, or for a certificate without its key."""
        self._names = [name for name in FILES if name in files]
        if ("cert" in files) != ("key" in files):
            raise InvalidUsage("the options cert and key of a shard server's URL go together: only one is there")
        paths = [Path(files[name]) for name in self._names]
        self._files = Reread(paths, f"the TLS files {', '.join(map(str, paths))}", self._made)

    def credentials(self) -> grpc.ChannelCredentials:
        """What a connection is made with; another value once the files have changed."""
        return self._files.get()

    def _made(self, found: Sequence[bytes]) -> grpc.ChannelCredentials:
        given = dict(zip(self._names, found, strict=True))
        return grpc.ssl_channel_credentials(*map(given.get, FILES))
