"""Rows of tables, whatever carries them, as the type that a consumer's annotation asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_args, get_origin

import pandas as pd
import pyarrow as pa

from orchestration.io.names import Place, check_owner
from orchestration.io.times import AS_OF
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, NotFound, SchemaMismatch, SinceViolation
from persist_lib.frontier import Antichain, at
from persist_lib.schema.empty import empty_table
from persist_lib.schema.models import Model, is_model, rebuild
from persist_lib.schema.schema import Schema
from persist_lib.table.opening import find_record
from persist_lib.times import PER_SECOND, Times

WINDOW = "persist/window"
"""The metadata of an input that has what happened in the window of the run's partition, of a table without any."""
MISSING = "allow_missing_partitions"
SMALL_BYTES = 4 << 20
"""The parts of shards that are read ahead, a few at a time, where there are several."""
NAMED = 20
"""How many partitions a message names."""
LOADS = (
    "pa.Table, pa.RecordBatchReader (in bounded memory), pd.DataFrame, pl.DataFrame, pl.LazyFrame, list, list[dict], a "
    "list of a pydantic model, or duckdb.DuckDBPyRelation"
)
Batches = Iterator[pa.Table]
Build = Callable[[pa.Schema, Batches], Any]


class Found(NamedTuple):
    """How far a table has come. `seqno` is that of a shard; None where the catalog has the table."""

    since: Antichain
    upper: Antichain
    schema: Schema
    seqno: int | None


class Source(NamedTuple):
    """A table to read from, at which time, and the seqno (of a shard) and schema that it had when that was decided.

    `is_earlier`: there are newer complete times.
    """

    place: Place
    as_of: int
    seqno: int | None
    schema: Schema
    is_earlier: bool = False


def find(
    client: Client, places: Sequence[Place], as_of_of: Callable[[Place], object], clock_ms: Callable[[], int]
) -> tuple[list[Source], list[Place]]:
    """The tables to read, and the places in which nothing is stored. Reads no data.

    `as_of_of` answers the time as it was written (None: the newest), and `clock_ms` by what relative texts are meant.
    Raises SinceViolation for a time whose history was given up, and NotComplete for one that may still change.
    """
    there = {place.table for place in places}
    if len(places) > 1:
        with client.controller() as controller:
            there = {*client.shards(), *controller.list()}
    with client.runtime.pool(client.config.read_threads, "persist-find") as pool:
        looked = pool.map(partial(_look, client), [place for place in places if place.table in there])
        versions = {place: version for place, version in looked if version is not None}
    found = [
        _source(client, place, versions[place], as_of_of(place), clock_ms) for place in places if place in versions
    ]
    return found, [place for place in places if place not in versions]


def read(client: Client, sources: Sequence[Source], build: Build) -> Any:
    """The contents of all of them, one after the other, as `build` makes them."""
    schema = _common(sources)
    return build(schema.data, _one_after_the_other(client, sources, schema))


def changes(client: Client, place: Place, start_s: float, end_s: float, build: Build) -> tuple[Source, Any]:
    """What happened to a table in a window of its clock, as updates with `_time` and `_diff`.

    Raises InvalidUsage where its times are plain integers, and NotComplete where more may still come in the window.
    """
    check_owner(client, place)
    with client.table(place.table) as on:
        schema = on.schema
        if schema.times is None:
            raise InvalidUsage(
                f"{WINDOW} reads what happened in a window of time, and the times of table {place.table!r} are plain "
                "integers. Create the table with times=ms",
                table=place.table,
            )
        start, end = (round(second * PER_SECOND[schema.times]) for second in (start_s, end_s))
        table = on.changes(start - 1, end - 1, timeout=0).to_arrow()
        return Source(place, end - 1, None, schema), build(table.schema, iter([table]))


def builder(wanted: Any) -> Build:
    """How to make a value of the annotated type. Raises InvalidUsage, naming those that can be had, for another."""
    if wanted in (None, Any, object, pa.Table):
        return _table
    if wanted is pa.RecordBatchReader:
        return _reader
    if wanted is pd.DataFrame:
        return lambda schema, batches: _table(schema, batches).to_pandas()
    if getattr(wanted, "__module__", "").startswith("polars"):
        return _polars(wanted)
    if getattr(wanted, "__name__", "") == "DuckDBPyRelation":
        import duckdb  # noqa: PLC0415 - an optional dependency, which the annotation has loaded

        return lambda schema, batches: duckdb.connect().from_arrow(_table(schema, batches))
    arguments = get_args(wanted)
    if wanted is list or (get_origin(wanted) is list and _is_rows(arguments)):
        return lambda schema, batches: _table(schema, batches).to_pylist()
    if get_origin(wanted) is list and len(arguments) == 1 and is_model(arguments[0]):
        return _models(arguments[0])
    raise InvalidUsage(f"an input can be loaded as {LOADS}; it is annotated as {wanted}", annotation=str(wanted))


