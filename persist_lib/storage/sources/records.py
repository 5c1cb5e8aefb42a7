"""The shard that says what sources a catalog has: one row each, as JSON that may gain fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from persist_lib.arguments import did_you_mean
from persist_lib.client import Client
from persist_lib.errors import NotFound
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.storage.describe import Owners
from persist_lib.storage.metadata_shard import Bodies, Row
from persist_lib.storage.records import Record, decode, encode, schema_of
from persist_lib.storage.sources.declared import Decoding, From, Meaning
from persist_lib.storage.sources.postgres import Known
from persist_lib.storage.sources.protocol import HOLD

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

SCHEMA = Schema(key={"name": "string not null"}, value={"body": "string not null"}, times="ms", unique=True)
State = Literal["making", "running", "paused", "dropping"]


class Followed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The collection that a source reads: its id, the columns in which it is read, and from which time on."""

    id: str
    form: Any
    begins: int = 0

    @property
    def columns(self) -> Schema:
        """The columns in which it is read."""
        return schema_of(self.form)


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Another way to decode a source's messages, of which renditions are made, by the roles of their collections.

    `number` counts such attempts. Once it is `decided`, the next process hands over.
    """

    number: int
    decoding: Decoding
    meaning: Meaning
    schema: Any
    decoded: Any = None
    renditions: dict[str, int] = {}
    decided: bool = False


class SourceRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A source. `collections` are the ids of those that it writes by definite appends, by what they are for.

    `epoch` counts how often it was reset; instances of another epoch are fenced off. `again`: once it
    is dropped, it is to be created again. `mends` counts the recipes that were tried, `mended` is the number of the one
    that decodes its messages now, 0 for the first. `table` is what a table of PostgreSQL was when the source was made.
    """

    id: str
    name: str
    reader: From
    decoding: Decoding
    meaning: Meaning
    schema: Any
    decoded: Any = None
    shards: int = 1
    retention: int | None = None
    state: State = "making"
    why: str = ""
    epoch: int = 1
    again: bool = False
    command: str = ""
    collections: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    health: str = ""
    input: Followed | None = None
    mending: Recipe | None = None
    mends: int = 0
    mended: int = 0
    table: Known | None = None

    @property
    def columns(self) -> Schema:
        """The output's columns."""
        return schema_of(self.schema)

    @property
    def message_columns(self) -> Schema | None:
        """The columns that messages have, where a transform makes the output's of them."""
        return None if self.decoded is None else schema_of(self.decoded)

    @property
    def bindings(self) -> str:
        """Its binding shard."""
        return f"{self.id}.bindings"

    @property
    def choices(self) -> str:
        """The shard of what its readers agree on."""
        return f"{self.id}.choices"

    @property
    def schemas(self) -> str:
        """The shard of the schemas of its messages, if a registry has them."""
        return f"{self.id}.schemas"

    @property
    def fence(self) -> bytes:
        """The fencing value of its holds."""
        return f"{self.id}/{self.epoch}".encode()


Decide = Callable[[dict[str, SourceRecord]], SourceRecord | None]
"""Makes of the sources by name the one to set, or None for no change. Raises what refuses it. Called again."""


To = Callable[[dict[str, SourceRecord]], tuple[SourceRecord | None, SourceRecord | None]]
"""Makes of the sources the row to take away and the one to set."""


def fetch_owners(controller: Controller) -> Owners:
    """Whose the minted shards are. Read it after the list of shards: what is new in that is then in this."""
    declared = Declared(controller.client, controller.catalog.shard)
    try:
        sources = {record.id: name for name, record in declared.fetch().items() if record.state != "dropping"}
    finally:
        declared.close()
    return Owners(controller.catalog.fetch(), sources)


def owners_of(client: Client) -> Owners:
    """The same of a location."""
    with client.controller() as controller:
        return fetch_owners(controller)


class Declared:
    """One process's view of the sources of a catalog."""

    def __init__(self, client: Client, catalog: str) -> None:
        self._bodies = Bodies(client, f"{catalog}.sources", SCHEMA, "the list of sources")

    def fetch(self) -> dict[str, SourceRecord]:
        """The sources by name."""
        return _decoded(self._bodies.fetch())

    def find(self, name: str) -> SourceRecord:
        """One source. Raises NotFound."""
        sources = self.fetch()
        if name not in sources:
            raise NotFound(
                f"there is no source {name!r}. {did_you_mean(name, sources)}Create it, or look at the list", source=name
            )
        return sources[name]

    def change(self, decide: Decide, deadline: Deadline) -> None:
        """Set the row that `decide` says, in one append."""

        def to(sources: dict[str, SourceRecord]) -> tuple[SourceRecord | None, SourceRecord | None]:
            record = decide(sources)
            return None if record is None else sources.get(record.name), record

        self._append(to, deadline)

    def forget(self, record: SourceRecord, deadline: Deadline) -> None:
        """Take away the row of a source, unless it is another one of that name by now."""

        def to(sources: dict[str, SourceRecord]) -> tuple[SourceRecord | None, SourceRecord | None]:
            now = sources.get(record.name)
            return now if now is not None and now.id == record.id else None, None

        self._append(to, deadline)

    def _append(self, to: To, deadline: Deadline) -> None:
        def rows(bodies: dict[str, str]) -> list[Row]:
            old, new = to(_decoded(bodies))
            if old == new:
                return []
            # SUBTLE: what goes, as it is stored. msgspec leaves a default out or not, by which of equal texts it is.
            gone = [] if old is None else [{"name": old.name, "body": bodies[old.name], DIFF: -1}]
            return gone + ([] if new is None else [{"name": new.name, "body": encode(new), DIFF: 1}])

        self._bodies.change(rows, deadline)

    def close(self) -> None:
        """Close what it has open. Idempotent."""
        self._bodies.close()


def _decoded(bodies: dict[str, str]) -> dict[str, SourceRecord]:
    return {name: decode(SourceRecord, body, f"the row of source {name}") for name, body in bodies.items()}


def changed(record: SourceRecord, **fields: Any) -> SourceRecord:
    """The record with other fields."""
    return msgspec.structs.replace(record, **fields)


def mend_command(record: SourceRecord, number: int, role: str) -> str:
    """The command that makes a rendition of a source's collection, for a recipe."""
    return f"{record.id}.mend{number}.{role}"


def mend_number(record: SourceRecord, command: str) -> int | None:
    """For which recipe a rendition was made; None for one that was made otherwise."""
    head, _, rest = command.partition(".mend")
    return int(rest.partition(".")[0]) if head == record.id and rest else None


def minted(client: Client) -> str:
    """The id of a new source."""
    return f"s{client.runtime.entropy():016x}"


__all__ = [
    "HOLD",
    "SCHEMA",
    "Declared",
    "Followed",
    "Recipe",
    "SourceRecord",
    "State",
    "changed",
    "mend_command",
    "mend_number",
    "minted",
]
