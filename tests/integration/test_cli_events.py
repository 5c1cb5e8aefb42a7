"""`persist events`: what a log holds, whether it is whole, copies of it, and what an operator may say of effects."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from persist_lib import events
from persist_lib.events.stores.shared import EndMark
from tests.integration.test_cli import Shell

WORDS = [b"alpha", "größe".encode(), b"\xff\x00", b"two\nlines", b"x" * 5_000]


PROGRAM: events.Program[int] = events.Program(
    lambda state, _: (state + 1, ["x"]), int, lambda _: None, lambda state: str(state).encode(), int
)


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A log of five events."""
    specifier = f"disk:{tmp_path}/log"
    with events.Loop(specifier, PROGRAM) as loop:
        for word in WORDS:
            loop.submit(word)
    return specifier


def payloads(specifier: str) -> list[bytes]:
    with events.open_store(specifier) as store, store.reader() as reader:
        return [bytes(event.payload) for event in reader.replay()]


def test_events_are_printed_as_text_or_base64_or_as_they_are(sh: Shell, log: str) -> None:
    lines = sh("events", "cat", log).splitlines()
    assert lines[:4] == ["1  5 B  alpha", "2  7 B  größe", "3  2 B  /wA=", "4  9 B  dHdvCmxpbmVz"]
    assert len(lines) == 5
    found = [json.loads(line) for line in sh("events", "cat", log, "--json").splitlines()]
    assert [one["id"] for one in found] == [1, 2, 3, 4, 5]
    assert (found[1]["text"], found[2]["base64"], found[4]["bytes"]) == ("größe", "/wA=", 5_000)
    raw = sh.run("events", "cat", log, "--from", "2", "--through", "3", "--raw").stdout_bytes
    assert raw == WORDS[1] + WORDS[2]
    assert sh("events", "cat", log, "--first", 2).splitlines() == lines[:2]
    assert sh("events", "cat", log, "--last", 2).splitlines() == lines[-2:]
    assert sh("events", "cat", log, "--last", 99).splitlines() == lines
    assert sh("events", "cat", log, "--first", 0) == sh("events", "cat", log, "--last", 0) == ""
    assert sh("events", "cat", log, "--from", 2, "--through", 4, "--last", 2).splitlines() == lines[2:4]
    assert sh("events", "cat", log, "--from", 4, "--first", 9).splitlines() == lines[3:]
    assert "not both" in sh.fails(2, "events", "cat", log, "--first", 1, "--last", 1)
    assert "no event 9" in sh.fails(1, "events", "cat", log, "--through", 9, "--last", 1)
    assert "no event 9" in sh.fails(1, "events", "cat", log, "--through", 9)
    assert "give one of them" in sh.fails(2, "events", "cat", log, "--raw", "--json")


def test_a_log_is_shown_and_checked(sh: Shell, log: str, tmp_path: Path) -> None:
    shown = sh("events", "show", log)
    assert re.search("last event +5", shown)
    assert re.search("released +up to event 5", shown)
    assert re.search("snapshot +of the state after event 5", shown)
    found = sh.json("events", "show", log)
    assert (found["last"], found["released"], found["snapshot"]) == (5, 5, 5)
    assert "5 events, 4.9 KiB, all as they were written" in sh("events", "check", log)
    assert sh.json("events", "check", log) == {"store": log, "events": 5, "bytes": sum(map(len, WORDS))}
    [segment] = (tmp_path / "log" / "events").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.rindex(b"x" * 100)] ^= 1
    segment.write_bytes(data)
    assert "log" in sh.fails(3, "events", "check", log)


def test_a_log_is_copied_and_compared_and_the_copy_is_a_log(sh: Shell, log: str, tmp_path: Path) -> None:
    copy = f"sqlt:{tmp_path}/copy"
    assert "would write 5 events" in sh("events", "copy", log, copy, "--dry-run")
    assert not (tmp_path / "copy").exists()
    assert "wrote 5 events" in sh("events", "copy", log, copy)
    assert payloads(copy) == WORDS
    again = sh.json("events", "copy", log, copy)
    assert (again["checked"], again["written"], again["last"], again["dry_run"]) == (5, 0, 5, False)
    assert "the first 5 events are the same" in sh("events", "check", log, copy)
    with events.Loop(copy, PROGRAM) as loop:
        assert loop.submit(b"more").result(10).event_id == 6
    assert "which has 6 events" in sh("events", "check", log, copy)
    assert "beyond" in sh.fails(1, "events", "copy", log, copy)
    other = f"lmdb:{tmp_path}/other"
    with events.open_store(other) as store, store.writer() as writer:
        writer.write(1, b"beta").result(10)
    assert "these are two logs. Nothing was changed" in sh.fails(1, "events", "copy", log, other)
    assert "event 1 is not the same" in sh.fails(1, "events", "check", log, other)
    assert payloads(other) == [b"beta"]


