"""A schema registry for tests: a real server of its HTTP protocol, on the loopback interface."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from persist_lib.runtime.threads import Resource
from persist_lib.sources.running import Ingestion
from tests.kafka import Topic
from tests.sourced import Sourced


class RegistryServer(Resource):
    """Schemas by id, and by subject and version. What it says can be changed, as it should not be."""

    def __init__(self, login: str = "") -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[tuple[str, int], dict[str, Any]] = {}
        self.asked: list[str] = []
        self.fails = False
        self._login = login
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                code, answer = registry.answer(self.path, self.headers.get("Authorization", ""))
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, id_: int, schema: object, **more: Any) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.schemas[id_] = {"schema": text, **more}

    def answer(self, path: str, login: str) -> tuple[int, object]:
        if self.fails:
            return 500, {"error_code": 50001, "message": "the backend store failed"}
        if self._login and login != f"Basic {base64.b64encode(self._login.encode()).decode()}":
            return 401, {"error_code": 401, "message": "Unauthorized"}
        match path.strip("/").split("/"):
            case ["schemas", "ids", id_] if int(id_) in self.schemas:
                return 200, self.schemas[int(id_)]
            case ["subjects", subject, "versions", version] if (subject, int(version)) in self.subjects:
                return 200, self.subjects[subject, int(version)]
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Registered(Sourced):
    """A location for sources of a topic whose schemas a registry has."""

    def __init__(self) -> None:
        super().__init__()
        self.topic, self.server = Topic(), RegistryServer()

    def step(self, instance: Ingestion | None = None, **how: Any) -> Any:
        """One step a second later, of this instance or of one that ends after it."""
        self.world.clock.advance(1)
        mine = instance or self.sources.open(self.name)
        try:
            return mine.step(**how)
        finally:
            if instance is None:
                mine.close()

    def close(self) -> None:
        self.server.close()
        super().close()
