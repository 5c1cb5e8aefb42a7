"""Every request of an append, of maintenance and of a read broken in every way: nothing lost, nothing doubled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import check_world, contents_of
from tests import servers
from tests.faults.proxy import Fault, Proxy

pytestmark = pytest.mark.slow
servers.use_test_credentials()
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
TIMEOUT_S = 1.5
SLACK_S = 15.0
"""Beyond the caller's timeout: making a connection has a shortest timeout of its own, and this machine is busy."""
CONFIG = persist.Config(inline_bytes=0, timeout_s=TIMEOUT_S, rollup_every=4)
EAGER = persist.Policy(weight=1e9)
"""Everything into one: each pass compacts, and collects what the pass before has replaced."""


BLACK_HOLES = (Fault.BLACK_HOLE, Fault.BLACK_HOLE_REPLY)
"""Each takes the whole timeout. PERSIST_FAULTS=all has them at each request of everything, and takes minutes."""
CASES = [
    (server, fault)
    for server in (*servers.STORES, "postgresql")
    for fault in Fault
    if (server, fault) != ("gs", Fault.DUPLICATE)
]
"""An answer of GCS does not say which request it is to. One too many, if it comes late, is damage by its digest."""
HAS_TIME = os.environ.get("PERSIST_FAULTS") == "all"
PATIENT_S = 60.0
"""For what is no subject of the test: the machine is busy, and the first call of a process has a lot to import."""


def after(index: int, fault: Fault) -> int:
    """The request to break next: each; of the black holes some, unless there is time."""
    return index + (4 if fault in BLACK_HOLES and not HAS_TIME else 1)


class Place(NamedTuple):
    """A location, directly and through the proxies of its two servers."""

    direct: tuple[str, str]
    through: tuple[str, str]
    proxies: dict[str, Proxy]


@pytest.fixture(scope="module")
def proxy_of() -> Iterator[Callable[[str], Proxy]]:
    with ExitStack() as stack:
        made: dict[str, Proxy] = {}

        def proxy(server: str) -> Proxy:
            if server not in made:
                port = servers.postgres_port() if server == "postgresql" else servers.STORES[server]().port
                made[server] = stack.enter_context(Proxy(port))
            return made[server]

        yield proxy


@pytest.fixture
def place(proxy_of: Callable[[str], Proxy], server: str) -> Iterator[Place]:
    """Blobs on the server that breaks; if that is the database, on S3."""
    name, scheme = os.urandom(8).hex(), "s3" if server == "postgresql" else server
    store, proxies = servers.STORES[scheme](), {each: proxy_of(each) for each in (scheme, "postgresql")}

    def urls(port: int, postgres: int) -> tuple[str, str]:
        blobs = store.location(name).replace(f":{store.port}", f":{port}")
        return blobs, servers.postgres_at(postgres, persist_schema=f"t{name}")

    direct = urls(store.port, servers.postgres_port())
    through = urls(proxies[scheme].port, proxies["postgresql"].port)
    for proxy in proxies.values():
        proxy.at(0, None)
    yield Place(direct, through, proxies)
    for proxy in proxies.values():
        proxy.at(0, None)


def open_quietly(urls: tuple[str, str], timeout_s: float = TIMEOUT_S) -> persist.Client:
    config = CONFIG.model_copy(update={"timeout_s": timeout_s})
    return persist.open(*urls, config=config, runtime=Runtime(background=False))


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": id_, "word": "w"} for id_ in ids]


def contents(client: persist.Client, as_of: int) -> dict[Any, int]:
    with client.open_reader("s") as read:
        return dict(contents_of(read.snapshot(as_of, diff=True).to_arrow()))


def undisturbed_contents(client: persist.Client, as_of: int) -> dict[Any, int]:
    """What it reads when nothing is broken any more, however busy the machine is."""
    patience = Runtime().deadline(PATIENT_S)
    while True:
        try:
            return contents(client, as_of)
        except Determinate:
            if patience.has_passed():
                raise


