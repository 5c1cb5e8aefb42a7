"""Comparisons by ranges of keys, and differences that are kept: the same as the library's own, or not used."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

import persist_lib as persist
from jobs.compare import compare
from persist_lib.catalog import Controller, answers, difference_cache
from persist_lib.catalog.compare_task import run
from persist_lib.catalog.difference_cache import difference
from persist_lib.testing import contents_of
from tests.renditions import Listening, Told, create, write
from tests.worlds import SCHEMA, WIDER, World, row, updates

TINY = persist.Config(part_bytes=64 * 1024, inline_bytes=0)


def corrected(controller: Controller, told: Told, *, seed: int = 1, schema: persist.Schema = SCHEMA) -> int:
    """A copy without some rows; the account has it as well."""
    made = controller.make_rendition("c", shards=2, schema=schema, copy=True).number
    rng = random.Random(seed)
    gone = {rng.randrange(100) for _ in range(40)}

    def without(table: Any) -> Any:
        kept_rows = np.array([one not in gone for one in table.column("id").to_pylist()], np.bool_)
        found = table.filter(kept_rows)
        if schema == WIDER:
            import pyarrow as pa  # noqa: PLC0415

            found = found.append_column("more", pa.nulls(found.num_rows, pa.int64()))
        return found

    controller.copy_rendition("c", made, transform=without)
    told.copy(made, told.starts[-1][1])
    told.renditions[made].updates = [u for u in told.renditions[made].updates if u[0][0] not in gone]
    return made


def started(world: World) -> tuple[Controller, Told]:
    told, controller = Told(), create(world.client(TINY))
    write(controller, told, range(4), rows=12)
    return controller, told


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_ranges_of_keys_add_up_to_the_comparison(world: World, n: int) -> None:
    controller, told = started(world)
    with controller.open_writer("c") as writer:
        made = [row(i, "x" * 60, 4) for i in range(100, 5000)]
        writer.compare_and_append(made, 4, 5)
        told.last.append(updates(made), persist.at(4), persist.at(5))
    new = corrected(controller, told)
    whole = controller.compare("c", new)
    assert whole.vanished
    with controller.begin_comparison("c", new) as begun:
        works = begun.works(n, here=True)
        assert 1 <= len(works) <= n
        assert n > 5 or len(works) == n
        answers = [begun.run_here(pickle.loads(pickle.dumps(work))) for work in works]
        random.Random(n).shuffle(answers)
        assert begun.total(answers) == whole
    assert compare(controller, "c", new) == whole
    assert compare(controller, "c", new, as_of=1) == controller.compare("c", new, as_of=1)
    assert not any(".kept" in shard for shard in controller.client.shards()), "nothing was asked to be kept"


class Merged:
    """Counts how often both renditions were merged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, inner = 0, difference

        def counted(*given: Any) -> Any:
            self.times += 1
            return inner(*given)

        monkeypatch.setattr(answers, "difference", counted)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_difference_that_was_kept_is_what_listeners_get(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_after: bool, is_written: bool
) -> None:
    """Kept before the handover at the time before it, or after it. At the handover's time something may be written."""
    merged = Merged(monkeypatch)
    controller, told = started(world)
    new = corrected(controller, told)
    with controller.open_reader("c") as reader:
        heard = Listening(reader, 1, told)
        if not is_after:
            assert compare(controller, "c", new, keep=True) == controller.compare("c", new)
        start = controller.hand_over("c", new)
        assert start == 4
        controller.copy_rendition("c", new, to_end=True)
        told.hand_over(new, start)
        write(controller, told, range(4, 6), rows=12 if is_written else 0, word="after")
        if is_after:
            found = compare(controller, "c", new, keep=True)
            assert (found.old, found.new, found.as_of) == (1, new, 4)
        heard.poll()
        assert heard.frontier == 6
        assert merged.times == 0
        late = Listening(reader, 0, told)
        late.poll()
        assert contents_of(reader.snapshot(5, diff=True).to_arrow()) == told.contents(5) == late.total
    assert merged.times == 0


