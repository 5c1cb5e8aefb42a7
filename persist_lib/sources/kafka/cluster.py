"""A Kafka cluster as a source asks it: what partitions there are, how far they go, and their messages as tables.

What goes wrong with brokers may be otherwise soon, so it is Determinate: reading changes nothing there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.kernel.columns import array_of
from persist_lib.sources.kafka.kind import Kafka
from persist_lib.sources.protocol import ADDRESS, VALUE

ANSWER_S = 15.0
"""How long brokers may take to answer."""
LOOK_S, RENEW_S = 0.1, 1.0
"""How often is looked whether brokers refuse a client that waits for an answer, and how often it asks who they are."""
REFUSALS, REFUSED_S = 3, 2.0
"""How many times in a row, and for how long, a client is refused before that is for good: it tries again by itself."""
WAIT_S = 0.5
"""How long is waited for the first message of a batch."""
STARTS, START_S = 100, 0.002
"""How often is looked whether the client has begun to read a partition, and how long is waited in between."""
LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())  # what matters is in errors; who wants the rest adds a handler
NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id of topics where brokers know none."""
DEFAULTS = {
    "queued.max.messages.kbytes": "16384", "fetch.max.bytes": "16777216", "check.crcs": "true", "log_level": "4",
    "socket.timeout.ms": "15000", "fetch.wait.max.ms": "100",
}  # fmt: skip
ONLY_READING = ("fetch.", "queued.", "check.crcs", "max.partition.fetch.bytes", "receive.message.max")
"""Options that a client for questions does not know."""
PASSWORDS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
"""Mechanisms of SASL by which only the broker decides: a ticket or a token may not be had for a while."""
CERTIFICATE = re.compile(r"alert (bad|unsupported) certificate|alert certificate|alert unknown ca|alert access denied")
"""What OpenSSL says where a broker does not take the certificate of a client, or its lack."""
Partition = tuple[str, int]
NO_EPOCH = -1


class Place(NamedTuple):
    """A place in a partition: an offset, and the epoch of the leader that wrote the message just before it, if known.

    No two messages of a topic have the same offset and the same epoch. Epochs only go up, and a leader that lacks
    messages which were there has a new one.
    """

    offset: int
    epoch: int = NO_EPOCH

    @property
    def is_known(self) -> bool:
        return self.epoch != NO_EPOCH

    def fits(self, other: Place) -> bool:
        """Whether both can be of one log, with no message between them."""
        return self.epoch == other.epoch or not (self.is_known and other.is_known)

    def is_within(self, end: Place) -> bool:
        """Whether it can be of a log whose last message was that of `end` once, where others may be gone since."""
        return self.fits(end) or (self.epoch < end.epoch and self.offset < end.offset)


class Topic(NamedTuple):
    """A topic: an id that no other one has ("" where brokers know none), and the numbers of its partitions."""

    id: str
    partitions: tuple[int, ...]


