"""The kinds of stores there are: those of this library, and those of other packages (entry points `persist.events`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import NamedTuple

from persist_lib.arguments import did_you_mean, shown
from persist_lib.errors import InvalidUsage
from persist_lib.events.api import Kind

ENTRY_POINTS = "persist.events"
STORES = "persist_lib.events.stores"


class _BuiltIn(NamedTuple):
    """A kind of this library: its module, which is loaded when it is used, the extra it needs, and its options."""

    module: str
    extra: str | None
    options: str


BUILT_IN: Mapping[str, _BuiltIn] = {
    "disk": _BuiltIn("disk", None, "a directory (./events)"),
    "sqlt": _BuiltIn("sqlt", None, "a file (./events.sqlite)"),
    "lmdb": _BuiltIn("lmdb", "lmdb", "a directory (./events.lmdb), map=BYTES of address space"),
    "rock": _BuiltIn("rock", "rocksdb", "a directory (./events.rock)"),
    "pg": _BuiltIn("pg", "postgres", r"a URL of PostgreSQL with \: for each colon, and a name (events)"),
    "s3": _BuiltIn("s3", "s3", r"a URL of S3 with \: for each colon"),
    "persist": _BuiltIn("persist", None, r"a location's URL with \: for each colon, a shard (events), consensus=URL"),
}


def known_kinds() -> dict[str, str]:
    """Each kind that can be named, and what its options are."""
    own = {name: built_in.options for name, built_in in BUILT_IN.items()}
    return {point.name: f"of {point.value}" for point in entry_points(group=ENTRY_POINTS)} | own


def load_kind(name: str) -> Kind:
    """The kind of this name. Raises InvalidUsage: for an unknown one, or one whose extra is not installed."""
    if (built_in := BUILT_IN.get(name)) is not None:
        return _load(name, built_in)
    added = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in added:
        kinds = ", ".join(_listed(kind) for kind in sorted({*BUILT_IN, *added}))
        raise InvalidUsage(
            f"there is no kind of event store called {name!r}. {did_you_mean(name, [*BUILT_IN, *added])}There are: "
            f"{kinds}. Others are added by packages with an entry point in the group {ENTRY_POINTS!r}",
            kind=name,
        )
    kind = added[name].load()
    if not isinstance(kind, Kind):
        raise InvalidUsage(f"the entry point of {name} is no persist_lib.events.Kind: got {shown(kind)}", kind=name)
    return kind


def _listed(name: str) -> str:
    extra = BUILT_IN[name].extra if name in BUILT_IN else None
    return name if extra is None else f"{name} (pip install 'persist-lib[{extra}]')"


def _load(name: str, built_in: _BuiltIn) -> Kind:
    try:
        module = import_module(f"{STORES}.{built_in.module}")
    except ModuleNotFoundError as error:
        if built_in.extra is None or error.name is None or error.name.startswith("persist_lib"):
            raise
        raise InvalidUsage(
            f"event stores of the kind {name} need the package {error.name}, which is not installed: pip install "
            f"'persist-lib[{built_in.extra}]'",
            extra=built_in.extra,
        ) from error
    kind: Kind = module.KIND
    return kind
