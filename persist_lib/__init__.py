"""Persist: durable, definite, time-varying collections on plain object storage.

import persist_lib as persist

client = persist.open("file:./data")
orders = persist.Schema(key={"order_id": "int64"}, value={"state": "string", "cents": "int64"})
write, read = client.open_shard("orders", orders)
write.compare_and_append([{"order_id": 1, "state": "placed", "cents": 999}], expected_upper=0, new_upper=1)
read.snapshot(as_of=0).to_arrow()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persist_lib import public
    from persist_lib.errors import *  # noqa: F403 - what `__getattr__` finds
    from persist_lib.public import *  # noqa: F403

    __version__: str
    __all__: list[str] = []
    __all__ += public.__all__


def __getattr__(name: str) -> object:
    """Return a name of `persist_lib.public`. That module is loaded when the first of its names is used.

    Loading Arrow takes a second. `persist --help` and shell completion import this package and do not need Arrow.
    """
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - it takes a while, and few ask

        return version("persist-lib")
    public = import_module("persist_lib.public")
    if name == "__all__" or name in getattr(public, "__all__", ()):
        globals()[name] = getattr(public, name)
    if name in globals():  # or it is a module of the library, which is loaded by now
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(import_module("persist_lib.public"))["__all__"]})
