"""An S3 server, in a process of its own, that counts the requests of each bucket and their bytes, for any client alike.

with CountedServer() as server:
    server.make_bucket("ours")
    traffic = server.during("ours", call)       # 12 GET, 3 PUT; 0.5 MiB written, 2 read; $1.98e-05
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import boto3

from bench.cost import Requests, kind_of
from persist_lib.testing.servers import S3Server

KINDS = ("get", "head", "list", "put", "delete")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by kind, each of which is a price class but `head`, which is priced like `get`; and bytes of bodies."""

    requests: Counter[str] = field(default_factory=Counter)
    received: int = 0
    sent: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.received + other.received, self.sent + other.sent)

    @property
    def dollars(self) -> float:
        """The price of the requests on S3."""
        count = self.requests
        return Requests(count["put"], count["get"] + count["head"], count["list"], count["delete"]).dollars

    def __str__(self) -> str:
        counts = ", ".join(f"{self.requests[kind]} {kind.upper()}" for kind in KINDS if self.requests[kind])
        mib = f"{self.received / 2**20:.3g} MiB written, {self.sent / 2**20:.3g} read"
        return f"{counts or 'none'}; {mib}; ${self.dollars:.3g}"


class CountedServer(S3Server):
    """Moto's S3 server. `during` counts what one bucket was asked."""

    def _command(self) -> list[str | Path]:
        script = Path(__file__).with_name("counted_s3.py")
        return [sys.executable, "-P", script, str(self.port), self.address, self.root / "requests"]

    def during(self, bucket: str, call: Callable[[], object]) -> Traffic:
        """The requests to a bucket that were answered while `call` was carried out."""
        log = self.root / "requests"
        start = log.stat().st_size
        call()
        with log.open() as lines:
            lines.seek(start)
            asked = [json.loads(line) for line in lines]
        mine = [one for one in asked if one[1].lstrip("/").partition("?")[0].partition("/")[0] == bucket]
        kinds = Counter("head" if method == "HEAD" else kind_of(method, target) for method, target, *_ in mine)
        return Traffic(kinds, sum(one[2] for one in mine), sum(one[3] for one in mine))

    def stored(self, bucket: str) -> int:
        """The bytes of all objects in a bucket."""
        pages = boto3.client("s3", endpoint_url=self.url).get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sum(one["Size"] for page in pages for one in page.get("Contents", ()))
