"""A table after a life of changes: reads of it, as it is and as it was, beside deltalake, DuckLake and pyiceberg.

A load, then upserts of 1,000 keys (a third of them new, the others by Zipf), a delete of some keys after each tenth,
and each side's upkeep, twice or more; all history is kept. Then whole scans, filtered scans, look-ups, scans as of
earlier versions, and the changes between two; and a whole scan just before the first upkeep. Each side is in a process
of its own, and opens its table again for each read (once for all the versions). Only a warm scan is by a handle that
has scanned before.

On the local disk a cold scan is one after the system has forgotten what it read of files, which takes root. On S3
(`life_s3`) the data of all sides is in one server, which counts the requests and bytes of each, and answers each
request 20 ms late. Ours and deltalake commit by conditional PUTs and have nothing but the bucket; DuckLake's catalog is
a DuckDB file on the local disk, which asks for no requests. `life_s3_postgres` has our Consensus in a database too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from bench.counted import CountedServer, Traffic
from bench.figures import Figure, beside
from bench.life_peers import BELOW, among, loads, looked_up, stretches
from bench.life_spark import install_spark, runtimes
from bench.merges import install_ducklake
from bench.peer import Peer, Ready
from jobs.java import find_java_home
from persist_lib.testing.servers import PostgresServer, use_test_credentials


class Size(NamedTuple):
    """Rows of the load, upserts after it, after how many of them there is upkeep; earlier versions, rounds of reads."""

    rows: int
    steps: int
    every: int
    versions: int = 20
    rounds: int = 5


FULL, LONG, FEW = Size(1_000_000, 100, 50), Size(2_000_000, 500, 50), Size(1_000_000, 20, 10)
SPARK = Size(1_000_000, 30, 15, 5, 3)
QUICK, S3, S3_QUICK = Size(10_000, 10, 5, 10, 1), Size(200_000, 50, 25, 5, 1), Size(5_000, 4, 2, 2, 1)
READS = ("scan", "filtered scan", "look-up", "versions")
PEERS = {"deltalake": (*READS, "changes", "warm scan"), "ducklake": (*READS, "warm scan")}
"""What is asked of each. DuckLake's `table_changes` over 25 of 100 changes to 1 M rows waited without end or work."""
LIFE = ("load", "upserts", "upkeep")
MOST = {"scan before upkeep": 1.2, "scan": 1.0, "versions": 1.0}
"""How many times as long as any peer these may take."""
CACHES = Path("/proc/sys/vm/drop_caches")


def life(quick: bool) -> list[Figure]:
    """Seconds of changes, upkeep and each kind of read beside each peer, and what is stored."""
    return _life("life", QUICK if quick else FULL)


def life_long(quick: bool) -> list[Figure]:
    """The same of a longer life."""
    return _life("life-long", QUICK if quick else LONG)


def life_pyiceberg(quick: bool) -> list[Figure]:
    """The same of a shorter life beside pyiceberg, whose upserts take seconds, and which reads no changes."""
    return _life("life-pyiceberg", QUICK if quick else FEW, {"pyiceberg": (*READS, "warm scan")})


def life_s3(quick: bool) -> list[Figure]:
    """The same on S3, with requests, bytes and dollars."""
    use_test_credentials()
    with CountedServer() as server:
        return _life("life-s3", S3_QUICK if quick else S3, server=server)


def life_s3_postgres(quick: bool) -> list[Figure]:
    """The same with our Consensus on PostgreSQL, beside DuckLake, whose catalog is in a database too."""
    use_test_credentials()
    with CountedServer() as server, PostgresServer() as database:
        return _life(
            "life-s3-postgres", S3_QUICK if quick else S3, {"ducklake": PEERS["ducklake"]}, server, database.url
        )


def life_spark(quick: bool) -> list[Figure]:
    """The same on Spark, by the SQL of each side's users, in one session of each that is warm."""
    install_spark()
    runtimes()
    os.environ["JAVA_HOME"] = find_java_home()
    peers = {"delta": (*READS, "changes"), "iceberg": READS}
    return _life("life-spark", QUICK if quick else SPARK, peers, home="bench.life_spark")


