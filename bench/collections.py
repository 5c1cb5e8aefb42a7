"""Collections beside shards: a snapshot of eight shards beside one, and a listener's memory at a large handover.

The listener is measured in a process of its own, by the peak of its resident memory. It merges all of both renditions,
which share no row. That its memory is bounded shows in the peak at several times the rows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

import persist_lib as persist
from bench.figures import Figure, in_turn, peak_mib
from bench.peer import ROOT

SCHEMA = persist.Schema({"id": "int64 not null"}, {"state": "string", "cents": "int64", "note": "string"})
SHARDS = 8
MERGE_BYTES = 64 << 20
"""What the listener may use for merging."""
MORE = 4
"""How many times the rows the larger handover has."""


def collections(quick: bool) -> list[Figure]:
    """A snapshot of eight shards beside one of the same rows, and the peak memory of a listener at a handover."""
    rows, rounds = (200_000, 1) if quick else (4_000_000, 7)
    return [*_snapshots(rows, rounds), *_handovers(50_000 if quick else 1_000_000)]


def _snapshots(rows: int, rounds: int) -> list[Figure]:
    with TemporaryDirectory(prefix="persist-bench-") as folder, persist.open(f"file:{folder}/data") as client:
        controller = client.controller()
        controller.create("eight", SCHEMA, shards=SHARDS, mode="compare_and_append")
        with client.open_writer("one", SCHEMA) as one, controller.open_writer("eight") as eight:
            for number in range(4):
                table = _rows(range(number * rows // 4, (number + 1) * rows // 4), 0)
                one.append_now(table)
                eight.append_now(table)
        with client.open_reader("one") as reader, controller.open_reader("eight") as readers:
            for handle in (reader, readers):
                handle.downgrade_since(3)
            controller.alter("eight", retention=0)
            controller.tend("eight")
            for shard in ("one", *controller.describe("eight").active.shards):
                client.maintain(shard)
            found = [
                (shape, *in_turn(partial(_read, readers, shape), partial(_read, reader, shape), rounds))
                for shape in ("to_arrow", "splits")
            ]
            if readers.snapshot(3).to_arrow().num_rows != rows:
                raise SystemExit("the snapshot lost rows")
    return [
        Figure(f"snapshot-of-8-shards-{shape}", rows / ours / 1e6, rows / theirs / 1e6, "M/s", "one shard",
               at_least=0.8, note=f"{rows} rows, compacted")
        for shape, ours, theirs in found
    ]  # fmt: skip


def _read(reader: object, shape: str) -> None:
    with reader.snapshot(3) as snapshot:  # type: ignore[attr-defined]
        if shape == "to_arrow":
            snapshot.to_arrow()
            return
        for split in snapshot.splits(SHARDS):
            for _ in split.batches():
                pass


def _handovers(rows: int) -> list[Figure]:
    peaks = []
    for count in (rows, MORE * rows):
        done = subprocess.run(
            [sys.executable, "-m", "bench.collections", str(count)],
            capture_output=True,
            check=True,
            cwd=ROOT,
            text=True,
        )
        peaks.append([float(word) for word in done.stdout.split()])
    (small, _, seconds), (large, _, _) = peaks
    return [
        Figure("handover-listener-peak", large, small, "MiB", f"{rows} rows", at_most=1.5,
               note=f"{MORE * rows} rows a side, none shared; {rows} took {seconds:.2f} s"),
    ]  # fmt: skip


def _rows(ids: range, add: int) -> pa.Table:
    numbers = np.asarray(ids)
    states = np.array(["placed", "paid", "packed", "sent"])[numbers % 4]
    notes = np.char.add("note ", ((numbers * 104_729) % 1_000_003).astype(str))
    return pa.table({"id": numbers, "state": states, "cents": numbers * 7919 % 100_000 + add, "note": notes})


def listen(rows: int) -> None:
    """Prints the peak of memory while a listener passes a handover between two renditions without a common row."""
    with TemporaryDirectory(prefix="persist-bench-") as folder:
        subprocess.run([sys.executable, "-m", "bench.collections", "fill", folder, str(rows)], check=True, cwd=ROOT)
        config = persist.Config(merge_bytes=MERGE_BYTES)
        with persist.open(f"file:{folder}/data", config=config) as client, client.controller() as controller:
            start = controller.describe("c").active.start or 0
            with controller.open_reader("c") as reader, reader.listen(start - 1) as listener:
                before, began, count = peak_mib(), time.perf_counter(), 0
                for event in listener:
                    if isinstance(event, persist.Updates):
                        count += event.table.num_rows
                    elif count:
                        break
                took = time.perf_counter() - began
            if count != 2 * rows:
                raise SystemExit(f"the listener got {count} updates of {2 * rows}")
            print(peak_mib(), before, took)


def fill(folder: str, rows: int) -> None:
    """A collection of 8 shards, handed over to another one of 5 in which every row is another one."""
    with persist.open(f"file:{folder}/data") as client, client.controller() as controller:
        controller.create("c", SCHEMA, shards=SHARDS, mode="compare_and_append")
        for number in (1, 2):
            if number == 2:
                controller.make_rendition("c", shards=5)
            with controller.open_writer("c", rendition=number if number == 2 else None) as write:
                write.append_now(_rows(range(rows), number))
        upper = controller.describe("c").upper.time or 0
        with controller.open_writer("c", rendition=2) as write:
            write.advance_upper(upper + 1)
        controller.hand_over("c", 2)


if __name__ == "__main__":
    fill(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "fill" else listen(int(sys.argv[1]))
