"""What a server tells of a command that it neither committed nor refused, and what its sender can do then."""

from __future__ import annotations

from persist_lib.core.groups import Answer
from persist_lib.errors import Indeterminate, Overloaded, TimedOut
from persist_lib.ids import ShardId
from persist_lib.server.requests import Request


def timed_out(request: Request) -> TimedOut:
    """The error for a command that waited too long. Nothing of it was ever sent to the store."""
    timeout_s = request.deadline.timeout_s
    return TimedOut(
        f"shard {request.shard}: the {type(request.command).__name__} was not committed within {timeout_s:g} s, "
        "and will not be; this call changed nothing. Try again, or with a longer timeout",
        shard=request.shard, timeout_s=timeout_s,
    )  # fmt: skip


def stopped(shard: ShardId) -> Overloaded:
    """The error for a command that comes when the server ends."""
    return Overloaded(
        f"shard {shard}: this server is stopping. It did nothing; ask another one",
        shard=shard, waiting=0, most=0,
    )  # fmt: skip


def still_open(request: Request, answer: Answer | None) -> Indeterminate:
    """The error for a repeated command that is not committed, but may still be.

    SUBTLE: another server, which was only paused, may hold the command, and apply it to a later state. So a refusal
    may only be told when no later state accepts it: its writer is retired, or what it needs has passed.
    """
    return Indeterminate(
        f"shard {request.shard}: the {type(request.command).__name__} with token {request.token.hex()} is not "
        f"committed, and it does not apply now ({answer!s:.200}). But it was sent before, and a server that is "
        "paused may still commit it later. Repeat it with the same token, or retire its writer",
        shard=request.shard, token=request.token,
    )  # fmt: skip


def forgotten(request: Request) -> Indeterminate:
    """The error for a command whose first sending is too long ago for the log to tell what became of it."""
    return Indeterminate(
        f"shard {request.shard}: whether the {type(request.command).__name__} with token {request.token.hex()} was "
        f"committed is not known any more: it was first sent after v{request.known}, and the rows since then are "
        "truncated. This call changed nothing. Read the shard to see what is there",
        shard=request.shard, token=request.token,
    )  # fmt: skip
