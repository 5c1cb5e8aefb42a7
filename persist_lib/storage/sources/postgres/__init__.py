"""A table of PostgreSQL as a source: what is declared of it. Reading it needs the extra `persist-lib[postgres]`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from persist_lib.arguments import parse_integer, parse_text, shown
from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:
    from persist_lib.storage.sources.agreed_value import Choices
    from persist_lib.storage.sources.postgres.reader import TableReader
    from persist_lib.storage.sources.postgres.server import Table

MOST_RETAINED = 10 * 1024 * MIB


class Known(msgspec.Struct, frozen=True):
    """What a source's table and its publication were when the source was made.

    `published` names the rows of the server's catalog that say what is published of the table, each by its id and by
    the transaction that wrote it (`xmin`). Any change writes such a row again, also one that is taken back. `columns`
    are the numbers of the table's columns by name: a number stays with its column, whatever that is called.
    """

    published: str
    columns: dict[str, int]


class Postgres(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="postgres", forbid_unknown_fields=True
):
    """A table of PostgreSQL 15 or newer, followed by logical replication.

    `url` is one of libpq, without a password: it is kept in the catalog. Passwords come from where libpq takes them
    (`~/.pgpass`, PGPASSWORD, a service file). `table` is written as in SQL, with its schema. The source makes a
    replication slot of its own, and a publication, unless `publication` names one that is there. Once the slot holds
    back more than `most_retained` bytes of the server's log, instances say so in the source's health.
    """

    url: str
    table: str
    publication: str | None = None
    most_retained: int = MOST_RETAINED

    def __post_init__(self) -> None:
        for name in ("url", "table"):
            if not parse_text(getattr(self, name), name, 4096):
                raise InvalidUsage(f"{name} must not be empty")
        if not self.url.startswith(("postgresql://", "postgres://")):
            raise InvalidUsage(f"url must start with postgresql://: got {shown(self.url)}")
        if self.publication is not None and not parse_text(self.publication, "publication", 63):
            raise InvalidUsage("publication must name one that is there, or be left out")
        parse_integer(self.most_retained, "most_retained", 1)

    def inspect(self) -> Table:
        """What the table is. Raises InvalidUsage, which says what to do, if it cannot be followed."""
        found: Table = _part("server").inspect(self)
        return found

    def open(self, id_: str, choices: Choices, known: Known | None = None) -> TableReader:
        """A reader for the source with this id. What is `known` of the table has to be so at each look."""
        reader: TableReader = _part("reader").TableReader(self, id_, choices, known)
        return reader

    def make(self, id_: str, timeout_s: float) -> Known:
        """Make the slot and the publication of a source, and return what these are. Idempotent."""
        known: Known = _part("server").make(self, id_, timeout_s)
        return known

    def look(self, id_: str) -> Known:
        """What the table and the publication of a source are now. Raises Determinate and InvalidUsage."""
        known: Known = _part("server").look(self, id_)
        return known

    def take_away(self, id_: str) -> list[str]:
        """Drop the slot and the publication of a source. Answers what could not be, and what to do about it."""
        left: list[str] = _part("server").take_away(self, id_)
        return left


def _part(name: str) -> Any:
    try:
        return import_module(f"persist_lib.storage.sources.postgres.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("persist_lib"):
            raise
        raise InvalidUsage(
            f"PostgreSQL as a source needs the package {error.name}, which is not installed: pip install "
            "'persist-lib[postgres]'",
            extra="postgres",
        ) from error
