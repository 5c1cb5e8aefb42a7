"""Which leases are renewed, and when: those of readers as those of writers, once less than a share of them is left."""

from __future__ import annotations

from typing import Any

import pytest

from persist_lib.core import commands as c
from persist_lib.ids import format_reader_id, format_writer_id
from persist_lib.shard.leases import renew
from tests.unit.core.core_shard import CREATE, Store, always

LEASE_MS = 1_000
READER, WRITER = format_reader_id(7), format_writer_id(8)


@pytest.mark.parametrize("ids", [(READER,), (WRITER,), (READER, WRITER)])
def test_a_lease_is_renewed_when_less_than_a_share_of_it_is_left(ids: tuple[str, ...]) -> None:
    store = Store()
    machine = store.machine()
    machine.commit(always(CREATE))
    now = store.consensus.now()
    machine.commit(always(c.RegisterWriter(WRITER, "ingest", now + LEASE_MS)))
    machine.commit(always(c.RegisterReader(READER, now + LEASE_MS)))

    def untils() -> set[int]:
        state = store.machine().fetch().state
        held: list[tuple[str, Any]] = [*state.writers.items(), *state.readers.items()]
        return {entry.lease_until - now for id_, entry in held if id_ in ids}

    store.clock.advance(0.5)
    assert renew(machine, ids, LEASE_MS, below=0.5)
    assert untils() == {LEASE_MS}
    store.clock.advance(0.1)
    assert renew(machine, ids, LEASE_MS, below=0.5)
    assert untils() == {LEASE_MS + 600}
