"""Moving a shard's log to a newer format, once every program that uses the shard can read that format."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.shard.commit import Machine


class Upgraded(msgspec.Struct, frozen=True):
    """The shard's format before and after; they are equal if nothing had to be done."""

    before: int
    after: int


def upgrade(machine: Machine, format_: int, *, dry_run: bool = False) -> Upgraded:
    """Move the shard to `format_`, and return its format before and after. With `dry_run` nothing changes.

    Doing it again changes nothing. There is no way back to an older format.
    """
    state = machine.fetch().state
    if state.is_finished():
        return Upgraded(state.format, state.format)
    if dry_run and format_ >= state.format:
        return Upgraded(state.format, format_)
    committed = machine.commit(lambda _state, _now: c.Upgrade(format_))
    return Upgraded(committed.before.format, committed.after.format)
