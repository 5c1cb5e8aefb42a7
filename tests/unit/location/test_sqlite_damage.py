"""A flipped bit in the database of a location: rows, or an error at once that names the damaged file.

Each damage is looked at by a child process, within a time: a store may wait for something that never comes. In a
write-ahead log, SQLite would end it there, and drop what follows in silence.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from persist_lib.errors import Corrupt, InvalidUsage, NewerFormat, PersistError
from persist_lib.ids import SeqNo
from persist_lib.location.api import Consensus, Newest
from persist_lib.location.sqlite.consensus import ReadOnlySqliteConsensus, SqliteConsensus
from persist_lib.location.sqlite.log_file import HEADER as HEAD
from persist_lib.location.sqlite.log_file import check_log
from persist_lib.location.wrap.deadline import RetryingConsensus
from persist_lib.runtime.ambient import Runtime
from tests.circles import by_day
from tests.counted import count

WITHIN_S = 20.0
HEADER = 100
KEYS = [f"shard{number}" for number in range(5)]
OF_THE_HEADER = [(at, bit) for at in (16, 18, 19, 21, 44, 45, 46, 47, 56, 59) for bit in (0, 2, 7)]
SAMPLED = 40


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some keys, of which each has some rows, small and large, in a database without a log."""
    path = tmp_path_factory.mktemp("sound") / "consensus.sqlite"
    store = SqliteConsensus(path)
    for key in KEYS:
        newest = None
        for number in range(6):
            assert store.compare_and_set(key, newest, b"%d " % number * (2 + 900 * (number == 3)))
            newest = newest_of(store, key)
    store.close()
    return path


def newest_of(store: Consensus, key: str) -> Newest | None:
    row = store.head(key)
    return None if row is None else row.newest


def opened(path: Path, *, reads_only: bool) -> Consensus:
    store = ReadOnlySqliteConsensus(path) if reads_only else SqliteConsensus(path, create=False)
    return RetryingConsensus(store, Runtime())


def calls(store: Consensus, *, reads_only: bool) -> Iterator[Callable[[], Any]]:
    yield lambda: list(store.list_keys())
    yield store.heads
    for key in KEYS:
        yield partial(store.scan, key, SeqNo(0), 100)
        yield partial(store.heads, [key])
        if not reads_only:
            yield partial(lambda one: store.compare_and_set(one, newest_of(store, one), b"new"), key)
    if not reads_only:
        yield lambda: store.compare_and_set("new", None, b"first")


