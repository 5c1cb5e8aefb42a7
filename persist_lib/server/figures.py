"""The figures of a server that are looked up when somebody asks: what waits, connections, files that are wrong."""

from __future__ import annotations

from pathlib import Path

from persist_lib.server.access import Access
from persist_lib.server.certificates import Certificates
from persist_lib.server.funnels import Funnels
from persist_lib.server.load import Load
from persist_lib.server.measures import Measures
from persist_lib.server.pushing import Pushing

SOCKETS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED = "01"


def figures(
    measures: Measures, funnels: Funnels, load: Load, pushing: Pushing, access: Access | None,
    certificates: Certificates | None, port: int,
) -> None:  # fmt: skip
    """Have `measures` show them."""
    tell = measures.tell
    tell("shards", "Shards whose states are in memory", funnels.known)
    tell("queued_commands", "Commands that wait for their turn, of all shards", lambda: sum(funnels.waiting()))
    tell(
        "longest_queue_commands",
        "Commands that wait, of the shard with the most",
        lambda: max(funnels.waiting(), default=0),
    )
    tell("commands_under_way", "Commands and other calls that are not answered yet", lambda: load.commands)
    tell("bytes_under_way", "Bytes of the messages of these", lambda: load.bytes)
    tell("clients_under_way", "Clients with something under way", lambda: load.clients)
    tell("subscribers", "Clients that are told new rows", pushing.clients)
    if SOCKETS[0].exists():
        tell("connections", "Connections to the port of clients", lambda: connections(port))
    if access is not None:
        tell("token_file_failures", "Versions of the token file that could not be read or were wrong", access.failures)
        tell(
            "token_file_stale",
            "1 while the token file as it is now is wrong, and the former is in force",
            access.is_stale,
        )
    if certificates is not None:
        tell(
            "certificate_failures",
            "Versions of the TLS files that could not be read or were wrong",
            certificates.failures,
        )
        tell("certificate_stale", "1 while the TLS files as they are now are wrong", certificates.is_stale)
        tell(
            "certificate_expiry_seconds", "Seconds until the first certificate of the chain expires",
            lambda: certificates.not_after() - measures.now(),
        )  # fmt: skip


def connections(port: int) -> int:
    """How many TCP connections this machine's side of `port` has. 0 if nobody can know."""
    found, here = 0, f":{port:04X}"
    for path in SOCKETS:
        try:
            lines = path.read_text().splitlines()[1:]
        except OSError:
            continue
        fields = (line.split(maxsplit=4) for line in lines)
        found += sum(one[1].endswith(here) and one[3] == ESTABLISHED for one in fields)
    return found
