"""The mutants of a file: mutmut's operators at each node of each function's body, and one draw of them by a seed.

It needs libcst and mutmut, which `make mutants` puts where only this process sees them. What is not mutated: text (most
of it is what a message says), what an error is raised with, annotations, decorators and defaults, and statements
outside functions, which have run before a mutant is planted.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = [(kind, operator) for kind, operator in mutation_operators if operator is not operator_string]
KINDS = (
    *(kind for kind, _ in OPERATORS if kind is not cst.CSTNode),
    cst.Is, cst.IsNot, cst.In, cst.NotIn, cst.Break, cst.Continue,
    cst.BinaryOperation, cst.BooleanOperation, cst.ComparisonTarget,
)  # fmt: skip
"""What operators apply to: those for any node look for the kinds of the last two lines."""
TEXTS = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function.

    `was` and `becomes` are the lines that change, stripped, and `lines` the numbers of those that run what is changed.
    """

    file: str
    function: str
    was: str
    becomes: str
    source: str
    lines: range

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is called, wherever its lines move to."""
        return self.file, self.function, self.was, self.becomes

    def __str__(self) -> str:
        return f"{self.file}:{self.lines.start} {self.function}\n    - {self.was}\n    + {self.becomes}"


@dataclass(frozen=True, slots=True)
class _Site:
    """A node that operators apply to, and where it stands."""

    node: cst.CSTNode
    function: str
    text: str
    lines: range


class _Sites(cst.CSTVisitor):  # type: ignore[misc]
    """Collects the nodes of function bodies."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source.splitlines()
        self.found: list[_Site] = []
        self._names: list[str] = []
        self._depth = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Enter a node, but not what is left as it is."""
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Parameters, cst.Import, cst.ImportFrom, *TEXTS)):
            return False
        if isinstance(node, cst.Raise) and isinstance(node.exc, cst.Call):
            return False
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._names.append(node.name.value)
            self._depth += isinstance(node, cst.FunctionDef)
        elif self._depth and isinstance(node, KINDS) and not _is_plain(node):
            where = self.get_metadata(PositionProvider, node, None)
            if where is not None:
                last = where.start.line if isinstance(node, cst.Match) else where.end.line
                text = "\n".join(self._source[where.start.line - 1 : where.end.line])[where.start.column :]
                self.found.append(_Site(node, ".".join(self._names), text, range(where.start.line, last + 1)))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Leave it."""
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self._names.pop()
            self._depth -= isinstance(original_node, cst.FunctionDef)


def _is_plain(node: cst.CSTNode) -> bool:
    """Whether it is a name that no operator changes."""
    return isinstance(node, cst.Name) and node.value not in {"True", "False"}


def _changed(before: list[str], after: list[str]) -> tuple[str, str]:
    """The lines that two texts differ in, stripped and joined."""
    sides: tuple[list[str], list[str]] = ([], [])
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            sides[0].extend(line.strip() for line in before[a:b])
            sides[1].extend(line.strip() for line in after[c:d])
    return " ".join(sides[0]), " ".join(sides[1])


def _drawn(seed: str, *words: object) -> bytes:
    return hashlib.sha256(repr((seed, *words)).encode()).digest()


def sample(package: str, number: int, seed: str) -> list[Mutant]:
    """So many mutants of a package of the library, each of another node.

    The order of all nodes is decided by the seed, the function and the text of the node: a change of one function does
    not change which others are drawn.
    """
    ranked: list[tuple[bytes, str, cst.Module, _Site]] = []
    for path in sorted((ROOT / "persist_lib" / package).rglob("*.py")):
        file = str(path.relative_to(ROOT / "persist_lib"))
        wrapper = MetadataWrapper(cst.parse_module(path.read_text()), unsafe_skip_copy=True)
        sites = _Sites(wrapper.module.code)
        wrapper.visit(sites)
        times: Counter[tuple[str, str]] = Counter()
        for site in sites.found:
            times[site.function, site.text] += 1
            rank = _drawn(seed, file, site.function, site.text, times[site.function, site.text])
            ranked.append((rank, file, wrapper.module, site))
    found: dict[tuple[str, str, str, str], Mutant] = {}
    for rank, file, module, site in sorted(ranked, key=lambda one: one[0]):
        if len(found) == number:
            break
        made = next((one for one in _variants(file, module, site, rank) if one.key not in found), None)
        if made is not None:
            found[made.key] = made
    return list(found.values())


def _variants(file: str, module: cst.Module, site: _Site, rank: bytes) -> Iterator[Mutant]:
    """What operators make of one node, where Python still takes it, in an order that its rank decides."""
    nodes = [node for kind, operator in OPERATORS if isinstance(site.node, kind) for node in operator(site.node)]
    random.Random(rank).shuffle(nodes)
    for node in nodes:
        source = module.deep_replace(site.node, node).code
        was, becomes = _changed(module.code.splitlines(), source.splitlines())
        try:
            compile(source, file, "exec")
        except SyntaxError:
            continue
        if was != becomes:
            yield Mutant(file, site.function, was, becomes, source, site.lines)
