"""What is made of orders. No Dagster and no location: functions of tables, which tests call."""

from __future__ import annotations

import polars as pl

import persist_lib as persist

ORDERS = persist.Schema(
    {"id": "int64 not null"}, {"customer": "string", "day": "string", "state": "string", "cents": "int64"}
)
PAID = "paid"


def per_day(orders: pl.DataFrame) -> pl.DataFrame:
    """The revenue of each day, of the orders that are paid."""
    paid = orders.filter(pl.col("state") == PAID)
    return paid.group_by("day").agg(cents=pl.col("cents").sum(), orders=pl.len().cast(pl.Int64)).sort("day")
