"""What the options `-i` and `-o` of a program mean."""

from __future__ import annotations

from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib import events


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def named(given_input: str | None = None, given_output: str | None = None) -> tuple[str, str | None]:
    store, source = events.choose(given_input, given_output)
    return events.name_of(store), None if source is None else events.name_of(source)


def test_both_default_to_disk_and_an_input_that_was_not_given_counts_only_if_there_is_a_log() -> None:
    assert named() == ("disk", None)
    assert named(None, "sqlt:x") == ("sqlt:x", None)
    assert named("sqlt:x", "sqlt:x") == ("sqlt:x", None)
    assert named("sqlt:x") == ("disk", "sqlt:x"), "also one that is not there: it was given"
    assert named("sqlt:x", "lmdb:y") == ("lmdb:y", "sqlt:x")
    assert not list(Path().iterdir()), "nothing is opened"
    events.open_store("disk").writer().close()
    assert named(None, "sqlt:x") == ("sqlt:x", "disk")


@pytest.mark.parametrize("given", [("", None), (None, ""), ("found:x", None), (None, "5"), ("disk:\n", None)])
def test_what_names_no_store_is_refused(given: tuple[str | None, str | None]) -> None:
    with pytest.raises(persist.InvalidUsage):
        events.choose(*given)
