"""What the software is made of, as far as it can be looked at offline: pins, hashes, reasons and licences."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SBOM: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "sbom.py"))
KNOWN = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "MPL", "Mozilla", "ISC", "Unlicense", "HPND")
"""Of permissive licences, how they are called; MPL asks for its own files alone."""
OTHERS = {"any-OSI", "Zlib", "0BSD", "CC0-1.0", "PostgreSQL", "LGPL", "GNU Lesser", "OLDAP"}
"""What is linked as it is, and asks for nothing of those who use it."""


def test_every_package_has_hashes_a_reason_and_a_licence() -> None:
    found = SBOM["packages"](ROOT / "requirements")
    scopes = SBOM["scopes"](found)
    assert len(found) > 300
    assert [key for key, one in found.items() if not one.hashes] == []
    # uv itself writes for each pin what asked for it, so a pin without that is one that was added by hand.
    assert [key for key, one in found.items() if not one.needed_by] == []
    for key, one in found.items():
        if scopes[key] != "excluded" and _is_installed(one.name):
            licence = SBOM["licence_of"](one.name)
            assert licence, f"{key} says no licence"
            assert any(known in licence for known in (*KNOWN, *OTHERS)), f"{key} has the licence {licence!r}"


def test_what_the_library_needs_alone_is_required_and_no_tool_is() -> None:
    found = SBOM["packages"](ROOT / "requirements")
    each = SBOM["scopes"](found)
    # A tool may have another version of a package in a list of its own: that of `dev` is what the software is made of.
    scopes = {found[key].name: each[key] for key in sorted(found, key=lambda key: "dev" in found[key].lists)}
    assert {scopes[name] for name in ("pyarrow", "msgspec", "pydantic-core", "rich", "apsw")} == {"required"}
    assert {scopes[name] for name in ("boto3", "pyspark", "dagster", "fastavro", "grpcio")} == {"optional"}
    assert {scopes[name] for name in ("pytest", "mypy", "atheris", "ruff", "apache-airflow")} == {"excluded"}


def test_it_is_the_same_each_time_and_names_no_index(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert SBOM["main"]([str(tmp_path / name)]) == 0
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert "://" not in text
    made = json.loads(text)
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    refs = {one["bom-ref"] for one in made["components"]} | {"persist-lib", "persist-pipeline"}
    assert {one["ref"] for one in made["dependencies"]} <= refs
    assert all(each in refs for one in made["dependencies"] for each in one["dependsOn"])
    assert len(refs) == len(made["components"]) + 2


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
