"""`make mutants`: a sample of mutants of the ground floor, each with the tests that run its lines, and which are found.

    python -m tests.mutants.run --sample 60 --seed 1 [PACKAGE…]

Tests are collected once, in this process. Each file of tests is run once in a fork that notes which lines each test
runs (coverage), and each mutant is planted in a fork, which runs the tests of its lines until one fails: those of its
own package first, then the cheapest, up to LIMIT_S. What survives is either listed in equivalent.toml with its reason,
or wants a test. Results are in build/mutants. Exit status 1 where less than LEAST of what is not excused was found.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.counted import count
from tests.mutants.mutate import Mutant, sample
from tests.mutants.plant import Unplantable, functions, plant

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "persist_lib"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
PLACE = ROOT / "build" / "mutants"
PACKAGES = ("core", "shard", "relation", "maintain", "location")
UNITS = (*PACKAGES, "kernel", "format", "values", "catalog", "report", "cli", "client")
TESTS = (
    *(f"tests/unit/{name}" for name in UNITS),
    "tests/scripts",
    "tests/properties",
    "tests/conformance",
    "tests/races",
)
LEAST = 0.9
LIMIT_S = 40.0
"""Of recorded seconds: so much is run of the tests of one mutant."""
SLOWEST_S = 5.0
"""Tests that took longer are left out."""
MEMORY = 6 << 30
FOUND, TIMEOUT, SURVIVED, UNCOVERED, UNPLANTABLE = "found", "timeout", "survived", "not run by a test", "unplantable"
Recording = dict[str, dict[str, Any]]
"""By test: `seconds`, `passed`, and the `lines` that it ran, by file."""


def in_child(work: Callable[[], object], limit_s: float) -> Any:
    """What a fork of this process makes, or None if it took longer than this; it and what it started are ended."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    answer = folder / "answer"
    child = os.fork()
    if not child:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            tempfile.tempdir = str(folder)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            answer.with_suffix(".part").write_text(json.dumps(work()))
            answer.with_suffix(".part").rename(answer)
        except BaseException:  # noqa: BLE001 - said, and then it ends
            (PLACE / "errors.log").open("a").write(traceback.format_exc())
        finally:
            os._exit(0)
    ends = time.monotonic() + limit_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    said = json.loads(answer.read_text()) if answer.exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    return said


class Driver:
    """A plugin of pytest that does all of this in the place of running the tests."""

    def __init__(self, mutants: Sequence[Mutant], known: dict[tuple[str, ...], str]) -> None:
        self._mutants = mutants
        self._known = known
        self._failed = False
        self.outcomes: list[tuple[Mutant, str, str]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """What fails need not be made small."""
        from hypothesis import Phase, settings  # noqa: PLC0415 - pytest wants to import it first

        settings.register_profile("mutants", settings.get_profile("fixed"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was set up, called or torn down."""
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """All tests are collected."""
        if session.testsfailed:
            raise session.Interrupted("what cannot be collected finds nothing")
        recording = self._recorded(session.items)
        items = {item.nodeid: item for item in session.items}
        for file in sorted({mutant.file for mutant in self._mutants}):
            importlib.import_module(
                "persist_lib." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
        loaded = functions(str(LIBRARY))
        for mutant in self._mutants:
            verdict, by = self._known.get(mutant.key, ""), ""
            if not verdict:
                chosen = covering(mutant, recording)
                limit = 15 + 5 * sum(recording[name]["seconds"] for name in chosen)
                source = (LIBRARY / mutant.file).read_text()

                def tried(mutant: Mutant = mutant, source: str = source, chosen: list[str] = chosen) -> list[str]:
                    try:
                        plant(str(LIBRARY / mutant.file), source, mutant.source, loaded)
                    except Unplantable as error:
                        return [UNPLANTABLE, str(error)]
                    for name in chosen:
                        if not self._ran([items[name]])[name]["passed"]:
                            return [FOUND, name]
                    return [SURVIVED, f"{len(chosen)} tests"]

                verdict, by = in_child(tried, limit) or (TIMEOUT, "") if chosen else (UNCOVERED, "")
            self.outcomes.append((mutant, verdict, by))
            os.write(2, f"{verdict:10} {mutant.file}:{mutant.lines.start} {by}\n".encode())
        return True

    def _ran(self, items: Iterable[pytest.Item], starts: Callable[[str], object] = str) -> Recording:
        """Run tests in this process, after `starts` of each one's name."""
        done: Recording = {}
        for item in items:
            starts(item.nodeid)
            began, self._failed = time.monotonic(), False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            done[item.nodeid] = {"seconds": time.monotonic() - began, "passed": not self._failed}
        return done

    def _recorded(self, items: Sequence[pytest.Item]) -> Recording:
        """Which lines each test runs: noted now, or before by the same files."""
        library = hashlib.sha256()
        for path in sorted(LIBRARY.rglob("*.py")):
            library.update(path.read_bytes())
        all_of: Recording = {}
        for file in dict.fromkeys(item.path for item in items):
            of = [item for item in items if item.path == file]
            digest = hashlib.sha256(library.digest() + file.read_bytes() + "".join(i.nodeid for i in of).encode())
            kept = PLACE / "recorded" / f"{file.relative_to(ROOT)}.json".replace("/", "-")
            said = json.loads(kept.read_text()) if kept.exists() else {}
            if said.get("of") != digest.hexdigest():
                tests = in_child(lambda of=of: self._traced(of), 240) or {}  # type: ignore[misc]
                said = {"of": digest.hexdigest(), "tests": tests}
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(said))
                os.write(2, f"{len(tests):5} tests recorded of {file.relative_to(ROOT)}\n".encode())
            all_of |= said["tests"]
        names = {item.nodeid for item in items}
        return {name: of for name, of in all_of.items() if of["passed"] and of["seconds"] < SLOWEST_S and name in names}

    def _traced(self, items: Sequence[pytest.Item]) -> Recording:
        """Run tests, and note the lines of each."""
        import coverage  # noqa: PLC0415 - only the child that traces

        sources = [str(LIBRARY / name) for name in PACKAGES]
        traced = coverage.Coverage(data_file=None, config_file=False, source=sources, messages=False)
        traced.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "module-not-measured"])
        traced.start()
        done = self._ran(items, traced.switch_context)
        traced.stop()
        for one in done.values():
            one["lines"] = {}
        data = traced.get_data()
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                for name in contexts:
                    if name in done:
                        done[name]["lines"].setdefault(str(Path(file).relative_to(LIBRARY)), []).append(line)
        return done


