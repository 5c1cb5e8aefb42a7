"""What the SQLite Consensus does about locks, crashes, forks, foreign files and reading without writing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from persist_lib.errors import Corrupt, Determinate, DiskFull, Indeterminate, InvalidUsage, NewerFormat, NotFound
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change
from persist_lib.location.sqlite.connections import Connections
from persist_lib.location.sqlite.consensus import ReadOnlySqliteConsensus, SqliteConsensus
from persist_lib.location.sqlite.file import APPLICATION_ID, connect, write_failed
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Runtime
from tests.logs import after


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db" / "consensus.sqlite"


@pytest.fixture
def consensus(path: Path) -> Iterator[SqliteConsensus]:
    path.parent.mkdir()
    opened = SqliteConsensus(path)
    yield opened
    opened.close()


def files(path: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in path.parent.iterdir()}


def test_every_connection_keeps_acknowledged_commits_through_a_power_cut(
    consensus: SqliteConsensus, path: Path
) -> None:
    connection = connect(path, lambda _: False)
    assert connection.pragma("journal_mode") == "wal"
    assert connection.pragma("synchronous") == 2
    assert connection.pragma("wal_autocheckpoint") == 1000
    assert connection.pragma("journal_size_limit") == 64 * 1024 * 1024
    connection.close()


def test_a_compare_and_set_syncs_the_log_once(path: Path) -> None:
    program = (
        "import sys; from persist_lib.location.sqlite.consensus import SqliteConsensus as S\n"
        f"c = S({str(path)!r}); c.compare_and_set('s', None, b'x'); sys.stderr.write('BEGIN\\n'); sys.stderr.flush()\n"
        "assert c.compare_and_set('s', c.head('s').newest, b'x'); sys.stderr.write('END\\n'); import os; os._exit(0)"
    )
    path.parent.mkdir()
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    run = subprocess.run(
        ["strace", "-f", "-e", "trace=fsync,fdatasync,write", sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    between = run.stderr.split("BEGIN")[-1].split("END")[0]
    assert between.count("sync(") == 1


def test_a_writer_that_cannot_have_the_lock_gives_up_in_time_and_wrote_nothing(
    consensus: SqliteConsensus, path: Path
) -> None:
    assert consensus.compare_and_set("s", None, b"1")
    holder = connect(path, lambda _: False)
    holder.execute("BEGIN IMMEDIATE")
    impatient = SqliteConsensus(path, busy_s=0.1)
    started = time.monotonic()
    for write in (
        lambda: impatient.compare_and_set("s", after(1), b"2"),
        lambda: impatient.compare_and_set_many({"s": (after(1), b"2")}),
        lambda: impatient.truncate("s", SeqNo(1)),
    ):
        with pytest.raises(Determinate):
            write()
    assert 0.3 <= time.monotonic() - started < 8
    assert len(impatient.scan("s", SeqNo(1), 9)) == 1, "readers wait for nobody"
    holder.execute("ROLLBACK")
    assert impatient.compare_and_set("s", after(1), b"2")
    holder.close()
    impatient.close()


def test_the_caller_s_deadline_shortens_the_wait(consensus: SqliteConsensus, path: Path) -> None:
    holder = connect(path, lambda _: False)
    holder.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(Determinate):
        within(Runtime().deadline(0.05), lambda: consensus.compare_and_set("s", None, b"1"))
    assert time.monotonic() - started < 8
    holder.close()


def test_threads_of_one_process_queue_with_a_bound(consensus: SqliteConsensus, path: Path) -> None:
    holder = connect(path, lambda _: False)
    holder.execute("BEGIN IMMEDIATE")
    impatient = SqliteConsensus(path, busy_s=0.2)

    def attempt(_: int) -> str:
        try:
            impatient.compare_and_set("s", None, b"1")
        except Determinate:
            return "determinate"
        return "done"

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(attempt, range(4))) == {"determinate"}
    holder.close()
    assert impatient.compare_and_set("s", None, b"1")
    impatient.close()


def make_database(path: Path, application_id: int, version: int) -> None:
    path.parent.mkdir()
    connection = apsw.Connection(str(path))
    connection.pragma("application_id", application_id)
    connection.pragma("user_version", version)
    connection.execute("CREATE TABLE t (x)")
    connection.pragma("journal_mode", "wal")
    connection.close()


@pytest.mark.parametrize(
    ("application_id", "version", "error"), [(APPLICATION_ID, 2, NewerFormat), (7, 1, InvalidUsage)]
)
@pytest.mark.parametrize("kind", [SqliteConsensus, ReadOnlySqliteConsensus])
def test_a_newer_or_foreign_database_is_refused_before_anything_is_touched(
    path: Path, kind: Any, application_id: int, version: int, error: type[Exception]
) -> None:
    make_database(path, application_id, version)
    before = files(path)
    with pytest.raises(error):
        kind(path)
    assert files(path) == before


def test_a_newer_format_that_is_still_in_the_log_is_refused(consensus: SqliteConsensus, path: Path) -> None:
    upgraded = connect(path, lambda _: False)
    upgraded.pragma("user_version", 2)
    late = SqliteConsensus(path, create=False)
    with pytest.raises(NewerFormat):
        late.compare_and_set("s", None, b"1")
    late.close()
    upgraded.close()


def test_a_missing_database_is_not_found_and_not_made(path: Path) -> None:
    path.parent.mkdir()
    for call in (lambda: SqliteConsensus(path, create=False), lambda: ReadOnlySqliteConsensus(path)):
        with pytest.raises(NotFound):
            call()
    assert files(path) == {}


def test_a_file_that_is_no_database_is_damage(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(Corrupt):
        SqliteConsensus(path)


def test_a_reader_follows_writers_that_come_and_go(path: Path) -> None:
    path.parent.mkdir()
    SqliteConsensus(path).close()
    reader = ReadOnlySqliteConsensus(path)
    for n in range(6):
        assert len(reader.scan("s", SeqNo(0), 99)) == n
        writer = SqliteConsensus(path)
        assert writer.compare_and_set("s", after(n), b"x")
        if n % 2:
            assert len(reader.scan("s", SeqNo(0), 99)) == n + 1
        writer.close()
    reader.close()


def killed_writer(path: Path, rows: int) -> None:
    """A process that is killed right after `rows` acknowledged commits."""
    if (child := os.fork()) == 0:
        try:
            consensus = SqliteConsensus(path)
            for n in range(rows):
                assert consensus.compare_and_set("s", after(n), b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_reader_sees_what_a_killed_writer_left_in_its_log_and_writes_nothing(path: Path) -> None:
    path.parent.mkdir()
    killed_writer(path, 5)
    before = files(path)
    assert f"{path.name}-wal" in before
    reader = ReadOnlySqliteConsensus(path)
    assert len(reader.scan("s", SeqNo(0), 99)) == 5
    reader.close()
    assert files(path) == before


def test_a_reader_waits_for_a_writer_that_is_about_to_take_its_log_away(path: Path) -> None:
    """SQLite unlinks the shared memory first, and on a busy machine the log some time later."""
    path.parent.mkdir()
    SqliteConsensus(path).close()
    log, waited, stays = path.with_name(path.name + "-wal"), list[float](), False
    writer = SqliteConsensus(path)
    assert writer.compare_and_set("s", None, b"x")
    left = log.read_bytes()
    writer.close()
    log.write_bytes(left)

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3 and not stays:
            log.unlink()

    reader = ReadOnlySqliteConsensus(path, runtime=Runtime(sleep=sleep))
    assert len(reader.scan("s", SeqNo(0), 99)) == 1
    assert len(waited) == 3
    log.write_bytes(left)  # it stays: a copy of what was in use
    waited.clear()
    stays = True
    with pytest.raises(Determinate, match="its -shm file is missing"):
        reader.scan("s", SeqNo(0), 99)
    assert 1 < sum(waited) < 10
    reader.close()


def test_a_writer_goes_on_where_a_killed_one_stopped(path: Path) -> None:
    path.parent.mkdir()
    killed_writer(path, 5)
    consensus = SqliteConsensus(path)
    assert not consensus.compare_and_set("s", after(4), b"y")
    assert consensus.compare_and_set("s", after(5), b"y")
    consensus.close()


def test_a_write_that_finds_no_room_is_determinate_and_what_was_acknowledged_stays(path: Path) -> None:
    path.parent.mkdir()
    if (child := os.fork()) == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            consensus = SqliteConsensus(path)
            assert consensus.compare_and_set("s", None, b"1")
            size = path.with_name(path.name + "-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, resource.RLIM_INFINITY))
            try:
                consensus.compare_and_set("s", after(1), bytes(200_000))
            except DiskFull:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                os._exit(0 if consensus.compare_and_set("s", after(1), b"2") else 3)
            os._exit(4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    consensus = SqliteConsensus(path)
    assert [row.data for row in consensus.scan("s", SeqNo(0), 9)] == [b"1", b"2"]
    consensus.close()


def test_a_write_that_fails_otherwise_leaves_a_doubt(path: Path) -> None:
    error = apsw.IOError("disk I/O error")
    error.extendedresult = apsw.SQLITE_IOERR_WRITE  # type: ignore[attr-defined]
    assert isinstance(write_failed(error, path, errno.EIO), Indeterminate)
    assert isinstance(write_failed(error, path, errno.EDQUOT), DiskFull)
    assert isinstance(write_failed(apsw.FullError("full"), path), DiskFull)
    error.extendedresult = apsw.SQLITE_IOERR_FSYNC  # type: ignore[attr-defined]
    assert isinstance(write_failed(error, path, errno.ENOSPC), Indeterminate)


def test_an_interrupt_in_the_middle_of_many_undoes_them_and_the_next_goes_on(consensus: SqliteConsensus) -> None:
    class Interrupting(dict[str, Change]):
        def items(self) -> Any:
            yield "a", (None, b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consensus.compare_and_set_many(Interrupting(a=(None, b"1")))
    assert consensus.head("a") is None
    assert consensus.compare_and_set_many({"a": (None, b"1"), "b": (None, b"1")})


def test_an_interrupt_while_waiting_for_the_lock_writes_nothing(consensus: SqliteConsensus, path: Path) -> None:
    holder = connect(path, lambda _: False)
    holder.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        consensus.compare_and_set("s", None, b"1")
    timer.join()
    holder.close()
    assert consensus.head("s") is None
    assert consensus.compare_and_set("s", None, b"1")


def test_a_closed_one_says_so(consensus: SqliteConsensus) -> None:
    consensus.close()
    with pytest.raises(InvalidUsage, match="closed"):
        consensus.head("s")


@pytest.mark.slow
def test_no_connection_is_open_across_a_fork_even_while_threads_write(consensus: SqliteConsensus) -> None:
    """In the child, an inherited connection or a lock taken by a thread that is not there would hang or lose rows."""
    assert consensus.compare_and_set("s", None, b"x")
    stop = threading.Event()

    def write() -> int:
        wins = 0
        while not stop.is_set():
            head = consensus.head("s")
            assert head is not None
            wins += consensus.compare_and_set("s", head.newest, b"x")
        return wins

    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(write) for _ in range(3)]
        for _ in range(10):
            if (child := os.fork()) == 0:
                try:
                    head = consensus.head("s")
                    while head is not None and not consensus.compare_and_set("s", head.newest, b"child"):
                        head = consensus.head("s")
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        wins = sum(future.result() for future in writing)
    rows = consensus.scan("s", SeqNo(0), 1_000_000)
    assert len(rows) == rows[-1].seqno == 1 + wins + 10
    assert sum(row.data == b"child" for row in rows) == 10


def test_a_process_forked_behind_our_back_is_refused_and_not_served_wrongly(path: Path) -> None:
    path.parent.mkdir()
    connections = Connections(lambda: apsw.Connection(str(path)), "it")
    connections.use(lambda _: None)
    connections._pid += 1
    with pytest.raises(InvalidUsage, match="fork"):
        connections.use(lambda _: None)
    connections.close()


def test_threads_that_come_and_go_share_a_few_connections(consensus: SqliteConsensus) -> None:
    opened = []
    connect_one = consensus.connections._connect
    consensus.connections._connect = lambda: opened.append(1) or connect_one()  # type: ignore[func-returns-value]
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(consensus.head, "s").result()
    assert len(opened) <= 1


def test_opening_while_another_process_writes_its_log_back_sees_no_damage(tmp_path: Path) -> None:
    """The database in the middle of a checkpoint: its first page is there already, and tells of pages that are not."""
    path, torn = tmp_path / "consensus.sqlite", tmp_path / "torn.sqlite"
    consensus = SqliteConsensus(path, create=True)
    for seqno in range(50):
        assert consensus.compare_and_set("s", after(seqno), bytes(10_000))
    log = Path(f"{path}-wal").read_bytes()
    before = path.read_bytes()
    consensus.close()  # the last one to go writes the log back
    later = path.read_bytes()
    assert len(before) < len(later)
    torn.write_bytes(later[:4096] + before[4096:])
    Path(f"{torn}-wal").write_bytes(log)
    opened = SqliteConsensus(torn)
    assert [row.seqno for row in opened.scan("s", SeqNo(0), 100)] == list(range(1, 51))
    opened.close()


def test_who_only_reads_what_a_killed_writer_left_keeps_nobody_in_its_process_from_writing(path: Path) -> None:
    path.parent.mkdir()
    killed_writer(path, 1)
    reading, stopped = ReadOnlySqliteConsensus(path), threading.Event()
    assert len(reading.scan("s", SeqNo(0), 99)) == 1

    def read() -> list[int]:
        found = []
        while not stopped.is_set():
            found.append(len(reading.scan("s", SeqNo(0), 99)))
        return found

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            writing = SqliteConsensus(path)
            for n in range(1, 20):
                assert writing.compare_and_set("s", after(n), b"x")
                assert len(reading.scan("s", SeqNo(0), 99)) == n + 1
        finally:
            stopped.set()
        assert all(reader.result() == sorted(reader.result()) for reader in readers), "no read went back"
    writing.close()
    reading.close()
