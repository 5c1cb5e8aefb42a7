"""Promoting a shard: in place, it becomes the first rendition of a collection, while it is read and written.

The catalog says what is intended, and a rendition shard is made. Then one transaction of both shards decides
(`core.members`): until then the shard stands by itself, and after it only the catalog is left to say so. A process that
is killed in between leaves a pending command, which any other one finishes, or refuses for ever.
"""

from __future__ import annotations

import msgspec

from persist_lib.arguments import parse_flag
from persist_lib.catalog.catalog import Changes, Contents, setting
from persist_lib.catalog.collection_status import describe
from persist_lib.catalog.creation import Making
from persist_lib.catalog.describe import Description
from persist_lib.catalog.effects import settle
from persist_lib.catalog.names import minted, parse_collection_name
from persist_lib.catalog.records import OF_PLACES, CollectionRecord, CommandRecord, RenditionRecord, schema_form
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.errors import InvalidUsage, NameTaken, NotFound
from persist_lib.ids import CATALOG, SeqNo


class Promoting(Making):
    """The call that makes a collection of a shard."""

    def promote(
        self, name: str, *, dry_run: bool = False, command: str | None = None, timeout: float | None = None
    ) -> Description | None:
        """Make a shard the first rendition of a collection of its name, in place: no data is copied, and none moves.

        Its history, holds, producers and retention are the collection's from then on, which is written in the mode
        "compare_and_append". A `client.table` that is open continues, in any process of this release; other handles of
        the shard are refused with MemberOf. There is no way back. The shard needs format 5 (`client.upgrade`), and from
        then on programs of the release before cannot read this catalog. A second call answers what the first one did.
        With `dry_run` nothing is changed and None is answered, or what would be raised is raised.

        Raises InvalidUsage where it cannot be, also for a format before 5, OfLayer for a shard that is a layer's,
        NameTaken for a name that the catalog has, and NotFound.
        """
        name, dry_run = parse_collection_name(name), parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("promote")
        deadline = self._deadline(timeout)
        contents = self.catalog.fetch()
        found = contents.named(name)
        if found is not None and not dry_run:
            for pending in contents.pending(found.id):
                settle(self.catalog, pending, deadline)
            contents = self.catalog.fetch()
            found = contents.named(name)
        if found is not None and contents.renditions_of(found.id)[0].places:
            return describe(self.client, contents, found)
        state = self._check_promotion(name)
        if found is not None:
            raise NameTaken(
                f"there is a collection {name!r} beside the shard of that name, so the shard cannot become one. "
                "Nothing was changed; rename the collection first",
                collection=name, shard=name,
            )  # fmt: skip
        if dry_run:
            return None

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(name) is not None:
                raise NameTaken(f"there is a collection {name!r} by now. Nothing was changed", collection=name)
            id_ = minted(self.client.runtime.entropy())
            collection = CollectionRecord(id=id_, name=name, command=record.id)
            first = RenditionRecord(
                v=OF_PLACES, collection=id_, number=1, shards=1, schema=schema_form(state.schemas[-1]),
                hash_columns=tuple(state.schemas[-1].key_names), mode="compare_and_append", command=record.id,
                places=(name,),
            )  # fmt: skip
            return setting(collection, first), msgspec.structs.replace(record, collection=id_, pending=True)

        record = self._command("promote", None, {"name": name}, intent, command, timeout)
        if record.refused:
            raise InvalidUsage(f"table {name!r} was not promoted: {record.refused}. It is as it was", table=name)
        self._tended(timeout, record.collection)  # where nobody reads by the shard's name, nothing is kept for that
        return self._described(record)

    def _check_promotion(self, name: str) -> State:
        """The state of a shard that can become a member now. Raises what refuses it."""
        machine = self.client.machine(name)
        version = machine.fetch()
        if version.state.is_finished():
            raise NotFound(f"there is no table {name!r} in this location any more: it was dropped", table=name)
        if self.catalog.shard != CATALOG:
            raise InvalidUsage(
                f"only the usual catalog takes a shard in place, as its name is looked up there, and this is "
                f"{self.catalog.shard!r}. Nothing was changed",
                table=name,
            )
        if machine.taker is not None:
            raise InvalidUsage(
                f"table {name!r} is promoted at its location, not through a shard server, whose clients have rights on "
                "it by its name. Nothing was changed. Give those who need it rights on collections, and run "
                f"`persist promote {name} --location URL` where the server runs",
                table=name,
            )
        self.client.consensus.compare_and_set_many({})  # raises InvalidUsage where there are no transactions
        if version.state.upper.is_top():
            raise InvalidUsage(
                f"table {name!r} is closed for writing, for ever, so nothing could be added to a collection of it. "
                "Nothing was changed; it stays readable as it is",
                table=name,
            )
        seqno = SeqNo(version.seqno + 1)
        refusal = apply(version.state, seqno, c.Adopt(f"{minted(0)}/0", seqno))
        if not isinstance(refusal, State):
            raise machine.refused(refusal)
        return version.state