@pytest.mark.parametrize("what", ["another time", "more was written", "another rendition", "other columns", "half"])
def test_a_difference_of_something_else_is_not_used(world: World, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    merged = Merged(monkeypatch)
    controller, told = started(world)
    with controller.open_reader("c", SCHEMA) as reader:
        heard = Listening(reader, 1, told)
        new = corrected(controller, told, schema=WIDER if what == "other columns" else SCHEMA)
        if what == "another time":
            compare(controller, "c", new, as_of=2, keep=True)
        elif what == "half":
            with monkeypatch.context() as patch:
                patch.setattr(difference_cache.Keeping, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    compare(controller, "c", new, keep=True)
        else:
            compare(controller, "c", new, keep=True)
        if what == "another rendition":
            new = corrected(controller, told, seed=2)
        at = None
        if what == "more was written":
            at = 6
        start = controller.hand_over("c", new, at=at)
        told.hand_over(new, start)
        if what == "more was written":
            told.starts.pop()
            write(controller, told, range(4, 6), rows=12)
            told.hand_over(new, start)
        if what == "more was written":
            rng = random.Random(1)
            gone = {rng.randrange(100) for _ in range(40)}
            told.renditions[new].updates = [u for u in told.renditions[1].updates if u[0][0] not in gone]

        def without(table: Any) -> Any:
            rng = random.Random(2 if what == "another rendition" else 1)
            gone = {rng.randrange(100) for _ in range(40)}
            found = table.filter(np.array([one not in gone for one in table.column("id").to_pylist()], np.bool_))
            if what == "other columns":
                import pyarrow as pa  # noqa: PLC0415

                found = found.append_column("more", pa.nulls(found.num_rows, pa.int64()))
            return found

        controller.copy_rendition("c", new, transform=without, to_end=True)
        with controller.open_writer("c") as writer:
            writer.advance_upper(start + 1)
        if what == "other columns":
            compare(controller, "c", new, keep=True)  # at the handover, too
        heard.poll()
        assert heard.frontier == start + 1
    assert merged.times == 1


def test_what_is_kept_goes_with_the_old_rendition_or_the_collection(world: World) -> None:
    controller, told = started(world)
    client = controller.client
    new = corrected(controller, told)
    compare(controller, "c", new, keep=True)
    compare(controller, "c", new, keep=True)  # once more: it is there
    [shard] = [one for one in client.shards() if one.endswith(".r1.kept")]
    told.hand_over(new, controller.hand_over("c", new))
    controller.copy_rendition("c", new, to_end=True)
    write(controller, told, range(4, 6))
    controller.alter("c", retention=0)
    world.clock.sleep(1000)
    controller.tend("c")
    controller.tend("c")
    assert [one.number for one in controller.describe("c").renditions] == [new]
    assert client.inspect(shard).state.is_finished()
    with pytest.raises(persist.NotFound):
        compare(controller, "c", new, to=1, keep=True)
    other = corrected(controller, told)
    compare(controller, "c", other, keep=True)
    controller.drop_rendition("c", other)
    controller.drop("c")
    world.clock.sleep(1000)
    controller.tend()
    for one in client.shards():
        if one != "_catalog":
            assert client.inspect(one).state.is_finished(), one


def test_what_cannot_be_kept_is_refused(world: World) -> None:
    controller, _ = started(world)
    schema = persist.Schema(key={"id": "int64 not null"}, value={"letters": "int64"})
    made = controller.make_rendition("c", schema=schema).number
    with controller.open_writer("c", rendition=made) as writer:
        writer.compare_and_append([{"id": 1, "letters": 1, "_time": 0}], 0, 4)
    with pytest.raises(persist.InvalidUsage, match="can only be kept where"):
        compare(controller, "c", made, keep=True)
    assert compare(controller, "c", made) == controller.compare("c", made)
    for wrong in ("1", 1, None):
        with pytest.raises(persist.InvalidUsage, match="keep"):
            compare(controller, "c", made, keep=wrong)  # type: ignore[arg-type]
    with pytest.raises(persist.NotFound):
        compare(controller, "c", 9)
    other = persist.Schema(key={"id": "int64 not null", "b": "string"})
    keyed = controller.make_rendition("c", schema=other).number
    with pytest.raises(persist.InvalidUsage, match="keys differ"):
        compare(controller, "c", keyed)


def test_a_task_needs_nothing_but_what_pickles(world: World) -> None:
    controller, told = started(world)
    new = corrected(controller, told)
    with controller.begin_comparison("c", new) as begun:
        answers = [run(pickle.loads(pickle.dumps(work))) for work in begun.works(3)]
        assert begun.total(pickle.loads(pickle.dumps(answers))) == controller.compare("c", new)
