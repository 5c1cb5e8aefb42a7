"""Every call says what it cost: appends, snapshots, splits, duties, plans and the census."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.cost import S3_LIST, Cost, Prices
from persist_lib.location import open_location
from persist_lib.location.wrap.metering import CLASS_OF
from persist_lib.location.wrap.spending import CLASSES
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing.faults import RecordingLocation
from tests.worlds import functions_of

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
DEAR = Prices(put=1.0, get=0.5, list=3.0, delete=0.25, commit=10.0, query=100.0)
OBJECTS = persist.Config(inline_bytes=0, rollup_every=4)


class Counted:
    """A client on a location that records what it is asked for."""

    def __init__(self, config: persist.Config) -> None:
        self.recording = RecordingLocation(open_location("memory:", create=True))
        self.client = persist.open(
            self.recording.location, config=config, runtime=Runtime(background=False), prices=DEAR
        )

    def classes(self, act: Callable[[], Any]) -> tuple[Any, Counter[str]]:
        """What a call answered, and the requests that the location saw meanwhile, by class."""
        self.recording.clear()
        answer = act()
        return answer, Counter(CLASSES[CLASS_OF[request.kind]] for request in self.recording.requests)


def told(cost: Cost) -> Counter[str]:
    return Counter({name: n for name in CLASSES if (n := getattr(cost, name))})


@pytest.fixture
def counted() -> Iterator[Counted]:
    counted = Counted(OBJECTS)
    write = counted.client.open_writer("s", SCHEMA)
    for n in range(6):
        write.compare_and_append([{"id": id_, "word": f"w{n}"} for id_ in range(20)], n, n + 1)
    yield counted
    counted.client.close()


def rows(n: int, time: int = 0) -> list[dict[str, Any]]:
    return [{"id": id_, "word": "w", "_time": time, "_diff": 1} for id_ in range(n)]


def test_an_append_costs_one_compare_and_set_and_a_put_for_each_part() -> None:
    counted = Counted(persist.Config())
    with counted.client, counted.client.open_writer("s", SCHEMA) as write:
        first, seen = counted.classes(lambda: write.compare_and_append(rows(1), 0, 1))
        assert told(first.cost) == seen == Counter(commits=2), "the writer registers with its first"
        small, seen = counted.classes(lambda: write.compare_and_append(rows(1, 1), 1, 2))
        assert told(small.cost) == seen == Counter(commits=1)
        assert small.cost.dollars == DEAR.commit
        assert 0 < small.cost.bytes_written < 1000
        large, seen = counted.classes(lambda: write.compare_and_append(rows(50_000, 2), 2, 3))
        assert told(large.cost) == seen == Counter(commits=1, puts=1)
        assert large.cost.bytes_written > counted.client.inspect("s").state.trace[-1].size
        idle, seen = counted.classes(lambda: write.advance_upper(9))
        assert told(idle.cost) == seen == Counter(commits=1)
        covered, seen = counted.classes(lambda: write.append(rows(1, 5), 5, 6))
        assert told(covered.cost) == seen == Counter(queries=1), "looked again before saying that it is there"


def test_uploads_of_several_parts_are_of_the_append_whose_threads_send_them() -> None:
    counted = Counted(persist.Config(inline_bytes=0, part_bytes=64 * 1024))
    counted.client.close()
    client = persist.open(counted.recording.location, config=counted.client.config)  # with threads
    with client, client.open_writer("s", SCHEMA) as write:
        one = write.compare_and_append(rows(20_000), 0, 1)
        assert one.cost.puts == len(client.inspect("s").state.trace[0].parts) > 4


def test_appends_that_share_a_commit_have_its_cost_in_common() -> None:
    counted = Counted(persist.Config())
    batching = persist.Batching(bytes=1 << 20, age_s=60.0)
    with counted.client as client, client.open_writer("s", SCHEMA, batching=batching) as write:
        write.compare_and_append(rows(1), 0, 1)
        futures = [write.append_async(rows(1, n), n, n + 1) for n in range(1, 4)]
        _, seen = counted.classes(write.flush)
        assert seen == Counter(commits=1)
        assert [told(future.result(0).cost) for future in futures] == [seen] * 3
    with persist.open("memory:") as client:
        writers = [client.open_writer(name, SCHEMA) for name in ("a", "b")]
        for write in writers:
            assert write.id
        both = client.compare_and_append_many([persist.Append(write, rows(1), 0, 1) for write in writers])
        assert [each.cost.commits for each in both] == [1, 1], "one transaction for both"


CLOCK = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")
LOOK, COMMIT = Counter({"queries": 1}), Counter({"commits": 1})


def test_a_call_at_the_next_time_looks_first_only_where_others_may_have_written() -> None:
    counted = Counted(persist.Config())
    other = persist.open(counted.recording.location, runtime=Runtime(background=False))
    with counted.client as client, other, client.open_writer("s", CLOCK) as write:
        put = [{"id": 1, "word": "a"}]
        assert counted.classes(lambda: write.upsert(put))[1] == COMMIT + COMMIT, "it registers with its first"
        for word in "bc":
            assert counted.classes(partial(write.upsert, [{"id": 1, "word": word}]))[1] == COMMIT
        assert counted.classes(lambda: write.append_now([{"id": 2, "word": "a"}]))[1] == COMMIT
        for again in (lambda: write.upsert([{"id": 1, "word": "c"}]), lambda: write.append_now([])):
            assert counted.classes(again)[1] == LOOK, "there is nothing to do by the newest contents"
        assert counted.classes(lambda: write.upsert(put, dry_run=True))[1] == LOOK
        with other.open_writer("s", CLOCK) as stranger:
            stranger.upsert([{"id": 1, "word": "d"}])
            done, seen = counted.classes(lambda: write.upsert(put))
            assert (done.updated, seen) == (1, LOOK + LOOK + COMMIT + COMMIT), "it lost its race, and read what was new"
            assert counted.classes(lambda: write.upsert([{"id": 1, "word": "b"}]))[1] == LOOK + COMMIT, (
                "it is not alone"
            )
        with other.open_reader("s") as read, read.snapshot() as snapshot:
            assert snapshot.to_pylist() == [{"id": 1, "word": "b"}, {"id": 2, "word": "a"}]


def test_no_error_is_of_contents_that_another_process_has_changed() -> None:
    counted = Counted(persist.Config())
    other = persist.open(counted.recording.location, runtime=Runtime(background=False))
    unique = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms", unique=True)
    with counted.client as client, other:
        write, sole = client.open_writer("s", CLOCK), client.open_writer("u", unique)
        write.append_now([{"id": 1, "word": word} for word in "ab"])
        sole.append_now([{"id": 1, "word": "a"}])
        for name, schema in (("s", CLOCK), ("u", unique)):
            with other.open_writer(name, schema) as stranger:
                stranger.delete([1])
        assert write.upsert([{"id": 1}]).inserted == 1, "of several rows it could not take what the row lacks"
        assert sole.append_now([{"id": 1, "word": "b"}]).count == 1, "beside the other row it would break a constraint"


def test_small_calls_go_through_few_functions() -> None:
    """Exact counts, with a little room, as a call in another millisecond compares the clocks, which takes five more.

    Who adds a layer to each append has to raise them."""
    most = {"compare_and_append": (330, 46), "append_now": (365, 50), "upsert": (716, 63)}
    with persist.open("memory:", runtime=Runtime(background=False)) as client:
        write = client.open_writer("s", CLOCK)
        for word in "ab":
            write.upsert([{"id": 1, "word": word}])
        upper = write.upper.time or 0
        calls: dict[str, Callable[[], Any]] = {
            "compare_and_append": lambda: write.compare_and_append([{"id": 2, "word": "c"}], upper, upper + 1),
            "append_now": lambda: write.append_now([{"id": 3, "word": "c"}]),
            "upsert": lambda: write.upsert([{"id": 1, "word": "c"}]),
        }
        for name, call in calls.items():
            found = functions_of(call)
            functions, files = most[name]
            assert found.total() <= functions, name
            assert len({file for file, _ in found}) <= files, name


DUTIES: dict[str, Callable[[persist.Client], Any]] = {
    "expire": lambda client: client.expire("s"),
    "retain": lambda client: client.retain("s"),
    "compact": lambda client: client.compact("s"),
    "compact, dry": lambda client: client.compact("s", dry_run=True),
    "roll_up": lambda client: client.roll_up("s"),
    "collect": lambda client: client.collect("s"),
    "audit": lambda client: client.audit_orphans("s"),
    "scrub": lambda client: client.scrub("s"),
    "verify": lambda client: client.verify("s"),
    "maintain": lambda client: client.maintain("s"),
}


@pytest.mark.parametrize("duty", DUTIES)
def test_a_duty_reports_exactly_what_it_asked_of_the_location(counted: Counted, duty: str) -> None:
    report, seen = counted.classes(lambda: DUTIES[duty](counted.client))
    assert told(report.cost) == seen
    assert report.cost.requests > 0
    assert report.cost.dollars == pytest.approx(report.cost.priced(DEAR).dollars)


def test_the_duties_of_a_pass_make_up_for_most_of_it(counted: Counted) -> None:
    done = counted.client.maintain("s")
    parts = (done.expired, done.retained, done.compacted, done.rolled_up, done.collected, done.audited)
    assert sum((part.cost for part in parts), Cost()).puts == done.cost.puts == 2, "one part, one rollup"
    assert done.cost.requests > sum(part.cost.requests for part in parts), "the census before and after is in it too"
    [applied] = done.compacted.applied
    assert applied.cost.gets == 6
    assert applied.cost.bytes_read >= done.compacted.bytes_in


def test_a_snapshot_costs_what_reading_it_took_and_grows_as_it_is_read(counted: Counted) -> None:
    with counted.client.open_reader("s") as read:
        snapshot, seen = counted.classes(lambda: read.snapshot(5, diff=True))
        assert told(snapshot.cost) == seen
        found = snapshot.cost
        tables = snapshot.batches()
        assert snapshot.cost == found, "nothing is fetched before it is asked for"
        next(tables)
        assert snapshot.cost.gets == 6, "a merge begins with the first of every run"
        counted.client.shards()
        _, seen = counted.classes(lambda: list(tables))
        before = snapshot.cost
        _, seen = counted.classes(snapshot.to_arrow)
        assert told(snapshot.cost) - told(before) == seen == Counter(gets=6)
        assert snapshot.cost.queries == found.queries, "what happens beside it is not its own"
        assert snapshot.cost.bytes_read == found.bytes_read + 2 * snapshot.size
        snapshot.release()


PROGRAM = """
import pickle, sys
import persist_lib as persist
split = pickle.load(sys.stdin.buffer)
with persist.Spending() as spent:
    rows = split.to_arrow().num_rows
