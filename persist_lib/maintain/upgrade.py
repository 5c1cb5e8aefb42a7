"""Moving a shard's log to a newer format, once every program of its fleet knows that."""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.shard.commit import Machine


class Upgraded(msgspec.Struct, frozen=True):
    """From which format to which; the same twice where nothing was to be done."""

    before: int
    after: int


def upgrade(machine: Machine, format_: int, *, dry_run: bool = False) -> Upgraded:
    """Commit the move to `format_`, or say what it would be."""
    state = machine.fetch().state
    if state.is_finished():
        return Upgraded(state.format, state.format)
    if dry_run and format_ >= state.format:
        return Upgraded(state.format, format_)
    committed = machine.commit(lambda _state, _now: c.Upgrade(format_))
    return Upgraded(committed.before.format, committed.after.format)
