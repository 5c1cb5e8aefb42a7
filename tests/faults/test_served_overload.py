"""A shard server that has more to do than it takes: what it refuses, and that the leases of its clients stay."""

from __future__ import annotations

import threading

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Overloaded
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, ShardId
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.request_queue import OF_A_CLIENT_MOST, WAITING_MOST
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.served import PATIENT_S, Sharing
from tests.worlds import SCHEMA

SHARD = ShardId("s")
RUNTIME = Runtime()


def asked(number: int, client: int) -> Request:
    command = c.SetHold("hold", MINIMUM, b"never", b"x")
    deadline = RUNTIME.deadline(PATIENT_S)
    return Request(SHARD, command, b"%d" % number, f"client {client}", deadline, SeqNo(0))


def test_leases_stay_while_a_server_has_more_to_do_than_it_takes() -> None:
    world = Sharing()
    try:
        client = world.client(persist.Config(lease_ms=20_000))
        write = client.open_writer(SHARD, SCHEMA)
        assert write.id
        funnels = world.slots[0].server._funnels
        funnel = funnels.funnel(SHARD)
        world.clock.advance(15)
        beat = threading.Thread(target=client.heartbeat, daemon=True)
        with funnel.machine.turn:  # nothing gets on meanwhile
            flood = [asked(number, number // OF_A_CLIENT_MOST) for number in range(WAITING_MOST)]
            for request in flood:
                funnels.submit(request)
            refused = asked(WAITING_MOST, 99)
            funnels.submit(refused)
            with pytest.raises(Overloaded):
                refused.answer.result(0)
            beat.start()
            patience = RUNTIME.deadline(PATIENT_S)
            while not funnel.queue._urgent:
                assert not patience.has_passed(), "the heartbeat was not taken"
                patience.pause(0.001)
        beat.join(PATIENT_S)
        assert all(request.answer.result(PATIENT_S).refusal for request in flood), "each is answered"
        world.clock.advance(15)
        world.client().expire(SHARD)
        found = check_world(world.client(), SHARD)
        assert write.id in found.state.writers
    finally:
        world.close()