def covering(mutant: Mutant, recording: Recording) -> list[str]:
    """The tests that run its lines: those of its own package first, then the cheapest, as many as LIMIT_S allows."""
    own = f"tests/unit/{mutant.file.split('/')[0]}/"
    found = [
        name for name, of in recording.items() if not set(mutant.lines).isdisjoint(of["lines"].get(mutant.file, ()))
    ]
    found.sort(key=lambda name: (not name.startswith(own), recording[name]["seconds"]))
    chosen, seconds = [], 0.0
    for name in found:
        seconds += recording[name]["seconds"]
        if seconds < LIMIT_S:
            chosen.append(name)
    return chosen


def excused() -> dict[tuple[str, ...], str]:
    """What no test needs to find, by its key, and the kind of the reason."""
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"] if EQUIVALENT.exists() else []
    return {(one["file"], one["function"], one["was"], one["becomes"]): one["kind"] for one in listed}


def summary(outcomes: Sequence[tuple[Mutant, str, str]]) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts by package, and what is to be looked at, as equivalent.toml would say it."""
    counts: dict[str, Counter[str]] = {}
    reasons, left = excused(), []
    for mutant, verdict, by in outcomes:
        of = counts.setdefault(mutant.file.split("/")[0], Counter())
        if verdict == UNPLANTABLE:
            continue
        of["drawn"] += 1
        if verdict in {FOUND, TIMEOUT}:
            of["found"] += 1
        elif mutant.key in reasons:
            of["excused"] += 1
        else:
            names = ("file", "function", "was", "becomes")
            said = "\n".join(f"{name} = {json.dumps(text)}" for name, text in zip(names, mutant.key, strict=True))
            left.append(f"# line {mutant.lines.start}: {verdict} {by}\n[[mutant]]\n{said}\n")
    return counts, left


def _kept(results: Path) -> dict[tuple[str, ...], str]:
    """What became of mutants before, in this run and in earlier ones."""
    return {tuple(key): verdict for key, verdict in json.loads(results.read_text())} if results.exists() else {}


def main(words: Sequence[str] | None = None) -> int:
    """Run as `python -m tests.mutants.run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"of {', '.join(PACKAGES)} (default: all)")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each package (default: 60)")
    parser.add_argument("--seed", default="1", help="which ones are drawn (default: 1)")
    parser.add_argument("--survivors", action="store_true", help="try only what survived before")
    options = parser.parse_args(words)
    PLACE.mkdir(parents=True, exist_ok=True)
    results = PLACE / "results.json"
    known = {key: verdict for key, verdict in _kept(results).items() if verdict in {FOUND, TIMEOUT}}
    known = known if options.survivors else {}
    mutants = [one for package in options.packages for one in sample(package, options.sample, options.seed)]
    driver = Driver(mutants, known)
    marks = "not (spark or dagster or torture)"
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *TESTS], plugins=[driver])
    if len(driver.outcomes) != len(mutants):
        print(f"pytest ended with {status} before all mutants were tried", file=sys.stderr)
        return 2
    now = _kept(results) | {one.key: verdict for one, verdict, _ in driver.outcomes}
    results.write_text(json.dumps([*now.items()], indent=0))
    counts, left = summary(driver.outcomes)
    (PLACE / "survivors.toml").write_text("\n".join(left))
    for package, of in counts.items():
        print(f"{package}: {of['found']} of {of['drawn'] - of['excused']} found, {of['excused']} excused")
    total = sum(counts.values(), Counter[str]())
    asked = total["drawn"] - total["excused"]
    print(
        f"{total['found']} of {asked} mutants found; {len(left)} without a reason are in build/mutants/survivors.toml"
    )
    count("mutants", drawn=total["drawn"], found=total["found"], excused=total["excused"])
    return 0 if total["found"] >= LEAST * asked else 1


if __name__ == "__main__":
    sys.exit(main())
