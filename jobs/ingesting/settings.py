"""How files are read. A run records it, so that whoever continues it gets the same rows and the same bad lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.convert.lines.file_columns import Changes, EpochUnit
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema

Format = Literal["csv", "jsonl", "parquet", "debezium"]

ENCODINGS = (
    "utf-8",
    "ascii",
    "latin-1",
    *(f"iso8859-{n}" for n in (1, 2, 5, 7, 9, 15)),
    *(f"cp125{n}" for n in range(9)),
)
"""Encodings in which the byte 10 is always a line's end, so that a file can be cut anywhere."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that decides what rows and bad lines come out of a file."""

    format: Format
    columns: Mapping[str, str] = {}
    """The shard's columns that have other names in the files: shard's name -> file's name."""
    delimiter: str = ","
    quote: str = '"'
    names: tuple[str, ...] | None = None
    """The columns of files without a header; None: each file's first line has them."""
    nulls: tuple[str, ...] = ("",)
    """Texts without quotes that mean null (CSV)."""
    encoding: str = "utf-8"
    multiline: bool = False
    """Whether quoted values of CSV may hold line ends. Then a file is one chunk."""
    extra: Literal["refuse", "ignore"] = "refuse"
    """What becomes of fields that the shard has no column for."""
    missing: Literal["refuse", "null"] = "refuse"
    """What becomes of columns that a file (CSV, Parquet) does not have. JSON's are null."""
    epochs: Mapping[str, EpochUnit] = {}
    """Columns of dates or timestamps that are numbers in the files, counted from 1970."""
    changes: Changes = "by-key"
    time_column: str | None = None
    """The shard's column that says at which time a row is added. None: the commit says it."""
    chunk_bytes: int = 32 * MIB
    group_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        self._check_csv()
        if self.chunk_bytes < 1 or self.group_bytes < 1:
            raise InvalidUsage("--chunk-mib and --group-mib must be above 0")

    def _check_csv(self) -> None:
        for name in ("delimiter", "quote"):
            text = getattr(self, name)
            if len(text) != 1 or not text.isascii() or text in "\r\n":
                raise InvalidUsage(f"--{name} is one ASCII character and no line end: got {text!r}")
        if self.delimiter == self.quote:
            raise InvalidUsage(f"--delimiter and --quote must differ: both are {self.quote!r}")
        if self.encoding not in ENCODINGS:
            raise InvalidUsage(
                f"--encoding {self.encoding!r} is not supported; use one of {', '.join(ENCODINGS)}, or convert the "
                "files "
                "first, as in iconv -f UTF-16 -t UTF-8"
            )

    def check_schema(self, schema: Schema) -> None:
        """Raise InvalidUsage where the settings name columns that the schema does not have, or cannot be read."""
        for option, given in (("--column", self.columns), ("--epoch", self.epochs)):
            if unknown := [name for name in given if name not in schema.names]:
                raise InvalidUsage(
                    f"{option} {unknown[0]}: the shard has no such column; it has {', '.join(schema.names)}"
                )
        if self.time_column is not None:
            self._check_times(schema)
        sources = [self.source(name) for name in schema.names]
        if twice := [name for name in sources if sources.count(name) > 1]:
            raise InvalidUsage(f"--column: two columns of the shard would be read from {twice[0]!r}")
        if schema.codec != "columns":
            raise InvalidUsage(f"files are read into shards with columns; this one is of codec {schema.codec}")

    def _check_times(self, schema: Schema) -> None:
        field = schema.data.field(self.time_column) if self.time_column in schema.names else None
        kind = None if field is None else field.type
        is_clock = kind is not None and pa.types.is_timestamp(kind) and kind.tz is not None
        if self.format == "debezium":
            raise InvalidUsage(
                "changes are added at the time of their commit; --time-column is for csv, jsonl and parquet"
            )
        if schema.times is not None and not is_clock:
            raise InvalidUsage(
                f"--time-column {self.time_column}: the shard's times are a clock, so this must be a column of type "
                "timestamp[…, UTC]"
            )
        if schema.times is None and (kind is None or not pa.types.is_integer(kind)):
            raise InvalidUsage(
                f"--time-column {self.time_column}: the shard's times are integers, so this must be a column of "
                "integers"
            )

    def source(self, column: str) -> str:
        """The name that a column of the shard has in the files."""
        return self.columns.get(column, column)


def encode_settings(settings: Settings) -> str:
    """As JSON text: the same text for the same settings."""
    return msgspec.json.encode(settings, order="deterministic").decode()


def decode_settings(text: str) -> Settings:
    """The settings of a run."""
    return msgspec.json.decode(text, type=Settings)
