"""The public names of the library: all that `import persist_lib` offers. Other names may change in any release."""

from __future__ import annotations

from persist_lib.client import Client, open  # noqa: A004 - `persist.open` is what users write
from persist_lib.config import CacheConfig, Config
from persist_lib.convert.updates import Update, decode_rows
from persist_lib.core.cost import Cost, Prices
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.look import Look
from persist_lib.errors import (
    AlreadyProduced,
    AlreadyWritten,
    BufferFull,
    Busy,
    ClockAhead,
    CompactionRefused,
    ConstraintViolated,
    Corrupt,
    Damage,
    Determinate,
    DiffOverflow,
    DiskFull,
    Diverged,
    Fenced,
    GivesUpHistory,
    Gone,
    HandoverRefused,
    HistoryRegressed,
    HoldConflict,
    Indeterminate,
    InvalidName,
    InvalidUsage,
    InvariantViolated,
    LeaseExpired,
    Locked,
    MemberOf,
    Missing,
    NameTaken,
    NewerFormat,
    NotAllowed,
    NotAuthenticated,
    NotComplete,
    NotFound,
    NotReleased,
    NotSent,
    OfLayer,
    Overloaded,
    PersistError,
    Refused,
    SchemaChanged,
    SchemaMismatch,
    ShardFinished,
    SinceViolation,
    StillRead,
    TimedOut,
    UpperMismatch,
    WriteConflict,
)
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.location.wrap.metering import Metrics
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain.survey import Survey
from persist_lib.relation.append_many import Append
from persist_lib.relation.changes import Changes
from persist_lib.relation.listen import Listen, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.restore import Restored
from persist_lib.relation.snapshot import Snapshot, Split
from persist_lib.relation.statements import Done, old
from persist_lib.relation.writer import Appended, Batching, Changed, WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.outcomes import Verdict
from persist_lib.table.carrier import TableDescription
from persist_lib.table.table import Table

__all__ = [
    "TOP",
    "AlreadyProduced",
    "AlreadyWritten",
    "Antichain",
    "Append",
    "Appended",
    "Batching",
    "BufferFull",
    "Busy",
    "CacheConfig",
    "Changed",
    "Changes",
    "Client",
    "ClockAhead",
    "CompactionRefused",
    "Config",
    "ConstraintViolated",
    "Corrupt",
    "Cost",
    "Damage",
    "Determinate",
    "DiffOverflow",
    "DiskFull",
    "Diverged",
    "Done",
    "Fenced",
    "GivesUpHistory",
    "Gone",
    "HandoverRefused",
    "HistoryRegressed",
    "HoldConflict",
    "Indeterminate",
    "InvalidName",
    "InvalidUsage",
    "InvariantViolated",
    "LeaseExpired",
    "Listen",
    "Locked",
    "Look",
    "MemberOf",
    "Metrics",
    "Missing",
    "NameTaken",
    "NewerFormat",
    "NotAllowed",
    "NotAuthenticated",
    "NotComplete",
    "NotFound",
    "NotReleased",
    "NotSent",
    "OfLayer",
    "Overloaded",
    "PersistError",
    "Policy",
    "Prices",
    "Progress",
    "ReadHandle",
    "Refused",
    "Restored",
    "Runtime",
    "Schema",
    "SchemaChanged",
    "SchemaMismatch",
    "ShardFinished",
    "SinceViolation",
    "Snapshot",
    "Spending",
    "Split",
    "StillRead",
    "Survey",
    "Table",
    "TableDescription",
    "TimedOut",
    "Update",
    "Updates",
    "UpperMismatch",
    "Verdict",
    "WriteConflict",
    "WriteHandle",
    "at",
    "decode_rows",
    "old",
    "open",
]
