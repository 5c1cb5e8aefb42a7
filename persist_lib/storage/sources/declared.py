"""What is declared of a source: how its messages are decoded, what they mean, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from typing import Any, Literal, get_args

import msgspec

from persist_lib.arguments import parse_flag, parse_integer, parse_text, shown
from persist_lib.convert.lines.file_columns import Changes, EpochUnit
from persist_lib.errors import InvalidUsage
from persist_lib.storage.names import parse_collection_name
from persist_lib.storage.sources.files import Files
from persist_lib.storage.sources.kafka import Kafka
from persist_lib.storage.sources.postgres import Postgres
from persist_lib.storage.sources.protocol import SourceReader
from persist_lib.storage.sources.registry import Registry

Decoder = Literal["json", "csv", "text", "bytes", "rows", "avro", "pgoutput"]
Envelope = Literal["none", "upsert", "debezium", "changes"]
KeyDecoder = Literal["json", "text", "bytes", "avro"]
About = Literal["partition", "address", "time", "key", "headers", "timestamp"]


class Custom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="custom", forbid_unknown_fields=True):
    """A reader of somebody else: `factory` is "package.module:function", which is called with `options`.

    It returns a SourceReader. The module has to be there wherever the source runs.
    """

    factory: str
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _parse_name(self.factory, "factory")

    def open(self) -> SourceReader:
        """What the function makes. Raises InvalidUsage if there is no such function."""
        reader: SourceReader = imported(self.factory)(**self.options)
        return reader


class Collection(msgspec.Struct, frozen=True, omit_defaults=True, tag="collection", forbid_unknown_fields=True):
    """A collection of the same catalog, by its name: its updates are the messages, at the times that they have.

    A row is a message when it comes, and one again, with `_diff` -1, when it goes.
    """

    name: str

    def __post_init__(self) -> None:
        parse_collection_name(self.name)


From = Files | Kafka | Postgres | Collection | Custom


def check_place(reader: From) -> None:
    """Raise if what is declared cannot be opened here and now. Collections and tables were looked at before."""
    if isinstance(reader, Kafka):
        with closing(reader.open()) as opened:
            opened.look()
    elif not isinstance(reader, (Collection, Postgres)):
        reader.open().close()


class Decoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a message becomes a row. `decoder` is by default what fits the files' format.

    - "json": an object with the columns as names. "csv": the columns of the header, or `names`.
    - "text" and "bytes": one column of that type has it all.
    - "rows": the message is a struct already (Parquet). "pgoutput": it is a change of PostgreSQL's log.
    - "avro": a record. `registry` says where the schemas of messages are; files have theirs. `avro` is a schema to read
      by, as JSON: its defaults, aliases and promotions hold. Without registry and file, messages were written by it.

    `columns` says what a column is called in the messages, where that is something else. `extra` and `missing` say what
    becomes of fields without a column, and of columns that a CSV header or a struct does not have; `epochs` names
    columns of moments that are numbers, and their unit. `key` says how the key columns are read from the keys of
    messages, where these have some (Kafka): "json" (an object, or the value of the only column), "text" or "bytes".
    """

    decoder: Decoder = "json"
    key: KeyDecoder | None = None
    columns: Mapping[str, str] = {}
    names: tuple[str, ...] | None = None
    delimiter: str = ","
    quote: str = '"'
    nulls: tuple[str, ...] = ("",)
    encoding: str = "utf-8"
    extra: Literal["refuse", "ignore"] = "refuse"
    missing: Literal["refuse", "null"] = "refuse"
    epochs: Mapping[str, EpochUnit] = {}
    avro: str | None = None
    registry: Registry | None = None

    def __post_init__(self) -> None:
        if self.decoder not in get_args(Decoder):
            raise InvalidUsage(f"decoder must be one of {get_args(Decoder)}: got {shown(self.decoder)}")
        if self.key is not None and self.key not in get_args(KeyDecoder):
            raise InvalidUsage(f"key must be one of {get_args(KeyDecoder)}: got {shown(self.key)}")
        if "avro" not in {self.decoder, self.key} and (self.avro is not None or self.registry is not None):
            raise InvalidUsage('avro and registry are about Avro: pass decoder="avro" or key="avro"')
        if self.key == "avro" and self.registry is None:
            raise InvalidUsage('key="avro" needs a registry, as nothing else says how a key was written')
        for name in ("delimiter", "quote"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text in "\r\n":
                raise InvalidUsage(f"{name} is one ASCII character and no line end: got {shown(text)}")
        if self.delimiter == self.quote:
            raise InvalidUsage(f"delimiter and quote must differ: both are {shown(self.quote)}")
        for name, known in (("extra", ("refuse", "ignore")), ("missing", ("refuse", "null"))):
            if getattr(self, name) not in known:
                raise InvalidUsage(f"{name} must be one of {known}: got {shown(getattr(self, name))}")

    @property
    def multiline(self) -> bool:
        """A message is one line."""
        return False

    @property
    def changes(self) -> Changes:
        """The last change of a key decides."""
        return "by-key"

    def source(self, column: str) -> str:
        """The name that a column has in the messages."""
        return self.columns.get(column, column)


class Transactions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Changes of Debezium wait until their transaction is whole, as the messages of `topic` say.

    `topic` is the topic of transactions (one of the source's), or a partition's name. `collections` are those whose
    changes the source reads, as the messages name them; by default all. With `in_order` a transaction also waits for
    all that begin before it. The last `remembered` ones that were whole are known, so that their changes say nothing
    when a connector repeats them.
    """

    topic: str
    collections: tuple[str, ...] = ()
    in_order: bool = False
    remembered: int = 10_000

    def __post_init__(self) -> None:
        if not parse_text(self.topic, "topic", 4096):
            raise InvalidUsage("topic must be the name of the topic of transactions: got ''")
        if not isinstance(self.collections, tuple) or not all(isinstance(one, str) and one for one in self.collections):
            raise InvalidUsage(
                f"collections must be a tuple of texts such as ('public.users',): got {shown(self.collections)}"
            )
        parse_flag(self.in_order, "in_order")
        parse_integer(self.remembered, "remembered", 0, 1_000_000)


class Meaning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes of rows. With the envelope "none" each is added. With "upsert" it replaces the row of its key.

    "debezium" takes changes as Debezium writes them, and applies them by key; "changes" is that for a table of
    PostgreSQL, which can be emptied too. `deletes` (of "upsert") is a column of
    the messages, not of the output, that is true where the key's row is taken away. `include` fills columns of the
    output with what a message's place is, not with what is in it. `transform` is "package.module:function", a pure
    function of the decoded rows with `_time` (Arrow) that makes the output's rows of them; it is called for many
    messages at once. `transactions` (of "debezium") lets changes wait until theirs is whole. `most_errors` stops the
    source when there are more than that many bad messages.
    """

    envelope: Envelope = "none"
    deletes: str | None = None
    include: Mapping[str, About] = {}
    transform: str | None = None
    most_errors: int | None = None
    keep_raw: bool = False
    transactions: Transactions | None = None

    def __post_init__(self) -> None:
        if self.envelope not in get_args(Envelope):
            raise InvalidUsage(f"envelope must be one of {get_args(Envelope)}: got {shown(self.envelope)}")
        if self.deletes is not None and (self.envelope != "upsert" or not isinstance(self.deletes, str)):
            raise InvalidUsage('deletes names a column of messages with envelope="upsert"')
        if not isinstance(self.include, Mapping) or set(self.include.values()) - set(get_args(About)):
            raise InvalidUsage(f"include maps columns to one of {get_args(About)}: got {shown(self.include)}")
        if self.transform is not None:
            _parse_name(self.transform, "transform")
        if self.transform is not None and self.envelope in {"debezium", "changes"}:
            raise InvalidUsage("changes are applied as they are: leave out transform")
        if self.keep_raw and self.envelope == "changes":
            raise InvalidUsage("keep_raw keeps messages by address, and those of a transaction share one: leave it out")
        if self.transactions is not None and self.envelope != "debezium":
            raise InvalidUsage('transactions are those of Debezium: pass envelope="debezium"')
        if self.most_errors is not None:
            parse_integer(self.most_errors, "most_errors", 0)
        parse_flag(self.keep_raw, "keep_raw")


def imported(name: str) -> Any:
    """The function of "package.module:function". Raises InvalidUsage."""
    module, _, function = _parse_name(name, "the function").partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidUsage(f"there is no function {name!r} here: {error}. Install or mend it") from error
    if not callable(found):
        raise InvalidUsage(f"{name!r} is no function")
    return found


def _parse_name(name: object, what: str) -> str:
    module, _, function = str(name).partition(":")
    if not isinstance(name, str) or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise InvalidUsage(f'{what} must be a text like "package.module:function": got {shown(name)}')
    return name
