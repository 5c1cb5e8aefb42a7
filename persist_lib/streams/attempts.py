"""One commit of several calls: what is sent, and how often, until it is certain what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.errors import Damage, Indeterminate, InvalidUsage, LeaseExpired, PersistError, Refused
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.relation.append_many import Append, append_together
from persist_lib.relation.registration import timed_out
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Wanted
from persist_lib.shard.outcomes import REFUSED
from persist_lib.streams.fencing import hold_command
from persist_lib.streams.lock import WriterLock, commit_together
from persist_lib.streams.plan import Step
from persist_lib.streams.stream import Stream

T = TypeVar("T")
DOUBT_PAUSE_S = 0.25
"""The pause between two attempts to find out what became of a commit, after those that each attempt makes itself."""


def check_since(steps: Mapping[str, Step]) -> None:
    """A move of since was checked against seals that may have failed since then."""
    for name, step in steps.items():
        if step.since is not None and not step.since < step.upper:
            raise InvalidUsage(
                f"stream {name!r} is sealed up to {step.upper} only, as a seal before this call failed, so since "
                f"cannot move to {step.since}. Nothing was changed; seal it first",
                stream=name,
            )


def commit_steps(
    client: Client, lock: WriterLock, streams: Mapping[str, Stream], steps: Mapping[str, Step], token: bytes,
    deadline: Deadline,
) -> dict[str, SeqNo]:  # fmt: skip
    """One attempt. Returns the newest seqno of each stream's shard that it changed."""
    appends, holds, names = list[Append](), list[Wanted](), list[str]()
    for name, step in sorted(steps.items()):
        stream = streams[name]
        if step.seals or step.tables:
            more = stream.appends(step)
            appends += more
            names += [name] * len(more)
        if step.since is not None and stream.since < step.since:
            holds.append(Wanted(stream.sealed, partial(_moving, lock=lock, since=step.since)))
    if appends:
        done = append_together(appends, client.consensus, client.machine, deadline, token, holds)
        return {name: one.seqno for name, one in zip(reversed(names), reversed(done), strict=True)}
    if holds:
        commit_together(holds, deadline, token)
    return {}


def until_decided(
    attempt: Callable[[Deadline], T], deadline: Deadline, again_s: float, gives_up: Callable[[], bool]
) -> T:
    """Repeat an attempt until it is certain what became of it, also beyond the deadline.

    Attempts beyond the deadline take at most `again_s` seconds each. Raises Indeterminate only as a last resort: when
    the runtime `gives_up`, or it cannot be found out any more.
    SUBTLE: after an unknown outcome, an error that says "this attempt did nothing" says nothing of those before.
    Only an answer, or a refusal of the shard, decides.
    """
    runtime, doubt = deadline.runtime, None
    while True:
        trying = deadline if doubt is None else runtime.deadline(again_s)
        try:
            return attempt(trying)
        except LeaseExpired as error:
            if not error.id:  # this runtime has closed its handle: that says nothing of earlier attempts
                raise doubt or error from error
            # Certainly not committed: its id was retired before. The next attempt registers, with the lock's row.
            if deadline.has_passed():
                raise timed_out(error.shard, deadline, "the lease of its writer ended") from error
            doubt = None
            continue
        except Refused:
            raise
        except Indeterminate as error:
            doubt = error
            if isinstance(error.__cause__, REFUSED):  # the shard has forgotten it
                raise
        except PersistError as error:
            if doubt is None:
                raise
            if isinstance(error, Damage):
                raise doubt from error
        if gives_up():
            raise doubt
        runtime.deadline(2 * DOUBT_PAUSE_S).pause(DOUBT_PAUSE_S)


def _moving(state: State, _now: int, *, lock: WriterLock, since: Antichain) -> c.SetHold | c.DowngradeHold:
    return hold_command(state, lock, since)
