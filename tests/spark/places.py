"""Places where Spark runs, each on the loopback interface: a standalone cluster, and a server of Spark Connect."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyspark

from jobs.java import find_java_home
from persist_lib.testing.servers import free_port
from tests.jvms import LIGHT
from tests.unit.spark.worlds import TINY

START_S = 90.0
ROOT = Path(__file__).parent.parent.parent
HOME = Path(pyspark.__file__).parent
CONF = (
    "spark.driver.host 127.0.0.1\nspark.executor.memory 512m\nspark.executor.cores 1\nspark.cores.max 2\n"
    f"spark.executor.extraJavaOptions {LIGHT}\n"
)
"""Of a program on a cluster (`spark-defaults.conf`): an executor of one core on each of its two workers."""


def environment(**more: str) -> dict[str, str]:
    """What Spark's own programs need."""
    return {
        **os.environ, "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": find_java_home(),
        "PYSPARK_PYTHON": sys.executable, **more,
    }  # fmt: skip


def started(program: str, place: Mapping[str, str], asked: object) -> subprocess.Popen[str]:
    """A program of this folder at work with Spark at this place, which was asked so."""
    path = Path(__file__).parent / program
    process = subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, start_new_session=True,
        env=environment(PYTHONPATH=str(ROOT), PERSIST_CONFIG=json.dumps(TINY), **place),
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(asked))
    process.stdin.close()
    process.stdin = None
    return process


def answers(process: subprocess.Popen[str]) -> tuple[Any, str]:
    """What such a program answers at its end, and all that it printed."""
    try:
        out, errors = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = [line for line in out.splitlines() if line.startswith("ANSWERS ")]
    assert found, errors[-3000:]
    return json.loads(found[0].removeprefix("ANSWERS ")), out + errors


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Server:
    """A server of Spark on two cores, of this class and with this configuration."""

    _class: str
    _port: int

    def __init__(self, folder: Path, conf: Mapping[str, str], **env: str) -> None:
        self._log = folder / "server.log"
        conf = {
            "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": LIGHT, **conf,
        }  # fmt: skip
        command = [
            str(HOME / "bin" / "spark-submit"), "--class", self._class,
            "--master", "local[2,4]", "--driver-memory", "700m",
            *[word for name, value in conf.items() for word in ("--conf", f"{name}={value}")], "spark-internal",
        ]  # fmt: skip
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, cwd=folder,
                env=environment(SPARK_NO_DAEMONIZE="1", **env),
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        stop(self._process)


class ConnectServer(_Server):
    """A server of Spark Connect."""

    _class = "org.apache.spark.sql.connect.service.SparkConnectServer"

    def __init__(self, folder: Path, conf: Mapping[str, str] = MappingProxyType({}), **env: str) -> None:
        self._port = free_port()
        self.url = f"sc://127.0.0.1:{self._port}"
        at = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(self._port)}
        super().__init__(folder, {**at, **conf}, **env)


class ThriftServer(_Server):
    """Spark's server for JDBC. Its own catalog is in memory, and its lists of running statements in its folder."""

    _class = "org.apache.spark.sql.hive.thriftserver.HiveThriftServer2"

    def __init__(self, folder: Path, conf: Mapping[str, str], **env: str) -> None:
        self._port = free_port()
        self.url = f"jdbc:hive2://127.0.0.1:{self._port}"
        at = {
            "spark.hive.server2.thrift.bind.host": "127.0.0.1", "spark.hive.server2.thrift.port": str(self._port),
            "spark.hadoop.hive.server2.thrift.bind.host": "127.0.0.1",
            "spark.hadoop.hive.server2.thrift.port": str(self._port),
            "spark.sql.catalogImplementation": "in-memory",
        }  # fmt: skip
        super().__init__(folder, {**at, **conf}, **env)

    def ask(self, *statements: str) -> list[list[str]]:
        """What the last of these statements answers a JDBC client (Spark's `beeline`), all as text."""
        command = [
            str(HOME / "bin" / "beeline"), "-u", self.url, "-n", "user", "--silent=true", "--showHeader=false",
            "--outputformat=tsv2", *[word for one in statements for word in ("-e", one)],
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        assert ran.returncode == 0, ran.stderr[-2000:]
        lines = (re.sub(r"^(0: jdbc:\S+> )+", "", line) for line in ran.stdout.splitlines())  # its prompts
        return [line.split("\t") for line in lines if line]


class Cluster:
    """A master and two workers of one core each on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ui = free_port()
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(self._ui))
        for number in range(2):
            self._start(
                "worker.Worker", self.url, "--host", "127.0.0.1", "--cores", "1", "--memory", "700m",
                "--webui-port", str(free_port()), "--work-dir", str(folder / f"work{number}"),
            )  # fmt: skip

    def wait(self) -> None:
        """Until both workers are there."""
        deadline = time.monotonic() + START_S
        while self.state().get("aliveworkers") != 2:
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def _start(self, daemon: str, *arguments: str) -> None:
        env = environment(SPARK_DAEMON_MEMORY="256m")
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{daemon}", *arguments]
        with (self._folder / "log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))

    def state(self) -> dict[str, object]:
        """What the master says of itself; nothing while it starts."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ui}/json/", timeout=5) as answer:
                found: dict[str, object] = json.load(answer)
                return found
        except (OSError, ValueError):  # it starts, and may answer with half a page
            return {}

    def executors(self) -> list[int]:
        """The pids of the executors that run now: children of our workers."""
        return self._below(b"CoarseGrainedExecutorBackend")

    def python_workers(self) -> list[int]:
        """The pids of the Python processes of our executors."""
        return self._below(b"pyspark.daemon")

    def _below(self, word: bytes) -> list[int]:
        """The pids of processes with a word in their command, which work in our folder or name it."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes()
            except OSError:
                continue
            if word in command and str(self._folder).encode() in command + _cwd(entry.parent):
                found.append(int(entry.parent.name))
        return found

    def stop(self) -> None:
        """End the workers, whose executors go with them, then the master."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            stop(process)


def _cwd(process: Path) -> bytes:
    try:
        return os.fsencode((process / "cwd").readlink())
    except OSError:
        return b""
