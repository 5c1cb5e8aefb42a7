"""The benchmarks run, judge their targets, and say so by their exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bench.kernel
from bench.__main__ import BENCHMARKS
from bench.append import added, bulk_append, small_append
from bench.cost import Log, kind_of
from bench.counted import CountedServer, Traffic
from bench.events import events
from bench.figures import Figure, beside, in_turn
from bench.imports import imports
from bench.kernel import SCHEMA, kernel, kernel_100m, merge_folder, updates_of, write_runs
from bench.life import life, life_s3, life_s3_postgres, life_spark
from bench.nested import nested
from bench.peer import Peer
from bench.postgres import postgres_append
from bench.postgres_lag import postgres_lag
from bench.publish import publish
from bench.push import push
from bench.reading import maintain_small, read_history, read_uncompacted
from bench.server import server
from bench.snapshot import snapshot
from bench.spark import TASK_MIB, spark
from bench.streams import streams
from bench.survey import survey
from bench.tables import tables
from bench.upsert import upsert
from bench.workers import Usage, below, used
from persist_lib.kernel.consolidate import consolidate
from persist_lib.testing.servers import use_test_credentials

ROOT = Path(__file__).parents[2]
BESIDE_OURSELVES = {
    "the flat one", "the table",
    "the limit", "without it", "the 50th append on", "0.4 M updates",
    "a census of each shard", "import pyarrow", "import pyarrow, and 0.1 s",
    "plain appends, one after the other", "a plain append",
    "the slowest client", "its median", "ten appends", "one append", "one a table", "the same of a folder of files",
    "all of them",
}  # fmt: skip
"""What is beside a bound, or beside another figure of ours."""


def run_bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.parametrize(
    ("ours", "bounds", "met"),
    [
        (2.0, {"at_least": 2.0}, True),
        (1.9, {"at_least": 2.0}, False),
        (2.0, {"at_most": 2.0}, True),
        (2.1, {"at_most": 2.0}, False),
        (9.0, {}, True),
    ],
)
def test_a_target_is_met_or_missed(ours: float, bounds: dict[str, float], met: bool) -> None:
    assert Figure("f", ours, 1.0, "x", "peer", **bounds).is_met() is met  # type: ignore[arg-type]


def test_both_sides_are_measured_in_turn() -> None:
    calls: list[str] = []
    in_turn(lambda: calls.append("ours"), lambda: calls.append("peer"), 3)
    assert calls == ["ours", "peer"] * 4


def test_appends_are_as_flat_as_what_they_add_to_bare_ones_whatever_a_sync_takes() -> None:
    """While syncs take twice as long for both, the ratio to the bare ones is 2.0, and later 3.1."""
    early, late = added([800, 810, 5000], [400, 390, 410]), added([610, 600, 590], [200, 190, 900])
    assert (early, late) == (410, 400)


def test_a_benchmark_is_run_by_name_and_an_unknown_one_is_named() -> None:
    done = run_bench("policy", "--quick")
    assert done.returncode == 0, done.stderr
    assert "batches after maintenance" in done.stdout
    unknown = run_bench("speed")
    assert unknown.returncode == 2
    assert "speed" in unknown.stderr
    assert all(name in unknown.stderr for name in BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "measure",
    [
        small_append, bulk_append, snapshot, kernel, kernel_100m, postgres_append, read_uncompacted, read_history,
        maintain_small, nested, survey, upsert, tables, streams, imports, postgres_lag,
        events, push, server, publish, life,
    ],
)  # fmt: skip
def test_every_benchmark_measures_both_sides(measure: Callable[[bool], list[Figure]]) -> None:
    figures = measure(True)
    assert figures
    # What is added to a bare transaction is a difference, which may be below 0 beside other load.
    assert all(figure.ours > 0 and figure.peer > 0 for figure in figures if figure.unit != "ms more")
    told = {figure.peer_name: figure.settings for figure in figures}
    assert all(told[name] for name in told.keys() - BESIDE_OURSELVES)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_s_own_plan_runs_in_a_jvm_as_its_users_configure_it() -> None:
    figure, rate, cpu, memory = spark(True)
    assert figure.ours > 0
    assert figure.peer > 0
    assert rate.ours == figure.ours
    assert 50 < memory.ours < TASK_MIB
    assert cpu.ours > 0
    assert cpu.peer > 0
    tasks = int(figure.note.partition(" requests, ")[2].split()[0])
    assert tasks > 1
    assert float(figure.note.partition("the largest ")[2].split("x")[0]) < 1.5, "cut evenly"
    assert "spark.driver.memory=8g" in figure.settings


def test_what_processes_below_this_one_use_is_counted() -> None:
    assert used().workers_s == 0
    with subprocess.Popen([sys.executable, "-c", "input()", "pyspark.daemon"], stdin=subprocess.PIPE) as child:
        assert child.pid in set(below(os.getpid()))
        while used().peak_mib < 1:  # until it has replaced this program
            time.sleep(0.01)
        child.communicate(b"\n")
    assert (Usage(3, 2, 7) - Usage(1, 1, 5)) == Usage(2, 1, 7)


def test_a_peer_runs_in_a_process_of_its_own_and_says_how_it_is_configured(tmp_path: Path) -> None:
    with Peer("bench.bare:sqlite_transactions", tmp_path / "bare.sqlite", 700) as peer:
        assert "synchronous=FULL" in peer.settings
        assert "700 bytes" in peer.settings
        seconds = peer.run(5)
    assert len(seconds) == 5
    assert all(second > 0 for second in seconds)
    [[rows]] = apsw.Connection(str(tmp_path / "bare.sqlite")).execute(
        "SELECT count(*) FROM log WHERE length(data) = 700"
    )
    assert rows == 5


@pytest.mark.parametrize(
    "name", ["bare", "duck", "lake", "life_peers", "life_spark", "merges", "nested_peers", "spark_peer"]
)
def test_no_peer_imports_anything_of_ours(name: str) -> None:
    """Not our memory pools, not our threads, not our session."""
    program = (
        f"import sys, bench.peer, bench.{name}; "
        "print(*[m for m in sys.modules if m.partition('.')[0] in ('persist_lib', 'jobs')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not done.stdout.strip()


def test_a_peer_s_own_prints_do_not_get_between_its_answers() -> None:
    with Peer("tests.bench.peers:talkative", "hello") as peer:
        assert peer.settings == "says hello"
        assert peer.ask("run") == 7
        assert peer.ask("pid") not in (0, os.getpid())


def test_a_peer_that_fails_ends_the_benchmark_instead_of_answering_nothing() -> None:
    with Peer("tests.bench.peers:talkative", "hello") as peer, pytest.raises(SystemExit, match="ended early"):
        peer.run(call="fail")
    with pytest.raises(SystemExit, match="ended early"), Peer("tests.bench.peers:missing"):
        pass


def test_the_middle_round_is_answered_by_each_side_s_own_clock_and_the_first_only_warms_up() -> None:
    ours, peers = iter([9.0, 1.0, 1.0, 1.0]), iter([1.0, 2.0, 4.0, 3.0])
    assert beside(lambda: next(ours), lambda: next(peers), 3) == (1.0, 3.0)


def test_the_peak_memory_of_a_process_is_not_that_of_who_started_it() -> None:
    """`getrusage` answers the parent's where that was more: the 900 MiB that making the runs took, for the kernel."""
    program = """
import subprocess, sys
import bench.figures as figures
ballast = bytearray(b"x") * (300 << 20)
del ballast
here = "import bench.figures as figures; print(figures.peak_mib())"
child = subprocess.run([sys.executable, "-c", here], stdout=subprocess.PIPE, text=True, check=True).stdout
print(figures.peak_mib(), child)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    ours, child = map(float, done.stdout.split())
    assert ours > 300
    assert 5 < child < 150


@pytest.mark.parametrize("slice_rows", [10_000, 300])
def test_runs_are_sorted_whole_and_hold_every_update_however_they_are_made(tmp_path: Path, slice_rows: int) -> None:
    write_runs(tmp_path / "runs", 2_000, runs=2, seed=5, slice_rows=slice_rows)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["0.digests", "0.parquet", "1.digests", "1.parquet"]
    rng = np.random.default_rng(5)
    for run in range(2):
        table = pq.read_table(tmp_path / "runs" / f"{run}.parquet").replace_schema_metadata(None)
        assert table.num_rows > 900
        sizes = [min(slice_rows, 1_000 - start) for start in range(0, 1_000, slice_rows)]
        drawn = pa.concat_tables([updates_of(rng, size, 2_000, run) for size in sizes])
        assert table.equals(consolidate(SCHEMA, drawn))


def test_a_part_that_is_written_is_not_in_memory_while_the_next_one_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`enumerate` keeps the last pair it gave: 140 MiB of the kernel's peak that no compaction has."""
    (tmp_path / "runs").mkdir()
    alive: list[int] = []

    def parts(*_: object, **__: object) -> Iterator[Part]:
        for _number in range(3):
            made = Part()
            seen = weakref.ref(made)
            holder = [made]
            del made
            yield holder.pop()
            alive.append(seen() is not None)

    monkeypatch.setattr(bench.kernel, "parts_of", parts)
    assert merge_folder(tmp_path / "runs", tmp_path / "out", 0) == {"rows": 3, "bytes": 3}
    assert alive == [False, False, False]


