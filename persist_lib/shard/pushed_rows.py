"""Following a shard without requests, where Consensus is sent its new rows.

Only for those that follow: what was committed before a call may be missing from the answer. Opening, `fetch`, commits
and audits scan the log.
"""

from __future__ import annotations

from persist_lib.core.state import Version
from persist_lib.errors import PersistError
from persist_lib.location.api import PushesRows
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import apply_rows


def follow(machine: Machine) -> Version:
    """The newest version that this process was told of; read from the log, as `fetch` does, if only that can tell."""
    return told(machine) or machine.fetch()


def told(machine: Machine) -> Version | None:
    """The newest version that this process was told of, which it knows then; None if only the log can tell.

    A pushed row is checked as one that is read: it must follow the known version by its digest, apply, and pass
    all checks. If it does not, the log is asked, which tells whether it is damaged.
    """
    machine.check_open()
    with machine.turn:
        known, consensus = machine.known, machine.consensus
        if known is None or not isinstance(consensus, PushesRows):
            return None
        if (rows := consensus.pushed(machine.shard, known.seqno)) is None:
            return None
        if rows:
            try:
                machine.take_over(apply_rows(machine.shard, known, list(rows)))
            except PersistError:
                return None
            machine.pace.overtaken()
        return machine.known