def said_of(path: Path, *, reads_only: bool) -> set[str]:
    """What is wrong with what is said of a database: nothing, or what must not be."""
    wrong: set[str] = set()

    def tell(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Corrupt as error:
            if str(path) not in error.message:
                wrong.add(f"UNNAMED {error.message}")
        except (InvalidUsage, NewerFormat) as error:  # its number says that it is of another program, or release
            if str(path) not in error.message:
                wrong.add(f"UNNAMED {error.message}")
        except BaseException as error:  # noqa: BLE001 - what it is, is asked for
            wrong.add(f"{'' if isinstance(error, PersistError) else 'UNTYPED '}{type(error).__name__}: {error}")
        return None

    if (store := tell(lambda: opened(path, reads_only=reads_only))) is not None:
        for call in calls(store, reads_only=reads_only):
            tell(call)
        with suppress(AttributeError):
            store.close()
    return wrong


def in_a_child(path: Path, *, reads_only: bool) -> str:
    """The same, said by a child process within a time."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, "\n".join(said_of(path, reads_only=reads_only)).encode())
        finally:
            os._exit(0)
    os.close(write)
    said, deadline = b"", time.monotonic() + WITHIN_S
    with open(read, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 16)):
                break
            said += part
        else:
            os.kill(pid, signal.SIGKILL)
            said = b"HANG"
    code = os.waitpid(pid, 0)[1]
    return said.decode() if said or not code else f"CRASH {code}"


def flips(data: bytes) -> list[tuple[int, int]]:
    chance = random.Random(7)
    used = [at for at in range(HEADER, len(data)) if data[at]]
    return OF_THE_HEADER + [(at, chance.randrange(8)) for at in chance.sample(used, SAMPLED)]


@pytest.mark.parametrize("reads_only", [False, True], ids=["writes", "reads only"])
def test_a_flipped_bit_is_told_at_once_with_the_file_or_does_no_harm(
    database: Path, tmp_path: Path, reads_only: bool
) -> None:
    data, found = database.read_bytes(), {}
    for at, bit in by_day(flips(data), 2):
        path = tmp_path / "work" / database.name
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        count("corruptions", made=1)
        if said := in_a_child(path, reads_only=reads_only):
            found[at, bit] = said
    assert found == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "ALTER TABLE consensus RENAME TO other",
        "ALTER TABLE consensus RENAME COLUMN key TO other",
        "UPDATE consensus SET key = CAST(x'ff' AS TEXT) WHERE key = 'shard0' AND seqno = 6",
    ],
)
def test_damage_to_the_schema_or_to_text_is_no_reason_to_try_again(database: Path, tmp_path: Path, wrong: str) -> None:
    path = Path(shutil.copy(database, tmp_path))
    other = apsw.Connection(str(path))
    other.execute(wrong)
    other.close()
    for kind in (ReadOnlySqliteConsensus, SqliteConsensus):
        store = kind(path)
        for call in (store.heads, store.list_keys):
            with pytest.raises(Corrupt, match=f"{path.name} is damaged"):
                call()
        store.close()
    if wrong.startswith("ALTER"):
        store = SqliteConsensus(path)
        with pytest.raises(Corrupt, match=f"{path.name} is damaged"):
            store.compare_and_set(KEYS[0], None, b"new")
        store.close()


FRAME = 24 + 4096
ROWS = 30


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as a killed process leaves it: one row a transaction, all of them in the log."""
    folder = tmp_path_factory.mktemp("killed")
    connection = sqlite3.connect(folder / "db")
    connection.execute("PRAGMA journal_mode=wal")
    connection.execute("CREATE TABLE t (x)")
    for number in range(ROWS):
        connection.execute("INSERT INTO t VALUES (?)", (number,))
        connection.commit()
    (folder / "as-it-was").mkdir()
    for path in folder.glob("db*"):
        shutil.copy(path, folder / "as-it-was")
    connection.close()
    return folder / "as-it-was" / "db"


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def outcome(killed: Path, folder: Path, damage: Callable[[bytes], bytes]) -> str | None:
    """What is said of the log; None: nothing."""
    shutil.copytree(killed.parent, folder, dirs_exist_ok=True)
    log = folder / "db-wal"
    log.write_bytes(damage(log.read_bytes()))
    try:
        check_log(folder / "db")
    except Corrupt as error:
        return error.message
    return None


@pytest.mark.parametrize("at", [0, 9, 17, 30, *(HEAD.size + 5 * FRAME + inner for inner in (0, 6, 9, 18, 24, 4000))])
def test_a_flipped_bit_is_found_before_sqlite_drops_what_follows(killed: Path, tmp_path: Path, at: int) -> None:
    frame = 0 if at < HEAD.size else at - (at - HEAD.size) % FRAME
    assert f"damaged at byte {frame}:" in (outcome(killed, tmp_path, flipped(at)) or "nothing")


def test_a_torn_last_transaction_and_a_whole_log_are_no_damage(killed: Path, tmp_path: Path) -> None:
    size = (killed.parent / "db-wal").stat().st_size
    for damage in (
        lambda data: data,
        lambda data: data[:-100],
        lambda data: data[: HEAD.size + 3 * FRAME + 11],
        lambda data: data[:20],
        flipped(size - 50),
        lambda data: data[:-FRAME] + b"\0" * FRAME,
        lambda data: data + b"\7" * FRAME,
    ):
        assert outcome(killed, tmp_path, damage) is None


def appended(killed: Path, folder: Path, rows: int) -> bytes:
    """The log after one more transaction, by a process that came after the killed one."""
    shutil.copytree(killed.parent, folder)
    connection = sqlite3.connect(folder / "db")
    connection.execute("PRAGMA cache_size=2000")
    for number in range(rows):
        connection.execute("INSERT INTO t VALUES (?)", (bytes([number]) * 3000,))
    connection.commit()
    log = (folder / "db-wal").read_bytes()
    connection.close()
    return log


def test_what_several_failed_transactions_left_behind_the_end_is_no_damage(killed: Path, tmp_path: Path) -> None:
    """Each was written where the one before had been, whole and with its last frame, and its sync failed."""
    left = b""
    for rows in (9, 4, 1):
        log = appended(killed, tmp_path / str(rows), rows)
        left = log + left[len(log) :]
    assert outcome(killed, tmp_path / "left", lambda _: left) is None
    connection = sqlite3.connect(tmp_path / "left" / "db")
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (ROWS + 1,), "as SQLite does"
    connection.close()


def test_damage_in_two_places_is_found(killed: Path, tmp_path: Path) -> None:
    def twice(data: bytes) -> bytes:
        return flipped(HEAD.size + 5 * FRAME + 90)(flipped(HEAD.size + 12 * FRAME + 90)(data))

    assert "frame 6 does not verify" in (outcome(killed, tmp_path, twice) or "nothing")


def test_a_location_whose_log_is_damaged_is_not_opened(tmp_path: Path) -> None:
    first = SqliteConsensus(tmp_path / "db")
    for number in range(5):
        assert first.compare_and_set(f"key{number}", None, b"data")
    shutil.copytree(tmp_path, tmp_path / "copy")
    first.close()
    log = tmp_path / "copy" / "db-wal"
    log.write_bytes(flipped(HEAD.size + FRAME + 100)(log.read_bytes()))
    before = log.read_bytes()
    with pytest.raises(Corrupt, match=r"db-wal, the write-ahead log .* is damaged"):
        SqliteConsensus(tmp_path / "copy" / "db")
    assert log.read_bytes() == before, "it is left as it was"
