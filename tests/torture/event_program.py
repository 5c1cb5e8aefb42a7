"""The payments ledger of examples/, run by processes that are forked from one that has imported everything, and killed.

A process is told where its log is, from which payment on it pays, and, for a death at a step, which one: the so-manieth
call of a driver, of the operating system for durable bytes, or of a webhook, before it or after it. A pause is around a
call that writes: in the middle of one, a process may hold a lock of its database, and all others wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any

import msgspec

import persist_lib as persist
from examples.payments import Payment, Webhook, program
from persist_lib import events
from persist_lib.events.store import LogStore, load_kind

ACCOUNTS = ("ada", "bob", "cleo", "dan")
DRIVER = ("claim", "last", "discard", "put", "get", "ids", "remove", "close")
WRITING = ("claim", "discard", "put", "remove")
SYSTEM = ("fsync", "fdatasync", "write", "writev", "replace", "rename", "unlink", "link", "open")
FLIGHT = 8


def payment(number: int) -> bytes:
    """The payment of this number, the same in each process. Now and then one is sent with the id of an earlier one."""
    rng = random.Random(number)
    id_ = number - rng.randrange(1, 5) if number % 7 == 6 else number
    source = "bank" if rng.random() < 0.4 else rng.choice(ACCOUNTS)
    found = Payment(f"pay_{id_}", source, rng.choice(ACCOUNTS), rng.randrange(-5, 500))
    return msgspec.json.encode(found) + b" " * rng.choice((0, 0, 0, 3_000))


class Job(msgspec.Struct):
    """What a process does: go on with the log in `store`, moved from `source`, by so many payments (0: until killed).

    `first` is the number of the first payment. `dies_at` is the step at which it is killed, and `stops_at` the step
    around calls that write at which it is paused until it is told to go on (-1: none).
    """

    store: str
    webhook: str
    notes: str
    source: str = ""
    both: bool = False
    first: int = 0
    count: int = 0
    dies_at: int = -1
    stops_at: int = -1


class Steps:
    """Counts steps, and sends this process a signal at one of them."""

    def __init__(self, at: int, sent: signal.Signals) -> None:
        self._counter, self._at, self._sent = itertools.count(), at, sent

    def come(self) -> None:
        if next(self._counter) == self._at:
            # SUBTLE: to this thread. Sent to the process, this one continues until another one was told.
            signal.pthread_kill(threading.get_ident(), self._sent)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.come()
            answer = call(*args, **kwargs)
            self.come()
            return answer

        return stepped

    @property
    def count(self) -> int:
        return next(self._counter)


def watch(steps: Steps, pauses: Steps) -> None:
    """Count every call of a driver, and every call of the operating system that makes something durable."""
    opens = LogStore.open_driver

    def opened(store: LogStore, *, create: bool) -> Any:
        steps.come()
        records = opens(store, create=create)
        for name in DRIVER:
            call = steps.around(getattr(records, name))
            setattr(records, name, pauses.around(call) if name in WRITING else call)
        return records

    LogStore.open_driver = opened  # type: ignore[method-assign,assignment]
    for name in SYSTEM:
        setattr(os, name, steps.around(getattr(os, name)))


def pay(job: Job, say: Callable[[str], object], steps: Steps) -> None:
    """Pay, and say of each payment that it was acknowledged."""
    with closing(Webhook(job.webhook)) as webhook:
        ledger = program(steps.around(webhook.send))
        waiting: deque[tuple[int, Future[events.Done]]] = deque()
        numbers = itertools.count(job.first) if job.count == 0 else range(job.first, job.first + job.count)
        with events.Loop(job.store, ledger, source=job.source or None, both=job.both, mark_every_s=0.02) as loop:
            say(f"open {loop.accepted}")
            for number in numbers:
                waiting.append((number, loop.submit(payment(number))))
                while waiting and (len(waiting) >= FLIGHT or waiting[0][1].done()):
                    acknowledge(*waiting.popleft(), say)
            while waiting:
                acknowledge(*waiting.popleft(), say)


def acknowledge(number: int, future: Future[events.Done], say: Callable[[str], object]) -> None:
    say(f"ack {number} {future.result(30).event_id}")


def run(job: Job) -> None:
    """Be one process. Whatever ends it otherwise than a kill is a failure."""
    write = os.write
    notes = os.open(job.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(text: str) -> None:
        write(notes, f"{text}\n".encode())

    try:
        steps, pauses = Steps(job.dies_at, signal.SIGKILL), Steps(job.stops_at, signal.SIGSTOP)
        watch(steps, pauses)
        pay(job, say, steps)
        say(f"stopped {steps.count} {pauses.count}")
    except BaseException:  # noqa: BLE001 - told to whoever started us
        say(f"failed {json.dumps(traceback.format_exc())}")
        os._exit(1)
    os._exit(0)


def serve() -> None:
    """Fork as asked: a line of JSON for each process, answered by its id, and its exit status when it is asked for."""
    for line in sys.stdin:
        word, _, rest = line.partition(" ")
        if word == "run":
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                run(msgspec.json.decode(rest, type=Job))
            print(pid, flush=True)
        else:
            print(os.waitpid(int(rest), 0)[1], flush=True)


def warm_up() -> None:
    """Have everything imported that a process needs, without a thread or a connection to fork."""
    for name in events.known_kinds():
        with suppress(persist.InvalidUsage):  # its extra is not installed
            load_kind(name)


if __name__ == "__main__":
    warm_up()
    serve()
