"""Reading and maintaining a shard that got many small appends, beside deltalake on the same local disk.

A million distinct rows in 250 appends of 4,000. Each side is used as its users would: `persist.open` of a `file:`
location and `deltalake` of a folder, both with their default settings, opened anew for each run, deltalake in a process
of its own. Both have all cores. The peer's rows have no time and no diff, as a table of it would not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

import persist_lib as persist
from bench.append import BULK, bulk_table
from bench.figures import Figure, beside, timed
from bench.peer import Peer

FULL, QUICK = (250, 4_000), (20, 500)
ROUNDS = 7


def read_uncompacted(quick: bool) -> list[Figure]:
    """A snapshot of all that was appended, before any maintenance, beside a scan of the same rows."""
    with _filled(quick) as sides:
        return [_scans("read-uncompacted", sides, 2.0)]


def read_history(quick: bool) -> list[Figure]:
    """The same after maintenance that had to keep all history, beside a scan after `optimize`."""
    with _filled(quick) as sides:
        sides.maintain()
        sides.optimize()
        return [_scans("read-history", sides, 1.2)]


def maintain_small(quick: bool) -> list[Figure]:
    """All duties of a shard whose appends were never compacted, beside deltalake's `optimize`, which only packs."""
    with _filled(quick) as sides:
        rounds = 1 if quick else ROUNDS
        copies = [sides.copy(f"round-{number}") for number in range(rounds + 1)]
        ours = iter(copies)
        with Peer("bench.lake:local_delta", *[copy.delta for copy in copies]) as delta:
            settings = delta.settings
            mine, peer = beside(
                lambda: timed(lambda: next(ours).maintain()), lambda: delta.run(1, "optimize")[0], rounds
            )
        for copy in copies:
            if (batches := copy.batches()) != 1:
                raise SystemExit(f"maintenance left {batches} batches")
    return [Figure("maintain-small", mine * 1e3, peer * 1e3, "ms", "deltalake's optimize.compact", at_most=2.0,
                   note=f"{sides.what}, history kept", settings=settings)]  # fmt: skip


class Sides(NamedTuple):
    """A shard and a Delta table of the same rows, below one folder."""

    folder: Path
    appends: int
    rows: int

    @property
    def what(self) -> str:
        """The number of rows and appends, as text."""
        return f"{self.appends * self.rows:,} rows in {self.appends} appends"

    @property
    def url(self) -> str:
        """Where the shard is."""
        return f"file:{self.folder}/ours"

    @property
    def delta(self) -> str:
        """Where the Delta table is."""
        return f"{self.folder}/delta"

    def fill(self) -> None:
        """Append the same rows to both."""
        table = bulk_table(self.appends * self.rows, is_shuffled=True)
        plain = table.drop_columns(["_time", "_diff"])
        delta = DeltaTable.create(self.delta, plain.schema)
        with persist.open(self.url) as client, client.open_writer("bulk", BULK) as write:
            for time in range(self.appends):
                updates = table.slice(time * self.rows, self.rows)
                times = pa.repeat(pa.scalar(time, pa.uint64()), self.rows)
                write.compare_and_append(updates.set_column(4, "_time", times), time, time + 1)
                write_deltalake(delta, plain.slice(time * self.rows, self.rows), mode="append")

    def snapshot(self) -> pa.Table:
        """Everything as of the newest time."""
        with persist.open(self.url) as client, client.open_reader("bulk") as read:
            return read.snapshot(self.appends - 1, diff=True).to_arrow()

    def scan(self) -> pa.Table:
        """Everything that the Delta table holds."""
        return DeltaTable(self.delta).to_pyarrow_table()

    def maintain(self) -> None:
        """All duties of the shard."""
        with persist.open(self.url) as client:
            client.maintain("bulk")

    def optimize(self) -> None:
        """Make few files of many."""
        DeltaTable(self.delta).optimize.compact()

    def batches(self) -> int:
        """How many batches that are not empty the shard has."""
        with persist.open(self.url, read_only=True) as client:
            return sum(1 for batch in client.inspect("bulk").state.trace if batch.count)

    def copy(self, name: str) -> Sides:
        """Copy both sides to another folder."""
        for side in ("ours", "delta"):
            shutil.copytree(self.folder / side, self.folder / name / side)
        return self._replace(folder=self.folder / name)


@contextmanager
def _filled(quick: bool) -> Iterator[Sides]:
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        sides = Sides(Path(folder), *(QUICK if quick else FULL))
        sides.fill()
        yield sides


def _scans(name: str, sides: Sides, at_most: float) -> Figure:
    _check(sides)
    rounds = 3 if sides.appends == QUICK[0] else ROUNDS
    with Peer("bench.lake:local_delta", sides.delta) as delta:
        ours, peer = beside(lambda: timed(sides.snapshot), lambda: delta.run(1, "scan")[0], rounds)
        return Figure(name, ours * 1e3, peer * 1e3, "ms", "deltalake's to_pyarrow_table", at_most=at_most,
                      note=sides.what, settings=delta.settings)  # fmt: skip


def _check(sides: Sides) -> None:
    """Both hold the same rows."""
    scans: list[Callable[[], pa.Table]] = [sides.snapshot, sides.scan]
    ours, peer = (scan().select(BULK.names).sort_by("id") for scan in scans)
    if not ours.equals(peer.cast(ours.schema)):
        raise SystemExit("the two hold different rows")
