"""A payments ledger whose webhooks never speak of a payment that is not in its log.

    python -m examples.payments --webhook http://127.0.0.1:8000/hook < payments.jsonl

Each line of the input is a payment, such as {"id": "pay_1", "from": "bank", "to": "ada", "cents": 1000}. It is an
event; what the ledger makes of it (paid, or refused) goes to the webhook and to standard output. Kill it at any moment
and start it again with the same input: no payment is made twice, as each has an id, and no webhook is lost. Some may be
sent again, with the same `Webhook-Id`, by which a receiver drops what it has had.

`-i` and `-o` name the store that the ledger's log comes from, and the one in which it continues; both default to `disk`
(./events). With `-o lmdb:./ledger` it moves from there into LMDB; killed in between and started again, it continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing, nullcontext

import msgspec
import urllib3

from examples import console
from persist_lib import events

BANK = "bank"
"""The account that money comes from and goes to. Only this one may be below zero."""
FLIGHT = 64
RETRIES = 8
BUSY = (429, 500, 502, 503, 504)


class Payment(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    """An event. `id` is the customer's: who is not sure whether a payment was made sends it again with the same id."""

    id: str
    source: str
    target: str
    cents: int


class Ledger(msgspec.Struct):
    """The state: what each account has, and what became of each payment. All balances add up to 0."""

    cents: dict[str, int] = {}
    outcomes: dict[str, str] = {}


class Told(msgspec.Struct, frozen=True):
    """An effect: what became of a payment, as the webhook says it."""

    id: str
    outcome: str
    balance: int


def pay(ledger: Ledger, event: events.Input) -> tuple[Ledger, list[Told]]:
    """Make one payment, or refuse it. Depends on nothing but its arguments, and never raises."""
    try:
        payment = msgspec.json.decode(event.payload, type=Payment)
    except msgspec.MsgspecError:
        return ledger, [Told("", f"refused: event {event.id} is no payment", 0)]
    if payment.id in ledger.outcomes:  # sent again: nothing is paid twice, and there is nothing new to tell
        return ledger, []
    left = ledger.cents.get(payment.source, 0) - payment.cents
    if payment.cents <= 0:
        outcome = "refused: not a positive amount"
    elif left < 0 and payment.source != BANK:
        outcome = "refused: not enough money"
    else:
        outcome = "paid"
        ledger.cents[payment.source] = left
        ledger.cents[payment.target] = ledger.cents.get(payment.target, 0) + payment.cents
    ledger.outcomes[payment.id] = outcome
    return ledger, [Told(payment.id, outcome, ledger.cents.get(payment.source, 0))]


class Webhook:
    """Sends effects to an HTTP endpoint, one after the other.

    Each is tried so many times again, as its id lets the receiver drop what it has had. Then sending raises, and the
    ledger stops.
    """

    def __init__(self, url: str, retries: int = RETRIES) -> None:
        again = urllib3.Retry(
            retries,
            backoff_factor=0.1,
            backoff_max=5.0,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None,
        )
        self._url, self._pool = url, urllib3.PoolManager(retries=again, timeout=10.0)

    def send(self, effect: events.Effect) -> None:
        """Send one, and return when the endpoint has said that it has it."""
        body = msgspec.json.encode({"event": effect.event_id, "payment": effect.value})
        headers = {"Content-Type": "application/json", "Webhook-Id": effect.key}
        answer = self._pool.request("POST", self._url, body=body, headers=headers)
        if answer.status >= 300:
            raise ConnectionError(f"the webhook at {self._url} answered {answer.status}")

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()


def program(send: Callable[[events.Effect], object]) -> events.Program[Ledger]:
    """The ledger as a program for the event loop."""
    return events.Program(
        step=pay, initial=Ledger, release=send, snapshot_every=1_000,
        encode=msgspec.json.encode, decode=lambda data: msgspec.json.decode(data, type=Ledger),
    )  # fmt: skip


def run(loop: events.Loop[Ledger], lines: Iterable[str], say: Callable[[str], object]) -> None:
    """Submit each line, with some under way at a time, and say what became of it."""
    waiting: deque[Future[events.Done]] = deque()

    def tell() -> None:
        done = waiting.popleft().result()
        for effect in done.effects:
            say(f"{done.event_id} {effect.value.id} {effect.value.outcome}")

    for line in lines:
        if line.strip():
            waiting.append(loop.submit(line.strip().encode()))
        while waiting and (len(waiting) >= FLIGHT or waiting[0].done()):
            tell()
    while waiting:
        tell()


def main(words: list[str] | None = None) -> int:
    """Run the ledger on standard input."""
    parser = argparse.ArgumentParser(prog="payments", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--webhook", metavar="URL", required=True, help="where outcomes are sent")
    parser.add_argument("-i", "--input", metavar="STORE", help="where the log comes from (default: disk)")
    parser.add_argument("-o", "--output", metavar="STORE", help="where it goes on (default: disk)")
    parser.add_argument("--both", action="store_true", help="continue in both stores")
    parser.add_argument("--retries", metavar="N", type=int, default=RETRIES, help="of a webhook, before it stops")
    found = parser.parse_args(words)

    def carry_out() -> None:
        store, source = events.choose(found.input, found.output)
        with closing(Webhook(found.webhook, found.retries)) as webhook, store, source or nullcontext():
            ledger = program(webhook.send)
            with events.Loop(store, ledger, source=source, both=found.both) as loop:
                run(loop, sys.stdin, lambda line: print(line, flush=True))
            after, _ = events.replay(store, ledger)
            print(json.dumps({"balances": after.cents}), flush=True)

    return console.run(carry_out)


if __name__ == "__main__":
    sys.exit(main())
