"""Figures and spans by OTLP over HTTP, to a receiver in this process."""

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import persist_lib as persist
from persist_lib.telemetry import configure, flush, span

came: list[str] = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        came.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


server = HTTPServer(("127.0.0.1", 0), Receiver)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
configure({"PERSIST_TELEMETRY": "otlp"})
with persist.open(f"file:{sys.argv[1]}/data") as client, span("run", "example"):
    client.open_writer("orders", persist.Schema(key={"id": "int64"})).compare_and_append([{"id": 1}], 0, 1)
flush()
assert {"/v1/traces", "/v1/metrics"} <= set(came), came
