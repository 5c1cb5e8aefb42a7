"""A source on files that grow, and what any instance of it may be made to do; with what must always hold of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

import persist_lib as persist
from persist_lib.errors import PersistError, SinceViolation
from persist_lib.sources import Files, Ingestion, Mark, Meaning, Sources
from persist_lib.sources.bindings import Bindings, Bound
from persist_lib.sources.files.reader import LineFiles
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
CONFIG = persist.Config(lease_ms=20_000, timeout_s=5, inline_bytes=0)
Row = tuple[Any, ...]


class Died(BaseException):
    """The process is gone."""


def step_on(world: World, instance: Ingestion) -> None:
    """Take a step a little later, and again after what may pass."""
    world.clock.advance(2)
    for _ in range(3):
        with suppress(PersistError):
            instance.step()
            return
    instance.step()


class Lines:
    """What is in the files, and what a plain loop makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder, dict[str, bytes]()
        folder.mkdir(exist_ok=True)

    def append(self, name: str, data: bytes) -> None:
        with (self.folder / f"{name}.jsonl").open("ab") as file:
            file.write(data)
        self.whole[f"{name}.jsonl"] = self.whole.get(f"{name}.jsonl", b"") + data

    def add(self, name: str, id_: int, word: str) -> None:
        self.append(name, json.dumps({"id": id_, "word": word}).encode() + b"\n")

    def messages(self) -> dict[str, list[tuple[int, bytes]]]:
        """Each file's whole lines with their addresses."""
        found = {}
        for name, data in self.whole.items():
            at, lines = 0, []
            for line in data.split(b"\n")[:-1]:
                lines.append((at, line))
                at += len(line) + 1
            found[name] = lines
        return found


class Watched:
    """A source with what it has told so far. `check` says whether all of it is still so, at every time."""

    def __init__(self, world: World, lines: Lines, meaning: Meaning, shards: int = 2) -> None:
        self.world, self.lines, self.meaning = world, lines, meaning
        self.client = world.client(CONFIG)
        self.controller = self.client.controller()
        self.sources = self.controller.sources()
        self.sources.create(
            "s", Files(place=str(lines.folder), format="jsonl"), SCHEMA, meaning=meaning, shards=shards, retention=0
        )
        self.known: dict[tuple[str, int], Counter[Row]] = {}
        self.time = 0
        self.asked: list[tuple[str, int]] = []
        self.told: dict[str, int] = {}
        self.bound: dict[tuple[str, int], int] = {}

    def open(self, client: persist.Client) -> Ingestion:
        return Sources(client.controller()).open("s")

    def roles(self) -> list[str]:
        return ["s", "s/errors", *(["s/raw"] if self.meaning.keep_raw else [])]

    def learn(self) -> int:
        """Look at all collections as of their newest time and their oldest; what was seen once is so for ever."""
        uppers = []
        for name in self.roles():
            with self.controller.open_reader(name) as reader:
                upper = reader.fetch_upper().time or 0
                uppers.append(upper)
                since = reader.since.time or 0
                for as_of in {upper - 1, *(time for one, time in self.known if one == name and since <= time < upper)}:
                    if as_of < since:
                        continue
                    with suppress(SinceViolation):
                        rows = reader.snapshot(as_of, diff=True).to_pylist()
                        found = Counter({tuple(row[n] for n in row if n != "_diff"): row["_diff"] for row in rows})
                        assert self.known.setdefault((name, as_of), found) == found, (name, as_of)
        assert min(uppers) >= self.time, "t went back"
        self.time = min(uppers)
        return self.time

    def durable(self) -> dict[str, int]:
        """The addresses at t: nothing before them may be asked for again."""
        return {partition: mark.address for partition, mark in self.sources.show("s").durable.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what readers are asked for and told, and each binding that anybody reads. None ever changes."""
        read, tell, since = LineFiles.read, LineFiles.tell, Bindings.since

        def noted(reader: LineFiles, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
            self.asked.append((partition, start.address))
            return read(reader, partition, start, end)

        def told(_reader: LineFiles, marks: Mapping[str, Mark]) -> None:
            for partition, mark in marks.items():
                self.told[partition] = max(self.told.get(partition, 0), mark.address)

        def bound(bindings: Bindings, time: int) -> Bound:
            found = since(bindings, time)
            for step in found.steps:
                for partition, mark in step.marks.items():
                    assert self.bound.setdefault((partition, mark.address), step.time) == step.time
            return found

        for kind, name, instead in ((LineFiles, "read", noted), (LineFiles, "tell", told), (Bindings, "since", bound)):
            setattr(kind, name, instead)
        try:
            yield
        finally:
            for kind, name, was in ((LineFiles, "read", read), (LineFiles, "tell", tell), (Bindings, "since", since)):
                setattr(kind, name, was)

    def check_end(self) -> None:
        """All instances are at rest and all is bound: the collections are what a plain loop makes of the files."""
        messages = self.lines.messages()
        order = self.history_order(messages)
        contents: dict[int, Any] = {}
        rows: Counter[Row] = Counter()
        errors: Counter[Row] = Counter()
        for name, address, line in order:
            try:
                found = json.loads(line)
            except ValueError:
                if line:
                    errors[name, address] += 1
                continue
            contents[found["id"]] = found["word"]
            rows[found["id"], found["word"]] += 1
        with self.controller.open_reader("s") as reader:
            got = Counter({(row["id"], row["word"]): row["_diff"] for row in reader.snapshot(diff=True).to_pylist()})
        assert got == (rows if self.meaning.envelope == "none" else Counter(contents.items()))
        with self.controller.open_reader("s/errors") as reader:
            bad = Counter(
                {(row["partition"], row["address"]): row["_diff"] for row in reader.snapshot(diff=True).to_pylist()}
            )
        assert bad == errors
        if self.meaning.keep_raw:
            with self.controller.open_reader("s/raw") as reader:
                raw = Counter(
                    (row["partition"], row["address"], row["value"]) for row in reader.snapshot(diff=True).to_pylist()
                )
            assert raw == Counter(order)

    def history_order(self, messages: dict[str, list[tuple[int, bytes]]]) -> list[tuple[str, int, bytes]]:
        """All messages by the times that were recorded of them, then by place."""
        found = []
        for name, lines in messages.items():
            for address, line in lines:
                times = [time for (one, end), time in self.bound.items() if one == name and end > address]
                assert times, f"{name} at {address} has no time"
                time = min(times)
                found.append((time, name, address, line))
        return [(name, address, line) for _, name, address, line in sorted(found)]
