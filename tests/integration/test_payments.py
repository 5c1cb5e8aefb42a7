"""The payments example as people run it, with a real HTTP endpoint: moved to another store, repeated, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.event_ledger import ROOT, Receiver

PAYMENTS = [
    {"id": "pay_1", "from": "bank", "to": "ada", "cents": 1000},
    {"id": "pay_2", "from": "ada", "to": "bob", "cents": 400},
    {"id": "pay_3", "from": "bob", "to": "ada", "cents": 500},
    {"id": "pay_2", "from": "ada", "to": "bob", "cents": 400},
]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver(1)
    yield found
    found.close()


def run(folder: Path, receiver: Receiver, *words: str, lines: str | None = None) -> subprocess.CompletedProcess[str]:
    text = "\n".join(map(json.dumps, PAYMENTS)) if lines is None else lines
    return subprocess.run(
        [sys.executable, "-m", "examples.payments", "--webhook", receiver.url, *words],
        input=text, capture_output=True, text=True, cwd=folder, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


BALANCES = {"bank": -1000, "ada": 600, "bob": 400}


def test_payments_are_made_once_and_each_outcome_is_sent_to_the_webhook(tmp_path: Path, receiver: Receiver) -> None:
    done = run(tmp_path, receiver)
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    assert told == ["1 pay_1 paid", "2 pay_2 paid", "3 pay_3 refused: not enough money"]
    assert json.loads(last) == {"balances": BALANCES}
    sent = dict(receiver.got)
    assert [json.loads(body)["payment"]["outcome"] for body in sent.values()] == [
        "paid", "paid", "refused: not enough money",
    ]  # fmt: skip
    again = run(tmp_path, receiver)
    assert json.loads(again.stdout) == {"balances": BALANCES}, "sent again, nothing is paid twice"
    assert dict(receiver.got) == sent


def test_the_ledger_moves_to_another_store_by_an_option_and_goes_on_there(tmp_path: Path, receiver: Receiver) -> None:
    run(tmp_path, receiver)
    assert (tmp_path / "events").is_dir()
    more = json.dumps({"id": "pay_9", "from": "ada", "to": "bob", "cents": 1})
    for _ in range(2):
        moved = run(tmp_path, receiver, "-o", "sqlt:./ledger.sqlite", lines=more)
        assert moved.returncode == 0, moved.stderr
        assert json.loads(moved.stdout.splitlines()[-1]) == {"balances": BALANCES | {"ada": 599, "bob": 401}}
    old = run(tmp_path, receiver)
    assert old.returncode == 1
    assert "continues in sqlt:./ledger.sqlite" in old.stderr
    other = run(tmp_path, receiver, "-i", "disk:./nothing", "-o", "sqlt:./ledger.sqlite")
    assert (other.returncode, "NotFound" in other.stderr) == (1, True)
    kinds = run(tmp_path, receiver, "-o", "found:x")
    assert kinds.returncode == 1
    assert "lmdb" in kinds.stderr


def test_what_is_no_payment_is_refused_and_stops_nothing(tmp_path: Path, receiver: Receiver) -> None:
    done = run(tmp_path, receiver, lines='nonsense\n{"id": "pay_1", "from": "bank", "to": "ada", "cents": 5}\n')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["1  refused: event 1 is no payment", "2 pay_1 paid"]


def test_a_webhook_that_does_not_answer_stops_the_ledger_and_the_next_start_sends_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.close()
    failed = run(tmp_path, receiver, "-o", "lmdb:./ledger", "--retries", "1")
    assert failed.returncode == 1
    # Which call learns of it first, one that submits or the end of the ledger, depends on who is faster.
    assert "could not be released" in failed.stderr or "the loop has stopped" in failed.stderr
    assert "Connection refused" in failed.stderr
    assert "Traceback" not in failed.stderr
    other = Receiver(2)
    try:
        done = run(tmp_path, other, "-o", "lmdb:./ledger")
        assert done.returncode == 0, done.stderr
        assert len({key for key, _ in other.got}) == 3
        assert json.loads(done.stdout.splitlines()[-1]) == {"balances": BALANCES}
    finally:
        other.close()
