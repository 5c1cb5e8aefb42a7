"""A bank whose changes Debezium writes: accounts in two tables, each with a topic, and a topic of transactions."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOPICS = ("bank.a", "bank.b")
MARKS = "bank.transaction"
ACCOUNTS = 6
CENTS = 100


class Told(NamedTuple):
    """A message as the connector writes it: its topic, its key, its value."""

    topic: str
    key: bytes
    value: bytes


def topic_of(account: int) -> str:
    return TOPICS[account % 2]


class Bank:
    """Accounts, and what a connector tells of transfers between them."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.balances = dict.fromkeys(range(ACCOUNTS), CENTS)
        self.history: list[tuple[str, dict[int, int]]] = []
        self.told: list[Told] = []
        self._commit(dict.fromkeys(range(ACCOUNTS), CENTS))

    def transfer(self) -> None:
        """Move money between two to four accounts, some of them in several steps."""
        chosen = self.dice.sample(range(ACCOUNTS), self.dice.randrange(2, 5))
        changes = {}
        for one, other in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
            cents = self.dice.randrange(50)
            self.balances[one] -= cents
            self.balances[other] += cents
        for account in chosen:
            changes[account] = self.balances[account]
        self._commit(changes)

    def _commit(self, changes: dict[int, int]) -> None:
        id_ = f"{len(self.history)}:{self.dice.randrange(10**6)}"
        self.history.append((id_, changes))
        self._mark(id_, "BEGIN", None)
        for number, (account, cents) in enumerate(changes.items()):
            row = {"id": account, "cents": cents}
            change = {
                "before": None, "after": row, "op": "u", "source": {},
                "transaction": {"id": id_, "total_order": number + 1, "data_collection_order": 1},
            }  # fmt: skip
            self.told.append(Told(topic_of(account), b"%d" % account, json.dumps(change).encode()))
        self._mark(id_, "END", list(changes))

    def _mark(self, id_: str, status: str, accounts: list[int] | None) -> None:
        mark: dict[str, Any] = {"status": status, "id": id_, "event_count": None, "data_collections": None}
        if accounts is not None:
            counts = [
                {"data_collection": topic, "event_count": sum(topic_of(one) == topic for one in accounts)}
                for topic in TOPICS
            ]
            mark |= {"event_count": len(accounts), "data_collections": [one for one in counts if one["event_count"]]}
        self.told.append(Told(MARKS, id_.encode(), json.dumps(mark).encode()))

    def with_repeats(self) -> list[Told]:
        """All that the connector tells, which now and then begins again a while before where it was."""
        found: list[Told] = []
        at = 0
        while at < len(self.told):
            found.append(self.told[at])
            at += 1
            if self.dice.random() < 0.03:
                at = max(0, at - self.dice.randrange(1, 12))
        return found


def by_time(rows: Sequence[Mapping[str, Any]]) -> dict[Any, dict[int, int]]:
    """What the accounts are at each time at which something changes, by the updates of all of them."""
    found: dict[Any, dict[int, int]] = {}
    contents: dict[int, int] = {}
    for time in sorted({row["_time"] for row in rows}):
        here = [row for row in rows if row["_time"] == time]
        for row in sorted(here, key=lambda row: row["_diff"]):
            if row["_diff"] < 0:
                assert contents.pop(row["id"]) == row["cents"]
            else:
                assert row["id"] not in contents
                contents[row["id"]] = row["cents"]
        found[time] = dict(contents)
    return found


def sums(contents: dict[int, int]) -> bool:
    """Whether no transfer is there by half: nothing at all, or all the money."""
    return not contents or (len(contents) == ACCOUNTS and sum(contents.values()) == ACCOUNTS * CENTS)