class Cluster:
    """The clients of one reader."""

    def __init__(self, declared: Kafka) -> None:
        self._declared = declared
        options, self._secrets = declared.configuration()
        self._trouble, self._refusals = "", 0
        mechanism = options.get("sasl.mechanism", options.get("sasl.mechanisms", ""))
        self._has_password = mechanism.upper() in PASSWORDS
        self._unasked: dict[Partition, Place] = {}
        common = {**DEFAULTS, **options, "bootstrap.servers": declared.brokers}
        reading = {
            "group.id": declared.group or "persist", "isolation.level": declared.isolation,
            "enable.auto.commit": "false", "enable.auto.offset.store": "false", "auto.offset.reset": "error",
            "enable.partition.eof": "true", "allow.auto.create.topics": "false",
        }  # fmt: skip
        asking = {name: value for name, value in common.items() if not name.startswith(ONLY_READING)}
        try:
            self._consumer = Consumer({**common, **reading}, logger=LOG, error_cb=self._note)
            self._admin = AdminClient(asking, logger=LOG, error_cb=self._note)
        except (KafkaException, TypeError, ValueError) as error:
            raise InvalidUsage(f"Kafka's options: {self._said(error)}") from None  # it may quote a secret

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        with self._asking():
            asked = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=ANSWER_S)
        found = {}
        for name, answer in asked.items():
            with self._asking():
                try:
                    described = self._answer(answer)
                except KafkaException as error:
                    if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                        continue
                    raise
            id_ = str(described.topic_id)
            numbers = tuple(sorted(one.id for one in described.partitions))
            found[name] = Topic("" if id_ == NO_ID else id_, numbers)
        self._admin.poll(0)
        self._trouble = ""  # brokers answer: what clients said before is no reason for what fails from now on
        return found

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offset of each partition that has no message for readers of this isolation yet."""
        isolated = self._declared.isolation == "read_committed"
        level = IsolationLevel.READ_COMMITTED if isolated else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(partitions, OffsetSpec.latest(), isolation_level=level)

    def beginnings(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return self._offsets(partitions, OffsetSpec.earliest())

    def _offsets(self, partitions: Iterable[Partition], spec: OffsetSpec, **how: Any) -> dict[Partition, int]:
        wanted = {TopicPartition(*partition): spec for partition in partitions}
        if not wanted:
            return {}
        with self._asking():
            asked = self._admin.list_offsets(wanted, request_timeout=ANSWER_S, **how)
            answers = {(one.topic, one.partition): self._answer(found) for one, found in asked.items()}
        found = {partition: int(answer.offset) for partition, answer in answers.items()}
        if vague := [one for one, at in found.items() if at < 0]:  # of a broker that has just started: no error, either
            topic, number = vague[0]
            raise self.failed(f"{topic}/{number}: the broker does not say yet where it begins and ends")
        return found

    def read_from(self, places: Mapping[Partition, Place]) -> None:
        """Read partitions. Where an epoch is known, the leader is asked first whether its log has what was before."""
        with self._asking():
            self._consumer.incremental_assign([TopicPartition(*one, at.offset) for one, at in places.items()])
        self._unasked |= {one: at for one, at in places.items() if at.is_known}

    def leave(self, partitions: Collection[Partition]) -> None:
        with self._asking():
            self._consumer.incremental_unassign([TopicPartition(*one) for one in partitions])
        self._unasked = {one: at for one, at in self._unasked.items() if one not in partitions}

    def consume(self, most: int) -> list[Any]:
        """Some of the next messages, and events: what is here, or the first one to come for a short time."""
        with self._asking():
            self._ask_leaders()
            found = self._consumer.consume(most, 0)
            if not found and (found := self._consumer.consume(1, WAIT_S)) and most > 1:
                found += self._consumer.consume(most - 1, 0)
        return [one for one in found if not self._unasked or self._counts(one)]

    def _ask_leaders(self) -> None:
        """Seek where an epoch is known: only then a client that knows the leader already asks it.

        That cannot be before the partition is read, which takes a moment, and never is where its offset is not there.
        """
        for _ in range(STARTS):
            for one, at in list(self._unasked.items()):
                try:
                    self._consumer.seek(TopicPartition(*one, at.offset, "", at.epoch))
                except KafkaException as error:
                    if error.args[0].code() != KafkaError._STATE:
                        raise
                else:
                    del self._unasked[one]
            if not self._unasked:
                return
            self._admin.poll(START_S)

    def _counts(self, message: Any) -> bool:
        """Whether a message or an event is no rumour: the leader was asked, or it says why that cannot be."""
        error = message.error()
        is_trouble = error is not None and not is_end(error)
        return is_trouble or (message.topic(), message.partition()) not in self._unasked

    def wait(self) -> None:
        self._admin.poll(WAIT_S)

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Let the group know offsets before which nothing is needed."""
        if self._declared.group is None or not offsets:
            return
        told = [TopicPartition(*one, at) for one, at in offsets.items()]
        with self._asking():
            answer = self._consumer.commit(offsets=told, asynchronous=False)
        for one in answer or ():
            if one.error is not None:
                raise self.failed(
                    f"the offsets of the group {self._declared.group} were not committed: {one.error.str()}"
                )

    def failed(self, what: str) -> Determinate:
        """The error for what may be otherwise soon. It has what the clients said last."""
        more = f" ({self._trouble})" if self._trouble else ""
        return Determinate(f"Kafka at {self._declared.brokers}: {self._hidden(what)}{self._hidden(more)}")

    def close(self) -> None:
        self._consumer.close()

    def _answer(self, asked: Future[Any]) -> Any:
        """What brokers answer. Raises InvalidUsage soon where all that can be reached refuse the client.

        A client that asks a broker that was killed asks that one on, for minutes. It asks another one once it
        has heard that there is one, and does not ask for that by itself. Of all topics: to name one may create it.
        """
        self._admin.poll(0)
        self._refusals = 0
        for turn in range(int(2 * ANSWER_S / LOOK_S)):
            if turn and not turn % round(RENEW_S / LOOK_S) and not self._refusals:
                with suppress(KafkaException):
                    self._admin.list_topics(timeout=RENEW_S)
            if wait([asked], LOOK_S).done:
                return asked.result()
            self._admin.poll(0)  # what it says is heard only so, as of a login that is refused
            if turn * LOOK_S >= REFUSED_S and self._refusals >= REFUSALS:
                raise InvalidUsage(
                    f"Kafka at {self._declared.brokers} does not let this client in: {self._hidden(self._trouble)}. "
                    "Check the options security.protocol, sasl.* and ssl.*. What is in environment variables is read "
                    "when an instance starts. Trying again would not help"
                )
        raise TimeoutError

    def _note(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._trouble:  # what was said before says why
            return
        self._trouble = error.str()
        self._refusals = self._refusals + 1 if self._is_refusal(error) else 0

    def _is_refusal(self, error: KafkaError) -> bool:
        """Whether a broker does not let this client in, or this client does not trust it."""
        if error.code() == KafkaError._AUTHENTICATION:
            return self._has_password
        return error.code() == KafkaError._SSL or CERTIFICATE.search(error.str()) is not None

    def _said(self, error: Exception) -> str:
        found = error.args[0].str() if error.args and isinstance(error.args[0], KafkaError) else str(error)
        return self._hidden(found or type(error).__name__)

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***") if secret else text
        return text

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self.failed(self._said(error)) from None
        except TimeoutError:
            raise self.failed(f"no answer for {ANSWER_S:g} s") from None
        except RuntimeError as error:  # the consumer was closed
            raise self.failed(self._said(error)) from None


def is_end(error: KafkaError) -> bool:
    """Whether an event says that a partition has been read to its end."""
    return bool(error.code() == KafkaError._PARTITION_EOF)  # its public name


def is_out_of_range(error: KafkaError) -> bool:
    """Whether an event says that an offset is not there."""
    return error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


def is_other_log(error: KafkaError) -> bool:
    """Whether an offset is not there because a partition's log ended before it once, whatever was written since.

    A client that was reading then knows it by the epoch of the leader. librdkafka has a code for that, and gives it out
    in the text of `_AUTO_OFFSET_RESET` alone.
    """
    return "log truncation" in error.str() and not is_unknown_epoch(error)


def is_unknown_epoch(error: KafkaError) -> bool:
    """Whether a leader does not know an epoch in which messages were read: it may not have heard of a newer leader."""
    return "No epoch found" in error.str()


MOMENT = pa.timestamp("ms", "UTC")
SCHEMA = pa.schema([ADDRESS, VALUE, ("key", pa.binary()), ("headers", pa.string()), ("timestamp", MOMENT)])
EACH = 48
"""Bytes that a message counts beside its key and value."""


class Chunk(NamedTuple):
    """Messages of one partition, in order, and how many bytes there are up to and with each."""

    table: pa.Table
    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int32]


