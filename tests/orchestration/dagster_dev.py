"""A real `dagster dev`, started and stopped as a user would, and asked over GraphQL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class DagsterDev:
    """The web server's address."""

    url: str

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """One GraphQL request; its data."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        assert "errors" not in found, found
        data: dict[str, Any] = found["data"]
        return data


@contextmanager
def dagster_dev(home: Path, workspace: Path, env: Mapping[str, str]) -> Iterator[DagsterDev]:
    """`dagster dev` with the repository's dagster.yaml, until the block ends."""
    home.mkdir(parents=True)
    (home / "dagster.yaml").symlink_to(ROOT / "dagster.yaml")
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "dev",
        "-w",
        str(workspace),
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **env, "DAGSTER_HOME": str(home)}, cwd=ROOT, stdout=log, stderr=log,
            preexec_fn=restore_interrupts, start_new_session=True,  # noqa: PLW1509 - it takes no lock
        )  # fmt: skip
    dev = DagsterDev(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: is_up(dev.url, server, home / "log"), 120, "dagster dev serves")
        yield dev
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=30)
        finally:
            end_group(server.pid)


def restore_interrupts() -> None:
    """SUBTLE: Dagster gives SIGTERM what it finds at SIGINT, and a shell's background job finds it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_group(pid: int) -> None:
    """Code servers live on for a while after their parent."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_up(url: str, server: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the web server answers."""
    assert server.poll() is None, log.read_text()[-3000:]
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(is_so: Callable[[], object], seconds: float, what: str) -> Any:
    """Ask again and again; answers the first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        time.sleep(0.5)
    return answer


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
