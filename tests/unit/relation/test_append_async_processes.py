"""Appends that wait, over threads, forks and the end of the program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import (
    Indeterminate,
    UpperMismatch,
)
from persist_lib.location import open_location
from persist_lib.testing import check_world, contents_of
from tests.gated import LONG_S, Gate
from tests.worlds import SCHEMA, row


def test_four_threads_with_one_counter_lose_nothing_and_keep_the_order(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(buffer_bytes=64 * 1024)) as client:
        write = client.open_writer("s", SCHEMA)
        counter, lock, futures = iter(range(10**6)), threading.Lock(), []

        def work(id_: int) -> None:
            for _ in range(250):
                with lock:
                    n = next(counter)
                    futures.append(write.append_async([row(id_, f"{n}", n)], n, n + 1))

        threads = [threading.Thread(target=work, args=(id_,)) for id_ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write.flush()
        done = [future.result(0) for future in futures]
        assert all(a.seqno <= b.seqno for a, b in pairwise(done))
        assert len({d.seqno for d in done}) < 1000, "they shared commits"
        with client.open_reader("s") as read:
            found = contents_of(read.snapshot(999, diff=True).to_arrow())
        assert sorted(int(word) for _, word in found) == list(range(1000))
        check_world(client, "s")


def test_appends_that_wait_use_no_thread(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data") as client:
        write = client.open_writer("s", SCHEMA)
        assert write.id
        before = threading.active_count()
        write.compare_and_append([row(0)], 0, 1)
        write.append([row(1, time=1)], 1, 2)
        assert threading.active_count() == before


def test_a_forked_child_hangs_in_nothing_and_its_parent_goes_on(tmp_path: Path) -> None:
    location = open_location(f"file:{tmp_path}/data", create=True)
    gate = Gate(location.consensus)
    client = persist.open(replace(location, consensus=gate))
    write = client.open_writer("s", SCHEMA)
    assert write.id
    gate.shut()
    futures = [write.append_async([row(0)], 0, 1)]
    assert gate.waiting.wait(LONG_S)
    futures += [write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    told = tmp_path / "told"
    if (child := os.fork()) == 0:
        try:
            for future in futures:
                with pytest.raises(Indeterminate, match="forked"):
                    future.result(1)
            write.flush(timeout=1)
            told.write_text("well")
        finally:
            os._exit(0)
    wait_for_child(child)
    gate.open.set()
    assert [future.result(LONG_S).upper for future in futures][-1] == persist.at(4)
    if (child := os.fork()) == 0:
        try:
            done = write.append_async([row(4, time=4)], 4, 5).result(10)
            write.compare_and_append([row(5, time=5)], 5, 6)
            told.write_text(f"{told.read_text()} {done.upper}")
        finally:
            os._exit(0)
    wait_for_child(child)
    assert told.read_text() == "well [5]"
    assert write.fetch_upper() == persist.at(6)
    client.close()


def test_a_child_forked_in_the_middle_of_a_commit_can_append(tmp_path: Path) -> None:
    location = open_location(f"file:{tmp_path}/data", create=True)
    gate = Gate(location.consensus)
    client = persist.open(replace(location, consensus=gate))
    write = client.open_writer("s", SCHEMA)
    assert write.id
    gate.shut()
    outstanding = write.append_async([row(0)], 0, 1)
    assert gate.waiting.wait(LONG_S)
    told = tmp_path / "told"
    if (child := os.fork()) == 0:
        try:
            gate.open.set()
            done = write.append_async([row(1)], 0, 1).result(10)
            told.write_text(f"{write.compare_and_append([row(2, time=1)], 1, 2, timeout=10).upper} {done.upper}")
        finally:
            os._exit(0)
    wait_for_child(child)
    assert told.read_text() == "[2] [1]"
    gate.open.set()
    assert isinstance(outstanding.exception(LONG_S), UpperMismatch)
    client.close()


def wait_for_child(child: int) -> None:
    end = time.monotonic() + LONG_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)


SCRIPT = """
import sys
import persist_lib as persist
schema = persist.Schema(key={{"id": "int64"}}, value={{"word": "string"}})
config = persist.Config(inline_bytes={inline}, part_bytes=64 * 1024, timeout_s=3600)
client = persist.open("file:{path}", config=config)
write = client.open_writer("s", schema, batching={batching})
for n in range(50):
    write.append_async([{{"id": i, "word": "x" * 100, "_time": n}} for i in range(200)], n, n + 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["None", "persist.Batching(bytes=10**9, age_s=3600)"])
@pytest.mark.parametrize("inline", [0, 16 * 1024])
def test_a_program_that_just_ends_has_written_what_it_accepted(tmp_path: Path, batching: str, inline: int) -> None:
    """At once: what is held back waits for nothing more."""
    script = SCRIPT.format(path=tmp_path / "data", batching=batching, inline=inline)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    with persist.open(f"file:{tmp_path}/data") as client:
        assert client.inspect("s").state.upper == persist.at(50)
        check_world(client, "s")
