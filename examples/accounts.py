"""Tables in the demo: accounts between which transactions move money, so that their sum never changes.

Each transfer changes two accounts and adds an entry, all or nothing. The accounts are rebuilt with more shards by a
transformation that is wrong, which `compare` shows, then by a right one, and handed over while the transactions go on
and a listener adds up what it gets.
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
from persist_lib.timeline import Tables

NAME, ENTRIES = "bank/accounts", "bank/entries"
SCHEMA = persist.Schema(key={"account": "int64 not null"}, value={"cents": "int64 not null"}, unique=True)
ENTRY = persist.Schema(
    key={"entry": "string not null"},
    value={"payer": "int64 not null", "payee": "int64 not null", "cents": "int64 not null"},
    unique=True,
)
ACCOUNTS = 1_000
CENTS = 10_050
"""What each account has at first."""
SHARDS = (2, 5)
"""Before and after."""


def show(place: Place, say: Callable[[str], None]) -> None:
    """Make the tables, and take the accounts through all of it. Raises Differs where a sum is wrong."""
    with place.open() as client, client.controller() as controller, controller.tables() as tables:
        tables.create(NAME, SCHEMA, shards=SHARDS[0], timeline="bank", mode="wal")
        tables.create(ENTRIES, ENTRY, timeline="bank")
        start = tables.insert(NAME, [{"account": n, "cents": CENTS} for n in range(ACCOUNTS)]).time
        with _Bank(place, 2, start or 0) as bank:
            _refuse_the_wrong_one(tables, say)
            at = _hand_over_the_right_one(tables, say)
            bank.finish()
        time = controller.describe(NAME).schema.show(at)
        say(f"handed over at {time} while {len(bank.threads) - 1} writers and a listener went on")
        _audit(tables)
        lag = tables.lag("bank")
        done = controller.tend()
        says = f"{lag.rows:,} rows of the write-ahead log are applied and given up in {len(done.steps)} steps"
        if tables.lag("bank").rows or tables.lag("bank").tables:
            raise Differs(f"tending left {tables.lag('bank')}")
        moved = _audit(tables)
    say(says)
    says = f"the listener's sum was right at each of its {bank.moments} times; {moved:,} transfers"
    say(f"[green]✓[/green] {says} explain what {ACCOUNTS:,} accounts hold: {ACCOUNTS * CENTS:,} cents")


def _audit(tables: Tables) -> int:
    """The number of transfers. Raises Differs unless the entries say, cent by cent, what each account holds."""
    time = tables.read_time("bank")
    accounts, entries = tables.read(NAME, time).to_arrow(), tables.read(ENTRIES, time).to_arrow()
    expected = np.full(ACCOUNTS, CENTS)
    for side, sign in (("payer", -1), ("payee", 1)):
        np.add.at(expected, entries[side].to_numpy(), sign * entries["cents"].to_numpy())
    held = np.zeros(ACCOUNTS, np.int64)
    held[accounts["account"].to_numpy()] = accounts["cents"].to_numpy()
    if not np.array_equal(held, expected) or held.sum() != ACCOUNTS * CENTS:
        raise Differs(f"{ENTRIES} do not explain {NAME}: {np.count_nonzero(held != expected)} accounts differ")
    shards = len(tables.controller.describe(NAME).active.shards)
    if shards != SHARDS[1]:
        raise Differs(f"{NAME} has {shards} shards, not {SHARDS[1]}")
    return int(entries.num_rows)


def whole_euros(rows: pa.Table) -> pa.Table:
    """Wrong: it was meant to change nothing but the shards, and drops what is below a euro."""
    cents = pc.multiply(pc.divide(rows["cents"], 100), 100)
    return rows.set_column(rows.schema.get_field_index("cents"), SCHEMA.contents.field("cents"), cents)


def _refuse_the_wrong_one(tables: Tables, say: Callable[[str], None]) -> None:
    controller = tables.controller
    tables.apply("bank")  # a copy takes what is in the table's own shards
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


def _hand_over_the_right_one(tables: Tables, say: Callable[[str], None]) -> int:
    controller = tables.controller
    made = controller.make_rendition(NAME, shards=SHARDS[1], copy=True)
    controller.copy_rendition(NAME, made.number)
    found = controller.compare(NAME, made.number)
    if not found.is_equal:
        raise Differs(f"a copy differs from what it copies: {found}")
    say(f"rendition {made.number} ({SHARDS[1]} shards): no account would change")
    at = controller.hand_over(NAME, made.number)
    tables.apply("bank")
    controller.copy_rendition(NAME, made.number, to_end=True)
    return at


class _Bank:
    """Writers that move money, and a listener that adds up what it gets, in threads, until `finish`."""

    def __init__(self, place: Place, writers: int, start: int) -> None:
        self._place, self._done, self._problems = place, threading.Event(), list[BaseException]()
        self._moved, self._start, self.moments = threading.Semaphore(0), start, 0
        self.threads = [threading.Thread(target=self._guarded, args=(self._listen,), daemon=True)]
        self.threads += [
            threading.Thread(target=self._guarded, args=(lambda t, seed=seed: self._move(t, seed),), daemon=True)
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

    def _guarded(self, run: Callable[[Tables], None]) -> None:
        try:
            with self._place.open() as client, client.controller() as controller, controller.tables() as tables:
                run(tables)
        except BaseException as problem:  # noqa: BLE001 - told by `finish`
            self._problems.append(problem)

    def _move(self, tables: Tables, seed: int) -> None:
        """Move a few cents between any two accounts, again and again."""
        rng, number = np.random.default_rng(seed), 0
        while not self._done.is_set():
            payer, payee = (int(account) for account in rng.choice(ACCOUNTS, 2, replace=False))
            cents = int(rng.integers(1, 200))
            try:
                _transfer(tables, f"{seed}-{number}", payer, payee, cents)
            except persist.WriteConflict:
                continue  # the other one was first, or the accounts were handed over: nothing was written
            number += 1
            self._moved.release()

    def _listen(self, tables: Tables) -> None:
        """Add up all updates. At each progress the sum is what it was at first."""
        cents = _change(tables.read(NAME, self._start, diff=True).to_arrow())
        with tables.listen(NAME, self._start) as listener:
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


def _transfer(tables: Tables, entry: str, payer: int, payee: int, cents: int) -> None:
    """One transaction over both tables."""
    with tables.transaction("bank") as t:
        t.update(NAME, {"cents": pc.subtract(pc.field("cents"), cents)}, keys=[payer])
        t.update(NAME, {"cents": pc.add(pc.field("cents"), cents)}, keys=[payee])
        t.insert(ENTRIES, [{"entry": entry, "payer": payer, "payee": payee, "cents": cents}])


def _change(table: pa.Table) -> int:
    return int(pc.sum(pc.multiply(table["cents"], table["_diff"])).as_py() or 0)
