"""Tables: rows that people insert, update and delete, with times minted for them, alone or several tables at once.

A table is a collection on a timeline, whose tables share their times. On a timeline in YOLO mode each statement is one
append to its table. On one in WAL mode a transaction over any number of its tables is one append to the timeline's WAL,
which appliers copy to the tables later; readers read through it until then.
"""

from __future__ import annotations

from persist_lib.relation.statements import Done
from persist_lib.timeline.table_listen import TableListen
from persist_lib.timeline.tables import Tables
from persist_lib.timeline.transaction import Transaction
from persist_lib.timeline.view import TableSnapshot
from persist_lib.timeline.wal_apply import Applied, Behind, Lag

__all__ = ["Applied", "Behind", "Done", "Lag", "TableListen", "TableSnapshot", "Tables", "Transaction"]
