"""A merge keeps the parts that no newer update touches: nothing is lost, and only what changed is written again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import PART_SUMS
from persist_lib.core.plan.compaction import Policy, plan_contents, policy_of
from persist_lib.core.sums import Sums
from persist_lib.maintain.compaction import carry_out
from persist_lib.maintain.merge_tasks import local_engine
from persist_lib.testing import Rival, check_swept, check_world
from tests.circles import by_day
from tests.shards import TINY
from tests.unit.maintain.surveys import deaths
from tests.worlds import World

SCHEMA = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True)
SMALL = 4096
CONFIG = TINY.model_copy(
    update={"lease_ms": 60_000, "part_bytes": SMALL, "task_bytes": 4 * SMALL, "merge_bytes": 1 << 24}
)
AHEAD = Policy(ahead=1e-6)
"""Whatever does not count is worth contents."""
ROWS = 5_000
Rows = list[tuple[Any, ...]]


def filled(client: persist.Client, count: int = ROWS) -> dict[Any, str]:
    """A shard whose contents are kept ahead in a dozen parts and more, and what is in it."""
    rng = random.Random(0)
    words = {id_: f"{rng.getrandbits(64):x}" for id_ in range(count)}
    change(client, words)
    change(client, changed := {5: "first"})
    compact(client)
    assert len(kept(client).parts) > count // 700
    assert client.inspect("s").state.format >= PART_SUMS
    return words | changed


def change(client: persist.Client, words: Mapping[Any, str | None], schema: persist.Schema = SCHEMA) -> None:
    """Upsert these rows, and delete those without a word."""
    with client.open_writer("s", schema) as write:
        if there := [{"id": id_, "word": word} for id_, word in words.items() if word is not None]:
            write.upsert(there)
        if gone := [{"id": id_} for id_, word in words.items() if word is None]:
            write.delete(gone)


def compact(client: persist.Client, engine: Any = None) -> Any:
    """Keep the contents as of the newest update ahead, whatever they weigh; what was done."""
    machine = client.machine("s")
    request = plan_contents(machine.fetch().state, policy_of(machine.config))
    with client.worker("s") as worker:
        return request and carry_out(machine, worker, request, engine or local_engine(machine))


def kept(client: persist.Client) -> Any:
    return client.inspect("s").state.contents


def keeping(worker: Any, contents: Any, _state: Any, _now: int) -> c.KeepContents:
    return c.KeepContents(worker, contents)


def rows(client: persist.Client, as_of: int | None = None) -> Rows:
    with client.open_reader("s") as read, read.snapshot(as_of) as snapshot:
        return sorted((one["id"], one["word"]) for one in snapshot.to_pylist())


def test_only_parts_that_a_change_touches_are_written_again(world: World, client: persist.Client) -> None:
    words, before = filled(client), kept(client)
    change(client, {1_000: "other", 1_001: "again"})
    world.requests.clear()
    done, after = compact(client), kept(client)
    stayed = {*before.keys} & {*after.keys}
    assert len(stayed) == len(before.parts) - 1
    assert done.bytes_out == sum(part.size for part in after.parts if part.key not in stayed) < 4 * SMALL
    assert done.bytes_in < 8 * SMALL, "of the contents one part was read, and what is newer"
    read = {request.key.partition("/")[2] for request in world.requests if request.kind.startswith("get")}
    assert len(read & {*before.keys}) == 1
    assert (after.count, after.since) == (ROWS, persist.at(after.upper.time - 1))
    assert rows(client) == sorted((words | {1_000: "other", 1_001: "again"}).items())
    check_world(client, "s")


@pytest.mark.parametrize(
    "words",
    [
        {-1: "before all"},
        {ROWS + 7: "after all"},
        {0: None},
        {ROWS - 1: None},
        dict.fromkeys(range(1000, 1900)),
        dict.fromkeys(range(ROWS), "all"),
        dict.fromkeys(range(ROWS)),
        dict.fromkeys(range(0, ROWS, 50), "thinly"),
        {ROWS + id_: "many" for id_ in range(ROWS)},
    ],
    ids=lambda words: f"{len(words)} from {min(words)}",
)
def test_wherever_the_changes_are_all_of_it_is_read_afterwards(client: persist.Client, words: dict[int, Any]) -> None:
    known, before = filled(client), rows(client)
    then = kept(client).upper.time - 1
    change(client, words)
    compact(client)
    expected = sorted((id_, word) for id_, word in (known | words).items() if word is not None)
    assert rows(client) == expected
    assert rows(client, then) == before
    assert kept(client).count == len(expected)
    check_world(client, "s")


KINDS = {
    "numbers": lambda number: number,
    "texts that begin alike": lambda number: f"{'so begin all of them ':_<80}{number:05}",
    "texts of which few begin alike": lambda number: f"{number // 700:03}{'x' * 70}{number:05}",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_any_history_reads_as_a_mapping_would(client: persist.Client, kind: str, seed: int) -> None:
    rng, key = random.Random(seed), KINDS[kind]
    schema = SCHEMA if kind == "numbers" else persist.Schema({"id": "string"}, {"word": "string"}, unique=True)
    model: dict[Any, str] = {key(number): f"{rng.getrandbits(64):x}" for number in range(2_000)}
    change(client, dict(model), schema)
    seen, stayed, policy = {0: sorted(model.items())}, 0, AHEAD
    for step in range(1, 16):
        start, width = rng.randrange(2_200), rng.choice([1, 30, 400])
        words = {key(start + at): rng.choice([f"{step}", None]) for at in range(0, width, rng.choice([1, 7]))}
        with client.open_writer("s", schema) as write:
            write.upsert([{"id": id_, "word": word or "gone"} for id_, word in words.items()])
            if gone := [{"id": id_} for id_, word in words.items() if word is None]:
                write.delete(gone)
            time = (client.inspect("s").state.upper.time or 0) - 1
        model |= {id_: word for id_, word in words.items() if word is not None}
        for id_ in (one for one, word in words.items() if word is None):
            model.pop(id_, None)
        seen[time] = sorted(model.items())
        if step % 5 == 0:
            client.set_retention("s", rng.choice([0, 4]))
            client.retain("s")
        before = {part.key for batch in client.inspect("s").state.stored for part in batch.parts}
        done = client.compact("s", policy=policy)
        now = {part.key for batch in client.inspect("s").state.stored for part in batch.parts}
        stayed += len(before & now) if done.applied else 0
    since = client.inspect("s").state.since
    assert {as_of: rows(client, as_of) for as_of in seen if since <= persist.at(as_of)} == {
        as_of: found for as_of, found in seen.items() if since <= persist.at(as_of)
    }
    assert stayed or kind == "texts that begin alike", "bounds do not tell these apart, so that none is kept"
    check_world(client, "s")
    for _ in range(3):
        client.maintain("s")
    check_swept(client, "s")


def test_small_parts_do_not_pile_up(world: World) -> None:
    client = world.client(CONFIG.model_copy(update={"part_bytes": 2 * SMALL}))
    words, step = filled(client), ROWS // 20
    before = len(kept(client).parts)
    for start in range(0, ROWS, step):  # all but a few rows go, piece by piece
        gone = {id_: None for id_ in range(start, start + step) if id_ % 50}
        change(client, gone)
        words = {id_: word for id_, word in words.items() if id_ not in gone}
        compact(client)
    assert len(kept(client).parts) < before / 3
    assert rows(client) == sorted(words.items())


def test_where_no_history_is_kept_a_merge_of_the_trace_keeps_parts_as_well(client: persist.Client) -> None:
    words = filled(client)
    client.set_retention("s", 0)
    for step in range(3):
        change(client, news := {1_500: f"{step}"})
        words |= news
        client.retain("s")
        client.compact("s", policy=Policy(weight=1e9))
    change(client, {7: "seven"})
    client.retain("s")
    before = {part.key for batch in client.inspect("s").state.trace for part in batch.parts}
    client.compact("s", policy=Policy(weight=1e9))
    (batch,) = (one for one in client.inspect("s").state.trace if one.count)
    assert len({*batch.keys} & before) >= len(batch.parts) - 2
    assert rows(client) == sorted((words | {7: "seven"}).items())
    check_world(client, "s")


def test_history_that_adds_up_by_now_is_not_kept_for_its_keys(client: persist.Client) -> None:
    """A part with both sides of a change is written again once since has passed them, if newer ones touch it or not."""
    with client.open_writer("s", SCHEMA) as write:
        write.upsert([{"id": id_, "word": f"{id_:064}"} for id_ in range(2_000)])
        write.upsert([{"id": 3, "word": "later"}])
    client.upgrade("s")
    client.compact("s", policy=Policy(weight=1e9, ahead=0))
    change(client, {1_999: "last"})
    client.set_retention("s", 0)
    client.retain("s")
    client.compact("s", policy=Policy(weight=1e9, ahead=0))
    (batch,) = (one for one in client.inspect("s").state.trace if one.count)
    assert batch.count == 2_000
    check_world(client, "s")


def test_the_state_machine_refuses_parts_whose_sums_do_not_add_up(client: persist.Client) -> None:
    filled(client)
    change(client, {9: "nine"})
    machine = client.machine("s")
    state, old = machine.fetch().state, kept(client)
    with client.worker("s") as worker:
        for wrong in (
            msgspec.structs.replace(old, parts=old.parts[1:], runs=(0,), count=old.count - old.parts[0].rows),
            msgspec.structs.replace(
                old, parts=(msgspec.structs.replace(old.parts[0], sums=Sums(old.parts[0].rows, 1, 1)), *old.parts[1:])
            ),
        ):
            batches = [one for one in state.trace if one.hi > old.hi and one.count]
            moved = msgspec.structs.replace(
                wrong, hi=batches[-1].hi, upper=batches[-1].upper, since=persist.at((batches[-1].upper.time or 1) - 1),
                diff_sum=old.diff_sum + sum(one.diff_sum for one in batches),
                fingerprint=(old.fingerprint + sum(one.fingerprint for one in batches)) % 2**64,
            )  # fmt: skip
            answer = machine.try_commit(partial(keeping, worker.id, moved))
            assert isinstance(answer, r.NotEquivalent)
            assert "add up to" in str(answer)
    assert kept(client) == old


@pytest.mark.parametrize("rival_drops", [False, True])
def test_a_rival_that_replaces_the_contents_is_met_with_words_and_nothing_is_lost(
    world: World, rival_drops: bool
) -> None:
    words = filled(world.client(CONFIG))
    rival = Rival(world.inner.consensus)
    client, other = world.client(CONFIG, rival=rival), world.client(CONFIG)
    change(client, {9: "nine"})
    client.worker("s").id  # noqa: B018 - registered before the race

    def engine(tasks: Any) -> Any:
        results = list(local_engine(client.machine("s"))(tasks))

        def replaced() -> None:
            if not rival_drops:
                change(other, {9: "ten"})
            other.compact("s", policy=Policy(ahead=0) if rival_drops else AHEAD)

        rival.before_next(replaced)
        return results

    done = client.compact("s", policy=AHEAD, engine=engine)
    assert [one.seqno for one in done.applied if one.reason == "ahead"] == [None]
    assert rows(client) == sorted((words | {9: "nine" if rival_drops else "ten"}).items())
    check_world(client, "s")


def test_inputs_that_a_rival_has_replaced_and_deleted_are_skipped(world: World) -> None:
    client, other = world.client(CONFIG), world.client(CONFIG)
    words, whole = filled(client), Policy(weight=1e9)
    client.set_retention("s", 0)
    for word in ("first", "second"):
        change(client, {7: word})
        client.retain("s")
        client.compact("s", policy=whole)
    change(client, {9: "nine"})
    client.retain("s")
    (request,) = client.compact("s", policy=whole, dry_run=True).plan.requests
    assert request.reason == "merge"
    assert other.compact("s", policy=whole).applied
    for _ in range(3):
        other.roll_up("s", force=True)
        other.collect("s")
    assert not any(client.blob.get(f"s/{key}") for key in request.inputs[-1].keys)
    machine = client.machine("s")
    with client.worker("s") as worker:
        done = carry_out(machine, worker, request, local_engine(machine))
    assert done.seqno is None
    assert rows(client) == sorted((words | {7: "second", 9: "nine"}).items())


@pytest.mark.parametrize("happens", [True, False])
def test_a_compactor_that_dies_at_any_request_leaves_a_whole_shard(happens: bool) -> None:
    def life(client: persist.Client) -> dict[Any, str]:
        words = filled(client, 1_200)
        change(client, {9: "nine"})
        return words | {9: "nine"}

    numbers = by_day(range(1, 60), 4)
    for _, other, words in deaths(
        numbers, CONFIG, life, lambda dying: dying.compact("s", policy=AHEAD), happens=happens
    ):
        other.maintain("s")
        assert rows(other) == sorted(words.items())
        check_world(other, "s")


@pytest.mark.parametrize("as_", ["iceberg", "delta"])
def test_a_publication_goes_on_naming_what_did_not_change(client: persist.Client, as_: Any) -> None:
    words = filled(client)
    first = client.publish("s", as_)
    change(client, {1_000: "other"})
    again = client.publish("s", as_)
    assert again.shared >= again.files - 2 > 8
    assert again.rewritten < 4 * SMALL
    assert (again.copied, again.rows, first.rows) == (0, len(words), len(words))
    client.maintain("s")
    check_world(client, "s")


def test_for_delta_what_stands_elsewhere_is_written_once_and_not_twice(client: persist.Client) -> None:
    filled(client)
    change(client, {9: "nine"})
    first = client.publish("s", "delta")
    assert first.rewritten == first.size


def test_settings_that_say_an_older_format_keep_no_parts(world: World) -> None:
    client = world.client(CONFIG.model_copy(update={"format": 8}))
    change(client, {id_: f"{id_:064}" for id_ in range(ROWS)})
    change(client, {1: "one"})
    compact(client)
    before = kept(client)
    change(client, {2: "two"})
    compact(client)
    assert client.inspect("s").state.format < PART_SUMS
    assert not {*before.keys} & {*kept(client).keys}
    assert len(rows(client)) == ROWS
