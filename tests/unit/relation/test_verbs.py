"""Restoring: the contents are what they were, by one append of the difference, also beside rivals.

Upsert, delete and append_now, one call at a time: what they answer, what they refuse, and how they lose a race.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.errors import (
    DiffOverflow,
    InvalidUsage,
    Missing,
    NotComplete,
    NotFound,
    SinceViolation,
    TimedOut,
    UpperMismatch,
)
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Rival, check_world, contents_of
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, SMALL, WIDER, World, row


@pytest.mark.parametrize("config", [persist.Config(), TINY])
@pytest.mark.parametrize("maintained", [False, True])
def test_the_contents_are_what_they_were_and_history_stays(
    world: World, config: persist.Config, maintained: bool
) -> None:
    client = world.client(config)
    model = filled(client)
    if maintained:
        client.maintain("s")
    upper = 40
    for to in (0, 13, 38, 39):
        before = world.bytes("s")
        planned = client.restore("s", to, dry_run=True)
        read = client.open_reader("s")
        now = contents_of(read.snapshot(diff=True).to_arrow())
        want = model.contents(to)
        change = {key: want[key] - now[key] for key in want.keys() | now.keys() if want[key] != now[key]}
        assert dict(contents_of(planned.sample)) == change
        assert (planned.rows, planned.added, planned.retracted) == (
            len(change), sum(n for n in change.values() if n > 0), -sum(n for n in change.values() if n < 0),
        )  # fmt: skip
        assert (planned.appended, planned.upper, planned.to) == (None, upper, to)
        assert [b for b in world.bytes("s") if b.startswith(b"s/")] == [b for b in before if b.startswith(b"s/")]
        done = client.restore("s", to)
        assert done.appended is not None
        assert done.appended.upper == persist.at(upper + 1)
        assert (done.rows, done.added, done.retracted) == (planned.rows, planned.added, planned.retracted)
        upper += 1
        assert contents_of(read.snapshot(diff=True).to_arrow()) == want
        assert contents_of(read.snapshot(39, diff=True).to_arrow()) == model.contents(39), "history stays"
        assert done.cost.requests > 0
        again = client.restore("s", to)
        assert (again.rows, again.appended) == (0, None)
        assert read.fetch_upper() == persist.at(upper)
        read.close()
    check_world(client, "s")


def test_only_what_happened_since_is_read(world: World) -> None:
    client = world.client(TINY)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(n, "x" * 50) for n in range(20_000)], 0, 1)
        write.compare_and_append([row(1, "y", 1)], 1, 2)
    done = client.restore("s", 0)
    assert done.cost.bytes_read < 20_000
    assert done.sample.to_pylist() == [{"id": 1, "word": "y", "_diff": -1}]


def test_a_rival_that_is_first_is_taken_back_too(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    model = filled(client, 3)
    write = other.open_writer("s", SCHEMA)
    times = iter(range(3, 10))

    def append() -> None:
        time = next(times)
        write.compare_and_append([row(100 + time, "rival", time)], time, time + 1)

    for each in range(8):  # the first ones are registrations
        rival.before_next(append if each in (2, 4, 6) else lambda: None)
    done = client.restore("s", 0)
    assert done.appended is not None
    assert done.upper is not None
    assert done.upper > 3, "a rival was first"
    with client.open_reader("s") as read:
        assert contents_of(read.snapshot(done.upper, diff=True).to_arrow()) == model.contents(0)
        assert contents_of(read.snapshot(3, diff=True).to_arrow())[103, "rival"] == 1, "and stays in history"


def test_it_gives_up_when_rivals_are_always_first(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    filled(client, 3)
    write = other.open_writer("s", SCHEMA)

    def append() -> None:
        world.clock.advance(1)
        time = write.fetch_upper().time or 0
        write.compare_and_append([row(100, "rival", time)], time, time + 1)
        rival.before_next(append)

    rival.before_next(append)
    with pytest.raises(TimedOut):
        client.restore("s", 0, timeout=3)


def test_what_newer_columns_hold_is_taken_back(world: World) -> None:
    client = world.client()
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1)], 0, 1)
    client.evolve_schema("s", WIDER)
    with client.open_writer("s", WIDER) as write:
        write.compare_and_append([{"id": 1, "word": "w", "more": 5}], 1, 2)
    client.restore("s", 0)
    with client.open_reader("s") as read:
        assert read.snapshot(diff=True).to_pylist() == [{"id": 1, "word": "w", "more": None, "_diff": 1}]


def test_the_least_diff_cannot_be_taken_back_at_once(world: World) -> None:
    client = world.client()
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 0, 1)
        write.compare_and_append([row(1, "w", 1, -(2**63)), row(2, "w", 1, 2**63 - 1)], 1, 2)
        for dry_run in (True, False):
            with pytest.raises(DiffOverflow, match="appended nothing"):
                client.restore("s", 0, dry_run=dry_run)
        write.compare_and_append([row(1, "w", 2, 1)], 2, 3)
    planned = client.restore("s", 0, dry_run=True)
    assert (planned.added, planned.retracted) == (2**63 - 1, 2**63 - 1)
    client.restore("s", 0)
    with client.open_reader("s") as read:
        assert read.snapshot(diff=True).to_pylist() == []


def test_what_cannot_be_restored_is_refused(world: World) -> None:
    client = world.client(TINY)
    filled(client, 10)
    read = client.open_reader("s")
    with pytest.raises(NotComplete, match="not complete"):
        client.restore("s", 10)
    with pytest.raises(NotFound):
        client.restore("nope", 0)
    for wrong in (-1, "1", None, 1.5, True):
        with pytest.raises(InvalidUsage):
            client.restore("s", wrong)
    read.downgrade_since(5)
    for dry_run in (True, False):
        with pytest.raises(SinceViolation):
            client.restore("s", 4, dry_run=dry_run)
    with client.open_writer("s", SCHEMA) as write:
        write.finish()
    with pytest.raises(UpperMismatch, match="upper is \\[\\]"):
        client.restore("s", 5)
    assert client.restore("s", 5, dry_run=True).rows > 0
    reader = world.client(read_only=True)
    assert reader.restore("s", 5, dry_run=True).rows > 0
    with pytest.raises(InvalidUsage, match="read_only"):
        reader.restore("s", 5)
    check_world(client, "s")


def test_a_quiet_shard_is_restored_to_a_time_at_which_nothing_was_written(world: World) -> None:
    schema, client = persist.Schema({"id": "int64"}, {"word": "string"}, times="ms"), world.client()
    with client.open_writer("s", schema) as write:
        first = write.append_now([{"id": 1, "word": "a"}])
        world.clock.advance(3600)
        assert client.restore("s", "10 minutes ago", dry_run=True).rows == 0
        assert write.fetch_upper() == first.upper, "a dry run writes nothing"
        done = client.restore("s", "10 minutes ago")
        assert (done.rows, done.upper) == (0, first.upper.time)
        assert done.appended is not None, "so that nothing comes there later"
        assert write.fetch_upper() == persist.at(world.clock() // 1_000_000 + 1)
        write.append_now([{"id": 2, "word": "b"}])
        assert client.restore("s", "10 minutes ago").rows == 1
        assert client.open_reader("s").snapshot().to_pylist() == [{"id": 1, "word": "a"}]
        with pytest.raises(NotComplete, match="Nothing was appended"):
            client.restore("s", world.clock() // 1_000_000 + 60_000)


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["a", None]), st.sampled_from([-1, 1, 2])), max_size=5),
        st.integers(0, 6),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(steps=STEPS)
def test_any_appends_and_restores_end_where_they_should(steps: list[Any]) -> None:
    with persist.open("memory:", runtime=persist.Runtime(background=False)) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([], 0, 1)
        contents = [dict[Any, int]()]
        for step in steps:
            upper = len(contents)
            if isinstance(step, int):
                to = min(step, upper - 1)
                done = client.restore("s", to)
                if contents[to] != contents[-1]:
                    contents.append(contents[to])
                assert (done.appended is None) == (len(contents) == upper)
            else:
                write.compare_and_append([row(i, w, upper, d) for i, w, d in step], upper, upper + 1)
                sums = dict(contents[-1])
                for i, w, d in step:
                    sums[i, w] = sums.get((i, w), 0) + d
                contents.append({key: n for key, n in sums.items() if n})
            assert contents_of(read.snapshot(diff=True).to_arrow()) == contents[-1]


def test_a_dry_run_of_a_read_only_client_goes_on_where_blobs_vanish(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, looking = world.client(TINY), world.client(TINY, read_only=True)
    filled(client)
    expected = client.restore("s", 13, dry_run=True)
    machine, acts = looking.machine("s"), [lambda: vanish(client)]

    class Vanishing:
        def __getattr__(self, name: str) -> Any:
            if acts:
                acts.pop()()
            return getattr(client.machine("s").reads, name)

    monkeypatch.setattr(machine, "reads", Vanishing())
    found = looking.restore("s", 13, dry_run=True)
    assert not acts
    assert (found.rows, found.added, found.retracted) == (expected.rows, expected.added, expected.retracted)
    assert contents_of(found.sample) == contents_of(expected.sample)


def vanish(client: persist.Client) -> None:
    """Replace all batches, and delete what they were in."""
    client.compact("s", policy=persist.Policy(weight=1e9))
    for _ in range(3):
        client.maintain("s")
    assert client.census("s").garbage == 0


def one(id_: int, word: str | None = "w") -> dict[str, Any]:
    return {"id": id_, "word": word}


def contents(world: World, shard: str = "s") -> dict[tuple[Any, ...], int]:
    client = world.client()
    with client.open_reader(shard) as read:
        return dict(contents_of(read.snapshot(diff=True).to_arrow()))


def counts(done: persist.Changed) -> tuple[int, int, int, int]:
    return done.inserted, done.updated, done.unchanged, done.deleted


# --- races -----------------------------------------------------------------------------------------------------------


def test_what_a_writer_looked_into_is_not_read_again(world: World) -> None:
    write = world.client(SMALL).open_writer("s", SCHEMA)
    for n in range(5):
        write.compare_and_append([row(i, str(n), n) for i in range(100)], n, n + 1)
    assert write.upsert([one(5, "x")]).cost.gets == 5
    for word in "yz":
        assert write.upsert([one(5, word)]).cost.gets == 1  # that of the upsert before
    assert world.client(SMALL).open_writer("s", SCHEMA).upsert([one(5, "x")]).cost.gets == 8
    assert contents(world)[5, "x"] == 1


def test_after_a_lost_race_only_what_is_new_is_read(world: World) -> None:
    without = SMALL.model_copy(update={"cache": persist.CacheConfig(memory_bytes=0)})
    ours = world.client(without, rival=world.rival).open_writer("s", SCHEMA)
    theirs = world.client(SMALL).open_writer("s", SCHEMA)
    for n in range(5):
        ours.compare_and_append([row(i, str(n), n) for i in range(100)], n, n + 1)
    plain = ours.upsert([one(5, "x")])
    assert plain.cost.gets == 5  # an upsert that is not raced reads a part of each append
    world.rival.before_next(lambda: theirs.compare_and_append([row(7, "theirs", 6)], 6, 7))
    raced = ours.upsert([one(5, "y")])
    assert (world.rival.waiting, raced.upper) == (0, persist.at(8))
    assert raced.cost.gets == 6  # with that of the upsert before; what was appended in between has only key 7
    world.rival.before_next(lambda: theirs.compare_and_append([row(5, "theirs", 8)], 8, 9))
    assert ours.upsert([one(5, "z")]).cost.gets == 7 + 1
    assert contents(world)[5, "z"] == 1


def test_what_a_compaction_moved_forward_is_not_taken_for_new(world: World) -> None:
    """The rival's append and a compaction to its time, in which an older row looks as if it were newer."""
    ours = world.client(SMALL, rival=world.rival).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    theirs = other.open_writer("s", SCHEMA)
    ours.upsert([one(1, "old"), one(2, "old")])

    def act() -> None:
        theirs.upsert([one(n, "theirs" * 99) for n in range(3, 999)])
        other.set_retention("s", 0)
        other.maintain("s")
        state = other.inspect("s").state
        assert state.since == persist.at(1)
        assert [batch.lower for batch in state.trace if batch.count] == [persist.at(0)]

    world.rival.before_next(act)
    assert counts(ours.upsert([one(1, "new"), one(2, "old")])) == (0, 1, 1, 0)
    assert [row for row in contents(world) if row[0] < 3] == [(1, "new"), (2, "old")]


