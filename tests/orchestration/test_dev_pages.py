"""The pages that a person on call looks at, in a headless Chromium: what is wrong is on them, in words.

`make ui` runs this and keeps the pictures in docs/pictures. Without a Chromium it is skipped, and says why.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

import persist_lib as persist
from orchestration.partitions import NONE_YET
from tests.orchestration.dagster_dev import ROOT, STOPPED, DagsterDev, dagster_dev, wait_until, workspace_of
from tests.orchestration.test_alerts import Receiver
from tests.spark.collections import SMALL, damage_a_part, write

FOUND = subprocess.run([ROOT / "scripts" / "chromium"], capture_output=True, text=True, check=False)
pytestmark = [pytest.mark.dagster, pytest.mark.timeout(600)]

KEPT = os.environ.get("PERSIST_PICTURES")
"""The folder that pictures are kept in; without it they are only taken."""
SLOW_MS = 30_000
"""How long a page may take to show what it is to show, on a busy machine."""
LARGEST = 150_000
"""The most bytes of one picture."""
WITHOUT_PATHS = """root => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode())
    walker.currentNode.nodeValue = walker.currentNode.nodeValue.replaceAll(root, "~/persist")
}"""
"""Pictures of stack traces are the same wherever this repository lies."""
HEALTHY = ["accounts", "customers", "events", "invoices", "orders", "payments"]
INDEBTED = ["clicks", "sessions"]
DAMAGED = "shipments"
HURRIED = STOPPED + "for sensor in defs.sensors:\n    sensor._min_interval = 5\n"


@dataclass(frozen=True)
class Seen:
    """What was done before the pages are looked at: the ids of its runs and its backfill."""

    dev: DagsterDev
    compaction: str
    scrub: str
    backfill: str
    told: Counter[str]
    """What the alerts' receiver got, over several ticks: how often each key."""
    url: str
    """The location."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Where alerts go."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Seen]:
    """A location with healthy, indebted and damaged shards, after a failed job, a scrub, a backfill and a tick."""
    if FOUND.returncode:
        pytest.skip(FOUND.stderr.strip())
    base = tmp_path_factory.mktemp("pages")
    url = f"file:{base / 'data'}"
    config = json.dumps({**SMALL, "spark_above_bytes": 1 << 40})
    env = {"PERSIST_LOCATION": url, "PERSIST_CONFIG": config, "PERSIST_ALERT_URL": receiver.url}
    with persist.open(url, config=persist.Config(**SMALL)) as client:
        for number, name in enumerate([*HEALTHY, DAMAGED]):
            write(client, name, batches=6, rows=400 * (number + 1), seed=number)
        damage_a_part(base / "data", DAMAGED)
        with dagster_dev(base / "home", workspace_of(base, persist=HURRIED), env) as dev:
            dev.wait_loaded()
            dev.add_partitions("persist_shards", [*HEALTHY, *INDEBTED, DAMAGED])
            compaction = dev.launch("compaction", of_shards("compaction", [*HEALTHY[:4], DAMAGED]))
            assert dev.wait_finished(compaction).status == "FAILURE"
            scrub, backfill = dev.launch("scrub"), dev.backfill(["compaction"], HEALTHY[::2])
            assert dev.wait_finished(scrub).status == "FAILURE"
            for name in INDEBTED:
                write(client, name, batches=8, rows=300)
            write(client, HEALTHY[0], batches=1, rows=5)
            healthy = dev.launch("scrub", of_shards("scrub", HEALTHY[:1]))
            dev.start_sensor("shard_discovery")
            dev.wait_tick("shard_discovery", 0)
            dev.stop_sensor("shard_discovery")
            census = dev.launch("census")
            dev.start_sensor("compaction_debt")
            wait_until(
                lambda: [tick for tick in dev.sensor("compaction_debt")["ticks"] if tick["runIds"]], 240, "a tick"
            )
            dev.stop_sensor("compaction_debt")
            assert dev.wait_finished(healthy).status == "SUCCESS"
            assert dev.wait_finished(census).status == "SUCCESS"
            dev.wait_backfill(backfill)
            wait_until(lambda: all(one.is_finished for one in dev.runs()), 240, "all runs have ended")
            dev.start_sensor("alerts")
            first = dev.wait_tick("alerts", 0)["timestamp"]
            dev.wait_tick("alerts", dev.wait_tick("alerts", first)["timestamp"])
            dev.stop_sensor("alerts")
            yield Seen(dev, compaction, scrub, backfill, Counter(one["key"] for one in receiver.got), url)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND.stdout.strip(), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.set_default_timeout(SLOW_MS)
        expect.set_options(timeout=SLOW_MS)
        yield opened
        browser.close()


def test_the_graph_shows_the_duties_in_their_group(seen: Seen, page: Page) -> None:
    with picture(seen, page, "asset-graph", "/locations/__repository__@persist/asset-groups/maintenance"):
        shows(page, "census", "compaction", "garbage", "scrub", "orphans")


def test_the_partitions_of_compaction_show_the_damaged_shard_red(seen: Seen, page: Page) -> None:
    with picture(seen, page, "partitions", f"/assets/compaction?view=partitions&partition={DAMAGED}"):
        shows(page, *HEALTHY[:4], DAMAGED, "Failed")


def test_the_page_of_the_scrub_is_red_also_after_a_pass_over_a_healthy_shard(seen: Seen, page: Page) -> None:
    with picture(seen, page, "scrub-red", "/assets/scrub?view=overview"):
        shows(page, "Latest check results")
    assert seen.dev.latest_checks("scrub")["parts_undamaged"]["status"] == "FAILED"  # type: ignore[index]


def test_what_never_ran_is_not_green(seen: Seen, page: Page) -> None:
    for asset in ("collections", "sources"):
        assert seen.dev.partitions(asset)["unmaterialized"] == {NONE_YET}
    with picture(seen, page, "never-ran", "/assets/collections?view=partitions"):
        shows(page, NONE_YET, "Missing")


def test_a_check_says_what_it_found_on_the_damaged_shard(seen: Seen, page: Page) -> None:
    with picture(seen, page, "check-red", "/assets/scrub?view=checks&checkDetail=parts_undamaged"):
        shows(page, "parts_undamaged")
        page.get_by_role("tab", name="Execution history").click()
        shows(page, DAMAGED, "restore it from a copy")


def test_a_check_without_a_verdict_is_a_warning_that_says_why(seen: Seen, page: Page) -> None:
    with picture(seen, page, "check-not-evaluated", "/assets/compaction?view=checks&checkDetail=reads_identical"):
        shows(page, "reads_identical")
        page.get_by_role("tab", name="Execution history").click()
        shows(page, "not evaluated")


def test_the_timeline_shows_the_jobs(seen: Seen, page: Page) -> None:
    with picture(seen, page, "timeline", "/overview/activity/timeline"):
        shows(page, "compaction", "scrub", "census")


def test_a_failed_run_says_first_which_shard_failed_and_why(seen: Seen, page: Page) -> None:
    with picture(seen, page, "failed-run", f"/runs/{seen.compaction}"):
        shows(page, re.compile(rf"Failed, 1 of 5 shards: {DAMAGED}"))


def test_a_failed_scrub_names_the_damaged_batch(seen: Seen, page: Page) -> None:
    with picture(seen, page, "failed-scrub", f"/runs/{seen.scrub}"):
        shows(page, re.compile(rf"{DAMAGED}.*batch", re.DOTALL))


def test_the_sensor_shows_its_ticks(seen: Seen, page: Page) -> None:
    with picture(seen, page, "sensor", "/locations/__repository__@persist/sensors/compaction_debt"):
        shows(page, "compaction_debt", re.compile(r"1 (run )?requested|1 requested"))


def test_what_is_wrong_is_red_and_was_told_once(seen: Seen, page: Page) -> None:
    assert seen.told == {f"damage:table:{DAMAGED}": 1, "failed:job:compaction": 1}
    with picture(seen, page, "health", "/assets/health?view=checks"):
        page.get_by_text("nothing_is_wrong").first.click()
        shows(page, f"table {DAMAGED}: 1 batch is damaged", "job compaction: its newest run failed")


def test_the_backfill_is_complete_and_one_run(seen: Seen, page: Page) -> None:
    with picture(seen, page, "backfill", f"/runs/b/{seen.backfill}"):
        shows(page, "compaction", re.compile("Completed|Succeeded"))


def test_an_erasure_leaves_its_receipt(seen: Seen, page: Page, tmp_path: Path) -> None:
    with persist.open(seen.url) as client:
        columns = persist.Schema({"id": "int64 not null"}, {"mail": "string"}, times="ms")
        client.table("people", columns).append([{"id": one, "mail": f"{one}@x.org"} for one in range(100)])
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"id": 17}))
    config = {"ops": {"erasing_of_keys": {"config": {"table": "people", "keys": str(keys), "dry_run": False}}}}
    run = seen.dev.launch("erase", config)
    assert seen.dev.wait_finished(run).status == "SUCCESS", seen.dev.why(run)
    with picture(seen, page, "erasures", "/assets/erasures?view=events"):
        shows(page, "objects_gone", "deleted", "people")


def test_without_a_chromium_it_is_said_how_to_get_one(tmp_path: Path) -> None:
    for program in ("bash", "id"):
        found = shutil.which(program)
        assert found
        (tmp_path / program).symlink_to(found)
    script, bare = str(ROOT / "scripts" / "chromium"), {"PATH": str(tmp_path)}
    none = subprocess.run(["bash", script], env=bare, capture_output=True, text=True, check=False)
    assert none.returncode == 1
    assert "apt-get install chromium" in none.stderr
    wrong = subprocess.run(
        ["bash", script], env={**bare, "CHROMIUM": "/no/such"}, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "CHROMIUM is /no/such" in wrong.stderr


def of_shards(job: str, shards: list[str]) -> dict[str, object]:
    """The configuration of a job over some shards."""
    return {"ops": {f"{job}_of_shards": {"config": {"shards": shards}}}}


def shows(page: Page, *texts: str | re.Pattern[str]) -> None:
    """The page shows each text, sooner or later."""
    for text in texts:
        expect(page.locator("body")).to_contain_text(text)


@contextmanager
def picture(seen: Seen, page: Page, name: str, path: str) -> Iterator[None]:
    """Open a page. Once the block has found what it looks for, take a picture; if it does not, take one as well."""
    page.goto(f"{seen.dev.url}{path}")
    try:
        yield
    except AssertionError as error:
        failed = seen.dev.home / f"{name}.png"
        page.screenshot(path=failed)
        (seen.dev.home / f"{name}.txt").write_text(page.inner_text("body"))
        raise AssertionError(f"the page is in {failed}: {error}") from error
    page.wait_for_timeout(1500)  # what moves comes to rest
    page.evaluate(WITHOUT_PATHS, str(ROOT))
    colours = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
    buffer = io.BytesIO()
    colours.save(buffer, "PNG", optimize=True)
    assert len(buffer.getvalue()) < LARGEST
    if KEPT:
        Path(KEPT).mkdir(parents=True, exist_ok=True)
        (Path(KEPT) / f"{name}.png").write_bytes(buffer.getvalue())
