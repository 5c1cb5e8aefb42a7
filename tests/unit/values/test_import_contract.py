"""The import contract fails on a wrong import in every layer, and on a module that it does not name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter import configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERED = [contract for contract in OPTIONS["contracts"] if contract["type"] == "layers"]
FORBIDDEN = [contract for contract in OPTIONS["contracts"] if contract["type"] == "forbidden"]
configuration.configure()
CHECKED = {"layers": LayersContract, "forbidden": ForbiddenContract}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OPTIONS["root_packages"], include_external_packages=True)


def is_kept(contract: dict[str, Any], graph: grimp.ImportGraph) -> bool:
    words = {key: str(value) if isinstance(value, bool) else value for key, value in contract.items()}
    options = {key: value for key, value in words.items() if key not in {"name", "type"}}
    session = {"root_packages": OPTIONS["root_packages"], "include_external_packages": "true"}
    checked = CHECKED[contract["type"]](contract["name"], session, options)
    return bool(checked.check(graph=graph, verbose=False).kept)


def rooms(contract: dict[str, Any]) -> list[list[str]]:
    """The modules of each layer that exist, from the top down, with their container."""
    container = f"{contract['containers'][0]}." if "containers" in contract else ""
    layers = [layer.replace(":", "|").split("|") for layer in contract["layers"]]
    named = [[container + name.strip() for name in layer if "(" not in name] for layer in layers]
    return [layer for layer in named if layer]


def wrong_imports() -> Iterator[Any]:
    """One from each layer to the one above it, and one between two that may not know each other."""
    for contract in LAYERED:
        for above, below in pairwise(rooms(contract)):
            yield pytest.param(contract, below[0], above[-1], id=f"{below[0]} imports {above[-1]}")
        for layer in contract["layers"]:
            if "|" in layer and "(" not in layer:
                one, other, *_ = (f"{contract['containers'][0]}.{name.strip()}" for name in layer.split("|"))
                yield pytest.param(contract, one, other, id=f"{one} imports {other}")


@pytest.mark.parametrize("contract", OPTIONS["contracts"], ids=lambda contract: contract["name"])
def test_the_contract_is_kept(contract: dict[str, Any], graph: grimp.ImportGraph) -> None:
    assert is_kept(contract, graph)


@pytest.mark.parametrize(("contract", "importer", "imported"), [*wrong_imports()])
def test_it_fails_on_a_wrong_import_in_every_layer(
    contract: dict[str, Any], importer: str, imported: str, graph: grimp.ImportGraph
) -> None:
    graph.add_import(importer=importer, imported=imported)
    try:
        assert not is_kept(contract, graph)
    finally:
        graph.remove_import(importer=importer, imported=imported)


@pytest.mark.parametrize("contract", [c for c in LAYERED if "containers" in c], ids=lambda contract: contract["name"])
def test_it_fails_on_a_module_that_it_does_not_name(contract: dict[str, Any], graph: grimp.ImportGraph) -> None:
    stranger = f"{contract['containers'][0]}.stranger"
    graph.add_module(stranger)
    try:
        assert not is_kept(contract, graph)
    finally:
        graph.remove_module(stranger)


@pytest.mark.parametrize("contract", FORBIDDEN, ids=lambda contract: contract["name"])
def test_it_fails_on_what_is_forbidden(contract: dict[str, Any], graph: grimp.ImportGraph) -> None:
    for source in contract["source_modules"]:
        for forbidden in contract["forbidden_modules"]:
            if source == forbidden.partition(".")[0]:
                continue
            is_new = forbidden not in graph.modules
            if is_new:
                graph.add_module(forbidden, is_squashed=True)
            graph.add_import(importer=source, imported=forbidden)
            try:
                assert not is_kept(contract, graph), f"{source} imports {forbidden}"
            finally:
                graph.remove_import(importer=source, imported=forbidden)
                if is_new:
                    graph.remove_module(forbidden)
