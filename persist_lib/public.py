"""The public names of the library, by group: all that `import persist_lib` offers. Other names may change any time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from persist_lib import errors
from persist_lib.client import Client, open  # noqa: A004 - `persist.open` is what users write
from persist_lib.config import CacheConfig, Config
from persist_lib.convert.updates import Update, decode_rows
from persist_lib.core.cost import Cost, Prices
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.look import Look
from persist_lib.errors import *
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.location.wrap.metering import Metrics
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain.survey import Survey
from persist_lib.relation.changes import Changes
from persist_lib.relation.listen import Listen, Progress, Updates
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.restore import Restored
from persist_lib.relation.snapshot import Snapshot, Split
from persist_lib.relation.statements import Done, old
from persist_lib.relation.writer import Append, Appended, Batching, Changed, WriteHandle
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.outcomes import Verdict

if TYPE_CHECKING:
    from persist_lib.table.carrier import TableDescription
    from persist_lib.table.table import Table

__all__: list[str] = [  # noqa: RUF022 - by what they are for
    # opening a location
    "open",
    "Client",
    "Config",
    "CacheConfig",
    "Runtime",
    # tables
    "Table",
    "TableDescription",
    "Done",
    "old",
    # schemas and updates
    "Schema",
    "Update",
    "decode_rows",
    # times
    "Antichain",
    "TOP",
    "at",
    # upkeep and cost
    "Survey",
    "Look",
    "Policy",
    "Cost",
    "Prices",
    "Metrics",
    "Spending",
    # shards, for those who need frontiers: `persist_lib.shards`
    "WriteHandle",
    "Appended",
    "Changed",
    "Restored",
    "Append",
    "Batching",
    "Verdict",
    "ReadHandle",
    "Snapshot",
    "Changes",
    "Split",
    "Listen",
    "Updates",
    "Progress",
]
__all__ += [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]

_TABLES = {"Table": "persist_lib.table.table", "TableDescription": "persist_lib.table.carrier"}
"""They bring the catalog and publications along, a fifth of the library, so they are loaded when they are asked for."""


def __getattr__(name: str) -> object:
    if name in _TABLES:
        globals()[name] = getattr(import_module(_TABLES[name]), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
