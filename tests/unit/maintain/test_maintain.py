"""Maintenance: each duty does what it says, may be repeated, raced and interrupted, and changes no contents.

Of all that append to a shard, one rolls up when that is due: no herd, and none that dies ends it for good. The bytes
ever written are counted: by appends and by compactions, since ever, and for each byte appended. Everything that is made
from the table of duties has each duty, under its one name.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
from typer.main import get_command

import persist_lib as persist
from persist_lib.cli.app import app
from persist_lib.cli.root import UPKEEP as TOLD
from persist_lib.core.duties import BY_NAME, DUTIES, LAYER_DUTIES, NAMES, figures_of
from persist_lib.core.plan.requests import MergeTask, TaskResult
from persist_lib.core.state import INLINE_TOTAL_BYTES
from persist_lib.errors import CompactionRefused, Determinate, Indeterminate
from persist_lib.maintain import duties, local_engine
from persist_lib.maintain.duties import FUNCTIONS, carry_out
from persist_lib.maintain.worker import write_rollup
from persist_lib.testing import Outcome, Rival, Script, check_swept, check_world, contents_of
from tests.commands import invoke
from tests.shards import EAGER, TINY, filled
from tests.worlds import SCHEMA, SMALL, Storm, World, row

UPKEEP = [duty.name for duty in DUTIES if duty.is_upkeep]


def settle(client: persist.Client, shard: str = "s", most: int = 6) -> int:
    """Maintain until there is nothing to do; answers after how many passes."""
    for passes in range(most):
        seqno = client.inspect(shard).seqno
        client.maintain(shard)
        if client.inspect(shard).seqno == seqno:
            return passes
    raise AssertionError(f"maintenance finds something to do after {most} passes")


@pytest.mark.parametrize("config", [persist.Config(), TINY])
def test_maintenance_comes_to_rest_and_leaves_exactly_what_is_referred_to(world: World, config: persist.Config) -> None:
    client = world.client(config)
    model = filled(client)
    for _ in range(3):
        settle(client)
        world_ = check_swept(client, "s")
        assert client.census("s").batches <= client.census("s").batch_bound
        with client.open_reader("s") as read:
            assert contents_of(read.snapshot(20, diff=True).to_arrow()) == model.contents(20)
        assert len(world_.state.rollups) <= 2
    settle(client)
    before = world.bytes("s")
    client.maintain("s")
    assert world.bytes("s") == before, "nothing to do means nothing is done"


def test_rollups_are_not_made_for_the_sake_of_rollups(world: World) -> None:
    client = world.client(TINY.model_copy(update={"rollup_every": 20}))
    filled(client, 30)
    client.maintain("s")
    world.requests.clear()
    for _ in range(10):
        client.maintain("s")
    assert sum(1 for r in world.requests if r.kind == "set" and "/rollup/" in r.key) <= 1
    check_swept(client, "s")


def test_since_is_kept_by_retention_and_moves_with_upper(world: World) -> None:
    client = world.client(TINY)
    model = filled(client)
    client.set_retention("s", 10)
    for distance in (-1, 1.5, True, "3"):
        with pytest.raises(persist.InvalidUsage):
            client.set_retention("s", distance)  # type: ignore[arg-type]
    client.maintain("s")
    assert client.inspect("s").state.since == persist.at(29)
    reader = client.open_reader("s")
    assert contents_of(reader.snapshot(29, diff=True).to_arrow()) == model.contents(29)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 40, 60)
    client.maintain("s")
    assert client.inspect("s").state.since == persist.at(29), "a reader keeps it"
    reader.close()
    client.maintain("s")
    assert client.inspect("s").state.since == persist.at(29), "since does not jump when the last reader goes"
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 60, 61)
    client.maintain("s")
    assert client.inspect("s").state.since == persist.at(50)
    check_world(client, "s")


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    before = world.bytes("s")
    would = client.maintain("s", policy=EAGER, dry_run=True)
    assert world.bytes("s") == before
    assert would.compacted.plan.requests
    done = client.maintain("s", policy=EAGER)
    assert done.compacted.plan == would.compacted.plan


def test_settings_decide_how_everybody_plans_and_a_policy_wins_over_them(world: World) -> None:
    eager = world.client(TINY.model_copy(update={"compaction_weight": 1e9, "compaction_advance": 0.01}))
    lazy = world.client(TINY)
    with lazy.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(k) for k in range(50)], 0, 1)
        write.compare_and_append([row(1, time=1)], 1, 2)
    assert [client.census("s").debt for client in (eager, lazy)] == [51, 0]
    assert [bool(client.compact("s", dry_run=True).plan.requests) for client in (eager, lazy)] == [True, False]
    assert eager.maintain("s", dry_run=True).compacted.plan.debt == 51
    assert not eager.compact("s", policy=persist.Policy(), dry_run=True).plan.requests
    assert lazy.compact("s", policy=EAGER, dry_run=True).plan.debt == 51


def test_the_parts_of_a_compaction_are_as_large_as_its_policy_says(world: World) -> None:
    client, rng = world.client(TINY.model_copy(update={"task_bytes": 1 << 30})), Random(1)
    with client.open_writer("s", SCHEMA) as write:
        for time in range(3):
            write.compare_and_append([row(k, rng.randbytes(60).hex(), time) for k in range(1000)], time, time + 1)
    policy = persist.Policy(weight=1e9, part_bytes=1 << 20)
    (applied,) = client.compact("s", policy=policy).applied
    assert applied.parts_out == 1
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=3)], 3, 4)
    (applied,) = client.compact("s", policy=EAGER).applied
    assert applied.parts_out > 1, "what a policy leaves open is what the settings say"


def test_orphans_of_a_writer_that_died_go_when_it_is_retired_and_not_before(world: World) -> None:
    client = world.client(TINY.model_copy(update={"lease_ms": 1000}))
    filled(client, 5)
    storm = Storm(Outcome.REFUSED, "compare_and_set")
    dying = world.client(TINY.model_copy(update={"lease_ms": 1000, "timeout_s": 0.1}), plan=storm)
    write = dying.open_writer("s", SCHEMA)
    assert write.id
    storm.blows = True
    with pytest.raises(Determinate):
        write.compare_and_append([row(1, time=5)], 5, 6)
    storm.blows = False
    audited = client.audit_orphans("s")
    assert (audited.orphans, audited.pending) == ((), 1)
    assert len(check_world(client, "s").orphans) == 1
    world.clock.advance(5)
    client.maintain("s")
    settle(client)
    check_swept(client, "s")


def test_a_rollup_whose_writer_died_before_linking_it_is_swept(world: World) -> None:
    client = world.client(TINY)
    filled(client, 5)
    settle(client)
    storm = Storm(Outcome.REFUSED, "compare_and_set")
    dying = world.client(TINY.model_copy(update={"lease_ms": 1000, "timeout_s": 0.1}), plan=storm)
    with dying.worker("s") as worker:
        assert worker.id
        storm.blows = True
        with pytest.raises(Determinate):
            write_rollup(worker.machine, worker.id)
        storm.blows = False
    assert len(check_world(client, "s").orphans) == 1
    settle(client)
    check_swept(client, "s")


def test_one_object_that_cannot_be_deleted_stays_on_the_list_and_hinders_no_other(world: World) -> None:
    client = world.client(TINY)
    filled(client)
    client.compact("s", policy=EAGER)
    client.roll_up("s", force=True)
    stuck = sorted(client.inspect("s").state.garbage)[3]
    inner = world.inner.blob

    class Stubborn:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def delete_many(self, keys: list[str]) -> dict[str, Exception]:
            failed = {key: PermissionError("no") for key in keys if key.endswith(stuck)}
            return {**inner.delete_many([key for key in keys if key not in failed]), **failed}

    client.machine("s").blob = Stubborn()  # type: ignore[assignment]
    done = client.collect("s")
    assert [*done.failed] == [stuck]
    assert len(done.keys) > 20
    assert stuck in client.inspect("s").state.garbage
    check_world(client, "s")
    client.machine("s").blob = inner
    client.maintain("s")
    settle(client)
    check_swept(client, "s")


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN, Outcome.REFUSED])
@pytest.mark.parametrize("kind", ["compare_and_set", "set", "get", "scan", "delete_many", "truncate", "list"])
def test_every_single_failure_of_maintenance_is_survived(world: World, outcome: Outcome, kind: str) -> None:
    for nth in range(1, 7):
        shard = f"s{nth}"
        client = world.client(TINY)
        model = filled(client, 12, shard=shard)
        with client.open_reader(shard) as read:
            read.downgrade_since(8)
        faulty = world.client(TINY, plan=Script({(kind, nth): outcome}))
        for _ in range(3):
            faulty.maintain(shard, policy=EAGER)
        with client.open_reader(shard) as read:
            for as_of in (8, 10, 11):
                assert contents_of(read.snapshot(as_of, diff=True).to_arrow()) == model.contents(as_of)
        settle(client, shard)
        check_swept(client, shard)


def test_two_compactors_that_rewrite_the_same_batch_both_succeed(world: World) -> None:
    """A batch that is rewritten alone keeps its id: who was overtaken must see that it is another one now."""
    for collected in (False, True):
        shard = f"s{collected}"
        client = world.client(TINY)
        with client.open_writer(shard, SCHEMA) as write:
            write.compare_and_append([row(1, time=t) for t in range(10)], 0, 10)
        with client.open_reader(shard) as read:
            read.downgrade_since(9)
        other = world.client(TINY)
        rival = Rival(world.inner.consensus)
        first = world.client(TINY, rival=rival)

        def overtake(shard: str = shard, other: persist.Client = other, collected: bool = collected) -> None:
            assert other.compact(shard, policy=EAGER).applied[0].seqno
            if collected:
                other.roll_up(shard, force=True)
                other.collect(shard)

        rival.before_next(lambda: None)  # the worker registers
        rival.before_next(overtake)
        (applied,) = first.compact(shard, policy=EAGER).applied
        assert applied.seqno is None, "overtaken, not damaged"
        assert not rival.waiting
        check_world(client, shard)
        settle(client, shard)
        check_swept(client, shard)


def test_a_compactor_whose_input_was_rewritten_and_collected_while_it_read_is_overtaken(world: World) -> None:
    client = world.client(TINY)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=t) for t in range(10)], 0, 10)
    with client.open_reader("s") as read:
        read.downgrade_since(9)
    other, first = world.client(TINY), world.client(TINY)
    machine = first.machine("s")
    inner = machine.blob
    done: list[str] = []

    class Late:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def get(self, key: str) -> bytes | None:
            if not done and not key.partition("/")[2].startswith("rollup"):
                done.append(key)
                other.compact("s", policy=EAGER)
                other.roll_up("s", force=True)
                other.collect("s")
            return inner.get(key)

    machine.fetch()
    machine.blob = Late()  # type: ignore[assignment]
    (applied,) = first.compact("s", policy=EAGER).applied
    assert done
    assert applied.seqno is None
    check_world(client, "s")


def test_an_unknown_compaction_never_loses_what_it_may_have_linked(world: World) -> None:
    client = world.client(TINY)
    model = filled(client, 12)
    storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan", first=Outcome.HAPPENED_UNKNOWN)
    faulty = world.client(TINY.model_copy(update={"timeout_s": 0.2}), plan=storm)
    engine = local_engine(faulty.machine("s"))

    def run(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        yield from engine(tasks)
        storm.blows = True

    with pytest.raises(Indeterminate):
        faulty.compact("s", policy=EAGER, engine=run)
    storm.blows = False
    check_world(client, "s")
    world.clock.advance(10_000)
    for _ in range(3):
        client.maintain("s")
    with client.open_reader("s") as read:
        assert contents_of(read.snapshot(11, diff=True).to_arrow()) == model.contents(11)
    settle(client)
    check_swept(client, "s")


def damage_one(world: World, client: persist.Client, shard: str = "s") -> str:
    key = client.inspect(shard).state.trace[1].keys[0]
    data = world.inner.blob.get(f"{shard}/{key}")
    assert data
    world.inner.blob.delete(f"{shard}/{key}")
    world.inner.blob.set(f"{shard}/{key}", data[:-1] + bytes([data[-1] ^ 1]))
    return str(key)


def test_a_damaged_batch_keeps_no_other_duty_from_being_done_and_is_raised_at_the_end(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    key = damage_one(world, client)
    gone = world.client(TINY)
    left = gone.open_writer("s", SCHEMA)
    assert left.id
    world.inner.blob.set(f"s/{left.id}/0000000000000001.parquet", b"never linked")
    gone.leases._kept.clear()
    gone._handles.clear()
    client.set_retention("s", 2)
    world.clock.advance(10 * TINY.lease_ms)
    with pytest.raises(
        persist.Corrupt, match=f"1 of {len(UPKEEP)} duties failed, the others were done: leases, retention,"
    ) as caught:
        client.maintain("s")
    assert key in str(caught.value)
    assert list(cast("dict[str, str]", caught.value.failed)) == ["compaction"]
    done = cast("dict[str, Any]", caught.value.done)
    assert set(done) == set(UPKEEP) - {"compaction"}
    assert list(done)[:5] == ["leases", "retention", "publication", "rollups", "garbage"]
    assert list(done)[-1] == "orphans"
    assert [overdue.id for overdue in done["leases"].overdue] == [left.id]
    assert done["retention"].after > done["retention"].before
    assert len(done["orphans"].orphans) == 1
    assert not client.audit_orphans("s", dry_run=True).orphans
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.failed) == (persist.Corrupt, caught.value.failed)


def test_of_several_failures_the_gravest_is_raised_and_all_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(TINY)
    filled(client, 6)
    damage_one(world, client)

    def fails(*_: object, **__: object) -> None:
        raise Determinate("the store is away")

    monkeypatch.setattr(duties, "retain", fails)
    monkeypatch.setattr(duties, "collect", fails)
    with pytest.raises(persist.Corrupt, match=f"3 of {len(UPKEEP)} duties failed") as caught:
        client.maintain("s")
    assert str(caught.value).count("the store is away") == 2
    assert list(cast("dict[str, str]", caught.value.failed)) == ["retention", "compaction", "garbage"]


def test_damage_of_one_shard_hinders_no_other_from_the_command_line(tmp_path: Path) -> None:
    world = World(f"file:{tmp_path}/data")
    client = world.client(TINY)
    for shard in ("bad", "good"):
        write = client.open_writer(shard, SCHEMA)
        for time in range(6):
            write.compare_and_append([row(time, "x" * 2000, time)], time, time + 1)
    damage_one(world, client, "bad")
    world.close()
    answer = invoke("--location", f"file:{tmp_path}/data", "maintain", "--all")
    assert answer.exit_code == 3
    assert f"bad: 1 of {len(UPKEEP)} duties failed" in answer.output
    assert "compaction FAILED" in answer.output
    assert "orphans    done" in answer.output
    assert "good: 6 → 1 batch" in answer.output


@pytest.mark.parametrize("lie", ["fingerprint", "diff_sum", "count", "parts"])
def test_an_engine_that_lies_is_refused_and_the_shard_is_as_it_was(world: World, lie: str) -> None:
    client = world.client(TINY)
    model = filled(client, 12)
    honest = local_engine(client.machine("s"))

    def lying(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        for result in honest(tasks):
            if lie == "parts":
                yield msgspec.structs.replace(result, parts=())
            else:
                sums = msgspec.structs.replace(result.sums, **{lie: getattr(result.sums, lie) + 1})
                yield msgspec.structs.replace(result, sums=sums)

    with pytest.raises(CompactionRefused):
        client.compact("s", policy=EAGER, engine=lying)
    with client.open_reader("s") as read:
        assert contents_of(read.snapshot(11, diff=True).to_arrow()) == model.contents(11)
    settle(client)
    check_swept(client, "s")


def test_a_compaction_beside_a_finish_is_skipped_and_no_error(world: World) -> None:
    """The shard is a tombstone by the time the merged parts are there, which nothing needs any more."""
    client, other = world.client(SMALL), world.client()
    with client.open_writer("s", SCHEMA) as write:
        for time in range(12):
            write.compare_and_append([row(time, time=time)], time, time + 1)
    local = local_engine(client.machine("s"))

    def engine(tasks: Sequence[MergeTask]) -> Iterator[TaskResult]:
        results = list(local(tasks))
        with other.open_writer("s", SCHEMA) as closing:
            closing.finish()
        other.finish("s")
        return iter(results)

    done = client.compact("s", engine=engine)
    assert [one.seqno for one in done.applied] == [None]
    assert client.machine("s").fetch().state.is_finished()


def test_what_was_written_is_what_the_store_was_sent(world: World) -> None:
    client = world.client(TINY)
    filled(client, 12)
    sent = sent_parts(world)
    census = client.census("s")
    assert (census.appended_bytes, census.maintained_bytes, census.write_amplification) == (sent, 0, 0.0)
    for round_ in range(3):
        done = client.compact("s", policy=EAGER)
        before, census = census, client.census("s")
        assert census.maintained_bytes - before.maintained_bytes == done.bytes_out
        assert census.appended_bytes + census.maintained_bytes == sent_parts(world)
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1, time=12 + round_)], 12 + round_, 13 + round_)
        census = client.census("s")
    assert census.write_amplification == pytest.approx(census.maintained_bytes / census.appended_bytes)
    assert 0 < (census.write_amplification or 0) < 4
    for _ in range(3):
        client.maintain("s")
    assert client.census("s").appended_bytes == census.appended_bytes, (
        "garbage is deleted, and was written all the same"
    )
    assert world.client(TINY).census("s").maintained_bytes == client.census("s").maintained_bytes, (
        "from rollup and rows"
    )


def sent_parts(world: World) -> int:
    return sum(one.size for one in world.requests if one.kind == "set" and one.key.endswith(".parquet"))


def test_inline_batches_count_when_appended_and_their_merge_counts_as_maintenance(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=256 * 1024))
    with client.open_writer("s", SCHEMA) as write:
        time = 0
        while not client.census("s").maintained_bytes:
            rows = [row(id_, f"{time}-{id_:>200}", time=time) for id_ in range(600)]
            write.compare_and_append(rows, time, time + 1)
            time += 1
            assert time < 40
    census = client.census("s")
    assert census.appended_bytes > INLINE_TOTAL_BYTES // 2
    assert census.maintained_bytes == sent_parts(world), "the writer's own upkeep"


@pytest.mark.parametrize("format_", [1, 2])
def test_an_upgraded_shard_counts_from_its_upgrade_on(world: World, format_: int) -> None:
    client = world.client(TINY.model_copy(update={"format": format_}))
    filled(client, 6)
    client.compact("s", policy=EAGER)
    census = client.census("s")
    assert (census.appended_bytes, census.maintained_bytes, census.write_amplification) == (0, 0, None)
    client.upgrade("s")
    assert client.census("s").write_amplification is None, "nothing was appended since"
    size = client.census("s").size
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=6)], 6, 7)
    census = client.census("s")
    assert census.appended_bytes == census.size - size
    client.compact("s", policy=EAGER)
    census = client.census("s")
    assert census.maintained_bytes == census.size + census.ahead
    for _ in range(3):
        client.maintain("s")
    assert world.client(TINY).census("s").appended_bytes == census.appended_bytes


def test_the_figures_are_told_in_words_and_for_machines(world: World) -> None:
    from persist_lib.cli.json_values import jsonable  # noqa: PLC0415
    from persist_lib.cli.render import census_lines  # noqa: PLC0415

    client = world.client(TINY)
    client.open_writer("s", SCHEMA).close()
    assert dict(census_lines(client.census("s")))["written"] == "0 B appended, 0 B by compactions"
    filled(client, 3, shard="t")
    client.compact("t", policy=EAGER)
    census: Any = client.census("t")
    assert dict(census_lines(census))["written"].endswith(f": {census.write_amplification:.2f} times as much")
    assert jsonable(census)["maintained_bytes"] == census.maintained_bytes


EVERY = 16
CONFIG = persist.Config(rollup_every=EVERY)


def append(write: persist.WriteHandle) -> int:
    """Append as contenders do: from the upper that they get. Answers the seqno."""
    while True:
        upper = write.upper.time or 0
        try:
            return write.compare_and_append([row(upper, "x", upper)], upper, upper + 1).seqno
        except persist.UpperMismatch:
            continue


def rollups(world: World) -> int:
    """How many objects were written, linked or not."""
    return sum(1 for request in world.requests if request.kind == "set" and "/rollup/" in request.key)


@pytest.mark.parametrize("processes", [1, 2, 16])
def test_one_rollup_is_written_when_due_however_many_append(world: World, processes: int) -> None:
    writers = [world.client(CONFIG).open_writer("s", SCHEMA) for _ in range(processes)]
    for number in range(400):
        append(writers[number % processes])
    version = writers[0].machine.fetch()
    assert rollups(world) == version.seqno // EVERY
    assert version.seqno - version.state.newest_rollup <= EVERY + 2
    check_world(world.clients[0], "s")


def test_others_append_meanwhile_and_leave_it_to_the_first(world: World) -> None:
    rival = Rival(world.inner.consensus)
    first = world.client(CONFIG, rival=rival).open_writer("s", SCHEMA)
    others = [world.client(CONFIG).open_writer("s", SCHEMA) for _ in range(8)]
    for write in (first, *others):
        append(write)
    while append(first) % EVERY != EVERY - 1:
        pass
    world.requests.clear()
    rival.before_next(lambda: None)  # the append, which finds it due
    rival.before_next(lambda: [append(write) for write in others])  # the link to the rollup
    due = append(first)
    assert due % EVERY == 0
    assert rival.waiting == 0
    assert first.machine.fetch().seqno > due + len(others)
    assert rollups(world) == 1
    assert first.machine.state.newest_rollup == due


def test_what_its_writer_does_not_achieve_the_first_append_of_the_next_ones_does(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "set")
    broken, sound = world.client(CONFIG, plan=storm), world.client(CONFIG)
    dying, other = broken.open_writer("s", SCHEMA), sound.open_writer("s", SCHEMA)
    append(other)
    while append(dying) % EVERY != EVERY - 1:
        pass
    storm.blows = True
    assert append(dying) == EVERY
    world.requests.clear()
    while append(other) < 2 * EVERY:
        assert rollups(world) == 0
    assert rollups(world) == 1
    assert other.machine.fetch().state.newest_rollup == 2 * EVERY


def test_it_is_due_also_where_every_such_seqno_is_something_else_than_an_append(world: World) -> None:
    client = world.client(CONFIG)
    write, read = client.open_writer("s", SCHEMA), client.open_reader("s", SCHEMA)
    for number in range(100):
        while client.inspect("s").seqno % 2 == 0:
            append(write)
        read.downgrade_since(number)
    assert all(seqno % 2 == 1 for seqno in client.inspect("s").state.rollups), "the setting is wrong"
    assert rollups(world) == pytest.approx(client.inspect("s").seqno / EVERY, abs=1)


def test_a_rollup_of_maintenance_a_moment_ago_is_enough(world: World) -> None:
    client = world.client(CONFIG)
    write = client.open_writer("s", SCHEMA)
    while append(write) != EVERY - 4:
        pass
    client.roll_up("s", force=True)
    for _ in range(8):
        append(write)
    assert rollups(world) == 1


MANUAL = Path(__file__).parents[3] / "docs" / "operations.md"


@pytest.mark.parametrize("duty", [*DUTIES, *LAYER_DUTIES], ids=lambda duty: duty.name)
def test_a_duty_has_an_entry_a_command_and_a_line_in_the_manual(duty):
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert (duty.name in TOLD) is duty.is_upkeep
    if duty.name != "census":  # `persist shard list` counts
        command = commands["maintain" if duty.is_upkeep else "verify"]
        assert duty.does in (command.help or "")
        assert any(option.name == "dry_run" for option in command.params) is duty.is_upkeep
    assert f"| `{duty.name}` |" in MANUAL.read_text()


def test_names_are_unique_and_duties_come_after_what_they_build_on():
    assert len(BY_NAME) == len(DUTIES) + len(LAYER_DUTIES)
    assert tuple(FUNCTIONS) == NAMES
    for place, duty in enumerate(DUTIES):
        assert set(duty.after) <= set(NAMES[:place])
        assert set(duty.job) <= set(NAMES)
        assert not duty.job or duty.name in duty.job


def test_maintain_does_all_of_upkeep_in_the_order_of_the_table_and_the_last_ones_last():
    with persist.open("memory:") as client:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1)], 0, 1)
        upkeep = sorted((duty for duty in DUTIES if duty.is_upkeep), key=lambda duty: duty.is_last)
        assert list(client.maintain("s").done) == [duty.name for duty in upkeep]


@pytest.mark.parametrize("name", NAMES)
def test_a_duty_can_be_carried_out_by_its_name_and_told_in_figures(name):
    with persist.open("memory:") as client:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1)], 0, 1)
        before = client.inspect("s").seqno
        answer = carry_out(name, client.machine("s"), client.leases, policy=client.policy(), dry_run=True)
        assert client.inspect("s").seqno == before
    assert all(isinstance(value, (int, float)) for value in figures_of(answer).values())


def test_why_an_object_is_there_is_said_through_its_whole_life(world: World) -> None:
    client = world.client(TINY)
    filled(client, times=12)
    reader = client.open_reader("s")
    (part, *_) = sorted(key for batch in client.inspect("s").state.trace for key in batch.keys)

    def why(key: str) -> str:
        (one,) = client.explain("s", key=key)
        return one.says

    assert why(part) == why(f"s/{part}")
    assert "has it: updates with times in [[" in why(part)
    client.compact("s", policy=EAGER)
    assert f"it waits: reader {reader.id} may still read from v" in why(part)
    reader.close()
    client.roll_up("s", force=True)
    assert "it can go: the duty garbage deletes it" in why(part)
    client.collect("s")
    assert why(part).startswith("it is not there. Of such an object: nothing refers to it")
    left = f"{part.partition('/')[0]}/{'0' * 16}.parquet"
    world.inner.blob.set(f"s/{left}", b"left")
    assert why(left) == "nothing refers to it, and nothing ever can: if it is there, the duty orphans deletes it"
    client.audit_orphans("s")
    assert why(left).startswith("it is not there. ")
    assert [one.about for one in client.explain("s")] == [
        "leases", "since", "retention", "compaction", "rollups", "garbage", "cost",
    ]  # fmt: skip
