"""Checking the constraints of a schema before an append is sent, by the contents of the keys that it touches.

The contents are those at the append's lower, and the append is committed only if upper is still there. So whatever
another writer appends in between makes the commit fail, and the check is made again.
"""

from __future__ import annotations

import pyarrow as pa

from persist_lib.core import refusals as r
from persist_lib.core.state import Version
from persist_lib.errors import ConstraintViolated
from persist_lib.format.parquet import conform
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.kernel.constraints import Violation, find_violation, touched
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Machine
from persist_lib.shard.refusals import refused
from persist_lib.times import Unit, show_time
from persist_lib.write.looking import Looking

WHAT = {"unique": "each key has at most one row, once", "non_negative": "no row's multiplicity is below 0"}


def check_constraints(machine: Machine, updates: pa.Table, lower: Antichain, deadline: Deadline) -> None:
    """Raise ConstraintViolated if these updates, appended at `lower`, would break a constraint at any of their times.

    `updates` are consolidated. Does nothing when upper is beyond `lower` already: the append can only be refused, or
    have been committed before. Raises UpperMismatch when upper is before `lower`.
    """
    version = _at(machine, lower, deadline)
    if version is None:
        return
    schema = version.state.schemas[-1]
    keys, relevant = touched(schema, conform("the append", updates, schema))
    if not len(keys):
        return
    version, contents = Looking(machine, keys).contents(version, deadline)
    if version.state.upper != lower:
        return  # another writer was first, so that the commit is refused
    if (found := find_violation(schema, contents, relevant)) is not None:
        raise violated(machine.shard, found, schema.times)


def violated(shard: ShardId, found: Violation, times: Unit | None) -> ConstraintViolated:
    """The error that names the constraint and the first few rows."""
    keys = "keys" if found.constraint == "unique" else "rows"
    return ConstraintViolated(
        f"shard {shard}: the schema says {found.constraint} ({WHAT[found.constraint]}), and after this append "
        f"{found.breaks} {keys} would break that at time {show_time(found.time, times)}, first {found.rows[:3]}. "
        f"Nothing was written. Retract what the shard holds for these keys in the same append, or use upsert",
        shard=shard, constraint=found.constraint, time=found.time, count=found.breaks, rows=found.rows,
    )  # fmt: skip


def _at(machine: Machine, lower: Antichain, deadline: Deadline) -> Version | None:
    """A version whose upper is `lower`; None if upper is beyond.

    All versions with the same upper have the same contents, so the one that this process knows will do.
    """
    version = machine.version
    if version.state.upper != lower:
        version = within(deadline, machine.fetch)
    upper = version.state.upper
    if upper < lower:
        raise refused(machine.shard, r.WrongUpper(lower, upper))
    return version if upper == lower else None
