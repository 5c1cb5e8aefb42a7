"""What a server must not answer from its memory, and what it must not take from a client's clock."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import check_world
from tests.unit.server.sites import Served, Site, site_of
from tests.worlds import SCHEMA, WIDER, row

QUIET = Runtime(background=False)


class Reading(Served):
    """A server that has the shard in memory, as it was."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client(runtime=QUIET).open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)


site = site_of(Reading)


# *Reads that must be linearizable (the orphan audit, opening, `fetch`) scan the store; memory serves hints.*


def test_what_others_committed_is_fetched_though_the_server_does_not_know_it(site: Site) -> None:
    client = site.client(runtime=QUIET)
    write, read = client.open_shard("s", SCHEMA)
    site.store.open_writer("s", SCHEMA).compare_and_append([row(2, time=1)], 1, 2)
    assert read.fetch_upper().time == 2
    assert write.fetch_upper().time == 2
    assert client.machine("s").fetch().seqno == site.store.machine("s").fetch().seqno


def test_a_shard_is_opened_as_it_is_and_not_as_the_server_knows_it(site: Site) -> None:
    site.store.evolve_schema("s", WIDER)
    with site.client(runtime=QUIET).open_reader("s") as read:
        assert read.schema == WIDER


def test_an_audit_through_a_server_spares_what_a_writer_links_that_the_server_does_not_know(site: Site) -> None:
    """The audit looks at the state after it has listed the objects: a former state would not know their writer."""
    config = persist.Config(format=4, inline_bytes=0)
    auditor = site.client(runtime=QUIET)
    auditor.audit_orphans("s")
    with persist.open(site.url, config=config, runtime=QUIET) as direct:
        write = direct.open_writer("s", SCHEMA)
        write.compare_and_append([row(2, time=1)], 1, 2)
        assert not auditor.audit_orphans("s").orphans
        write.compare_and_append([row(3, time=2)], 2, 3)
    check_world(site.store, "s")


# *Deadlines travel with requests, as durations.*


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_a_client_whose_clock_is_another_has_its_whole_timeout(site: Site, ahead_s: float) -> None:
    clock = replace(QUIET, monotonic=lambda: time.monotonic() + ahead_s)
    write = site.client(runtime=clock).open_writer("s", SCHEMA)
    write.compare_and_append([row(2, time=1)], 1, 2, timeout=30)
    assert write.fetch_upper().time == 2
