"""An instance of the source `s`: `kafka_instance.py LOCATION NOTES`. It notes what it would write at each time."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from persist_lib.runtime.ambient import Deadline
from persist_lib.sources import Ingestion, running
from persist_lib.sources.bindings import Window


def digests(table: pa.Table) -> dict[int, str]:
    """A digest of the updates of each time, of their bytes in Arrow's format."""
    found = {}
    for time in pc.unique(table.column("_time")).to_pylist():
        sink = pa.BufferOutputStream()
        rows = table.filter(pc.equal(table.column("_time"), time)).combine_chunks()
        # Copied into buffers of its own: a slice of a larger one is written with what is around it.
        rows = pa.Table.from_pylist(rows.to_pylist(), schema=rows.schema)
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        found[time] = hashlib.sha256(sink.getvalue()).hexdigest()
    return found


def main(location: str, notes: Path) -> None:
    """Run until it is killed."""
    running.Ingestion.step_bytes, running.Ingestion.window_bytes = 2_000, 5_000
    write = Ingestion._write

    def noted(self: Ingestion, made: Mapping[str, pa.Table], window: Window, deadline: Deadline) -> None:
        with notes.open("a") as file:
            for role, table in made.items():
                for time, digest in digests(table).items():
                    file.write(json.dumps([role, time, digest]) + "\n")
        write(self, made, window, deadline)

    Ingestion._write = noted  # type: ignore[method-assign]
    with persist.open(location) as client:
        is_running = notes.with_name(f"{os.getpid()}.running")
        client.controller().sources().run("s", told=lambda _: is_running.touch(), interval_s=0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
