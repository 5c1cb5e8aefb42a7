"""The cache: what it spares the store, how much it holds, and that nothing wrong ever comes out of it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.config import MIB
from persist_lib.errors import Corrupt
from persist_lib.format.digest import CHUNK, digest
from persist_lib.location import open_location
from persist_lib.location.wrap.around import AroundBlob, Operation
from persist_lib.location.wrap.chunk_cache import FOLDER, CacheFiles
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import contents_of
from persist_lib.testing.faults import RecordingLocation
from tests.shelf import Shelf, files_of

ROOT = Path(__file__).parents[3]
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
OBJECTS = persist.Config(inline_bytes=0)
QUIET = Runtime(background=False)


def size_of(path: Path) -> int:
    total = 0
    for file in files_of(path):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_chunk_is_fetched_once_whether_it_is_asked_for_alone_or_with_its_object() -> None:
    shelf = Shelf(memory_bytes=64 * MIB)
    shelf.add("s/large", 4 * CHUNK + 1000)
    assert shelf.read("s/large", CHUNK, 2 * CHUNK) == ["get_range"]
    assert shelf.read("s/large", CHUNK, 2 * CHUNK) == []
    assert shelf.read("s/large", 4 * CHUNK) == ["get_range"]
    assert shelf.read("s/large") == ["get_range", "get_range"], "the first chunk, then the third and fourth together"
    assert shelf.read("s/large") == []
    assert shelf.read("s/large", 0, 3 * CHUNK) == []
    counts = shelf.cache.counts()
    assert (counts.hits, counts.misses) == (1 + 2 + 5 + 3, 1 + 1 + 3)
    assert counts.missed_bytes == len(shelf.objects["s/large"])
    assert counts.hit_rate == pytest.approx(11 / 16)
    shelf.add("s/other", 2 * CHUNK)
    assert shelf.read("s/other") == ["get"], "nothing of it is there: one request for all"
    assert shelf.read("s/large", 5, 10) == ["get_range"], "no chunk: not the cache's business"
    assert shelf.cache.counts().misses == 5 + 2


def test_memory_holds_what_was_used_last_and_no_more_than_it_may() -> None:
    shelf = Shelf(memory_bytes=10_000)
    for n in range(10):
        shelf.add(f"s/{n}", 3_000)
    shelf.add("s/too large", 10_001)
    for n in (0, 1, 2, 0, 3):
        shelf.read(f"s/{n}")
    assert shelf.cache.counts().memory_bytes == 9_000
    assert [shelf.read(f"s/{n}") for n in (0, 2, 3)] == [[], [], []]
    assert shelf.read("s/1") == ["get"], "the one not used for longest"
    assert shelf.read("s/too large") == shelf.read("s/too large") == ["get"]
    assert shelf.cache.counts().memory_bytes <= 10_000


def test_memory_holds_no_chunk_above_what_one_may_have() -> None:
    shelf = Shelf(memory_bytes=10_000, most=1_000)
    shelf.add("small", 1_000)
    shelf.add("large", 1_001)
    for _ in range(2):
        shelf.read("small")
        shelf.read("large")
    assert shelf.read("small") == []
    assert shelf.read("large") == ["get"]


def test_files_hold_what_was_used_last_and_no_more_than_they_may(tmp_path: Path) -> None:
    limit = 200_000
    shelf = Shelf(path=tmp_path, disk_bytes=limit)
    for n in range(100):
        shelf.add(f"s/{n}", 5_000)
    shelf.read("s/0")
    for n in range(1, 100):
        shelf.read(f"s/{n}")
        assert size_of(tmp_path) <= limit
        assert shelf.read("s/0") == [], "used again and again, it stays"
    counts = shelf.cache.counts()
    assert counts.stored == 100
    assert counts.evicted == 100 - len(files_of(tmp_path)) > 50
    assert size_of(tmp_path) >= limit / 2
    assert shelf.read("s/99") == []
    assert shelf.read("s/1") == ["get"]
    shelf.add("s/too large", limit // 2 + 1)
    assert shelf.read("s/too large") == shelf.read("s/too large") == ["get"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, 10),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "another's": lambda file: file.write_bytes(os.urandom(file.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_mended(tmp_path: Path, damage: str) -> None:
    shelf = Shelf(path=tmp_path)
    shelf.add("s/x", 5_000)
    shelf.read("s/x")
    [file] = files_of(tmp_path)
    DAMAGES[damage](file)
    assert shelf.read("s/x") == ["get"]
    assert shelf.cache.counts().damaged == 1
    assert shelf.read("s/x") == []
    assert shelf.cache.counts().hits == 1


def test_a_file_that_is_gone_or_is_no_file_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf(path=tmp_path)
    shelf.add("s/x", 5_000)
    shelf.read("s/x")
    files_of(tmp_path)[0].unlink()
    assert shelf.read("s/x") == ["get"]
    assert shelf.read("s/x") == []
    replace_by_folder(files_of(tmp_path)[0])
    with caplog.at_level(logging.WARNING, "persist.cache"):
        assert shelf.read("s/x") == shelf.read("s/x") == ["get"]
    assert len(caplog.records) == 1


def test_what_the_store_answered_wrongly_once_is_not_kept() -> None:
    class Flaky(AroundBlob):
        is_wrong = True

        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            found = call()
            return found[:-1] + b"?" if self.is_wrong and operation.kind == "get" else found

    location = open_location("memory:", create=True)
    flaky = Flaky(location.blob)
    flaky_location = replace(location, blob=flaky)
    cache = persist.CacheConfig()
    with persist.open(flaky_location, config=OBJECTS, cache=cache, runtime=QUIET) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
        with pytest.raises(Corrupt), read.snapshot(0, diff=True) as snapshot:
            snapshot.to_arrow()
        flaky.is_wrong = False
        with read.snapshot(0, diff=True) as snapshot:
            assert snapshot.to_arrow().num_rows == 1
        flaky.is_wrong = True
        with read.snapshot(0, diff=True) as snapshot:
            assert snapshot.to_arrow().num_rows == 1, "from the cache"
        counts = client.metrics().cache
        assert counts is not None
        assert (counts.hits, counts.misses, counts.damaged) == (1, 2, 0)


def test_a_folder_that_cannot_be_written_is_done_without_and_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    shelf = Shelf(path=tmp_path / "file")
    shelf.add("s/x", 5_000)
    shelf.add("s/y", 5_000)
    with caplog.at_level(logging.WARNING, "persist.cache"):
        for key in ("s/x", "s/y", "s/x"):
            assert shelf.read(key) == ["get"]
    assert len(caplog.records) == 1
    assert "reads go to the store instead" in caplog.text
    assert shelf.cache.counts().refused == 3


FULL_DISK = """
import resource, sys, os, logging
from pathlib import Path
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from tests.shelf import Shelf, files_of
shelf = Shelf(path=Path(sys.argv[1]))
shelf.add("s/small", 5_000); shelf.add("s/large", 50_000)
for _ in range(2):
    shelf.read("s/small"); shelf.read("s/large")
