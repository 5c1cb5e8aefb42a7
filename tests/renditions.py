"""Collections in tests: what they should hold, as plain lists of updates, and checks for all kinds of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import persist_lib as persist
from persist_lib.catalog import CollectionReader, Controller
from persist_lib.testing import Model, contents_of, updates_of
from persist_lib.testing.model import Row, summed
from tests.worlds import SCHEMA, row, updates

Heard = Counter[tuple[Row, int]]


class Told:
    """The reference model of a collection: a model for each rendition, and which one is the collection from when on."""

    def __init__(self) -> None:
        self.renditions = {1: Model()}
        self.starts = [(0, 1)]
        self.schema: persist.Schema | None = None
        """The columns in which it is checked; None for the newest."""

    def active(self, time: int) -> int:
        return next(number for start, number in reversed(self.starts) if start <= time)

    @property
    def last(self) -> Model:
        return self.renditions[self.starts[-1][1]]

    def contents(self, as_of: int) -> Counter[Row]:
        """The multiset as of a time: of the rendition that is the collection then."""
        return self.renditions[self.active(as_of)].contents(as_of)

    def copy(self, number: int, of: int) -> None:
        """A rendition that has all that another one has."""
        self.renditions[number] = Model()
        self.renditions[number].updates = list(self.renditions[of].updates)
        self.renditions[number].upper = self.renditions[of].upper

    def hand_over(self, number: int, time: int) -> None:
        self.starts.append((time, number))


class Listening:
    """A listener, and what it adds up to since its snapshot."""

    def __init__(self, reader: CollectionReader, as_of: int, told: Told) -> None:
        self.told, self.total = told, contents_of(reader.snapshot(as_of, diff=True).to_arrow())
        assert self.total == told.contents(as_of)
        self.listen = reader.listen(as_of)
        self.frontier = as_of + 1

    def poll(self) -> None:
        """Whatever came adds up to the model, at each progress."""
        for event in self.listen.poll():
            self.take(event)

    def take(self, event: persist.Updates | persist.Progress) -> None:
        if isinstance(event, persist.Updates):
            for data, time, diff in updates_of(event.table):
                assert time >= self.frontier, "an update before the progress that was told"
                self.total[data] += diff
            return
        assert event.frontier.time is not None
        assert event.frontier.time > self.frontier
        self.frontier = event.frontier.time
        assert summed(self.total.items()) == self.told.contents(self.frontier - 1), f"as of {self.frontier - 1}"


def create(client: persist.Client, mode: Any = "compare_and_append", **options: Any) -> Controller:
    """A controller of the collection `c`, with three shards."""
    controller = client.controller()
    controller.create("c", SCHEMA, **{"shards": 3, **options}, mode=mode)
    return controller


def write(controller: Controller, told: Told, times: Iterable[int], rows: int = 5, word: str = "w") -> None:
    """Append `rows` rows at each of these times, one after the other."""
    with controller.open_writer("c") as writer:
        for time in times:
            made = [row(10 * i + time % 10, word, time) for i in range(rows)]
            added = dict.fromkeys(name for name in writer.schema.names if name not in SCHEMA.names)
            append = writer.append if writer.mode == "append" else writer.compare_and_append
            append([{**one, **added} for one in made], time, time + 1)
            told.last.append(updates(made), persist.at(time), persist.at(time + 1))


def check(controller: Controller, told: Told, first: int, last: int) -> None:
    """Every time from `first` to `last` reads as the model says, as a snapshot and as changes."""
    with controller.open_reader("c", told.schema) as reader:
        for time in range(first, last + 1):
            assert contents_of(reader.snapshot(time, timeout=1, diff=True).to_arrow()) == told.contents(time), (
                f"as of {time}"
            )
        moved = updates_of(reader.changes(first, last, timeout=1).to_arrow())
        total = told.contents(first) + Counter()
        for data, time, diff in moved:
            assert first < time <= last
            total[data] += diff
        assert summed(total.items()) == told.contents(last)


def handed(controller: Controller, told: Told, of: int = 1, **options: Any) -> int:
    """Make a copy of the active rendition, hand over to it at once, and copy the rest. Answers its number."""
    made = controller.make_rendition("c", copy=True, **options).number
    controller.copy_rendition("c", made)
    start = controller.hand_over("c", made)
    controller.copy_rendition("c", made, to_end=True)
    told.copy(made, of)
    told.hand_over(made, start)
    return made
