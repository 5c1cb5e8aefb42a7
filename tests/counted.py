"""What a long test has done, for docs/reliability.md: one line of JSON in the file that PERSIST_COUNTS names.

`scripts/nightly` sets it for each of its parts, and `scripts/reliability` adds the lines up by their kind. Without it
nothing is written.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "PERSIST_COUNTS"
EXAMPLES = re.compile(r"(\d+) passing, (\d+) failing, and")


def count(kind: str, **numbers: int | dict[str, int]) -> None:
    """Note what was done: numbers, or numbers by name. Each call appends a line at once: processes may share a file."""
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as lines:
            lines.write(json.dumps({"kind": kind, **numbers}) + "\n")


class Recorder:
    """A plugin of pytest that counts the tests that passed, by folder, and the examples that hypothesis drew."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.laws = self.examples = 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """A test was called, in this process."""
        yield
        if call.when == "call" and call.excinfo is None:
            self.passed[item.nodeid.split("/")[1] if "/" in item.nodeid else item.nodeid] += 1
            if drawn := EXAMPLES.findall(getattr(item, "hypothesis_statistics", "")):
                self.laws += 1
                self.examples += sum(int(passing) for passing, _ in drawn)

    def pytest_sessionfinish(self) -> None:
        """The tests of this process are over."""
        if self.passed:
            count("tests", passed=dict(self.passed), laws=self.laws, examples=self.examples)
