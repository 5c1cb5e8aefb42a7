"""What is in the wheels and sdists, and that they come out the same from any checkout of a commit."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKAGES = {"persist-lib": {"persist_lib", "pyspark_persist"}, "persist-pipeline": {"jobs", "orchestration"}}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.mark.parametrize("distribution", PACKAGES)
def test_a_wheel_holds_its_packages_and_no_other_name(wheels: built.Wheels, distribution: str) -> None:
    with zipfile.ZipFile(wheels[distribution]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == PACKAGES[distribution]
    here = {
        path.relative_to(built.ROOT).as_posix()
        for package in PACKAGES[distribution]
        for path in (built.ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(names) == here, "every file of the package, and nothing that is not there any more"
    assert {f"{package}/py.typed" for package in PACKAGES[distribution]} <= here


@pytest.mark.parametrize("distribution", PACKAGES)
def test_the_licence_is_named_and_enclosed(wheels: built.Wheels, distribution: str) -> None:
    said = metadata_of(wheels[distribution])
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    with zipfile.ZipFile(wheels[distribution]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        assert archive.read(name) == (built.ROOT / "LICENSE").read_bytes()
    assert said["Author"] == "Persist maintainers"
    assert said["Summary"]
    assert said["Keywords"]
    assert said.get_payload(), "the README"
    assert "Project-URL" not in said, "there is none that exists"


def test_both_have_one_version_and_the_pipeline_asks_for_the_library_of_the_same(wheels: built.Wheels) -> None:
    library, pipeline = (metadata_of(wheels[name]) for name in PACKAGES)
    assert pipeline["Version"] == library["Version"]
    needed = [one for one in pipeline.get_all("Requires-Dist", []) if one.startswith("persist-lib")]
    version = library["Version"]
    assert needed == [f"persist-lib[spark]=={version}", f'persist-lib[pictures]=={version}; extra == "dagster"']


@pytest.mark.parametrize("distribution", PACKAGES)
def test_an_sdist_has_what_its_wheel_is_built_from(wheels: built.Wheels, distribution: str) -> None:
    """The wheel was built from it. So files that are links in the checkout are files in it."""
    (sdist,) = wheels.folder.glob(f"{distribution.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert PACKAGES[distribution] | {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= tops
    assert not tops & {"tests", "bench", "docs", "pipeline"}


def test_wheels_of_another_copy_of_the_tree_are_the_same_bytes(wheels: built.Wheels, tmp_path: Path) -> None:
    again = built.Wheels(built.build(built.copy_tree(tmp_path / "a copy elsewhere"), tmp_path / "out"))
    for distribution in PACKAGES:
        assert again[distribution].read_bytes() == wheels[distribution].read_bytes(), distribution
