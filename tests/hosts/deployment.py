"""PostgreSQL, S3, two shard servers and clients, each on a host of its own, and what the clients learn."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

import persist_lib as persist
from persist_lib.testing.servers import CREDENTIALS, PostgresServer, S3Server
from tests.faults.shard_servers import Server, Told
from tests.hosts.client_program import Wait
from tests.hosts.network import SUBNET, Network
from tests.tls import Authority
from tests.torture.test_minters import faked

CLIENTS = {
    "one": ("write:0", "write:1", "pair:2", "listen", "look", "hold"),
    "two": ("write:3", "pair:4", "look", "tend"),
}
"""What runs on the hosts of clients. What `one` names has the store behind the servers too, and `two` has not."""
SERVERS = ("a", "b")
CLOCKED = ("db", *SERVERS, "one")
PATIENCE_S, CHECK_S = 60.0, 900.0
"""How long clients may take to continue, and the check of a long history to read all of it."""


class Postgres(PostgresServer):
    """One that other hosts may use."""

    def start(self) -> None:
        rules = self.data / "pg_hba.conf"
        if (line := f"host all all {SUBNET}.0/24 trust\n") not in (text := rules.read_text()):
            rules.write_text(text + line)
        super().start()


class Phase(NamedTuple):
    """What was broken, from when to when, and when all clients had continued after it, on the monotonic clock."""

    kind: str
    began: float
    healed: float
    continued: float
    slowest: str
    """The client and the role that continued last."""


class Client:
    """A process with the roles of a client, on a host."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.said: dict[str, Any] = {}
        """The newest of what it said of each thing."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said |= json.loads(line)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def heard(self, *names: str, within_s: float = PATIENCE_S) -> Any:
        """Wait until it has said one of these things, and return that."""
        wait(
            lambda: any(name in self.said for name in names), lambda: f"none of {names} was said: {self.said}", within_s
        )  # fmt: skip
        return next(self.said[name] for name in names if name in self.said)

    def passing(self, what: str) -> Callable[[], bool]:
        """Whether the role that shows this has done more than by now."""
        before = self.said[what]
        return lambda: bool(self.said[what] > before)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def wait(until: Callable[[], bool], why: Callable[[], str], within_s: float = PATIENCE_S) -> None:
    patience = persist.Runtime().deadline(within_s)
    while not until():
        assert not patience.has_passed(), why()
        time.sleep(0.02)


class Deployment:
    """Hosts `db`, `s3`, `a`, `b`, `one` and `two`, with all that runs there.

    Where they are `clocked`, all hosts but `s3` and `two` have clocks of their own, by libfaketime: see `set_clocks`.
    """

    def __init__(self, folder: Path, seed: int = 7, *, clocked: bool = False) -> None:
        self.folder, self.phases, self._clocked = folder, list[Phase](), clocked
        self._stack = ExitStack()
        self.network = Network(["db", "s3", *SERVERS, *CLIENTS], seed)
        self._stack.callback(self.network.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def set_clocks(self, **seconds: float) -> None:
        """Make the clocks of hosts wrong by so many seconds, from now on. Monotonic clocks stay as they are."""
        for name, ahead_s in seconds.items():
            changed = self._clock(name).with_suffix(".new")
            changed.write_text(f"{ahead_s:+.0f}")
            changed.rename(self._clock(name))

    def clock_of(self, name: str) -> float:
        """By how many seconds a host's clock is ahead, as a program there tells it."""
        command = [*self.network[name].command, sys.executable, "-c", "import time; print(time.time())"]
        done = subprocess.run(command, env={**os.environ, **self._faked(name)}, capture_output=True, check=True)
        return float(done.stdout) - time.time()

    def _clock(self, name: str) -> Path:
        return self._clocks / f"clock-{name}"

    def _faked(self, name: str) -> dict[str, str]:
        return faked(self._clock(name)) if self._clocked and name in CLOCKED else {}

    def _make_clocks(self) -> None:
        self._clocks = Path(self._stack.enter_context(TemporaryDirectory(prefix="clocks-")))
        self._clocks.chmod(0o755)  # PostgreSQL is another user's
        self.set_clocks(**dict.fromkeys(CLOCKED, 0))

    def _start_again(self, server: Any, name: str) -> None:
        """Start a server again, by the clock of its host."""
        server.stop()
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in self._faked(name).items():
                patch.setenv(variable, value)
            self.network[name].run(server.start)

    def _start(self) -> None:
        net, folder = self.network, self.folder
        self._make_clocks()
        with ThreadPoolExecutor() as pool:
            postgres, s3 = (pool.submit(self._on, *given) for given in (("db", Postgres), ("s3", S3Server)))
        self.postgres, self.s3 = postgres.result(), s3.result()
        if self._clocked:
            self._start_again(self.postgres, "db")
        self.url, self.consensus = self.s3.location("hosts"), self.postgres.url
        token = secrets.token_urlsafe(32)
        tokens = folder / "clients.toml"
        tokens.write_text(f'[clients.all]\ntoken = "{token}"\nrights = {{ "*" = ["read", "append", "maintain"] }}\n')
        self.env = {**os.environ, **CREDENTIALS, "PERSIST_TOKEN": token}
        made = "import sys, persist_lib; persist_lib.open(*sys.argv[1:]).close()"
        command = [*net["one"].command, sys.executable, "-c", made, self.url, self.consensus]
        subprocess.run(command, env=self.env, check=True)
        authority = Authority(folder, "authority")
        with ThreadPoolExecutor() as pool:
            starting = {name: pool.submit(self._serve, name, authority, tokens) for name in SERVERS}
        self.servers = {name: server.result() for name, server in starting.items()}
        at = ",".join(f"{net[name].address}:{server.port}" for name, server in self.servers.items())
        served = f"persists://{at}?ca={authority.bundle}"
        self.clients = {
            "one": self._client("one", f"{served}&store={quote(self.consensus, safe='')}"),
            "two": self._client("two", served),
        }
        self.continues()

    def _on(self, name: str, kind: type[Any]) -> Any:
        host = self.network[name]
        made = host.run(type(kind.__name__, (kind,), {"address": host.address}))
        self._stack.callback(made.close)
        return made

    def _serve(self, name: str, authority: Authority, tokens: Path) -> Server:
        host = self.network[name]
        chain, key = authority.certificate(name, host.address)
        options = ["--token-file", str(tokens), "--tls-cert", str(chain), "--tls-key", str(key)]
        env = {**CREDENTIALS, **self._faked(name)}
        on = [*host.command, "env", *(f"{key}={value}" for key, value in env.items())]
        server = Server(self.url, self.consensus, host.address, on=on, options=options)
        self._stack.callback(self._end_server, server)
        return server

    def _client(self, name: str, served: str) -> Client:
        words = [self.url, self.consensus, served, *CLIENTS[name]]
        command = [*self.network[name].command, sys.executable, "-m", "tests.hosts.client_program", *words]
        client = Client(command, {**self.env, **self._faked(name)})
        self._stack.callback(client.close)
        return client

    @staticmethod
    def _end_server(server: Server) -> None:
        if server.process is not None and server.process.poll() is None:
            server.kill()

    @contextmanager
    def broken(self, kind: str, continuing: str = "") -> Iterator[None]:
        """Note a phase: what is broken within, and when all clients continue after it.

        The clients that are named in `continuing` have to continue before it is healed.
        """
        began = time.monotonic()
        try:
            yield
            if continuing:
                self.continues(*continuing.split())
        finally:
            self.network.heal()
        healed = time.monotonic()
        slowest = self.continues()
        self.phases.append(Phase(kind, began, healed, time.monotonic(), slowest))

    def continues(self, *names: str) -> str:
        """Wait until each role of these clients, or of all, has done more than it had. Returns the last one."""
        left: dict[str, Callable[[], bool]] = {}
        for name in names or self.clients:
            client = self.clients[name]
            client.heard("at")
            left |= {f"{name}'s {what}": client.passing(what) for what in client.said if what != "at"}
        last = ""

        def all_have() -> bool:
            nonlocal last
            for what in [what for what, has_passed in left.items() if has_passed()]:
                last = what
                del left[what]
            return not left

        wait(all_have, lambda: f"these do not continue: {[*left]}")
        return last

    def check(self) -> dict[str, Any]:
        """End the clients. Raise AssertionError if something is lost, doubled or in the wrong order."""
        files = {name: self.folder / f"{name}.told" for name in self.clients}
        for name, client in self.clients.items():
            client.tell(f"stop {files[name]}")
        for client in self.clients.values():
            assert client.heard("stopped") == []
        first = self.clients["one"]
        first.tell(f"check {files['two']}")
        found = first.heard("checked", "broken", within_s=CHECK_S)
        assert isinstance(found, dict), found
        told = {name: pickle.loads(file.read_bytes()) for name, file in files.items()}
        self.appends: dict[str, list[Told]] = {name: of["appends"] for name, of in told.items()}
        self.waits: dict[str, list[Wait]] = {name: of["waits"] for name, of in told.items()}
        return found

    def waited_for(self, name: str, phase: Phase) -> list[str]:
        """What the appends of a client waited for in a phase, if for long: from when to when after it began."""
        return [
            f"{began - phase.began:.1f} to {ended - phase.began:.1f} s: {what}"
            for began, ended, what in self.waits[name]
            if what.startswith("write") and began < phase.continued and ended > phase.began
        ]

    def pauses(self, phase: Phase) -> dict[str, tuple[float, float]]:
        """By client: the longest time in a phase without an append answered, and how long after its end one was."""
        found = {}
        for name, told in self.appends.items():
            ends = sorted(one.ended for one in told)
            within = [end for end in ends if phase.began < end < phase.continued]
            after = min((end for end in within if end >= phase.healed), default=phase.continued)
            longest = max(later - earlier for earlier, later in pairwise([phase.began, *within, after]))
            found[name] = (longest, after - phase.healed)
        return found

    def close(self) -> None:
        self.network.heal()
        self._stack.close()
