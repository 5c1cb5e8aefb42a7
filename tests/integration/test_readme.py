"""The Python in the README runs as it stands, and answers what it says it answers."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from tests import servers

README = Path(__file__).parent.parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
SAYS = re.compile(r"^\s*(?P<call>\S.*?)\s+# (?P<said>\[.*\])$", re.MULTILINE)
servers.use_test_credentials()


def test_the_ten_lines_answer_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked, said = SAYS.subn(r"\n    answers.append((\g<call>, \g<said>))", BLOCKS[0])
    assert said == 2
    answers: list[tuple[Any, Any]] = []
    exec(compile(checked, "README", "exec"), {"answers": answers})
    assert answers
    assert all(actual == expected for actual, expected in answers)


def test_the_lines_for_production_run_on_s3_and_postgresql() -> None:
    name = os.urandom(8).hex()
    blobs = f"s3://{servers.BUCKET}/{name}?endpoint={servers.s3_server().url}&path_style=true"
    log = f"{servers.postgres_url()}{'&' if '?' in servers.postgres_url() else '?'}persist_schema=t{name}"
    block = BLOCKS[1].replace("s3://bucket/prefix", blobs).replace("postgresql://user@host/database", log)
    ast.parse(block)
    orders = persist.Schema(key={"order_id": "int64"}, value={"state": "string"})
    row = {"order_id": 1, "state": "placed"}
    with persist.open(blobs, log) as other:
        with other.open_writer("orders", orders) as first:
            first.compare_and_append([], 0, 2)
        names: dict[str, Any] = {
            "persist": persist, "orders": orders, "updates": [row], "rows": [row], "more": [row],
        }  # fmt: skip
        opened, rest = block.split("\n", 1)
        exec(opened, names)
        names |= {shard: names["client"].open_writer(shard, orders) for shard in "ab"}
        exec(rest, names)
        names["client"].close()
        assert [other.inspect(shard).state.upper for shard in ("orders", "a", "b")] == [
            persist.at(3),
            *[persist.at(1)] * 2,
        ]
