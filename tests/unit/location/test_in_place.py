"""Identities of files: the same as `os.stat` tells, by a call that asks for less."""

import os
from pathlib import Path

import pytest

from persist_lib.location.in_place import by_stat, identity_of


@pytest.mark.parametrize("name", ["plain", "ä file with spaces", "n" * 200])
def test_it_is_what_the_system_says_of_the_path(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    path.write_bytes(b"1")
    other.write_bytes(b"2")
    os.link(path, tmp_path / "same")
    (tmp_path / "link").symlink_to(path)
    assert identity_of(str(path)) == by_stat(str(path)) == (path.stat().st_dev, path.stat().st_ino)
    assert identity_of(str(path)) == identity_of(str(tmp_path / "same")) == identity_of(str(tmp_path / "link"))
    assert identity_of(str(path)) != identity_of(str(other))
    assert identity_of("/proc/self/stat") == by_stat("/proc/self/stat")  # of another device
    assert identity_of(str(tmp_path)) == by_stat(str(tmp_path))


@pytest.mark.parametrize("identity", [identity_of, by_stat])
def test_a_path_that_leads_nowhere_is_an_error_of_its_kind(identity: object, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        identity(str(tmp_path / "gone"))  # type: ignore[operator]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        identity(str(tmp_path / "file" / "in it"))  # type: ignore[operator]
