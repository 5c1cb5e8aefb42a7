"""The options of `jobs/ingest.py`, and the values that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from jobs import program
from jobs.engine import EngineName
from jobs.ingesting.planning import Changed
from jobs.ingesting.running import Lost
from jobs.ingesting.settings import Format, Settings
from persist_lib.arguments import did_you_mean
from persist_lib.config import MIB
from persist_lib.convert.lines.file_columns import Changes, EpochUnit
from persist_lib.errors import InvalidUsage

GROUP_MIB = 512
BY_KEY_GROUP_MIB = 64
"""The changes of a group by key are held in memory when it is committed."""


def build_parser(description: str) -> argparse.ArgumentParser:
    """The parser."""
    parser = program.place_arguments(description)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders, patterns, s3://bucket/prefix/ (with ?endpoint=…&region=… as a location)",
    )
    parser.add_argument("--shard", required=True, help="where rows go; it is created if there is none")
    parser.add_argument("--format", required=True, choices=get_args(Format), dest="format_")
    parser.add_argument(
        "--name", default="default", help="tells ingests apart that write to one shard from different inputs"
    )
    _one_of(parser, "--engine", get_args(EngineName), "auto: Spark for more than 64 MiB")
    parser.add_argument("--threads", type=_at_least(1), help="of engine local; without it, one a core")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be read, and how")
    parser.add_argument(
        "--max-bad", type=_at_least(0), default=0, metavar="N", help="exit with status 1 if more lines were bad (0)"
    )
    parser.add_argument("--bad-shard", help="where bad lines go (SHARD_bad)")
    _one_of(parser, "--changed", get_args(Changed), "what to do with files that changed since they were taken")
    says = "what to do with a file that is gone or changed before a run is done with it: stop, or note a bad line"
    _one_of(parser, "--lost", get_args(Lost), says)
    _add_schema(parser)
    _add_reading(parser)
    return parser


def _add_schema(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the schema, if the shard does not exist yet (as `persist create` declares it)")
    says = "a key column, as in 'order_id:int64 not null'; with --infer: its name"
    _repeated(group, "--key", "NAME:TYPE", says)
    _repeated(group, "--value", "NAME:TYPE", "a value column")
    group.add_argument(
        "--infer", action="store_true", help="infer the types from the first lines of the first file, and print them"
    )
    group.add_argument("--times", choices=("ms", "us"), help="times are a clock (default: plain integers)")
    group.add_argument("--unique", action="store_true", help="each key has at most one row (for changes by key)")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how files are read")
    _repeated(group, "--column", "COLUMN=NAME", "a column of the shard that is called otherwise in the files")
    _one_of(group, "--extra", ("refuse", "ignore"), "fields that the shard has no column for")
    _one_of(group, "--missing", ("refuse", "null"), "columns that a file of CSV or Parquet does not have")
    says = "a date or timestamp that is a number: s, ms, us, ns or days since 1970"
    _repeated(group, "--epoch", "COLUMN=UNIT", says)
    group.add_argument("--delimiter", default=",", help="CSV: between values; \\t is a tab")
    group.add_argument("--quote", default='"', help="CSV: around values")
    group.add_argument("--names", help="CSV: the columns of files that have no header, as in a,b,c")
    group.add_argument(
        "--null", action="append", metavar="TEXT", help="CSV: a text without quotes that means null (empty)"
    )
    group.add_argument("--encoding", default="utf-8", help="CSV: such as latin-1 or cp1252")
    group.add_argument(
        "--multiline", action="store_true", help="CSV: quoted values may hold line ends; a file is then one task"
    )
    says = "debezium: the last change of each key counts, or: retract what `before` says"
    _one_of(group, "--changes", get_args(Changes), says)
    group.add_argument(
        "--time-column", help="the column that says at which time a row is added; needs --until, and is one commit"
    )
    group.add_argument("--until", help="with --time-column: all rows before this time are in the inputs")
    group.add_argument("--chunk-mib", type=float, default=32, help="about what one task reads (32)")
    group.add_argument(
        "--group-mib",
        type=float,
        help=f"about what one commit appends ({GROUP_MIB}; {BY_KEY_GROUP_MIB} for changes by key)",
    )


def _repeated(group: argparse._ActionsContainer, name: str, metavar: str, says: str) -> None:
    group.add_argument(name, action="append", default=[], metavar=metavar, help=says)


def _one_of(group: argparse._ActionsContainer, name: str, choices: tuple[str, ...], says: str) -> None:
    """The first one is the default."""
    group.add_argument(name, choices=choices, default=choices[0], help=says)


def settings_of(parsed: argparse.Namespace) -> Settings:
    """How files are read, by the options. Raises InvalidUsage."""
    is_csv = parsed.format_ == "csv"
    if not is_csv and (odd := [name for name in ("names", "null", "multiline") if getattr(parsed, name)]):
        raise InvalidUsage(f"--{odd[0]} is for --format csv")
    if (parsed.time_column is None) != (parsed.until is None):
        raise InvalidUsage("--time-column and --until belong together: only with both is it known what is complete")
    by_key = parsed.format_ == "debezium" and parsed.changes == "by-key"
    delimiter = "\t" if parsed.delimiter in ("\\t", "tab") else parsed.delimiter
    group_mib = parsed.group_mib or (BY_KEY_GROUP_MIB if by_key else GROUP_MIB)
    return Settings(
        parsed.format_, columns=_pairs(parsed.column, "--column"), delimiter=delimiter,
        quote=parsed.quote, names=None if parsed.names is None else _names(parsed.names),
        nulls=("",) if parsed.null is None else tuple(parsed.null), encoding=_encoding(parsed.encoding),
        multiline=parsed.multiline, extra=parsed.extra, missing=parsed.missing, epochs=_epochs(parsed.epoch),
        changes=parsed.changes, time_column=parsed.time_column, chunk_bytes=round(parsed.chunk_mib * MIB),
        group_bytes=round(group_mib * MIB),
    )  # fmt: skip


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:  # its name is in argparse's message
        if (found := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {found}")
        return found

    return integer


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidUsage(f"--names are the different names of all columns, with commas between them: got {text!r}")
    return names


def _encoding(text: str) -> str:
    import codecs  # noqa: PLC0415

    try:
        name = codecs.lookup(text).name
    except LookupError as error:
        raise InvalidUsage(f"--encoding {text!r} is not known") from error
    return {"iso8859-1": "latin-1"}.get(name, name)


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InvalidUsage(f"{option} is COLUMN=…: got {text!r}")
        if name in found:
            raise InvalidUsage(f"{option} names {name!r} twice")
        found[name] = value
    return found


def _epochs(texts: list[str]) -> dict[str, Any]:
    found = _pairs(texts, "--epoch")
    units = get_args(EpochUnit)
    for unit in found.values():
        if unit not in units:
            raise InvalidUsage(f"--epoch takes {', '.join(units)}: got {unit!r}. {did_you_mean(unit, units)}")
    return found
