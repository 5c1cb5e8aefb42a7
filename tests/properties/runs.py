"""Updates dealt to sorted runs, drawn by hypothesis."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st

from persist_lib.kernel.consolidate import consolidate
from persist_lib.schema.schema import Schema
from tests.properties.kernel_updates import Update, build

HUGE = st.sampled_from([1, -1, 2**63 - 1, -(2**63), 2**62])


def dealt(data: st.DataObject, schema: Schema, updates: list[Update]) -> list[pa.Table]:
    """The updates dealt to runs, each consolidated."""
    count = data.draw(st.integers(0, 4)) if not updates else data.draw(st.integers(1, 4))
    owners = [data.draw(st.integers(0, count - 1)) for _ in updates]
    mine = [[update for update, owner in zip(updates, owners, strict=True) if owner == run] for run in range(count)]
    return [consolidate(schema, build(schema, some), "split") for some in mine]
