"""A flipped bit in the database of a location: rows, or an error at once that names the damaged file.

Each damage is looked at by a child process, within a time: a store may wait for something that never comes.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
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
from persist_lib.location.wrap.deadline import RetryingConsensus
from persist_lib.runtime.ambient import Runtime
from tests.circles import by_day

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
