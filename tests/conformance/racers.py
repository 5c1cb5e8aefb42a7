"""What each of several rivals does, in a thread or in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path

from persist_lib.errors import Corrupt
from persist_lib.ids import SeqNo
from persist_lib.location.api import Blob, Consensus
from tests.conformance.history import Claim, claim
from tests.conformance.stores import BLOBS, CONSENSUSES


def extend(consensus: Consensus, key: str, who: int, until: int) -> list[Claim]:
    """Try to append until the log has `until` rows; create the key first if nobody has."""
    claims: list[Claim] = []
    while True:
        head = consensus.head(key)
        if head is not None and head.seqno >= until:
            return claims
        claims.append(claim(consensus, key, head and head.newest, f"{who}:{len(claims)}".encode()))


def extend_in_process(kind: str, url: str, key: str, who: int, until: int, start: str) -> list[Claim]:
    """`extend`, in a process of its own, beginning when all are ready."""
    consensus = CONSENSUSES[kind].open(url)
    wait_for_start(start, who)
    try:
        return extend(consensus, key, who, until)
    finally:
        consensus.close()


def truncate_in_process(kind: str, url: str, key: str, who: int, until: int, start: str) -> list[Claim]:
    """Truncate again and again to what is the newest row at that time."""
    consensus = CONSENSUSES[kind].open(url)
    wait_for_start(start, who)
    newest = SeqNo(0)
    while newest < until:
        if (head := consensus.head(key)) is not None:
            newest = head.seqno
            consensus.truncate(key, newest)
    consensus.close()
    return []


def create_in_process(kind: str, url: str, keys: int, who: int, start: str) -> list[Claim]:
    """Try to be the first in each of many keys."""
    consensus = CONSENSUSES[kind].open(url)
    wait_for_start(start, who)
    claims = [claim(consensus, f"s{n}", None, f"{who}:{n}".encode()) for n in range(keys)]
    consensus.close()
    return claims


def set_once(blob: Blob, key: str, data: bytes) -> bool:
    """Whether `data` is what the key holds now for ever."""
    try:
        blob.set(key, data)
    except Corrupt:
        return False
    return True


def set_in_process(kind: str, url: str, who: int, rounds: int, start: str) -> list[bool]:
    """Race for the same keys with other bytes than everyone else, in directories that are removed meanwhile."""
    blob = BLOBS[kind].open(url)
    wait_for_start(start, who)
    won = []
    for n in range(rounds):
        won.append(set_once(blob, f"raced/{n}/key", f"{who}".encode()))
        blob.set(f"own/{n}/{who}", b"mine")
        assert blob.get(f"own/{n}/{who}") == b"mine"
        assert blob.delete(f"own/{n}/{who}")
    blob.close()
    return won


def wait_for_start(start: str, who: int) -> None:
    """Say that we are ready, and wait until everyone is."""
    Path(start, f"ready-{who}").touch()
    while not Path(start, "go").exists():
        time.sleep(0.001)
