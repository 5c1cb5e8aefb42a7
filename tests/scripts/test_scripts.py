"""Every script answers what it says. `PERSIST_REWRITE=1 pytest tests/scripts` writes down what it answers now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from tests.scripts.language import COMMANDS, rewrite

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*.script"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_answers_what_it_says(path):
    text = path.read_text()
    answered = rewrite(text)
    if os.environ.get("PERSIST_REWRITE"):
        path.write_text(answered)
        return
    assert answered == text


def test_every_command_is_in_some_script():
    written = {line.split()[0] for path in SCRIPTS for line in path.read_text().splitlines() if line.strip()}
    assert set(COMMANDS) <= written
    assert len(COMMANDS) == len(c.Command.__args__)


def test_every_refusal_is_in_some_script():
    text = "\n".join(path.read_text() for path in SCRIPTS)
    missing = [kind.__name__ for kind in r.Refusal.__args__ if f"refused: {kind.__name__}" not in text]
    assert missing == []
