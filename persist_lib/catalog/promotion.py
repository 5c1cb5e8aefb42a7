"""Promoting in place, while a table is read and written: a shard becomes the first rendition of a collection, and
either of them joins a timeline.

The catalog says what is intended, and a rendition shard is made. Then one transaction of both shards decides
(`core.members`): until then the shard stands by itself, and after it only the catalog is left to say so. A process that
is killed in between leaves a pending command, which any other one finishes, or refuses for ever. For a collection that
joins a timeline, one transaction of all of its shards and the WAL decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persist_lib.arguments import did_you_mean, parse_flag, shown
from persist_lib.catalog.catalog import Changes, Contents, has_shard, setting
from persist_lib.catalog.collection_arguments import check_uncounted
from persist_lib.catalog.collection_status import describe, timeline_of
from persist_lib.catalog.creation import Making
from persist_lib.catalog.describe import Description
from persist_lib.catalog.effects import settle
from persist_lib.catalog.metadata_shard import states_of
from persist_lib.catalog.records import (
    OF_PLACES,
    CollectionRecord,
    CommandRecord,
    Kind,
    RenditionRecord,
    TimelineRecord,
    member_of,
    minted,
    parse_collection_name,
    schema_form,
)
from persist_lib.catalog.renditions import Span, is_copied, meet
from persist_lib.catalog.wal import minted_timeline
from persist_lib.core import commands as c
from persist_lib.core.formats import MEMBERS
from persist_lib.core.state import State
from persist_lib.core.transitions import apply
from persist_lib.errors import InvalidUsage, NameTaken, NotFound
from persist_lib.frontier import at
from persist_lib.ids import CATALOG, SeqNo
from persist_lib.location.api import KnowsClients
from persist_lib.schema.schema import Schema

AHEAD_MS = 1_000
"""How far a shard that joins a timeline may be ahead of the store's clock, in milliseconds."""


