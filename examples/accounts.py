"""A collection in the demo: accounts between which writers move money, so that their sum never changes.

It is rebuilt with more shards by a transformation that is wrong, which `compare` shows, then by a right one, and handed
over while the writers go on and a listener adds up what it gets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from examples.failures import Differs, Failed
from examples.places import Place
from persist_lib.storage import CollectionReader, CollectionWriter, Controller

NAME = "bank/accounts"
SCHEMA = persist.Schema(key={"account": "int64 not null"}, value={"cents": "int64 not null"})
ACCOUNTS = 1_000
CENTS = 10_000
"""What each account has at first."""
SHARDS = (2, 5)
"""Before and after."""


def show(place: Place, say: Callable[[str], None]) -> None:
    """Make the collection, and take it through all of it. Raises Differs where a sum is wrong."""
    with place.open() as client, client.controller() as controller:
        controller.create(NAME, SCHEMA, shards=SHARDS[0], mode="compare_and_append")
        with controller.open_writer(NAME) as write:
            write.append_now([{"account": n, "cents": CENTS} for n in range(ACCOUNTS)])
        with _Bank(place, 2) as bank:
            _refuse_the_wrong_one(controller, say)
            at = _hand_over_the_right_one(controller, say)
            bank.finish()
        say(f"handed over at {at} while {len(bank.threads) - 1} writers and a listener went on")
        with controller.open_reader(NAME) as reader, reader.snapshot() as snapshot:
            total = int(pc.sum(snapshot.to_arrow()["cents"]).as_py())
            if (snapshot.rendition, total) != (3, ACCOUNTS * CENTS):
                raise Differs(f"rendition {snapshot.rendition} of {NAME} holds {total:,} cents")
    says = (
        f"the listener's sum was right at each of its {bank.moments} times; {ACCOUNTS:,} accounts hold {total:,} cents"
    )
    say(f"[green]✓[/green] {says}")


def whole_euros(rows: pa.Table) -> pa.Table:
    """Wrong: it was meant to change nothing but the shards, and drops what is below a euro."""
    cents = pc.multiply(pc.divide(rows["cents"], 100), 100)
    return rows.set_column(rows.schema.get_field_index("cents"), SCHEMA.contents.field("cents"), cents)


def _refuse_the_wrong_one(controller: Controller, say: Callable[[str], None]) -> None:
    made = controller.make_rendition(NAME, shards=SHARDS[1], copy=True)
    controller.copy_rendition(NAME, made.number, transform=whole_euros)
    found = controller.compare(NAME, made.number)
    if found.is_equal or found.columns["cents"] != found.changed:
        raise Failed(f"the comparison did not find what is wrong: {found}")
    sample = found.samples["changed"][0]
    old, new = sample["cents"]
    say(
        f"rendition {made.number} ({SHARDS[1]} shards): {found.changed:,} of {ACCOUNTS:,} accounts would change, as "
        f"account {sample['account']} from {old:,} to {new:,} cents: given up"
    )
    controller.drop_rendition(NAME, made.number)


def _hand_over_the_right_one(controller: Controller, say: Callable[[str], None]) -> int:
    made = controller.make_rendition(NAME, shards=SHARDS[1], copy=True)
    controller.copy_rendition(NAME, made.number)
    found = controller.compare(NAME, made.number)
    if not found.is_equal:
        raise Differs(f"a copy differs from what it copies: {found}")
    say(f"rendition {made.number} ({SHARDS[1]} shards): no account would change")
    at = controller.hand_over(NAME, made.number)
    controller.copy_rendition(NAME, made.number, to_end=True)
    return at


class _Bank:
    """Writers that move money, and a listener that adds up what it gets, in threads, until `finish`."""

    def __init__(self, place: Place, writers: int) -> None:
        self._place, self._done, self._problems = place, threading.Event(), list[BaseException]()
        self._moved, self.moments = threading.Semaphore(0), 0
        self.threads = [threading.Thread(target=self._guarded, args=(self._listen,), daemon=True)]
        self.threads += [
            threading.Thread(target=self._guarded, args=(lambda c, seed=seed: self._move(c, seed),), daemon=True)
            for seed in range(writers)
        ]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        for _ in self.threads[1:]:
            self._moved.acquire(timeout=30)  # each has moved some
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self.threads:
            thread.join(60)

    def finish(self) -> None:
        """Let the writers move some more, and the listener get all of it. Raises what went wrong in a thread."""
        while self._moved.acquire(blocking=False):
            pass  # these were before
        for _ in self.threads[1:]:
            self._moved.acquire(timeout=30)
        self.__exit__()
        for problem in self._problems:
            raise problem

    def _guarded(self, run: Callable[[Controller], None]) -> None:
        try:
            with self._place.open() as client, client.controller() as controller:
                run(controller)
        except BaseException as problem:  # noqa: BLE001 - told by `finish`
            self._problems.append(problem)

    def _move(self, controller: Controller, seed: int) -> None:
        """Move a few cents between two accounts of the writer's own, again and again."""
        rng = np.random.default_rng(seed)
        mine = np.arange(seed, ACCOUNTS, len(self.threads) - 1)
        balance = {int(account): CENTS for account in mine}
        with controller.open_writer(NAME) as write:
            while not self._done.is_set():
                _transfer(write, balance, rng)
                self._moved.release()

    def _listen(self, controller: Controller) -> None:
        """Add up all updates. At each progress the sum is what it was at first."""
        with controller.open_reader(NAME, owner="the demo's listener") as reader:
            cents = _total(reader)
            with reader.listen(0) as listener:
                is_last = False
                while True:
                    is_done = self._done.is_set()
                    for event in listener.poll():
                        if isinstance(event, persist.Updates):
                            cents += _change(event.table)
                            continue
                        self.moments += 1
                        if cents != ACCOUNTS * CENTS:
                            raise Differs(f"the listener's sum is {cents:,} cents before {event.frontier}")
                    if is_last:
                        return
                    is_last = is_done
                    self._done.wait(0.02)


def _transfer(write: CollectionWriter, balance: dict[int, int], rng: np.random.Generator) -> None:
    payer, payee = (int(account) for account in rng.choice(list(balance), 2, replace=False))
    cents = int(rng.integers(1, 200))
    balance[payer] -= cents
    balance[payee] += cents
    write.upsert([{"account": account, "cents": balance[account]} for account in (payer, payee)])


def _total(reader: CollectionReader) -> int:
    with reader.snapshot(0) as snapshot:
        return _change(snapshot.to_arrow())


def _change(table: pa.Table) -> int:
    return int(pc.sum(pc.multiply(table["cents"], table["_diff"])).as_py() or 0)
