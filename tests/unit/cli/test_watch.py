"""`persist shard list --watch`: what it shows, what it costs, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.cli.watch import Watcher, appended
from persist_lib.core.state import Version
from persist_lib.errors import InvalidName, NotFound
from tests.unit.cli.shells import PERSIST, environment, run, shell

SCHEMA = persist.Schema(key={"id": "int64"})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    with persist.open(f"file:{tmp_path}/data") as client:
        for name in ("orders", "payments", "refunds"):
            client.open_writer(name, SCHEMA).compare_and_append([{"id": 1}, {"id": 2}], 0, 1)
        client.set_hold("orders", "audit", 0)
    return tmp_path


@pytest.fixture
def client(here: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{here}/data") as client:
        yield client


def requests(client: persist.Client) -> int:
    return client.metrics().cost.requests


def test_a_look_at_shards_that_did_not_move_is_one_request_however_many_there_are(client: persist.Client) -> None:
    watcher = Watcher(client)
    assert [seen.shard for seen in watcher.look()] == ["orders", "payments", "refunds"]
    for _ in range(3):
        before = requests(client)
        assert not any(seen.moved or seen.appended for seen in watcher.look())
        assert requests(client) - before == 1


def test_only_shards_that_moved_are_read_and_what_was_appended_is_counted(client: persist.Client, here: Path) -> None:
    watcher = Watcher(client)
    watcher.look()
    with persist.open(f"file:{here}/data") as other, other.open_writer("orders", SCHEMA) as write:
        for upper in range(1, 4):
            write.compare_and_append([{"id": id_} for id_ in range(10)], upper, upper + 1)
    before = requests(client)
    seen = {one.shard: one for one in watcher.look()}
    assert requests(client) - before == 2, "one for all, one for the shard that moved"
    assert {name: (one.moved, one.appended) for name, one in seen.items()} == {
        "orders": (True, 30), "payments": (False, 0), "refunds": (False, 0),
    }  # fmt: skip
    found = seen["orders"].value(2.0)
    assert (found["appended_per_s"], found["upper"], found["lag"], found["holds"]) == (15.0, [4], 4, 1)
    assert [one.moved for one in watcher.look()] == [False] * 3


def test_a_shard_that_is_created_appears_and_a_name_that_no_shard_has_is_an_error(client: persist.Client) -> None:
    all_, one = Watcher(client), Watcher(client, ["payments", "payments"])
    all_.look()
    client.open_writer("new", SCHEMA)
    assert [seen.shard for seen in all_.look()] == ["new", "orders", "payments", "refunds"]
    assert [seen.shard for seen in one.look()] == ["payments"]
    with pytest.raises(NotFound, match="there is no shard 'payment'"):
        Watcher(client, ["payment"]).look()
    with pytest.raises(InvalidName):
        Watcher(client, [""])


def test_merged_batches_are_counted_by_the_log_and_not_by_what_is_left_of_them(client: persist.Client) -> None:
    def version() -> Version:
        return client.inspect("orders")

    before = version()
    write = client.open_writer("orders", SCHEMA)
    for upper in range(1, 20):
        write.compare_and_append([{"id": 7, "_diff": 1 if upper % 2 else -1}], upper, upper + 1)
    client.downgrade_hold("orders", "audit", 19)
    client.compact("orders")
    after = version()
    assert after.state.count < before.state.count + 19
    assert appended(client, "orders", before, after) == 19
    assert appended(client, "orders", after, after) == 0
    client.release_hold("orders", "audit")
    write.close()
    client.roll_up("orders", force=True)
    client.collect("orders")
    assert appended(client, "orders", before, version()) is None, "the rows are gone"


def test_batches_that_were_merged_with_one_another_are_counted_by_the_log_too(client: persist.Client) -> None:
    write = client.open_writer("large", SCHEMA)
    write.compare_and_append([{"id": id_} for id_ in range(10_000)], 0, 1)
    before = client.inspect("large")
    for upper in range(1, 13):
        write.compare_and_append([{"id": 7, "_diff": 1 if upper % 2 else -1}], upper, upper + 1)
    client.downgrade_hold("large", "audit", 12)
    client.compact("large")
    after = client.inspect("large")
    new = [batch for batch in after.state.trace if batch.lo >= before.state.next_id]
    assert [len(new), sum(batch.count for batch in new)] == [1, 0], "of the merged batch nothing is left"
    assert appended(client, "large", before, after) == 12


def test_damage_in_one_shard_does_not_hide_the_others(client: persist.Client, here: Path) -> None:
    watcher = Watcher(client)
    real = client.inspect

    def inspect(name: str) -> Version:
        if name == "payments":
            raise persist.Corrupt("planted", key="x")
        return real(name)

    client.inspect = inspect  # type: ignore[method-assign]
    seen = {one.shard: one for one in watcher.look()}
    assert seen["payments"].problem == "Corrupt: planted"
    assert seen["orders"].version is not None


def test_lines_are_printed_for_shards_that_moved_and_it_ends_after_so_many_looks(here: Path) -> None:
    done = run("shard", "list", "--watch", "--count", 3, "--every", 0.05, cwd=here)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["orders", "payments", "refunds"]
    assert "since [0]  upper [1]  lag 1  updates 2" in done.stdout
    assert "held by 1 hold" in done.stdout.splitlines()[0]
    lines = run(
        "shard", "list", "--watch", "payments", "--count", 2, "--every", 0.05, "--json", cwd=here
    ).stdout.splitlines()
    looks = [json.loads(line) for line in lines]
    assert [[shard["shard"] for shard in look["shards"]] for look in looks] == [["payments"], ["payments"]]
    assert [look["shards"][0]["moved"] for look in looks] == [True, False]


@pytest.mark.parametrize("words", [
    ("--every", "0"), ("--every", "nan"), ("--every", "-1"), ("--count", "0"), ("--every", ""), ("a/b",), ("",),
    ("--long",), ("--names",),
])  # fmt: skip
def test_wrong_arguments_are_wrong_usage(here: Path, words: tuple[str, ...]) -> None:
    done = run("shard", "list", "--watch", *words, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--every", "1"), ("--count", "3")])
def test_options_of_watching_go_with_it(here: Path, words: tuple[str, ...]) -> None:
    done = run("shard", "list", *words, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert "go with --watch" in done.stderr


def test_the_name_that_was_meant_is_told(here: Path) -> None:
    done = run("shard", "list", "--watch", "order", cwd=here)
    assert done.returncode == 1
    assert "Did you mean orders?" in done.stderr


def started(here: Path, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [PERSIST, "shard", "list", "--watch", *words], cwd=here,
        env=environment(COLUMNS="100", LINES="30", PYTHONFAULTHANDLER="1"), **options,
    )  # fmt: skip


def test_ctrl_c_ends_it_as_it_ends_every_command(here: Path) -> None:
    process = started(here, "--every", "0.05", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"orders version v")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, b"interrupted\n")


def test_in_a_terminal_the_table_is_redrawn_in_place_and_the_cursor_comes_back(here: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(here, "--every", "0.1", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        text = _read_until(process, ours, b"refunds")
        with persist.open(f"file:{here}/data") as client:
            client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "_time": 4}] * 7, 1, 5)
        text += _read_until(process, ours, b"[5]")
        process.send_signal(signal.SIGINT)
        text += _read_until(process, ours, b"interrupted")
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait(timeout=30)
        os.close(ours)
    assert "\x1b[1A" in text, "the cursor goes up"
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h"), "hidden, and shown again at the end"
    assert re.search(r"new/s", text)
    assert "Traceback" not in text


def test_what_does_not_fit_the_terminal_is_counted_and_what_moves_is_shown(here: Path) -> None:
    with persist.open(f"file:{here}/data") as client:
        for number in range(40):
            client.open_writer(f"many-{number:02}", SCHEMA).compare_and_append([{"id": 1}], 0, 1)
    ours, theirs = pty.openpty()
    process = started(here, "--every", "0.1", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        text = _read_until(process, ours, b"of 43 shards")
        assert "many-39" not in text
        with persist.open(f"file:{here}/data") as client:
            client.open_writer("many-39", SCHEMA).compare_and_append([{"id": 1, "_time": 4}] * 7, 1, 5)
        text = _read_until(process, ours, b"many-39")
        process.send_signal(signal.SIGINT)
        text += _read_until(process, ours, b"interrupted")
    finally:
        process.kill()
        process.wait(timeout=30)
        os.close(ours)
    last = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text[text.rindex("version") :])
    assert last.count("\n") < 30, last
    assert "many-39" in last


def _read_until(process: subprocess.Popen[bytes], terminal: int, wanted: bytes) -> str:
    """What the process wrote until that. After longer than it waits for a store, where each of its threads stands."""
    text, end, is_late = b"", time.monotonic() + 90, False
    while wanted not in text:
        if not is_late and time.monotonic() > end:
            is_late = True
            process.send_signal(signal.SIGABRT)  # by PYTHONFAULTHANDLER
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
        elif is_late:
            break
    said = text.decode(errors="replace")
    assert wanted in text, said
    assert not is_late, said
    return said


def test_a_reader_that_leaves_ends_it_quietly(here: Path) -> None:
    done = shell("timeout 60 $P shard list --watch --every 0.05 --json | head -2 | wc -l", here)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")
