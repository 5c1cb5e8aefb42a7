"""What a Consensus may not do, checked from what it told each of several rivals and from what it holds in the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from persist_lib.errors import Indeterminate
from persist_lib.ids import SeqNo
from persist_lib.location.api import Consensus, Newest, Row
from persist_lib.location.contract import next_seqno


class Claim(NamedTuple):
    """One compare-and-set and its answer; None when the outcome was indeterminate. `data` is unique to it."""

    key: str
    expected: Newest | None
    data: bytes
    won: bool | None


def claim(consensus: Consensus, key: str, expected: Newest | None, data: bytes) -> Claim:
    """Try it and write down the answer."""
    try:
        return Claim(key, expected, data, consensus.compare_and_set(key, expected, data))
    except Indeterminate:
        return Claim(key, expected, data, None)


def violations(key: str, claims: Iterable[Claim], rows: Sequence[Row]) -> list[str]:
    """What is wrong, in words: nothing, if the store kept its promises. `rows` is a whole scan after everything."""
    claims = [c for c in claims if c.key == key]
    by_data = {c.data: c for c in claims}
    broken = _gaps(rows)
    for row in rows:
        made = by_data.get(row.data)
        if made is None:
            broken.append(f"row {row.seqno} holds bytes that nobody wrote")
        elif made.won is False:
            broken.append(f"row {row.seqno} holds the bytes of one who was told to have lost")
        elif next_seqno(made.expected) != row.seqno:
            broken.append(f"row {row.seqno} was written by one who expected {made.expected}")
    stored = {row.seqno: row.data for row in rows}
    first = rows[0].seqno if rows else 1
    winners: dict[int, bytes] = {}
    for made in (c for c in claims if c.won):
        seqno = next_seqno(made.expected)
        if seqno in winners:
            broken.append(f"two winners at {seqno}")
        winners[seqno] = made.data
        if seqno >= first and stored.get(SeqNo(seqno)) != made.data:
            broken.append(f"the acknowledged row {seqno} is not there")
    return broken


def _gaps(rows: Sequence[Row]) -> list[str]:
    return [f"a gap: {a.seqno} is followed by {b.seqno}" for a, b in pairwise(rows) if b.seqno != a.seqno + 1]
