"""The token by which a client shows a shard server who it is. It is never part of a URL, a message or a log."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.reread import Reread
from persist_lib.settings import empty

VARIABLE = "PERSIST_TOKEN"
SCHEME = "Bearer "
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{20,512}")
Metadata = tuple[tuple[str, str], ...]


def is_token(token: object) -> bool:
    """Whether this can be a token: 20 to 512 letters, digits and `-._~+/=`."""
    return isinstance(token, str) and TOKEN.fullmatch(token) is not None


class Credentials:
    """The token of a file, which is read again when it changes, or else of the environment; or none."""

    def __init__(self, path: str | None = None, environ: Mapping[str, str] | None = None) -> None:
        """Raises InvalidUsage, without the token, if the file cannot be read or what is there can be no token."""
        environ = os.environ if environ is None else environ  # noqa: TID251 - an edge: secrets are where the client is
        self._file: Reread[Metadata] | None = None
        self._metadata: Metadata = ()
        if path is not None:
            what = f"the file {path} of the option credentials"
            self._file = Reread([Path(path)], what, lambda found: _metadata(found[0].decode("latin-1").strip(), what))
        elif VARIABLE in environ:
            if not environ[VARIABLE].strip():
                raise empty(f"${VARIABLE}")
            self._metadata = _metadata(environ[VARIABLE].strip(), f"${VARIABLE}")

    def __repr__(self) -> str:
        return f"Credentials({'a token' if self.metadata() else 'none'})"

    def metadata(self) -> Metadata:
        return self._metadata if self._file is None else self._file.get()


def check_secret(addresses: list[str], credentials: Credentials) -> None:
    """Raise InvalidUsage if a token would cross a network in the clear."""
    if not credentials.metadata():
        return
    for address in addresses:
        if not is_loopback(address):
            raise InvalidUsage(
                f"a token would go to {address} unencrypted. Nothing was sent. Use TLS, as in "
                "persists://host:7600; without it, a token is sent to this machine only",
                address=address,
            )


def is_loopback(address: str) -> bool:
    """Whether `host:port` is an address of this machine's loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _metadata(token: str, what: str) -> Metadata:
    if not is_token(token):
        raise InvalidUsage(
            f"{what} must hold a token of 20 to 512 letters, digits and '-._~+/=', and nothing else; what is there is "
            "none. Nothing was sent"
        )
    return (("authorization", SCHEME + token),)


FILES = ("ca", "key", "cert")


class Tls:
    """TLS of a client, by PEM files: `ca` (without it, the authorities of gRPC), and the client's `cert`, `key`."""

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
