"""The types of the library reach its users: py.typed is in the wheels, and a strict mypy takes what it finds there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.fixture(scope="module")
def environment(wheels: built.Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all that mypy may follow, and without this tree. Only this module has it, and may spoil it."""
    return built.install(tmp_path_factory.mktemp("typed") / "env", *wheels.everything())


def check(environment: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """Mypy as a user has it: strict, with none of this project's settings, on a program in a folder of its own."""
    python = ["--python-executable", str(environment / "python"), "--cache-dir", str(environment / "cache")]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *python, program.name]
    return subprocess.run(
        command, cwd=program.parent, env=built.bare_environ(), capture_output=True, text=True, check=False
    )


def test_the_pipeline_s_types_are_there_too(environment: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import assert_type\nimport dagster as dg\n"
        "from orchestration.definitions import build_definitions\nfrom jobs.session import SparkSettings\n"
        "assert_type(build_definitions(), dg.Definitions)\nassert_type(SparkSettings().is_local, bool)\n"
    )
    done = check(environment, program)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_user_s_program_is_checked_and_only_because_py_typed_is_there(environment: Path, tmp_path: Path) -> None:
    program = Path(shutil.copy(PROGRAM, tmp_path / "program.py"))
    done = check(environment, program)
    assert done.returncode == 0, done.stdout + done.stderr
    program.write_text(program.read_text().replace('"file:./data"', "7", 1) + "client.no_such_call()\n")
    wrong = check(environment, program)
    assert "no_such_call" in wrong.stdout
    assert "arg-type" in wrong.stdout, "what is wrong is seen"
    # SUBTLE: the last, as it spoils the environment, and the cache of mypy.
    (marker,) = environment.parent.glob("lib/*/site-packages/persist_lib/py.typed")
    marker.unlink()
    shutil.copy(PROGRAM, program)
    untyped = check(environment, program)
    assert untyped.returncode == 1
    assert "py.typed" in untyped.stdout
