"""Looking after timelines in WAL mode: applying what is in a WAL alone, and giving up what is in its tables too."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial

from persist_lib.runtime.ambient import Deadline
from persist_lib.storage.catalog import Catalog
from persist_lib.storage.describe import Do, Step
from persist_lib.storage.leases import expiry_steps
from persist_lib.storage.names import LAYER
from persist_lib.storage.records import TimelineRecord
from persist_lib.storage.tables.applying import apply
from persist_lib.storage.tables.lag import Behind, Lag, fetch_lag
from persist_lib.storage.tables.tidying import tidy
from persist_lib.storage.tables.wal_line import WalLine
from persist_lib.storage.wal import SCHEMA, wal_shard

OWNER = "tend"


def timeline_steps(
    catalog: Catalog, record: TimelineRecord, deadline: Deadline, *, only: str | None = None, dry_run: bool = False
) -> Generator[tuple[Step, Do], None, None]:
    """What there is to do for the table with this id, or for all tables of a timeline and its WAL; and how to do it.

    The next step is found when the one before was done. A dry run says what would be done if all of them were.
    """
    lag = fetch_lag(catalog, record)
    wanted = [behind for behind in lag.tables if only in (None, behind.id)]
    if wanted:
        line = WalLine(catalog, record, OWNER)
        try:
            for behind in wanted:
                yield _applying(behind, lag), partial(_apply, line, behind, deadline)
        finally:
            line.close()
    if only is None:
        yield from expiry_steps(catalog.client, f"timeline {record.name}", [wal_shard(record.id)])
        yield from _tidying(catalog, record, lag, deadline, is_dry=dry_run, is_moved=bool(wanted))


def _applying(behind: Behind, lag: Lag) -> Step:
    if not behind.is_ready:
        return Step(behind.table, "wait", "its WAL", "its newest rendition is still being copied: finish that first")
    show = SCHEMA.show
    if not behind.commits:
        what = f"nothing up to {show(lag.upper)}"
        return Step(behind.table, "apply", what, f"a handover at {show(behind.first)} has to be complete")
    what = f"{_count(behind.commits, 'commit')} up to {show(lag.upper)}"
    return Step(behind.table, "apply", what, f"they are in the WAL alone since {show(behind.first)}")


def _apply(line: WalLine, behind: Behind, deadline: Deadline) -> None:
    if behind.is_ready:
        line.again(lambda: apply(line, deadline, behind.id), deadline)


def _tidying(
    catalog: Catalog, record: TimelineRecord, lag: Lag, deadline: Deadline, *, is_dry: bool, is_moved: bool
) -> Iterator[tuple[Step, Do]]:
    if is_dry:
        if all(behind.is_ready for behind in lag.tables):
            lag = lag._replace(done=lag.rows, keep=lag.upper - 1)
    elif is_moved:
        lag = fetch_lag(catalog, record)
    if lag.is_due():
        what = _count(lag.done, "row") if lag.done else "history"
        up_to = SCHEMA.show(max(0, lag.keep))
        yield (
            Step(f"timeline {record.name}", "tidy", f"{what} of its WAL", f"its tables have all that is up to {up_to}"),
            partial(_tidy, catalog, record, deadline),
        )


def _tidy(catalog: Catalog, record: TimelineRecord, deadline: Deadline) -> None:
    with catalog.client.open_writer(wal_shard(record.id), SCHEMA, layer=LAYER) as write:
        tidy(catalog, record, deadline, lambda: write)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
