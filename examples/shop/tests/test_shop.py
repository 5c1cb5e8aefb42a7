"""The shop, from a file to the page: with a location in a folder, and Dagster in this process."""

import json
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from shop import orders
from shop.definitions import defs
from shop.serve import server
from shop.setup import declare

import persist_lib as persist


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for orders, of a shop of its own."""
    monkeypatch.setenv("PERSIST_LOCATION", f"file:{tmp_path / 'data'}")
    with persist.open(tmp_path / "data") as client:
        assert declare(client, tmp_path / "inbox")
        assert not declare(client, tmp_path / "inbox"), "once is enough"
    return tmp_path / "inbox"


def drop(inbox: Path, name: str, *lines: dict[str, Any]) -> None:
    """A file of orders."""
    (inbox / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def order(id_: int, state: str, cents: int, customer: str = "ada", day: str = "2026-11-20") -> dict[str, Any]:
    return {"id": id_, "customer": customer, "day": day, "state": state, "cents": cents}


def run(*assets: str) -> None:
    keys = [dg.AssetKey(one) for one in assets]
    assert defs.resolve_implicit_global_asset_job_def().execute_in_process(asset_selection=keys).success


def table(name: str) -> list[dict[str, Any]]:
    with persist.open(os.environ["PERSIST_LOCATION"]) as client:
        return client.table(name).read().to_pylist()


def test_the_revenue_of_a_day_is_that_of_paid_orders() -> None:
    frame = pl.DataFrame([order(1, "paid", 5), order(2, "placed", 7), order(3, "paid", 2, day="2026-11-21")])
    found = orders.per_day(frame).rows()
    assert found == [("2026-11-20", 5, 1), ("2026-11-21", 2, 1)]


def test_an_order_that_is_paid_later_changes_its_day_and_earlier_answers_stay(inbox: Path) -> None:
    drop(inbox, "1.jsonl", order(1, "paid", 500), order(2, "placed", 250))
    run("orders", "revenue")
    with persist.open(f"file:{inbox.parent / 'data'}") as client:
        page = server(client, "127.0.0.1", 0)
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_address[1]}/revenue"

        def asked(query: str = "") -> dict[str, Any]:
            with urllib.request.urlopen(url + query) as found:
                return json.load(found)

        first = asked()
        assert first["revenue"] == [{"day": "2026-11-20", "cents": 500, "orders": 1}]
        drop(inbox, "2.jsonl", order(2, "paid", 250))
        run("orders", "revenue")
        assert asked()["revenue"] == [{"day": "2026-11-20", "cents": 750, "orders": 2}]
        assert asked(f"?as_of={first['as_of']}")["revenue"] == first["revenue"]
        page.shutdown()
        page.server_close()


@pytest.mark.spark
def test_spark_adds_up_what_each_customer_has_paid(inbox: Path) -> None:
    drop(inbox, "1.jsonl", order(1, "paid", 500), order(2, "paid", 250, "bob"), order(3, "paid", 1))
    run("orders", "customers")
    assert sorted((row["customer"], row["cents"]) for row in table("customers")) == [("ada", 501), ("bob", 250)]
