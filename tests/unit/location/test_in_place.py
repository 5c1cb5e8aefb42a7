"""Whether files are still in place, as told by their directory: only where that tells as much as the files do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from persist_lib.location import in_place
from persist_lib.location.in_place import InPlace


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were asked for their identity."""
    found: list[str] = []
    identity_of = in_place.identity_of

    def ask(path: str) -> in_place.Identity:
        found.append(path)
        return identity_of(path)

    monkeypatch.setattr(in_place, "identity_of", ask)
    return found


def clock_at(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[int], None]:
    """Sets the clock to so many nanoseconds after the last change of a directory."""
    return lambda after: monkeypatch.setattr(in_place, "machine_clock", lambda: folder.stat().st_ctime_ns + after)


def test_a_directory_tells_once_its_last_change_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    (path := tmp_path / "one").touch()
    (other := tmp_path / "two").touch()
    files, set_clock = InPlace([str(path), str(other)]), clock_at(monkeypatch, tmp_path)
    for after, expected in ((in_place.SETTLED_NS, 2), (in_place.SETTLED_NS, 2), (in_place.SETTLED_NS + 1, 2), (0, 0)):
        set_clock(after)
        asked.clear()
        assert files.moved() is None
        assert len(asked) == expected
    os.replace(other, path)  # noqa: PTH105
    assert files.moved() == str(path)


@pytest.mark.parametrize("is_apart", [False, True])
def test_files_in_several_directories_and_links_are_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], is_apart: bool
) -> None:
    """A link leads elsewhere when another directory changes."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (target := tmp_path / "there" / "file").touch()
    (here := tmp_path / "here" / "file").symlink_to(target)
    files = InPlace([str(here), str(target)] if is_apart else [str(here)])
    clock_at(monkeypatch, tmp_path / "here")(in_place.SETTLED_NS + 1)
    assert files.moved() is None
    (fresh := tmp_path / "fresh").touch()
    os.replace(fresh, target)  # noqa: PTH105
    assert files.moved() == str(here)