class Ahead:
    """What was read of one partition: all its messages in `[start, end)`, whatever offsets have none.

    Of what was given out, nothing is kept but the place after the last message, as it is for `start` at first.
    """

    def __init__(self, start: int, last: Place) -> None:
        self.start = self.end = start
        self.chunks: list[Chunk] = []
        self._last = last

    def last(self, end: int) -> Place:
        """The place after the last message before `end`."""
        for chunk in reversed(self.chunks):
            if before := int(np.searchsorted(chunk.addresses, end)):
                return Place(int(chunk.addresses[before - 1]) + 1, int(chunk.epochs[before - 1]))
        return self._last

    @property
    def bytes(self) -> int:
        return sum(int(chunk.sizes[-1]) for chunk in self.chunks)

    def add(self, chunk: Chunk) -> None:
        """Append messages. What is there already is left out."""
        first = int(np.searchsorted(chunk.addresses, self.end))
        if first == len(chunk.addresses):
            return
        self.chunks.append(_from(chunk, first))
        self.end = int(chunk.addresses[-1]) + 1

    def between(self, start: int, end: int) -> Iterator[pa.Table]:
        for chunk in self.chunks:
            low, high = np.searchsorted(chunk.addresses, [start, end]).tolist()
            if low < high:
                yield chunk.table.slice(low, high - low)

    def forget(self, end: int) -> None:
        self._last = self.last(end)
        kept = [(chunk, int(np.searchsorted(chunk.addresses, end))) for chunk in self.chunks]
        self.chunks = [_from(chunk, first) for chunk, first in kept if first < len(chunk.addresses)]
        self.start = max(self.start, end)
        self.end = max(self.end, end)

    def cut(self, start: int, most_bytes: int) -> tuple[int, int]:
        """Where the messages from `start` on reach `most_bytes`, at least one of them; and how many bytes those are."""
        taken, mark = 0, start
        for chunk in self.chunks:
            low = int(np.searchsorted(chunk.addresses, start))
            if low == len(chunk.addresses):
                continue
            before = int(chunk.sizes[low - 1]) if low else 0
            high = int(np.searchsorted(chunk.sizes, before + most_bytes - taken, side="right"))
            high = high if taken else max(high, low + 1)
            if high > low:
                taken += int(chunk.sizes[high - 1]) - before
                mark = int(chunk.addresses[high - 1]) + 1
            if high < len(chunk.addresses):
                return mark, taken
        return self.end, taken


