"""The sources of a catalog, for callers: what is declared, and how each one is. Running one is `Sources.run`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from persist_lib.arguments import parse_seconds, parse_text
from persist_lib.catalog.describe import Description
from persist_lib.catalog.records import parse_collection_name, parse_command_id
from persist_lib.errors import NameTaken, NotFound, PersistError
from persist_lib.runtime.ambient import Backoff, Deadline
from persist_lib.schema.schema import Schema
from persist_lib.sources import reprocess
from persist_lib.sources.bindings import bound_from
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.growth import Growth, grow
from persist_lib.sources.health import Report, SourceDescription, fetch_rows, left_of, shown_rows, unread_of
from persist_lib.sources.joining import add_table
from persist_lib.sources.kinds import Declared, check_terms, complete, fresh, hold, names_of, settle, take_away, taken
from persist_lib.sources.loading import Loading, Loads
from persist_lib.sources.records import Declaration, Kind, SourceRecord, Terms, changed, declaration_of, minted
from persist_lib.sources.reprocess import Mended
from persist_lib.sources.running import PASSING, Ingestion, Progress

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller

LONGEST_PAUSE_S = 30.0
"""Between attempts at what does not pass."""
Told = Callable[[Progress | PersistError], object]
NEVER: Callable[[], bool] = lambda: False  # noqa: E731 - a constant


class Sources:
    """The sources of a catalog. Safe to use from one thread at a time.

    sources = client.sources()
    sources.create("orders", Files(place="./in", format="jsonl"), schema, meaning=Meaning(envelope="upsert"))
    sources.run("orders")
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.client = controller.client
        self.declared = Declared(self.client, controller.catalog.shard)

    def create(
        self,
        name: str,
        reader: Kind,
        schema: Schema | None = None,
        *,
        command: str | None = None,
        timeout: float | None = None,
        **terms: Unpack[Terms],
    ) -> SourceDescription:
        """Declare a source, and create its collections: `name`, `name/errors`, `name/health`, and `name/raw` if kept.

        Of several tables of PostgreSQL each has a collection, `name/SCHEMA.TABLE`, instead of `name`; `tables` may say
        the schemas of some, as `schema` does of one. Where it says those of topics of Kafka, each has a collection,
        `name/TOPIC`.

        `reader` says where messages come from, `decoding` how they become rows, `meaning` what these mean. The schema's
        times are milliseconds ("ms"), also if it does not say so; without one, a table of PostgreSQL brings its own.
        `decoded` are the columns of messages, if a transform makes those of `schema` of them. Raises NameTaken if there
        is a source or a collection of one of these names (with the same `command` it is the same source), InvalidUsage,
        and NotFound for a place that is not there.
        """
        wanted, deadline = self._wanted(name, reader, schema, command, terms), self._deadline(timeout)
        self.declared.change(lambda sources: self._new(wanted, sources), deadline)
        settle(self.controller, self.declared, self.declared.find(wanted.name), deadline)
        return self.show(wanted.name)

    def declaration(
        self, name: str, reader: Kind, schema: Schema | None = None, *, command: str | None = None,
        **terms: Unpack[Terms],
    ) -> Declaration:  # fmt: skip
        """What `create` would declare. Raises what that would raise before it makes anything; changes nothing."""
        wanted = self._wanted(name, reader, schema, command, terms)
        self._new(wanted, self.declared.fetch())
        return wanted

    def _wanted(
        self, name: str, reader: Kind, schema: Schema | None, command: str | None, terms: Terms
    ) -> SourceRecord:  # fmt: skip
        name = parse_collection_name(name)
        given, input_ = complete(self.controller, name, reader, schema, terms)
        id_ = minted(self.client)
        command = id_ if command is None else parse_command_id(command)
        return SourceRecord(id=id_, name=name, command=command, input=input_, **declaration_of(given))

    def _new(self, wanted: SourceRecord, sources: dict[str, SourceRecord]) -> dict[str, SourceRecord]:
        """What is to be set: nothing if it is there already. Raises NameTaken."""
        name, known = wanted.name, sources.get(wanted.name)
        if known is None:
            contents = self.controller.catalog.fetch()
            for one in names_of(wanted).values():
                if contents.named(one) is not None:
                    raise taken(one)
            return {name: wanted}
        if known.command != wanted.command or fresh(known) != fresh(wanted):
            why = known.reader.unlike(wanted.reader)
            raise NameTaken(
                f"there is a source {name!r} already. Nothing was changed{why or '; choose another name'}", source=name
            )
        return {}

    def list(self) -> list[str]:
        """The names of all sources, sorted."""
        return sorted(name for name, record in self.declared.fetch().items() if record.state != "dropping")

    def show(self, name: str) -> SourceDescription:
        """What a source is, and how far it has come. Raises NotFound."""
        record = self.find(name)
        contents = self.controller.catalog.fetch()
        names = {role: contents.collections[id_].name for role, id_ in record.collections.items()}
        described: list[Description] = []

        def durable() -> int:
            described[:] = (self.controller.describe(one) for one in names.values())
            return record.least({role: one.upper.time or 0 for role, one in zip(names, described, strict=True)})

        with closing(record.reader.clock(self.controller, record, "show a source", is_leased=False)) as clock:
            time, bound = bound_from(clock, durable)
            behind_ms = clock.behind_ms(time)
        health = contents.collections[record.health].name
        rows, now = fetch_rows(self.controller, record.health), self.client.consensus.now()
        bad = next(one for one in described if one.id == record.collections["errors"]).active.shards
        counted = (batch.diff_sum for shard in bad for batch in self.client.machine(shard).state.trace)
        return SourceDescription(
            **declaration_of(record), name=record.name, id=record.id, state=record.state, why=record.why,
            collections={**names, "health": health}, time=time, bound=bound.marks, durable=bound.start,
            instances=shown_rows(rows, now), behind_ms=behind_ms, errors=sum(counted), left=left_of(rows, now),
            unread=unread_of(rows, now),
        )  # fmt: skip

    def add_table(
        self, name: str, table: str, schema: Schema | None = None, *, timeout: float | None = None
    ) -> SourceDescription:  # fmt: skip
        """Let a source of several tables of PostgreSQL read one more, whose output is `name/SCHEMA.TABLE`.

        The next instance that looks copies it; from then on all outputs show the database as of one moment. Its output
        cannot be read as of times before. While it is copied nothing else is bound. `schema` is for other columns than
        the table's. The same call again changes nothing, and finishes one that was cut off.

        Raises NotFound for a source or a table that is not there, NameTaken if the output's name is taken or the table
        is there with other columns, InvalidUsage for what cannot be followed, and Determinate before the source has
        used its own first snapshot.
        """
        record = self.find(name)
        add_table(
            self.controller, self.declared, record, parse_text(table, "table", 4096), schema, self._deadline(timeout)
        )
        return self.show(name)

    def pause(self, name: str, *, why: str = "", timeout: float | None = None) -> None:
        """Let all instances stand still after the step that they are at, wherever they run. Raises NotFound."""
        why = parse_text(why, "why", 1000)
        self._mark(self.find(name), self._deadline(timeout), state="paused", why=why)

    def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let instances continue; a hold of the source that was released is set again. Raises NotFound."""
        self._mark(self.find(name), self._deadline(timeout), state="running", why="")
        hold(self.controller, self.find(name))

    def drop(self, name: str, *, timeout: float | None = None) -> Sequence[str]:
        """Take a source away with all of its collections. Instances end; what reads the collections may finish.

        Of PostgreSQL also the slot, and the publication that the source made. Answers what could not be taken away
        there, with what to do; it is forgotten here. A call that is cut off is finished by the next one. Raises
        NotFound.
        """
        return self._end(name, timeout, again=False)

    def reset(self, name: str, *, timeout: float | None = None) -> SourceDescription:
        """Begin a source again, from what its reader has now: drop it with its collections, and create it again.

        What the collections had is gone. For what Gone and Diverged leave no other way. Raises NotFound.
        """
        self._end(name, timeout, again=True)
        return self.show(name)

    def mend(
        self,
        name: str,
        *,
        decoding: Decoding | None = None,
        meaning: Meaning | None = None,
        schema: Schema | None = None,
        decoded: Schema | None = None,
        timeout: float | None = None,
    ) -> Mended:
        """Decode a source's messages in another way, beside the present one, from `NAME/raw`; and say what differs.

        What is not given stays as it is. The first call makes renditions of the output and of the errors; a later one
        continues with them, and needs no arguments. They are not read until `hand_over`, and instances run on. Raises
        NotFound; InvalidUsage for a source without keep_raw, or while something else is tried; and TimedOut, after
        which the same call continues.
        """
        deadline, record = self._deadline(timeout), self.find(name)
        decoding, meaning = check_terms(decoding, meaning)
        record = reprocess.declare(self, record, decoding, meaning, schema, decoded, deadline)
        with closing(reprocess.Mending(self.controller, record, f"mend {name}"[:100])) as filling:
            time = reprocess.fill(filling, deadline)
        return reprocess.judged(self.controller, record, time, deadline)

    def hand_over(self, name: str, *, timeout: float | None = None) -> int:
        """Make what `mend` decoded the collections, and decode so from now on; return the time at which that begins.

        Reads as of earlier times give what they gave. Instances continue by themselves. Once it is decided it is
        finished: a call that was cut off by the next one, or by an instance. Raises NotFound where nothing is being
        mended, and HandoverRefused or TimedOut when the new renditions did not get as far as the present ones.
        """
        deadline, record = self._deadline(timeout), self.declared.find(parse_collection_name(name))
        with closing(reprocess.Mending(self.controller, record, f"mend {name}"[:100])) as filling:
            reprocess.fill(filling, deadline)
        return reprocess.finish(self, reprocess.decide(self, record, deadline), deadline)

    def give_up(self, name: str, *, timeout: float | None = None) -> None:
        """Drop what `mend` decoded. Raises NotFound where nothing is being mended, HandoverRefused once decided."""
        reprocess.give_up(self, self.find(name), self._deadline(timeout))

    def open(self, name: str, *, owner: str = "", loads: Loads | None = None) -> Ingestion:
        """Open an instance of a source, to run step by step; with `loads`, one that loads much at once.

        Raises NotFound, and InvalidUsage for a source that cannot be loaded so.
        """
        record, owner = self._learned(self.find(name)), owner or f"source {name}"[:100]
        if loads is None:
            return Ingestion(self.controller, record, owner, grows=self._grown)
        return Loading(self.controller, record, owner, loads)

    def run(
        self,
        name: str,
        *,
        stop: Callable[[], bool] = NEVER,
        told: Told | None = None,
        interval_s: float = 1.0,
        until_idle: bool = False,
        loads: Loads | None = None,
    ) -> Progress | None:
        """Run an instance until `stop` says so, or with `until_idle` until nothing new is there. Answers the last step.

        Looks for new messages every `interval_s` seconds. `told` hears of each step and of each failure that may pass,
        after which the instance starts again by itself. `loads` is as in `open`. Raises what stays so: Gone, Diverged,
        and Refused for too many bad messages; HoldConflict and NotFound when the source was dropped.
        """
        interval_s = parse_seconds(interval_s, "interval_s")
        record = self.find(name)
        instance = f"{platform.node()}-{self.client.runtime.token().hex()[:8]}"
        report = Report(self.controller, record.health, instance, record.schema.times)
        ingestion = self.open(name, owner=instance, loads=loads)
        try:
            return _run(self, name, ingestion, report, stop, told, interval_s, until_idle=until_idle)
        except Exception as error:
            report.say("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            report.close()
            ingestion.close()

    def close(self) -> None:
        self.declared.close()

    def find(self, name: str) -> SourceRecord:
        """What is declared of a source; one that is being created is finished first. Raises NotFound."""
        record = self.declared.find(parse_collection_name(name))
        if record.state == "making":
            if self.client.read_only:
                raise NotFound(f"the source {name!r} is being created. Look again", source=name)
            settle(self.controller, self.declared, record, self._deadline(None))
            record = self.declared.find(name)
        if record.mending is not None and record.mending.decided and not self.client.read_only:
            with suppress(PersistError):  # else the next one does
                reprocess.finish(self, record, self._deadline(None))
                record = self.declared.find(record.name)
        if record.state == "dropping":
            raise NotFound(f"the source {name!r} is being dropped. Drop or reset it again to finish that", source=name)
        return record

    def _grown(self, record: SourceRecord, growth: Growth | None, deadline: Deadline) -> SourceRecord:
        if growth is not None:
            grow(self.controller, self.declared, record, growth, deadline)
        return self.declared.find(record.name)

    def _learned(self, record: SourceRecord) -> SourceRecord:
        """The record with what is known of its table: a source of an earlier release has noted nothing so far."""
        if record.table is not None or record.tables or self.client.read_only:
            return record
        look = record.reader.look
        with suppress(PersistError):  # the reader tells what is wrong
            if found := {
                name: msgspec.structs.replace(one, keyless=False, by_index=False) for name, one in look(record).items()
            }:
                self.declared.update(
                    record, lambda now: now if now.table is not None else now.with_known(found), self._deadline(None)
                )
                return self.declared.find(record.name)
        return record

    def _end(self, name: str, timeout: float | None, *, again: bool) -> Sequence[str]:
        deadline = self._deadline(timeout)
        record = self.declared.find(name)
        if again:
            record.reader.input(self.controller)  # raises NotFound
        self._mark(record, deadline, state="dropping", again=again)
        return take_away(self.controller, self.declared, self.declared.find(name), deadline)

    def _mark(self, record: SourceRecord, deadline: Deadline, **fields: Any) -> None:
        """Set fields of a source. One that is being dropped can only be dropped, or reset, again."""
        gone = f"the source {record.name!r} was dropped in between"

        def marked(now: SourceRecord) -> SourceRecord:
            if now.state == "dropping" and fields["state"] != "dropping":
                raise NotFound(gone, source=record.name)
            return changed(now, **fields)

        self.declared.update(record, marked, deadline, gone=gone)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.client.runtime.deadline(self.client.config.timeout_s if timeout is None else parse_seconds(timeout))


def _run(
    sources: Sources, name: str, ingestion: Ingestion, report: Report, stop: Callable[[], bool], told: Told | None,
    interval_s: float, *, until_idle: bool,
) -> Progress | None:  # fmt: skip
    runtime, backoff = sources.client.runtime, Backoff(2 * interval_s, LONGEST_PAUSE_S)
    last: Progress | None = None
    while not stop():
        try:
            record = sources.find(name)
            if (record.mended, record.joined) != (ingestion.record.mended, ingestion.record.joined):
                ingestion.adopt(record)
            if record.state == "paused":
                report.say("paused", record.why)
                if until_idle:
                    return last
                runtime.sleep(interval_s)
                continue
            last = ingestion.step()
            backoff.reset()
        except PASSING as error:
            report.say("stalled", f"{type(error).__name__}: {error.message}")
            if told is not None:
                told(error)
            runtime.sleep(backoff.take() * runtime.random.uniform(0.5, 1.0))
            continue
        report.progress(last)
        if told is not None:
            told(last)
        if last.is_idle:
            if until_idle:
                break
            runtime.sleep(interval_s)
    report.say("stopped", "", last)
    return last
