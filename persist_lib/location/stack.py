"""The one builder of what every store is wrapped in: it is counted, then what is safe to try again is tried again."""

from __future__ import annotations

from dataclasses import replace

from persist_lib.config import Config
from persist_lib.core.cost import Prices
from persist_lib.location.open import Location, open_location, scheme_of
from persist_lib.location.wrap.around import Operation
from persist_lib.location.wrap.metering import Meter, MeteredBlob, MeteredConsensus
from persist_lib.location.wrap.retrying import RetryingBlob, RetryingConsensus
from persist_lib.runtime.ambient import Runtime


def metered(location: Location, meter: Meter, prices: Prices | None = None) -> Location:
    """The same location, counted by `meter`; `prices` where they are not those that the schemes of its URLs have."""
    blob, consensus = scheme_of(location.url), scheme_of(location.consensus_url)
    return replace(
        location,
        blob=MeteredBlob(location.blob, meter, prices or blob.prices, by_request=blob.tells_requests),
        consensus=MeteredConsensus(
            location.consensus, meter, prices or consensus.prices, by_request=consensus.tells_requests
        ),
    )


def open_metered(
    url: str, consensus: str | None, meter: Meter, prices: Prices | None = None, *, create: bool, read_only: bool
) -> Location:
    """Open a location, with the requests that this takes counted as `open`. The location is not metered yet."""
    scheme = scheme_of(url)
    if not scheme.tells_requests and consensus is not None:
        scheme = scheme_of(consensus, "consensus")
    return meter.measure(
        Operation("open", url), lambda: open_location(url, consensus, create=create, read_only=read_only),
        prices or scheme.prices, by_request=scheme.tells_requests,
    )  # fmt: skip


def retrying(location: Location, config: Config, runtime: Runtime) -> tuple[RetryingBlob, RetryingConsensus]:
    """Both halves of `location`, trying again for `config.timeout_s` or until the deadline (see `deadline.within`)."""
    return (
        RetryingBlob(location.blob, runtime, config.timeout_s),
        RetryingConsensus(location.consensus, runtime, config.timeout_s),
    )
