"""The first copy of a rendition by many tasks: each row in its shard once, however tasks and processes end."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.catalog import Controller, renditions
from persist_lib.catalog.copies import Copy, Work, load_transform, run

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"name": "string", "cents": "int64"})
DOLLARS = persist.Schema(key={"id": "int64 not null"}, value={"name": "string", "dollars": "double"})
HERE = "tests.unit.catalog.test_rebuilding"
ROWS = 3_000


def dollars(table: pa.Table) -> pa.Table:
    """A transformation into `DOLLARS`, which leaves some rows out."""
    cents = table.column("cents")
    made = table.set_column(table.schema.get_field_index("cents"), "dollars", pc.divide(cents.cast("double"), 100.0))
    return made.filter(pc.not_equal(pc.bit_wise_and(table.column("id"), 7), 3))


def forgetful(table: pa.Table) -> pa.Table:
    """Not a transformation: it drops `_diff`."""
    return table.drop_columns(["_diff"])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{tmp_path}", config=persist.Config(inline_bytes=1024)) as found:
        yield found


@pytest.fixture
def controller(client: persist.Client) -> Controller:
    controller = client.controller()
    controller.create("orders", SCHEMA, shards=3, mode="compare_and_append")
    with controller.open_writer("orders") as write:
        write.append_now([{"id": i, "name": f"n{i % 5}", "cents": i} for i in range(ROWS)])
        write.upsert([{"id": i, "name": "again", "cents": -i} for i in range(10)])
    return controller


def counted(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        found[tuple(value for name, value in row.items() if name != "_diff")] += row["_diff"]
    return found


def contents(controller: Controller, name: str = "orders") -> Counter[tuple[Any, ...]]:
    with controller.open_reader(name) as read:
        return counted(read.snapshot(diff=True).to_pylist())


def of_shards(client: persist.Client, names: tuple[str, ...]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for name in names:
        with client.open_reader(name) as read:
            found += counted(read.snapshot(diff=True).to_pylist())
    return found


def elsewhere(work: Work) -> Copy:
    """Run a task as another process would: all that it gets and gives is bytes."""
    copy = run(pickle.loads(pickle.dumps(work)))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(copy), type=Copy)


def test_tasks_of_other_processes_copy_each_row_once(controller: Controller, client: persist.Client) -> None:
    before = contents(controller)
    made = controller.make_rendition("orders", shards=5, copy=True)
    with controller.begin_rebuild("orders", made.number) as begun:
        assert begun is not None
        works = begun.works(6)
        assert len(works) >= 3
        copies = [elsewhere(work) for work in works]
        assert begun.commit(copies) == len(before)
    assert of_shards(client, made.shards) == before
    assert controller.compare("orders", made.number).is_equal
    with controller.begin_rebuild("orders", made.number) as again:
        assert again is None
    start = controller.hand_over("orders", made.number)
    assert controller.copy_rendition("orders", made.number, to_end=True).upper == persist.at(start)
    assert contents(controller) == before


def test_a_transformation_is_applied_by_name_and_followed(controller: Controller, client: persist.Client) -> None:
    made = controller.make_rendition("orders", schema=DOLLARS, shards=2, copy=True)
    with controller.begin_rebuild("orders", made.number, transform=f"{HERE}:dollars") as begun:
        assert begun is not None
        begun.commit([elsewhere(work) for work in begun.works(4)])
    with controller.open_writer("orders") as write:
        write.upsert([{"id": 4, "name": "late", "cents": 250}, {"id": 11, "name": "left out", "cents": 1}])
    controller.copy_rendition("orders", made.number, transform=load_transform(f"{HERE}:dollars"))
    with controller.open_reader("orders") as read:
        expected = counted([
            {"id": row["id"], "name": row["name"], "dollars": row["cents"] / 100, "_diff": row["_diff"]}
            for row in read.snapshot(diff=True).to_pylist() if row["id"] % 8 != 3
        ])  # fmt: skip
    assert of_shards(client, made.shards) == expected


def test_what_was_written_meanwhile_is_followed(controller: Controller, client: persist.Client) -> None:
    made = controller.make_rendition("orders", shards=2, copy=True)
    with controller.begin_rebuild("orders", made.number) as begun, controller.open_writer("orders") as write:
        assert begun is not None
        works = begun.works(2)
        write.upsert([{"id": 1, "name": "meanwhile", "cents": 1}])
        begun.commit([elsewhere(work) for work in works])
        write.delete([2])
    controller.copy_rendition("orders", made.number)
    assert of_shards(client, made.shards) == contents(controller)


def test_it_resumes_at_the_time_at_which_it_began(controller: Controller, client: persist.Client) -> None:
    made = controller.make_rendition("orders", shards=3, copy=True)
    with controller.begin_rebuild("orders", made.number) as begun:
        assert begun is not None
        first, copies = begun.as_of, [elsewhere(work) for work in begun.works(3)]
        (index, write), *_ = begun._writers.items()  # a process that dies after the first of three commits
        write.append_staged([one for copy in copies for one in copy.staged[index]], at=first)
    with controller.open_writer("orders") as write_on:
        write_on.upsert([{"id": 5, "name": "later", "cents": 5}])
    controller.alter("orders", retention=0)
    controller.tend("orders")
    with controller.begin_rebuild("orders", made.number) as again:
        assert again is not None
        assert (again.as_of, again.shards) == (first, 2)
        again.commit([elsewhere(work) for work in again.works(3)])
    controller.copy_rendition("orders", made.number)
    assert of_shards(client, made.shards) == contents(controller)


def test_two_at_once_do_what_one_would(controller: Controller, client: persist.Client) -> None:
    made = controller.make_rendition("orders", shards=2, copy=True)
    with (
        controller.begin_rebuild("orders", made.number) as one,
        controller.begin_rebuild("orders", made.number) as other,
    ):
        assert one is not None
        assert other is not None
        ours, theirs = ([elsewhere(work) for work in begun.works(2)] for begun in (one, other))
        one.commit(ours)
        assert other.commit(theirs) == 0
    assert of_shards(client, made.shards) == contents(controller)


def test_a_task_that_ran_twice_counts_once(controller: Controller, client: persist.Client) -> None:
    made = controller.make_rendition("orders", shards=2, copy=True)
    with controller.begin_rebuild("orders", made.number) as begun:
        assert begun is not None
        works = begun.works(2)
        [elsewhere(work) for work in works]  # answers that were lost
        begun.commit([elsewhere(work) for work in works])
    assert of_shards(client, made.shards) == contents(controller)


def test_shards_in_memory_are_copied_by_this_process() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", SCHEMA, shards=2)
        with controller.open_writer("orders") as write:
            write.append([{"id": i, "name": "n", "cents": i} for i in range(100)], 0, 1)
        made = controller.make_rendition("orders", shards=3, copy=True)
        with controller.begin_rebuild("orders", made.number) as begun:
            assert begun is not None
            assert begun.commit([begun.run_here(work) for work in begun.works(4, here=True)]) == 100
        assert of_shards(client, made.shards) == contents(controller)


def test_buffers_are_written_when_they_are_full(
    controller: Controller, client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renditions, "BUFFER_BYTES", 1)
    made = controller.make_rendition("orders", shards=2, copy=True)
    with controller.begin_rebuild("orders", made.number) as begun:
        assert begun is not None
        copies = [elsewhere(work) for work in begun.works(1)]
        assert sum(len(parts) for copy in copies for parts in copy.staged) > 2
        begun.commit(copies)
    assert of_shards(client, made.shards) == contents(controller)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dollars", "module:function"), ("", "module:function"), (":f", "module:function"), (7, "module:function"),
        ("no_such_module:f", "No module named"), (f"{HERE}:nothing", "has no attribute"),
        (f"{HERE}:ROWS", "transform must be"),
    ],
)  # fmt: skip
def test_a_transformation_that_cannot_be_loaded_is_refused_before_anything_is_held(
    controller: Controller, client: persist.Client, name: Any, says: str
) -> None:
    made = controller.make_rendition("orders", shards=2, copy=True)
    holds = client.inspect(controller.describe("orders").id + ".renditions").state.holds
    with (
        pytest.raises(persist.InvalidUsage, match=says),
        controller.begin_rebuild("orders", made.number, transform=name),
    ):
        pass
    assert client.inspect(controller.describe("orders").id + ".renditions").state.holds == holds


def test_a_transformation_that_drops_columns_is_refused(controller: Controller) -> None:
    made = controller.make_rendition("orders", shards=2, copy=True)
    with controller.begin_rebuild("orders", made.number, transform=f"{HERE}:forgetful") as begun:
        assert begun is not None
        work = begun.works(1)[0]
        with pytest.raises(persist.InvalidUsage, match=r"takes and returns a pyarrow\.Table"):
            elsewhere(work)


def test_an_independent_rendition_and_an_empty_one_are_not_copied(client: persist.Client) -> None:
    controller = client.controller()
    controller.create("empty", SCHEMA, mode="compare_and_append")
    copy = controller.make_rendition("empty", copy=True)
    with pytest.raises(persist.InvalidUsage, match="nothing to copy"), controller.begin_rebuild("empty", copy.number):
        pass
    alone = controller.make_rendition("empty")
    with pytest.raises(persist.InvalidUsage, match="copy=True"), controller.begin_rebuild("empty", alone.number):
        pass
