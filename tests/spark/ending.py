"""Streaming queries that end by themselves, on a machine that is busy."""

from __future__ import annotations

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.readwriter import DataStreamWriter

WORKER_IS_LATE = "Python worker failed to connect back"
"""What Spark says where a Python process needs more than its own fixed ten seconds to start, as at a load of ten."""


def ended(writer: DataStreamWriter, timeout_s: float = 200) -> None:
    """Run a query to its end; again from its checkpoint, as a job would be, where only Spark's worker was late."""
    for attempt in range(4):
        query = writer.start()
        try:
            assert query.awaitTermination(int(timeout_s))
            assert query.exception() is None
        except StreamingQueryException as error:
            if WORKER_IS_LATE not in str(error) or attempt == 3:
                raise
        else:
            return
