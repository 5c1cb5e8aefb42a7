"""Contents that are kept ahead: every read is what it was, those from their time on touch less, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib import report
from persist_lib.core.formats import CREATED, PART_SUMS, SCHEMAS_SAY_MORE
from persist_lib.core.plan.compaction import Policy
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.testing import Rival, check_swept, check_world
from tests.shards import TINY
from tests.unit.maintain.surveys import deaths
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True)
CONFIG = TINY.model_copy(update={"lease_ms": 60_000})
Rows = list[tuple[Any, ...]]


def life(client: persist.Client, steps: int = 12, seed: int = 0) -> dict[int, Rows]:
    """Upserts and deletes over 200 rows, and what was read at each time."""
    rng, seen = random.Random(seed), dict[int, Rows]()
    with client.open_writer("s", SCHEMA) as write:
        write.upsert([{"id": id_, "word": f"w{id_}"} for id_ in range(200)])
        seen[0] = rows(client, 0)
        for step in range(1, steps + 1):
            if step % 4:
                write.upsert([{"id": id_, "word": f"{step}-{id_}"} for id_ in rng.sample(range(240), 20)])
            else:
                write.delete([{"id": id_} for id_ in rng.sample(range(240), 20)])
            seen[step] = rows(client, step)
    return seen


def rows(client: persist.Client, as_of: int, **how: Any) -> Rows:
    with client.open_reader("s") as read, read.snapshot(as_of, **how) as snapshot:
        return sorted(tuple(one.values()) for one in snapshot.to_pylist())


def changes(client: persist.Client) -> Rows:
    with client.open_reader("s") as read, read.changes(None) as found:
        return sorted(tuple(one.values()) for one in found.to_pylist())


def kept(client: persist.Client) -> Any:
    return client.inspect("s").state.contents


def test_every_time_reads_as_before_and_the_newest_reads_one_object(world: World, client: persist.Client) -> None:
    seen = life(client)
    before = changes(client)
    client.maintain("s")
    ahead = kept(client)
    assert (ahead.since, ahead.count, len(ahead.parts)) == (persist.at(12), len(seen[12]), 1)
    assert {as_of: rows(client, as_of) for as_of in seen} == seen
    assert changes(client) == before, "history is read from the trace"
    assert rows(client, 12, keys=[3]) == [row for row in seen[12] if row[0] == 3]
    assert rows(client, 12, filter=pc.field("id") < 9) == [row for row in seen[12] if row[0] < 9]
    world.requests.clear()
    rows(client, 12)
    read = {request.key for request in world.requests if request.kind.startswith("get")}
    assert {key.partition("/")[2] for key in read} == set(ahead.keys)
    check_world(client, "s")


def test_what_comes_later_is_added_to_them(client: persist.Client) -> None:
    life(client)
    client.maintain("s")
    ahead = kept(client)
    with client.open_writer("s", SCHEMA) as write:
        write.upsert([{"id": 5, "word": "later"}, {"id": 999, "word": "new"}])
        write.delete([{"id": 6}])
        with pytest.raises(persist.ConstraintViolated):
            write.append_now([{"id": 999, "word": "twice"}])
    client.maintain("s")
    assert kept(client) == ahead, "a few changes are not worth a rewriting"
    found: dict[int, str] = dict(rows(client, 14))
    assert (found[5], found[999], 6 in found) == ("later", "new", False)
    with client.open_reader("s") as read, read.snapshot(14) as snapshot:
        pieces = [table for split in snapshot.splits(3) for table in split.to_arrow().to_pylist()]
    assert sorted((one["id"], one["word"]) for one in pieces) == rows(client, 14)
    assert client.restore("s", 12).rows
    assert rows(client, 15) == rows(client, 12)


def test_they_take_the_place_of_history_that_is_given_up_without_being_written_again(
    world: World, client: persist.Client
) -> None:
    seen = life(client)
    client.maintain("s")
    ahead = kept(client)
    client.set_retention("s", 0)
    client.retain("s")
    world.requests.clear()
    (applied,) = client.compact("s").applied
    assert (applied.reason, applied.bytes_out, applied.cost.puts) == ("settle", 0, 0)
    assert kept(client) is None
    (batch,) = (one for one in client.inspect("s").state.trace if one.count)
    assert batch.parts == ahead.parts
    assert rows(client, 12) == seen[12]
    client.maintain("s")
    client.maintain("s")
    check_swept(client, "s")


def test_what_adds_up_without_them_is_not_written_twice(client: persist.Client) -> None:
    with client.open_writer("s", SCHEMA) as write:
        for step in range(12):
            write.append_now([{"id": 100 * step + n, "word": "only added"} for n in range(100)])
    client.maintain("s")
    assert kept(client) is None


@pytest.mark.parametrize("config", [{"compaction_ahead": 0.0}, {"format": 1}, {"format": 5}, {"part_bytes": 128 << 20}])
def test_they_are_off_in_older_formats_and_where_they_are_not_wanted_or_not_worth_it(
    world: World, config: dict[str, Any]
) -> None:
    client = world.client(CONFIG.model_copy(update=config))
    life(client) if config.get("format") != 1 else legacy(client)
    client.maintain("s")
    assert kept(client) is None
    assert client.inspect("s").state.format == config.get("format", CREATED)


def legacy(client: persist.Client) -> None:
    with client.open_writer("s", persist.Schema({"id": "int64"}, {"word": "string"})) as write:
        for step in range(12):
            write.upsert([{"id": n, "word": f"{step} {n}"} for n in range(100)])


def test_a_shard_says_that_they_are_there_and_a_finished_one_has_none(client: persist.Client) -> None:
    life(client)
    client.maintain("s")
    ahead, census = kept(client), client.census("s")
    assert client.inspect("s").state.format >= PART_SUMS
    assert census.ahead == ahead.size
    client.audit_orphans("s")
    check_world(client, "s")
    (why,) = client.explain("s", key=ahead.keys[0])
    assert "kept ahead" in why.says
    assert not client.scrub("s").damaged
    client.finish("s")
    client.maintain("s")
    client.maintain("s")
    check_swept(client, "s")


def test_contents_that_are_damaged_are_given_up_and_made_again(world: World, client: persist.Client) -> None:
    seen = life(client)
    client.maintain("s")
    key = f"s/{kept(client).keys[0]}"
    world.inner.blob.delete(key)
    world.inner.blob.set(key, b"damaged")
    with pytest.raises(persist.Corrupt):
        rows(client, 12)
    assert [id_ for id_, _ in client.scrub("s").damaged] == [(0, 13)]
    (done,) = client.compact("s", policy=Policy(ahead=0)).applied
    assert (done.reason, done.tasks, kept(client)) == ("drop", 0, None)
    assert rows(client, 12) == seen[12], "the trace has all of it"
    client.maintain("s")
    assert kept(client) is not None
    assert rows(client, 12) == seen[12]
    assert not client.scrub("s").damaged


def test_a_rival_that_compacts_or_keeps_others_is_met_with_words_and_nothing_is_lost(world: World) -> None:
    seen = life(world.client(CONFIG))
    rival = Rival(world.inner.consensus)
    client, other = world.client(CONFIG, rival=rival), world.client(CONFIG)
    client.worker("s").id  # noqa: B018 - registered before the race

    def engine(tasks: Any) -> Any:
        results = list(local_engine(client.machine("s"))(tasks))
        rival.before_next(lambda: other.compact("s"))
        return results

    done = client.compact("s", engine=engine)
    assert [one.seqno for one in done.applied if one.reason == "ahead"] == [None]
    assert rows(client, 12) == seen[12]
    check_world(client, "s")


@pytest.mark.parametrize("happens", [True, False])
def test_a_compactor_that_dies_at_any_request_leaves_a_whole_shard(happens: bool) -> None:
    for _, other, seen in deaths(
        range(1, 40), CONFIG, lambda client: life(client, steps=6), lambda dying: dying.maintain("s"), happens=happens
    ):
        assert rows(other, 6) == seen[6]
        other.maintain("s")
        assert kept(other) is not None
        assert {as_of: rows(other, as_of) for as_of in seen} == seen
        check_world(other, "s")


def test_a_rule_says_how_much_is_written_ahead_of_a_shard(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist_lib.core.formats.CREATED", SCHEMAS_SAY_MORE)
    life(client)
    client.set_rules([{"pattern": "s*", "compaction_ahead": 0}])
    assert [one.reason for one in client.compact("s", dry_run=True).plan.requests] == ["merge"]
    client.set_rules([{"pattern": "s*", "compaction_ahead": 0.05}])
    assert client.compact("s", dry_run=True).plan.requests[0].reason == "ahead"
    held_back = Policy(ahead=0.05, format=5)
    assert [one.reason for one in client.compact("s", policy=held_back, dry_run=True).plan.requests] == ["merge"]


def test_policies_say_how_much_is_written_ahead(client: persist.Client) -> None:
    life(client)
    with pytest.raises(persist.InvalidUsage, match="ahead"):
        Policy(ahead="often")  # type: ignore[arg-type]
    assert [one.reason for one in client.compact("s", policy=Policy(ahead=10.0), dry_run=True).plan.requests] == [
        "merge"
    ]
    assert client.compact("s", dry_run=True).plan.requests[0].reason == "ahead"


def test_a_report_takes_what_was_kept_ahead_for_a_compaction(client: persist.Client) -> None:
    life(client)
    client.compact("s", policy=Policy(weight=0))
    kept_at = next(one for one in report.shard(client, "s").actions if one.duty == "compaction")
    assert kept_at.seqno == kept(client).born


def test_contents_are_cut_small_and_what_is_only_appended_is_not(
    client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next contents may keep small parts. Large ones are fewer, and columns are read out of them."""
    monkeypatch.setattr("persist_lib.core.plan.compaction.CHUNK_BYTES", 64)
    life(client)
    with client.open_writer("appended", SCHEMA) as write:
        for step in range(12):
            write.append_now([{"id": 100 * step + n, "word": "w"} for n in range(100)])
    policy = Policy(part_bytes=4096, weight=1e9, ahead=1e-6)
    for shard, reason, is_small in (("s", "ahead", True), ("appended", "merge", False)):
        (request, *_) = client.compact(shard, policy=policy, dry_run=True).plan.requests
        assert (request.reason, request.part_bytes < 4096) == (reason, is_small)
