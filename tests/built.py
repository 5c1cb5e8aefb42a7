"""The distributions of this tree, built once for a run of the tests, and environments that they are installed in.

The fixture `wheels` of tests/conftest.py is what tests ask for. Nothing here writes into the tree.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).parent / "uv")
PACKED = (
    "persist_lib",
    "pyspark_persist",
    "orchestration",
    "jobs",
    "pipeline",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
PROJECTS = {"persist-lib": ROOT / "pyproject.toml", "persist-pipeline": ROOT / "pipeline" / "pyproject.toml"}
"""What is built, by the names that users install."""


def project(name: str) -> dict[str, Any]:
    """The metadata of a distribution, as its pyproject has it."""
    found: dict[str, Any] = tomllib.loads(PROJECTS[name].read_text())["project"]
    return found


def copy_tree(folder: Path) -> Path:
    """A copy of what goes into the distributions: what git tracks or would track, and no build that lies about."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKED]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():  # tracked, and deleted since
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(source: Path, out: Path) -> Path:
    """Build both distributions as `make wheels` does, with the builders of this environment, and without an index."""
    with_ours = ["--no-build-isolation", "--offline"]
    subprocess.run([str(ROOT / "scripts" / "wheels"), str(out), str(source), *with_ours], check=True)
    return out


@dataclass(frozen=True)
class Wheels:
    """The wheels of both distributions in a folder."""

    folder: Path

    def __getitem__(self, distribution: str) -> Path:
        (wheel,) = self.folder.glob(f"{distribution.replace('-', '_')}-*.whl")
        return wheel

    def everything(self) -> list[Path]:
        """The wheels of all distributions."""
        return [self[name] for name in PROJECTS]


@contextmanager
def once(folder: Path) -> Iterator[bool]:
    """Whether this process is the first of all that share the folder. The others wait until it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not (folder / "done").exists()
        yield is_first
        (folder / "done").touch()


def shared(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, filled by `make` if no other worker of this run has done it."""
    with once(folder) as is_first:
        if is_first:
            make(folder)
    return folder


def built_in(folder: Path) -> Wheels:
    """The wheels of this tree, built there by the first that asks."""
    return Wheels(shared(folder, lambda place: build(copy_tree(place / "source"), place)))


def install(folder: Path, *wheels: Path) -> Path:
    """A bare environment with these wheels, and what they depend on from the one that runs the tests; its `bin`."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    # A folder that is added this way has none of its own .pth files read: the tree that is tested is not among it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _pip(folder, "--no-deps", *map(str, wheels))
    return folder / "bin"


def install_with_pins(folder: Path, wheels: Wheels, distribution: str, extra: str = "") -> Path:
    """A bare environment with a distribution, one of its extras, and nothing else but what these ask for; its `bin`.

    Versions and hashes are the pinned ones, so that uv takes all of it from its cache after `make setup`.
    """
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    needed = closure(f"{distribution}[{extra}]" if extra else distribution)
    pins = (ROOT / "requirements" / "dev.txt").read_text()
    blocks = {block.partition("==")[0]: block for block in re.split(r"^(?=[a-z])", pins, flags=re.MULTILINE)}
    chosen = folder / "pins.txt"
    chosen.write_text("".join(blocks[name] for name in sorted(needed - PROJECTS.keys())))
    # As scripts/setup has it: with other builders, uv would build pyspark once more.
    builders = ["--build-constraints", str(ROOT / "requirements" / "build.txt"), "--require-build-hashes"]
    preview = ["--preview-features", "build-dependency-hashes"]
    _pip(folder, "--no-deps", "--require-hashes", *builders, *preview, "--requirement", str(chosen))
    _pip(folder, "--no-deps", *(str(wheels[name]) for name in sorted(needed & PROJECTS.keys())))
    subprocess.run([UV, "pip", "check", "--quiet", "--python", str(folder / "bin" / "python")], check=True)
    return folder / "bin"


def closure(requirement: str) -> set[str]:
    """The names of all that a requirement asks for, and its own, by the metadata of what is installed here."""
    found: set[tuple[str, str]] = set()
    asked = [Requirement(requirement)]
    while asked:
        one = asked.pop()
        for extra in ("", *one.extras):
            if (key := (canonicalize_name(one.name), extra)) not in found:
                found.add(key)
                asked += _asked_by(one.name, extra)
    return {name for name, _ in found}


def _pip(folder: Path, *words: str) -> None:
    command = [UV, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *words]
    subprocess.run(command, check=True)


def bare_environ(**more: str) -> dict[str, str]:
    """The environment of this process without what would let a program find this tree or our settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERSIST", "PYTHON", "DAGSTER"))}
    return {**kept, **more}


def _asked_by(name: str, extra: str) -> list[Requirement]:
    if name in PROJECTS:  # by its pyproject: what is installed of it may be older
        found = project(name)
        return [*map(Requirement, found["optional-dependencies"][extra] if extra else found["dependencies"])]
    every = map(Requirement, metadata.requires(name) or ())
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]


def python_of(name: str) -> SpecifierSet | None:
    """Which versions of Python an installed package says that it is for."""
    asked = metadata.metadata(name).json.get("requires_python")
    return SpecifierSet(str(asked)) if asked else None
