"""Every snippet of the README and the guides runs, page by page, where the wheels are installed, and says what is so.

What the fences mean is in runner.py. A new page is found by itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psycopg
import pytest

from persist_lib.testing.servers import CREDENTIALS
from tests import built, servers
from tests.docs.runner import blocks_of

RUNNER = Path(__file__).with_name("runner.py")
DOCS = built.ROOT / "docs"
ELSEWHERE = {
    "docs/operations.md": "test_operations.py runs its steps one by one, with servers, roles and a restored database",
}
"""Pages whose snippets another test runs, and why."""


@dataclass
class Preparation:
    """What a page leaves to its reader: names that it uses, and places that are the reader's own."""

    before: str = ""
    after: str = ""
    replace: dict[str, str] = field(default_factory=dict)


def for_locations() -> Preparation:
    """Its lines for production: a bucket and a database, and a shard at 2."""
    name = os.urandom(8).hex()
    blobs = f"s3://{servers.BUCKET}/{name}?endpoint={servers.s3_server().url}&path_style=true"
    log = servers.postgres_at(persist_schema=f"t{name}")
    before = f"""
import persist_lib as persist
row = {{"order_id": 1, "state": "placed", "cents": 999}}
updates, rows, more = [row], [row], [row]
orders = persist.Schema(key={{"order_id": "int64"}}, value={{"state": "string", "cents": "int64"}}, times="ms")
with persist.open({blobs!r}, {log!r}) as first, first.open_writer("orders", orders) as writer:
    writer.compare_and_append([], 0, 2)
"""
    after = """
uppers = [client.inspect(shard).state.upper for shard in ("orders", "a", "b")]
assert uppers == [persist.at(3), persist.at(1), persist.at(1)], uppers
client.close()
"""
    places = {"s3://bucket/prefix": blobs, "postgresql://user@host/database": log}
    shards = {f"Append({shard}, ": f'Append(client.open_writer("{shard}", orders), ' for shard in "ab"}
    return Preparation(before, after, places | shards)


def for_following() -> Preparation:
    """A database of the page's own on a server whose log can be read."""
    name = f"p{os.urandom(8).hex()}"
    with psycopg.connect(servers.logical_server().url, autocommit=True) as sql:
        sql.execute(f"CREATE DATABASE {name}")
        url = f"{servers.logical_server().url.rpartition('/')[0]}/{name}"
    return Preparation(replace={"postgresql://me@db.example/shop": url})


PREPARATIONS: dict[str, Callable[[], Preparation]] = {
    "docs/locations.md": for_locations,
    "docs/following.md": for_following,
    "docs/io-manager.md": lambda: Preparation("location = 'file:./data'"),
}


def pages() -> Iterator[object]:
    """The pages with snippets, each marked for what it starts."""
    for path in [built.ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        name = path.relative_to(built.ROOT).as_posix()
        code = "".join(block.code for block in blocks_of(path.read_text()) if block.is_run)
        if code and name not in ELSEWHERE and not name.startswith("docs/design/"):
            kinds = {
                "spark": r"\bpyspark\b|\bspark-submit\b|--engine spark",
                "dagster": r"\bdagster\b|\borchestration\b",
            }
            marks = [getattr(pytest.mark, kind) for kind, uses in kinds.items() if re.search(uses, code)]
            yield pytest.param(name, marks=marks, id=name)


@pytest.fixture(scope="session")
def programs(wheels: built.Wheels, shared_folder: Path) -> Path:
    """An environment with both distributions and all extras."""
    folder = built.shared(shared_folder / "pages", lambda place: built.install(place / "env", *wheels.everything()))
    return folder / "env" / "bin"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(pages()))
def test_the_snippets_of_a_page_run_and_answer_what_it_says(name: str, programs: Path, tmp_path: Path) -> None:
    prepared = PREPARATIONS.get(name, Preparation)()
    preparation = tmp_path / "preparation.json"
    preparation.write_text(json.dumps({key: value for key, value in asdict(prepared).items() if value}))
    (tmp_path / "work").mkdir()
    environ = built.bare_environ(
        **CREDENTIALS, PATH=f"{programs}:{os.environ['PATH']}", COLUMNS="80", NO_COLOR="1", DAGSTER_HOME=str(tmp_path)
    )
    command = [str(programs / "python"), "-I", str(RUNNER), str(built.ROOT / name), str(preparation)]
    done = subprocess.run(command, cwd=tmp_path / "work", env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def test_no_page_is_empty() -> None:
    assert [path.name for path in DOCS.rglob("*.md") if len(path.read_text()) < 500] == []


def test_pages_that_are_run_elsewhere_are_there() -> None:
    for name in [*ELSEWHERE, *PREPARATIONS]:
        assert blocks_of((built.ROOT / name).read_text()), name
