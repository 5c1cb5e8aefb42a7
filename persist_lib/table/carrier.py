"""What a table needs of what carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persist_lib.catalog.describe import Description
from persist_lib.convert.filling import Filling
from persist_lib.frontier import Antichain
from persist_lib.maintain.duties import Maintained
from persist_lib.maintain.publish.steps import Format, Published, Withdrawn
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.statements import Done, Insert, Statement
from persist_lib.schema.schema import Schema
from persist_lib.shard.admin import Downgraded

if TYPE_CHECKING:
    from persist_lib.catalog.collection_arguments import Retention
    from persist_lib.catalog.deleted_keys import Span
    from persist_lib.client import Client
    from persist_lib.relation.changes import Changes
    from persist_lib.relation.listen import Listener
    from persist_lib.times import TimeLike

Make = Callable[[Schema], Statement]
"""Makes a statement for the columns that the table has."""


class KeptDeletes(msgspec.Struct, frozen=True):
    """How a table keeps deleted keys: the column by which changes are ordered, and for how long, in milliseconds.

    `table` is the name of the table that has them, `shards` those that have its rows.
    """

    column: str
    span_ms: int
    table: str
    shards: tuple[str, ...]


class TableDescription(msgspec.Struct, frozen=True):
    """What a table is, and how far it has come. Times from `since` on and before `upper` can be read.

    `retention` is how many times of history are kept behind upper by a policy; None where there is none. `holds` are by
    name, with the time from which on each keeps history. `shards` are those that have its rows now. `collection` is
    what the catalog says of it, its renditions among others; None where one shard carries it. `keep_deletes` is how it
    keeps deleted keys; None: not at all.
    """

    name: str
    carrier: str
    schema: Schema
    since: Antichain
    upper: Antichain
    retention: int | None
    holds: dict[str, Antichain]
    shards: tuple[str, ...]
    collection: Description | None = None
    keep_deletes: KeptDeletes | None = None


class Wal(NamedTuple):
    """What a WAL has of a table: the shard that it is, the table's id there, and up to which time it was applied."""

    shard: str
    table: str
    until: int


class Carrier(ABC):
    """What a table needs of what carries it. `kind` is `shard`, `collection`, or `timeline NAME`."""

    kind: str
    schema: Schema
    client: Client
    name: str

    def filling(self, *, is_dry: bool = False) -> Filling:  # noqa: ARG002 - of those that take numbers
        """What fills columns in one call. In a dry run it takes no numbers."""
        return Filling(self.client.runtime)

    def append(self, rows: object, *, token: bytes | None, timeout: float | None, dry_run: bool) -> Done:
        """Add rows. An append does not say what becomes of keys, so it counts none."""
        made = partial(Insert, self.name, rows=rows, filling=self.filling(is_dry=dry_run))
        done = self.execute(made, token=token, timeout=timeout, dry_run=dry_run)
        return msgspec.structs.replace(done, inserted=0)

    @abstractmethod
    def execute(self, make: Make, *, token: bytes | None, timeout: float | None, dry_run: bool = False) -> Done: ...
    @abstractmethod
    def read(self, as_of: TimeLike | None, asked: Asked, *, newest: bool, timeout: float | None) -> Any: ...
    @abstractmethod
    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes: ...
    @abstractmethod
    def listen(self, as_of: TimeLike | None, *, until: object, replace: bool, timeout: float | None) -> Listener: ...
    @abstractmethod
    def restore(self, to: TimeLike, *, dry_run: bool, timeout: float | None) -> Done: ...
    @abstractmethod
    def describe(self) -> TableDescription: ...
    @abstractmethod
    def evolve(self, schema: Schema, *, dry_run: bool) -> tuple[str, ...]: ...
    @abstractmethod
    def set_retention(self, distance: Retention, *, dry_run: bool) -> Downgraded: ...
    @abstractmethod
    def set_keep_deletes(self, column: str | None, span: Span, *, dry_run: bool) -> None: ...
    @abstractmethod
    def kept_by(self) -> str:
        """The shard that keeps the table's history."""

    @abstractmethod
    def shards_everywhere(self) -> list[str]:
        """All shards that may have any of its rows, now or earlier."""

    @abstractmethod
    def give_up(self, until: int, timeout: float | None) -> None:
        """Move the hold of the table's own retention to this time, or to the newest one that is before it."""

    @abstractmethod
    def settle(self, timeout: float | None, *, dry_run: bool) -> Wal | None:
        """Bring all that was written to the shards of the table. Answers the WAL in which it was before, if any."""

    @abstractmethod
    def hold_of(self, hold: object) -> tuple[str, str]:
        """The shard that keeps the table's history, and the checked name of a hold of its users."""

    @abstractmethod
    def promote(self, shards: int | None, timeline: str | None, *, dry_run: bool, **how: Any) -> str:
        """Raise what carries it. Answers the id of the collection that carries it then; empty where it is this one."""

    @abstractmethod
    def publish(
        self, format_: Format, at: TimeLike | None, *, keep: int | None, follows: bool | None, dry_run: bool
    ) -> Published: ...
    @abstractmethod
    def withdraw(self, format_: Format, *, dry_run: bool) -> Withdrawn: ...
    @abstractmethod
    def rename(self, to: str) -> None: ...
    @abstractmethod
    def drop(self, *, dry_run: bool) -> tuple[str, ...]: ...
    @abstractmethod
    def maintain(self, *, dry_run: bool) -> dict[str, Maintained]: ...
    @abstractmethod
    def writer(self) -> Any:
        """A writer of its own, with which callers bring the times."""

    @abstractmethod
    def _let_all_go(self) -> None:
        """Let go of what this client keeps of the table, and no answer needs, before history goes."""

    @abstractmethod
    def close(self) -> None: ...
