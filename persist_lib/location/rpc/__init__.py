"""Consensus by way of shard servers. Whatever uses gRPC imports this package first."""

from __future__ import annotations

import logging
import os
import sys

FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
"""A setting that gRPC reads when it is imported, and never again. What the user has set is left as it is."""

if FORK_SUPPORT not in os.environ:  # noqa: TID251 - an edge: gRPC has no other way to be told
    if "grpc._cython.cygrpc" in sys.modules:
        logging.getLogger("persist").warning(
            "gRPC was imported before the client of shard servers, so its handlers of forks stay on: a child that is "
            "begun by native code, as by subprocess with user= or group=, may die by SIGABRT or SIGSEGV before it "
            "runs its program. Set %s=0 in the environment of this program, or import "
            "persist_lib.location.rpc before grpc", FORK_SUPPORT,
        )  # fmt: skip
    else:
        # These handlers run at every fork, also where the child only becomes another program, and take locks
        # that other threads hold. `rpc.grpc_forks` does for forks of Python what they are meant for.
        os.environ[FORK_SUPPORT] = "0"  # noqa: TID251
