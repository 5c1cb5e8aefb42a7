"""The one builder of the wrappers of every location: counting, then retrying where that is safe, then caching.

The client, the workers that read splits or run tasks in other processes, and the process that keeps leases up all use
it. So each of them counts and retries an operation in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from persist_lib.config import MIB, CacheConfig, Config
from persist_lib.core.cost import Prices
from persist_lib.location.api import Blob
from persist_lib.location.open import Location, Place, open_location, scheme_of, url_of
from persist_lib.location.wrap.around import Operation
from persist_lib.location.wrap.chunk_cache import Cache, CachingBlob
from persist_lib.location.wrap.deadline import RetryingBlob, RetryingConsensus
from persist_lib.location.wrap.metering import Meter, MeteredBlob, MeteredConsensus
from persist_lib.runtime.ambient import Runtime

LOOKUPS = CacheConfig(memory_bytes=32 * MIB)
"""What a client without a cache keeps of what its writers looked into, in objects of up to an eighth of it."""


@dataclass(frozen=True, slots=True)
class Stack:
    """An open location and its wrappers.

    `blob` and `consensus` count each attempt in `meter` and retry until the caller's deadline, or for
    `config.timeout_s` seconds if there is none. `reads` is `blob`, behind `cache` if the config has one. Use it
    only for reads that may be answered from a cache by digest. `lookups` is the same for those of writers, which read
    most of what they read before again: without a configured cache, small objects stay in memory.
    """

    location: Location
    meter: Meter
    blob: RetryingBlob
    consensus: RetryingConsensus
    reads: Blob
    lookups: Blob
    cache: Cache | None


def open_stack(
    url: Place,
    consensus: Place | None,
    config: Config,
    runtime: Runtime,
    *,
    prices: Prices | None = None,
    create: bool = False,
    read_only: bool = False,
) -> Stack:
    """Open a location and wrap it. The requests of opening are counted as `open`.

    A failed opening is not retried, but a shard server that does not answer yet is asked again.
    """
    meter = Meter(runtime.monotonic)
    url, consensus = url_of(url), None if consensus is None else url_of(consensus, "consensus")
    scheme = scheme_of(url)
    if not scheme.tells_requests and consensus is not None:
        scheme = scheme_of(consensus, "consensus")
    location = meter.measure(
        Operation("open", url),
        lambda: open_location(
            url, consensus, create=create, read_only=read_only, runtime=runtime, timeout_s=config.timeout_s
        ),
        prices or scheme.prices, by_request=scheme.tells_requests,
    )  # fmt: skip
    return wrap(location, config, runtime, meter=meter, prices=prices)


def wrap(
    location: Location, config: Config, runtime: Runtime, *, meter: Meter | None = None, prices: Prices | None = None
) -> Stack:
    """Wrap an open location. Its operations are counted in `meter` (None: a new one).

    `prices` replace those of the schemes of its URLs.
    """
    meter = meter or Meter(runtime.monotonic)
    counted = metered(location, meter, prices)
    blob = RetryingBlob(counted.blob, runtime, config.timeout_s)
    consensus = RetryingConsensus(counted.consensus, runtime, config.timeout_s)
    if config.cache is None:
        recent = Cache(LOOKUPS, location.url, runtime, most=LOOKUPS.memory_bytes // 8)
        return Stack(location, meter, blob, consensus, blob, CachingBlob(blob, recent), None)
    reads = CachingBlob(blob, cache := Cache(config.cache, location.url, runtime))
    return Stack(location, meter, blob, consensus, reads, reads, cache)


def metered(location: Location, meter: Meter, prices: Prices | None = None) -> Location:
    """Return the same location, counted by `meter`. `prices` replace those of the schemes of its URLs."""
    blob, consensus = scheme_of(location.url), scheme_of(location.consensus_url)
    return replace(
        location,
        blob=MeteredBlob(location.blob, meter, prices or blob.prices, by_request=blob.tells_requests),
        consensus=MeteredConsensus(
            location.consensus, meter, prices or consensus.prices, by_request=consensus.tells_requests
        ),
    )
