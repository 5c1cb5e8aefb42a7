"""The heart of a server in a client's own process, for a client that continues against the store without any server.

What the client asks is applied as a server applies it: what other processes committed, or may commit yet, is looked for
by its token, and "not committed" is said only of what can never be committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import TimeoutError as Late

from persist_lib.config import Config
from persist_lib.errors import Indeterminate
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.commands import Answered, Proposed
from persist_lib.location.wrap.retrying import RetryingBlob, RetryingConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.funnels import Funnels, ask

NAME = "itself"
"""What rows of several commands say of who sent one that came through no server."""
THREADS = 4
GRACE_S = 2.0
"""How much longer than the caller's timeout to wait for a definite answer."""


class Alone:
    """`TakesCommands` over a store, in this process. Safe to use from several threads; not after a fork."""

    def __init__(self, blob: Blob, consensus: Consensus, runtime: Runtime) -> None:
        config = Config()
        self._funnels = Funnels(
            RetryingBlob(blob, runtime, config.timeout_s), RetryingConsensus(consensus, runtime, config.timeout_s),
            config, runtime,
        )  # fmt: skip
        self._runtime = runtime
        self._funnels.start(THREADS, 1)

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool
    ) -> list[Answered]:
        """As `TakesCommands` says."""
        deadline = self._runtime.deadline(timeout_s)
        requests = ask(self._funnels, proposed, token, NAME, deadline, is_repeated=is_repeated)
        try:
            return [request.answer.result(deadline.left_s() + GRACE_S) for request in requests]
        except Late as late:
            raise Indeterminate(
                f"shard {proposed[0].shard}: the store did not answer within {timeout_s:g} s, so it is not known "
                f"whether the command with token {token.hex()} was committed. Repeat it with the same token",
                shard=proposed[0].shard, token=token,
            ) from late  # fmt: skip
        finally:
            for request in requests:
                request.is_dropped = True

    def close(self) -> None:
        """Answer what waits, and end the threads."""
        self._funnels.give_up()
        self._funnels.close()
