"""The servers to test with: they end when they are stopped, and with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from persist_lib.testing.servers import PostgresServer, S3Server

pytestmark = pytest.mark.slow
PROGRAM = """
import time
from persist_lib.testing.servers import PostgresServer, S3Server
log, blobs = PostgresServer(), S3Server()
print(log.process.pid, blobs.process.pid, log.root, blobs.root, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_and_what_they_stored_are_gone_when_their_starter_is(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as starter:
        assert starter.stdout is not None
        *pids, log, blobs = starter.stdout.readline().decode().split()
        starter.send_signal(how)
    left = {Path(f"/proc/{pid}") for pid in pids} | {Path(log), Path(blobs)}
    deadline = time.monotonic() + 20
    while any(path.exists() for path in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [path for path in left if path.exists()]


def test_they_are_there_for_the_length_of_a_block() -> None:
    with PostgresServer() as log, S3Server("mine") as blobs:
        with psycopg.connect(log.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert blobs.location("a/b").startswith("s3://mine/a/b?endpoint=http://127.0.0.1:")
        assert log.process is not None
        pids = [log.process.pid, blobs.process.pid]
    assert not [pid for pid in pids if _runs(pid)]
    assert not log.root.exists()
    assert not blobs.root.exists()
    log.remove()
    blobs.stop()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