class Promoting(Making):
    """The call that raises what carries a table."""

    def promote(
        self, name: str, *, timeline: str | None = None, make_timeline: bool = False, losing: Sequence[str] = (),
        dry_run: bool = False, command: str | None = None, timeout: float | None = None,
    ) -> Description | None:  # fmt: skip
        """Make a shard the first rendition of a collection of its name, in place: no data is copied, and none moves.

        Its history, holds, producers and retention are the collection's from then on, which is written in the mode
        "compare_and_append". A `client.table` that is open continues, in any process of this release; other handles of
        the shard are refused with MemberOf. There is no way back. The shard needs format 5 (`client.upgrade`), and from
        then on programs of the release before cannot read this catalog. A second call answers what the first one did.

        With a `timeline` it joins that as a table: it is changed in transactions with others, at times that these mint.
        So does what is a collection already, all shards of which need format 5 then. The timeline has a WAL, and is
        made where it is not there and `make_timeline` says so. The table's times are milliseconds, and not ahead of the
        store's clock, as all tables of the timeline would be then.

        Through a shard server, clients whose rights do not reach the shards that the table has then would lose access:
        it is refused and names them, unless they are all in `losing`. It needs the right `maintain` there, and those on
        the catalog.

        With `dry_run` nothing is changed and None is answered, or what would be raised is raised.

        Raises InvalidUsage where it cannot be, also for a format before 5, OfLayer for a shard that is a layer's,
        NameTaken for a name that the catalog has, and NotFound, also for a timeline that is not there.
        """
        name, dry_run = parse_collection_name(name), parse_flag(dry_run, "dry_run")
        timeline = parse_timeline(timeline, make_timeline)
        if not dry_run:
            self._writable("promote")
        losing = parse_losing(losing)
        contents = self.catalog.fetch()
        found = contents.named(name)
        if found is not None and not dry_run:
            for pending in contents.pending(found.id):
                settle(self.catalog, pending, self._deadline(timeout))
            contents = self.catalog.fetch()
            found = contents.named(name)
        is_done = timeline is None and found is not None and bool(contents.renditions_of(found.id)[0].places)
        if found is not None and (found.kind == "table" or is_done):
            return describe(self.client, contents, self._on(contents, found, timeline))
        if timeline is not None:
            self._line(contents, name, timeline, make=make_timeline)
        self._check_access(name, timeline, losing)
        if timeline is not None and found is not None:
            if has_shard(self.client, name):
                raise self._beside(name)
            self._check_collection(contents, found)
            return None if dry_run else self._join(found, timeline, make_timeline, command, timeout)
        state = self._check_promotion(name)
        if found is not None:
            raise self._beside(name)
        if timeline is not None:
            self._check_times(name, [state])
        return None if dry_run else self._promote(name, state, timeline, make_timeline, command, timeout)

    def _promote(
        self, name: str, state: State, timeline: str | None, make: bool, command: str | None, timeout: float | None
    ) -> Description:  # fmt: skip
        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(name) is not None:
                raise NameTaken(f"there is a collection {name!r} by now. Nothing was changed", collection=name)
            lines = [] if timeline is None else [self._line(contents, name, timeline, make=make)]
            on = lines[0].id if lines else None
            collection, first = _promoted(minted(self.client.runtime.entropy()), name, state.schemas[-1], on, record)
            record = msgspec.structs.replace(record, collection=collection.id, pending=True)
            return setting(collection, first, *lines), record

        asked = {"name": name} if timeline is None else {"name": name, "line": timeline}
        record = self._command("promote", None, asked, intent, command, timeout)
        _check_done(record, name)
        self._tended(timeout, record.collection)  # without a reader by the shard's name, nothing is kept for one
        return self._described(record)

    def _join(
        self, found: CollectionRecord, timeline: str, make: bool, command: str | None, timeout: float | None
    ) -> Description:

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            current = contents.collections[found.id]
            if current.kind == "table":  # by another call
                self._on(contents, current, timeline)
                return {}, record
            span, line = self._check_collection(contents, current), self._line(contents, name, timeline, make=make)
            asked = {**record.asked, "timeline": line.id, "rendition": span.rendition.number, "start": span.start}
            return setting(line), msgspec.structs.replace(record, asked=asked, pending=True, v=OF_PLACES)

        asked = {"name": (name := found.name), "line": timeline}
        record = self._command("join", found.id, asked, intent, command, timeout)
        _check_done(record, found.name)
        return self._described(record)

    @staticmethod
    def _beside(name: str) -> NameTaken:
        return NameTaken(
            f"there is a collection {name!r} beside the shard of that name, so that it is not clear which of both is "
            "meant. Nothing was changed; rename the collection first",
            collection=name, shard=name,
        )  # fmt: skip

    def _line(self, contents: Contents, name: str, timeline: str, *, make: bool) -> TimelineRecord:
        """The timeline with a WAL that a table joins; with `make` as it will be, where it is not there.

        It is set by the change of the catalog that says that the table joins it, so that none is there without one.
        """
        lines = {one.name: one for one in contents.timelines.values()}
        found = lines.get(timeline)
        if found is None and not make:
            raise NotFound(
                f"there is no timeline {timeline!r} that table {name!r} could join. {did_you_mean(timeline, lines)}"
                "Nothing was changed. To make it, with a WAL, pass make_timeline=True, or at a shell --make-timeline",
                table=name, timeline=timeline,
            )  # fmt: skip
        if found is not None and found.mode != "wal":
            raise InvalidUsage(
                f"table {name!r} cannot join the timeline {timeline!r}, which has no WAL, so that no transaction "
                "covers several of its tables. Nothing was changed; name another one",
                table=name, timeline=timeline,
            )  # fmt: skip
        id_ = minted_timeline(self.client.runtime.entropy(), "wal")
        return found or TimelineRecord(id=id_, name=timeline, mode="wal")

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

    def _check_access(self, name: str, timeline: str | None, losing: Sequence[str]) -> None:
        """Raise if clients of the shard server, if there is one, would lose access that are not in `losing`."""
        consensus = self.client.consensus
        found = consensus.losing(name, timeline) if isinstance(consensus, KnowsClients) else []
        if left := [one for one in found if one not in losing]:
            raise InvalidUsage(
                f"promoting table {name!r} would take access from clients of the shard server, whose rights are by "
                f"names of shards: {', '.join(left)}. Nothing was changed. Give them rights by the table's name in its "
                f'token file, as in tables = {{ "{name}" = ["read"] }}; or, if they are to lose it, pass '
                f"losing={left}, or at a shell --losing {left[0]}",
                table=name, clients=left,
            )  # fmt: skip

    def _check_times(self, name: str, states: Sequence[State]) -> None:
        """Raise unless the times of shards can be those of a timeline."""
        schema, now = states[0].schemas[-1], self.client.consensus.now()
        if schema.times != "ms":
            raise InvalidUsage(
                f"table {name!r} has {'plain integers' if schema.times is None else schema.times} as times, and those "
                "of a timeline are milliseconds. Nothing was changed",
                table=name,
            )
        upper = max(state.upper for state in states)
        if (upper.time or 0) > now + AHEAD_MS:
            raise InvalidUsage(
                f"table {name!r} has come to {schema.show(upper)}, which is ahead of the store's clock "
                f"({schema.show(at(now))}): all tables of the timeline would be there, too. Nothing was changed; try "
                "again when the clock has come there",
                table=name,
            )

    def _check_collection(self, contents: Contents, found: CollectionRecord) -> Span:
        """What is written of a collection that can join a timeline now. Raises what refuses it."""
        renditions = contents.renditions_of(found.id)
        self._check_store(found.name)
        timeline = timeline_of(self.client, found, renditions[0])
        span, begun = timeline.last, {one.rendition.number for one in timeline.spans}
        names = [name for one in renditions for name in one.names]
        states = dict(zip(names, states_of(self.client, names), strict=True))
        written = [states[name] for name in span.rendition.names]
        waiting = [one.number for one in renditions if not one.begun and one.number not in begun]
        modes = {one.mode for one in renditions if one.number == span.rendition.number}
        old = [name for name, state in states.items() if state.format < MEMBERS and not state.is_finished()]
        complete = (one.end is None or at(one.end) <= meet(self.client, one.rendition.names) for one in timeline.spans)
        reason = ""
        if waiting:
            reason = f"its rendition {waiting[0]} was not handed over to yet: do that, or drop it, first"
        elif not (all(complete) and is_copied(self.client, span.rendition, span.start)):
            reason = "its last handover is not complete yet: repeat that with advance=True first"
        elif len(written) > 1 and "append" in modes:
            # Definite appends reach the shards one by one, and the rest of one could never come after this.
            reason = 'it has several shards and the mode "append", so that a write may have come to some of them only'
        elif old:
            reason = f"its shards need format {MEMBERS}: run `persist shard upgrade {' '.join(old)}` first"
        elif any(state.upper.is_top() for state in written):
            reason = "it is closed for writing, for ever"
        if reason:
            raise InvalidUsage(
                f"table {found.name!r} cannot join a timeline now: {reason}. Nothing was changed", table=found.name
            )
        self._check_times(found.name, written)
        return span

    def _check_store(self, name: str) -> None:
        """Raise unless this catalog and this store can promote tables."""
        if self.catalog.shard != CATALOG:
            raise InvalidUsage(
                f"only the usual catalog takes a table in place, as its name is looked up there, and this is "
                f"{self.catalog.shard!r}. Nothing was changed",
                table=name,
            )
        if not self.client.read_only:
            self.client.consensus.compare_and_set_many({})  # raises InvalidUsage where there are no transactions

    def _check_promotion(self, name: str) -> State:
        """The state of a shard that can become a member now. Raises what refuses it."""
        machine = self.client.machine(name)
        version = machine.fetch()
        if version.state.is_finished():
            raise NotFound(f"there is no table {name!r} in this location any more: it was dropped", table=name)
        self._check_store(name)
        if version.state.upper.is_top():
            raise InvalidUsage(
                f"table {name!r} is closed for writing, for ever, so nothing could be added to a collection of it. "
                "Nothing was changed; it stays readable as it is",
                table=name,
            )
        check_uncounted(version.state.schemas[-1])
        seqno = SeqNo(version.seqno + 1)
        refusal = apply(version.state, seqno, c.Adopt(member_of(minted(0)), seqno))
        if not isinstance(refusal, State):
            raise machine.refused(refusal)
        return version.state


def parse_timeline(timeline: object, make: object) -> str | None:
    """The name of the timeline that a table is to join; `make` says whether it is to be made."""
    if timeline is None and parse_flag(make, "make_timeline"):
        raise InvalidUsage("make_timeline goes with the name of the timeline that is to be made: timeline=")
    return None if timeline is None else parse_collection_name(timeline)


def parse_losing(losing: object) -> Sequence[str]:
    """The names of clients of a shard server that may lose access."""
    if not (isinstance(losing, (list, tuple)) and all(isinstance(one, str) for one in losing)):
        raise InvalidUsage(f"losing must be names of clients of the shard server: got {shown(losing)}")
    return losing


def _check_done(record: CommandRecord, name: str) -> None:
    if record.refused:
        raise InvalidUsage(f"table {name!r} was not promoted: {record.refused}. It is as it was", table=name)


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