@pytest.mark.parametrize(("server", "fault"), CASES)
def test_an_append_broken_at_any_request_is_there_once_or_not_and_decided(
    place: Place, server: str, fault: Fault
) -> None:
    proxy = place.proxies[server]
    with open_quietly(place.direct, PATIENT_S) as witness, open_quietly(place.through) as client:
        write = client.open_writer("s", SCHEMA)
        write.compare_and_append(rows(0), 0, 1, timeout=PATIENT_S)
        upper, index, acknowledged = 1, 1, 1
        while True:
            proxy.at(index, fault)
            token, started = os.urandom(16), time.monotonic()
            try:
                write.compare_and_append(rows(upper), upper, upper + 1, timeout=TIMEOUT_S, token=token)
                outcome = "acknowledged"
            except Indeterminate:
                outcome = "unknown"
            except Determinate:
                outcome = "did not happen"
            assert time.monotonic() - started < TIMEOUT_S * 2 + SLACK_S
            struck = proxy.struck
            proxy.at(0, None)
            there = witness.machine("s").fetch().state.upper.time == upper + 1
            assert outcome == "unknown" or there == (outcome == "acknowledged")
            # Repeated with its token it is decided, whatever it was.
            write.compare_and_append(rows(upper), upper, upper + 1, token=token, timeout=PATIENT_S)
            acknowledged += 1
            upper += 1
            assert contents(witness, upper - 1) == {(n, "w"): 1 for n in range(acknowledged)}
            if not struck and outcome == "acknowledged":
                break
            index += bool(struck)  # else the machine was too busy for it to come that far in time: once more
        assert index > 1
        check_world(witness, "s")


@pytest.mark.timeout(600 if HAS_TIME else 120)
@pytest.mark.parametrize(("server", "fault"), [case for case in CASES if case[1] is not Fault.DELAY])
def test_maintenance_broken_at_any_request_deletes_nothing_that_is_alive(
    place: Place, server: str, fault: Fault
) -> None:
    proxy = place.proxies[server]
    with open_quietly(place.direct, PATIENT_S) as witness, open_quietly(place.through) as client:
        write = witness.open_writer("s", SCHEMA)
        upper, index = 0, 1
        while True:
            for _ in range(4):
                write.compare_and_append(rows(upper), upper, upper + 1, timeout=PATIENT_S)
                upper += 1
            proxy.at(index, fault)
            is_through = False
            with suppress(Determinate, Indeterminate):
                client.maintain("s", policy=EAGER)
                is_through = True
            struck = proxy.struck
            proxy.at(0, None)
            assert contents(witness, upper - 1) == {(n, "w"): 1 for n in range(upper)}
            if not struck and is_through:
                break
            index = after(index, fault) if struck else index
        assert index > 10
        for _ in range(3):
            witness.maintain("s")
        assert contents(witness, upper - 1) == {(n, "w"): 1 for n in range(upper)}
        check_world(witness, "s")


@pytest.mark.parametrize(("server", "fault"), CASES)
def test_a_snapshot_broken_at_any_request_is_whole_or_an_error(place: Place, server: str, fault: Fault) -> None:
    proxy = place.proxies[server]
    with open_quietly(place.direct, PATIENT_S) as witness:
        write = witness.open_writer("s", SCHEMA)
        for n in range(4):
            write.compare_and_append(rows(n), n, n + 1)
    index = 1
    while True:
        with open_quietly(place.through) as client:
            proxy.at(index, fault)
            is_through = False
            with suppress(Determinate, Indeterminate):
                assert contents(client, 3) == {(n, "w"): 1 for n in range(4)}
                is_through = True
            struck = proxy.struck
            proxy.at(0, None)
            assert undisturbed_contents(client, 3) == {(n, "w"): 1 for n in range(4)}
        if not struck and is_through:
            return
        index = after(index, fault) if struck else index
