"""Streaming reads."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamReader


class StreamReader(DataSourceStreamReader):
    """Plans and reads a stream."""
