"""A look at the first lines: the schema that they suggest, what would become of them, and what an ingest would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from jobs.ingesting.inputs import File, find_files
from jobs.ingesting.journal import Known
from jobs.ingesting.parquet_rows import open_parquet
from jobs.ingesting.plan import Chunk, Task
from jobs.ingesting.planning import head, new_files, plan_run
from jobs.ingesting.reading import S3_PIECE
from jobs.ingesting.running import Ingest, bounds_of, look
from jobs.ingesting.settings import Settings, encode_settings
from jobs.ingesting.work import Counts, Reader, Work
from persist_lib.arguments import did_you_mean
from persist_lib.client import Client
from persist_lib.config import MIB, Config
from persist_lib.convert.lines.csv_lines import BOM, header_of
from persist_lib.convert.lines.debezium import parse_change
from persist_lib.convert.lines.decompression import DamagedFile
from persist_lib.convert.lines.file_columns import Refused
from persist_lib.convert.lines.json_lines import check_objects
from persist_lib.convert.lines.line_blocks import Block
from persist_lib.core.cost import FREE, S3_LIST, Cost
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import MINIMUM
from persist_lib.kernel.columns import unpacked
from persist_lib.schema.schema import DIFF, Schema

SAMPLE_BYTES = 4 * MIB
SAMPLED = 5
OBJECT_SHARE = 1 / 3
"""What Parquet takes of the bytes of text: a guess for the price."""
_is = pa.types


class Sample(NamedTuple):
    """What becomes of the first lines of a file: some rows, and the counts, and reasons for those that are bad."""

    rows: list[dict[str, Any]]
    counts: Counts
    reasons: list[str]

    @property
    def is_mostly_bad(self) -> bool:
        """Whether more than half of them are bad, so that the settings are probably wrong."""
        return self.counts.bad * 2 > self.counts.read


def take_sample(file: File, settings: Settings, schema: Schema, bounds: tuple[int, int] | None = None) -> Sample:
    """Read the beginning of a file as an ingest would. Changes nothing."""
    names = {0: _names(file, settings)} if settings.format == "csv" else {}
    reader = Reader(Work(Task((Chunk(0, 0, 1),)), {0: file}, names, encode_settings(settings), schema, bounds))
    if settings.format == "parquet":
        tables = list(reader.tables())
    else:
        tables = list(reader.tables_of(Block(head(file, SAMPLE_BYTES), 0, 0)))
    table = pa.concat_tables(tables) if tables else schema.data.empty_table()
    reasons = list(dict.fromkeys(unpacked(reader.bad()).column("reason").to_pylist()))
    return Sample(table.slice(0, SAMPLED).to_pylist(), reader.counts[0], reasons[:SAMPLED])


def _names(file: File, settings: Settings) -> tuple[str, ...]:
    if settings.names is not None:
        return settings.names
    first = head(file)
    return header_of(first[: first.find(b"\n") + 1] or first, settings) if first else ()


def infer_columns(file: File, settings: Settings) -> dict[str, pa.DataType]:
    """The columns of a file by its first lines. Raises InvalidUsage for one of a type that Persist does not have."""
    try:
        found = _READ[settings.format](file, settings)
    except (pa.ArrowException, DamagedFile, Refused, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidUsage(
            f"{file.path}: no schema can be inferred: {error}. Declare it with --key and --value", path=file.path
        ) from error
    shards = {source: name for name, source in settings.columns.items()}
    types = {shards.get(name, name): _plain(name, type_) for name, type_ in found.items()}
    return {
        name: type_ for name, type_ in types.items() if name not in settings.epochs or not _is.is_integer(type_)
    } | {
        name: pa.date32() if unit == "days" else pa.timestamp("us" if unit == "s" else unit, "UTC")
        for name, unit in settings.epochs.items()
    }


def infer_schema(file: File, settings: Settings, key: Sequence[str], **terms: Any) -> Schema:
    """The schema of a file whose key columns are named: they may not be null, and the others may."""
    types = infer_columns(file, settings)
    names = [name.strip() for text in key for name in text.split(",")]
    if unknown := [name for name in names if name not in types]:
        raise InvalidUsage(
            f"--key {unknown[0]}: {file.path} has no such column. {did_you_mean(unknown[0], types)}It has "
            f"{', '.join(types)}"
        )
    value = {name: type_ for name, type_ in types.items() if name not in names}
    return Schema(key=pa.schema([pa.field(name, types[name], nullable=False) for name in names]), value=value, **terms)


def _plain(name: str, type_: pa.DataType) -> pa.DataType:
    if _is.is_timestamp(type_):
        return pa.timestamp("us" if type_.unit in ("s", "ms") else type_.unit, type_.tz and "UTC")
    if _is.is_time(type_):
        return pa.time64("us")
    if _is.is_null(type_):
        return pa.string()
    if _is.is_nested(type_):
        raise InvalidUsage(
            f"column {name!r} holds {type_}, which no column does; declare the others with --key and --value, and use "
            "--extra ignore"
        )
    return type_


def _csv(file: File, settings: Settings) -> dict[str, pa.DataType]:
    data = head(file, SAMPLE_BYTES).removeprefix(BOM).decode(settings.encoding).encode()
    names = settings.names
    if names is None:
        end = data.find(b"\n") + 1
        names, data = (
            header_of(data[:end] or data, msgspec.structs.replace(settings, encoding="utf-8")),
            data[end:] if end else b"",
        )
    if not data.strip():
        return dict.fromkeys(names, pa.string())
    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        pyarrow.csv.ReadOptions(column_names=list(names), block_size=len(data) + 1024),
        pyarrow.csv.ParseOptions(
            delimiter=settings.delimiter,
            quote_char=settings.quote,
            newlines_in_values=True,
            invalid_row_handler=lambda _: "skip",
        ),
        pyarrow.csv.ConvertOptions(
            null_values=list(settings.nulls), strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    return {field.name: pa.string() if _is.is_binary(field.type) else field.type for field in table.schema}


def _jsonl(file: File, _settings: Settings) -> dict[str, pa.DataType]:
    return _of_objects(head(file, SAMPLE_BYTES).split(b"\n"))


def _debezium(file: File, _settings: Settings) -> dict[str, pa.DataType]:
    found = []
    for line in head(file, SAMPLE_BYTES).split(b"\n"):
        try:
            change = parse_change(line) if line.strip() else None
        except (Refused, InvalidUsage):
            continue
        if change is not None and change.op != "d":
            found.append(bytes(change.after).replace(b"\n", b" "))
    return _of_objects(found)


def _of_objects(lines: Sequence[bytes]) -> dict[str, pa.DataType]:
    good = []
    for line in lines:
        try:
            if check_objects(line) == 1:
                good.append(line)
        except Refused:
            continue
    if not good:
        raise Refused("none of the first lines is an object with rows' fields")
    data = b"\n".join(good) + b"\n"
    table = pyarrow.json.read_json(pa.BufferReader(data), pyarrow.json.ReadOptions(block_size=len(data) + 1024))
    types = {}
    for field in table.schema:
        types[field.name] = _zoned(field.name, good) if _is.is_timestamp(field.type) else field.type
    return types


def _zoned(name: str, lines: Sequence[bytes]) -> pa.DataType:
    """Whether times are instants, which Arrow's own inference does not look at."""
    texts = pa.array([msgspec.json.decode(line).get(name) for line in lines], pa.string())
    for type_ in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            pc.cast(texts, type_)
        except pa.ArrowInvalid:
            continue
        return type_
    return pa.string()