def test_objects_that_are_collected_meanwhile_are_looked_for_in_a_newer_state(world: World) -> None:
    plan = Vanishing()
    ours = world.client(SMALL, plan=plan).open_writer("s", SCHEMA)
    other = world.client(SMALL)
    for n in range(4):
        ours.upsert([one(1, str(n)), one(n + 10)])

    def act() -> None:
        before = {entry.key for entry in world.inner.blob.list("s/")}
        other.maintain("s")
        assert len(before - {entry.key for entry in world.inner.blob.list("s/")}) > 1

    plan.acts = [act]
    assert counts(ours.upsert([one(1, "new"), one(10)])) == (0, 1, 1, 0)
    assert not plan.acts
    assert contents(world)[1, "new"] == 1


class Vanishing:
    """A plan that acts before the next read of an object."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []

    def decide(self, operation: Operation) -> Fate:
        if operation.kind == "get" and self.acts:
            self.acts.pop()()
        return Fate()


def test_an_object_that_is_really_gone_is_damage(world: World) -> None:
    write = world.client(SMALL).open_writer("s", SCHEMA)
    write.upsert([one(1)])
    for entry in list(world.inner.blob.list("s/")):
        world.inner.blob.delete(entry.key)
    with pytest.raises(Missing):
        write.upsert([one(1, "b")])


# --- outcomes --------------------------------------------------------------------------------------------------------


def test_a_multiplicity_that_no_update_can_retract_is_told(world: World) -> None:
    write = world.client().open_writer("s", SCHEMA)
    write.compare_and_append([row(1, "x", diff=-(2**63)), row(2)], 0, 1)
    with pytest.raises(DiffOverflow, match="add to it first"):
        write.upsert([one(1)])
    write.append_now([{**one(1, "x"), "_diff": 2}])
    assert counts(write.upsert([one(1, "x"), one(2)])) == (0, 1, 1, 0)
    assert contents(world) == {(1, "x"): 1, (2, "w"): 1}
