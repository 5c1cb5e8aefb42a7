"""Sources: outside data made definite. One reads files or topics, gives messages times, and writes collections."""

from __future__ import annotations

from persist_lib.storage.sources.alerts import Alert, Limits, check, judge
from persist_lib.storage.sources.collection import Collection
from persist_lib.storage.sources.decoding import Decoding
from persist_lib.storage.sources.envelopes import Meaning
from persist_lib.storage.sources.files.kind import Files
from persist_lib.storage.sources.health import SourceDescription
from persist_lib.storage.sources.kafka.kind import Kafka
from persist_lib.storage.sources.kinds import Custom
from persist_lib.storage.sources.postgres.kind import Postgres
from persist_lib.storage.sources.protocol import Lag, Mark, SourceReader
from persist_lib.storage.sources.reprocess import Mended
from persist_lib.storage.sources.running import Ingestion, Progress
from persist_lib.storage.sources.schema_registry import Registry
from persist_lib.storage.sources.sources import Sources
from persist_lib.storage.sources.transactions import Transactions
from persist_lib.storage.sources.work_detection import News, look

__all__ = [
    "Alert",
    "Collection",
    "Custom",
    "Decoding",
    "Files",
    "Ingestion",
    "Kafka",
    "Lag",
    "Limits",
    "Mark",
    "Meaning",
    "Mended",
    "News",
    "Postgres",
    "Progress",
    "Registry",
    "SourceDescription",
    "SourceReader",
    "Sources",
    "Transactions",
    "check",
    "judge",
    "look",
]
