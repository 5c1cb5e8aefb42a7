"""The `persist` command as a process, and locations that are hard to print."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import persist_lib as persist
from tests.commands import SETTINGS, forked

PERSIST = str(Path(sys.executable).with_name("persist"))
LONG = "a-shard-with-a-rather-long-name.2026_11_22-and-then-some-more"
NS = 1_790_000_000_123_456_789
"""A time of 19 digits."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of Persist and without a width."""
    unset = {*SETTINGS, "NO_COLOR", "FORCE_COLOR"}
    return {**{name: value for name, value in os.environ.items() if name not in unset}, **more}


def run(
    *words: object, cwd: Path, env: dict[str, str] | None = None, program: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command and capture what it prints."""
    return subprocess.run(
        [program or forked(), *map(str, words)], cwd=cwd, env=environment(**(env or {})), text=True, timeout=120,
        check=False, capture_output=True,
    )  # fmt: skip


def shell(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which $P is the command."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], cwd=cwd, env=environment(P=forked(), **env), text=True,
        timeout=120, check=False, capture_output=True,
    )  # fmt: skip


WIDE_SCHEMA = persist.Schema(
    key={"größe_und_länge": "int64"},
    value={
        "名前": "string", "amount": "decimal128(38, 4)", "[red]": "uint64", "weight": "float64",
        "at": "timestamp[us, UTC]", "digest": "string", "note": "string",
    },
)  # fmt: skip


def large_rows(count: int = 6) -> list[dict[str, Any]]:
    """Rows with numbers of many digits, names of many alphabets, and long texts."""
    return [
        {
            "größe_und_länge": 9_223_372_036_854_775_000 + place, "名前": "山田 太郎 " * 3,
            "amount": Decimal("1234567890123456789012345678901234.5678"), "[red]": 18_446_744_073_709_551_000 + place,
            "weight": 1.2345678901234567e-300, "at": datetime(2026, 11, 22, 13, 14, 15, 161718, UTC),
            "digest": f"{place:064x}", "note": "a text of several words, which may be broken at spaces [bold]only",
            "_time": NS + place,
        }
        for place in range(count)
    ]  # fmt: skip


def make_large(root: Path) -> str:
    """A location whose shards have large numbers and long names. Returns its URL."""
    url = f"file:{root}"
    with persist.open(url, config=persist.Config(inline_bytes=0)) as client:
        write = client.open_writer(LONG, WIDE_SCHEMA)
        write.compare_and_append([], 0, NS)
        rows = large_rows()
        for place, row in enumerate(rows):
            write.compare_and_append([row], NS + place, NS + place + 1)
        client.downgrade_hold(
            LONG, "quarterly-audit-of-the-finance-department", NS + 2, opaque=b"epoch-123456789012345678"
        )
        client.set_retention(LONG, 10**18)
        client.open_writer("o", persist.Schema(key={"id": "int64"})).compare_and_append([{"id": 10**18}], 0, 1)
    return url
