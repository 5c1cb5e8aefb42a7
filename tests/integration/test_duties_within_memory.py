"""Each duty on a shard that does not fit into memory, in a process that may take only so much more of it (RLIMIT_DATA).

What reads all of the shard at once fails there: the limit holds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.sizes import DUTIES
from tests.integration.test_compaction_at_size import SMALL, run

UPDATES, BATCHES = 4_000_000, 24
"""Some 160 MiB in memory, and several times that while they are made one table."""
MOST_MIB = 128
EVERYTHING = "everything"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "data"
    run("fill", f"file:{folder}", UPDATES, "--batches", BATCHES, **SMALL)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("duty", [*DUTIES])
def test_a_duty_takes_no_more_memory_than_its_settings_say(filled: Path, tmp_path: Path, duty: str) -> None:
    folder = shutil.copytree(filled, tmp_path / "data")
    # Arrow's own allocator and threads that have arenas of their own set aside memory that nobody uses.
    env = {"PERSIST_CONFIG": json.dumps(SMALL), "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-m", "tests.integration.sizes", duty, f"file:{folder}", "--most-mib", str(MOST_MIB)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if duty == EVERYTHING:
        assert done.returncode != 0, "the limit holds nothing back"
        assert "MemoryError" in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-3000:]
        print(duty, done.stdout)
