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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

import persist_lib as persist
from orchestration.partitions import NONE_YET
from persist_lib.location.open import open_location
from persist_lib.sources import Files
from tests.orchestration.dagster_dev import (
    ROOT,
    STOPPED,
    STORAGES,
    DagsterDev,
    dagster_dev,
    store_in,
    wait_until,
    workspace_of,
)
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
WITHOUT_PATHS = """paths => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode())
    for (const [path, shown] of Object.entries(paths))
      walker.currentNode.nodeValue = walker.currentNode.nodeValue.replaceAll(path, shown)
}"""
"""Pictures of stack traces are the same wherever this repository lies, and its location."""
HEALTHY = ["accounts", "customers", "events", "invoices", "orders", "payments"]
INDEBTED = ["clicks", "sessions"]
OLD = "ledger"
"""A shard with thirty days behind it."""
DAMAGED = "shipments"
PLANNED = "visits"
RULES = """
[[rule]]
pattern = "ledger"
retention = "last 40"
bytes_day = 10737418240
order = "newest"
"""
SHOP = """
import dagster as dg
import pyarrow as pa
from orchestration.definitions import build_definitions
from orchestration.settings import Data, Settings

data = Data(tables=["orders", "people", "events_*"], sources=["orders", "people"])

@dg.asset(ins={{"orders": dg.AssetIn(["shop", "orders"])}}, deps=[["shop", "people"]], group_name="reports")
def revenue(orders: pa.Table) -> None: ...

@dg.asset(deps=[["shop", "events"]], group_name="reports")
def sessions() -> None: ...

defs = dg.Definitions.merge(
    build_definitions(Settings(location={url!r}, is_running=False, data=data), name="shop"),
    dg.Definitions(assets=[revenue, sessions]),
)
"""
"""A team's own definitions: its assets are downstream of tables, which sources feed."""
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


