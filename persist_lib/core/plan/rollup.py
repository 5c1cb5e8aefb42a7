"""When a whole copy of the state is due in Blob, so that opening a shard replays little and garbage can go."""

from __future__ import annotations

from persist_lib.core.state import State
from persist_lib.ids import SeqNo, parse_rollup_key


def is_due(state: State, seqno: SeqNo, every: int) -> bool:
    """Whether the newest rollup lags `every` transitions behind, or garbage waits for a newer one."""
    newest = state.newest_rollup
    waits = last_deletion(state) >= max(newest, 1)
    return seqno - newest >= every or waits or (state.is_finished() and newest == 0)


def is_duty(seqno: SeqNo, before: State, after: State, every: int) -> bool:
    """Whether the writer of an append has to roll up: it made the first one at or after a multiple of `every`.

    If it fails to, the writer of the first append after the next multiple does. A rollup by maintenance counts for a
    multiple that follows it by less than half of `every`.
    """
    due = seqno - seqno % every
    if 2 * (due - after.newest_rollup) < max(2, every):
        return False
    return all(not writer.outcomes or writer.outcomes[-1].seqno < due for writer in before.writers.values())


def last_deletion(state: State) -> SeqNo:
    """The seqno at which the newest garbage that waits for a rollup was logically deleted; 0 for none.

    SUBTLE: old rollups are garbage that waits for no newer rollup. Otherwise each rollup would make the next one due.
    """
    return max((g.seqno for key, g in state.garbage.items() if parse_rollup_key(key) is None), default=SeqNo(0))
