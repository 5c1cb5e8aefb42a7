"""Steered on a real `dagster dev`, by rules and plans in the location: on SQLite and on PostgreSQL as its storage."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from tests.orchestration.dagster_dev import STORAGES, DagsterDev, dagster_dev, store_in, workspace_of
from tests.orchestration.test_alerts import Receiver
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(400)]
CLOCK = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms")
PLAIN = persist.Schema({"id": "int64 not null"}, {"n": "int64"}, unique=True)


TWO = """import dagster as dg
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
defs = dg.Definitions.merge(
    build_definitions(Settings(is_running=False)),
    build_definitions(Settings(location={other!r}, is_running=False, data={{"tables": []}}), name="other"),
)
"""
"""Two locations, as two pipelines of one instance."""
POOL, STAGGER = "rewriting", 40


class Steered:
    """A pipeline that plans by a person, its location, and what its alerts are posted to."""

    def __init__(self, dev: DagsterDev, client: persist.Client, receiver: Receiver) -> None:
        self.dev, self.client, self.receiver = dev, client, receiver

    def launch(self, job: str, op: str, **config: object) -> str:
        run = self.dev.launch(job, {"ops": {op: {"config": config}}})
        assert self.dev.wait_finished(run).status in ("SUCCESS", "FAILURE")
        return run

    def page(self, asset: str, partition: str | None = None) -> dict[str, Any]:
        return dict(self.dev.materializations(asset, partition)[0]["metadata"])


@pytest.fixture(scope="module", params=STORAGES)
def steered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    base = tmp_path_factory.mktemp(f"steered_{request.param}")
    home, folder, receiver = base / "home", base / "data", Receiver()
    store_in(home, request.param)
    env = {
        "PERSIST_LOCATION": f"file:{folder}", "PERSIST_CONFIG": json.dumps(SMALL), "PERSIST_APPLY": "by a person",
        "PERSIST_ALERT_URL": receiver.url, "PERSIST_SPARK_MASTER": "local[1]",
        "PERSIST_POOL": POOL, "PERSIST_STAGGER": str(STAGGER),
    }  # fmt: skip
    with persist.open(f"file:{base / 'other'}", create=True) as client:
        write(client, "far", batches=6, rows=5)
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as client:
        for name in ("events_a", "events_b"):
            write(client, name, batches=6, rows=5)
        with client.controller() as controller:
            controller.create("sales", PLAIN, mode="compare_and_append", retention=0)
            with controller.open_writer("sales") as writer:
                for number in range(3):
                    writer.upsert([{"id": number, "n": number}])
        client.table("orders", CLOCK).append([{"id": 1, "n": 1}])
        with dagster_dev(home, workspace_of(base, persist=TWO.format(other=f"file:{base / 'other'}")), env) as dev:
            dev.wait_loaded()
            assert not dev.load_error()
            yield Steered(dev, client, receiver)
    receiver.close()


def test_a_budget_pauses_compaction_until_the_day_ends_and_each_page_says_so(steered: Steered) -> None:
    steered.client.set_rules([{"pattern": "events_*", "bytes_day": 1, "order": "newest", "verify_reads": 0}])
    first = steered.launch("compaction", "compaction_of_shards", apply="at once", engine="local", in_flight=1)
    assert steered.dev.run(first).status == "SUCCESS", steered.dev.why(first)
    done = [one for one in ("events_a", "events_b") if steered.client.census(one).batches == 1]
    assert len(done) == 1, "the last that may begin ends the budget"
    (other,) = {"events_a", "events_b"} - {*done}
    again = steered.launch("compaction", "compaction_of_shards", apply="at once", engine="local", shards=[other])
    assert "is paused by the rule 'events_*'" in steered.dev.why(again)
    assert steered.client.census(other).batches == 6
    steered.launch("fleet", "reporting_of_shards", shards=[other])
    fleet = str(steered.page("fleet")["page"])
    assert "#### Rules" in fleet
    assert "bytes\\_day 1; order newest; verify\\_reads 0" in fleet
    assert "of 1 B" in fleet
    page = str(steered.page("shard_page", other)["page"])
    assert "#### How it is looked after" in page
    assert "the rule 'events\\_\\*'" in page
    began = time.time()
    steered.dev.start_sensor("compaction_debt")
    tick = steered.dev.wait_tick("compaction_debt", began)
    steered.dev.stop_sensor("compaction_debt")
    assert "1 are not compacted, as that is paused" in str(tick["skipReason"])


def test_what_collections_give_up_is_planned_applied_and_refused_once_it_moved(steered: Steered) -> None:
    def since() -> int | None:
        with steered.client.controller() as controller:
            return controller.describe("sales").since.time

    planned = steered.launch("collections", "collections_of_collections")
    assert steered.dev.run(planned).status == "SUCCESS", steered.dev.why(planned)
    assert since() == 0
    assert steered.page("plans")["collections"] == 1
    stale = steered.launch("collections", "collections_of_collections")
    applied = steered.launch("apply", "applying_of_plan", run_id=planned)
    assert steered.dev.run(applied).status == "SUCCESS", steered.dev.why(applied)
    assert since() == 2
    with steered.client.controller() as controller, controller.open_writer("sales") as writer:
        writer.upsert([{"id": 9, "n": 9}])
    refused = steered.launch("apply", "applying_of_plan", run_id=stale)
    assert steered.dev.run(refused).status == "FAILURE"
    assert "PlanMoved: collection sales: it has moved" in steered.dev.failure_of(refused)
    assert since() == 2


def test_a_limit_in_the_location_is_posted_once(steered: Steered) -> None:
    steered.client.set_rules([{"pattern": "ord*", "still": 0}])
    began = time.time()
    steered.dev.start_sensor("alerts")
    steered.dev.wait_tick("alerts", began)
    steered.dev.wait_tick("alerts", time.time())
    steered.dev.stop_sensor("alerts")
    told = [one for one in steered.receiver.said() if one[1] == "still:table:orders"]
    assert told == [("opened", "still:table:orders")]


@pytest.mark.parametrize("limit", [1, 2])
def test_at_most_so_many_runs_compact_at_once_over_all_locations(steered: Steered, limit: int) -> None:
    """By the limit that a person sets in the UI."""
    query = "mutation ($pool: String!, $limit: Int!) { setConcurrencyLimit(concurrencyKey: $pool, limit: $limit) }"
    assert steered.dev.ask(query, pool=POOL, limit=limit)["setConcurrencyLimit"] is True
    assert at_once(steered) == limit


def at_once(steered: Steered) -> int:
    """How many runs that may compact were under way at once, of five that were launched at once."""
    jobs = ["compaction", "maintenance", "other_compaction", "other_maintenance"]
    runs = [
        steered.dev.launch(job, {"ops": {f"{job}_of_shards": {"config": {"everything": True, "engine": "local"}}}})
        for job in jobs
    ]
    runs.append(steered.dev.launch_partition(["compaction"], "events_a", {"ops": {"shard_duties": {"config": {}}}}))
    found = [steered.dev.wait_finished(run) for run in runs]
    assert {one.status for one in found} == {"SUCCESS"}, [steered.dev.why(one.id) for one in found]
    spans = [(dequeued(steered, one.id), one.ended or 0) for one in found]
    return max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans)


def dequeued(steered: Steered, run: str) -> float:
    """When a run left the queue, in seconds: from then on it has a process."""
    return min(event.seconds for event in steered.dev.events(run) if "STARTING" in event.kind)


def test_schedules_of_two_locations_tick_at_other_minutes(steered: Steered) -> None:
    query = """query ($selector: ScheduleSelector!) { scheduleOrError(scheduleSelector: $selector) {
      ... on Schedule { cronSchedule } } }"""

    def cron(name: str) -> str:
        selector = {"repositoryLocationName": steered.dev.location, "repositoryName": "__repository__"}
        answer = steered.dev.ask(query, selector={**selector, "scheduleName": name})
        return str(answer["scheduleOrError"]["cronSchedule"])

    there = {name: cron(f"{name}garbage_schedule") for name in ("", "other_")}
    minutes = {int(one.partition(" ")[0]) for one in there.values()}
    assert all(7 <= minute < 7 + STAGGER for minute in minutes)
