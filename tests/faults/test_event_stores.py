"""Writing events while each request to the server is broken once: what was acknowledged is there, and nothing twice.

PERSIST_FAULTS=all breaks each request in every way; else some are broken in some ways.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial

import pytest

from persist_lib.errors import PersistError
from persist_lib.events import open_store
from tests import servers
from tests.eventlogs import contents
from tests.faults.proxy import Fault, Proxy

IS_ALL = os.environ.get("PERSIST_FAULTS") == "all"
FAULTS = [fault for fault in Fault if IS_ALL or fault is Fault.DROP_REPLY]
_names = itertools.count()


def postgres(port: int, name: str) -> str:
    return f"pg:{servers.postgres_at(port)}".replace(":", "\\:").replace("\\:", ":", 1) + f":{name}"


def cloud(scheme: str, port: int, name: str) -> str:
    servers.use_test_credentials()
    server = servers.STORES[scheme]()
    url = server.location(name, scheme).replace(f":{server.port}", f":{port}")
    return f"{scheme}:" + url.replace(":", "\\:")


KINDS: dict[str, tuple[Callable[[], int], Callable[[int, str], str]]] = {
    "pg": (servers.postgres_port, postgres),
    **{
        scheme: (lambda scheme=scheme: servers.STORES[scheme]().port, partial(cloud, scheme))  # type: ignore[misc]
        for scheme in servers.STORES
    },
}
CASES = [
    (kind, fault) for kind in KINDS for fault in FAULTS if fault is not Fault.DUPLICATE or kind not in ("pg", "gs")
]
"""TCP delivers no statement twice, and nothing between a writer and PostgreSQL repeats one; proxies of HTTP do.
An answer of GCS does not say which request it is to."""


@pytest.mark.slow
@pytest.mark.timeout(0 if IS_ALL else 600)
@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_no_fault_loses_or_doubles_an_acknowledged_event(kind: str, fault: Fault) -> None:
    port_of, place_of = KINDS[kind]
    port = port_of()
    payloads = [b"%d" % number * 30 for number in range(4)]
    with Proxy(port) as proxy:
        for strike in itertools.count(1, 1 if IS_ALL else 3):
            name = f"faults{os.getpid()}x{next(_names)}"
            proxy.at(strike, fault)
            acknowledged: list[bytes] = []
            try:
                with open_store(place_of(proxy.port, name) + ":limit=150").writer() as writer:
                    for payload in payloads:
                        writer.write(writer.accepted + 1, payload).result(60)
                        acknowledged.append(payload)
                    writer.write_mark("m", b"value").result(60)
            except PersistError:
                pass
            is_done = proxy.struck == 0
            proxy.at(1, None)
            direct = open_store(place_of(port, name) + ":limit=150")
            with direct.writer() as writer:
                found = contents(direct)
                assert found == payloads[: len(found)], strike
                assert len(acknowledged) <= len(found) <= len(acknowledged) + 1, strike
                writer.write(writer.last + 1, b"afterwards").result(60)
            assert contents(direct) == [*found, b"afterwards"]
            if is_done:
                assert acknowledged == payloads
                assert strike > 6
                return
