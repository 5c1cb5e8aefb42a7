"""The scheme `memory:`. A named location lives as long as the process, an unnamed one as long as it is open."""

from __future__ import annotations

import itertools
import threading
from weakref import WeakValueDictionary

from persist_lib.errors import NotFound
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.memory.stores import MemoryBlob, MemoryConsensus
from persist_lib.location.scheme import Opening, Scheme, unchanged

UNNAMED = "memory:#"
"""The prefix of generated names. The rest is random, so that an unpickled URL never opens an unrelated location."""

_lock = threading.Lock()
_blobs: WeakValueDictionary[str, MemoryBlob] = WeakValueDictionary()
_consensuses: WeakValueDictionary[str, MemoryConsensus] = WeakValueDictionary()
_kept: list[MemoryBlob | MemoryConsensus] = []
_minted: set[str] = set()


def _named(url: str, opening: Opening) -> str:
    if url != "memory:":
        return url
    drawn = f"{UNNAMED}{opening.runtime.entropy():016x}"
    with _lock:
        # SUBTLE: two runtimes with the same seed draw the same name. Exactly one number is drawn in any case, so that
        # other open locations do not change what a simulation draws next.
        names = itertools.chain([drawn], (f"{drawn}.{n}" for n in itertools.count(2)))
        minted = next(name for name in names if name not in _minted and name not in _blobs and name not in _consensuses)
        _minted.add(minted)
    return minted


def _open_blob(url: str, opening: Opening) -> Blob:
    with _lock:
        blob = _blobs.get(url)
        if blob is None:
            _check_may_create(url, opening)
            blob = _blobs[url] = MemoryBlob()
            _keep_if_named(url, blob)
        return blob


def _open_consensus(url: str, opening: Opening) -> Consensus:
    with _lock:
        consensus = _consensuses.get(url)
        if consensus is None:
            _check_may_create(url, opening)
            consensus = _consensuses[url] = MemoryConsensus(opening.clock)
            _keep_if_named(url, consensus)
            _minted.discard(url)
        return consensus


def _check_may_create(url: str, opening: Opening) -> None:
    if not opening.create and url not in _minted:
        raise NotFound(
            f"there is no location {url} in this process; memory is not shared among processes. Open it "
            "with create=True",
            url=url,
        )


def _keep_if_named(url: str, store: MemoryBlob | MemoryConsensus) -> None:
    if not url.startswith(UNNAMED):
        _kept.append(store)


SCHEME = Scheme(_open_blob, _open_consensus, unchanged, named=_named)