@pytest.fixture(scope="module", params=STORAGES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A location with healthy, indebted and damaged shards, after a failed job, a scrub, a backfill and a tick."""
    if FOUND.returncode:
        pytest.skip(FOUND.stderr.strip())
    with closing(Receiver()) as receiver:
        yield from seen_in(request.param, tmp_path_factory.mktemp(f"pages_{request.param}"), receiver)


def seen_in(storage: str, base: Path, receiver: Receiver) -> Iterator[Seen]:
    """The same, in a Dagster that stores what it keeps there."""
    store_in(base / "home", storage)
    url = f"file:{base / 'data'}"
    config = json.dumps({**SMALL, "spark_above_bytes": 1 << 40})
    env = {"PERSIST_LOCATION": url, "PERSIST_CONFIG": config, "PERSIST_ALERT_URL": receiver.url,
           "PERSIST_PRICES": "s3"}  # fmt: skip
    with persist.open(url, config=persist.Config(**SMALL)) as client:
        for number, name in enumerate([*HEALTHY, DAMAGED]):
            write(client, name, batches=6, rows=400 * (number + 1), seed=number)
        age(url)
        client.set_rules(RULES)
        damage_a_part(base / "data", DAMAGED)
        shop = fed_shop(base)
        with dagster_dev(base / "home", workspace_of(base, persist=HURRIED, shop=SHOP.format(url=shop)), env) as dev:
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
            census, fleet = dev.launch("census"), dev.launch("fleet", pages_of(OLD, DAMAGED))
            assert (own := replace(dev, location="shop")).wait_finished(own.launch("shop_fleet")).status == "SUCCESS"
            assert dev.wait_finished(fleet).status == "SUCCESS", dev.why(fleet)
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


def test_the_fleet_is_a_page_with_its_picture_and_links(seen: Seen, page: Page) -> None:
    with picture(seen, page, "fleet", "/assets/fleet?view=overview"):
        page.get_by_text("Show markdown", exact=False).first.click()
        shows(page, "known since", DAMAGED)
        assert drawn(page) > 500
        link = page.get_by_role("link", name=DAMAGED).first
        assert f"/assets/shard_page?view=partitions&partition={DAMAGED}" in (link.get_attribute("href") or "")
        page.locator("img[src^='data:image/png']").first.scroll_into_view_if_needed()


def test_a_shard_s_page_is_its_partition(seen: Seen, page: Page) -> None:
    page.goto(f"{seen.dev.url}/assets/shard_page?view=partitions&partition={DAMAGED}")
    page.get_by_text("Show markdown", exact=False).first.click()
    shows(page, "did something last", "bytes do not match")
    with picture(seen, page, "shard-page", f"/assets/shard_page?view=partitions&partition={OLD}"):
        page.get_by_text("Show markdown", exact=False).first.click()
        shows(page, "did something last", "the days are from its first transition on")
        assert drawn(page) > 500


def test_tables_have_lineage_from_their_sources_to_a_team_s_own_assets(seen: Seen, page: Page) -> None:
    with picture(seen, page, "data-assets", "/locations/__repository__@shop/asset-groups/shop_data"):
        shows(page, "Source", "orders", "people", "events", "revenue", "sessions")


def test_a_plan_is_shown_before_anything_happens(seen: Seen, page: Page) -> None:
    with persist.open(seen.url) as client:
        write(client, PLANNED, batches=8, rows=300)
        before = client.inspect(PLANNED).seqno
        config: dict[str, object] = {"shards": [PLANNED], "apply": "by a person"}
        run = seen.dev.launch("compaction", {"ops": {"compaction_of_shards": {"config": config}}})
        assert seen.dev.wait_finished(run).status == "SUCCESS", seen.dev.why(run)
        with picture(seen, page, "plan", "/assets/plans?view=events"):
            shows(page, "dollars", "frees_bytes", PLANNED)
        assert client.inspect(PLANNED).seqno == before


def drawn(page: Page) -> int:
    """How wide the picture in a page of Markdown is: 0 where it is not shown."""
    found = page.locator("img[src^='data:image/png']").first
    expect(found).to_be_visible()
    return int(found.evaluate("one => one.naturalWidth"))


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


def fed_shop(base: Path) -> str:
    """A location with two tables that sources feed, and others."""
    url, rows = f"file:{base / 'shop'}", persist.Schema({"id": "int64 not null"}, {"cents": "int64"}, times="ms")
    (base / "in").mkdir()
    with persist.open(url) as client, client.controller() as controller, closing(controller.sources()) as sources:
        for name in ("orders", "people"):
            sources.create(name, Files(place=str(base / "in"), format="jsonl"), rows)
        for name in ("events_eu", "events_us", "events_asia"):
            client.table(name, rows).append([{"id": one, "cents": one} for one in range(100)])
    return url


def age(url: str) -> None:
    """Thirty days of a shard: appends on each day, more of them later, and a compaction on each third."""
    now, day_ns = [time.time_ns() - 30 * 86_400 * 10**9], 86_400 * 10**9
    with closing(open_location(url, clock=lambda: now[0])) as location:
        client = persist.open(location, config=persist.Config(**SMALL), prices=persist.Prices())
        for day in range(30):
            write(client, OLD, batches=2 + day % 5, rows=60 + 20 * day, seed=day)
            if day % 3 == 2:
                client.compact(OLD)
            now[0] += day_ns


def pages_of(*shards: str) -> dict[str, object]:
    """The configuration of the fleet's job that makes the pages of these shards."""
    return {"ops": {"reporting_of_shards": {"config": {"shards": list(shards)}}}}


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
    page.evaluate(WITHOUT_PATHS, {str(ROOT): "~/persist", seen.url.removeprefix("file:"): "~/data"})
    colours = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
    buffer = io.BytesIO()
    colours.save(buffer, "PNG", optimize=True)
    assert len(buffer.getvalue()) < LARGEST
    if KEPT:
        Path(KEPT).mkdir(parents=True, exist_ok=True)
        (Path(KEPT) / f"{name}.png").write_bytes(buffer.getvalue())
