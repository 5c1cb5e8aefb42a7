"""Options of the data source, parsed strictly: what is unknown, misspelt, empty or of a wrong type is refused.

Spark hands options over as text, and shows them in plans and in its UI. So none may hold a password: credentials come
from the environment of the driver and of the executors, as in AWS_… or ~/.pgpass.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from persist_lib.arguments import did_you_mean, parse_seconds, shown
from persist_lib.catalog.records import parse_collection_name
from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.errors import InvalidUsage, redacted
from persist_lib.runtime.ambient import Runtime
from persist_lib.settings import config_of

PLACE = ("location", "consensus", "table")
READ = (
    "as_of", "columns", "filter", "diff", "newest", "timeout", "changes", "from", "to", "partition_bytes", "pushdown",
    "read_only",
)  # fmt: skip
"""Options of batch reads."""
RENAMED = {"shard": "table", "collection": "table", "where": "filter"}
"""Options of earlier releases, and what they are called by now."""
STREAM = (
    "columns", "filter", "changes", "from", "hold", "max_bytes", "max_updates", "max_times", "partition_bytes",
    "read_only",
)  # fmt: skip
"""Options of streaming reads."""
SPARKS_OWN = ("path", "checkpointlocation", "queryname", "outputmode", "__datasource_provider")
"""What Spark itself may add."""

MOST_SIZE = 1 << 62
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one use of the source: which table, and the others as text, by lower-case name."""

    location: str
    consensus: str | None
    table: str
    values: Mapping[str, str]
    what: str

    @classmethod
    def of(cls, given: Mapping[str, str], allowed: Collection[str], what: str) -> Self:
        """The options of a use that takes those in `allowed` and `PLACE`; `what` names it in messages.

        `location` may come from the variable PERSIST_LOCATION, and `consensus` from PERSIST_CONSENSUS. The table may
        be the path of `load` and `save`.
        """
        values = {str(name).lower(): value for name, value in given.items()}
        known = (*PLACE, *(name for name in allowed if name not in PLACE))
        for name, value in values.items():
            if (new := RENAMED.get(name)) is not None:
                raise InvalidUsage(f"{what} has no option {name} any more: it is {new} now", option=name, allowed=known)
            if name not in known and name not in SPARKS_OWN:
                raise InvalidUsage(
                    f"{what} has no option {shown(name)}. {did_you_mean(name, known)}It takes {', '.join(known)}",
                    option=name, allowed=known,
                )  # fmt: skip
            if name in known and (not isinstance(value, str) or not value.strip()):
                raise InvalidUsage(
                    f"the option {name} of {what} is empty: got {shown(value)}. Set it, or leave it out", option=name
                )
        path = values.pop("path", None)
        table = values.get("table", path)
        if path not in {None, table}:
            raise InvalidUsage(
                f"{what} is about one table, and got table {shown(table)} and path {shown(path)}. Leave out one",
                option="table",
            )
        location, consensus = _place(values, what)
        if table is None:
            raise InvalidUsage(f'{what} needs the option table, as in .option("table", "orders")', option="table")
        rest = {name: value for name, value in values.items() if name in known and name not in PLACE}
        return cls(location, consensus, parse_collection_name(table), rest, what)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str | None:
        """An option as it was given; None for none."""
        return self.values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        if name not in self.values:
            return default
        if (found := _TRUTH.get(self.values[name].strip().lower())) is None:
            raise self.wrong(name, "true or false")
        return found

    def integer(self, name: str, least: int = 1) -> int | None:
        """An option that is an integer, `least` or more; None for none."""
        if name not in self.values:
            return None
        text = self.values[name].strip().replace("_", "")
        if not (text.isascii() and text.isdigit() and least <= int(text) <= MOST_SIZE):
            raise self.wrong(name, f"an integer, {least} or more")
        return int(text)

    def seconds(self, name: str) -> float | None:
        """An option that is a number of seconds; None for none."""
        if name not in self.values:
            return None
        try:
            return parse_seconds(float(self.values[name]))
        except (ValueError, InvalidUsage):
            raise self.wrong(name, "a number of seconds, 0 or more") from None

    def size(self, name: str, least: int = 1) -> int | None:
        """An option that is a number of bytes, such as 67108864, `64m` or `64 MiB`; None for none."""
        if name not in self.values:
            return None
        match = _SIZE.fullmatch(self.values[name].strip())
        if match is None:
            raise self.wrong(name, "a number of bytes, as in 67108864, 64m or 64 MiB")
        found = int(match[1]) << (10 * " kmgt".index(match[2].lower() or " "))
        if not least <= found <= MOST_SIZE:
            raise self.wrong(name, f"a number of bytes of at least {least:,}")
        return found

    def names(self, name: str) -> tuple[str, ...] | None:
        """An option that lists names, as in `a, b` or (for names with commas) `["a", "b"]`; None for none.

        Spark makes a text of a list of Python's, which is taken too.
        """
        if name not in self.values:
            return None
        text = self.values[name].strip()
        if not text.startswith("["):
            return self._distinct(name, [part.strip() for part in text.split(",")])
        try:
            return self._distinct(name, json.loads(text))
        except json.JSONDecodeError:
            pass
        try:
            return self._distinct(name, ast.literal_eval(text))
        except (ValueError, SyntaxError) as error:
            raise self.wrong(name, 'a list of names, as in a, b or ["a", "b"]') from error

    def time(self, name: str) -> int | str | None:
        """An option that is a time: an integer where its text is one, else the text; None for none."""
        if (text := self.values.get(name)) is None:
            return None
        plain = text.strip()
        return int(plain) if plain.isascii() and plain.removeprefix("-").isdigit() else plain

    def wrong(self, name: str, wanted: str) -> InvalidUsage:
        """The error for an option with a value that it does not take."""
        return InvalidUsage(
            f"the option {name} of {self.what} must be {wanted}: got {shown(self.values[name])}",
            option=name, value=self.values[name],
        )  # fmt: skip

    def _distinct(self, name: str, found: list[str]) -> tuple[str, ...]:
        if not found or not all(isinstance(one, str) and one for one in found):
            raise self.wrong(name, 'a list of names, as in a, b or ["a", "b"]')
        if len(set(found)) != len(found):
            raise self.wrong(name, "a list of names without one that occurs twice")
        return tuple(found)


