"""Completion as shells ask for it: quick, and silent whatever goes wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import persist_lib as persist
from persist_lib.cli.app import app
from persist_lib.cli.shared_options import SECONDS, shard_names
from tests.unit.cli.shells import run

SCHEMA = persist.Schema(key={"id": "int64"})


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for location in ("data", "other"):
        with persist.open(f"file:{folder}/{location}") as client:
            for name in ("orders", "orders-2", "payments") if location == "data" else ("elsewhere",):
                client.open_writer(name, SCHEMA)
    return folder


def bash(words: str, here: Path, **env: str) -> list[str]:
    """What bash gets for a line, whose last word is being typed. Nothing else is printed."""
    place = str(len(words.split(" ")) - 1)
    done = run(cwd=here, env={"_PERSIST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place, **env})
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("words", "names"), [
    ("persist shard show o", ["orders", "orders-2"]), ("persist shard show ", ["orders", "orders-2", "payments"]),
    ("persist maintain orders ", ["orders-2", "payments"]), ("persist hold set p", ["payments"]),
    ("persist --location file:./other shard show ", ["elsewhere"]),
    ("persist shard show --location file:./other ", ["elsewhere"]), ("persist shard show zzz", []),
    ("persist create o", []), ("persist shar", ["shard"]), ("persist shard sc", ["scrub"]),
    ("persist maintain --only ga", ["garbage"]), ("persist hold rel", ["release"]),
    ("persist read orders --format j", ["json", "jsonl"]), ("persist read --as", ["--as-of"]),
])  # fmt: skip
def test_bash_gets_commands_options_and_the_names_of_shards(here: Path, words: str, names: list[str]) -> None:
    assert bash(words, here) == names


def test_zsh_and_fish_get_them_too(here: Path) -> None:
    line = {"_TYPER_COMPLETE_ARGS": "persist shard show pay"}
    zsh = run(cwd=here, env={"_PERSIST_COMPLETE": "complete_zsh", **line})
    assert (zsh.stdout.strip(), zsh.stderr) == ("_arguments '*: :((\"payments\"))'", "")
    fish = run(cwd=here, env={"_PERSIST_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **line})
    assert (fish.stdout.strip(), fish.stderr) == ("payments", "")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_can_be_had(here: Path, name: str) -> None:
    done = run(cwd=here, env={"_PERSIST_COMPLETE": f"source_{name}"})
    assert done.returncode == 0
    assert "_PERSIST_COMPLETE" in done.stdout


def test_the_location_is_that_of_the_environment_or_of_persist_toml(here: Path) -> None:
    assert bash("persist shard show ", here, PERSIST_LOCATION="file:./other") == ["elsewhere"]
    folder = here / "configured"
    folder.mkdir()
    (folder / "persist.toml").write_text('location = "file:../other"\n')
    assert bash("persist shard show ", folder) == ["elsewhere"]
    (folder / "persist.toml").write_text("location = \n")
    assert bash("persist shard show ", folder) == []


@pytest.mark.parametrize("url", ["file:./nowhere", "nonsense:x", "s3://b/p", "", "file:./persist.json"])
def test_what_cannot_be_opened_gives_nothing_and_makes_nothing(here: Path, url: str) -> None:
    before = sorted(here.rglob("*"))
    assert bash("persist shard show ", here, PERSIST_LOCATION=url) == []
    assert sorted(here.rglob("*")) == before


def test_a_server_that_does_not_answer_keeps_the_shell_waiting_for_two_seconds_at_most(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/db"
        context = typer.Context(get_command(app))
        context.params = {"location": f"file:{here}/data", "consensus": url}
        began = time.monotonic()
        assert shard_names(context, "") == []
        assert time.monotonic() - began < 10 * SECONDS


def test_names_are_completed_without_loading_arrow(here: Path) -> None:
    program = f"""
import os, sys
os.chdir({str(here)!r})
from persist_lib.cli.shared_options import _ask
found = []
_ask({{}}, found)
print(found, sorted({{"pyarrow", "numpy", "pandas", "pydantic", "persist_lib.client"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['orders', 'orders-2', 'payments'] []\n"