class Part:
    """What `merge_folder` wants to know of a part."""

    data, size, count = b"x", 1, 1

    @property
    def said(self) -> Part:
        return self

    sums = said


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("PUT", "/b/k", "put"),
        ("POST", "/b/k?uploads", "put"),
        ("PUT", "/b/k?partNumber=1&uploadId=x", "put"),
        ("POST", "/b/k?uploadId=x", "put"),
        ("GET", "/b/list-type=2", "get"),
        ("HEAD", "/b/k", "get"),
        ("GET", "/b?list-type=2&prefix=x", "list"),
        ("GET", "/b?prefix=x&uploads", "list"),
        ("DELETE", "/b/k", "delete"),
        ("POST", "/b?delete", "delete"),
    ],
)
def test_requests_are_priced_as_the_price_list_has_it(method: str, target: str, kind: str) -> None:
    assert kind_of(method, target) == kind


def test_only_what_the_log_gained_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = '127.0.0.1 - - [21/Nov/2026 00:21:30] "\x1b[33mHEAD /b/k HTTP/1.1\x1b[0m" 404 -\n'
    path.write_text(line * 3)

    def more() -> None:
        with path.open("a") as log:
            log.write(line * 2 + line.replace("HEAD", "PUT"))

    assert Log(path).during(more)._asdict() == {"put": 1, "get": 2, "list": 0, "delete": 0}


