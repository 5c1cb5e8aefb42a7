"""Sources: outside data made definite. A source reads files, gives their messages times, and writes collections."""

from __future__ import annotations

from persist_lib.storage.sources.declared import Custom, Decoding, Meaning
from persist_lib.storage.sources.files import Files
from persist_lib.storage.sources.postgres import Postgres
from persist_lib.storage.sources.protocol import Mark, SourceReader
from persist_lib.storage.sources.running import Ingestion, Progress
from persist_lib.storage.sources.sources import SourceDescription, Sources

__all__ = [
    "Custom",
    "Decoding",
    "Files",
    "Ingestion",
    "Mark",
    "Meaning",
    "Postgres",
    "Progress",
    "SourceDescription",
    "SourceReader",
    "Sources",
]
