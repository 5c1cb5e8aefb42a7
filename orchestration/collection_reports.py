"""What Dagster is told of collections: figures that draw timelines, and tables of renditions, changes and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from orchestration.duties import drawn
from orchestration.mount import Mount
from orchestration.reports import figure
from persist_lib.catalog import Description
from persist_lib.catalog.comparing import Comparison
from persist_lib.catalog.describe import Tended
from persist_lib.core.units import duration, size
from persist_lib.timeline import Lag
from persist_lib.times import Times

Metadata = dict[str, dg.MetadataValue]
APPLIED = "tables_applied"
LATE_MS = 15 * 60_000
"""A commit that is in a WAL alone for longer is late: tables are tended every five minutes."""
LATE_BYTES = 64 << 20
"""So is a WAL with more than this that is not in its tables: each reader takes it from there."""


def described(found: Description) -> Metadata:
    """A collection as metadata: how far it has come, and a table of its renditions."""
    shown = {"since": found.since, "upper": found.upper, "promised": found.promised}
    figures: Metadata = {name: figure(found.schema.show(frontier)) for name, frontier in shown.items()}
    times = (drawn(f"{name}_time", one) for name, one in shown.items())
    figures |= {name: figure(time) for one in times for name, time in one.items()}
    rows = [
        {
            "rendition": one.number, "state": "active" if one.active else one.state, "shards": len(one.shards),
            "start": "" if one.start is None else found.schema.show(one.start),
            "end": "" if one.end is None else found.schema.show(one.end),
            "since": found.schema.show(one.since), "upper": found.schema.show(one.upper), "schema": str(one.schema),
        } for one in found.renditions
    ]  # fmt: skip
    pending = figure(", ".join(found.pending) or "nothing")
    return {**figures, "shards": figure(len(found.active.shards)), "pending": pending, "renditions": table(rows)}


def overview(found: list[Description], done: Tended) -> Metadata:
    """All collections in one table."""
    waiting = Counter(step.collection for step in done.waiting)
    rows = [
        {
            "collection": one.name, "kind": one.kind, "rendition": one.active.number, "shards": len(one.active.shards),
            "since": one.schema.show(one.since), "upper": one.schema.show(one.upper),
            "promised": one.schema.show(one.promised), "pending": len(one.pending), "waiting": waiting[one.name],
        } for one in found
    ]  # fmt: skip
    figures = {"collections": len(found), "steps": len(done.steps) - len(done.waiting), "waiting": len(done.waiting)}
    return {**{name: figure(value) for name, value in figures.items()}, "table": table(rows)}


def timelines(lags: Sequence[Lag], now: int) -> Metadata:
    """How far tables are behind the WALs of their timelines; nothing where there are none."""
    if not lags:
        return {}
    rows = [
        {
            "timeline": lag.timeline, "wal": Times("ms", lambda: 0).show(lag.upper), "tables behind": len(lag.tables),
            "unapplied bytes": lag.unapplied, "waits": f"{lag.waits_ms(now) / 1000:.0f} s", "rows in the WAL": lag.rows,
        } for lag in lags
    ]  # fmt: skip
    return {
        "unapplied_bytes": figure(sum(lag.unapplied for lag in lags)),
        "waits_ms": figure(max(lag.waits_ms(now) for lag in lags)),
        "wal_bytes": figure(sum(lag.size for lag in lags)), "timelines": table(rows),
    }  # fmt: skip


def behind(lags: Sequence[Lag], name: str) -> Metadata:
    """How far one table is behind its WAL; nothing where it is not, or is none."""
    found = [(lag, one) for lag in lags for one in lag.tables if one.table == name]
    return {
        "unapplied_commits": figure(sum(one.commits for _, one in found)),
        "unapplied_bytes": figure(sum(one.size for _, one in found)),
        "behind_ms": figure(max(lag.upper - one.first for lag, one in found)),
    } if found else {}  # fmt: skip


def verdict(mount: Mount, lags: Sequence[Lag], now: int, unread: Mapping[str, str]) -> dg.AssetCheckEvaluation:
    """Whether everything that was committed long ago is in its table: a warning if not, or if a WAL is `unread`."""
    late = [lag for lag in lags if lag.waits_ms(now) > LATE_MS or lag.unapplied > LATE_BYTES]
    wrong = [
        f"timeline {lag.timeline}: {', '.join(one.table for one in lag.tables)} "
        f"lack {size(lag.unapplied)}, the oldest for {duration(lag.waits_ms(now))}" for lag in late
    ]  # fmt: skip
    says = "; ".join([*wrong, *(f"timeline {name}: {why}" for name, why in unread.items())])
    return dg.AssetCheckEvaluation(
        asset_key=mount.key("collections"), check_name=APPLIED, passed=not says, severity=dg.AssetCheckSeverity.WARN,
        description=says or "the tables are not far behind their WALs", metadata=timelines(lags, now),
    )  # fmt: skip


def comparison(found: Comparison) -> Metadata:
    """A comparison as metadata: figures, changes by column, and samples."""
    names = ("old", "new", "old_rows", "new_rows", "equal_keys", "appeared", "vanished", "changed")
    samples = "".join(f"- {kind}: `{row}`\n" for kind, rows in found.samples.items() for row in rows)
    columns = [{"column": name, "changed": count} for name, count in found.columns.items()]
    return {
        **{name: figure(getattr(found, name)) for name in names}, "equal": dg.MetadataValue.bool(found.is_equal),
        "as_of": figure(str(found.as_of)), "columns": table(columns),
        "samples": dg.MetadataValue.md(samples or "none"),
    }  # fmt: skip


def steps_of(done: Tended, name: str) -> Metadata:
    """The steps for one collection, if there are any."""
    rows = [
        {"step": step.action, "what": step.subject, "why": step.reason}
        for step in done.steps
        if step.collection == name
    ]
    return {"steps": table(rows)} if rows else {}


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue:
    """Rows with the same columns, as a table."""
    columns: Mapping[str, Any] = rows[0] if rows else {"nothing": ""}
    kinds = [dg.TableColumn(name, "int" if isinstance(value, int) else "string") for name, value in columns.items()]
    return dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows], schema=dg.TableSchema(columns=kinds))