def test_requests_and_bytes_are_counted_by_bucket_and_kind() -> None:
    use_test_credentials()
    with CountedServer() as server:
        server.make_bucket("one")
        server.make_bucket("other")
        s3 = boto3.client("s3", endpoint_url=server.url)

        def all_kinds() -> None:
            s3.put_object(Bucket="one", Key="k", Body=b"x" * 1_000)
            s3.put_object(Bucket="other", Key="k", Body=b"x" * 50)
            s3.get_object(Bucket="one", Key="k")["Body"].read()
            s3.head_object(Bucket="one", Key="k")

        found = server.during("one", all_kinds)
        assert found == Traffic(Counter(put=1, get=1, head=1), received=1_000, sent=1_000)
        assert found.dollars == pytest.approx(5e-6 + 2 * 4e-7)
        assert server.during("other", all_kinds) == Traffic(Counter(put=1), received=50)
        assert server.stored("one") == 1_000
        assert server.during("one", lambda: s3.list_objects_v2(Bucket="one")).requests == Counter(list=1)
        assert server.during("one", lambda: s3.delete_object(Bucket="one", Key="k")).requests == Counter(delete=1)


@pytest.mark.slow
@pytest.mark.parametrize(("measure", "peers"), [(life_s3, ["deltalake", "ducklake"]), (life_s3_postgres, ["ducklake"])])
def test_a_life_on_s3_has_the_requests_of_changes_upkeep_and_reads_apart(
    measure: Callable[[bool], list[Figure]], peers: list[str]
) -> None:
    figures = {(line.peer_name, line.name.partition(": ")[2], line.unit): line for line in measure(True)}
    for peer in peers:
        parts = [figures[peer, kind, "requests"] for kind in ("load", "upserts", "upkeep")]
        whole = figures[peer, "all changes", "requests"]
        assert (whole.ours, whole.peer) == (sum(part.ours for part in parts), sum(part.peer for part in parts))
        for kind in ("scan before upkeep", "scan", "filtered scan", "look-up", "versions", "warm scan"):
            assert figures[peer, kind, "ms"].ours > 0
            assert "GET" in figures[peer, kind, "requests"].note.partition(" | ")[0]
        assert figures[peer, "scan", "requests"].peer > 0
        assert 0 < figures[peer, "stored", "MiB"].ours < figures[peer, "stored", "MiB"].peer


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_life_on_spark_finds_the_same_rows_on_each_side() -> None:
    try:
        figures = life_spark(True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not run: Spark 4.1 or a runtime is not there, and cannot be fetched ({error})")
    assert {figure.peer_name for figure in figures} == {"delta", "iceberg"}
    assert all(figure.ours > 0 and figure.peer > 0 and "Spark 4.1" in figure.settings for figure in figures)
