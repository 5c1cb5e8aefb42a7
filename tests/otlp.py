"""A receiver of OpenTelemetry on the loopback interface."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """OTLP over HTTP on the loopback interface: what came, decoded, and the bytes as they came."""

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.bytes = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.bytes += body
                if self.path == "/v1/traces":
                    receiver.traces.append(ExportTraceServiceRequest.FromString(body))
                else:
                    receiver.metrics.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        return [span for one in self.traces for r in one.resource_spans for s in r.scope_spans for span in s.spans]

    @property
    def names(self) -> set[str]:
        found = (s for one in self.metrics for r in one.resource_metrics for s in r.scope_metrics)
        return {metric.name for s in found for metric in s.metrics}

    @property
    def paths(self) -> set[tuple[str, ...]]:
        """The names of each span and of those that it is in, the outermost first."""
        of = {span.span_id: span for span in self.spans}

        def path(span: Any) -> tuple[str, ...]:
            above = path(of[span.parent_span_id]) if span.parent_span_id else ()
            return (*above, span.name)

        return {path(span) for span in of.values()}

    @property
    def environ(self) -> dict[str, str]:
        """What has a program send to it."""
        return {
            "PERSIST_TELEMETRY": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }  # fmt: skip
