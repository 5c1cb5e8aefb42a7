"""For models of tables: nothing of the WAL is kept in memory, so that it is read each time."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine

from persist_lib.timeline import wal_cache


class NothingKept(RuleBasedStateMachine):
    """Stands before a model among the bases of a class."""

    def __init__(self) -> None:
        self.kept, wal_cache.MOST_BYTES = wal_cache.MOST_BYTES, 0
        super().__init__()

    def teardown(self) -> None:
        wal_cache.MOST_BYTES = self.kept
        super().teardown()
