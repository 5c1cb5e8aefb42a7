"""Sources: outside data made definite. One reads files or topics, gives messages times, and writes collections."""

from __future__ import annotations

from persist_lib.storage.sources.declared import Custom, Decoding, Meaning, Transactions
from persist_lib.storage.sources.files import Files
from persist_lib.storage.sources.kafka import Kafka
from persist_lib.storage.sources.protocol import Lag, Mark, SourceReader
from persist_lib.storage.sources.registry import Registry
from persist_lib.storage.sources.running import Ingestion, Progress
from persist_lib.storage.sources.sources import SourceDescription, Sources

__all__ = [
    "Custom",
    "Decoding",
    "Files",
    "Ingestion",
    "Kafka",
    "Lag",
    "Mark",
    "Meaning",
    "Progress",
    "Registry",
    "SourceDescription",
    "SourceReader",
    "Sources",
    "Transactions",
]
