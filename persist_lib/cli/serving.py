"""`persist serve`: a shard server for the location."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from persist_lib.cli.session import Session
from persist_lib.errors import InvalidUsage


def serve(
    session: Session,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")] = (
        "127.0.0.1:7600"
    ),
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML: clients, their tokens or hashes, and their rights."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's certificate chain, in PEM; with --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, in PEM, unencrypted.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Authorities (PEM) that clients' certificates must come from.")
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="At the end, serve calls for so long.")
    ] = 10.0,
) -> None:
    """Serve the shards of this location to other processes, until Ctrl-C or SIGTERM.

    Clients name it instead of the database: [bold]consensus="persist://host:port"[/]. Their changes of a shard then
    meet here and are committed together, as one row, so that they do not contend. Rows of several changes need shards
    of format 4 (persist upgrade). Data never passes through the server. It may be killed at any time, and several may
    serve one location. With --token-file, it serves only clients whose token ($PERSIST_TOKEN) it knows, each what its
    rights allow. Without both that and TLS, it listens on the loopback interface only.

    \b
    persist --location s3://bucket/data --consensus postgresql://db/persist serve --listen 127.0.0.1:7600
    """
    try:
        from persist_lib.server.serving import ShardServer
    except ModuleNotFoundError as error:
        raise InvalidUsage(
            f"a shard server needs the package {error.name}: pip install 'persist-lib[server]'", extra="server"
        ) from error

    ends = threading.Event()
    with session.open(read_only=False) as client:
        server = ShardServer(client, listen, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key,
            tls_client_ca=tls_client_ca)  # fmt: skip
        port = server.start()
        try:
            former = signal.signal(signal.SIGTERM, lambda *_: ends.set())
            address = f"{listen.rpartition(':')[0]}:{port}"
            session.answer(
                {"listening": address}, f"serving {client.url} on {'persists' if tls_cert else 'persist'}://{address}"
            )
            while not ends.wait(1.0):
                pass
            signal.signal(signal.SIGTERM, former)
        except KeyboardInterrupt:
            session.note("stopping")
        finally:
            server.stop(drain)
