"""Arguments of the command that a script got wrong: an unset variable must never become some other location."""

from __future__ import annotations

from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.location import open_location
from tests.commands import invoke

SCHEMA = persist.Schema(key={"id": "int64"})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a location where the command looks when nothing is said."""
    monkeypatch.chdir(tmp_path)
    with persist.open("file:./data") as client:
        client.open_writer("victim", SCHEMA).compare_and_append([{"id": 1}], 0, 1)
    return tmp_path


def state_of_victim() -> object:
    with persist.open("file:./data", read_only=True) as client:
        return client.inspect("victim").state


FINISH = ("drop", "victim", "--yes")
EMPTY = {
    "option before": ((("--location", ""), FINISH, ()), {}),
    "option after": (((), FINISH, ("--location", "")), {}),
    "option of blanks": ((("--location", " \t"), FINISH, ()), {}),
    "one of two options": ((("--location", ""), FINISH, ("--location", "file:./data")), {}),
    "environment": (((), FINISH, ()), {"PERSIST_LOCATION": ""}),
    "consensus option": ((("--consensus", ""), FINISH, ()), {}),
    "consensus beside a location": ((("--location", "file:./data", "--consensus", ""), FINISH, ()), {}),
    "consensus in the environment": ((("--location", "file:./data"), FINISH, ()), {"PERSIST_CONSENSUS": ""}),
    "prices": ((("--prices", ""), FINISH, ()), {}),
    "prices in the environment": (((), FINISH, ()), {"PERSIST_PRICES": ""}),
}


@pytest.mark.parametrize("how", EMPTY)
def test_an_empty_location_consensus_or_price_is_wrong_usage_and_nothing_is_touched(how: str) -> None:
    (before, command, after), env = EMPTY[how]
    untouched = state_of_victim()
    done = invoke(*before, *command, *after, **env)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "is empty" in done.stderr
    assert "variable" in done.stderr
    assert state_of_victim() == untouched


def test_what_is_empty_is_named_where_it_was_given() -> None:
    assert "--location is empty" in invoke("--location", "", "shard", "list").stderr
    assert "$PERSIST_CONSENSUS is empty" in invoke("shard", "list", PERSIST_CONSENSUS="").stderr
    assert '"error": "InvalidUsage"' in invoke("--location", "", "shard", "list", "--json").stderr.replace(
        '":"', '": "'
    )


def test_an_option_decides_over_an_empty_environment() -> None:
    done = invoke("--location", "file:./data", "shard", "list", "--names", PERSIST_LOCATION="")
    assert (done.exit_code, done.stdout) == (0, "victim\n")


def test_told_nothing_the_command_looks_here() -> None:
    assert invoke("shard", "list", "--names").stdout == "victim\n"


def test_a_consensus_beside_a_location_that_is_open_is_refused() -> None:
    with open_location("memory:") as location, pytest.raises(InvalidUsage, match="has its consensus already"):
        persist.open(location, "memory:other")


@pytest.mark.parametrize("words", [
    ("append", "victim", "--lower", "", "--upper", "2"),
    ("append", "victim", "--lower", "1", "--upper", ""),
    ("append", "victim", "--lower", "[1", "--upper", "2"),
    ("append", "victim", "--lower", "1]", "--upper", "2"),
    ("append", "victim", "--lower", "1_", "--upper", "2"),
    ("append", "victim", "", "--lower", "1", "--upper", "2"),
    ("append", "new", "x.csv", "--lower", "0", "--upper", "2", "--create", "--key", ""),
    ("append", "", "--lower", "1", "--upper", "2"),
    ("drop", "", "--yes"),
    ("maintain", ""),
    ("maintain", "victim", ""),
    ("hold", "set", "victim", ""),
    ("hold", "set", "victim", "audit", "--since", ""),
    ("hold", "release", "victim", ""),
    ("set-retention", "victim", ""),
    ("set-retention", "victim", "_"),
    ("set-retention", "victim", "1__0"),
    ("read", "victim", "--columns", ""),
    ("read", "victim", "--key", ""),
    ("read", "victim", "-o", "", "--format", "csv"),
    ("read", "victim", "--wait", "nan"),
    ("listen", "victim", "--as-of", "0", "--until", "", "--no-wait"),
    ("listen", "victim", "--as-of", "0", "--timeout", "nan", "--no-wait"),
    ("shard", "list", "--long", ""),
    ("shard", "log", ""),
])  # fmt: skip
def test_other_arguments_that_are_empty_or_half_written_are_wrong_usage(words: tuple[str, ...], here: Path) -> None:
    (here / "x.csv").write_text("id\n7\n")
    untouched = state_of_victim()
    done = invoke(*words)
    assert done.exit_code == 2, (words, done.output)
    assert "Traceback" not in done.stderr
    if words[:2] != ("maintain", "victim"):
        assert state_of_victim() == untouched
    assert {path.name for path in here.iterdir()} == {"data", "x.csv"}


@pytest.mark.parametrize("words", [
    ("shard", "show", "victm"), ("shard", "log", "VICTIM"), ("read", "victms"), ("maintain", "victm"),
    ("drop", "victm", "--yes"), ("set-retention", "victm", "5"), ("hold", "set", "victm", "audit"),
    ("append", "victm", "--lower", "1", "--upper", "2"), ("maintain", "--only", "garbage", "victm", "--dry-run"),
])  # fmt: skip
def test_of_a_mistyped_shard_the_names_that_are_near_are_told(words: tuple[str, ...]) -> None:
    done = invoke(*words)
    assert done.exit_code == 1, done.output
    assert "Did you mean victim?" in done.stderr
    assert "client.open_shard" not in done.stderr, "that is for Python"
    assert "persist append --create" in done.stderr


def test_of_a_shard_that_is_like_no_other_no_name_is_suggested(here: Path) -> None:
    done = invoke("shard", "show", "zzz")
    assert "Did you mean" not in done.stderr
    assert "`persist shard list --names` lists all" in done.stderr
    persist.open(f"file:{here}/empty").close()
    assert (
        "There are no other shards either"
        in invoke("--location", f"file:{here}/empty", "shard", "show", "victim").stderr
    )


def test_a_hold_that_is_not_there_is_called_just_that() -> None:
    done = invoke("hold", "release", "victim", "audit")
    assert done.exit_code == 1
    assert "there is no hold 'audit'" in done.stderr
    assert "omebody else" not in done.stderr


def test_a_location_for_blobs_alone_says_what_it_lacks_and_what_does_without() -> None:
    done = invoke("--location", "s3://bucket/prefix?region=x", "shard", "list")
    assert done.exit_code == 2
    assert "s3+cas://bucket/prefix?region=x, which needs no database" in done.stderr
    assert "--consensus" in done.stderr
    assert "s3+cas" not in invoke("--location", "postgresql://h/db", "shard", "list").stderr


def test_a_retention_that_no_shard_can_have_is_refused_in_words() -> None:
    done = invoke("set-retention", "victim", str(2**70))
    assert done.exit_code == 2
    assert "retention (times behind upper, or None) must be an integer in [0, " in done.stderr
    assert f"got {2**70}" in done.stderr
    assert "Malformed" not in done.stderr
    assert invoke("set-retention", "victim", str(2**64 - 1)).exit_code == 0
