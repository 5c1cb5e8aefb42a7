"""What this software is made of: build/sbom.json, CycloneDX 1.6, of the pinned requirements. `make sbom` runs it.

    scripts/sbom.py [OUT]

Each package has its version, its hashes, what needs it, in which lists it is pinned, and its licence as far as it is
installed here. `required` is what the library needs alone, `optional` its extras and the pipeline, `excluded` tools and
tests. The same lists in the same environment give the same bytes: there is no time in it, and no address of an index.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
VIA = re.compile(r"^\s+#\s+(?:via\s+)?(.*)$")
LIBRARY, PIPELINE = "persist-lib", "persist-pipeline"
OURS = (LIBRARY, PIPELINE)


@dataclass
class Package:
    """A pinned package: `needed_by` are packages, lists (`-r …`) and our distributions; `lists` where it is pinned."""

    name: str
    version: str
    hashes: set[str] = field(default_factory=set)
    needed_by: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def normal(name: str) -> str:
    """A name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(folder: Path) -> dict[str, Package]:
    """All pins of the lists in a folder, by `name@version`."""
    found: dict[str, Package] = {}
    for file in sorted(folder.glob("*.txt")):
        package: Package | None = None
        for line in file.read_text().splitlines():
            if match := PIN.match(line):
                name = normal(match[1])
                package = found.setdefault(f"{name}@{match[2]}", Package(name, match[2]))
                package.lists.add(file.stem)
            elif package is not None and (match := VIA.match(line)) and match[1] not in ("", "via"):
                by = match[1].split(" (")[0]
                package.needed_by.add(by if by.startswith("-r") else normal(by))
            if package is not None:
                package.hashes |= set(HASH.findall(line))
    return found


def licence_of(name: str) -> str | None:
    """The licence that an installed package says it has: an SPDX expression, or its own words; None if it says none."""
    try:
        said = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    written = said.get_all("License-Expression") or []
    classified = [one.rpartition(" :: ")[2] for one in said.get_all("Classifier") or [] if one.startswith("License")]
    own = [line[:100] for text in said.get_all("License") or [] for line in text.strip().splitlines()[:1]]
    return next(iter((*written, *classified, *own)), None)


def scopes(found: dict[str, Package]) -> dict[str, str]:
    """The scope of each package: what the library's own dependencies lead to, its extras, or neither."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    base = {normal(re.split(r"[<>=!\[; ]", one)[0]) for one in declared}
    scope = {key: "required" for key, one in found.items() if one.name in base}
    optional = {key: "optional" for key, one in found.items() if one.needed_by & set(OURS)}
    _close(scope, found, "required")
    _close(optional, found, "optional")
    return {key: scope.get(key) or optional.get(key) or "excluded" for key in found}


def _close(chosen: dict[str, str], found: dict[str, Package], name: str) -> None:
    """Add what the chosen packages need, and what that needs."""
    while True:
        names = {found[key].name for key in chosen}
        new = {key: name for key, one in found.items() if key not in chosen and one.needed_by & names}
        if not new:
            return
        chosen |= new


def document(found: dict[str, Package]) -> dict[str, Any]:
    """The SBOM."""
    scope = scopes(found)
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    components = [
        {
            "type": "library", "bom-ref": one.purl, "name": one.name, "version": one.version, "purl": one.purl,
            "scope": scope[key], "hashes": [{"alg": "SHA-256", "content": each} for each in sorted(one.hashes)],
            **({"licenses": [{"license": {"name": licence}}]} if (licence := licence_of(one.name)) else {}),
            "properties": [{"name": "persist:pinned-in", "value": each} for each in sorted(one.lists)],
        }
        for key, one in sorted(found.items())
    ]  # fmt: skip
    refs: dict[str, list[str]] = {one.name: [] for one in found.values()}
    for one in found.values():
        refs[one.name].append(one.purl)
    needs: dict[str, set[str]] = {ref: set() for ref in (*OURS, *(one.purl for one in found.values()))}
    for one in found.values():
        for by in one.needed_by:
            for ref in [by] if by in OURS else refs.get(by, ()):
                needs[ref].add(one.purl)
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"type": "library", "bom-ref": LIBRARY, "name": LIBRARY, "version": ours["version"]}},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(of)} for ref, of in sorted(needs.items())],
    }  # fmt: skip
    return {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(body, sort_keys=True))}", **body}


def main(words: list[str]) -> int:
    """Write the SBOM."""
    out = Path(words[0]) if words else ROOT / "build" / "sbom.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    made = document(packages(ROOT / "requirements"))
    out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{out}: {len(made['components'])} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