def chunks_of(messages: Sequence[Any], topics: Mapping[str, int]) -> Iterator[tuple[str, int, Chunk]]:
    """Messages of any partitions as chunks: (topic, number, chunk). Messages of a partition keep their order."""
    count = len(messages)
    # These are the only loops over messages. A method of one is some 50 ns, so that is what a message costs.
    addresses = np.fromiter([message.offset() for message in messages], np.uint64, count)
    numbers = np.fromiter([message.partition() for message in messages], np.int64, count)
    values = pa.array([message.value() for message in messages], pa.binary())
    keys = pa.array([message.key() for message in messages], pa.binary())
    moments = pa.array([message.timestamp()[1] for message in messages], pa.int64()).cast(MOMENT)
    headers = pa.array([_shown(message.headers()) for message in messages], pa.string())
    if len(topics) > 1:
        numbers += np.fromiter([topics[message.topic()] << 32 for message in messages], np.int64, count)
    table = pa.table([array_of(addresses), values, keys, headers, moments], schema=SCHEMA)
    sizes = np.asarray(pc.fill_null(pc.binary_length(values), 0)).astype(np.int64) + EACH
    sizes += np.asarray(pc.fill_null(pc.binary_length(keys), 0))
    sizes += np.asarray(pc.fill_null(pc.binary_length(headers), 0))
    order = np.arange(count)
    if (numbers != numbers[0]).any():
        order = np.argsort(numbers, kind="stable")
        table, numbers, sizes, addresses = table.take(array_of(order)), numbers[order], sizes[order], addresses[order]
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), count]
    names = list(topics)
    for low, high in pairwise(bounds):
        place = int(numbers[low])
        epochs = _epochs(messages, order[low:high])
        chunk = Chunk(table.slice(low, high - low), addresses[low:high], np.cumsum(sizes[low:high]), epochs)
        yield names[place >> 32], place & 0xFFFFFFFF, chunk


def _epochs(messages: Sequence[Any], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The epochs of the leaders that wrote these messages of a partition. They only go up: mostly all are the first."""
    first, last = _epoch(messages[order[0]]), _epoch(messages[order[-1]])
    if first == last:
        return np.full(len(order), first, np.int32)
    return np.fromiter([_epoch(messages[place]) for place in order.tolist()], np.int32, len(order))


def _epoch(message: Any) -> int:
    epoch = message.leader_epoch()
    return NO_EPOCH if epoch is None else int(epoch)


def _from(chunk: Chunk, first: int) -> Chunk:
    if not first:
        return chunk
    sizes = chunk.sizes[first:] - chunk.sizes[first - 1]
    return Chunk(chunk.table.slice(first), chunk.addresses[first:], sizes, chunk.epochs[first:])


def _shown(headers: Sequence[tuple[str, bytes | None]] | None) -> str | None:
    """Headers as JSON: a list of names with texts. Bytes that are no UTF-8 become an object with them in base64."""
    if not headers:
        return None
    return msgspec.json.encode([(name, _text(value)) for name, value in headers]).decode()


def _text(value: bytes | None) -> str | dict[str, bytes] | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": value}
