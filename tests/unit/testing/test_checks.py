"""The checks of the test kit look at all there is."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.maintain import log_walk
from persist_lib.testing import checks


def test_a_log_longer_than_a_page_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_walk, "SCAN_ROWS", 3)
    schema = persist.Schema(key={"id": "int64"})
    with persist.open("memory:") as client:
        with client.open_writer("s", schema) as write:
            for n in range(8):
                write.compare_and_append([{"id": n}], n, n + 1)
        versions, rows = checks.read_history(client, "s")
        assert len(rows) == client.inspect("s").seqno == versions[-1].seqno