sys.stdout.buffer.write(pickle.dumps((rows, spent.cost)))
"""


@pytest.mark.slow
def test_a_split_that_is_read_in_another_process_tells_there_what_it_cost(tmp_path: Path) -> None:
    import pickle  # noqa: PLC0415

    with persist.open(f"file:{tmp_path}/data", config=OBJECTS) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([{"id": id_, "word": "w"} for id_ in range(1000)], 0, 1)
        with read.snapshot(0, diff=True) as snapshot:
            [split] = snapshot.splits(1)
            program = [sys.executable, "-W", "error", "-c", PROGRAM]
            done = subprocess.run(
                program, input=pickle.dumps(split), capture_output=True, check=True, cwd=Path(__file__).parents[3]
            )
            rows, cost = pickle.loads(done.stdout)
            assert rows == 1000
            assert cost == Cost(gets=1, bytes_read=snapshot.size)
            assert snapshot.cost.gets == 0
            client.charge(cost)
            assert client.metrics().cost.gets >= 1


def test_plans_and_the_census_have_the_prices_of_the_client(counted: Counted) -> None:
    dry = counted.client.compact("s", dry_run=True)
    assert dry.plan.cost.dollars == pytest.approx(6 * 0.5 + 1 * 1.0)
    assert dry.cost.gets == dry.cost.puts == 0, "it only looked at the state"
    own = counted.client.compact("s", dry_run=True, policy=persist.Policy(prices=Prices(get=0.0, put=7.0)))
    assert own.plan.cost.dollars == pytest.approx(7.0), "a policy's own prices win"
    state = counted.client.inspect("s").state
    stored = state.size + sum(rollup.size for rollup in state.rollups.values())
    assert counted.client.census("s").dollars_month == pytest.approx(stored / 2**30 * S3_LIST.gib_month)
    with persist.open("memory:") as client:
        client.open_writer("s", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 0, 1)
        assert client.census("s").dollars_month == 0


def test_what_a_compaction_was_planned_to_take_is_what_it_took(counted: Counted) -> None:
    done = counted.client.compact("s")
    assert (done.plan.cost.gets, done.plan.cost.puts) == (done.cost.gets, done.cost.puts) == (6, 1)
