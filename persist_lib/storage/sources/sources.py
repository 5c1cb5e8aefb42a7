"""The sources of a catalog, for callers: what is declared, and how each one is. Running one is `Sources.run`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from persist_lib.arguments import check_type, parse_integer, parse_seconds, parse_text, shown
from persist_lib.errors import InvalidUsage, NameTaken, NotFound, PersistError
from persist_lib.frontier import at
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.storage.asked import MOST_SHARDS, Retention, parse_retention
from persist_lib.storage.names import parse_collection_name, parse_command_id
from persist_lib.storage.records import schema_form
from persist_lib.storage.sources.bindings import Bindings
from persist_lib.storage.sources.commands import asked, hold, names_of, settle, take_away
from persist_lib.storage.sources.declared import Decoding, From, Meaning, check_place
from persist_lib.storage.sources.files import Files
from persist_lib.storage.sources.health import Report
from persist_lib.storage.sources.pipeline import Pipeline
from persist_lib.storage.sources.protocol import Mark
from persist_lib.storage.sources.records import Declared, SourceRecord, State, changed, minted
from persist_lib.storage.sources.running import PASSING, Ingestion, Progress

if TYPE_CHECKING:
    from persist_lib.storage.controller import Controller

DECODERS = {"jsonl": "json", "csv": "csv", "text": "text", "parquet": "rows", "avro": "avro"}
LONGEST_PAUSE_S = 30.0
"""Between attempts at what does not pass."""
Told = Callable[[Progress | PersistError], object]
NEVER: Callable[[], bool] = lambda: False  # noqa: E731 - a constant


class SourceDescription(msgspec.Struct, frozen=True):
    """A source. `collections` are those that it writes, by what they are for. `time` is t: all before it is durable.

    `bound` says up to which address each partition has times, and `durable` up to which it is durable. `instances` are
    the rows of its health collection.
    """

    name: str
    id: str
    state: str
    reader: From
    decoding: Decoding
    meaning: Meaning
    schema: Schema
    collections: Mapping[str, str]
    time: int
    bound: Mapping[str, Mark]
    durable: Mapping[str, Mark]
    instances: Sequence[Mapping[str, object]]


class Sources:
    """The sources of a catalog. Safe to use from one thread at a time.

    sources = client.controller().sources()
    sources.create("orders", Files(place="./in", format="jsonl"), schema, meaning=Meaning(envelope="upsert"))
    sources.run("orders")
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.client = controller.client
        self._declared = Declared(self.client, controller.catalog.shard)

    def create(
        self,
        name: str,
        reader: From,
        schema: Schema,
        *,
        decoding: Decoding | None = None,
        meaning: Meaning | None = None,
        decoded: Schema | None = None,
        shards: int = 1,
        retention: Retention = None,
        command: str | None = None,
        timeout: float | None = None,
    ) -> SourceDescription:
        """Declare a source, and create its collections: `name`, `name/errors`, `name/health`, and `name/raw` if kept.

        `reader` says where messages come from, `decoding` how they become rows, `meaning` what these mean. The schema's
        times are milliseconds ("ms"), also if it does not say so. `decoded` are the columns of messages, if a transform
        makes those of `schema` of them. Raises NameTaken if there is a source or a collection of one of these names
        (with the same `command` it is the same source), InvalidUsage, and NotFound for a place that is not there.
        """
        name = parse_collection_name(name)
        if check_schema(schema).times not in {None, "ms"}:
            raise InvalidUsage(f"the times of a source are in milliseconds: pass times='ms', not {schema.times!r}")
        schema = _in_ms(schema)
        if not isinstance(reader, From):
            raise InvalidUsage(f"reader must be Files(…), Kafka(…) or Custom(…): got {shown(reader)}")
        if decoding is None:
            decoding = Decoding(decoder=DECODERS[reader.format] if isinstance(reader, Files) else "json")  # type: ignore[arg-type]
        check_type(decoding, Decoding, "decoding", 'Decoding(decoder="json")')
        meaning = check_type(meaning or Meaning(), Meaning, "meaning", 'Meaning(envelope="upsert")')
        decoded = None if decoded is None else check_schema(decoded)
        Pipeline(decoding, meaning, schema, decoded)
        if isinstance(reader, Files) and reader.format == "parquet" and meaning.keep_raw:
            raise InvalidUsage("keep_raw keeps bytes, and Parquet's messages are rows: their files are what is raw")
        check_place(reader)
        deadline = self._deadline(timeout)
        id_ = minted(self.client)
        command = id_ if command is None else parse_command_id(command)
        wanted = SourceRecord(
            id=id_, name=name, reader=reader, decoding=decoding, meaning=meaning, schema=schema_form(schema),
            decoded=None if decoded is None else schema_form(decoded),
            shards=parse_integer(shards, "shards", 1, MOST_SHARDS), command=command,
            retention=parse_retention(retention, schema, self.client.runtime.clock_ms),
        )  # fmt: skip

        def decide(sources: dict[str, SourceRecord]) -> SourceRecord | None:
            known = sources.get(name)
            if known is None:
                contents = self.controller.catalog.fetch()
                for one in names_of(wanted).values():
                    if contents.named(one) is not None:
                        raise _taken(one)
                return wanted
            if known.command != command or asked(known) != asked(wanted):
                raise NameTaken(
                    f"there is a source {name!r} already. Nothing was changed; choose another name", source=name
                )
            return None

        self._declared.change(decide, deadline)
        settle(self.controller, self._declared, self._declared.find(name), deadline)
        return self.show(name)

    def list(self) -> list[str]:
        """The names of all sources, sorted."""
        return sorted(name for name, record in self._declared.fetch().items() if record.state != "dropping")

    def show(self, name: str) -> SourceDescription:
        """What a source is, and how far it has come. Raises NotFound."""
        record = self.find(name)
        contents = self.controller.catalog.fetch()
        names = {role: contents.collections[id_].name for role, id_ in record.collections.items()}
        described = [self.controller.describe(one) for one in names.values()]
        time = min(one.upper.time or 0 for one in described)
        bindings = Bindings(self.client, record.bindings)
        try:
            bound = bindings.since(time)
        finally:
            bindings.close()
        health = contents.collections[record.health].name
        with self.controller.open_reader(health, owner="show a source") as read:
            with_rows = at(0) < read.fetch_upper()
            instances = read.snapshot().to_pylist() if with_rows else []
        return SourceDescription(
            record.name, record.id, record.state, record.reader, record.decoding, record.meaning, record.columns,
            {**names, "health": health}, time, bound.marks, bound.start, instances,
        )  # fmt: skip

    def pause(self, name: str, *, why: str = "", timeout: float | None = None) -> None:
        """Let all instances stand still after the step that they are at, wherever they run. Raises NotFound."""
        self._set(name, "paused", parse_text(why, "why", 1000), timeout)

    def resume(self, name: str, *, timeout: float | None = None) -> None:
        """Let instances go on; a hold of the source that somebody released is set again. Raises NotFound."""
        self._set(name, "running", "", timeout)
        hold(self.controller, self.find(name))

    def drop(self, name: str, *, timeout: float | None = None) -> None:
        """Take a source away with all of its collections. Instances end; what reads the collections may finish.

        A call that is cut off is finished by the next one. Raises NotFound.
        """
        self._end(name, timeout, again=False)

    def reset(self, name: str, *, timeout: float | None = None) -> SourceDescription:
        """Begin a source anew, from what its reader has now: drop it with its collections, and create it again.

        What the collections had is gone. For what Gone and Diverged leave no other way. Raises NotFound.
        """
        self._end(name, timeout, again=True)
        return self.show(name)

    def open(self, name: str, *, owner: str = "") -> Ingestion:
        """Open an instance of a source, to go on step by step. Raises NotFound."""
        record = self.find(name)
        return Ingestion(self.controller, record, record.bindings, owner or f"source {name}"[:100])

    def run(
        self,
        name: str,
        *,
        stop: Callable[[], bool] = NEVER,
        told: Told | None = None,
        interval_s: float = 1.0,
        until_idle: bool = False,
    ) -> Progress | None:
        """Run an instance until `stop` says so, or with `until_idle` until nothing new is there. Answers the last step.

        Looks for new messages every `interval_s` seconds. `told` hears of each step and of each failure that may pass,
        after which the instance starts again by itself. Raises what stays so: Gone, Diverged, and Refused for too many
        bad messages; HoldConflict and NotFound when the source was dropped.
        """
        interval_s = parse_seconds(interval_s, "interval_s")
        record = self.find(name)
        instance = f"{platform.node()}-{self.client.runtime.token().hex()[:8]}"
        report, ingestion = Report(self.controller, record.health, instance), self.open(name, owner=instance)
        try:
            return _run(self, name, ingestion, report, stop, told, interval_s, until_idle=until_idle)
        except Exception as error:
            report.say("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            report.close()
            ingestion.close()

    def close(self) -> None:
        """Close what this has open; the controller stays open. Idempotent."""
        self._declared.close()

    def find(self, name: str) -> SourceRecord:
        """What is declared of a source; one that is being created is finished first. Raises NotFound."""
        record = self._declared.find(parse_collection_name(name))
        if record.state == "making":
            if self.client.read_only:
                raise NotFound(f"the source {name!r} is being created. Look again", source=name)
            settle(self.controller, self._declared, record, self._deadline(None))
            record = self._declared.find(name)
        if record.state == "dropping":
            raise NotFound(f"the source {name!r} is being dropped. Drop or reset it again to finish that", source=name)
        return record

    def _set(self, name: str, state: State, why: str, timeout: float | None) -> None:
        self.find(name)

        def decide(sources: dict[str, SourceRecord]) -> SourceRecord:
            if name not in sources or sources[name].state == "dropping":
                raise NotFound(f"the source {name!r} was dropped meanwhile", source=name)
            return changed(sources[name], state=state, why=why)

        self._declared.change(decide, self._deadline(timeout))

    def _end(self, name: str, timeout: float | None, *, again: bool) -> None:
        deadline = self._deadline(timeout)
        self._declared.find(name)

        def decide(sources: dict[str, SourceRecord]) -> SourceRecord:
            if name not in sources:
                raise NotFound(f"the source {name!r} was dropped meanwhile", source=name)
            return changed(sources[name], state="dropping", again=again)

        self._declared.change(decide, deadline)
        take_away(self.controller, self._declared, self._declared.find(name), deadline)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.client.runtime.deadline(self.client.config.timeout_s if timeout is None else parse_seconds(timeout))


def _in_ms(schema: Schema) -> Schema:
    models = schema.models
    schema = msgspec.structs.replace(schema, times="ms")
    schema.__dict__["models"] = models
    return schema


def _taken(name: str) -> NameTaken:
    return NameTaken(
        f"there is a collection {name!r} already, and the source would make one. Nothing was changed; choose another "
        "name",
        collection=name,
    )


def _run(
    sources: Sources, name: str, ingestion: Ingestion, report: Report, stop: Callable[[], bool], told: Told | None,
    interval_s: float, *, until_idle: bool,
) -> Progress | None:  # fmt: skip
    runtime, failures = sources.client.runtime, 0
    last: Progress | None = None
    while not stop():
        try:
            if (record := sources.find(name)).state == "paused":
                report.say("paused", record.why)
                if until_idle:
                    return last
                runtime.sleep(interval_s)
                continue
            last, failures = ingestion.step(), 0
        except PASSING as error:
            failures += 1
            report.say("stalled", f"{type(error).__name__}: {error.message}")
            if told is not None:
                told(error)
            runtime.sleep(min(LONGEST_PAUSE_S, interval_s * 2 ** min(failures, 10)) * runtime.random.uniform(0.5, 1.0))
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