def _place(values: Mapping[str, str], what: str) -> tuple[str, str | None]:
    environ = os.environ  # noqa: TID251 - an edge: options of Spark come from it as they do for programs
    location = values.get("location") or environ.get("PERSIST_LOCATION")
    consensus = values.get("consensus")
    if consensus is None and "location" not in values:
        consensus = environ.get("PERSIST_CONSENSUS")
    if not location:
        raise InvalidUsage(
            f'{what} needs the option location, as in .option("location", "s3://bucket/prefix"), or the variable '
            "PERSIST_LOCATION in the driver's environment",
            option="location",
        )  # fmt: skip
    for name, url in (("location", location), ("consensus", consensus)):
        if url is not None and name in values and redacted(url) != url:
            raise InvalidUsage(
                f"the option {name} of {what} holds a password, and Spark shows options in plans and in its UI. "
                "Leave it out of the URL: the driver and the executors take credentials from their environment "
                "(PGPASSWORD, ~/.pgpass, AWS_…)",
                option=name,
            )  # fmt: skip
    if location.startswith("memory:"):
        raise InvalidUsage(
            f"{what} cannot use {location}: it lives in one process, and Spark reads and writes in others. Use a "
            "file: or s3: location",
            option="location",
        )  # fmt: skip
    return location, consensus or None


def as_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options that a program passes, as the text that Spark hands over. None is left out; a list is one of names."""
    return {name: _as_text(value) for name, value in options.items() if value is not None}


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps([str(one) for one in value]) if isinstance(value, (list, tuple)) else str(value)


def client_of(location: str, consensus: str | None, *, read_only: bool = False, writes: bool = False) -> Client:
    """The client of a location in this process, with the settings in PERSIST_CONFIG. It is never closed.

    One that `writes` makes a location that is not there; otherwise that raises NotFound, and the client has no thread
    in the background: nothing in it renews a lease unless its caller does.
    """
    return _client(os.getpid(), location, consensus, read_only, writes)


@lru_cache(maxsize=32)
def _client(_pid: int, location: str, consensus: str | None, read_only: bool, writes: bool) -> Client:
    # By process, as Spark forks its workers, and a fork must not use its parent's connections.
    config = Config.model_validate(config_of(os.environ))  # noqa: TID251 - an edge, as in `options`
    return open_client(
        location, consensus, config=config, runtime=Runtime(background=writes), read_only=read_only, create=writes
    )
