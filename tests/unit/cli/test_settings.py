"""What is in force: options, the environment, persist.toml, and the defaults, in this order."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from jobs import program
from orchestration.settings import Settings, resolved
from persist_lib.errors import InvalidUsage
from persist_lib.settings import Given, find_file, parse_config, read_file, resolve
from tests.commands import invoke

NOTHING: dict[str, str | None] = {"location": None, "consensus": None, "prices": None, "config": None}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which we are, so that nothing outside of it counts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "persist.toml"
    path.write_text(text)
    return path


def in_force(*words: str, **env: str) -> dict[str, tuple[Any, str]]:
    done = invoke(*words, "config", "--json", **env)
    assert done.exit_code == 0, done.output
    return {name: (one["value"], one["source"]) for name, one in json.loads(done.stdout)["settings"].items()}


def test_an_option_counts_over_the_environment_and_that_over_the_file_value_by_value(home: Path) -> None:
    path = write(
        home, 'location = "memory:a"\nprices = "s3"\n[config]\nlease_ms = 1000\npart_bytes = 100_000\npoll_s = 1\n'
    )
    found = in_force(
        "--location", "memory:c", "--config", '{"lease_ms": 3000}',
        PERSIST_LOCATION="memory:b", PERSIST_PRICES="free", PERSIST_CONFIG='{"lease_ms": 2000, "part_bytes": 200000}',
    )  # fmt: skip
    assert found["location"] == ("memory:c", "--location")
    assert found["prices"] == ("free", "$PERSIST_PRICES")
    assert found["consensus"] == ("the location", "default")
    assert found["config.lease_ms"] == (3000, "--config")
    assert found["config.part_bytes"] == (200_000, "$PERSIST_CONFIG")
    assert found["config.poll_s"] == (1.0, str(path))
    assert found["config.rollup_every"] == (128, "default")


@pytest.mark.parametrize(
    ("place", "config", "value"),
    [
        (("--location", "s3+cas://b/p"), "", (32, "default")),
        (("--location", "s3://b/p", "--consensus", "gs+cas://b/p"), "", (32, "default")),
        (("--location", "s3+cas://b/p"), '{"rollup_every": 128}', (128, "--config")),
        (("--location", "s3://b/p", "--consensus", "file:./c"), "", (128, "default")),
        (("--location", "nonsense://x"), "", (128, "default")),
    ],
)
def test_where_rows_are_objects_logs_are_rolled_up_more_often(
    home: Path, place: tuple[str, ...], config: str, value: object
) -> None:
    found = in_force(*place, *(("--config", config) if config else ()))
    assert found["config.rollup_every"] == value


def test_the_settings_are_those_that_a_client_gets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        home, 'location = "file:data"\nprices = { get = 1.0 }\n[config]\nrollup_every = 7\n[config.cache]\npath = "c"\n'
    )
    assert invoke("create", "o", "--key", "id:int64").exit_code == 0
    seen: list[persist.Client] = []
    census = persist.Client.census

    def noting(client: persist.Client, name: str) -> object:
        seen.append(client)
        return census(client, name)

    monkeypatch.setattr(persist.Client, "census", noting)
    assert invoke("shard", "list").exit_code == 0
    assert invoke("shard", "scrub", "--all").exit_code == 0
    [client] = seen
    assert client.config.rollup_every == 7
    assert client.config.cache is not None
    assert client.config.cache.path == str(home / "c")
    assert client.prices.get == 1.0
    assert (home / "data").is_dir()


def test_a_relative_path_is_relative_to_the_file_and_not_to_the_current_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / "repo", 'location = "file:./data"\n')
    (home / "repo" / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(home / "repo" / "a" / "b")
    assert in_force()["location"][0] == f"file:{home}/repo/data"
    for text, expected in {
        "file:data": f"file:{home}/repo/data", "file:../x": f"file:{home}/x", "file:/x": "file:/x",
        "file:///x": "file:///x", "s3://b/p": "s3://b/p", "memory:": "memory:", "data": f"{home}/repo/data",
        "/x": "/x", "~/x": "~/x",
    }.items():  # fmt: skip
        path = write(home / "repo", f'location = "{text}"\n')
        assert read_file(path)["location"] == expected


def test_the_file_is_looked_for_up_to_the_repository_or_home_and_the_nearest_counts(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deep = home / "repo" / "a" / "b"
    deep.mkdir(parents=True)
    assert find_file(deep) is None
    top = write(home, "")
    assert find_file(deep) == top
    (home / "repo" / ".git").mkdir()
    assert find_file(deep) is None, "a repository ends the search"
    root = write(home / "repo", "")
    assert find_file(deep) == root
    near = write(home / "repo" / "a", "")
    assert find_file(deep) == near
    outside = tmp_path_factory.mktemp("outside")
    write(outside, "")
    (outside / "inner").mkdir()
    assert find_file(outside / "inner") is None, "outside of home and of a repository, parents do not count"
    assert find_file(outside) == outside / "persist.toml"


def test_a_folder_that_was_deleted_has_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    assert find_file() is None
    os.chdir(home)


def test_a_consensus_of_the_file_does_not_go_with_a_location_from_elsewhere(home: Path) -> None:
    write(home, 'location = "file:a"\nconsensus = "memory:x"\n')
    assert in_force()["consensus"][0] == "memory:x"
    assert in_force("--location", "file:b")["consensus"] == ("the location", "default")
    assert in_force(PERSIST_LOCATION="file:b")["consensus"] == ("the location", "default")
    assert in_force("--location", "file:b", PERSIST_CONSENSUS="memory:y")["consensus"][0] == "memory:y"


WRONG = {
    'locaton = "file:x"': ("there is no key 'locaton'. Did you mean location?", "config"),
    "part_bytes = 100000": ("there is no key 'part_bytes'", "fields of persist.Config go below [config]"),
    "location = 5": ("location must be text", "got 5"),
    'location = " "': ("location must be text", "got ' '"),
    "prices = []": ("prices must be text or a table", "got []"),
    "config = 3": ("config must be a table", "part_bytes"),
    "[config]\npart_byte = 100000": ("there is no setting 'part_byte'. Did you mean part_bytes", "rollup_every"),
    '[config]\nlease_ms = "soon"': ("lease_ms: Input should be a valid integer", "'soon'"),
    "[config]\nlease_ms = true": ("lease_ms", "no bool"),
    "[config]\nlease_ms = 1": ("lease_ms: Input should be greater than or equal to 100", "got 1"),
    "[config.cache]\npth = 'x'": ("there is no setting 'pth'. Did you mean path", "memory_bytes"),
    "location =": ("cannot be read", "Invalid value"),
    "a = 1\na = 2": ("cannot be read", "overwrite"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_file_names_the_file_and_what_is_allowed(home: Path, text: str) -> None:
    path = write(home, text)
    done = invoke("shard", "list")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"InvalidUsage: {path}: " if "cannot" not in WRONG[text][0] else "InvalidUsage: ")
    for said in WRONG[text]:
        assert said in done.stderr
    assert not (home / "data").exists()


def test_prices_that_are_none_name_where_they_were_given(home: Path) -> None:
    invoke("create", "o", "--key", "id:int64")
    path = write(home, "prices = { got = 1 }\n")
    assert f"{path}: prices are" in invoke("shard", "list").stderr
    assert "$PERSIST_PRICES: prices are" in invoke("shard", "list", PERSIST_PRICES="gold").stderr


def test_the_file_that_says_where_the_location_is_is_named_when_there_is_none(home: Path) -> None:
    path = write(home, 'location = "file:nowhere"\n')
    assert f"(that is what {path} says)" in invoke("shard", "list").stderr


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"x"'])
def test_a_config_that_is_no_object_is_refused_alike_everywhere(text: str) -> None:
    assert "$PERSIST_CONFIG must be a JSON object" in invoke("config", PERSIST_CONFIG=text).stderr
    assert "--config must be a JSON object" in invoke("config", "--config", text).stderr
    with pytest.raises(InvalidUsage, match="PERSIST_CONFIG must be a JSON object"):
        resolved(Settings(location="memory:"), {"PERSIST_CONFIG": text})
    with pytest.raises(InvalidUsage, match="x must be a JSON object"):
        parse_config(text, "x")


def test_an_unknown_setting_is_told_alike_by_the_command_dagster_and_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "PERSIST_CONFIG: there is no setting 'part_byte'. Did you mean part_bytes"
    assert said in invoke("config", PERSIST_CONFIG='{"part_byte": 1}').stderr
    with pytest.raises(InvalidUsage) as dagster:
        resolved(Settings(location="memory:"), {"PERSIST_CONFIG": '{"part_byte": 1}'})
    assert said in str(dagster.value)
    monkeypatch.setenv("PERSIST_CONFIG", '{"part_byte": 1}')
    parsed = program.arguments("x").parse_args(["--location", "memory:"])
    with pytest.raises(InvalidUsage) as job, program.opened(parsed):
        pass
    assert said in str(job.value)


def test_dagster_does_not_look_for_a_file(home: Path) -> None:
    write(home, 'location = "file:x"\n')
    with pytest.raises(InvalidUsage, match="no location is given"):
        resolved(Settings(), {})


def test_passwords_are_not_shown(home: Path) -> None:
    write(home, 'location = "s3://b/p?secret_access_key=hidden1"\nconsensus = "postgresql://me:hidden2@host/db"\n')
    for words in (("config",), ("config", "--json"), ("config", "-v")):
        done = invoke(*words)
        assert done.exit_code == 0
        assert "hidden" not in done.output
        assert "postgresql://me:***@host/db" in done.stdout


def test_showing_the_settings_opens_nothing(home: Path) -> None:
    assert in_force("--location", "postgresql://nobody.invalid/x")["location"][1] == "--location"
    assert in_force()["location"] == ("file:./data", "default")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("words", [("--config", ""), ("--config", " ")])
def test_an_empty_config_option_is_an_unset_variable(words: tuple[str, ...]) -> None:
    done = invoke(*words, "config")
    assert done.exit_code == 2
    assert "--config is empty" in done.stderr


def test_an_empty_variable_of_settings_is_none_as_in_dagster(home: Path) -> None:
    assert in_force(PERSIST_CONFIG="")["config.lease_ms"][1] == "default"


def test_the_folder_is_an_argument(home: Path) -> None:
    path = write(home / "x", 'location = "file:d"\n')
    found = resolve(NOTHING, {}, home / "x")
    assert (found.location, found.file) == (Given(f"file:{home}/x/d", str(path)), path)
