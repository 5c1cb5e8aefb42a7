"""The process that keeps a client's leases up when its threads starve. Started by `persist_lib.shard.leases`.

    python -P -m persist_lib.shard.heartbeat PARENT_PID

Its standard input is lines of JSON: first `[blob URL, consensus URL, lease_ms]`, then `["keep" | "drop", shard, id]`.
The URLs are not arguments, as every user may read the arguments of a process, and a URL may hold a password. The
process ends with its standard input, or when its parent is gone (a fork of the parent may hold the pipe open). It
renews only the leases that the parent has not renewed for half of their time. A location that is not there is opened
when it is there again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys

from persist_lib.config import Config
from persist_lib.errors import PersistError
from persist_lib.ids import ShardId
from persist_lib.location.stack import Stack, open_stack
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import RESCUE_BELOW, renew

log = logging.getLogger("persist.leases")
LONGEST_TRY_S = 20.0
"""How long one operation is tried again at most. The process does not read its input or check its parent then."""


def main(parent: int, source: int = 0) -> None:
    """Serve until the descriptor `source` or the parent process ends.

    The caller passes the parent's process id, as the parent may be gone before this process can ask for it.
    """
    first, _, pending = _read_line(source)
    if not first:
        return
    url, consensus_url, lease_ms = json.loads(first)
    config, runtime = Config(lease_ms=lease_ms, timeout_s=min(lease_ms / 2000, LONGEST_TRY_S)), Runtime()
    stack: Stack | None = None
    machines: dict[str, Machine] = {}
    kept: dict[str, set[str]] = {}
    while os.getppid() == parent:
        if select.select([source], [], [], min(lease_ms / 8000, 5.0))[0]:
            if not (data := os.read(source, 65536)):
                return
            pending += data
        *lines, pending = pending.split(b"\n")  # some lines may have come together with the first
        for line in lines:
            verb, shard, id_ = json.loads(line)
            (kept.setdefault(shard, set()).add if verb == "keep" else kept.get(shard, set()).discard)(id_)
        stack = stack or _opened(url, consensus_url, config, runtime)
        for shard, ids in kept.items():
            if stack and ids:
                if shard not in machines:
                    machines[shard] = Machine(ShardId(shard), stack.blob, stack.consensus, config, runtime)
                renew(machines[shard], tuple(sorted(ids)), lease_ms, RESCUE_BELOW)


def _opened(url: str, consensus_url: str | None, config: Config, runtime: Runtime) -> Stack | None:
    """The location, or None while it cannot be opened, which is logged: the parent may have begun just before."""
    try:
        return open_stack(url, consensus_url, config, runtime)
    except PersistError as error:
        log.warning("could not open the location to renew leases: %s", error)
        return None


def _read_line(source: int) -> tuple[bytes, bytes, bytes]:
    """The first line of the input, and what was read of the next; empty if the input ended before that."""
    data = b""
    while b"\n" not in data:
        if not (more := os.read(source, 65536)):
            return b"", b"", b""
        data += more
    return data.partition(b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
