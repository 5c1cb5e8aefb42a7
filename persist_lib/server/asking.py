"""How a server takes commands: from its network, or from a client in the same process."""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.errors import InvalidUsage
from persist_lib.ids import parse_shard_id
from persist_lib.location.commands import Proposed
from persist_lib.runtime.ambient import Deadline
from persist_lib.server.funnels import Funnels
from persist_lib.server.requests import Request


def ask(
    funnels: Funnels, proposed: Sequence[Proposed], token: bytes, client: str, deadline: Deadline, *, is_repeated: bool
) -> list[Request]:
    """Let commands wait for their turns, and return the requests, whose answers tell what came of them.

    Several commands, each of another shard, are committed together: all or none. Raises InvalidUsage for none at all,
    or for two of one shard.
    """
    requests = [
        Request(parse_shard_id(shard), command, token, client, deadline, known, is_repeated=is_repeated)
        for shard, command, known in proposed
    ]
    shards = {request.shard for request in requests}
    if len(shards) < max(1, len(requests)):
        raise InvalidUsage(
            f"a commit needs at least one command, and each shard once: got {[p.shard for p in proposed]}"
        )
    if len(requests) == 1:
        funnels.submit(requests[0])
    else:
        funnels.submit_together(requests)
    return requests
