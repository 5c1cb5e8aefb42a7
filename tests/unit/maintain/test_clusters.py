"""Clusters: what is compacted lies apart by the values of a column, so that filters read little; then it is at rest."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.contents import problems
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import CLUSTERS
from persist_lib.core.plan.clusters import Clusters, are_apart, by_name, cuts_of, split
from persist_lib.core.plan.compaction import Plan, Policy, plan_rewrite, policy_of
from persist_lib.core.plan.requests import MergeTask
from persist_lib.core.rules import values_of
from persist_lib.core.state import Batch
from persist_lib.core.transitions import change
from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo, WriterId, uploader_of
from persist_lib.maintain.compaction import compact
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.testing import check_world
from tests.worlds import World

PART = 1 << 16
SCHEMA = persist.Schema({"id": "int64"}, {"made": "int32", "n": "int64"}, unique=True)
CONFIG = persist.Config(part_bytes=PART, inline_bytes=0)
BY_MADE = Policy(cluster="made")
ROWS = 4000


def table(made: Any, seed: int = 0) -> pa.Table:
    """Rows whose keys say nothing of their values."""
    rng, count = np.random.default_rng(seed), len(made)
    ids = rng.choice(10**9, count, replace=False) * 1000 + seed
    return pa.table({"id": ids, "made": pa.array(made, pa.int32()), "n": rng.integers(0, 10**12, count)})


def filled(client: persist.Client, appends: int = 8, shard: str = "s") -> persist.ReadHandle:
    """Appends of ROWS rows each, of values all over; all that they give up may go."""
    write, read = client.open_shard(shard, SCHEMA)
    for at in range(appends):
        write.compare_and_append(table(np.random.default_rng(at).integers(0, 1000, ROWS), at), at, at + 1)
    read.downgrade_since(appends - 1)
    return read


def trace(client: persist.Client, shard: str = "s") -> list[Batch]:
    return [batch for batch in client.inspect(shard).state.trace if batch.count]


def is_clustered(client: persist.Client, shard: str = "s", name: str = "made") -> bool:
    state = client.inspect(shard).state
    return are_apart(trace(client, shard)[0], state.schemas, by_name(state.schemas, name))


def reasons(client: persist.Client, policy: Policy = BY_MADE) -> list[str]:
    return [one.reason for one in client.compact("s", policy=policy).applied]


def said(client: persist.Client) -> tuple[object, str]:
    """What `cluster` is for the shard, and where that is from."""
    values = values_of(client.rules_of("s"), client.inspect("s").state, {}, {})
    [found] = [(one.value, one.source) for one in values if one.field == "cluster"]
    return found


def cost_of(read: persist.ReadHandle, **how: Any) -> tuple[pa.Table, int]:
    with read.snapshot(**how) as snapshot:
        return snapshot.to_arrow(), snapshot.cost.bytes_read


def test_a_filter_reads_the_clusters_that_it_needs_and_rows_are_in_the_order_of_keys(client: persist.Client) -> None:
    read = filled(client)
    before = read.snapshot().to_arrow()
    assert reasons(client) == ["merge"]
    [batch] = trace(client)
    assert len(batch.runs) > 4
    assert is_clustered(client)
    assert read.snapshot().to_arrow() == before
    found, size = cost_of(read, filter=pc.field("made") < 50)
    assert found == before.filter(pc.less(before["made"], 50))
    assert size < cost_of(read)[1] / 4
    assert read.snapshot(keys=before["id"].to_pylist()[:50]).to_arrow().num_rows == 50
    check_world(client, "s")


@pytest.mark.parametrize(
    "made",
    [
        lambda rng: np.full(ROWS, 7),
        lambda rng: rng.integers(0, 2, ROWS),
        lambda rng: np.where(rng.random(ROWS) < 0.999, 5, rng.integers(-1000, 1000, ROWS)),
        lambda rng: np.where(rng.random(ROWS) < 0.5, None, rng.integers(-5, 5, ROWS)),
        lambda rng: np.full(ROWS, None),
        lambda rng: np.r_[np.full(ROWS - 1, -(2**31)), 2**31 - 1],
    ],
    ids=["one", "two", "mostly one", "half null", "null", "both ends"],
)
def test_whatever_the_values_are_compaction_comes_to_rest(client: persist.Client, made: Any) -> None:
    write, read = client.open_shard("s", SCHEMA)
    for at in range(6):
        write.compare_and_append(table(made(np.random.default_rng(at)), at), at, at + 1)
        read.downgrade_since(at)
        for _ in range(3):
            if not reasons(client):
                break
        assert reasons(client) == []
    found = read.snapshot().to_arrow()
    assert found.num_rows == 6 * ROWS
    assert read.snapshot(filter=pc.field("made").is_null()).to_arrow().num_rows == found["made"].null_count
    check_world(client, "s")


def test_one_run_is_put_in_clusters_once_since_has_moved_and_into_one_run_where_none_are_wanted(
    client: persist.Client,
) -> None:
    read = filled(client)
    client.compact("s", policy=Policy())
    assert reasons(client) == [], "the state machine takes no batch back as it was but for its runs"
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 8, 9)
    read.downgrade_since(8)
    assert reasons(client) == ["cluster"]
    assert is_clustered(client)
    assert reasons(client) == []
    assert reasons(client, Policy()) == ["sort"]
    assert len(trace(client)[0].runs) == 1


def test_where_a_sample_shows_one_value_the_greatest_is_apart_and_that_is_done_once(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    count = 8 * ROWS
    made = [9 if at % 100 == 1 and not 0.35 < at / count < 0.75 else 5 for at in range(count)]  # not in the middle
    rows = table(made).sort_by("id")
    write.compare_and_append(rows.set_column(1, "made", pa.array(made, pa.int32())), 0, 1)
    found = []
    for at in range(1, 4):
        write.compare_and_append([], at, at + 1)
        read.downgrade_since(at)
        found += reasons(client)
    assert found.count("cluster") == 1
    assert cost_of(read, filter=pc.field("made") == 9)[1] < cost_of(read)[1] / 4


def test_a_batch_is_rewritten_alone_into_more_runs_only_as_of_a_later_since(client: persist.Client) -> None:
    read = filled(client)
    client.compact("s", policy=Policy())
    [one_run] = trace(client)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([], 8, 9)
    read.downgrade_since(8)
    state = client.inspect("s").state
    assert reasons(client) == ["cluster"]
    [clustered] = trace(client)
    assert len(clustered.runs) > 1
    worker = WriterId(uploader_of(clustered.parts[0].key))
    state = msgspec.structs.replace(state, writers=dict.fromkeys([worker], *state.writers.values()))

    def answer(output: Batch, format_: int = CLUSTERS) -> object:
        older = msgspec.structs.replace(state, format=format_)
        return change(older, SeqNo(99), c.ApplyCompaction(worker, (one_run.id,), output))

    assert isinstance(answer(clustered), StateDiff)
    gains_nothing = r.NotEquivalent("it gains nothing over the one batch that it replaces")
    assert answer(msgspec.structs.replace(clustered, since=one_run.since)) == gains_nothing
    plain = tuple(msgspec.structs.replace(part, values=()) for part in clustered.parts)
    assert answer(msgspec.structs.replace(clustered, parts=plain), CLUSTERS - 1) == gains_nothing


def test_what_already_lies_apart_is_left_alone(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    rows = table(np.arange(4 * ROWS), 1)
    write.compare_and_append(rows.set_column(0, "id", rows["made"].cast(pa.int64())), 0, 1)
    write.compare_and_append([], 1, 2)
    read.downgrade_since(1)
    assert len(trace(client)[0].parts) > 2
    assert reasons(client) == []


def test_contents_that_are_kept_ahead_are_in_clusters_and_every_time_reads_as_before(client: persist.Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    rng, seen = np.random.default_rng(0), dict[int, pa.Table]()
    rows = table(rng.integers(0, 1000, 8 * ROWS))
    write.compare_and_append(rows, 0, 1)
    for at in range(1, 4):
        picked = rng.choice(rows.num_rows, ROWS, replace=False)
        seen[at] = rows = changed(client, rows, picked, at, rng.integers(0, 1000, ROWS))
    assert "ahead" in reasons(client)
    ahead = client.inspect("s").state.contents
    assert ahead is not None
    assert len(ahead.runs) > 4
    where = pc.field("made") < 100
    for at, wanted in seen.items():
        assert read.snapshot(as_of=at).to_arrow() == wanted
        assert read.snapshot(as_of=at, filter=where).to_arrow() == wanted.filter(pc.less(wanted["made"], 100))
    assert cost_of(read, filter=pc.field("made") < 50)[1] < cost_of(read)[1] / 4
    read.downgrade_since(3)
    assert "settle" in reasons(client)
    assert is_clustered(client)
    assert reasons(client) == []
    check_world(client, "s")


def changed(client: persist.Client, rows: pa.Table, picked: Any, at: int, made: Any) -> pa.Table:
    """Take these rows back at a time, and add them with other values; all rows after it."""
    old = rows.take(picked)
    new = old.set_column(1, "made", pa.array(made, pa.int32())).set_column(2, "n", pa.array([at] * len(picked)))
    both = pa.concat_tables([old, new]).append_column(
        "_diff", pa.array([-1] * len(picked) + [1] * len(picked), pa.int64())
    )
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append(both, at, at + 1)
    return pa.concat_tables([rows.take(np.setdiff1d(np.arange(rows.num_rows), picked)), new]).sort_by("id")


@pytest.mark.parametrize("nulls", [False, True])
def test_clusters_that_nothing_newer_belongs_into_are_kept(client: persist.Client, nulls: bool) -> None:
    made = [*range(8 * ROWS)]
    rows = table([None if nulls and one % 97 == 0 else one for one in made]).sort_by("id")
    _, read = client.open_shard("s", SCHEMA)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append(rows, 0, 1)
    policy, wrote = Policy(cluster="made", ahead=1e-6), []
    for at in range(1, 8):
        values = rows["made"].fill_null(10**9 if nulls else 0).to_numpy()
        picked = np.flatnonzero(values > 7.5 * ROWS)[: ROWS // 8]
        rows = changed(client, rows, picked, at, rows["made"].take(picked).to_pylist())
        done = [one for one in client.compact("s", policy=policy).applied if one.reason == "ahead"]
        wrote += [one.bytes_out for one in done]
        assert read.snapshot().to_arrow() == rows
    state = client.inspect("s").state
    assert state.contents is not None
    assert are_apart(state.contents, state.schemas, by_name([SCHEMA], "made"))
    assert max(wrote[1:]) < wrote[0] / 2, "the newest clusters alone are written again"
    assert len(state.contents.runs) <= 2 * 16
    read.downgrade_since(7)
    client.compact("s", policy=policy)
    assert read.snapshot().to_arrow() == rows
    check_world(client, "s")


def test_any_history_in_clusters_reads_as_a_table_would(client: persist.Client, rng: random.Random) -> None:
    rows = table([rng.choice([None, rng.randrange(1000)]) for _ in range(5 * ROWS)]).sort_by("id")
    _, read = client.open_shard("s", SCHEMA)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append(rows, 0, 1)
    for at in range(1, 9):
        low = rng.randrange(1000)
        near = np.flatnonzero(
            np.abs(rows["made"].fill_null(rng.randrange(2000)).to_numpy() - low) < rng.choice([5, 300])
        )
        picked = near[: rng.randint(1, ROWS)]
        kept_as = rows["made"].take(picked).to_pylist()
        rows = changed(
            client, rows, picked, at, [one if rng.random() < 0.9 else rng.randrange(1000) for one in kept_as]
        )
        if rng.random() < 0.3:
            read.downgrade_since(at - 1)
        client.compact("s", policy=Policy(cluster="made", ahead=rng.choice([0, 1e-6]), weight=rng.choice([0.5, 1e9])))
        assert read.snapshot().to_arrow() == rows
        where = pc.field("made") < low
        assert read.snapshot(filter=where).to_arrow() == rows.filter(pc.less(rows["made"], low))
    check_world(client, "s")


def test_contents_that_the_trace_has_in_more_runs_are_given_up(client: persist.Client) -> None:
    read = filled(client, 1)
    with client.open_writer("s", SCHEMA) as write:
        for at in range(1, 5):
            rows = read.snapshot().to_arrow()
            new = rows.set_column(2, "n", pa.array(np.random.default_rng(at).integers(0, 10**12, ROWS)))
            both = pa.concat_tables([rows, new]).append_column("_diff", pa.array([-1] * ROWS + [1] * ROWS, pa.int64()))
            write.compare_and_append(both, at, at + 1)
    before = read.snapshot().to_arrow()
    assert "ahead" in reasons(client, Policy())
    read.downgrade_since(4)
    state = client.inspect("s").state
    assert state.contents is not None
    policy = policy_of(CONFIG, Policy(cluster="made", part_bytes=1 << 14))
    rival = Plan(tuple(plan_rewrite(state, [batch.id for batch in state.trace], policy)), ())
    with client.worker("s") as worker:
        compact(client.machine("s"), worker, plan=rival)
    assert len(trace(client)[0].runs) > 1
    assert client.inspect("s").state.contents is not None
    assert reasons(client, policy) == ["drop"]
    assert reasons(client, policy) == []
    assert read.snapshot().to_arrow() == before


def test_a_shard_of_an_older_format_keeps_one_run(world: World) -> None:
    client = world.client(CONFIG.model_copy(update={"format": CLUSTERS - 1}))
    filled(client)
    assert reasons(client) == ["merge"]
    assert len(trace(client)[0].runs) == 1


def test_a_rule_says_it_by_name_and_the_rule_that_cannot_says_why(client: persist.Client) -> None:
    filled(client)
    client.set_rules([{"pattern": "s*", "cluster": "made"}])
    assert said(client) == ("made", "the rule 's*'")
    client.maintain("s")
    assert is_clustered(client)
    for name in ("id", "nothing"):
        client.set_rules([{"pattern": "s*", "cluster": name}])
        value, source = said(client)
        assert value is None
        assert f"does not apply: {name} is not a column behind the first of the key" in source
        client.maintain("s")
        assert len(trace(client)[0].runs) == 1
    with pytest.raises(InvalidUsage, match="name of a column"):
        client.set_rules([{"pattern": "s*", "cluster": ""}])


def test_what_is_published_is_one_run(world: World, client: persist.Client) -> None:
    read = filled(client)
    client.set_rules([{"pattern": "*", "cluster": "made"}])
    client.maintain("s")
    before = read.snapshot().to_arrow()
    client.publish("s", "iceberg")
    assert said(client) == (None, "the rule '*' does not apply: it is published, in one run")
    client.maintain("s")
    assert [len(batch.runs) for batch in trace(client)] == [1]
    assert client.publish("s", "iceberg").is_new is False
    client.withdraw("s", "iceberg")
    assert said(client) == ("made", "the rule '*'")
    assert read.snapshot().to_arrow() == before


def test_a_column_that_is_renamed_stays_what_clusters_go_by_and_one_that_is_widened_is_put_in_clusters_again(
    client: persist.Client,
) -> None:
    read = filled(client)
    client.compact("s", policy=BY_MADE)
    day = SCHEMA.rename({"made": "day"})
    client.evolve_schema("s", day)
    assert reasons(client, Policy(cluster="day")) == []
    assert reasons(client, Policy(cluster="made")) == [], "no other column is called so"
    assert is_clustered(client, name="day")
    wide = day.widen({"day": "int64"})
    client.evolve_schema("s", wide)
    assert read.snapshot().to_arrow().num_rows == 8 * ROWS
    with client.open_writer("s", wide) as write:
        write.compare_and_append([{"id": -1, "day": 2**40, "n": 1}], 8, 9)
    read.downgrade_since(8)
    while reasons(client, Policy(cluster="day", weight=1e9)):
        pass
    assert is_clustered(client, name="day")
    with client.open_reader("s", wide) as newest:
        assert newest.snapshot(filter=pc.field("day") > 2**33).to_arrow()["id"].to_pylist() == [-1]


def test_another_column_takes_the_place_of_the_one_before(client: persist.Client) -> None:
    read = filled(client)
    client.compact("s", policy=BY_MADE)
    assert reasons(client, Policy(cluster="n")) == ["sort"]
    assert is_clustered(client, name="n")
    assert not is_clustered(client)
    assert reasons(client, Policy(cluster="n")) == []
    assert read.snapshot().to_arrow().num_rows == 8 * ROWS


def test_tasks_have_as_many_clusters_as_there_is_room_for_their_runs(world: World) -> None:
    client = world.client(CONFIG.model_copy(update={"merge_bytes": 2 << 20, "task_bytes": 1 << 30}))
    read = filled(client, 16)
    client.compact("s", policy=BY_MADE)
    runs = len(trace(client)[0].runs)
    with client.open_writer("s", SCHEMA) as write:
        for at in range(16, 33):
            write.compare_and_append(table(np.random.default_rng(at).integers(0, 1000, ROWS), at), at, at + 1)
    seen: list[MergeTask] = []

    def noting(tasks: Any) -> Any:
        seen.extend(tasks)
        return local_engine(client.machine("s"))(tasks)

    before = read.snapshot(as_of=32).to_arrow()
    client.compact("s", policy=Policy(cluster="made", weight=1e9), engine=noting)
    apart = [task for task in seen if task.clusters is not None]
    assert len({(task.clusters.lower, task.clusters.upper) for task in apart if task.clusters}) > 1
    assert max(len(task.inputs) for task in apart) < runs
    assert read.snapshot(as_of=32).to_arrow() == before
    assert is_clustered(client)
    check_world(client, "s")


def test_contents_of_several_runs_and_more_runs_alone_are_taken_from_the_format_on_that_knows_them(
    client: persist.Client,
) -> None:
    filled(client)
    client.compact("s", policy=BY_MADE)
    state = client.inspect("s").state
    [batch] = trace(client)
    times = {part.time_lower for part in batch.parts}
    assert times == {7}
    contents = msgspec.structs.replace(batch, since=persist.at(7))
    assert problems(msgspec.structs.replace(state, contents=contents)) == []
    older = msgspec.structs.replace(state, contents=contents, format=CLUSTERS - 1)
    assert "the contents are not one run of objects" in problems(older)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_cuts_make_clusters_of_about_the_same_weight(count: int) -> None:
    rng = random.Random(count)
    points = [(rng.randrange(10**6), rng.random()) for _ in range(4000)]
    cuts = cuts_of(points, count)
    assert len(cuts) == count - 1
    weights = [0.0] * count
    for value, weight in points:
        weights[sum(cut <= value for cut in cuts)] += weight
    assert max(weights) < 1.2 * sum(weights) / count
    assert cuts_of([(5, 1.0)] * 9, count) == ()
    assert cuts_of([], count) == ()


def test_clusters_are_split_into_as_few_tasks_as_fit() -> None:
    whole = Clusters(1, 9, tuple(range(10, 90, 10)))
    assert split(whole, lambda one: True) == [whole]
    found = split(whole, lambda one: len(one.cuts) < 3)
    assert [one.lower for one in found] == [None, *(one.upper for one in found[:-1])]
    assert sorted([*(cut for one in found for cut in one.cuts), *(one.upper for one in found[:-1] if one.upper)]) == [
        *whole.cuts
    ]
    assert split(whole, lambda one: False)[-1].upper is None
    assert len(split(whole, lambda one: False)) == 9
