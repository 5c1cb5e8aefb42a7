"""The journal of a shard's ingests: the shard `<shard>_files`, which says what each run took and what came out.

It has three kinds of rows, by (ingest, run, kind, number):

- `run`: the settings and the schema of a run, and its first and last group;
- `file`: one file of its list, at this place, and the group that begins with it or in which it begins;
- `group`: what became of the lines of a group. It is written before the group's data, so that it is there whenever the
  data is.

**How far a run has come is not in here.** That is in the data shard itself: the last sequence number of the producer
`ingest/<name>`, which moves in the very transition that appends a group. Groups are numbered on from run to run. A run
begins only when the one before it is done, by a compare-and-append to this shard, so that of two programs that plan at
once one continues what the other planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from jobs.ingesting.inputs import File
from jobs.ingesting.plan import Group, plan_groups
from jobs.ingesting.settings import Settings, decode_settings, encode_settings
from persist_lib.client import Client
from persist_lib.errors import UpperMismatch
from persist_lib.frontier import Antichain, at
from persist_lib.schema.schema import Schema

JOURNAL = Schema(
    key={"ingest": "string not null", "run": "int64 not null", "kind": "string not null", "number": "int64 not null"},
    value={
        "path": "string", "size": "int64", "etag": "string", "options": "string",
        "first_group": "int64", "last_group": "int64", "lines": "int64", "written": "int64", "bad": "int64",
        "silent": "int64", "info": "string",
    },
)  # fmt: skip
BAD = Schema(
    key={"file": "string not null", "line": "int64 not null"},
    value={"offset": "int64", "text": "string", "reason": "string", "ingest": "string", "run": "int64"},
)


class Info(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the other columns of a run's row do not say."""

    settings: str
    schema: Schema
    starts: tuple[int, ...] | None = None
    """The places of the files with which groups begin; None: groups are cut anywhere."""
    names: Mapping[str, tuple[int, ...]] = {}
    """The headers of files of CSV, joined by line ends, and the places of the files that have them."""
    bounds: tuple[int, int] | None = None
    """The times of the rows, where they have their own."""


class Tally(NamedTuple):
    """What became of lines. `read` is the sum of the others."""

    written: int = 0
    bad: int = 0
    silent: int = 0
    lines: int = 0

    def __add__(self, other: object) -> Tally:
        return (
            Tally(*(one + more for one, more in zip(self, other, strict=True)))
            if isinstance(other, Tally)
            else NotImplemented
        )

    @property
    def read(self) -> int:
        """Lines that should be rows."""
        return self.written + self.bad + self.silent


class Run(NamedTuple):
    """A planned run."""

    number: int
    first: int
    last: int
    files: list[File]
    info: Info

    @property
    def settings(self) -> Settings:
        """How its files are read."""
        return decode_settings(self.info.settings)

    def groups(self) -> list[Group]:
        """Its groups. They follow from the files and the settings, so they are the same whenever they are asked for."""
        return plan_groups(self.files, self.settings, self.first, self.info.starts)


class Known(NamedTuple):
    """What the journal says of one ingest. Where there is no journal, nothing."""

    upper: Antichain
    last: Run | None = None
    taken: Mapping[str, str] = {}
    """The files that any run took: path -> etag of the newest version that was."""
    tallies: Mapping[int, Tally] = {}
    """The groups of the last run whose lines are counted."""
    lines: Mapping[int, tuple[int, int]] = {}
    """After these groups of the last run, the place of the last file, and how many of its lines have come."""
    highest: int = 0


def read_journal(client: Client, shard: str, ingest: str) -> Known:
    """Read what is known."""
    with client.open_reader(shard, JOURNAL, purpose="ingest") as reader:
        upper = reader.fetch_upper()
        if not upper.time:
            return Known(upper)
        with reader.snapshot(upper.time - 1, diff=True) as snapshot:
            table = snapshot.to_arrow()
    table = table.filter(pc.equal(table.column("ingest"), ingest)).sort_by(
        [("run", "ascending"), ("number", "ascending")]
    )
    runs, files, groups = (table.filter(pc.equal(table.column("kind"), kind)) for kind in ("run", "file", "group"))
    taken = dict(zip(files.column("path").to_pylist(), files.column("etag").to_pylist(), strict=True))
    if not runs.num_rows:
        return Known(upper, None, taken)
    newest = runs.slice(runs.num_rows - 1).to_pylist()[0]
    mine = files.filter(pc.equal(files.column("run"), newest["run"])).select(["path", "size", "etag", "options"])
    listed = [File(**row) for row in mine.to_pylist()]
    info = msgspec.json.decode(newest["info"], type=Info)
    last = Run(newest["run"], newest["first_group"], newest["last_group"], listed, info)
    counted = groups.filter(pc.equal(groups.column("run"), newest["run"])).to_pylist()
    tallies = {row["number"]: Tally(row["written"], row["bad"], row["silent"], row["lines"]) for row in counted}
    lines = {row["number"]: tuple(msgspec.json.decode(row["info"])) for row in counted}
    highest = pc.max(groups.column("number")).as_py() or 0
    return Known(upper, last, taken, tallies, lines, highest)


def try_begin(client: Client, shard: str, ingest: str, known: Known, run: Run) -> bool:
    """Record a run, unless another program was first. Then read the journal again."""
    info = msgspec.json.encode(run.info).decode()
    rows = [_row(ingest, run.number, "run", 0, first_group=run.first, last_group=run.last, info=info)]
    began: dict[int, int] = {}
    for group in run.groups():
        for chunk in group.chunks:
            began.setdefault(chunk.file, group.number)
    rows += [
        _row(ingest, run.number, "file", number, **msgspec.structs.asdict(file), first_group=began[number])
        for number, file in enumerate(run.files)
    ]
    upper = known.upper.time or 0
    with client.open_writer(shard, JOURNAL) as writer:
        try:
            writer.compare_and_append(pa.Table.from_pylist(rows, schema=JOURNAL.data), at(upper), at(upper + 1))
        except UpperMismatch:
            return False
    return True


def group_row(ingest: str, run: Run, number: int, tally: Tally, last_file: int, lines: int) -> pa.Table:
    """The row of a group."""
    row = _row(
        ingest, run.number, "group", number, lines=tally.lines, written=tally.written, bad=tally.bad,
        silent=tally.silent,
        info=msgspec.json.encode((last_file, lines)).decode(),
    )  # fmt: skip
    return pa.Table.from_pylist([row], schema=JOURNAL.data)


def _row(ingest: str, run: int, kind: str, number: int, **more: Any) -> dict[str, Any]:
    return {"ingest": ingest, "run": run, "kind": kind, "number": number, **dict.fromkeys(JOURNAL.names[4:]), **more}


def pack_names(headers: Sequence[tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """The headers of files, each once."""
    found: dict[str, tuple[int, ...]] = {}
    for place, names in enumerate(headers):
        text = "\n".join(names)
        found[text] = (*found.get(text, ()), place)
    return found


def unpack_names(info: Info) -> dict[int, tuple[str, ...]]:
    """The header of each file."""
    return {place: tuple(text.split("\n")) for text, places in info.names.items() for place in places}


def new_run(known: Known, files: Iterable[File], settings: Settings, schema: Schema, **more: Any) -> Run:
    """A run of these files, that comes after the last one."""
    number, first = (1, 1) if known.last is None else (known.last.number + 1, known.last.last + 1)
    run = Run(number, first, first, list(files), Info(encode_settings(settings), schema, **more))
    return run._replace(last=first + len(run.groups()) - 1)
