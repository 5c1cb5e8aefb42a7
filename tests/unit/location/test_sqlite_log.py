"""A write-ahead log of SQLite with a flipped bit: SQLite would end it there, and drop what follows in silence."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from persist_lib.errors import Corrupt
from persist_lib.location.sqlite.consensus import SqliteConsensus
from persist_lib.location.sqlite.log_file import HEADER, check_log

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


@pytest.mark.parametrize("at", [0, 9, 17, 30, *(HEADER.size + 5 * FRAME + inner for inner in (0, 6, 9, 18, 24, 4000))])
def test_a_flipped_bit_is_found_before_sqlite_drops_what_follows(killed: Path, tmp_path: Path, at: int) -> None:
    frame = 0 if at < HEADER.size else at - (at - HEADER.size) % FRAME
    assert f"damaged at byte {frame}:" in (outcome(killed, tmp_path, flipped(at)) or "nothing")


def test_a_torn_last_transaction_and_a_whole_log_are_no_damage(killed: Path, tmp_path: Path) -> None:
    size = (killed.parent / "db-wal").stat().st_size
    for damage in (
        lambda data: data,
        lambda data: data[:-100],
        lambda data: data[: HEADER.size + 3 * FRAME + 11],
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
        return flipped(HEADER.size + 5 * FRAME + 90)(flipped(HEADER.size + 12 * FRAME + 90)(data))

    assert "frame 6 does not verify" in (outcome(killed, tmp_path, twice) or "nothing")


def test_a_location_whose_log_is_damaged_is_not_opened(tmp_path: Path) -> None:
    first = SqliteConsensus(tmp_path / "db")
    for number in range(5):
        assert first.compare_and_set(f"key{number}", None, b"data")
    shutil.copytree(tmp_path, tmp_path / "copy")
    first.close()
    log = tmp_path / "copy" / "db-wal"
    log.write_bytes(flipped(HEADER.size + FRAME + 100)(log.read_bytes()))
    before = log.read_bytes()
    with pytest.raises(Corrupt, match=r"db-wal, the write-ahead log .* is damaged"):
        SqliteConsensus(tmp_path / "copy" / "db")
    assert log.read_bytes() == before, "it is left as it was"
