"""The shard server: changes of shards go through one process, which commits what many clients ask as one row.

It is an optimisation, and correctness does not rest on it: it commits by compare-and-set, as any client does. It may be
killed at any moment, and several may serve one shard. Data never passes through it.
"""

import persist_lib.location.rpc  # noqa: F401 - before gRPC is imported
