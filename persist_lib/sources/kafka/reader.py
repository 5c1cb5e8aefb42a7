"""Reads topics of Kafka as a source. A partition is "topic/number", and a message's address is its offset.

What a mark's check says (`Check`): the id of its topic, where the source began in the partition, and the place after
the last message that was read. A topic that was deleted and made again has another id. Where a source begins is bound
once: what retention had taken before then was never a part of it, and what it takes later is gone. And where brokers
lost messages and have others in their places, these were written by a leader of a later epoch.

Offsets without a message (of transactions, and where a topic was compacted) are covered like others. Their epochs are
not known, and may be later ones: so reading begins after the last message, and not at the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import KafkaError

from persist_lib.config import MIB
from persist_lib.errors import Diverged, Gone, NewerFormat
from persist_lib.sources.kafka.cluster import (
    Ahead,
    Cluster,
    Partition,
    Place,
    Topic,
    chunks_of,
    is_end,
    is_other_log,
    is_out_of_range,
    is_unknown_epoch,
)
from persist_lib.sources.kafka.kind import Kafka
from persist_lib.sources.protocol import START, Lag, Mark, Patience

BATCH = 10_000
"""Messages that are asked for at once, at most."""
MOST_AHEAD = 64 * MIB
"""Bytes that are kept of what was read and not asked for yet."""
PATIENCE = 30
"""How many times in a row nothing may come of what is said to be there, half a second each."""
LOOKS = 5
"""How often partitions are looked for that were there before."""
GUESS = 1024
"""Bytes of a message of a partition of which none was seen."""


class Check(NamedTuple):
    """What a mark says beside its address. As text: `id@first`, and if the epoch is known `:offset:epoch` of `last`."""

    id: str
    first: int
    last: Place

    def __str__(self) -> str:
        return f"{self.id}@{self.first}" + (f":{self.last.offset}:{self.last.epoch}" if self.last.is_known else "")


class Seen(NamedTuple):
    """What is known of the size of messages, and when the newest one that was read was written."""

    bytes: float
    timestamp: int | None


class KafkaReader:
    """A source reader of topics."""

    def __init__(self, declared: Kafka) -> None:
        self._declared = declared
        self._cluster = Cluster(declared)
        self._numbers = {name: place for place, name in enumerate(declared.names)}
        self._topics: dict[str, Topic] = {}
        self._ends: dict[Partition, int] = {}
        self._ahead: dict[Partition, Ahead] = {}
        self._reading: set[Partition] = set()
        self._seen: dict[Partition, Seen] = {}
        self._turn = 0

    def look(self) -> None:
        """Ask for the topics. Raises Determinate for one that is not there, and where no broker answers."""
        self._find_topics({})

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        """The last stable offsets, as far as messages can be kept. They are read on this occasion."""
        self._find_topics(bound)
        partitions = _partitions(self._topics)
        self._ends = self._cluster.ends(partitions)
        # Where the source begins in each partition that it has nothing of yet.
        begins = self._cluster.beginnings(one for one, end in self._ends.items() if end and named(one) not in bound)
        wanted = {}
        for one in partitions:
            at = self._start(one, bound.get(named(one)), begins)
            if at < self._ends[one]:
                wanted[one] = at
        if not wanted:
            return {}
        try:
            self._fill(wanted, bound, most_bytes)
        except _OutOfRange as error:
            raise self._lost(error, bound.get(named(error.partition))) from None
        self._verify(bound)
        found = {}
        for one, address in self._shared(wanted, most_bytes).items():
            first = _known(bound[named(one)]).first if named(one) in bound else begins[one]
            check = Check(self._topics[one[0]].id, first, self._ahead[one].last(address))
            found[named(one)] = Mark(address, str(check))
        return found

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        if start.address >= end.address:
            return
        one, at = parsed(partition), max(start.address, *(_known(mark).first for mark in (start, end)))
        if one[0] not in self._topics:
            self._topics = self._now({one})
        self._check_topic(partition, start, end)
        ahead, is_kept = self._begun(one, at, start)
        patience, is_new = Patience(PATIENCE), False
        while at < end.address:
            yield from ahead.between(at, end.address)
            at = max(at, min(end.address, ahead.end))
            ahead.forget(at)
            if at < end.address:
                is_new, reached = True, ahead.end
                self._focus(one)
                try:
                    self._take(BATCH)
                except _OutOfRange as error:
                    raise self._lost(error, Mark(at, end.check)) from None
                if patience.is_over(has_come=ahead.end != reached):
                    raise self._silent(one, at, end.address)
        if is_new:
            self._verify({partition: end})
        if not ahead.last(end.address).is_within(_known(end).last):
            raise (
                self._cluster.failed(f"{named(one)}: brokers lost messages that this instance had read. It reads again")
                if is_kept
                else _other_log(partition, end.address)
            )

    def estimate(self, partition: str, start: int, end: int) -> int:
        seen = self._seen.get(parsed(partition))
        return int((end - start) * (GUESS if seen is None else seen.bytes))

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        return {partition: lag.messages or 0 for partition, lag in self.lags(marks).items()}

    def lags(self, marks: Mapping[str, Mark]) -> Mapping[str, Lag]:
        found = {}
        for one, end in self._ends.items():
            mark, seen = marks.get(named(one), START), self._seen.get(one)
            left = end - max(mark.address, _known(mark).first)
            if left > 0:
                size = None if seen is None else int(left * seen.bytes)
                found[named(one)] = Lag(left, size, None if seen is None else seen.timestamp)
        return found

    def tell(self, marks: Mapping[str, Mark]) -> None:
        self._cluster.commit({parsed(partition): mark.address for partition, mark in marks.items()})

    def close(self) -> None:
        self._ahead.clear()
        self._reading.clear()
        self._cluster.close()

    def _find_topics(self, bound: Mapping[str, Mark]) -> None:
        self._topics = self._now(map(parsed, bound))
        for partition, mark in bound.items():
            self._check_topic(partition, mark)
        if missing := [name for name in self._declared.names if name not in self._topics]:
            raise self._cluster.failed(f"there is no topic {missing[0]!r}. Create it, or correct its name")

    def _now(self, known: Iterable[Partition]) -> dict[str, Topic]:
        """The topics as they are. A broker that has just started may not know of what was there for a moment."""
        wanted = set(known)
        found = self._cluster.topics(self._declared.names)
        for _ in range(LOOKS - 1):
            if wanted.issubset(_partitions(found)):
                break
            self._cluster.wait()
            found = self._cluster.topics(self._declared.names)
        return found

    def _check_topic(self, partition: str, *marks: Mark) -> None:
        name, number = parsed(partition)
        topic = self._topics.get(name)
        if topic is None or number not in topic.partitions:
            raise Gone(
                f"the topic {name} is gone, or its partition {number} is, and messages from {marks[0].address} on are "
                "still needed. Nothing of them was written. If it is deleted for good, see `persist source reset`",
                partition=partition, address=marks[0].address,
            )  # fmt: skip
        for mark in marks:
            known = _known(mark).id
            if known and topic.id and known != topic.id:
                raise Diverged(
                    f"the topic {name} is not the one that was read before: it was deleted and made again (its id was "
                    f"{known}, and is {topic.id}). Nothing of the new one was written. Give the source a topic under "
                    "another name, or see what `persist source reset` would lose",
                    partition=partition, address=mark.address,
                )  # fmt: skip

    def _verify(self, marks: Mapping[str, Mark]) -> None:
        """Whether what was read just now is of the topics that are known. An id never comes back."""
        known, self._topics = self._topics, self._now(map(parsed, marks))
        if any(name not in self._topics or self._topics[name].id != topic.id for name, topic in known.items()):
            for partition, mark in marks.items():
                self._check_topic(partition, mark)
            raise self._cluster.failed("a topic was made or deleted while it was read")

    def _start(self, one: Partition, mark: Mark | None, begins: Mapping[Partition, int]) -> int:
        if mark is None:
            return begins.get(one, 0)
        if self._ends[one] < mark.address:
            raise self._shorter(named(one), mark.address, self._ends[one])
        return mark.address

    def _fill(self, wanted: Mapping[Partition, int], bound: Mapping[str, Mark], most_bytes: int) -> None:
        """Read on until there is that much, or everything."""
        for one, at in wanted.items():
            ahead, is_kept = self._begun(one, at, bound.get(named(one), START))
            if is_kept and sum(ahead.bytes for ahead in self._ahead.values()) > MOST_AHEAD:
                ahead.forget(at)
        self._follow(wanted)
        left = most_bytes - sum(self._ahead[one].cut(at, MOST_AHEAD)[1] for one, at in wanted.items())
        patience = Patience(PATIENCE)
        while left > 0 and any(self._ahead[one].end < self._ends[one] for one in wanted):
            sizes = [self._seen[one].bytes for one in wanted if one in self._seen]
            taken = self._take(max(1, min(BATCH, int(left / max(sizes, default=GUESS)))))
            left -= taken or 0
            if patience.is_over(has_come=taken is not None):
                one, at = next((one, at) for one, at in wanted.items() if self._ahead[one].end < self._ends[one])
                raise self._silent(one, at, self._ends[one])

    def _take(self, most: int) -> int | None:
        """Read on: the next messages of all partitions that are read. Answers their bytes, None if nothing came."""
        found = self._cluster.consume(most)
        messages, taken = [one for one in found if one.error() is None], 0
        for topic, number, chunk in chunks_of(messages, self._numbers) if messages else ():
            one = topic, number
            taken += (size := int(chunk.sizes[-1]))
            newest = chunk.table.column("timestamp")[-1].value
            self._seen[one] = Seen(size / (int(chunk.addresses[-1] - chunk.addresses[0]) + 1), newest)
            if one in self._reading:
                self._ahead[one].add(chunk)
        for event in found if len(messages) < len(found) else ():
            if (error := event.error()) is not None:
                self._note(error, (event.topic(), event.partition()), event.offset())
        return taken if found else None

    def _note(self, error: KafkaError, one: Partition, offset: int) -> None:
        if is_end(error):
            if one in self._reading:
                self._ahead[one].end = max(self._ahead[one].end, offset)
        elif is_out_of_range(error):
            raise _OutOfRange(one, error)
        elif one[0] in self._numbers or error.fatal():
            raise self._cluster.failed(f"{named(one)}: {error.str()}")

    def _shared(self, wanted: Mapping[Partition, int], most_bytes: int) -> dict[Partition, int]:
        """How far each partition is bound: a fair share for each, where those with little leave theirs to others."""
        self._turn += 1
        turns = {one: (place + self._turn) % len(wanted) for place, one in enumerate(wanted)}
        order = sorted(wanted, key=lambda one: (self._ahead[one].bytes, turns[one]))
        found, left = {}, most_bytes
        for place, one in enumerate(order):
            if left <= 0:
                break
            address, taken = self._ahead[one].cut(wanted[one], max(1, left // (len(order) - place)))
            address = min(address, self._ends[one])
            if address > wanted[one]:
                found[one] = address
                left -= max(taken, 1)
        return found

    def _begun(self, one: Partition, at: int, mark: Mark) -> tuple[Ahead, bool]:
        """What was read of a partition from an offset on, and whether there may be something.

        Where that is nothing, or of another log than the mark at this offset, it begins there.
        """
        ahead, last = self._ahead.get(one), _known(mark).last if mark.address == at else Place(at)
        if ahead is not None and ahead.start <= at <= ahead.end and ahead.last(at).fits(last):
            return ahead, True
        if one in self._reading:
            self._cluster.leave([one])
            self._reading.discard(one)
        self._ahead[one] = Ahead(at, last)
        return self._ahead[one], False

    def _follow(self, partitions: Iterable[Partition]) -> None:
        """Read partitions on, after the last message that was read of each; or from where it is, if that is gone."""
        new = {one: self._ahead[one].last(self._ahead[one].end) for one in partitions if one not in self._reading}
        if not new:
            return
        begins = self._cluster.beginnings(one for one, at in new.items() if at.offset < self._ahead[one].end)
        new |= {one: Place(self._ahead[one].end) for one, begin in begins.items() if new[one].offset < begin}
        self._cluster.read_from(new)
        self._reading.update(new)

    def _focus(self, one: Partition) -> None:
        """Read a partition, and no other one as long as much is kept of these."""
        self._follow([one])
        others = self._reading - {one}
        if others and sum(ahead.bytes for ahead in self._ahead.values()) > MOST_AHEAD:
            self._cluster.leave(others)
            self._reading = {one}

    def _lost(self, error: _OutOfRange, mark: Mark | None) -> Exception:
        """Why the brokers do not give what is at an offset."""
        one = error.partition
        begin, end = self._cluster.beginnings([one])[one], self._cluster.ends([one])[one]
        if mark is None:
            return self._cluster.failed(f"{named(one)}: retention went on to {begin} while it was looked at first")
        if mark.address > end:
            return self._shorter(named(one), mark.address, end)
        if is_other_log(error.event):
            return _other_log(named(one), mark.address)
        if begin <= mark.address and is_unknown_epoch(error.event):
            return self._cluster.failed(
                f"{named(one)}: the broker that answers knows no leader as new as the one that wrote what was read "
                f"before {mark.address}: has it not heard of that one yet? ({error.event.str()})"
            )
        if begin <= mark.address:
            return self._cluster.failed(f"{named(one)}: brokers did not give what is at {mark.address}, and have it")
        return Gone(
            f"{named(one)}: messages from {mark.address} to {begin} are still needed, and are gone: retention or "
            "a user deleted them. Nothing of them was written. Keep messages until `persist source show` says that "
            "they are durable. If they cannot be had again, see what `persist source reset` would lose",
            partition=named(one), address=mark.address, begin=begin,
        )  # fmt: skip

    def _shorter(self, partition: str, address: int, end: int) -> Diverged:
        return Diverged(
            f"{partition} ends at {end}, and was read up to {address} before: brokers lost messages that they had, or "
            "the topic was deleted and made again. Nothing of what came since was written. See what "
            "`persist source reset` would lose",
            partition=partition, address=address,
        )  # fmt: skip

    def _silent(self, one: Partition, at: int, end: int) -> Exception:
        return self._cluster.failed(f"{named(one)}: there are messages from {at} to {end}, and none came")


class _OutOfRange(Exception):
    """A partition has nothing at the offset that was asked for, as an event says."""

    def __init__(self, partition: Partition, event: KafkaError) -> None:
        super().__init__(partition)
        self.partition, self.event = partition, event


def _other_log(partition: str, address: int) -> Diverged:
    return Diverged(
        f"{partition}: what is there before {address} is not what was read: brokers lost messages that they had, and "
        "have others in their place. Nothing of what came since was written. See what `persist source reset` would "
        "lose",
        partition=partition, address=address,
    )  # fmt: skip


def _partitions(topics: Mapping[str, Topic]) -> list[Partition]:
    return [(name, number) for name, topic in topics.items() for number in topic.partitions]


def named(one: Partition) -> str:
    """The name of a partition: "topic/number"."""
    return f"{one[0]}/{one[1]}"


def parsed(partition: str) -> Partition:
    """The topic and number of a partition's name."""
    name, _, number = partition.rpartition("/")
    return name, int(number)


def _known(mark: Mark) -> Check:
    """What a mark says. Those of earlier releases have no epoch. Raises NewerFormat."""
    id_, _, rest = mark.check.rpartition("@")
    match rest.split(":"):
        case [first]:
            return Check(id_, int(first or 0), Place(mark.address))
        case [first, offset, epoch]:
            return Check(id_, int(first), Place(int(offset), int(epoch)))
        case _:
            raise NewerFormat(
                f"the bindings of a source of Kafka have a mark that this release does not know, {mark.check!r}: "
                "upgrade Persist here",
                found=mark.check, known="id@first:offset:epoch",
            )  # fmt: skip
