"""What a killed ledger leaves, and what must be so of it: its log, its webhooks, and what it acknowledged."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from examples.payments import BANK, Ledger, pay, program
from persist_lib import events
from persist_lib.errors import NotFound
from persist_lib.events.api import compute
from tests.torture.event_program import Job, payment

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0


class Receiver:
    """A real HTTP endpoint, which notes what it gets. Now and then it asks for patience, or hangs up without a word."""

    def __init__(self, seed: int = 0) -> None:
        self.got: list[tuple[str, bytes]] = []
        lock, rng = threading.Lock(), random.Random(seed)

        class Endpoint(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                if len(body := self.rfile.read(length)) < length:  # the sender was killed
                    self.close_connection = True
                    return
                with lock:
                    mood = rng.random()
                    if mood < 0.98:
                        receiver.got.append((self.headers["Webhook-Id"], body))
                if 0.96 < mood < 0.98:  # it has it, and nobody is told
                    self.close_connection = True
                    return
                self.send_response(503 if mood >= 0.98 else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        receiver = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Processes:
    """Runs and kills processes, forked by one that has imported everything."""

    def __init__(self) -> None:
        self._forker = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.event_program"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def start(self, job: Job) -> int:
        return int(self._ask(f"run {msgspec.json.encode(job).decode()}"))

    def wait(self, pid: int) -> int:
        """Its status, as `os.waitpid` gives it."""
        return int(self._ask(f"wait {pid}"))

    def _ask(self, line: str) -> str:
        assert self._forker.stdin
        assert self._forker.stdout
        print(line, file=self._forker.stdin, flush=True)
        return self._forker.stdout.readline()

    def close(self) -> None:
        self._forker.communicate(timeout=LONG_S)


class World:
    """A log in a store, what its processes said, and what its webhooks said."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self.folder, self.receiver = folder, receiver
        self.acknowledged: dict[int, int] = {}
        """Events by payment."""
        self._log: list[bytes] = []
        self._expected: dict[str, bytes] = {}
        self._state = Ledger()
        self._seen = 0
        self._number = 0

    def job(self, store: str, **fields: Any) -> Job:
        """The next process's job: from a little before the last payment that was acknowledged."""
        self._number += 1
        first = max(0, max(self.acknowledged, default=-1) - 3)
        notes = str(self.folder / f"{self._number}.notes")
        return Job(store, self.receiver.url, notes, first=first, **fields)

    def notes(self, job: Job) -> list[list[str]]:
        """What a process said so far. The last line may be cut."""
        path = Path(job.notes)
        return [line.split(" ", 1) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def has_said(self, job: Job, word: str) -> bool:
        """Whether a process said this, or that it failed."""
        return any(said in {word, "failed"} for said, _ in self.notes(job))

    def learn(self, job: Job) -> None:
        """Take over what a process acknowledged. A failure of it is one of the test."""
        for word, rest in self.notes(job):
            assert word != "failed", json.loads(rest)
            if word == "ack":
                number, event_id = map(int, rest.split())
                self.acknowledged[number] = event_id

    def judge(self, specifier: str) -> int:
        """No effect without its event, nothing acknowledged lost, each event applied once. Returns the last id."""
        log = log_of(specifier)
        assert log[: len(self._log)] == self._log, "what was in the log has changed, or is gone"
        for event_id, payload in enumerate(log[len(self._log) :], len(self._log) + 1):
            event = events.Input(event_id, payload)
            self._state, effects = compute(program(print), self._state, event)
            for effect in effects:
                self._expected[effect.key] = msgspec.json.encode({"event": event_id, "payment": effect.value})
        self._log = log
        got = self.receiver.got
        for key, body in got[self._seen :]:
            assert self._expected.get(key) == body, f"a webhook speaks of what is not in the log: {key} {body!r}"
        self._seen = len(got)
        for number, event_id in self.acknowledged.items():
            assert log[event_id - 1] == payment(number), f"payment {number} was acknowledged as event {event_id}"
        if log:
            with events.open_store(specifier) as store:
                # Through what was read above: a server may still commit what a process had sent before it was killed.
                by_snapshot, all_of_it = (
                    events.replay(store, program(print), through=len(log), snapshots=snapshots)
                    for snapshots in (True, False)
                )
            assert by_snapshot == all_of_it == (self._state, len(log))
        check_sums(self._state, log)
        return len(log)

    def check_all_told(self) -> None:
        """After a graceful stop every effect has arrived, and a receiver that drops repetitions has each once."""
        assert {key for key, _ in self.receiver.got} == set(self._expected)


def log_of(specifier: str) -> list[bytes]:
    try:
        with events.open_store(specifier) as store, store.reader() as reader:
            return [bytes(event.payload) for event in reader.replay()]
    except NotFound:
        return []


def check_sums(state: Ledger, log: list[bytes]) -> None:
    """Balances add up, each payment is made at most once, and nobody but the bank is below zero."""
    assert sum(state.cents.values()) == 0
    assert all(cents >= 0 for name, cents in state.cents.items() if name != BANK)
    paid: dict[str, Mapping[str, Any]] = {}
    for payload in log:
        found = json.loads(payload)
        paid.setdefault(found["id"], found)
    cents: dict[str, int] = {}
    for id_, outcome in state.outcomes.items():
        if outcome == "paid":
            one = paid[id_]
            cents[one["from"]] = cents.get(one["from"], 0) - one["cents"]
            cents[one["to"]] = cents.get(one["to"], 0) + one["cents"]
    assert cents == state.cents


def until(is_so: Any, what: str) -> None:
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.005)


assert pay is program(print).step
