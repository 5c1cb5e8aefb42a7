"""Each distribution with each of its extras, installed from its wheel into an environment with nothing else, is used.

The extras are those of the metadata. A new one fails here until `uses/` has a program for it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from persist_lib.testing.servers import AZURE, CREDENTIALS
from tests import built, servers

USES = Path(__file__).parent / "uses"
EXTRAS = [
    (name, extra) for name in built.PROJECTS for extra in ("", *built.project(name).get("optional-dependencies", {}))
]
ON_SPARK = {("persist-lib", "spark"), ("persist-lib", "spark-connect"), ("persist-pipeline", "")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def use_of(distribution: str, extra: str) -> Path:
    """The program that uses an extra, or the distribution alone."""
    name = {"persist-lib": "library", "persist-pipeline": "pipeline"}[distribution]
    return USES / (f"{name}_{extra}.py" if extra else f"{name}.py")


STORES = {"s3": "s3", "gcs": "gs", "azure": "az"}
"""Extras that are tried on a server of their own, and the schemes of their locations."""


def marked(distribution: str, extra: str) -> object:
    kinds = [pytest.mark.spark] if (distribution, extra) in ON_SPARK else []
    return pytest.param(distribution, extra, marks=kinds, id=f"{distribution}[{extra}]" if extra else distribution)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Only servers have to be running; they are the test environment's."""
    name = os.urandom(8).hex()
    return built.bare_environ(
        **CREDENTIALS,
        **AZURE,
        USE_POSTGRES=servers.postgres_at(persist_schema=f"t{name}"),
        DAGSTER_HOME=str(tmp_path),
    )


@pytest.mark.parametrize(("distribution", "extra"), [marked(*one) for one in EXTRAS])
def test_it_works_with_nothing_else_installed(
    distribution: str, extra: str, wheels: built.Wheels, environ: dict[str, str], tmp_path: Path
) -> None:
    use = use_of(distribution, extra)
    assert use.exists(), f"{distribution} has an extra {extra!r} that nothing uses: write {use.relative_to(built.ROOT)}"
    if extra in STORES:
        environ[f"USE_{extra.upper()}"] = servers.store_url(f"{STORES[extra]}+cas")
    programs = built.install_with_pins(tmp_path / "env", wheels, distribution, extra)
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [str(programs / "python"), "-I", str(use), str(tmp_path / "work")],
        env={**environ, "PATH": f"{programs}:{environ['PATH']}"}, cwd=tmp_path / "work", capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]


def test_every_program_here_is_for_an_extra_that_there_is() -> None:
    assert {path.name for path in USES.glob("*.py")} == {use_of(*one).name for one in EXTRAS}
