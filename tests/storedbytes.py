"""Every stored byte of an event log, flipped, cut off or swapped: what a program that reads the log is given then.

Run as a program it takes damages as lines of JSON, and answers each by a line: so it is seen if a
store ends the process.
"""

from __future__ import annotations

import itertools
import json
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from persist_lib.errors import Damage, PersistError
from persist_lib.events import Writer, check, open_store

ROOT = Path(__file__).parent.parent
LOCAL = ("disk", "sqlt", "lmdb", "rock", "persist")
"""The kinds whose bytes are files of this machine."""
KINDS = ("flip", "cut", "swap")
PAYLOADS = [b"event %d " % number * (3 + 40 * (number % 3)) for number in range(1, 41)]
MARK, STATE = b"marked", b"state" * 20
SNAPSHOT = 30
SWAPPED = 64
"""How many bytes are swapped, at most."""
PATIENCE_S = 30


@dataclass(frozen=True)
class Wrong:
    """One damage: to which file of a log, of what kind, at which byte; `other` is where a swap takes its bytes from."""

    file: str
    kind: str
    at: int
    bit: int = 0
    other: int = 0

    def of(self, data: bytes) -> bytes:
        """The bytes of the file with the damage."""
        if self.kind == "cut":
            return data[: self.at]
        if self.kind == "flip":
            return data[: self.at] + bytes([data[self.at] ^ 1 << self.bit]) + data[self.at + 1 :]
        size = min(SWAPPED, len(data) - self.at, len(data) - self.other)
        changed = bytearray(data)
        changed[self.at : self.at + size] = data[self.other : self.other + size]
        changed[self.other : self.other + size] = data[self.at : self.at + size]
        return bytes(changed)


def make(kind: str, folder: Path, *, is_killed: bool) -> Path:
    """Write a log, and leave it as a writer does that was closed, or one that was killed."""
    log, place = folder / "log", folder / "as-it-was"
    log.mkdir(parents=True)
    with open_store(place_of(kind, log)) as store, store.writer() as writer:
        fill(writer, PAYLOADS, SNAPSHOT)
        if is_killed:
            shutil.copytree(log, place)
    if not is_killed:
        shutil.copytree(log, place)
    shutil.rmtree(log)
    return place


def fill(writer: Writer, payloads: list[bytes], snapshot: int) -> None:
    """Write events, in two batches up to the snapshot and alone from there on."""
    for start, end in itertools.pairwise([0, snapshot // 2, *range(snapshot, len(payloads) + 1)]):
        for payload in payloads[start:end]:
            writer.write(writer.accepted + 1, payload)
        writer.flush()
        if end == snapshot:
            writer.write_snapshot(snapshot, STATE)
            writer.write_mark("m", MARK)
            writer.flush()


def wrongs(place: Path, count: int, seed: int) -> Iterator[Wrong]:
    """Damages to each file of a log: `count` of each kind."""
    chance = random.Random(seed)
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        yield from of_bytes(str(path.relative_to(place)), path.read_bytes(), count, chance)


def of_bytes(name: str, data: bytes, count: int, chance: random.Random) -> Iterator[Wrong]:
    """Damages to some bytes that have a name."""
    used = [at for at in range(len(data)) if data[at]]  # a sample of zeros says little
    for kind in KINDS if used else ():
        for at in chance.sample(used, min(len(used), count)):
            yield Wrong(name, kind, at, chance.randrange(8), chance.choice(used))


def place_of(kind: str, folder: Path) -> str:
    """The specifier of the log in a folder."""
    return f"persist:file\\:{folder}:events" if kind == "persist" else f"{kind}:{folder / 'events'}"


def look(specifier: str, named: tuple[str, ...], payloads: list[bytes] = PAYLOADS, snapshot: int = SNAPSHOT) -> str:
    """What is said of a log: `right`, `Corrupt`, …, or `WRONG` with what was.

    A message has to name one of `named`.
    """
    try:
        with open_store(specifier) as store:
            check(store)
            with store.reader() as reader:
                found = [bytes(event.payload) for event in reader.replay()]
                mark, kept = reader.read_mark("m"), reader.newest_snapshot()
        if found != payloads:
            return f"WRONG: {len(found)} events"
        if mark != MARK or kept not in ((snapshot, STATE), None):
            return f"WRONG: mark {mark!r}, snapshot {kept!r}"
    except Damage as error:
        unnamed = "" if any(name in error.message for name in named) else " UNNAMED"
        return f"{type(error).__name__}{unnamed}: {error.message}"
    except PersistError as error:
        return f"OTHER {type(error).__name__}: {error.message}"
    except BaseException as error:  # noqa: BLE001 - what it is, is asked for
        return f"UNTYPED {type(error).__name__}: {error}"
    return "right" if kept else "right, without the snapshot"


def serve() -> None:
    """Answer each damage of the standard input by a line."""
    kind, place, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(flush=True)  # it has begun, which takes long beside other work
    for line in sys.stdin:
        wrong = Wrong(**json.loads(line))
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(place, work)
        path = work / wrong.file
        path.write_bytes(wrong.of(path.read_bytes()))
        named = (str(work), "events") if kind == "persist" else (str(work),)
        print(json.dumps(look(place_of(kind, work), named)), flush=True)


def ask(kind: str, place: Path, cases: list[Wrong], work: Path) -> list[str]:
    """What is said of each damage. A process does the work; where it dies, `CRASH` is said, and another one goes on."""
    said: list[str] = []
    while len(said) < len(cases):
        command = [sys.executable, "-m", "tests.storedbytes", kind, str(place), str(work)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            for wrong in cases[len(said) :]:
                child.stdin.write(json.dumps(asdict(wrong)).encode() + b"\n")
                child.stdin.flush()
                is_answered = bool(select.select([child.stdout], [], [], PATIENCE_S)[0])
                if not (line := child.stdout.readline() if is_answered else b""):
                    if not is_answered:
                        child.kill()
                    code = child.wait()
                    assert code < 0, f"the process ended with {code} on {wrong}"
                    said.append(f"CRASH by signal {-code}" if is_answered else "HANG")
                    break
                said.append(json.loads(line))
            child.stdin.close()
    return said


if __name__ == "__main__":
    serve()