@pytest.mark.parametrize("kind", ["disk", "persist"])
def test_an_operator_says_that_effects_count_as_released(sh: Shell, log: str, kind: str, tmp_path: Path) -> None:
    if kind == "persist":
        sh("events", "copy", log, rf"persist:file\:{tmp_path}/shards:ledger")
        log = rf"persist:file\:{tmp_path}/shards:ledger"
    assert "would be so" in sh("events", "mark", log, "--through", 3, "--dry-run")
    assert sh.json("events", "show", log)["released"] == 5
    assert "that is not" in sh.run("events", "mark", log, "--through", 3, typed="no\n").stderr
    assert "releasing again the effects of events 4 to 5" in sh("events", "mark", log, "--through", 3, typed=f"{log}\n")
    assert "2 events behind it" in sh("events", "show", log)
    assert sh.json("events", "mark", log, "--through", 4, "--yes")["before"] == 3
    assert "add --yes" in sh.fails(2, "events", "mark", log, "--through", 5, "--json")
    assert "there is no event 6" in sh.fails(2, "events", "mark", log, "--through", 6, "--yes")
    assert sh.json("events", "show", log)["released"] == 4


def test_what_is_no_store_or_is_not_there_is_told_without_passwords(sh: Shell, tmp_path: Path) -> None:
    assert "NotFound" in sh.fails(1, "events", "show", f"disk:{tmp_path}/nothing")
    assert not (tmp_path / "nothing").exists()
    said = sh.fails(2, "events", "show", "found:x")
    assert "disk" in said
    assert "lmdb" in said
    kinds = sh.json("events", "show")["kinds"]
    assert {"disk", "sqlt", "lmdb"} <= kinds.keys()
    assert re.search("disk +a directory", sh("events", "show"))
    said = sh.fails(1, "events", "show", r"pg:postgresql\://me\:hunter2@127.0.0.1\:1/db")
    assert "hunter2" not in said


def test_an_empty_log_is_not_said_to_be_as_it_was_written(sh: Shell, tmp_path: Path) -> None:
    with events.open_store(f"disk:{tmp_path}/empty") as store:
        store.writer().close()
    assert "the log is empty, so there was nothing to check" in sh("events", "check", f"disk:{tmp_path}/empty")


@pytest.mark.parametrize("kind", ["disk", "sqlt", "lmdb", "rock"])
def test_a_shorter_log_is_neither_checked_nor_copied_and_repaired_when_asked(
    sh: Shell, kind: str, tmp_path: Path
) -> None:
    place, copied = f"{kind}:{tmp_path}/log", f"disk:{tmp_path}/copy"
    with events.open_store(place) as store, store.writer() as writer:
        for number, word in enumerate(WORDS, 1):
            writer.write(number, word)
    (end,) = [path for path in tmp_path.rglob("*") if path.name in ("end", "log-end")]
    EndMark(end).write(end.read_bytes()[:8], 9)
    for arguments in (["check", place], ["copy", place, copied], ["show", place], ["check", place, copied]):
        assert "events 6 to 9 are gone" in " ".join(sh.fails(3, "events", *arguments).split())
    assert not (tmp_path / "copy").exists()
    planned = json.loads(sh("events", "check", place, "--repair", "--dry-run", "--json"))
    assert (planned["events"], planned["dropped"], planned["applied"]) == (5, 4, False)
    assert "that is not" in sh.run("events", "check", place, "--repair", typed="no\n").stderr
    assert "add --yes" in sh.fails(2, "events", "check", place, "--repair", "--json")
    assert "gone" in sh.fails(3, "events", "check", place), "nothing was changed"
    assert "4 events behind them are dropped" in sh("events", "check", place, "--repair", typed=f"{place}\n")
    assert "5 events" in sh("events", "check", place)
    assert "nothing is wrong" in sh("events", "check", place, "--repair")
    assert payloads(place) == WORDS
