"""Runs the models beside this file: `python -m tests.models.check [--night] [--mutants] [--replay] [NAMES]`.

A model is explored in scenes, each with bounds of its own. Every claim has to hold in each of them. A mutant is a model
with one mistake, which has to break the claim that it says. With `--replay`, random traces are carried out on the real
code (`replay`). Needs `spin` and `gcc`; where one is missing, nothing is run, and the exit status is `Exit.NOT_RUN`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tests.counted import count
from tests.models.scenes import MUTANTS, SCENES, Mutant, Scene

HERE = Path(__file__).parent
TOOLS = {"spin": "spin", "gcc": "gcc libc6-dev"}
"""What is needed, and the packages of Debian that have it."""
SECONDS, MEGABYTES, DEPTH = 600, 6000, 20_000
"""The most that one exploration may take; what reaches one of them is cut off, and says so."""
LANES = 24


class Exit(IntEnum):
    """What the exit status says."""

    HELD = 0
    BROKEN = 1
    USAGE = 2
    NOT_RUN = 3
    CUT = 4


class NotRun(RuntimeError):
    """A tool is missing. The message says which, and the package that has it."""


class Unsound(RuntimeError):
    """A model does not compile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one exploration: how much was explored, and the first claim that did not hold, if any.

    `is_whole`: every state within the bounds was looked at. Where a claim is broken, it is not.
    """

    states: int
    depth: int
    seconds: float
    broken: str | None
    is_whole: bool


def missing_tools() -> str:
    """Why the models cannot be run on this machine; empty if they can."""
    lost = [name for name in TOOLS if shutil.which(name) is None]
    packages = " ".join(TOOLS[name] for name in lost)
    return f"not run: no {' and no '.join(lost)}. Debian: apt-get install {packages}" if lost else ""


def check_tools() -> None:
    """Raise NotRun if a tool is missing."""
    if why := missing_tools():
        raise NotRun(why)


def _ran(words: Sequence[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsound(f"{' '.join(words)}: {(done.stdout + done.stderr).strip()[-800:]}")
    return done.stdout


def defined(defines: dict[str, int]) -> list[str]:
    """Bounds, as spin takes them."""
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def explore(file: str, defines: dict[str, int], seconds: float = SECONDS, *, is_long: bool = False) -> Verdict:
    """Look at every state of a model within these bounds, in at most this time.

    `is_long`: it is worth compiling well.
    """
    check_tools()
    with tempfile.TemporaryDirectory(prefix="models-") as name:
        folder = Path(name)
        _ran(["spin", "-a", *defined(defines), str(HERE / file)], folder)
        options = ["-DSAFETY", "-DNOREDUCE", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}"]
        _ran(["gcc", "-O2" if is_long else "-O0", "-w", *options, "-o", "pan", "pan.c"], folder)
        return _explored(folder, seconds)


def _explored(folder: Path, seconds: float) -> Verdict:
    began = time.monotonic()
    # -E: a state in which nobody has anything to do is no mistake. -n: unreached lines are not listed.
    words = ["./pan", f"-m{DEPTH}", f"-w{LANES}", "-E", "-n"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=seconds)
        text, is_over = done.stdout + done.stderr, True
    except subprocess.TimeoutExpired as error:
        text, is_over = (error.stdout or b"").decode(), False
    took = time.monotonic() - began
    broken = re.search(r"assertion violated \(?(\w+)", text)
    states, depth = re.search(r"(\d+) states, stored", text), re.search(r"depth reached (\d+)", text)
    is_cut = not is_over or "MEMLIM" in text or "max search depth too small" in text or states is None
    return Verdict(
        int(states[1]) if states else 0, int(depth[1]) if depth else 0, took, broken[1] if broken else None,
        not is_cut and broken is None,
    )  # fmt: skip


def explore_scene(scene: Scene, *, at_night: bool) -> Verdict:
    """Explore a scene within the bounds of the day or of the night."""
    return explore(scene.file, scene.night if at_night else scene.day, is_long=at_night)


def explore_mutant(mutant: Mutant) -> Verdict:
    """Explore a mutant. Its claim has to be broken."""
    return explore(mutant.file, {**mutant.bounds, f"MUTANT_{mutant.name}": 1})


def _held(chosen: Sequence[Scene], *, at_night: bool) -> Exit:
    worst = Exit.HELD
    print(f"{'scene':34} {'states':>10} {'depth':>6} {'seconds':>8}  claims")
    for scene in chosen:
        found = explore_scene(scene, at_night=at_night)
        count("models", scenes=1, states=found.states)
        said = f"BROKEN: {found.broken}" if found.broken else "all held" if found.is_whole else "CUT OFF, none broken"
        print(
            f"{scene.file + ' ' + scene.name:34} {found.states:10,} {found.depth:6} {found.seconds:8.1f}  {said}",
            flush=True,
        )
        if found.broken:
            worst = Exit.BROKEN
        elif not found.is_whole and worst is Exit.HELD:
            worst = Exit.CUT
    return worst


def _caught(chosen: Sequence[Mutant]) -> Exit:
    worst = Exit.HELD
    print(f"\n{'mutant':48} {'states':>9} {'seconds':>8}  broke")
    for mutant in chosen:
        found = explore_mutant(mutant)
        is_right = found.broken == mutant.claim
        count("models", mutants=1, mutants_found=int(is_right))
        said = str(found.broken) if is_right else f"{found.broken}, NOT {mutant.claim}"
        print(f"{mutant.file + ' ' + mutant.name:48} {found.states:9,} {found.seconds:8.1f}  {said}", flush=True)
        worst = worst if is_right else Exit.BROKEN
    return worst


def _replayed(traces: int, is_chosen: Callable[[str], bool]) -> Exit:
    from tests.models.processes import Mismatch  # noqa: PLC0415 - it loads the library, which models do not need
    from tests.models.replay import replayed  # noqa: PLC0415
    from tests.models.replays import REPLAYS  # noqa: PLC0415

    worst = Exit.HELD
    for replay in REPLAYS:
        if not is_chosen(replay.file):
            continue
        try:
            done = replayed(replay, range(1, traces + 1))
        except Mismatch as mismatch:
            print(f"\nthe code DISAGREES: {mismatch}")
            worst = Exit.BROKEN
            continue
        kinds = ", ".join(f"{name} {times}" for name, times in sorted(done.items()))
        count("models", traces=traces, steps=done.total())
        print(f"\n{traces} traces of {replay.file} on the real code, {done.total():,} steps, all agreed: {kinds}")
    return worst


def main(words: Sequence[str] | None = None) -> int:
    """Run as `python -m tests.models.check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words of the scenes, mutants and models to run (default: all)")
    parser.add_argument("--night", action="store_true", help="the large bounds")
    parser.add_argument("--mutants", action="store_true", help="also that each mutant breaks its claim")
    parser.add_argument("--replay", action="store_true", help="also random traces on the real code")
    parser.add_argument("--traces", type=int, default=50, help="how many of each model (default: 50)")
    options = parser.parse_args(words)
    if why := missing_tools():
        print(why, file=sys.stderr)
        return Exit.NOT_RUN

    def is_chosen(text: str) -> bool:
        return not options.names or any(word in text for word in options.names)

    ended = [_held([one for one in SCENES if is_chosen(f"{one.file} {one.name}")], at_night=options.night)]
    if options.mutants:
        ended.append(_caught([one for one in MUTANTS if is_chosen(f"{one.file} {one.name}")]))
    if options.replay:
        ended.append(_replayed(options.traces, is_chosen))
    return max(ended, key=[Exit.HELD, Exit.CUT, Exit.BROKEN].index)


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C")
    sys.exit(main())
