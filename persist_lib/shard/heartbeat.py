"""The process that keeps a client's leases up when its threads starve. Started by `persist_lib.shard.leases`.

    python -P -m persist_lib.shard.heartbeat PARENT_PID

Its standard input is lines of JSON: first `[blob URL, consensus URL, lease_ms]`, as anybody may read the arguments of a
process and a URL may hold a password; then `["keep" | "drop", shard, id]`. It ends with its standard input, or when its
parent is gone (a fork of the parent may hold the pipe open). It renews only what the parent has left undone for half of
a lease.
"""

from __future__ import annotations

import json
import os
import select
import sys

from persist_lib.config import Config
from persist_lib.ids import ShardId
from persist_lib.location import open_location
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import RESCUE_BELOW, renew


def main(parent: int) -> None:
    """Serve until standard input ends, or the parent does. Its id is told: it may be gone before we could look."""
    first, _, pending = _read_line()
    if not first:
        return
    url, consensus_url, lease_ms = json.loads(first)
    location = open_location(url, consensus_url)
    config, runtime = Config(lease_ms=lease_ms), Runtime()
    machines: dict[str, Machine] = {}
    kept: dict[str, set[str]] = {}
    while os.getppid() == parent:
        if select.select([0], [], [], min(lease_ms / 8000, 5.0))[0]:
            if not (data := os.read(0, 65536)):
                return
            pending += data
        *lines, pending = pending.split(b"\n")  # some may have come with the first
        for line in lines:
            verb, shard, id_ = json.loads(line)
            (kept.setdefault(shard, set()).add if verb == "keep" else kept.get(shard, set()).discard)(id_)
        for shard, ids in kept.items():
            if ids:
                if shard not in machines:
                    machines[shard] = Machine(ShardId(shard), location.blob, location.consensus, config, runtime)
                renew(machines[shard], tuple(sorted(ids)), lease_ms, RESCUE_BELOW)


def _read_line() -> tuple[bytes, bytes, bytes]:
    """The first line of standard input, and what was read of the next; nothing when it ended before."""
    data = b""
    while b"\n" not in data:
        if not (more := os.read(0, 65536)):
            return b"", b"", b""
        data += more
    return data.partition(b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
