"""How commands are decided, found again, and seen finished: what the controller's calls stand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persist_lib.arguments import check_type, parse_seconds
from persist_lib.catalog.catalog import Catalog, Changes, Contents, setting
from persist_lib.catalog.collection_arguments import check_same
from persist_lib.catalog.collection_status import describe
from persist_lib.catalog.describe import Description
from persist_lib.catalog.effects import settle
from persist_lib.catalog.records import (
    CollectionRecord,
    CommandRecord,
    RenditionRecord,
    What,
    parse_collection_name,
    parse_command_id,
)
from persist_lib.client import Client, for_layers
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.ids import CATALOG
from persist_lib.runtime.ambient import Deadline

Intent = Callable[[Contents, CommandRecord], tuple[Changes, CommandRecord]]


class Acting:
    """What acts through a client."""

    client: Client

    def _writable(self, what: str) -> None:
        if self.client.read_only:
            raise InvalidUsage(f"{what} needs a client that may write; this one was opened with read_only=True")

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.client.runtime.deadline(self.client.config.timeout_s if timeout is None else parse_seconds(timeout))


class Commanding(Acting):
    """A client's view of a catalog, and commands to it."""

    def __init__(self, client: Client, *, catalog: str = CATALOG) -> None:
        self.client = for_layers(check_type(client, Client, "client", "persist.open(url)"))
        self.catalog = Catalog(self.client, catalog)

    def _command(
        self, what: What, collection: str | None, asked: dict[str, Any], intent: Intent, command: str | None,
        timeout: float | None,
    ) -> CommandRecord:  # fmt: skip
        """Decide a command, or find it decided, and see it finished. Pending ones of the collection come first."""
        id_ = self.client.runtime.token().hex() if command is None else parse_command_id(command)
        deadline = self._deadline(timeout)

        def decide(contents: Contents) -> tuple[Changes, CommandRecord]:
            if (known := contents.commands.get(id_)) is not None:
                check_same(known, what, collection, asked)
                return {}, known
            if collection is not None:
                for before in contents.pending(collection):
                    return {}, before
                if (current := contents.collections.get(collection)) is None or current.state == "dropping":
                    raise NotFound("the collection was dropped in the meantime; nothing was changed")
            number = max((known.number for known in contents.commands.values()), default=0) + 1
            record = CommandRecord(id=id_, what=what, collection=collection or "", asked=asked, number=number)
            changes, record = intent(contents, record)
            return {**changes, **setting(record)}, record

        while True:
            record = self.catalog.change(decide, deadline)
            if record.pending:
                record = settle(self.catalog, record, deadline)
            if record.id == id_:
                return record

    def _find(self, name: str) -> tuple[Contents, CollectionRecord]:
        name = parse_collection_name(name)
        contents = self.catalog.fetch()
        collection = contents.find(name)
        if collection.state == "making":  # its process may be at it, or gone
            if not self.client.read_only:
                for command in contents.pending(collection.id):
                    settle(self.catalog, command, self._deadline(None))
            contents = self.catalog.fetch()
            collection = contents.find(name)
        if collection.state == "making":
            raise NotFound(
                f"collection {name!r} is being created. Look again; if its process has died, the next client that may "
                "write finishes it",
                collection=name,
            )
        return contents, collection

    def _subject(self, name: str, command: str | None, *, is_drop: bool = False) -> tuple[Contents, CollectionRecord]:
        """The collection that a command is about: by its name, or the same as at first for one that is repeated."""
        name = parse_collection_name(name)
        contents = self.catalog.fetch()
        known = None if command is None else contents.commands.get(parse_command_id(command))
        if known is None:
            contents, collection = self._find(name)
            if collection.marks_of:
                raise InvalidUsage(
                    f"{name!r} has the deleted keys of another table, and is changed and dropped with that alone: with "
                    "set_keep_deletes, drop or set_retention of that table. Nothing was changed",
                    collection=name,
                )
            return contents, collection
        found = contents.collections.get(known.collection)
        if found is None and is_drop:
            found = CollectionRecord(id=known.collection, name=name, state="dropping")
        return contents, self._still(found, known)

    def _described(self, record: CommandRecord) -> Description:
        """What a collection is after a command."""
        contents = self.catalog.latest()
        found = contents.collections.get(record.collection)
        if found is not None and found.state == "dropping":
            found = None
        return describe(self.client, contents, self._still(found, record))

    def _still(self, found: CollectionRecord | None, record: CommandRecord) -> CollectionRecord:
        if found is None:
            raise NotFound(
                f"the command {record.id!r} ({record.what}) was done, and the collection has been dropped since",
                command=record.id,
            )
        return found

    def _of(self, contents: Contents, collection: CollectionRecord, number: int) -> RenditionRecord:
        found = contents.renditions.get((collection.id, number))
        if found is not None and found.state == "making" and not self.client.read_only:
            # Its shards have no hold yet, without which what is written could be given up.
            for command in contents.pending(collection.id):
                settle(self.catalog, command, self._deadline(None))
        if found is None or found.state == "dropping":
            numbers = [r.number for r in contents.renditions_of(collection.id) if r.state != "dropping"]
            raise NotFound(
                f"collection {collection.name!r} has no rendition {number}: it has {numbers}",
                collection=collection.name, rendition=number,
            )  # fmt: skip
        return found
