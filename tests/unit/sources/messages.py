"""Messages as a reader gives them, with their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from persist_lib.sources.envelopes import Lookup
from persist_lib.sources.pipeline import Made, Pipeline


def messages(
    times: Sequence[int], values: Sequence[bytes | None], partition: str | Sequence[str] = "p", **more: Any
) -> pa.Table:
    """One message for each value, an address each."""
    partitions = [partition] * len(values) if isinstance(partition, str) else partition
    columns = {
        "partition": pa.array(partitions, pa.string()), "address": pa.array(range(len(values)), pa.uint64()),
        "value": pa.array(values, pa.binary()), "_time": pa.array(times, pa.uint64()),
    }  # fmt: skip
    return pa.table({**columns, **more})


def applied(pipeline: Pipeline, messages: pa.Table, lookup: Lookup, *more: Any, **named: Any) -> Made:
    """What a pipeline makes of messages; the others are as in `Pipeline.ready`."""
    return pipeline.apply(pipeline.ready(messages, *more, **named), lookup)
