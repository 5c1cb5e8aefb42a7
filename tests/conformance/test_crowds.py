"""Many processes at once: whatever the store, each row has one winner, and who was told so has it."""

from __future__ import annotations

from itertools import chain

import pytest

from persist_lib.ids import SeqNo
from persist_lib.location.api import Consensus
from tests.conformance import racers
from tests.conformance.conftest import CROWD, Race
from tests.conformance.history import violations
from tests.conformance.stores import ConsensusKind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("consensus_name", ["sqlite", "postgresql", "s3"], indirect=True),
]
CREATING = 16
TRUNCATING = 8
EVERYTHING = 100_000


def rows_to_race_for(kind: ConsensusKind) -> int:
    """Where each attempt is several requests to a server that does one at a time, fewer will do."""
    return 3 * CROWD if kind.has_transactions else 8


def test_of_32_processes_that_extend_one_wins_each_row(
    consensus: Consensus, consensus_name: str, consensus_kind: ConsensusKind, consensus_url: str, crowd_race: Race
) -> None:
    until = rows_to_race_for(consensus_kind)
    calls = [(racers.extend_in_process, consensus_name, consensus_url, "s", who, until) for who in range(CROWD)]
    claims = [*chain.from_iterable(crowd_race(calls))]
    rows = consensus.scan("s", SeqNo(0), EVERYTHING)
    assert len(rows) == until
    assert violations("s", claims, rows) == []
    assert len(claims) > until, "nobody ever lost: it was no race"


def test_of_16_processes_that_create_the_same_keys_one_wins_each(
    consensus: Consensus, consensus_name: str, consensus_kind: ConsensusKind, consensus_url: str, crowd_race: Race
) -> None:
    keys = 40 if consensus_kind.has_transactions else 8
    calls = [(racers.create_in_process, consensus_name, consensus_url, keys, who) for who in range(CREATING)]
    claims = [*chain.from_iterable(crowd_race(calls))]
    assert len(claims) == keys * CREATING
    for n in range(keys):
        rows = consensus.scan(f"s{n}", SeqNo(0), EVERYTHING)
        assert len(rows) == 1
        assert violations(f"s{n}", claims, rows) == []
        assert sum(claim.won is not False for claim in claims if claim.key == f"s{n}") >= 1


def test_of_32_processes_some_truncate_and_free_no_row_to_be_won_twice(
    consensus: Consensus, consensus_name: str, consensus_kind: ConsensusKind, consensus_url: str, crowd_race: Race
) -> None:
    until = rows_to_race_for(consensus_kind)
    roles = [racers.truncate_in_process if who < TRUNCATING else racers.extend_in_process for who in range(CROWD)]
    calls = [(role, consensus_name, consensus_url, "s", who, until) for who, role in enumerate(roles)]
    claims = [*chain.from_iterable(crowd_race(calls))]
    rows = consensus.scan("s", SeqNo(0), EVERYTHING)
    assert rows[-1].seqno == until
    assert violations("s", claims, rows) == []
