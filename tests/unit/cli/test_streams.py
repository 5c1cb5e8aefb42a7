"""Pipes whose reader leaves, full disks and closed streams, with processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import persist_lib as persist
from tests.unit.cli.shells import PERSIST, run, shell

SCHEMA = persist.Schema(key={"id": "int64"}, value={"text": "string"})
ANSWERS = [
    "--help", "--version", "shard list", "shard show o", "shard log o --json", "read o", "read o -f csv",
    "listen o --as-of 0 --no-wait",
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a location whose contents are more than a pipe holds."""
    folder = tmp_path_factory.mktemp("streams")
    with persist.open(f"file:{folder}/data") as client:
        rows = [{"id": number, "text": "x" * 100} for number in range(5_000)]
        write = client.open_writer("o", SCHEMA)
        write.compare_and_append(rows, 0, 1)
        write.compare_and_append(rows[:500], 1, 2)
    return folder


@pytest.mark.parametrize("words", ANSWERS)
def test_a_reader_that_leaves_is_no_failure(here: Path, words: str) -> None:
    done = shell(f"$P {words} | head -c 1 > /dev/null", here)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "rror" not in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_read_before_the_reader_left_is_right(here: Path) -> None:
    done = shell("$P read o -f csv | head -2", here)
    assert (done.returncode, done.stdout) == (0, f'"id","text"\n0,"{"x" * 100}"\n')


@pytest.mark.parametrize("words", ANSWERS)
def test_a_full_disk_is_a_failure_that_is_told_once(here: Path, words: str) -> None:
    done = shell(f"$P {words} > /dev/full", here)
    assert done.returncode == 1
    assert done.stderr.count("standard output cannot be written: No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", ANSWERS)
def test_output_that_was_closed_from_the_start_goes_nowhere(here: Path, words: str) -> None:
    done = shell(f"$P {words} >&-", here)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "rror" not in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(here: Path, tmp_path: Path) -> None:
    """Otherwise what is printed would be written into the database."""
    done = shell(f"$P --location file:{tmp_path}/d create o --key id:int64 -vv >&- 2>&- <&-", here)
    assert done.returncode == 0
    with persist.open(f"file:{tmp_path}/d", create=False) as client:
        assert client.inspect("o").seqno == 1
    assert b"created" not in b"".join(path.read_bytes() for path in (tmp_path / "d").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("words", "status"), [("shard show nothing", 1), ("shwo", 2), ("shard scrub", 2), ("shard list", 0)]
)
def test_the_exit_status_stays_when_there_is_nobody_to_read_messages(here: Path, words: str, status: int) -> None:
    assert shell(f"$P {words} > /dev/null 2>&-", here).returncode == status
    assert shell(f"$P {words} > /dev/null 2>/dev/full", here).returncode in {status, 1}
    assert shell(f"$P {words} 2>&1 > /dev/null | true", here).returncode in {status, 1}


def test_an_append_whose_answer_nobody_reads_is_done(here: Path, tmp_path: Path) -> None:
    at = f"--location file:{tmp_path}/d"
    (tmp_path / "x.csv").write_text("id\n1\n")
    append = f"{tmp_path}/x.csv --lower 0 --upper 1 --create --key id"
    assert shell(f"$P append {at} o {append} | true", here).returncode == 0
    assert shell(f"$P append {at} full {append} > /dev/full", here).returncode == 1
    with persist.open(f"file:{tmp_path}/d", create=False) as client:
        assert [client.inspect(name).state.count for name in ("o", "full")] == [1, 1]


def test_no_color_is_respected_and_a_pipe_has_none(here: Path) -> None:
    assert "\x1b" not in run("shard", "show", "nothing", cwd=here).stderr
    forced = {"FORCE_COLOR": "1", "TERM": "xterm"}
    for env, has_color in ((forced, True), ({**forced, "NO_COLOR": "1"}, False)):
        assert ("\x1b[3" in run("shard", "show", "nothing", cwd=here, env=env, program=PERSIST).stderr) is has_color


def test_a_text_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data") as client:
        client.open_writer("o", SCHEMA).compare_and_append([{"id": 1, "text": "größe 山"}], 0, 1)
    done = run("read", "o", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, program=PERSIST)
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout
