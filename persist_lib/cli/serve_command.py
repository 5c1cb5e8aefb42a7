"""`persist serve`: a shard server for the location."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from persist_lib.cli.session import Session


def serve(
    session: Session,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")] = (
        "127.0.0.1:7600"
    ),
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: clients, their tokens or hashes, and their rights.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's certificate chain, in PEM; with --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, in PEM, unencrypted.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Authorities (PEM) that clients' certificates must come from.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where /healthz, /readyz and /metrics are, over plain HTTP.")
    ] = None,
    metrics_shards: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Name the N shards with the most work in /metrics.")
    ] = 0,
    drain: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="At the end, serve calls for so long.")
    ] = 10.0,
) -> None:
    """Serve the shards of this location to other processes, until Ctrl-C or SIGTERM; a second one ends it at once.

    Clients name it instead of the database: [bold]consensus="persist://host:port"[/]. Their changes of a shard then
    meet here and are committed together, as one row, so that they do not contend. Rows of several changes need shards
    of format 4 (`persist shard upgrade`). Data never passes through the server. It may be killed at any time, and
    several may serve one location. With --token-file, it serves only clients whose token ($PERSIST_TOKEN) it knows,
    each what its rights allow. Without both that and TLS, it listens on the loopback interface only.

    It prints one line when it is ready. With --http, probes and Prometheus get pages without a token: they tell nothing
    of what is in shards, and names of shards only with --metrics-shards. gRPC's health service is on the same port as
    the shards.

    \b
    persist --location s3://bucket/data --consensus postgresql://db/persist serve --listen 127.0.0.1:7600
    persist serve --http 127.0.0.1:7601
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else strangers fill the log: a line for each bad connection
    from persist_lib.location.scheme import with_extra

    ShardServer = with_extra("persist_lib.server.shard_server", "a shard server", "server").ShardServer  # noqa: N806
    _open_more_files()
    with session.open(read_only=False) as client, _told_to_end() as ends:
        server = ShardServer(client, listen, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key,
            tls_client_ca=tls_client_ca, http=http, named_shards=metrics_shards)  # fmt: skip
        port = server.start()
        try:
            address = f"{listen.rpartition(':')[0]}:{port}"
            pages = f"{http.rpartition(':')[0]}:{server.http_port}" if http else None
            session.answer(
                {"listening": address, "http": pages},
                f"serving {client.url} on {'persists' if tls_cert else 'persist'}://{address}"
                f"{f', and http://{pages}' if pages else ''}",
            )
            while not ends.wait(1.0):
                pass
            session.note("stopping")
        finally:
            if not server.stop(drain):
                os._exit(0)  # all are answered, and what waits for the store may wait for long


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set at the first SIGTERM or Ctrl-C. The second ends the process at once: a server may be killed at any point."""
    ends = threading.Event()

    def told(number: int, _frame: object) -> None:
        if ends.is_set():
            os._exit(128 + number)
        ends.set()

    former = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ends
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _open_more_files() -> None:
    """Each connection is one, and the usual limit of 1024 is meant for programs that have few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