class Side:
    """Ours or a peer: carries out its calls, and keeps what each of them took."""

    def __init__(self, peer: Peer, name: str, folder: Path, server: CountedServer | None) -> None:
        self.peer, self.name, self._folder, self._server = peer, name, folder, server
        self.spent: dict[str, list[tuple[float, Traffic]]] = {}

    def run(self, call: str) -> float:
        """The seconds of a call."""
        found: list[float] = []
        traffic = Traffic()
        if self._server:
            traffic = self._server.during(self.name, lambda: found.extend(self.peer.run(call=call)))
        else:
            found += self.peer.run(call=call)
        self.spent.setdefault(call, []).append((found[0], traffic))
        return found[0]

    def all(self, *calls: str) -> tuple[float, Traffic]:
        """What all of these calls took together."""
        spent = [one for call in calls for one in self.spent[call]]
        return sum(seconds for seconds, _ in spent), sum((traffic for _, traffic in spent), Traffic())

    def mib(self) -> float:
        """What is stored, in files and objects."""
        files = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        return (files + (self._server.stored(self.name) if self._server else 0)) / 2**20


@contextmanager
def _side(
    name: str, folder: Path, size: Size, server: CountedServer | None, consensus: str, home: str
) -> Iterator[Side]:
    folder.mkdir()
    if server:
        server.make_bucket(name)
    start, *more = ("bench.life:ours", consensus) if name == "ours" else (f"bench.life_peers:{name}",)
    if home:
        start, *more = (f"{home}:{name}",)
    with Peer(start, folder, server.url if server else "", *size[:4], *more) as peer:
        yield Side(peer, name, folder, server)


def _life(
    name: str,
    size: Size,
    peers: Mapping[str, Sequence[str]] = PEERS,
    server: CountedServer | None = None,
    consensus: str = "",
    home: str = "",
) -> list[Figure]:
    if "ducklake" in peers:
        install_ducklake()
    with TemporaryDirectory(prefix="persist-life-") as folder, ExitStack() as stack:
        sides = [
            stack.enter_context(_side(side, Path(folder, side), size, server, consensus, home))
            for side in ("ours", *peers)
        ]
        both = [Both(name, size, sides[0], other) for other in sides[1:]]
        for side in sides:
            side.run("load")
            side.run("upserts")
        for pair in both:
            pair.read("scan before upkeep", "scan")
            if server and pair.other.name == "deltalake":
                pair.read("the same without a lease", "scan", by_us="scan without a lease")
        for side in sides:
            side.run("upkeep")
            for _ in range(size.every, size.steps, size.every):
                side.run("upserts")
                side.run("upkeep")
        for pair in both:
            if server and pair.other.name == "deltalake":
                pair.read("a scan without a lease", "scan", by_us="scan without a lease")
            if server is None and os.access(CACHES, os.W_OK):
                pair.read("cold scan", "scan", before=_forget)
            for read in peers[pair.other.name]:  # the warm scan last, as its handle stays open
                pair.read(read, read)
        return [line for pair in both for line in (*pair.changes(), *pair.reads, pair.stored())]


