"""A schema registry of others, for tests: Apicurio's, by its API that is compatible with Confluent's.

`scripts/kafka-broker registry` puts it where this looks for it. It keeps schemas in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from signal import SIGKILL
from typing import Any
from urllib.request import Request, urlopen

import pytest

from jobs.java import JavaNotFound, find_java_home
from persist_lib.testing.servers import _Server
from tests.jvms import SMALL

HOME = Path(sys.prefix) / "registry"
ANSWER_S = 20.0


class KafkaRegistry(_Server):
    """A registry, until it is closed. Skips the test where there can be none."""

    name, at_death = "Apicurio Registry", SIGKILL

    def __init__(self) -> None:
        if not (HOME / "installed").exists():
            pytest.skip("not run: no registry (scripts/kafka-broker registry puts one into .venv)")
        try:
            java = Path(find_java_home()) / "bin" / "java"
        except JavaNotFound:
            pytest.skip("not run: no registry (there is no Java)")
        super().__init__()
        self.url = f"http://{self.address}:{self.port}/apis/ccompat/v7"
        where = [f"-Dquarkus.http.host={self.address}", f"-Dquarkus.http.port={self.port}"]
        (program,) = HOME.glob("*-runner.jar")
        command: list[str | Path] = [java, "-Xmx256m", *SMALL.split(), *where, "-jar", program]
        self._run(command, None, self._asked, OSError)

    def _asked(self) -> Any:
        return urlopen(f"{self.url}/subjects", timeout=1)

    def register(self, subject: str, schema: object, **more: Any) -> int:
        """Register the next version of a subject's schema. Answers its id."""
        body = json.dumps({"schema": json.dumps(schema), **more}).encode()
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = Request(f"{self.url}/subjects/{subject}/versions", body, headers)
        with urlopen(request, timeout=ANSWER_S) as answer:
            return int(json.load(answer)["id"])
