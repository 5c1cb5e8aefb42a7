"""A first snapshot that is more than a window: table by table, in one commit, whoever dies or is first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.catalog import writer
from persist_lib.errors import Refused, UpperMismatch
from persist_lib.sources import Meaning, agreed_value, bindings, running
from persist_lib.sources.pipeline import Made, Pipeline, Ready
from persist_lib.sources.postgres import snapshot
from persist_lib.sources.running import Ingestion
from persist_lib.sources.targets import Target
from persist_lib.testing import check_location
from tests.integration.test_postgres_source import Shop

ROWS, CHUNK = 2_000, 8_192


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A table whose snapshot comes in about ten tables, and windows of less than that. Each hundredth row is bad."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(Ingestion, "window_bytes", CHUNK)
    found = Shop()
    found.run(
        "CREATE TABLE t (id int PRIMARY KEY, word text, at date)",
        f"INSERT INTO t SELECT n, repeat('x', n % 70), CASE n % 100 WHEN 0 THEN 'infinity' ELSE '2026-01-01' END::date "
        f"FROM generate_series(1, {ROWS}) n",
    )
    yield found
    found.close()


def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each call decodes."""
    sizes: list[int] = []
    apply = Pipeline.apply

    def noting(self: Pipeline, ready: Ready, lookup: Any) -> Made:
        sizes.append(ready.messages.num_rows)
        return apply(self, ready, lookup)

    monkeypatch.setattr(Pipeline, "apply", noting)
    return sizes


def check(shop: Shop) -> None:
    words = {n: "x" * (n % 70) for n in range(1, ROWS + 1) if n % 100}
    assert shop.words() == words
    assert all(row["_diff"] == 1 for row in shop.contents())
    assert len(shop.contents("s/errors")) == ROWS // 100
    check_location(shop.world.client())


@pytest.mark.parametrize("shards", [1, 3])
def test_it_is_decoded_table_by_table_and_is_the_table(
    shop: Shop, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = applied(monkeypatch)
    shop.follow(shards=shards)
    assert len(sizes) > 5
    assert max(sizes) < ROWS // 4
    assert sum(sizes) == ROWS
    check(shop)
    times = {row["_time"] for row in shop.controller.open_reader("s").changes(0).to_pylist()}
    assert len(times) == 1, "all of it is at one time"
    shop.run("UPDATE t SET word = 'y', at = '2026-01-01' WHERE id IN (1, 100)", "DELETE FROM t WHERE id = 2")
    shop.catch_up()
    found = shop.words()
    assert (found[1], found[100], 2 in found, len(found)) == ("y", "y", False, ROWS - ROWS // 100)


def test_one_that_dies_in_the_middle_leaves_nothing_that_is_seen(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.create()
    tables_of, left = bindings.tables_of, iter((3, 1))

    def cut(*args: Any) -> Iterator[pa.Table]:
        end = next(left, None)
        for n, table in enumerate(tables_of(*args)):
            if n == end:
                raise KeyboardInterrupt
            yield table

    monkeypatch.setattr(running, "tables_of", cut)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            shop.catch_up()
        assert [shop.controller.describe(name).upper.time for name in ("s", "s/errors")] == [0, 0]
    shop.catch_up()
    check(shop)


def test_another_one_that_is_first_is_agreed_with(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between this one's parts and its commit, by whichever way; and one that died between two collections."""
    shop.create()
    append_staged = writer.append_staged

    def late(*args: Any) -> None:
        monkeypatch.setattr(running, "append_staged", append_staged)
        with closing(shop.sources.open("s")) as other:
            other.step()
        append_staged(*args)

    monkeypatch.setattr(running, "append_staged", late)
    with closing(shop.sources.open("s")) as one:
        with pytest.raises(UpperMismatch):
            one.step()
        one.step()
    check(shop)


def test_what_one_left_between_two_collections_is_compared(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.create()
    append = Target.append

    def dies(self: Target, *args: Any) -> None:
        if not self.name.endswith("/errors"):  # the other one comes first
            raise KeyboardInterrupt
        append(self, *args)

    with monkeypatch.context() as patched, closing(shop.sources.open("s")) as one:
        patched.setattr(one, "_copy", lambda *_: None)  # as where another instance had begun
        patched.setattr(Target, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            one.step()
    uppers = [shop.controller.describe(name).upper.time or 0 for name in ("s", "s/errors")]
    assert min(uppers) == 0 < max(uppers)
    shop.catch_up()
    check(shop)


def test_too_many_bad_rows_end_it_before_anything_is_written(shop: Shop) -> None:
    shop.create(meaning=Meaning(envelope="changes", most_errors=5))
    with pytest.raises(Refused, match="messages are bad, and most_errors is 5"):
        shop.catch_up()
    assert shop.controller.describe("s").upper.time == 0


def test_a_choice_that_an_earlier_release_made_room_for_is_used(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            agreed_value,
            "SCHEMA",
            persist.Schema({"number": "int64 not null"}, {"bytes": "binary not null"}, unique=True),
        )
        shop.follow()
    check(shop)
