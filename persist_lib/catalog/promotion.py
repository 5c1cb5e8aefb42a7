"""Promoting a shard: in place, it becomes the first rendition of a collection, while it is read and written.

The catalog says what is intended, and a rendition shard is made. Then one transaction of both shards decides
(`core.members`): until then the shard stands by itself, and after it only the catalog is left to say so. A process that
is killed in between leaves a pending command, which any other one finishes, or refuses for ever.
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from persist_lib.arguments import parse_flag
from persist_lib.catalog.catalog import Changes, Contents, setting
from persist_lib.catalog.collection_status import describe
from persist_lib.catalog.creation import Making
from persist_lib.catalog.describe import Description
from persist_lib.catalog.effects import settle
from persist_lib.catalog.names import member_of, minted, parse_collection_name
from persist_lib.catalog.records import (
    OF_PLACES,
    CollectionRecord,
    CommandRecord,
    Kind,
    RenditionRecord,
    TimelineRecord,
    schema_form,
)
from persist_lib.core import commands as c
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.errors import InvalidUsage, NameTaken, NotFound
from persist_lib.frontier import at
from persist_lib.ids import CATALOG, SeqNo
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema

AHEAD_MS = 1_000
"""How far a shard that joins a timeline may be ahead of the store's clock, in milliseconds."""


class Promoting(Making):
    """The call that makes a collection of a shard."""

    def promote(
        self, name: str, *, timeline: str | None = None, dry_run: bool = False, command: str | None = None,
        timeout: float | None = None,
    ) -> Description | None:  # fmt: skip
        """Make a shard the first rendition of a collection of its name, in place: no data is copied, and none moves.

        Its history, holds, producers and retention are the collection's from then on, which is written in the mode
        "compare_and_append". A `client.table` that is open continues, in any process of this release; other handles of
        the shard are refused with MemberOf. There is no way back. The shard needs format 5 (`client.upgrade`), and from
        then on programs of the release before cannot read this catalog. A second call answers what the first one did.

        With a `timeline` it joins that as a table: it is changed in transactions with others, at times that these mint.
        The timeline has a WAL, and is made if it is not there. The shard's times are milliseconds, and not ahead of the
        store's clock, as all tables of the timeline would be then.

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
        if timeline is not None:
            self._check_timeline(contents, name, parse_collection_name(timeline))
        if found is not None and contents.renditions_of(found.id)[0].places:
            return describe(self.client, contents, self._on(contents, found, timeline))
        state = self._check_promotion(name)
        if found is not None:
            raise NameTaken(
                f"there is a collection {name!r} beside the shard of that name, so the shard cannot become one. "
                "Nothing was changed; rename the collection first",
                collection=name, shard=name,
            )  # fmt: skip
        if timeline is not None:
            self._check_times(name, state)
        if dry_run:
            return None
        line = None if timeline is None else self._wal_timeline(timeline, deadline).id

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(name) is not None:
                raise NameTaken(f"there is a collection {name!r} by now. Nothing was changed", collection=name)
            collection, first = _promoted(minted(self.client.runtime.entropy()), name, state.schemas[-1], line, record)
            return setting(collection, first), msgspec.structs.replace(record, collection=collection.id, pending=True)

        asked = {"name": name} if line is None else {"name": name, "timeline": line}
        record = self._command("promote", None, asked, intent, command, timeout)
        if record.refused:
            raise InvalidUsage(f"table {name!r} was not promoted: {record.refused}. It is as it was", table=name)
        self._tended(timeout, record.collection)  # without a reader by the shard's name, nothing is kept for one
        return self._described(record)

    @abstractmethod
    def _wal_timeline(self, name: str, deadline: Deadline) -> TimelineRecord:
        """The timeline of this name, which has a WAL; made if it is not there."""

    @staticmethod
    def _check_timeline(contents: Contents, name: str, timeline: str) -> None:
        found = next((one for one in contents.timelines.values() if one.name == timeline), None)
        if found is not None and found.mode != "wal":
            raise InvalidUsage(
                f"table {name!r} cannot join the timeline {timeline!r}, which has no WAL, so that no transaction "
                "covers several of its tables. Nothing was changed; name another one, which is made if it is not there",
                table=name, timeline=timeline,
            )  # fmt: skip

    @staticmethod
    def _on(contents: Contents, found: CollectionRecord, timeline: str | None) -> CollectionRecord:
        """What a shard was promoted to before, if that is what is asked for again."""
        line = None if found.timeline is None else contents.timelines[found.timeline].name
        if timeline not in {None, line}:
            raise InvalidUsage(
                f"{found.name!r} was promoted to a {found.kind} already, which joins no timeline {timeline!r}. Nothing "
                "was changed; make a table there, and write what this one has to it",
                table=found.name, timeline=timeline,
            )  # fmt: skip
        return found

    def _check_times(self, name: str, state: State) -> None:
        """Raise unless the times of a shard can be those of a timeline."""
        schema, now = state.schemas[-1], self.client.consensus.now()
        if schema.times != "ms":
            raise InvalidUsage(
                f"table {name!r} has {'plain integers' if schema.times is None else schema.times} as times, and those "
                "of a timeline are milliseconds. Nothing was changed",
                table=name,
            )
        if (state.upper.time or 0) > now + AHEAD_MS:
            raise InvalidUsage(
                f"table {name!r} has come to {schema.show(state.upper)}, which is ahead of the store's clock "
                f"({schema.show(at(now))}): all tables of the timeline would be there, too. Nothing was changed; try "
                "again when the clock has come there",
                table=name,
            )

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
        if not self.client.read_only:
            self.client.consensus.compare_and_set_many({})  # raises InvalidUsage where there are no transactions
        if version.state.upper.is_top():
            raise InvalidUsage(
                f"table {name!r} is closed for writing, for ever, so nothing could be added to a collection of it. "
                "Nothing was changed; it stays readable as it is",
                table=name,
            )
        seqno = SeqNo(version.seqno + 1)
        refusal = apply(version.state, seqno, c.Adopt(member_of(minted(0)), seqno))
        if not isinstance(refusal, State):
            raise machine.refused(refusal)
        return version.state


def _promoted(
    id_: str, name: str, schema: Schema, timeline: str | None, command: CommandRecord
) -> tuple[CollectionRecord, RenditionRecord]:
    """The records of a collection, or of a table on a timeline, whose first rendition is the shard of its name."""
    kind: Kind = "collection" if timeline is None else "table"
    return CollectionRecord(id=id_, name=name, kind=kind, timeline=timeline, command=command.id), RenditionRecord(
        v=OF_PLACES, collection=id_, number=1, shards=1, schema=schema_form(schema),
        hash_columns=tuple(schema.key_names), command=command.id, places=(name,),
        mode="compare_and_append" if timeline is None else "append",
    )  # fmt: skip
