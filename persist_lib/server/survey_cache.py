"""What all shards call for, from a server's memory: so that a survey of ten thousand shards is one request.

It is the library's own survey. One request to the store tells which shards have moved, by any client. Those that
this server commits are looked at in its memory; the others are read, by threads of their own and for as long as the
caller waits. Whatever was looked at is kept for the next caller.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from persist_lib.client import Client
from persist_lib.core.plan.look import Debts, settings_of
from persist_lib.core.rights import MAINTAIN
from persist_lib.location.api import Consensus
from persist_lib.maintain.survey import Survey, Surveyor
from persist_lib.server.access import Caller
from persist_lib.shard.funnels import Funnels

LONGEST_S = 5.0
"""The longest that one request looks at shards."""


class Looks:
    """Answers `debts`. One survey is under way at a time; those that ask during it share the next one."""

    def __init__(self, client: Client, consensus: Consensus, funnels: Funnels) -> None:
        policy = client.policy()
        self._settings = settings_of(policy, client.config.rollup_every)
        self._surveyor = Surveyor(
            client.blob, client.reads, consensus, funnels.machine, client.config, client.runtime, policy,
            read_only=False, follows=True,
        )  # fmt: skip
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._asked = self._answers = 0
        self._found: Survey | None = None

    def ask(self) -> int:
        """Note that a call has come. Returns its number: only a survey that begins from now on answers it."""
        with self._lock:
            self._asked += 1
            return self._asked

    def debts(
        self, number: int, caller: Caller, settings: str, done: Mapping[str, Sequence[str]], most: int | None,
        seconds: float,
    ) -> Debts | None:  # fmt: skip
        """What is due on the shards that a caller sees; None if it wants looks by other settings.

        Raises NotAllowed for duties done on shards that the caller may not maintain. Nothing was noted then.
        """
        if settings != self._settings:
            return None
        for name in {name for names in done.values() for name in names}:
            caller.check(name, MAINTAIN, "note duties as done on")
        return _shown(self._survey(number, done, most, min(seconds, LONGEST_S)), caller)

    def _survey(self, number: int, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Survey:
        with self._turn:
            if self._found is not None and self._answers >= number and not done:
                return self._found  # SUBTLE: that one began after this call came, so it knows all from before
            with self._lock:
                answers = self._asked
            found = self._surveyor.survey(done, most, seconds, None)
            self._found, self._answers = found, answers
            return found


def _shown(survey: Survey, caller: Caller) -> Debts:
    names = {name for name in survey.heads if caller.rights_on(name)}
    looks = {name: look for name, look in survey.looks.items() if name in names}
    moved = {name: survey.heads[name] for name in names if name not in looks or looks[name].seqno != survey.heads[name]}
    return Debts(survey.now, looks, moved, {name: why for name, why in survey.unread.items() if name in names})