def _parquet(file: File, _settings: Settings) -> dict[str, pa.DataType]:
    with open_parquet(file) as parquet:
        return {field.name: field.type for field in parquet.schema_arrow if field.name != DIFF}


_READ = {"csv": _csv, "jsonl": _jsonl, "debezium": _debezium, "parquet": _parquet}


def describe(client: Client | None, job: Ingest, is_there: bool) -> Iterator[str]:
    """Yield the lines. Reads the inputs' names, headers and first lines, and changes nothing."""
    yield f"{job.shard} {'exists' if is_there else 'would be created'}: {job.schema}"
    known, sequence = (Known(MINIMUM), 0) if client is None or not is_there else look(client, job)
    if known.last is not None and sequence < known.last.last:
        yield (
            f"run {known.last.number} is not done: groups {sequence - known.last.first + 2} to "
            f"{known.last.last - known.last.first + 1} of its "
            f"{len(known.last.files)} files come first"
        )
    found = find_files(job.inputs, job.settings.format)
    files = new_files(found.files, known, job.changed)
    others = (
        f"; {found.left_out} names that do not look like {job.settings.format} are left out" if found.left_out else ""
    )
    yield f"{len(found.files)} files in the inputs, of which {len(files)} are new{others}"
    if not files:
        return
    bounds = None if client is None or not is_there or job.bounds is None else bounds_of(client, job)
    if job.bounds is not None and bounds is None:
        bounds = (0, job.bounds[1])
    run = plan_run(files, job.settings, job.schema, known, bounds)
    groups = run.groups()
    tasks = sum(len(group.tasks) for group in groups)
    size = sum(group.size for group in groups)
    yield f"{size / MIB:,.1f} MiB in {tasks} tasks and {len(groups)} commits"
    largest = max((file for file in files if file.compression), key=lambda file: file.size, default=None)
    if largest is not None and largest.size > 4 * job.settings.chunk_bytes:
        yield f"a compressed file is one task, the largest of {largest.size / MIB:,.1f} MiB: {largest.path}"
    yield f"about {_price(client, size, tasks, len(groups), known):,.4f} dollars for requests"
    sample = take_sample(files[0], job.settings, job.schema, bounds)
    yield f"of the first {sample.counts.read} lines of {files[0].path} {sample.counts.bad} are bad"
    for reason in sample.reasons:
        yield f"  bad: {reason}"
    for row in sample.rows:
        yield f"  {row}"


def _price(client: Client | None, size: int, tasks: int, groups: int, known: Known) -> float:  # noqa: ARG001
    """Reading by ranges, a part for each task at least, and three commits for each group."""
    config = Config() if client is None else client.config
    prices = FREE if client is None else client.prices
    puts = tasks + int(size * OBJECT_SHARE / config.part_bytes) + 3 * groups
    reads = Cost(gets=-(-size // S3_PIECE)).priced(S3_LIST if prices is not FREE else FREE)
    return Cost(puts=puts, gets=6 * groups).priced(prices).dollars + reads.dollars
