"""A source of files to load by tasks, and what has to be in its collections."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import persist_lib as persist
from persist_lib.sources import Files, Meaning, Sources
from persist_lib.sources.bindings import Window

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})


class Place:
    """A location on disk with a folder of files."""

    def __init__(self, folder: Path, config: persist.Config | None = None) -> None:
        self.client = persist.open(f"file:{folder}/data", config=config)
        self.folder = folder / "in"
        self.folder.mkdir()
        self.sources = Sources(self.client.controller())

    def create(self, **options: Any) -> None:
        meaning = options.pop("meaning", Meaning(envelope="upsert", keep_raw=True))
        reader = Files(place=str(self.folder), format="jsonl")
        self.sources.create("s", reader, SCHEMA, meaning=meaning, **options)
        for shard in self.client.shards():
            self.client.set_hold(shard, "history", 0)

    def write(self, name: str, *rows: object) -> None:
        with (self.folder / name).open("ab") as file:
            for row in rows:
                file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")

    def write_many(self, rng: np.random.Generator, files: int, lines: int, keys: int) -> None:
        for number in range(files):
            rows: list[object] = [
                b"oh no" if rng.random() < 0.01 else {"id": int(rng.integers(keys)), "word": f"w{number}-{line}"}
                for line in range(lines)
            ]
            self.write(f"{number}.jsonl", *rows)

    def updates(self, name: str) -> Counter[tuple[Any, ...]]:
        with self.sources.controller.open_reader(name) as reader, reader.changes(None) as changes:
            return Counter(tuple(sorted((key, str(one)) for key, one in row.items())) for row in changes.to_pylist())

    def rows(self) -> list[dict[str, Any]]:
        with self.sources.controller.open_reader("s") as reader, reader.snapshot() as rows:
            return list(rows.to_pylist())

    def folded(self) -> dict[int, str]:
        """The last word of each id, by the times at which lines were bound, files and lines."""
        with closing(self.sources.open("s")) as instance:
            bound = instance._clock.since(0)
            parts = list(instance._parts(Window(0, bound.upper, bound.start, bound.steps)))
        lines = [line for _, some in parts for line in some.column("value").to_pylist()]
        return {row["id"]: row["word"] for row in map(json.loads, filter(b"oh no".__ne__, lines))}

    def check_same(self) -> None:
        """See that an instance that decodes all of it again would write exactly what is there."""
        counts: list[int] = []
        with closing(self.sources.open("s")) as instance:
            bound = instance._clock.since(0)
            whole = Window(0, bound.upper, bound.start, bound.steps)
            for part, some in instance._parts(whole):
                made = instance._made(some, part, instance._client.runtime.deadline(60))
                for role, target in instance._writing().items():
                    assert target.fetch_upper() >= part.end
                    target.check(made[role], part.start, part.end)
                    counts.append(made[role].num_rows)
        assert counts
        assert sum(counts) > 0
