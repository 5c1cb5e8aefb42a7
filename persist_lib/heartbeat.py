"""The process that keeps a client's leases up when its threads starve. Started by `persist_lib.leases`.

    python -P -m persist_lib.heartbeat BLOB_URL CONSENSUS_URL LEASE_MS PARENT_PID

It reads `["keep" | "drop", shard, id]` lines, and ends when its standard input does, or when its parent is gone (a fork
of the parent may hold the pipe open). It renews only what the parent has left undone for half of a lease.
"""

from __future__ import annotations

import json
import os
import select
import sys

from persist_lib.config import Config, Runtime
from persist_lib.ids import ShardId
from persist_lib.leases import RESCUE_BELOW, renew
from persist_lib.location import open_location
from persist_lib.machine import Machine


def main(url: str, consensus_url: str, lease_ms: int, parent: int) -> None:
    """Serve until standard input ends, or the parent does. Its id is told: it may be gone before we could look."""
    location = open_location(url, consensus_url)
    config, runtime = Config(lease_ms=lease_ms), Runtime()
    machines: dict[str, Machine] = {}
    kept: dict[str, set[str]] = {}
    pending = b""
    while os.getppid() == parent:
        if select.select([0], [], [], min(lease_ms / 8000, 5.0))[0]:
            if not (data := os.read(0, 65536)):
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                verb, shard, id_ = json.loads(line)
                (kept.setdefault(shard, set()).add if verb == "keep" else kept.get(shard, set()).discard)(id_)
        for shard, ids in kept.items():
            if ids:
                if shard not in machines:
                    machines[shard] = Machine(ShardId(shard), location.blob, location.consensus, config, runtime)
                renew(machines[shard], tuple(sorted(ids)), lease_ms, RESCUE_BELOW)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