counts = shelf.cache.counts()
print(counts.hits, counts.misses, counts.refused, [file.stat().st_size for file in files_of(Path(sys.argv[1]))])
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_done_without_and_nothing_half_written_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, cwd=ROOT, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["persist.cache WARNING", "1 3 2 [5000]"]


def test_locations_do_not_see_each_others_chunks(tmp_path: Path) -> None:
    cache = persist.CacheConfig(path=str(tmp_path / "cache"), memory_bytes=0)
    with persist.open(f"file:{tmp_path}/one", config=OBJECTS) as client:
        client.open_writer("s", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 0, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name, expected in (("one", (0, 1)), ("one", (1, 0)), ("other", (0, 1))):
        with persist.open(f"file:{tmp_path}/{name}", cache=cache) as client, client.open_reader("s") as read:
            read.snapshot(0, diff=True).to_arrow()
            counts = client.metrics().cache
            assert counts is not None
            assert (counts.hits, counts.misses) == expected


class Counted:
    """A client with a cache on a location that records what it is asked for."""

    def __init__(self, cache: persist.CacheConfig) -> None:
        self.recording = RecordingLocation(open_location("memory:", create=True))
        config = persist.Config(inline_bytes=0, rollup_every=4, cache=cache)
        self.client = persist.open(self.recording.location, config=config, runtime=QUIET)

    def counts(self) -> Any:
        return self.client.metrics().cache


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    counted = Counted(persist.CacheConfig(path=str(tmp_path)))
    write = counted.client.open_writer("s", SCHEMA)
    for n in range(6):
        write.compare_and_append([{"id": id_, "word": f"w{n}"} for id_ in range(20)], n, n + 1)
    yield counted
    counted.client.close()


def test_a_snapshot_is_fetched_once_however_it_is_read(counted: Counted) -> None:
    with counted.client.open_reader("s") as read, read.snapshot(5, diff=True) as snapshot:
        expected = contents_of(snapshot.to_arrow())
        assert (counted.counts().hits, counted.counts().misses) == (0, 6)
        counted.recording.clear()
        assert contents_of(snapshot.to_arrow()) == expected
        assert contents_of(pa.concat_tables(snapshot.batches())) == expected
        assert sum(split.to_arrow(counted.client.reads).num_rows for split in snapshot.splits(3)) == 120
        assert counted.recording.count("get", "get_range") == 0
        counts = counted.counts()
        assert counts.misses == 6
        assert counts.memory_hits >= 18
        assert counts.hit_bytes >= 3 * snapshot.size


def test_listeners_share_what_one_of_them_fetched(counted: Counted) -> None:
    with counted.client.open_reader("s") as read:
        for _ in range(3):
            with read.listen(0, until=6, timeout=5) as events:
                assert sum(event.table.num_rows for event in events if isinstance(event, persist.Updates)) == 100
    assert (counted.counts().misses, counted.counts().hits) == (5, 10)


def test_what_was_deleted_can_still_be_read_from_the_cache_and_a_scrub_looks_at_the_store(counted: Counted) -> None:
    with counted.client.open_reader("s") as read:
        with read.snapshot(5, diff=True) as snapshot:
            expected = contents_of(snapshot.to_arrow())
        [gone, *_] = [entry.key for entry in counted.client.blob.list("s/") if "rollup" not in entry.key]
        counted.client.blob.delete(gone)
        with read.snapshot(5, diff=True) as snapshot:
            assert contents_of(snapshot.to_arrow()) == expected
        scrubbed = counted.client.scrub("s")
        assert len(scrubbed.damaged) == 1
        assert gone in scrubbed.damaged[0][1]


def test_maintenance_neither_uses_the_cache_nor_fills_it(counted: Counted, tmp_path: Path) -> None:
    before = counted.counts()
    for _ in range(2):
        counted.client.maintain("s")
    counted.client.scrub("s")
    counted.client.audit_orphans("s")
    after = counted.counts()
    assert (after.hits, after.misses, after.stored) == (before.hits, before.misses, before.stored)
    assert counted.recording.count("get") >= 6


READER = """
import sys
import persist_lib as persist
cache = persist.CacheConfig(path=sys.argv[2], memory_bytes=0)
with persist.open(sys.argv[1], cache=cache, read_only=True) as client, client.open_reader("s") as read:
    rows = read.snapshot().to_arrow().num_rows
    counts, gets = client.metrics().cache, client.metrics().cost.gets
print(rows, counts.disk_hits, counts.misses, gets)
"""


@pytest.mark.slow
def test_another_process_finds_what_this_one_read_rollups_too(tmp_path: Path) -> None:
    url, cache = f"file:{tmp_path}/data", str(tmp_path / "cache")
    with persist.open(url, config=OBJECTS, cache=persist.CacheConfig(path=cache)) as client:
        write = client.open_writer("s", SCHEMA)
        for n in range(3):
            write.compare_and_append([{"id": n, "word": "w"}], n, n + 1)
        client.roll_up("s", force=True)

    def read() -> list[int]:
        program = [sys.executable, "-W", "error", "-c", READER, url, cache]
        done = subprocess.run(program, capture_output=True, cwd=ROOT, check=True)
        return [int(word) for word in done.stdout.split()]

    assert read() == [3, 0, 4, 4], "three parts and the rollup"
    assert read() == [3, 4, 0, 0]


def size_at_rest(path: Path) -> int:
    """The same while no process deletes."""
    with (path / FOLDER / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        return size_of(path)


HAMMER = """
import random, sys
from pathlib import Path
from tests.shelf import Shelf
seed, limit = int(sys.argv[2]), int(sys.argv[3])
shelf = Shelf(path=Path(sys.argv[1]), disk_bytes=limit)
rng = random.Random(99)  # the same objects in every process
for n in range(60):
    shelf.objects[f"s/{n}"] = rng.randbytes(2_000 + 300 * n)
    shelf.store.set(f"s/{n}", shelf.objects[f"s/{n}"])
order = random.Random(seed)
for _ in range(400):
    shelf.read(f"s/{order.randrange(60)}")
counts = shelf.cache.counts()
print(counts.hits, counts.misses, counts.damaged, counts.refused)
"""


@pytest.mark.slow
def test_processes_share_a_folder_within_its_limit_and_read_nothing_wrong(tmp_path: Path) -> None:
    limit = 300_000
    program = [sys.executable, "-W", "error", "-c", HAMMER, str(tmp_path)]
    racers = [
        subprocess.Popen([*program, str(seed), str(limit)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in range(4)
    ]
    largest = 0
    while any(racer.poll() is None for racer in racers):
        if (size := size_of(tmp_path)) > limit:  # what was deleted while it was added up is counted with what came then
            size = size_at_rest(tmp_path)
        largest = max(largest, size)
        time.sleep(0.002)
    total = 0
    for out, err, code in [(*racer.communicate(), racer.returncode) for racer in racers]:
        assert code == 0, err.decode()
        hits, misses, damaged, _ = map(int, out.split())
        assert hits + misses == 400
        assert hits, "on a busy machine much is not stored, as others are at it"
        assert damaged == 0
        total += hits
    assert total > 100
    assert limit / 2 < max(largest, size_of(tmp_path)) <= limit
    assert not [file for file in files_of(tmp_path) if file.name.startswith(".")], "nothing half written is left"


def test_a_peer_that_is_paused_while_it_deletes_stops_nobody(tmp_path: Path) -> None:
    shelf = Shelf(path=tmp_path, disk_bytes=64_000)
    shelf.add("s/x", 5_000)
    shelf.add("s/y", 5_000)
    shelf.read("s/x")
    with (tmp_path / FOLDER / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert shelf.read("s/x") == []
        assert shelf.read("s/y") == shelf.read("s/y") == ["get"], "it is not stored, and read all the same"
    assert shelf.read("s/y") == ["get"]
    assert shelf.read("s/y") == []


def test_what_a_killed_process_left_half_written_is_deleted_in_its_turn(tmp_path: Path) -> None:
    shelf = Shelf(path=tmp_path, disk_bytes=100_000)
    shelf.add("s/0", 5_000)
    shelf.read("s/0")
    left = files_of(tmp_path)[0].with_name(".123-456-789")
    left.write_bytes(bytes(30_000))
    os.utime(left, (1, 1))
    for n in range(1, 20):
        shelf.add(f"s/{n}", 5_000)
        shelf.read(f"s/{n}")
        assert size_of(tmp_path) <= 100_000
    assert not left.exists()


def test_foreign_files_beside_the_cache_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "ab" / "photo.jpg"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(100_000))
    shelf = Shelf(path=tmp_path, disk_bytes=20_000)
    for n in range(10):
        shelf.add(f"s/{n}", 5_000)
        shelf.read(f"s/{n}")
    assert foreign.exists()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_that_was_forked_while_others_read_can_read(tmp_path: Path) -> None:
    shelf = Shelf(path=tmp_path, memory_bytes=20_000)
    shelf.add("s/x", 5_000)
    shelf.add("s/y", 5_000)
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            shelf.cache.get(digest(shelf.objects["s/x"]), 5_000)

    shelf.read("s/x")
    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            if not (child := os.fork()):
                signal.alarm(20)  # a lock that stays held would hang for ever
                os._exit(0 if shelf.read("s/x") == [] and shelf.read("s/y") in ([], ["get"]) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_cache_of_nothing_is_no_cache(tmp_path: Path) -> None:
    shelf = Shelf(path=tmp_path, disk_bytes=0, memory_bytes=0)
    shelf.add("s/x", 100)
    assert shelf.read("s/x") == shelf.read("s/x") == ["get"]
    assert files_of(tmp_path) == []


def test_the_limit_holds_for_eight_processes_that_last_looked_at_an_empty_folder(tmp_path: Path) -> None:
    limit = 640_000
    peers = [CacheFiles(str(tmp_path), "x", limit, Runtime().entropy) for _ in range(8)]
    for peer in peers:
        peer.put(os.urandom(16), bytes(5_000))  # looks, and may store the 64th part of the limit unseen
    first = peers[0]
    while size_of(tmp_path) < limit * 0.85:
        first.put(os.urandom(16), bytes(5_000))
    for peer in peers:
        for _ in range(10):
            peer.put(os.urandom(16), bytes(5_000))
            assert size_of(tmp_path) <= limit
