"""Kafka as a source: what is declared of topics, and the reader that this makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import msgspec

from persist_lib.arguments import did_you_mean, parse_text, shown
from persist_lib.catalog.records import OF_TOPICS
from persist_lib.errors import InvalidUsage
from persist_lib.location.scheme import with_extra
from persist_lib.sources.decoding import DECODERS
from persist_lib.sources.records import DECODED, Declaration, Followed, Kind, Place, changed
from persist_lib.sources.schema_registry import ENVIRONMENT, check_secret, from_environment

if TYPE_CHECKING:
    from persist_lib.sources.kafka.reader import KafkaReader

Isolation = Literal["read_committed", "read_uncommitted"]
TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
SECRET = re.compile(r"password|secret|token|jaas|oauthbearer\.config|\.pem$", re.IGNORECASE)
"""Options whose values are never stored: they come from the environment."""
OURS = frozenset(
    {
        "bootstrap.servers", "metadata.broker.list", "group.id", "isolation.level", "enable.auto.commit",
        "enable.auto.offset.store", "auto.offset.reset", "enable.partition.eof", "auto.commit.enable",
        "group.instance.id", "allow.auto.create.topics", "plugin.library.paths",
    }
)  # fmt: skip


class Kafka(
    Kind, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="kafka", forbid_unknown_fields=True
):
    """Topics of a Kafka cluster. `brokers` are some of its brokers, as "host:9092,other:9092"; `topic` or `topics`.

    If the source is created with `tables=`, a schema for each topic, each has an output of its own, `NAME/TOPIC`.

    A partition is "topic/number", and an address is an offset. With `isolation="read_committed"`, messages of
    transactions belong to the source once these are committed. A `group` gets the offsets that are durable; nothing is
    read from it. `options` are librdkafka's. A value "env:NAME" is read from the environment variable of that name
    wherever the source runs; passwords and other secrets have to be given so.
    """

    title = "Kafka"
    schemes = ("kafka",)
    takes = DECODED | {"format", "add-columns"}
    hint = "of topics, give --format; or, in a file, the columns of each"
    unloadable = "kafka is read in order"

    brokers: str
    topic: str | None = None
    topics: tuple[str, ...] = ()
    group: str | None = None
    isolation: Isolation = "read_committed"
    options: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for broker in parse_text(self.brokers, "brokers", 4096).split(","):
            host, colon, port = broker.strip().rpartition(":")
            if not host or not colon or not port.isdecimal() or "/" in broker or "@" in broker:
                raise InvalidUsage(f'brokers are given as "host:9092,other:9092": got {shown(broker)}')
        if (self.topic is None) == (not self.topics):
            raise InvalidUsage(f"pass topic= or topics=, one of them: got {shown(self.topic)} and {shown(self.topics)}")
        if not isinstance(self.topics, tuple):
            raise InvalidUsage(f"topics must be a tuple of texts such as ('orders',): got {shown(self.topics)}")
        for name in self.names:
            if not isinstance(name, str) or not TOPIC.fullmatch(name) or name in {".", ".."}:
                raise InvalidUsage(f"{shown(name)} is no name of a topic: it has 1 to 249 of A-Z a-z 0-9 . _ -")
        if len(set(self.names)) < len(self.names):
            raise InvalidUsage(f"a topic is named twice: {self.names}")
        if self.group is not None and not parse_text(self.group, "group", 255):
            raise InvalidUsage("group must not be empty; leave it out to tell no group")
        if self.isolation not in get_args(Isolation):
            raise InvalidUsage(f"isolation must be one of {get_args(Isolation)}: got {shown(self.isolation)}")
        _check_options(self.options)

    @classmethod
    def of_place(cls, place: Place) -> tuple[Kafka, str]:
        if place.format == "parquet":
            raise InvalidUsage("--format parquet is for files, not for topics")
        return parse_kafka_url(place.url), DECODERS[place.format or "jsonl"]

    @property
    def names(self) -> tuple[str, ...]:
        return self.topics if self.topic is None else (self.topic,)

    def configuration(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """The options with what the environment has, and which values are secret. Raises InvalidUsage for a gap."""
        taken = {
            name: from_environment(value, f"the option {name!r}", option=name) for name, value in self.options.items()
        }
        secrets = tuple(taken[name] for name, value in self.options.items() if value.startswith(ENVIRONMENT))
        return taken, secrets

    def open(self) -> KafkaReader:
        """A reader of these topics. Raises InvalidUsage for options that there are not. Asks no broker yet."""
        reader: KafkaReader = with_extra("persist_lib.sources.kafka.reader", "Kafka", "kafka").KafkaReader(self)
        return reader

    def outputs(self, declared: Iterable[str] = ()) -> Mapping[str, str]:
        return {topic: topic for topic in declared}

    def role_of(self, partition: str) -> str:
        return partition.rpartition("/")[0]

    def complete(self, given: Declaration, input_: Followed | None) -> Declaration:
        marks = None if given.meaning.transactions is None else given.meaning.transactions.topic
        if marks is not None and marks.partition("/")[0] not in self.names:
            raise InvalidUsage(
                f"transactions.topic is {shown(marks)}, and the source reads {', '.join(self.names)}: no transaction "
                "would ever be whole. Name the topic of transactions, and read it too"
            )
        if given.tables:
            self._check_tables(given, marks)
            given = changed(given, v=OF_TOPICS)
        return super().complete(given, input_)

    def _check_tables(self, given: Declaration, marks: str | None) -> None:
        """Raise InvalidUsage unless each topic has an output, but that of transactions."""
        if unknown := [topic for topic in given.tables if topic not in self.names]:
            near = did_you_mean(unknown[0], self.names)
            raise InvalidUsage(
                f"tables: the source reads no topic {shown(unknown[0])}. {near}It reads {', '.join(self.names)}"
            )
        if own := sorted({"errors", "health", "raw", "waiting"} & set(given.tables)):
            raise InvalidUsage(
                f"tables: the output of the topic {own[0]!r} would be NAME/{own[0]}, which each source has for itself: "
                "give that topic a source of its own"
            )
        if marks in given.tables:
            raise InvalidUsage(f"tables: {marks!r} is the topic of transactions, which has no rows: leave it out")
        if left := [topic for topic in self.names if topic not in {marks, *given.tables}]:
            raise InvalidUsage(
                f"tables: the topic {left[0]!r} has no columns. Either each topic but that of transactions has an "
                "output of its own, or all have one together: then say schema="
            )
        if given.meaning.transform is not None:
            raise InvalidUsage("transform makes rows of one output, and each of these topics has its own: leave it out")
        if given.decoding.takes_fields:
            raise InvalidUsage(
                'extra="add" gives one output the fields that come, and each of these topics has its own: leave it '
                "out, or give the topic whose fields are added a source of its own"
            )

    def check(self, _given: Declaration) -> None:
        with closing(self.open()) as opened:
            opened.look()


def parse_kafka_url(url: str) -> Kafka:
    """The topics of `kafka://host:9092,other:9092/topic,other?option=value`. Raises InvalidUsage."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidUsage(f"Kafka's topics are given as kafka://host:9092/topic: got {shown(url)}: {error}") from error
    if parts.scheme != "kafka" or not parts.netloc or not parts.path.strip("/") or parts.fragment:
        raise InvalidUsage(f"Kafka's topics are given as kafka://host:9092/topic: got {shown(url)}")
    if "@" in parts.netloc:
        raise InvalidUsage(
            "a kafka:// URL has no user and password: pass ?sasl.username=…&sasl.password=env:NAME, and set NAME"
        )
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if twice := sorted({name for name, _ in pairs if [one for one, _ in pairs].count(name) > 1}):
        raise InvalidUsage(f"the option {twice[0]!r} is given twice")
    options = dict(pairs)
    topics = tuple(parts.path.strip("/").split(","))
    return Kafka(
        brokers=parts.netloc, topics=topics, group=options.pop("group", None),
        isolation=options.pop("isolation", "read_committed"), options=options,  # type: ignore[arg-type]
    )  # fmt: skip


def _check_options(options: object) -> None:
    if not isinstance(options, Mapping):
        raise InvalidUsage(f"options maps names of librdkafka's options to texts: got a {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise InvalidUsage(f"options: {shown(name)} must be a name with a text for a value")
        if name in OURS or name.endswith("_cb"):
            raise InvalidUsage(f"the option {name!r} is set by the reader: leave it out")
        if SECRET.search(name) or value.startswith(ENVIRONMENT):
            check_secret(value, f"the option {name!r}")
