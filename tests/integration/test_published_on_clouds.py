"""Published tables on Google Cloud Storage and Azure, read from their emulators by clients of those that read them.

pyiceberg reads by Arrow's own clients of the two stores, deltalake and polars by theirs. DuckDB is not here: its client
of GCS wants keys that the emulator does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import polars as pl
import pytest
from deltalake import DeltaTable
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable

import persist_lib as persist
from tests.integration.test_published_tables import CONFIG, life, rows, versions
from tests.servers import store_url, use_test_credentials

STORES = pytest.mark.parametrize("scheme", ["gs+cas", "az+cas"])


class OnAzurite(PyArrowFileIO):
    """Arrow finds a container by itself, and not with the account behind it, as addresses say it."""

    @staticmethod
    def parse_location(location: str, properties: Any = None) -> tuple[str, str, str]:
        parts = urlsplit(location)
        container = parts.netloc.partition("@")[0]
        return parts.scheme, container, f"{container}{parts.path}"


@pytest.fixture
def client(scheme: str) -> Iterator[persist.Client]:
    use_test_credentials()
    with persist.open(store_url(scheme), config=CONFIG) as client:
        yield client


def endpoint_of(client: persist.Client) -> str:
    return unquote(client.url.partition("endpoint=")[2].partition("&")[0])


def properties(client: persist.Client) -> dict[str, str]:
    """How pyiceberg reaches the emulator."""
    endpoint = endpoint_of(client)
    if client.url.startswith("gs"):
        until = str(2**41)
        return {"gcs.service.host": endpoint, "gcs.oauth2.token": "none", "gcs.oauth2.token-expires-at": until}
    host = urlsplit(endpoint).netloc
    return {
        "py-io-impl": f"{__name__}.OnAzurite", "adls.account-name": os.environ["AZURE_STORAGE_ACCOUNT"],
        "adls.account-key": os.environ["AZURE_STORAGE_KEY"], "adls.blob-storage-authority": host,
        "adls.dfs-storage-authority": host, "adls.blob-storage-scheme": "http", "adls.dfs-storage-scheme": "http",
    }  # fmt: skip


def options(client: persist.Client) -> dict[str, str]:
    """How deltalake and polars reach it."""
    endpoint = endpoint_of(client)
    if client.url.startswith("gs"):
        return {"google_base_url": endpoint, "google_skip_signature": "true", "allow_http": "true"}
    return {
        "azure_storage_account_name": os.environ["AZURE_STORAGE_ACCOUNT"], "azure_storage_endpoint": endpoint,
        "azure_storage_account_key": os.environ["AZURE_STORAGE_KEY"], "allow_http": "true",
    }  # fmt: skip


@STORES
def test_an_iceberg_table_is_read_at_each_published_time(client: persist.Client, scheme: str) -> None:
    seen, published = life(client, "iceberg")
    assert published.place.startswith({"gs+cas": "gs://", "az+cas": "abfss://"}[scheme])
    table = StaticTable.from_metadata(published.version, properties=properties(client))
    assert rows(table.scan().to_arrow()) == seen[published.as_of]
    of = versions(published, properties=properties(client))
    for time, expected in seen.items():
        assert rows(table.scan(snapshot_id=of[time]).to_arrow()) == expected
    found = pl.scan_iceberg(table, reader_override="pyiceberg").collect()
    assert rows(found.to_arrow()) == seen[published.as_of]
    client.withdraw("orders")
    assert all("/_parts/" in one.key for one in client.blob.list("-published/"))


@STORES
def test_a_delta_table_is_read_at_each_published_time(client: persist.Client, scheme: str) -> None:
    seen, published = life(client, "delta")
    how = options(client)
    of = versions(published, storage_options=how)
    for time, expected in seen.items():
        table = DeltaTable(published.place, version=of[time], storage_options=how)
        assert rows(table.to_pyarrow_table()) == expected, scheme
    found = pl.read_delta(published.place, storage_options=how)
    assert rows(found.to_arrow()) == seen[published.as_of]


@STORES
@pytest.mark.parametrize("as_", ["iceberg", "delta"])
def test_a_collection_is_published_and_a_pointer_that_moved_is_seen(
    client: persist.Client, scheme: str, as_: str
) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"word": "string", "price": "int64"})
    client.controller().create("orders", schema, mode="compare_and_append")
    table = client.table("orders")
    table.append([{"id": id_, "word": f"w{id_}", "price": id_} for id_ in range(100)])
    published = table.publish(as_)
    table.append([{"id": 100, "word": "new", "price": 1}])
    published = table.publish(as_)
    if as_ == "iceberg":
        found = StaticTable.from_metadata(published.version, properties=properties(client)).scan().to_arrow()
    else:
        found = DeltaTable(published.place, storage_options=options(client)).to_pyarrow_table()
    assert rows(found) == rows(table.read().to_arrow())
    pointing = client.location.blob
    assert pointing.point("-published/x/pointer", b"1", None)  # type: ignore[attr-defined]
    assert not pointing.point("-published/x/pointer", b"2", None), scheme  # type: ignore[attr-defined]
    assert not pointing.point("-published/x/pointer", b"2", b"0")  # type: ignore[attr-defined]
    assert pointing.point("-published/x/pointer", b"2", b"1")  # type: ignore[attr-defined]
