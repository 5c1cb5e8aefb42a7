"""The duties: what keeps shards, collections, tables and pending areas small, cheap and clean. One name each.

The library's `maintain`, the commands of `persist`, their keys in JSON, and Dagster's assets, jobs and schedules are
made from this table. A new duty is a line here, a function in `maintain.duties.FUNCTIONS`, a test, and a line in
docs/operations.md.

Only facts are here, so that `persist --help` does not load Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAINTENANCE_LEASE_MS = 60_000
"""The lease of the workers of commands and programs, which exclude one another: a killed one is in the way for at most
this long. The thread and the process that keep leases up do so for a living one, however long it works."""


class Duty(NamedTuple):
    """One kind of upkeep. `name` is what `persist maintain --only` takes, and its key, asset, job and schedule."""

    name: str
    does: str
    """What it does, in one sentence, for the command's help and the asset's description."""
    help: str = ""
    """More for the command's help."""
    after: tuple[str, ...] = ()
    """The duties that it builds on."""
    is_upkeep: bool = True
    """Whether `maintain` carries it out. These duties have a dry run; the others change no data."""
    is_last: bool = False
    """Whether it begins after the worker of the others is retired, so that it also judges what that worker left."""
    schedule: str = ""
    """When it is due by the clock, in cron's words, UTC. Minutes are odd: not everything has to start on the hour."""
    job: tuple[str, ...] = ()
    """What its Dagster job does, in order. Empty: only this."""
    kinds: tuple[str, ...] = ()
    """What it is made with, for Dagster's graph."""
    carrier: str = "shard"
    """What it looks after. Those of a shard reach every layer, as all of them keep their data in shards."""


DUTIES: tuple[Duty, ...] = (
    Duty(
        "leases", "Retire readers and writers whose lease has ended.",
        """
    They find out at their next call. A writer then registers again by itself; a reader has to be opened again. This
    does not move since; it moves with the next reader or hold that moves.
    """,
        schedule="* * * * *",
    ),
    Duty(
        "retention", "Give up the history that the retention policy does not keep.",
        """
    As far as readers and holds allow.
    """,
        after=("leases",),
    ),
    Duty(
        "compaction", "Merge batches that are in debt, so that reading stays fast.",
        """
    Never changes a shard's contents. The price is that of the requests, at the location's prices (see --prices).
    --dry-run says what is rewritten and why, and what is left alone.
    """,
        after=("retention",), schedule="53 4 * * *", kinds=("spark", "parquet"),
        job=("leases", "retention", "compaction", "publication", "rollups", "garbage", "census"),
    ),
    Duty(
        "publication", "Publish again what follows: tables that other engines read as Iceberg or Delta.",
        """
    Only where `--publish FORMAT --follow` asked for it, and something is newer than what is published.
    """,
        after=("compaction",),
    ),
    Duty(
        "rollups", "Copy a shard's state to Blob, if that is due, so that opening it stays fast.",
        """
    Garbage may wait for it, too.
    """,
        after=("compaction",),
    ),
    Duty(
        "garbage", "Delete garbage that no reader can reach any more, and truncate the log.",
        """
    No age is consulted: an object goes when no live reader can still read a state that refers to it. What has to wait
    is listed with the reader, or the missing rollup, that it waits for.
    """,
        after=("rollups",), schedule="7 * * * *", job=("retention", "rollups", "garbage"),
    ),
    Duty(
        "orphans", "Delete objects that were uploaded but never linked, and never can be.",
        """
    Lists the shard's objects, then reads its state. An object of a live writer is pending: it may be linked yet.
    """,
        after=("garbage",), is_last=True, schedule="23 2 * * *",
    ),
    Duty(
        "scrub", "Verify shards: walk logs, look for objects, read batches, and recompute all that is said of them.",
        """
    Changes no data. `persist verify` does it, and checks what the catalog promises, too. What was found sound is
    remembered in the location, and left out the next time; known damage is read again until it is sound or gone.
    """,
        after=("compaction",), is_upkeep=False, schedule="41 3 * * 0", kinds=("spark", "parquet"),
    ),
    Duty(
        "census",
        "Count everything about shards: batches, debt, garbage, leases, rollups, dollars.",
        after=("orphans", "scrub"), is_upkeep=False, schedule="*/15 * * * *",
    ),
)  # fmt: skip
"""In the order that frees the most: what is expired lets since move, what is compacted becomes garbage, and so on."""

LAYER_DUTIES: tuple[Duty, ...] = (
    Duty(
        "collections", "Settle commands, promise, move holds, take away renditions and collections that nobody needs, "
        "and apply and tidy the WALs of tables.",
        """
    It finishes commands that a killed process left, promises as far as the data is there, moves the holds by which
    history is kept, and takes away renditions and dropped collections that cannot be read any more. What is in the WAL
    of tables alone is applied to them, and (where all are looked after) taken out of the WAL.
    """,
        schedule="*/5 * * * *", carrier="collection",
    ),
    Duty(
        "pending", "Absorb what writers without coordination put into the pending areas of collections.",
        """
    It enters the collection's shard, and what is not needed any more becomes garbage. Where writers disagree about a
    time, nothing from then on is absorbed, and the exit code is 3; `persist pending choose` continues.
    """,
        schedule="*/5 * * * *", carrier="pending area",
    ),
)  # fmt: skip
"""The duties of what stands on shards. They find what is due: `Controller.tend`, `pending_area.absorb`."""

NAMES: tuple[str, ...] = tuple(duty.name for duty in DUTIES)
BY_NAME: Mapping[str, Duty] = {duty.name: duty for duty in (*DUTIES, *LAYER_DUTIES)}


def figures_of(answer: object) -> dict[str, int | float]:
    """What a duty did, in figures: the numbers in its answer, and how many of what is named there. Not its cost."""
    figures: dict[str, int | float] = {}
    for name in getattr(answer, "__struct_fields__", ()):
        value = getattr(answer, name)
        if isinstance(value, (int, float)):
            figures[name] = value
        elif isinstance(value, (tuple, list, dict, frozenset)):
            figures[name] = len(value)
    return figures
