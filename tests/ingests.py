"""A source on files that grow, and what any instance of it may be made to do; with what must always hold of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

import persist_lib as persist
from persist_lib.errors import PersistError, SinceViolation
from persist_lib.sources import Files, Ingestion, Kafka, Mark, Meaning, Sources
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

    form = "{}.jsonl"
    """What the file of a name is called."""
    outputs: Mapping[str, str] = {"s": ""}
    """With what the partitions of each output begin."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder, dict[str, bytes]()
        folder.mkdir(exist_ok=True)

    def declared(self) -> dict[str, Any]:
        """A reader of them, and the columns."""
        return {"reader": Files(place=str(self.folder), format="jsonl"), "schema": SCHEMA}

    def append(self, name: str, data: bytes) -> None:
        partition = self.form.format(name)
        path = self.folder / partition
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        self.whole[partition] = self.whole.get(partition, b"") + data

    def add(self, name: str, id_: int, word: str) -> None:
        self.append(name, self.line(id_, word))

    def line(self, id_: int, word: str) -> bytes:
        return json.dumps({"id": id_, "word": word}).encode() + b"\n"

    def row_of(self, line: bytes) -> dict[str, Any] | None:
        """What a line says; None for one that is bad."""
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        return found

    def finish(self) -> None:
        """What was begun is whole."""

    def is_whole(self, _contents: Sequence[Counter[Row]]) -> bool:
        """Whether outputs that were read as of one time show nothing by half."""
        return True

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


class Topics(Lines):
    """The same in topics of Kafka, which have an output each: the folder `a` is the topic a."""

    form = "{}/0.jsonl"
    silent: tuple[str, ...] = ()
    """Topics without an output."""

    def __init__(self, folder: Path, names: Sequence[str] = ("a", "b")) -> None:
        super().__init__(folder)
        self.names = tuple(names)
        self.outputs = {f"s/{name}": f"{name}/" for name in self.names}

    def declared(self) -> dict[str, Any]:
        kinds = ("int64", "int32", "uint16")
        tables = {
            name: persist.Schema(key={"id": f"{kind} not null"}, value={"word": "string"})
            for name, kind in zip(self.names, kinds, strict=False)
        }
        topics, options = (*self.names, *self.silent), {"folder": str(self.folder)}
        return {"reader": Kafka(brokers="none:1", topics=topics, options=options), "tables": tables}


class Transfers(Topics):
    """Each line is a transaction over two topics. Its other half comes with the next one, or at the end."""

    silent = ("marks",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.count = 0
        self.left: list[tuple[str, bytes]] = []

    def add(self, name: str, id_: int, word: str) -> None:
        self.finish()
        (other,) = {*self.names} - {name}
        self.count += 1
        self.append(name, self.line(id_, word, 1))
        self.append("marks", json.dumps({"status": "END", "id": f"t{self.count}", "event_count": 2}).encode() + b"\n")
        self.left.append((other, self.line(id_, word, 2)))

    def line(self, id_: int, word: str, number: int = 0) -> bytes:
        """A change, of the transaction that was begun last if it has a number there."""
        change: dict[str, Any] = {"op": "c", "after": {"id": id_, "word": word}}
        if number:
            change["transaction"] = {"id": f"t{self.count}", "total_order": number}
        return json.dumps(change).encode() + b"\n"

    def row_of(self, line: bytes) -> dict[str, Any] | None:
        found = super().row_of(line)
        return found and found.get("after", found)

    def finish(self) -> None:
        for name, line in self.left:
            self.append(name, line)
        self.left.clear()

    def is_whole(self, contents: Sequence[Counter[Row]]) -> bool:
        """Whether all have the same rows, but for the one that comes in no transaction."""
        one, *others = ({row for row in rows if row[0] != ALONE} for rows in contents)
        return all(one == other for other in others)


ALONE = 3
"""The key of a change that is of no transaction."""


@contextmanager
def topics_of_files() -> Iterator[None]:
    """Let topics of Kafka be files, which can be read without a broker."""

    def opened(kind: Kafka) -> Any:
        return Files(place=kind.options["folder"], format="jsonl").open()

    with mock.patch.object(Kafka, "open", opened), mock.patch.object(Kafka, "check"):
        yield


class Watched:
    """A source with what it has told so far. `check` says whether all of it is still so, at every time."""

    def __init__(self, world: World, lines: Lines, meaning: Meaning, shards: int = 2) -> None:
        self.world, self.lines, self.meaning = world, lines, meaning
        self.client = world.client(CONFIG)
        self.controller = self.client.controller()
        self.sources = self.controller.sources()
        self.sources.create("s", **lines.declared(), meaning=meaning, shards=shards, retention=0)
        self.known: dict[tuple[str, int], Counter[Row]] = {}
        self.time = 0
        self.asked: list[tuple[str, int]] = []
        self.told: dict[str, int] = {}
        self.bound: dict[tuple[str, int], int] = {}

    def open(self, client: persist.Client) -> Ingestion:
        return Sources(client.controller()).open("s")

    def roles(self) -> list[str]:
        return [*self.lines.outputs, "s/errors", *(["s/raw"] if self.meaning.keep_raw else [])]

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
                        found = self.contents(name, as_of)
                        assert self.known.setdefault((name, as_of), found) == found, (name, as_of)
        assert min(uppers) >= self.time, "t went back"
        self.time = min(uppers)
        if self.time:
            together = [self.contents(name, self.time - 1) for name in self.lines.outputs]
            assert self.lines.is_whole(together), together
        return self.time

    def contents(self, name: str, as_of: int | None = None) -> Counter[Row]:
        with self.controller.open_reader(name) as reader, reader.snapshot(as_of, diff=True) as snapshot:
            return Counter({tuple(row[n] for n in row if n != "_diff"): row["_diff"] for row in snapshot.to_pylist()})

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
        is_added = self.meaning.envelope == "none"
        errors = Counter((name, address) for name, address, line in order if line and self.lines.row_of(line) is None)
        for output, prefix in self.lines.outputs.items():
            its = [self.lines.row_of(line) for name, _, line in order if line and name.startswith(prefix)]
            rows = [(row["id"], row["word"]) for row in its if row is not None]
            assert self.contents(output) == Counter(rows if is_added else dict(rows).items()), output
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