def absent(missing: Sequence[Place], client: Client) -> NotFound:
    """The error for partitions that were never stored."""
    first = missing[0]
    if len(missing) == 1:
        what = f"{first} has nothing stored: there are no contents in table {first.table} of {client.url}"
    else:
        names = ", ".join(repr(place.partition) for place in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        what = (
            f"asset {'/'.join(first.asset)}: nothing is stored for {len(missing)} of the partitions in {client.url}: "
            f"{names}{more}"
        )
    several = (
        f", or load what there is with AssetIn(metadata={{{MISSING!r}: True}})" if first.partition is not None else ""
    )
    return NotFound(f"{what}. Materialize it first{several}", tables=[place.table for place in missing])


def _look(client: Client, place: Place) -> tuple[Place, Found | None]:
    """How far a table has come; None where nothing is stored. Raises NameTaken if it is another asset's."""
    try:
        record = find_record(client, place.table)
    except NotFound:
        return place, None
    check_owner(client, place)
    if record is None:
        version = client.machine(place.table).version
        found = Found(version.state.since, version.state.upper, version.state.schemas[-1].shown, version.seqno)
    else:
        table = client.table(place.table).describe()
        found = Found(table.since, table.upper, table.schema, None)
    return place, None if found.upper == at(0) else found


def _source(client: Client, place: Place, found: Found, written: object, clock_ms: Callable[[], int]) -> Source:
    schema = found.schema
    asked = None if written is None else Times(schema.times, clock_ms).as_of(written, AS_OF)
    if asked is None and found.upper.time is not None:
        return Source(place, found.upper.time - 1, found.seqno, schema)
    if asked is not None and at(asked) < found.since:
        raise SinceViolation(
            f"{place} was asked for as of {schema.show(asked)}, and table {place.table} keeps its history only since "
            f"{_time(schema, found.since)}. That time cannot be read any more. Load a later one, or leave out {AS_OF}. "
            "For other tables, keep history longer: client.table(name).set_retention(distance), or a hold for a time "
            "that matters",
            as_of=asked, since=found.since, table=place.table,
        )  # fmt: skip
    if asked is None or not found.upper.has_passed(asked):  # the newest of a closed one; or a time to be completed
        with _contents(client, Source(place, -1, found.seqno, schema), asked) as snapshot:
            return Source(place, snapshot.as_of, found.seqno, schema)
    return Source(place, asked, found.seqno, schema, found.upper.has_passed(asked + 1))


@contextmanager
def _contents(client: Client, source: Source, as_of: int | None) -> Iterator[Any]:
    """A snapshot of a table. Of a shard by a reader that is closed at once, as many partitions have one each."""
    if source.seqno is None:
        with client.table(source.place.table).read(as_of) as snapshot:
            yield snapshot
        return
    with client.open_reader(source.place.table) as reader, reader.snapshot(as_of, timeout=0) as snapshot:
        yield snapshot


def _time(schema: Schema, frontier: Antichain) -> str:
    return "the end of all times" if frontier.time is None else f"time {schema.show(frontier.time)}"


def _common(sources: Sequence[Source]) -> Schema:
    """The schema of the rows of all. Partitions that were stored before a column was added have null in it."""
    widest = max(sources, key=lambda source: len(source.schema.columns))
    for source in sources:
        try:
            if source.schema != widest.schema:
                source.schema.check_additive(widest.schema)
        except SchemaMismatch as error:
            raise SchemaMismatch(
                f"{source.place} and {widest.place} cannot be read as one table: {source.place.table} has the schema "
                f"{source.schema}, and {widest.place.table} has {widest.schema}. Read them one by one, or store one "
                "again in another table",
                problem="partitions differ", actual=source.schema, expected=widest.schema,
            ) from error  # fmt: skip
    return widest.schema


def _one_after_the_other(client: Client, sources: Sequence[Source], schema: Schema) -> Batches:
    """The rows of all of them, in order. Small ones are read ahead in parallel, the others streamed in their turn."""
    if len(sources) == 1:
        yield from _batches(client, sources[0], schema)
        return
    threads, rest, ahead = client.config.read_threads, iter(sources), deque[tuple[Source, Future[pa.Table | None]]]()
    with client.runtime.pool(threads, "persist-load") as pool:
        while True:
            for source in islice(rest, 2 * threads - len(ahead)):
                ahead.append((source, pool.submit(_small, client, source, schema)))
            if not ahead:
                return
            source, reading = ahead.popleft()
            table = reading.result()
            yield from _batches(client, source, schema) if table is None else [table]


def _small(client: Client, source: Source, schema: Schema) -> pa.Table | None:
    """All rows of a small shard; None for one that should be streamed."""
    with _contents(client, source, source.as_of) as snapshot:
        return None if snapshot.size > SMALL_BYTES else _rows(snapshot.to_arrow(), schema)


def _batches(client: Client, source: Source, schema: Schema) -> Batches:
    with _contents(client, source, source.as_of) as snapshot:
        for contents in snapshot.batches():
            yield _rows(contents, schema)


def _rows(contents: pa.Table, schema: Schema) -> pa.Table:
    """The rows in the columns of the schema, which may be newer than theirs."""
    table = contents
    for field in schema.data:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema.data)


def _table(schema: pa.Schema, batches: Batches) -> pa.Table:
    return pa.concat_tables([empty_table(schema), *batches])


def _reader(schema: pa.Schema, batches: Batches) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(schema, (batch for table in batches for batch in table.to_batches()))


def _is_rows(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 1 and (arguments[0] in (dict, Any) or get_origin(arguments[0]) is dict)


def _polars(wanted: Any) -> Build:
    import polars as pl  # noqa: PLC0415 - an optional dependency, which an annotation of its types has loaded

    if wanted is pl.DataFrame:
        return lambda schema, batches: pl.DataFrame(_table(schema, batches))
    if wanted is pl.LazyFrame:
        return lambda schema, batches: pl.DataFrame(_table(schema, batches)).lazy()
    raise InvalidUsage(f"an input can be loaded as {LOADS}; it is annotated as {wanted}", annotation=str(wanted))


def _models(model: Model) -> Build:
    """Rows as instances. Columns that the model does not have are left out."""

    def build(schema: pa.Schema, batches: Batches) -> list[Any]:
        names = [name for name in model.model_fields if name in schema.names]
        return [rebuild(model, row) for table in batches for row in table.select(names).to_pylist()]

    return build
