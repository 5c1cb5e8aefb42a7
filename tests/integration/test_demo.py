"""The demos as the README names them: at a small size, from the command to the last line, and when interrupted."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.synthetic_git import Git

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
ENOUGH_FOR_SPARK = 600_000


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git = Git.init(tmp_path / "repo")
    git.fast_import(seed=1, commits=12)
    return git.path


def command(tmp_path: Path, repo: Path, orders: int, *words: str) -> list[str | Path]:
    output: list[str | Path] = ["--output", tmp_path / "output"]
    return [sys.executable, "-m", "examples.demo", "--orders", str(orders), "--repo", repo, *output, *words]


@pytest.mark.parametrize(
    ("target", "words", "orders"),
    [
        ("demo", [], 20_000),
        ("demo-s3", ["--servers"], ENOUGH_FOR_SPARK),
        ("demo-s3 STORE=gcs", ["--servers", "gcs"], ENOUGH_FOR_SPARK),
        ("demo-s3 STORE=azure", ["--servers", "azure"], ENOUGH_FOR_SPARK),
    ],
)
def test_the_demo_shows_everything_and_ends_well(
    tmp_path: Path, repo: Path, target: str, words: list[str], orders: int
) -> None:
    said = subprocess.run(
        ["make", "-n", *target.split(), f"ORDERS={orders}", f"REPO={repo}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert re.search(" ".join(["examples.demo", *words, "--repo", f'"{repo}"', "--orders", f"{orders}"]), said)
    done = subprocess.run(
        command(tmp_path, repo, orders, *words), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "26 of 26 asset checks passed" in done.stdout
    assert re.search(r"^ all  ", done.stdout, re.MULTILINE), "the last line of what it cost, without markup"
    assert done.stdout.count("✓ 20 states of the order book equal the generator's") == 2
    assert "orphans 1" in done.stdout
    assert "accounts would change, as account" in done.stdout, "the wrong transformation is found"
    assert "✓ the listener's sum was right at each of its" in done.stdout
    assert "explain what 1,000 accounts hold: 10,050,000 cents" in done.stdout
    assert ("Spark" in done.stderr) == (
        orders == ENOUGH_FOR_SPARK
    )  # says which log settings it takes, once, as it starts
    assert (tmp_path / "output" / "trace.png").stat().st_size > 10_000
    assert (tmp_path / "output" / "data").exists() == (target == "demo")
    if words:
        assert "the servers are stopped" in done.stdout
        endpoint = re.search(r"endpoint=http://127\.0\.0\.1:(\d+)", done.stdout)
        assert endpoint is not None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(endpoint[1])))
