"""Moto's S3 server that writes down each request: `python counted_s3.py PORT ADDRESS FILE`.

A line a request, before its answer is sent: method, target, bytes received, bytes sent (of bodies; headers are not in
them). Each answer waits for as long as a store within the region would at least take, as moto would answer at once.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from moto.moto_server.werkzeug_app import DomainDispatcherApplication

WAIT_S = 0.02
SERVER = Path(__file__).parents[1] / "persist_lib/testing/s3_server.py"


def counted(respond: Callable[..., Any], log: TextIO) -> Callable[..., Iterable[bytes]]:
    """The same application, of which each request is a line of the log."""

    def respond_and_count(app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        time.sleep(WAIT_S)
        with closing(respond(app, environ, start_response)) as pieces:
            body = b"".join(pieces)
        received = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0
        log.write(json.dumps([environ["REQUEST_METHOD"], environ["RAW_URI"], int(received), len(body)]) + "\n")
        return [body]

    return respond_and_count


if __name__ == "__main__":
    with Path(sys.argv[3]).open("a", buffering=1) as lines:
        DomainDispatcherApplication.__call__ = counted(DomainDispatcherApplication.__call__, lines)  # type: ignore[method-assign]
        runpy.run_path(str(SERVER), run_name="__main__")
