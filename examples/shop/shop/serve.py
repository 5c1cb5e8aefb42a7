"""A page over a table: `python -m shop.serve 8000` answers `/revenue`, and `/revenue?as_of=…` as it was then."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import persist_lib as persist
from orchestration.settings import Settings, resolved


def answer(client: persist.Client, url: str) -> tuple[int, dict[str, Any]]:
    """The status and the value of a request. `as_of` is a time as people write it, like `1 hour ago`."""
    parts = urlsplit(url)
    if parts.path != "/revenue":
        return 404, {"error": "there is /revenue"}
    text = parse_qs(parts.query).get("as_of", [""])[0]
    as_of = int(text) if text.isdecimal() else text or None
    try:
        with client.table("revenue").read(as_of) as found:
            return 200, {"as_of": found.as_of, "revenue": found.to_pylist()}
    except persist.NotFound:
        return 503, {"error": "there is no revenue yet"}
    except (persist.InvalidUsage, persist.NotComplete, persist.SinceViolation) as error:
        return 400, {"error": str(error)}


def server(client: persist.Client, host: str, port: int) -> ThreadingHTTPServer:
    """A server that reads from one client."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = answer(client, self.path)
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer((host, port), Page)


def main() -> None:
    """Serve the location of the environment."""
    settings = resolved(Settings())
    host, port = (sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"), int(sys.argv[1])
    with persist.open(settings.location or "", settings.consensus) as client:
        server(client, host, port).serve_forever()


if __name__ == "__main__":
    main()
