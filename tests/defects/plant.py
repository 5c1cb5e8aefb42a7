"""Plants recorded bugs one by one, and says which of them the tests find, and which test does.

Each `NNNN-name.patch` beside this file is one bug: `# rule:` says which rule it breaks, `# test:` what finds it, then
comes a diff for `git apply`. `make defects` plants each in a copy of the tree and runs its tests: what `make test`
would run of them, unless PERSIST_CIRCLE is night. With `--wide`, what these do not find is tried with all fast tests of
the packages that it is in. Exit status 1 where a bug was not found, or a patch no longer applies.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.circles import DRAWN
from tests.counted import count

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

FOUND, MISSED, STALE, BROKEN = "found", "MISSED", "STALE", "BROKEN"
FAILED_TESTS, NO_TESTS = 1, 5
"""Exit statuses of pytest: tests failed; the sample has none of them. What cannot be collected is another."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One planted bug."""

    file: Path
    rule: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.file.stem


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one: `by` is the test that failed first, or why there is none."""

    defect: Defect
    verdict: str
    by: str
    seconds: float


def read(file: Path) -> Defect:
    """The defect that a patch describes; ValueError where its first lines do not say the rule and the test."""
    head = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    rules = [line.removeprefix("# rule:").strip() for line in head if line.startswith("# rule:")]
    tests = [word for line in head if line.startswith("# test:") for word in line.removeprefix("# test:").split(" | ")]
    if len(rules) != 1 or not tests:
        raise ValueError(f"{file.name}: its first lines say one `# rule: …` and one or more `# test: …`")
    return Defect(file, rules[0], tuple(test.strip() for test in tests))


def defects(chosen: Sequence[str] = ()) -> list[Defect]:
    """All of them by number, or those whose name has one of these words."""
    every = [read(file) for file in sorted(HERE.glob("*.patch"))]
    return [one for one in every if not chosen or any(word in one.name for word in chosen)]


def _git(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=False)


def applies(defect: Defect, tree: Path = ROOT) -> bool:
    """Whether it can still be planted in the code as it is."""
    return _git(tree, "apply", "--check", str(defect.file)).returncode == 0


def _copy(to: Path) -> Path:
    """The tree as it is now, with what is not committed."""
    names = _git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def _pytest(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run these in the copy until one fails; its exit status, and the first test that failed."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PERSIST_SEED": "fixed", "PYTHONDONTWRITEBYTECODE": "1"}
    environment[DRAWN] = "1"
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return ran.returncode, failed[1] if failed else (ran.stdout + ran.stderr).strip()[-200:]


def _wide(defect: Defect) -> list[str]:
    """The fast tests of the packages that it touches."""
    packages = set(re.findall(r"^\+\+\+ b/persist_lib/(\w+)/", defect.file.read_text(), re.MULTILINE))
    folders = [f"tests/unit/{package}" for package in sorted(packages) if (ROOT / f"tests/unit/{package}").is_dir()]
    return ["-m", "not (spark or dagster or torture)", *(folders or ["tests/unit"]), "tests/properties", "tests/races"]


def plant(defect: Defect, tree: Path, *, wide: bool) -> Outcome:
    """Plant it in this copy, run what should find it, and take it out again."""
    began = time.monotonic()

    def outcome(verdict: str, by: str) -> Outcome:
        return Outcome(defect, verdict, by, time.monotonic() - began)

    if not applies(defect, tree):
        return outcome(STALE, "the code has changed where it is planted: write the patch again")
    _git(tree, "apply", str(defect.file))
    try:
        status, by = _pytest(tree, defect.tests)
        if status in {0, NO_TESTS} and wide:
            status, by = _pytest(tree, _wide(defect))
    finally:
        _git(tree, "apply", "--reverse", str(defect.file))
    if status == FAILED_TESTS:
        return outcome(FOUND, by)
    return (
        outcome(MISSED, ", ".join(defect.tests))
        if status in {0, NO_TESTS}
        else outcome(BROKEN, f"pytest ended with {status}: {by}")
    )


def _each(chosen: Sequence[Defect], copies: int, *, wide: bool) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="defects-") as folder, ThreadPoolExecutor(copies) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(copies):
            free.put(_copy(Path(folder) / str(number)))

        def one(defect: Defect) -> Outcome:
            tree = free.get()
            try:
                done = plant(defect, tree, wide=wide)
            finally:
                free.put(tree)
            print(f"{done.verdict:7} {done.seconds:6.1f} s  {defect.name}: {done.by}", flush=True)
            return done

        return list(pool.map(one, chosen))


def report(outcomes: Sequence[Outcome]) -> str:
    """The table, as Markdown."""
    lines = ["| bug | rule | verdict | by |", "|---|---|---|---|"]
    lines += [f"| {one.defect.name} | {one.defect.rule} | {one.verdict} | {one.by} |" for one in outcomes]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run as `python -m tests.defects.plant`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of those to plant (default: all)")
    parser.add_argument(
        "--wide", action="store_true", help="try what its own tests miss with all fast tests of its package"
    )
    parser.add_argument("--sample", type=int, help="plant so many of them, which `--seed` draws (default: all)")
    parser.add_argument("--seed", default="1", help="which ones are drawn (default: 1)")
    parser.add_argument("--copies", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--report", type=Path, help="write the table to this file")
    options = parser.parse_args(words)
    chosen = defects(options.names)
    if not chosen:
        parser.error(f"no defect has a name like {', '.join(options.names)}; they are the *.patch files in {HERE}")
    if options.sample is not None and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    outcomes = _each(chosen, options.copies, wide=options.wide)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report(outcomes) + "\n")
    found = sum(one.verdict == FOUND for one in outcomes)
    print(f"{found} of {len(outcomes)} planted bugs found")
    count("defects", planted=len(outcomes), found=found)
    return 0 if found == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
