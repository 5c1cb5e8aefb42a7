"""Sources: outside data made definite. One reads files or topics, gives messages times, and writes collections."""

from __future__ import annotations

from persist_lib.sources.alerts import Alert, Limits, News, check, judge, look
from persist_lib.sources.collection import Collection
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files.kind import Files
from persist_lib.sources.health import SourceDescription
from persist_lib.sources.kafka.kind import Kafka
from persist_lib.sources.kinds import Custom
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.protocol import Lag, Mark, SourceReader
from persist_lib.sources.reprocess import Mended
from persist_lib.sources.running import Ingestion, Progress
from persist_lib.sources.schema_registry import Registry
from persist_lib.sources.sources import Sources
from persist_lib.sources.transactions import Transactions

__all__ = [
    "Alert", "Collection", "Custom", "Decoding", "Files", "Ingestion", "Kafka", "Lag", "Limits", "Mark", "Meaning",
    "Mended", "News", "Postgres", "Progress", "Registry", "SourceDescription", "SourceReader", "Sources",
    "Transactions", "check", "judge", "look",
]  # fmt: skip