class Both:
    """Ours beside a peer."""

    def __init__(self, name: str, size: Size, ours: Side, other: Side) -> None:
        self.ours, self.other = ours, other
        self._name, self._size = name, size
        self.reads: list[Figure] = []

    def read(self, kind: str, call: str, before: Callable[[], object] = int, *, by_us: str = "") -> None:
        """A read by both, by turns, and the traffic of the last one. Both have to find as many rows.

        `by_us` is our call if it has another name.
        """

        def once(side: Side, call: str) -> float:
            before()
            return side.run(call)

        ours = partial(once, self.ours, by_us or call)
        mine, its = beside(ours, partial(once, self.other, call), self._size.rounds)
        rows = self.ours.peer.answer, self.other.peer.answer
        if "scan" in call and rows[0] != rows[1]:
            raise SystemExit(f"a {kind} of {self.other.name} has {rows[1]} rows, not {rows[0]}")
        traffic = (side.spent[name][-1][1] for side, name in ((self.ours, by_us or call), (self.other, call)))
        self.reads.append(self._line(kind, mine * 1e3, its * 1e3, "ms", at_most=MOST.get(kind)))
        self.reads += self._traffic(kind, *traffic)

    def changes(self) -> Iterator[Figure]:
        """What the changes and the upkeep took."""
        parts = {"load": ("load",), "upserts": ("upserts",), "upkeep": ("upkeep",), "all changes": LIFE}
        for kind, calls in parts.items():
            note = f"{self._size.rows:,} rows, then {self._size.steps} upserts" if kind == "load" else ""
            (mine, my_traffic), (its, its_traffic) = self.ours.all(*calls), self.other.all(*calls)
            yield self._line(kind, mine, its, "s", note=note)
            yield from self._traffic(kind, my_traffic, its_traffic)

    def stored(self) -> Figure:
        """What is stored at the end."""
        return self._line("stored", self.ours.mib(), self.other.mib(), "MiB")

    def _traffic(self, kind: str, mine: Traffic, its: Traffic) -> Iterator[Figure]:
        if mine.requests:
            yield self._line(kind, mine.requests.total(), its.requests.total(), "requests", note=f"{mine} | {its}")

    def _line(self, kind: str, mine: float, its: float, unit: str, **words: Any) -> Figure:
        peer = self.other
        return Figure(f"{self._name}: {kind}", mine, its, unit, peer.name, settings=peer.peer.settings, **words)


def _forget() -> None:
    """Let the system forget what it has read of files."""
    os.sync()
    CACHES.write_text("1")


@contextmanager
def ours(folder: str, endpoint: str, rows: str, steps: str, every: str, some: str, consensus: str) -> Iterator[Ready]:
    """A shard. Without a Consensus of its own, it is on the disk, or in the bucket too."""
    kinds, url = persist.Schema({"k": "int64"}, {"a": "int64", "b": "string"}), f"file:{folder}"
    if endpoint:
        url = f"{'s3' if consensus else 's3+cas'}://ours/life?endpoint={endpoint}&path_style=true"
    connect = partial(persist.open, url, consensus or None)
    left, count, ends = stretches(rows, steps, every), int(rows), list[int]()

    def load() -> None:
        with connect() as client, client.open_writer("t", kinds) as write:
            write.compare_and_append(loads(count), 0, 1)

    def upserts() -> None:
        with connect() as client, client.open_writer("t", kinds) as write:
            for table, deleted in next(left):
                ends.append(write.upsert(table).time or 0)
                if deleted.size:
                    write.delete(pa.table({"k": deleted}))

    def upkeep() -> None:
        with connect() as client:
            client.maintain("t")

    def scans(*asked: dict[str, Any], **how: Any) -> int:
        found = 0
        with connect(**how) as client:
            table = client.table("t")
            for words in asked:
                with table.read(**words) as snapshot:
                    found += snapshot.to_arrow().num_rows
        return found

    def between() -> int:
        start, end = ends[len(ends) // 4], ends[len(ends) // 2]
        with connect() as client, client.table("t").changes(start, end) as found:
            return found.to_arrow().num_rows

    with ExitStack() as stack:
        open_: list[Any] = []

        def warm() -> int:
            if not open_:
                open_.append(stack.enter_context(connect()).table("t"))
            with open_[0].read() as snapshot:
                return int(snapshot.to_arrow().num_rows)

        yield Ready("its defaults", {
            "load": load, "upserts": upserts, "upkeep": upkeep, "changes": between, "warm scan": warm,
            "scan": lambda: scans({}), "scan without a lease": lambda: scans({}, read_only=True),
            "filtered scan": lambda: scans({"filter": pc.field("a") < BELOW}),
            "look-up": lambda: scans({"keys": pa.table({"k": looked_up(count)})}),
            "versions": lambda: scans(*({"as_of": end} for end in among(ends, some))),
        })  # fmt: skip
